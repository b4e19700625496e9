"""Files that are written whole or not at all, by all who write such: nothing else is left for ever.

A kill is played: the draft gets no name, nobody removes it, and its lock ends.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import pytest
from identity_kit import identity
from trainer_kit import tiny_settings

from bootstrap.seeds import PeerCache
from gossip.pairs.account import Balance, BookFile
from node.data.folder import INDEX
from node.data.prepare import prepare
from node.data.tokenizer import ByteTokenizer
from node.island.fitting import Fitting
from node.monitor.lines import replace_lines
from node.statedir import StateDir
from protocols.addresses import parse_address
from protocols.files import READABLE, replacing, sync


class Killed(BaseException):
    """The process ends here."""


def remember_peers(folder: Path) -> None:
    PeerCache(folder / "peers.json").remember([parse_address("192.0.2.1:4390")])


def note_a_micro_batch(folder: Path) -> None:
    settings = tiny_settings(folder.parent / "run")
    Fitting(folder / "micro-batch.json", 0, 1 << 30).stepped(settings, 1)


def write_tokens(folder: Path) -> None:
    (folder.parent / "text.txt").write_text("some text\n\nand more\n")
    prepare([str(folder.parent / "text.txt")], folder, ByteTokenizer())


WRITERS: dict[str, Callable[[Path], object]] = {
    "api.json": lambda folder: StateDir(folder).publish_api("127.0.0.1:1"),
    "incarnation": lambda folder: StateDir(folder).incarnation(5.0),
    "peers.json": remember_peers,
    "history.jsonl": lambda folder: replace_lines(folder / "history.jsonl", ["{}"]),
    "micro-batch.json": note_a_micro_batch,
    "weight-0.json": lambda folder: BookFile(
        folder / "weight-0.json", b"r" * 32, identity(1).peer_id
    ).write(Balance(1.0)),
    INDEX: write_tokens,
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_a_writer_that_was_killed_has_left_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    def killed(*given: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        patched.setattr(os, "unlink", lambda name: None)
        for _ in range(2):
            with pytest.raises(Killed):
                WRITERS[name](folder)
    assert not (folder / name).exists()
    WRITERS[name](folder)
    drafts = [one.name for one in folder.iterdir() if one.name.startswith(".")]
    assert (folder / name).exists()
    assert not drafts


@pytest.mark.parametrize("name", [name for name in WRITERS if name != INDEX])
def test_a_full_disk_leaves_no_draft_and_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / name).write_text("before")

    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        with suppress(OSError):  # some go on without
            WRITERS[name](folder)
    assert [one.name for one in folder.iterdir()] == [name]
    assert (folder / name).read_text() == "before"


def test_others_may_read_what_is_not_private_as_far_as_the_umask_lets_them(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with replacing(tmp_path / "private") as file:
            file.write(b"x")
        with replacing(tmp_path / "readable", mode=READABLE) as file:
            file.write(b"x")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("private", "readable")]
    assert modes == [0o600, 0o640]


def test_it_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda f: (done.append("fsync"), fsync(f))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("replace"), replace(a, b))[1])
    with replacing(tmp_path / "one") as file:
        file.write(b"x")
    sync(tmp_path)
    with replacing(tmp_path / "two", durable=False) as file:
        file.write(b"x")
    assert done == ["fsync", "replace", "fsync", "replace"]


def test_an_error_is_told_also_where_its_draft_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    def broken(file: BinaryIO) -> None:
        for draft in folder.iterdir():
            draft.unlink()
        raise OSError(errno.EIO, "broken")

    with pytest.raises(OSError, match="broken"), replacing(folder / "file") as file:
        broken(file)
    assert not list(folder.iterdir())
