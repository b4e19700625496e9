"""What islands read where a round is one arrival: nearly all of a corpus, and nothing twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from conductor_kit import SIZE, at_once, commit, conductor, nobody, take_in
from conductor_kit import Trainer as Listener
from replica_kit import ME, OTHER
from trainer_kit import Bench, apply, begin, tiny_manifest

from bootstrap.manifest import Data, Manifest
from node.data.ahead import Ahead, ReadPosition
from node.data.remote import FolderTokens
from node.island.allotment import Allotment
from node.simulate import swarm
from node.simulate.run import manifest_of
from node.simulate.scenario import Scenario
from node.simulate.trainer import Trainer as Simulated
from node.simulate.world import simulate
from node.trainer.channel import Applied, Save, Saved, StepDone
from node.trainer.data import Batches
from node.trainer.sampler import TOGETHER, Sampler
from node.trainer.shared import SharedVectors

H, BATCH = 16, 8
SMALL: dict[str, Any] = {
    "mode": "async", "islands": 4, "inner_steps": H, "batch": BATCH, "hidden": 8,
    "eval_every": 1000,
}  # fmt: skip


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the batches that simulated islands read, as they read them."""
    found: list[int] = []
    count = Simulated.count

    def counted(self: Simulated, tokens: int, *, finite: bool) -> None:
        assert self.numbers is not None
        found.append(self.numbers.next)
        count(self, tokens, finite=finite)

    def as_read(one: Scenario, rounds: int) -> Manifest:
        data = Data(batch_size=1, seq_len=BATCH, islands=one.islands)  # tokens of a step
        return manifest_of(one, rounds).model_copy(update={"data": data})

    monkeypatch.setattr(Simulated, "count", counted)
    monkeypatch.setattr(swarm, "manifest_of", as_read)
    return found


@pytest.mark.parametrize(
    ("changes", "twice"),
    [
        ({"rounds": 20}, 0.01),  # who waits for its first merge reads a little of another's
        ({"rounds": 20, "stragglers": 1, "dynamic_steps": False}, 0.01),
        ({"rounds": 10, "fragments": 2}, 0.05),
        ({"rounds": 25, "churn": 0.4}, 0.07),  # H steps for each that comes
    ],
)
def test_nearly_all_is_read_and_nothing_twice(
    taken: list[int], changes: dict[str, Any], twice: float
) -> None:
    """Blocks of windows by round, as lock-step has them, were read to a quarter or a third."""
    simulate(Scenario.model_validate(SMALL | changes))
    times = Counter(taken)
    assert len(times) >= 0.95 * (max(times) + 1)
    assert len(taken) - len(times) <= twice * len(taken)


class Watched:
    """Training data, and where they were read, and what was expected."""

    numbered, headway = True, 0

    def __init__(self, data: Batches) -> None:
        self.data, self.places = data, list[tuple[int, int, int, int]]()
        self.expected: list[tuple[int, ...]] = []

    def expect(self, stretches: tuple[int, ...]) -> None:
        self.expected.append(stretches)

    def batch(
        self, round: int, slot: int, slots: int, step: int, rows: range | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.places.append((round, slot, slots, step))
        return self.data.batch(round, slot, slots, step, rows)


def watched(bench: Bench) -> Watched:
    bench.trainer.data = found = Watched(bench.trainer.data)
    return found


def at_will() -> Manifest:
    tiny = tiny_manifest().model_dump(include={"model", "data", "inner"})
    return Manifest.model_validate(tiny | {"mode": "async", "rounds": {"inner_steps": 40}})


def test_a_trainer_reads_the_batches_that_it_was_given(tmp_path: Path) -> None:
    bench = Bench(tmp_path, lambda bench, report: [], manifest=at_will())
    trainer, data = bench.trainer, watched(bench)
    trainer.begin(begin(at_will=True, batches=(2, 4), round=7, slot=1, slots=3))
    for _ in range(3):
        trainer.inner_step()
    # of another island, whose numbers are its own; then of this one
    for round_, mine in ((8, False), (9, True)):
        base, sent = bench.vectors.tensors()
        sent.copy_(base)
        trainer.apply(apply(round_, contributed=mine, batches=(30, 32) if mine else ()))
        trainer.inner_step()
    trainer.apply(apply(10, contributed=False, batches=(40, 50), anew=True))
    trainer.inner_step()
    assert data.places == [(0, 0, 1, step) for step in (2, 3, 4, 5, 30, 40)]
    assert trainer.data.data.sampler.reserved == 0  # a round has no windows of its own


def test_who_resumes_reads_on_where_the_checkpoint_was_made(tmp_path: Path) -> None:
    """And what was given before and not read yet, though other rounds have come since."""
    (tmp_path / "checkpoint").mkdir()
    bench = Bench(tmp_path / "one", lambda bench, report: [], manifest=at_will())
    trainer, data = bench.trainer, watched(bench)
    trainer.begin(begin(at_will=True, batches=(2, 5)))
    for _ in range(2):
        trainer.inner_step()
    trainer.apply(apply(1, contributed=False, batches=(30, 34)))
    trainer.checkpoint(Save(str(tmp_path / "checkpoint")))
    trainer.files.finish()
    assert [saved.problem for saved in bench.script.of(Saved)] == [""]
    for _ in range(3):
        trainer.inner_step()
    replica: Any = SimpleNamespace(brought=None, relived=False, place=SimpleNamespace(work=0))
    batches = Allotment(at_will(), replica).begin(tmp_path / "checkpoint", 0)
    again = Bench(tmp_path / "two", lambda bench, report: [], manifest=at_will())
    resumed, after = again.trainer, watched(again)
    resumed.begin(
        begin(at_will=True, round=1, resume=str(tmp_path / "checkpoint"), batches=batches)
    )
    for _ in range(3):
        resumed.inner_step()
    assert data.places[:2] == [(0, 0, 1, 2), (0, 0, 1, 3)]
    assert after.places == data.places[2:] == [(0, 0, 1, step) for step in (4, 30, 31)]
    assert again.script.losses == bench.script.losses[2:]


def test_files_of_the_numbers_to_come_are_fetched_and_no_others() -> None:
    sampler = Sampler(1_000_000, 16, 4, seed=0)
    ahead = Ahead(cast(FolderTokens, Files()), sampler, steps=2 * TOGETHER)

    def fetched(number: int, *stretches: int) -> list[int]:
        """The numbers whose windows come, in their order."""
        ahead.expect(stretches)
        number = number // TOGETHER * TOGETHER  # as the trainer says it
        files = list(ahead._coming(ReadPosition(0, 0, 1, number)))
        return [by_window[file] for file in files[:: sampler.batch_size]]

    by_window = {start: n for n in range(500) for start in sampler.starts(0, 0, 1, n).tolist()}
    assert fetched(40, 0, 80, 200, 400) == [*range(32, 80)]
    assert fetched(70, 0, 80, 200, 400) == [*range(64, 80), *range(200, 232)]
    assert fetched(70, 66, 74, 210, 215) == [*range(66, 82), *range(210, 226)]
    assert fetched(100, 0, 80) == [], "it reads on in others' numbers, for a moment"


class Files:
    """A file for each window."""

    cache_bytes = 10**9

    def files(self, starts: Sequence[int], length: int) -> Sequence[int]:
        return starts

    def size_of(self, file: int) -> int:
        return 1


@pytest.fixture
def vectors() -> Iterator[SharedVectors]:
    made = SharedVectors.create(SIZE)
    yield made
    made.close()


def test_data_are_told_of_what_comes(tmp_path: Path) -> None:
    bench = Bench(tmp_path, lambda bench, report: [], manifest=at_will())
    trainer, data = bench.trainer, watched(bench)
    trainer.carry_out(begin(at_will=True))
    assert data.expected == [], "rounds have windows of their own"
    trainer.carry_out(begin(at_will=True, batches=(2, 5)))
    trainer.inner_step()
    base, sent = bench.vectors.tensors()
    sent.copy_(base)
    trainer.carry_out(apply(1, batches=(9, 12)))
    assert data.expected == [(2, 5), (3, 5, 9, 12)]


async def test_ranks_that_are_started_again_read_on(vectors: SharedVectors) -> None:
    """What their work was merged for is theirs, also where it was while none of them was there."""
    run = {"mode": "async", "rounds": {"inner_steps": 5}, "data": {"batch_size": 1, "seq_len": 128}}
    made, _ = conductor(vectors, at_once, run)
    trainer = cast(Listener, made.island)
    trainer.restart = nobody  # type: ignore[attr-defined]
    made.beginning.built()
    await made._begin()
    step = StepDone(0, 2, 3.0, 1.0, 0.1, 128, 0.1)
    await take_in(made, Applied(0, 0, 0, None, None), replace(step, batches=(3, 5)))
    await made._start_again()
    await commit(made.replicas[0], {OTHER: 3 * 128, ME: 5 * 128})
    made.beginning.built()
    await made._begin()
    left = (trainer.sent[-1].batches[0] + 3, trainer.sent[-1].batches[1])
    await take_in(made, Applied(1, 0, 0, None, None), replace(step, batches=left))
    await made._start_again()
    made.beginning.built()
    await made._begin()
    first, merged, again = trainer.sent
    assert first.batches == (0, 5)
    reserve = 8 * 5  # of eight islands, as no others can be given
    assert merged.batches == (reserve + 3, reserve + 8)
    assert again.batches == (reserve + 6, reserve + 8), "three of them were read"


async def test_work_that_is_merged_brings_more_to_read(vectors: SharedVectors) -> None:
    run = {"mode": "async", "rounds": {"inner_steps": 5}, "data": {"batch_size": 1, "seq_len": 128}}
    made, _ = conductor(vectors, at_once, run)
    replica, trainer = made.replicas[0], cast(Listener, made.island)
    for round_, (tokens, mine) in enumerate([({OTHER: 128}, False), ({ME: 256, OTHER: 1}, True)]):
        assert vectors.try_snapshot()
        vectors.end_snapshot(round_)
        await commit(replica, tokens)
        applied = trainer.sent[-1]
        assert (applied.contributed, applied.anew) == (mine, False)
        assert applied.batches == ((8 * 5 + 1, 8 * 5 + 3) if mine else ())
        vectors.clear(0)
        await take_in(made, Applied(round_ + 1, 0, 0, None, 0))
    # a step that is not finite takes the trainer back to the base, and brings nothing once more
    made._reset_due = {0}
    await made._reset_if_due()
    assert trainer.sent[-1].reset
    assert trainer.sent[-1].batches == ()
