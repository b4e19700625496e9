"""Fragments at the trainer: their place in the vector, their turns, and θ when one is merged."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from trainer_kit import Bench, apply, begin, tiny_manifest

from bootstrap.manifest import Model
from node.trainer.channel import Applied, Command, Report, Snapshot, Stop
from node.trainer.fragment_progress import FragmentProgress, due, offset
from node.trainer.layout import Layout
from node.trainer.trainer_state import StepTotals

FOUR = Model(d_model=32, n_layers=8, n_heads=2, n_kv_heads=1, d_ff=48)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_each_fragment_is_one_range_with_its_matrices_first(count: int) -> None:
    whole, layout = Layout.of_config(FOUR), Layout.of_config(FOUR, count)
    assert (layout.size, layout.dense) == (whole.size, whole.dense)
    assert {e.name for e in layout.entries} == {e.name for e in whole.entries}
    names: set[str] = set()
    at = 0
    for fragment, cut in enumerate(layout.cuts):
        assert cut.start == at
        mine = [entry for entry in layout.entries if entry.fragment == fragment]
        assert [e.offset for e in mine] == sorted(e.offset for e in mine)
        dims = [len(entry.shape) >= 2 for entry in mine]
        assert dims == sorted(dims, reverse=True)
        assert cut.dense == sum(e.size for e in mine if len(e.shape) >= 2)
        assert layout.names(fragment) == {entry.name for entry in mine}
        names |= layout.names(fragment)
        at = cut.stop
    assert at == layout.size
    assert names == {entry.name for entry in layout.entries}
    sizes = [cut.size for cut in layout.cuts]
    embedding = next(e.size for e in layout.entries if e.name == "embed_tokens.weight")
    assert max(sizes) - min(sizes) <= embedding  # which is larger than a layer
    if count == 1:
        assert layout.digest == whole.digest


def test_layers_are_dealt_out_in_turn() -> None:
    layout = Layout.of_config(FOUR, 4)
    where = {e.name: e.fragment for e in layout.entries}
    assert [where[f"layers.{n}.self_attn.q_proj.weight"] for n in range(8)] == [0, 1, 2, 3] * 2
    with pytest.raises(ValueError, match="fragments"):
        Layout.of_config(FOUR, 9)
    with pytest.raises(ValueError, match="n_layers"):
        tiny_manifest(fragments=3)


def work(steps: int) -> StepTotals:
    return StepTotals(steps=steps, tokens=10 * steps)


def turns(
    cycles: int, fragments: list[FragmentProgress], target: int, delay: int
) -> list[tuple[int, int]]:
    """(step, fragment) of each snapshot where results come after so many steps."""
    taken: list[tuple[int, int]] = []
    coming: list[tuple[int, int]] = []
    cycle_step = 0
    for step in range(1, cycles * target + 1):
        cycle_step += 1
        for progress in fragments:
            progress.unsent += work(1)
        for fragment in due(fragments, cycle_step, target):
            fragments[fragment].send()
            taken.append((step, fragment))
            coming.append((step + delay, fragment))
        for when, fragment in list(coming):
            if when == step:
                coming.remove((when, fragment))
                progress = fragments[fragment]
                progress.answer(progress.round + 1, contributed=True, reset=False)
                cycle_step = 0 if fragment == 0 else cycle_step
    return taken


def test_turns_are_spread_over_the_cycle() -> None:
    fragments = [FragmentProgress(frozenset()) for _ in range(4)]
    taken = turns(3, fragments, 20, 0)
    assert taken == [(5 * n, n % 4) for n in range(1, 13)]
    assert [offset(p, 4, 20) for p in range(4)] == [20, 5, 10, 15]
    assert offset(0, 1, 20) == 20


def test_with_delays_each_fragment_has_one_turn_a_cycle() -> None:
    fragments = [FragmentProgress(frozenset()) for _ in range(4)]
    taken = turns(10, fragments, 20, 3)
    counts = [sum(f == fragment for _, f in taken) for fragment in range(4)]
    assert max(counts) - min(counts) <= 1
    steps = [step for step, fragment in taken if fragment == 2]
    assert all(20 <= b - a <= 23 for a, b in itertools.pairwise(steps))


def test_a_fragment_whose_rounds_stand_still_holds_no_other_up() -> None:
    fragments = [FragmentProgress(frozenset()) for _ in range(2)]
    fragments[0].send()  # and never answered
    taken = [0, 0]
    for step in range(1, 101):
        fragments[1].unsent += work(1)
        for fragment in due(fragments, step, 10):
            fragments[fragment].send()
            fragments[fragment].answer(fragments[fragment].round + 1, contributed=True, reset=False)
            taken[fragment] += 1
    assert taken[0] == 0
    assert taken[1] >= 5  # at half the pace


def test_what_was_not_merged_is_carried_on() -> None:
    progress = FragmentProgress(frozenset())
    progress.unsent = work(4)
    assert progress.send() == work(4)
    progress.unsent += work(1)
    assert progress.state().carried == work(4)  # unanswered, in a checkpoint
    progress.answer(1, contributed=False, reset=False)
    assert progress.send() == work(5)
    progress.answer(2, contributed=True, reset=False)
    assert progress.carried == progress.unsent == StepTotals()
    assert progress.outstanding is None


def test_what_is_dropped_is_counted() -> None:
    """All that no merge has had: carried, out, and learnt since."""
    progress = FragmentProgress(frozenset())
    progress.unsent = work(4)
    progress.send()
    assert progress.answer(1, contributed=False, reset=False) == 0
    progress.unsent += work(2)
    assert progress.answer(2, contributed=False, reset=True) == 6
    progress.unsent += work(3)
    progress.send()
    progress.unsent += work(1)
    assert progress.answer(3, contributed=False, reset=True) == 4
    progress.unsent += work(5)
    progress.send()
    assert progress.answer(4, contributed=True, reset=False) == 0
    assert progress.answer(5, contributed=False, reset=True) == 0


def streaming(
    bench: Bench, report: Report, rounds: int, seen: list[tuple[int, int]]
) -> list[Command]:
    """A daemon that takes each fragment's outer step as soon as it is sent."""
    if not isinstance(report, Snapshot):
        return []
    fragment = report.fragment
    seen.append((fragment, report.round))
    vectors, cut = bench.vectors, bench.trainer.layout.cuts[fragment]
    assert vectors.try_claim(fragment)
    assert vectors.snapshot(fragment) == report.round
    base, sent = (vector[cut.start : cut.stop] for vector in vectors.tensors())
    base += 0.7 * (sent - base)
    last = fragment == 0 and report.round + 1 == rounds
    done = apply(report.round + 1, fragment=fragment, target_steps=8, evaluate=fragment == 0, tau=1)
    return [done, *([Stop()] if last else [])]


def test_a_trainer_streams_its_fragments(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    bench = Bench(
        tmp_path,
        lambda bench, report: streaming(bench, report, 3, seen),
        manifest=tiny_manifest(fragments=2),
    )
    script = bench.run(begin(target_steps=8, others=(0,), tau=1))
    assert seen == [(1, 0), (0, 0), (1, 1), (0, 1), (1, 2), (0, 2)]
    applied = script.of(Applied)
    assert applied[0].fragment is None
    assert [(a.fragment, a.round) for a in applied[1:]] == [
        (1, 1),
        (0, 1),
        (1, 2),
        (0, 2),
        (1, 3),
        (0, 3),
    ]
    snapshots = script.of(Snapshot)
    assert [s.steps for s in snapshots[2:]] == [8] * 4  # all of it, and each step once a fragment
    losses = [a.validation_loss for a in applied if a.fragment == 0]
    assert all(loss is not None for loss in losses)
    # nothing was learnt between the last snapshot of fragment 0 and its merge: θ is base there
    cut = bench.trainer.layout.cuts[0]
    base, _ = bench.vectors.tensors()
    assert torch.equal(bench.theta[cut.start : cut.stop], base[cut.start : cut.stop])
    cut = bench.trainer.layout.cuts[1]
    assert not torch.equal(bench.theta[cut.start : cut.stop], base[cut.start : cut.stop])


def test_an_evaluation_leaves_the_other_fragments_as_they_were(tmp_path: Path) -> None:
    bench = Bench(tmp_path, lambda bench, report: [], manifest=tiny_manifest(fragments=2))
    trainer, cut = bench.trainer, None
    trainer.begin(begin(others=(0,)))
    for _ in range(2):
        trainer.inner_step()
    before = bench.theta.clone()
    base, sent = bench.vectors.tensors()
    sent.copy_(base)
    loss = trainer.evaluate()
    trainer.apply(apply(1, contributed=False, evaluate=True))
    for cut in trainer.layout.cuts[1:]:
        here = slice(cut.start, cut.stop)
        assert torch.equal(bench.theta[here], before[here])
        assert not torch.equal(base[here], before[here])
    torch.testing.assert_close(bench.theta, before)  # base has not moved: nothing is lost
    evaluated = bench.script.of(Applied)[-1].validation_loss
    assert evaluated is not None
    assert evaluated != loss  # of base, not of θ
