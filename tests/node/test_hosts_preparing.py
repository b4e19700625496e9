"""A host of an island that comes back has the tokens of before, whatever has become of the text."""

from __future__ import annotations

import asyncio
import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helper_kit import following, helper
from hub_kit import WAIT_S, hub, quicken
from trainer_kit import tiny_manifest

from node.data.cached_file import write
from node.data.folder import INDEX
from node.data.supply import tokens_for
from node.hosts import preparing
from node.hosts.preparing import prepare
from node.hosts.tokens import SAMPLE_TOKENS, fingerprint
from node.hosts.wire import Job
from node.reading import NOTE, TokensNote
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


async def of_host(home: Path, wanted: Job, said: list[str] | None = None) -> str:
    """Where the tokens are that a host trains on."""
    say = (said if said is not None else []).append
    return await prepare(wanted, "", home, home / "cache", say)


def keeping(tmp_path: Path, like: str, *, other: bool = False, bare: bool = False) -> str:
    """Tokens that were kept, like those; one of them another, or without a hash beside them."""
    (tmp_path / "kept").mkdir()
    path, tokens = tmp_path / "kept" / "train.tokens", bytearray(Path(like).read_bytes())
    tokens[SAMPLE_TOKENS // 2] ^= other
    if bare:
        path.write_bytes(tokens)
    else:
        write(path, [bytes(tokens)])
    return str(path)


def noted(home: Path, tokens: str, place: Path, run: str = "") -> None:
    """As after an earlier start, by default of this run."""
    home.mkdir(exist_ok=True)
    TokensNote(run or tiny_manifest().evaluation.digest, tokens, str(place)).write(home / NOTE)


async def test_a_host_that_comes_back_trains_on_what_it_read_before(
    tmp_path: Path, text: Path
) -> None:
    home, before = tmp_path / "state", read(text)
    wanted = job(text, before)
    await prepared(home, wanted)
    change(text)
    await prepared(home, wanted)
    assert await of_host(home / "host-1", wanted) == before


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
    await prepared(home, wanted := job(text, after))
    assert await of_host(home / "host-1", wanted) == after


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


async def test_what_was_kept_and_is_not_what_host_0_has_is_left_aside(
    tmp_path: Path, text: Path
) -> None:
    """Also where it has been noted of this run and place, and only a few of its tokens differ."""
    right = read(text)
    noted(tmp_path / "state", keeping(tmp_path, right, other=True), text)
    assert await of_host(tmp_path / "state", job(text, right)) == right


async def test_a_kept_file_that_is_damaged_is_made_again(tmp_path: Path, text: Path) -> None:
    """Though what is left of it would pass for what host 0 has."""
    home, right = tmp_path / "state", read(text)
    wanted, said = job(text, right), list[str]()
    bare = keeping(tmp_path, right, bare=True)
    noted(home, bare, text)
    shown = fingerprint(bare, 256)  # of samples: it has no hash beside it
    with pytest.raises(OperatorError, match="other training tokens"):
        await of_host(home, replace(wanted, tokens=shown), said)
    assert said == [f"{bare} is damaged: makes these tokens again"]
    assert await of_host(home, wanted) == right


async def test_what_was_noted_of_another_run_is_not_taken(tmp_path: Path, text: Path) -> None:
    right = read(text)
    copy = keeping(tmp_path, right)
    for run, found in (("", copy), ("00" * 32, right)):
        noted(tmp_path / "state", copy, text, run)
        assert await of_host(tmp_path / "state", job(text, right)) == found


async def test_a_token_folder_is_opened_anew_and_not_kept(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As host 0 does: what has become of it is told, and where it is given may be a copy by now."""
    right = read(text)
    kept = tmp_path / "folder"
    kept.mkdir()
    (kept / INDEX).write_text("{}")
    noted(tmp_path / "state", str(kept), text)
    wanted = job(text, right)
    monkeypatch.setattr(
        preparing,
        "fingerprint",
        lambda place, *given: wanted.tokens if place == str(kept) else fingerprint(place, *given),
    )
    assert await of_host(tmp_path / "state", wanted) == right


async def test_tokens_that_a_bad_disk_has_are_made_again(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = read(text)
    copy = keeping(tmp_path, right)
    noted(tmp_path / "state", copy, text)

    def bad(place: str, *given: Any) -> bytes:
        if place == copy:
            raise OSError(errno.EIO, "Input/output error")
        return fingerprint(place, *given)

    monkeypatch.setattr(preparing, "fingerprint", bad)
    assert await of_host(tmp_path / "state", job(text, right)) == right


@pytest.mark.parametrize("damaged", ["note", "recipe"])
async def test_a_note_or_a_recipe_that_cannot_be_read_does_not_end_a_host(
    tmp_path: Path, text: Path, damaged: str
) -> None:
    home, right = tmp_path / "state", read(text)
    if damaged == "note":
        (home / NOTE).mkdir(parents=True)  # as of a disk that gives another error than none there
    else:
        recipe = tmp_path / "of.stream.json"
        recipe.write_text('{"form')
        noted(home, str(recipe), text)
    assert await of_host(home, job(text, right)) == right
