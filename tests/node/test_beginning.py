"""What a trainer begins with, and when: each event of its ranks, without any of them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bootstrap.manifest import Manifest
from node.checkpoints.trainer_files import Taken
from node.island.beginning import Beginning, Stage, Todo, check_built
from node.island.pace import Pace
from node.trainer.channel import Begin, Ready
from protocols.errors import OperatorError

CHECKPOINT = Path("ckpt-00000003")
DONATED = Taken(Path("moments.taken"), 7)
KEPT = Taken(Path("ckpt-00000002"), 0)

FIRST = [Todo.REFRESH, Todo.HAND_OVER, Todo.BEGIN]
AGAIN = [Todo.FIND_MOMENTS, Todo.HAND_OVER, Todo.BEGIN]


def made(tables: dict[str, Any] | None = None, **given: Any) -> Beginning:
    return Beginning(Manifest.model_validate(tables or {}), **given)


def built(tables: dict[str, Any] | None = None, **given: Any) -> Beginning:
    """Its ranks are there."""
    one = made(tables, **given)
    one.built()
    return one


def todos(one: Beginning, *, in_office: bool = True, alive: bool = True) -> list[Todo]:
    """All that is to be done, if nothing happens meanwhile."""
    return list(one.steps(in_office=in_office, alive=lambda: alive))


def command(one: Beginning, *rounds: int) -> Begin:
    given: dict[str, Any] = {"untrained": not any(rounds), "batches": ()}
    return one.command(
        rounds or (0,), 500, (1, 8), Pace(), tau=1, position=0, steps_read=0, **given
    )


def test_ranks_that_are_built_begin() -> None:
    one = built()
    assert not one.begun
    assert todos(one) == FIRST
    assert one.begun


def test_nothing_begins_before_the_ranks_are_there() -> None:
    one = made()
    assert todos(one) == []
    assert not one.there


def test_ranks_begin_once() -> None:
    one = built()
    todos(one)
    assert todos(one) == []


def test_who_is_not_in_office_follows_the_rounds_until_it_is() -> None:
    one = built()
    assert todos(one, in_office=False) == []
    assert one.there
    assert todos(one) == FIRST


def test_a_trainer_that_resumes_begins_out_of_office_as_well() -> None:
    """Others count its node in only once it trains."""
    assert todos(built(checkpoint=CHECKPOINT), in_office=False) == FIRST


@pytest.mark.parametrize("moments", [DONATED, None])
def test_a_donors_moments_are_waited_for(moments: Taken | None) -> None:
    one = built(joined=True)
    one.expects_moments = True
    assert todos(one) == []
    one.given(moments)
    assert todos(one) == FIRST
    assert command(one).moments == ("moments.taken" if moments else "")


def test_moments_may_come_before_the_ranks_do() -> None:
    one = made(joined=True)
    one.expects_moments = True
    one.given(DONATED)
    assert todos(one) == []
    one.built()
    assert todos(one) == FIRST


def test_one_beginning_at_a_time() -> None:
    one = built()
    with closing(one.steps(in_office=True, alive=lambda: True)) as steps:
        next(steps)
        assert todos(one) == []
        assert list(steps) == FIRST[1:]


def test_a_step_that_fails_leaves_the_way_free() -> None:
    one = built()
    with closing(one.steps(in_office=True, alive=lambda: True)) as steps:
        next(steps)
    assert todos(one) == FIRST[1:], "the state is brought up to date once, with or without success"


@pytest.mark.parametrize("checkpoint", [CHECKPOINT, None])
@pytest.mark.parametrize("told", [True, False])
def test_ranks_that_die_on_the_way_are_sent_nothing(told: bool, checkpoint: Path | None) -> None:
    """Also where the word of it has yet to come. Without a checkpoint others may write then."""
    one, alive = built(checkpoint=checkpoint), True
    with closing(one.steps(in_office=True, alive=lambda: alive)) as steps:
        assert [next(steps), next(steps)] == FIRST[:2]
        alive = False
        if told:
            one.lost()
        assert list(steps) == ([] if checkpoint else [Todo.LET_GO])
    assert not one.begun


def test_ranks_that_come_up_on_the_way_are_what_begins() -> None:
    one = built()
    with closing(one.steps(in_office=True, alive=lambda: True)) as steps:
        assert next(steps) is Todo.REFRESH
        one.lost()
        one.built()
        assert list(steps) == AGAIN
    assert one.begun


@pytest.mark.parametrize("read", [True, False])
def test_a_restart_begins_from_the_checkpoint_until_that_was_read(read: bool) -> None:
    one = built(checkpoint=CHECKPOINT)
    todos(one)
    if read:
        assert one.read() is None, "a checkpoint stays"
    assert one.lost() is read, "rounds wait for ranks that have yet to stand where it was made"
    assert one.stage is Stage.COMING
    one.built()
    assert todos(one, in_office=read) == (AGAIN if read else FIRST[1:])
    assert command(one).resume == ("" if read else "ckpt-00000003")
    assert command(one).rewarm is read


@pytest.mark.parametrize("moments", [KEPT, None])
def test_a_restart_looks_for_moments(moments: Taken | None) -> None:
    one = built()
    todos(one)
    one.read()
    one.lost()
    assert one.joined
    one.built()
    with closing(one.steps(in_office=True, alive=lambda: True)) as steps:
        assert next(steps) is Todo.FIND_MOMENTS
        one.found(moments)
        assert list(steps) == AGAIN[1:]
    begin = command(one)
    assert (begin.moments, begin.moments_steps) == ("ckpt-00000002" if moments else "", 0)
    assert begin.rewarm is one.joined is (moments is None)


@pytest.mark.parametrize("moments", [DONATED, KEPT, None])
def test_moments_are_there_until_they_are_read(moments: Taken | None) -> None:
    """A donor's file is nobody's then; a checkpoint stays."""
    one = built(moments=moments)
    todos(one)
    one.lost()
    assert one.moments == moments
    assert one.donated == one.read() == (DONATED.path if moments is DONATED else None)
    assert one.moments is one.donated is None


@pytest.mark.parametrize(("size", "digest"), [(9, "00"), (10, "01"), (10, "00")])
def test_ranks_that_have_built_another_model_are_refused(size: int, digest: str) -> None:
    layout: Any = SimpleNamespace(size=10, digest="00" * 32)
    ready = Ready(size, bytes.fromhex(digest * 32))
    if (size, digest) == (10, "00"):
        check_built(ready, layout)
        return
    with pytest.raises(OperatorError, match="another model") as caught:
        check_built(ready, layout)
    assert caught.value.code == "E405"


@pytest.mark.parametrize("mode", ["diloco", "async", "allreduce"])
def test_what_ranks_are_told(mode: str) -> None:
    one = built({"mode": mode, "rounds": {"eval_every": 10}}, moments=DONATED, joined=True)
    pace = Pace(step=30, tokens=640, position=20)
    given: dict[str, Any] = {"untrained": False, "batches": (5, 9)}
    begin = one.command((0, 2), 500, (1, 8), pace, tau=3, position=25, steps_read=4, **given)
    assert (begin.round, begin.others, begin.target_steps) == (0, (2,), 500)
    assert (begin.slot, begin.slots, begin.step, begin.tokens) == (1, 8, 30, 640)
    assert (begin.tau, begin.position, begin.round_step, begin.batches) == (3, 25, 4, (5, 9))
    assert (begin.moments, begin.moments_steps, begin.rewarm) == ("moments.taken", 7, False)
    assert (begin.at_will, begin.gradients) == (mode == "async", mode == "allreduce")


@pytest.mark.parametrize(
    ("every", "round_", "checkpoint", "told"),
    [(10, 0, None, True), (0, 0, None, False), (10, 3, None, False), (10, 0, CHECKPOINT, False)],
)
def test_only_what_nobody_has_trained_is_evaluated_first(
    every: int, round_: int, checkpoint: Path | None, told: bool
) -> None:
    one = built({"rounds": {"eval_every": every}}, checkpoint=checkpoint)
    assert command(one, round_).evaluate is told
