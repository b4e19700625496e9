"""An island's learning rate: where the swarm stands in the schedule, and risen again if cold."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from trainer_kit import TARGET, Bench, apply, begin, committing, merge, tiny_manifest

from node.schedule import learning_rate
from node.trainer.channel import (
    Applied,
    Cold,
    Command,
    Report,
    Save,
    Snapshot,
    StepDone,
    Stop,
)
from node.trainer.trainer_state import FOLDER, STATE


def test_a_joiner_warms_up_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, committing(1))
    rates = [r.lr for r in bench.run(begin(step=50, rewarm=True)).of(StepDone)]
    full = bench.settings.manifest.inner.lr
    assert rates[0] < full / 15
    assert all(a < b for a, b in pairwise(rates))


def test_the_rate_is_that_of_where_the_swarm_stands(tmp_path: Path) -> None:
    """A joiner's begins there, who is overtaken goes on from there, nobody goes back."""

    def answer(bench: Bench, report: Report) -> list[Command]:
        match report:
            case Snapshot(round=round_):
                assert bench.vectors.try_claim()
                merge(bench.vectors)
                return [apply(round_ + 1, position=told[round_])]
            case Applied(round=round_) if round_ == len(told):
                return [Save(str(tmp_path)), Stop()]
        return []

    told = (0, 500, 60)
    given = tiny_manifest().inner.model_copy(
        update={"schedule": "cosine", "warmup_steps": 10, "total_steps": 1000}
    )
    manifest = tiny_manifest().model_copy(update={"inner": given})
    bench = Bench(tmp_path, answer, manifest=manifest)
    steps = bench.run(begin(position=200)).of(StepDone)
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    places = [step.position for step in steps]
    assert places[0] == 201
    jumps = [later for earlier, later in pairwise(places) if later != earlier + 1]
    assert jumps == [501]
    assert [step.lr for step in steps] == [learning_rate(given, place - 1) for place in places]
    after = Bench(tmp_path, committing(len(told) + 1), manifest=manifest)
    after.vectors.base[:] = bench.vectors.base
    resumed = after.run(begin(round=len(told), resume=str(tmp_path))).of(StepDone)
    assert resumed[0].position == places[-1] + 1


def test_who_resumes_without_moments_warms_up_again(tmp_path: Path) -> None:
    def answer(bench: Bench, report: Report) -> list[Command]:
        if isinstance(report, StepDone) and report.step == 2 * TARGET:
            bench.trainer.optimizer.state.clear()
        if isinstance(report, Applied) and report.round == 2:
            return [Save(str(tmp_path)), Stop()]
        return committing(99)(bench, report)

    before = Bench(tmp_path, answer)
    full = before.run(begin()).of(StepDone)[-1].lr
    after = Bench(tmp_path, committing(3))
    after.vectors.base[:] = before.vectors.base
    rates = [r.lr for r in after.run(begin(round=2, resume=str(tmp_path))).of(StepDone)]
    assert [cold.why for cold in after.script.of(Cold)] == ["the checkpoint holds none"]
    assert rates[0] < full / 15
    assert all(a < b for a, b in pairwise(rates))


def test_a_checkpoint_that_says_no_position_goes_on_at_its_step(tmp_path: Path) -> None:
    """Those of earlier versions, which had each island begin the schedule by itself."""

    def answer(bench: Bench, report: Report) -> list[Command]:
        if isinstance(report, Applied) and report.round == 2:
            return [Save(str(tmp_path)), Stop()]
        return committing(99)(bench, report)

    before = Bench(tmp_path, answer)
    steps = before.run(begin()).of(StepDone)
    path = tmp_path / FOLDER / STATE
    standing = json.loads(path.read_text())
    del standing["position"], standing["kinds"]
    path.write_text(json.dumps(standing))
    after = Bench(tmp_path, committing(3))
    after.vectors.base[:] = before.vectors.base
    resumed = after.run(begin(round=2, resume=str(tmp_path))).of(StepDone)[0]
    assert resumed.position == resumed.step == steps[-1].step + 1
