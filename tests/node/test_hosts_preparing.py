"""A host of an island that comes back has the tokens of before, whatever has become of the text."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest
from helper_kit import following, helper
from hub_kit import WAIT_S, hub, quicken
from trainer_kit import tiny_manifest

from node.data.supply import tokens_for
from node.hosts.tokens import fingerprint
from node.hosts.wire import Job
from node.reading import NOTE
from protocols.errors import OperatorError

SHARD = bytes(17 * 4)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of text, as ``--data`` of all hosts."""
    made = tmp_path / "text"
    made.mkdir()
    for number in range(100):
        words = (f"paragraph {number}.{n} of many others " * 20 for n in range(3))
        (made / f"{number}.txt").write_text("\n\n".join(words))
    return made


def read(text: Path) -> str:
    """Where the tokens of the text are, as it is now."""
    return tokens_for(tiny_manifest(), SHARD, b"", str(text), lambda done, total: None)


def job(text: Path, tokens: str) -> Job:
    """What host 0 tells of tokens that it has made of the text."""
    manifest = tiny_manifest().model_dump_json().encode()
    return Job(manifest, SHARD, b"", str(text), fingerprint(tokens, 256))


def change(text: Path) -> None:
    for file in sorted(text.iterdir())[:40]:
        file.write_text(file.read_text() + "\n\nand a line that was not there")


async def prepared(home: Path, wanted: Job) -> None:
    """A host connects and makes its tokens; what keeps it from that is raised."""
    async with hub() as (made, _):
        made.offer(wanted)
        async with following(home, made.port) as running:
            waiting = asyncio.ensure_future(made.muster(again=False))
            await asyncio.wait(
                (running, waiting), timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED
            )
            if running.done():
                waiting.cancel()
                await running
            assert len(await asyncio.wait_for(waiting, WAIT_S)) == 1


async def test_a_host_that_comes_back_trains_on_what_it_read_before(
    tmp_path: Path, text: Path
) -> None:
    home, wanted = tmp_path / "state", job(text, read(text))
    await prepared(home, wanted)
    change(text)
    await prepared(home, wanted)


@pytest.mark.parametrize("noted", [None, b"", b'{"run"', b"[]"])
async def test_a_host_whose_note_is_lost_reads_what_host_0_says(
    tmp_path: Path, text: Path, noted: bytes | None
) -> None:
    """Only host 0's note says which text is trained on."""
    home, wanted = tmp_path / "state", job(text, read(text))
    await prepared(home, wanted)
    (note,) = home.rglob(NOTE)
    whole = note.read_bytes()
    note.unlink() if noted is None else note.write_bytes(noted)
    await prepared(home, wanted)
    assert note.read_bytes() == whole


async def test_where_host_0_reads_anew_so_do_the_others(tmp_path: Path, text: Path) -> None:
    home, before = tmp_path / "state", read(text)
    await prepared(home, job(text, before))
    change(text)
    after = read(text)
    assert after != before
    await prepared(home, job(text, after))


@pytest.mark.parametrize("gone", [False, True], ids=["another disk", "tokens gone"])
async def test_where_it_cannot_the_message_says_how_all_read_it_anew(
    tmp_path: Path, text: Path, gone: bool
) -> None:
    home, before = tmp_path / "state", read(text)
    await prepared(home, wanted := job(text, before))
    change(text)
    if gone:
        os.unlink(before)
    else:
        home = tmp_path / "other"
    async with hub() as (made, _):
        made.offer(wanted)
        with pytest.raises(OperatorError) as caught:
            await helper(home, made.port).main()
    assert caught.value.code == "E410"
    assert "start host 0 with --resume and --data: all read it anew" in caught.value.fix


async def test_tokens_that_cannot_be_noted_are_read_all_the_same(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("node.reading.TokensNote.write", full)
    await prepared(tmp_path / "state", job(text, read(text)))


async def test_other_data_than_before_are_read(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream's recipe says where it comes from: another mirror has to count."""
    tokens, read_from = read(text), list[str]()

    def noticed(*given: Any, **more: Any) -> str:
        read_from.append(given[3])
        return tokens_for(*given, **more)

    monkeypatch.setattr("node.data.supply.tokens_for", noticed)
    elsewhere, mirror = tmp_path / "elsewhere", tmp_path / "mirror"
    os.rename(text, elsewhere)
    for _ in range(2):
        await prepared(tmp_path / "state", job(elsewhere, tokens))
    os.rename(elsewhere, mirror)
    await prepared(tmp_path / "state", job(mirror, tokens))
    assert read_from == [str(elsewhere), str(mirror)]
