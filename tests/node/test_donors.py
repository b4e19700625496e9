"""A newcomer that begins with another island's moments, and everything that makes it do without."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from moments_kit import Bench, honest, run
from trainer_kit import tiny_manifest

from bootstrap.manifest import Manifest
from node.checkpoints.trainer_files import TrainerFiles
from node.entry.donors import FAILURES, PARTS, TAKEN, Giving, Taking
from node.entry.fetching import Came
from node.island.pace import Pace
from node.trainer.channel import ChannelClosedError, Donate, Donated
from node.trainer.layout import Layout
from node.trainer.moments import MomentLayout, mapped
from protocols.errors import Malformed, RemoteRefused, Unreachable
from protocols.identity import PeerId
from protocols.memory import virtual_time
from protocols.memory.virtual_time import inline

# --- what a newcomer makes of it -----------------------------------------------------------------


def tried(
    tmp_path: Path,
    scenario: Callable[[Bench, Taking], Awaitable[None]],
    seconds: float = 1.0,
) -> None:
    """``seconds``: what all bytes take by the link of one donor."""
    manifest = tiny_manifest()
    moment_layout = MomentLayout.of(Layout.of_manifest(manifest), manifest.inner)

    async def main() -> None:
        size = moment_layout.size
        bench = Bench(2, manifest.run_id, size, upload=4 * size / seconds)
        await scenario(bench, taking(bench, tmp_path, manifest))

    virtual_time.run(main())


def taking(bench: Bench, directory: Path, manifest: Manifest) -> Taking:
    async def greet(peer: PeerId) -> None:
        await asyncio.sleep(0)

    return Taking(bench.me, manifest, directory, inline, greet)


def test_the_first_donor_that_has_some_gives_them(tmp_path: Path) -> None:
    async def scenario(bench: Bench, taking: Taking) -> None:
        for refuses in (0, 1):
            bench.refuses = {refuses}
            taken, said = await taking.take(bench.peers, 1.0)
            assert taken.steps == 50 + 1 - refuses
            assert str(bench.peers[1 - refuses]) in said
            assert torch.equal(mapped(taken.path, bench.size), bench.vectors[1 - refuses])
            await asyncio.sleep(100)

    tried(tmp_path, scenario)


@pytest.mark.parametrize(("where", "value"), [(3, float("nan")), (-1, -1.0), (3, 1e9)])
def test_poisoned_moments_are_passed_over(tmp_path: Path, where: int, value: float) -> None:
    async def scenario(bench: Bench, taking: Taking) -> None:
        bench.vectors[0][where] = value
        taken, _ = await taking.take(bench.peers, 1.0)
        assert taken.steps == 51
        with pytest.raises(Malformed, match="moments of which exp_avg"):
            await taking.take(bench.peers[:1], 1.0)
        assert not (tmp_path / TAKEN).exists()

    tried(tmp_path, scenario)


def test_a_newcomer_gives_up_in_time(tmp_path: Path) -> None:
    async def scenario(bench: Bench, taking: Taking) -> None:
        with pytest.raises(Unreachable, match="no island is active"):
            await taking.take([], 1.0)
        bench.refuses = {0, 1}
        with pytest.raises(RemoteRefused, match="cold"):
            await taking.take(bench.peers, 1.0)
        await asyncio.sleep(10)
        bench.refuses, bench.silent = set(), {0, 1}
        began = asyncio.get_running_loop().time()
        with pytest.raises(FAILURES):
            await taking.take(bench.peers, 10.0)
        assert asyncio.get_running_loop().time() - began <= 91
        assert not (tmp_path / TAKEN).exists()

    tried(tmp_path, scenario)


def test_where_the_link_is_not_known_the_size_tells_how_long_moments_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(bench: Bench, taking: Taking) -> None:
        monkeypatch.setattr("node.entry.donors.SLOW_LINK", 4 * bench.size / 300.0)
        with pytest.raises(FAILURES):  # as if it were known to be fast
            await taking.take(bench.peers[:1], 0.0)
        await asyncio.sleep(100)
        taken, _ = await taking.take(bench.peers[:1], None)
        assert taken.steps == 50

    tried(tmp_path, scenario, seconds=300.0)


def test_what_was_here_before_says_nothing_of_how_long_a_state_takes() -> None:
    came = Came()
    assert came.whole_s == 0.0  # nothing was downloaded
    came.add(10, 1000, 30.0)
    assert came.whole_s is None
    came.add(490, 1000, 70.0)
    assert came.whole_s == 400.0


@pytest.mark.parametrize(("parts", "there"), [(PARTS, True), (2, False)])
def test_one_donor_s_link_may_be_much_slower_than_those_of_all_for_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int, there: bool
) -> None:
    """It is waited for as long as parts come in time, and no longer."""
    monkeypatch.setattr("node.entry.donors.PARTS", parts)
    for module in ("digest", "chunks"):  # as many chunks as a large model has
        monkeypatch.setattr(f"bootstrap.state.{module}.MIN_CHUNK", 2048)

    async def scenario(bench: Bench, taking: Taking) -> None:
        began, told = asyncio.get_running_loop().time(), [0]
        taking.progress = lambda done, total, sources: told.append(done)
        if there:
            taken, _ = await taking.take(bench.peers[:1], 5.0)
            assert torch.equal(mapped(taken.path, bench.size), bench.vectors[0])
            assert told == sorted(told)
            assert told[-1] == 4 * bench.size
            return
        with pytest.raises(TimeoutError):
            await taking.take(bench.peers[:1], 5.0)
        assert asyncio.get_running_loop().time() - began < 100.0
        assert not (tmp_path / TAKEN).exists()

    tried(tmp_path, scenario, 250.0)


@pytest.mark.parametrize("step_s", [0.0, 60.0])
def test_a_donor_in_a_long_inner_step_has_the_time_to_end_it(tmp_path: Path, step_s: float) -> None:
    async def scenario(bench: Bench, taking: Taking) -> None:
        bench.copy_s = 100.0
        if step_s:
            taken, _ = await taking.take(bench.peers[:1], 1.0, step_s=step_s)
            assert taken.steps == 50
        else:
            with pytest.raises(FAILURES):
                await taking.take(bench.peers[:1], 1.0)

    tried(tmp_path, scenario)


def test_a_silent_donor_leaves_time_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.sample", lambda donors, count: donors[:count])

    async def scenario(bench: Bench, taking: Taking) -> None:
        bench.silent = {0}
        taken, _ = await taking.take(bench.peers, 1.0)
        assert taken.steps == 51

    tried(tmp_path, scenario)


def test_a_run_that_forgets_moments_has_none(tmp_path: Path) -> None:
    manifest = tiny_manifest()
    inner = manifest.inner.model_copy(update={"keep_moments": False})

    async def scenario(bench: Bench) -> None:
        one = taking(bench, tmp_path, manifest.model_copy(update={"inner": inner}))
        with pytest.raises(RemoteRefused, match="none that another could use"):
            await one.take(bench.peers, 1.0)
        assert bench.copies == [0]

    run(scenario)


# --- what a donor does ---------------------------------------------------------------------------


class Trainer:
    """What :class:`Giving` knows of a conductor; ``answer`` is the trainer's."""

    def __init__(self, answer: Callable[[Path], Donated]) -> None:
        self.training, self.files, self.answer, self.pace = True, self, answer, Pace()

    async def donate(self, path: Path) -> Donated:
        assert os.stat(path).st_size == 0, "else its trainer takes it for given up"
        return self.answer(path)


def giving(trainer: Any, directory: Path) -> Giving:
    manifest = tiny_manifest()
    moment_layout = MomentLayout.of(Layout.of_manifest(manifest), manifest.inner)
    return Giving(trainer, moment_layout, directory, inline)


async def test_the_file_is_gone_while_its_copy_is_served(tmp_path: Path) -> None:
    def write(path: Path) -> Donated:
        path.write_bytes(honest(one.moment_layout.size, 0).numpy().tobytes())
        return Donated(str(path), 77, "")

    one = giving(Trainer(write), tmp_path)
    moments = await one.copy()
    assert moments.steps == 77
    assert torch.equal(moments.vector, honest(one.moment_layout.size, 0))
    assert not list(tmp_path.iterdir())  # noqa: ASYNC240 - nothing else runs in this loop


@pytest.mark.parametrize("case", ["cold", "disk", "gone", "idle", "short"])
async def test_a_donor_that_has_none_says_so(tmp_path: Path, case: str) -> None:
    def answer(path: Path) -> Donated:
        if case == "gone":
            raise ChannelClosedError("the trainer was started again")
        path.write_bytes(b"short")
        return Donated(str(path), 0 if case == "cold" else 50, "full" if case == "disk" else "")

    trainer = Trainer(answer)
    trainer.training = case != "idle"
    with pytest.raises(RemoteRefused, match="none"):
        await giving(trainer, tmp_path).copy()
    assert not list(tmp_path.iterdir())  # noqa: ASYNC240 - nothing else runs in this loop


async def test_a_copy_that_comes_too_late_is_removed(tmp_path: Path) -> None:
    class Island:
        async def send(self, command: Donate) -> None:
            assert command.path == str(tmp_path / "copy")

    files = TrainerFiles(Island())  # type: ignore[arg-type]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await files.donate(tmp_path / "copy")
    (tmp_path / "copy").write_bytes(bytes(8))
    files.told(Donated(str(tmp_path / "copy"), 50, ""))
    assert not list(tmp_path.iterdir())  # noqa: ASYNC240 - nothing else runs in this loop
