"""Downloads that are broken off, and what the next one still has of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from arrival_kit import RUN, part
from state_kit import Bench, N, run

from bootstrap.state import PartialState, state_digest
from bootstrap.state.partial import MAX_SOURCES
from protocols.identity import Identity
from protocols.messages import StateOffer

Identities = Callable[[int], list[Identity]]

LENGTH = 8 * N  # bytes
RATE = LENGTH / 10.0  # so that a download takes ten seconds


async def broken_off(bench: Bench, seconds: float, directory: Path) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(seconds):
            await bench.download(on_disk=part(directory))


async def fetched(bench: Bench, directory: Path) -> int:
    """Bytes that came of the others, for vectors that know nothing."""
    for vector in bench.got:
        vector.fill_(float("nan"))
    download = await bench.download(on_disk=part(directory))
    bench.check()
    return sum(one.bytes for one in download.sources.values())


def test_a_download_goes_on_where_the_last_one_was_killed(
    identities: Identities, tmp_path: Path
) -> None:
    async def scenario(bench: Bench) -> None:
        await broken_off(bench, 7.0, tmp_path)
        assert not part(tmp_path).whole
        came = await fetched(bench, tmp_path)
        assert 0.2 * LENGTH < came < 0.45 * LENGTH
        assert part(tmp_path).whole
        assert await fetched(bench, tmp_path) == 0  # killed before it had saved anything else
        part(tmp_path).drop()
        assert os.listdir(tmp_path) == []

    run(identities, [RATE], scenario)


def test_what_a_power_cut_has_spoilt_is_fetched_again(
    identities: Identities, tmp_path: Path
) -> None:
    async def scenario(bench: Bench) -> None:
        await fetched(bench, tmp_path)
        with (tmp_path / "state-0").open("r+b") as file:
            file.write(b"spoilt")
            file.seek(LENGTH // 2)
            file.truncate()
        came = await fetched(bench, tmp_path)
        assert 0.5 * LENGTH < came < 0.6 * LENGTH

    run(identities, [RATE], scenario)


@pytest.mark.parametrize("damage", ["another run", "cut off", "bytes", "gone"])
def test_without_its_note_nothing_of_it_counts(
    identities: Identities, tmp_path: Path, damage: str
) -> None:
    async def scenario(bench: Bench) -> None:
        await fetched(bench, tmp_path)
        note = tmp_path / "state-0.offer"
        raw = note.read_bytes()
        match damage:
            case "another run":
                note.write_bytes(bytes(32) + raw[32:])
            case "cut off":
                note.write_bytes(raw[: len(raw) // 2])
            case "bytes":
                note.write_bytes(raw[:-40] + bytes(40))
            case _:
                note.unlink()
        assert part(tmp_path).offer() is None
        assert await fetched(bench, tmp_path) == LENGTH

    run(identities, [RATE], scenario)


def test_another_state_takes_its_place(identities: Identities, tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await broken_off(bench, 7.0, tmp_path)
        before = part(tmp_path).offer()
        bench.base.add_(1.0)
        bench.digest, _ = state_digest([bench.base, bench.momentum])
        bench.servers[0]._pins.clear()
        assert await fetched(bench, tmp_path) == LENGTH
        after = part(tmp_path).offer()
        assert isinstance(before, StateOffer)
        assert isinstance(after, StateOffer)
        assert after.digest == bench.digest != before.digest

    run(identities, [RATE], scenario)


@pytest.mark.parametrize("full", ["before", "meanwhile"])
def test_a_full_disk_ends_the_keeping_and_not_the_download(
    identities: Identities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    def refused(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    async def scenario(bench: Bench) -> None:
        if full == "before":
            monkeypatch.setattr("shutil.disk_usage", refused)
        else:
            monkeypatch.setattr(os, "pwrite", refused)
        assert await fetched(bench, tmp_path) == LENGTH
        assert os.listdir(tmp_path) == []

    run(identities, [RATE], scenario)


def test_what_a_checkpoint_needs_the_room_of_is_written_on_no_more(
    identities: Identities, tmp_path: Path
) -> None:
    async def scenario(bench: Bench) -> None:
        kept = part(tmp_path)
        async with asyncio.TaskGroup() as group:
            coming = group.create_task(bench.download(on_disk=kept))
            await asyncio.sleep(5.0)
            for name in os.listdir(tmp_path):
                (tmp_path / name).unlink()
            await asyncio.sleep(1.0)
            assert kept._handle is None  # else the disk would be as full as before
            await coming
        bench.check()
        assert os.listdir(tmp_path) == []

    run(identities, [RATE], scenario)


@pytest.mark.parametrize(("room", "there"), [(2 * LENGTH, True), (2 * LENGTH - 1, False)])
def test_it_leaves_as_much_of_its_room_as_it_takes(
    identities: Identities, tmp_path: Path, room: int, there: bool
) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.download(on_disk=PartialState(tmp_path / "state-0", RUN, room=lambda: room))
        bench.check()
        assert part(tmp_path).whole == there

    run(identities, [RATE], scenario)


def test_the_disk_is_waited_for_beside_the_event_loop_alone(
    identities: Identities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = False

    async def aside(work: Callable[[], Any]) -> Any:
        nonlocal beside
        beside = True
        try:
            return work()
        finally:
            beside = False

    def watch(name: str) -> None:
        method = getattr(PartialState, name)

        def watched(self: PartialState, *given: Any) -> Any:
            assert beside, name
            return method(self, *given)

        monkeypatch.setattr(PartialState, name, watched)

    for name in ("offer", "accept", "fill", "write", "finish", "close", "drop"):
        watch(name)

    async def scenario(bench: Bench) -> None:
        for _ in range(2):
            await bench.download(on_disk=PartialState(tmp_path / "state-0", RUN, aside))
        bench.check()

    run(identities, [RATE], scenario)


def test_the_last_sources_are_noted(identities: Identities, tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await fetched(bench, tmp_path)
        kept = part(tmp_path)
        known = kept.offer()
        assert known is not None
        kept.accept(known)
        many = [one.peer_id for one in identities(MAX_SOURCES + 3)]
        for one in many:
            kept.write(0, memoryview(b""), one)
        kept.write(0, memoryview(b""), None)
        kept.close()
        noted = part(tmp_path).offer()
        assert noted is not None
        assert noted.readers == tuple(many[-MAX_SOURCES:])

    run(identities, [RATE], scenario)
