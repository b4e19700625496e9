"""When the operator is called for this node's own sake: its loss, its parameters, its disk."""

from __future__ import annotations

import pytest
from alarms_kit import peers

from node.monitor.alarms import (
    LOST_STEPS,
    RISEN_TIMES,
    Alarm,
    Here,
    raised,
)
from node.monitor.event_log import EventLog
from node.monitor.events import (
    CheckpointSaved,
    CheckpointSkipped,
    Rejected,
    RoundDone,
    Step,
    Stopping,
)
from node.monitor.state import NodeState
from node.monitor.views import MachineView, NodeView
from protocols.errors import Reason


def of_here(here: Here) -> list[Alarm]:
    return raised(peers(), [], 30.0, here=here)


def test_a_loss_that_is_no_number_is_critical_once_it_stays_so() -> None:
    (alarm,) = of_here(Here(lost=LOST_STEPS))
    assert (alarm.kind, alarm.level) == ("loss", "critical")
    assert of_here(Here(lost=LOST_STEPS - 1)) == []
    assert of_here(Here()) == []


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ((2.0, 1.8, 1.79, 1.78), False),
        ((2.0, 1.8, 2.4, 2.5, 2.6), True),
        ((2.0, 1.8, 2.4, None, 2.5, None, 2.6), True),  # not every round is evaluated
        ((2.0, 1.8, 2.4, 1.82, 2.6), False),  # by chance
        ((2.0, 1.8, 1.85, 1.86, 1.87), False),  # by less than matters
        ((6.0, 6.1, 6.2, 6.3), False),  # a large loss may move by more
    ],
)
def test_a_validation_loss_that_rises(losses: tuple[float | None, ...], told: bool) -> None:
    known = [loss for loss in losses if loss is not None]
    low = min(known)
    found = of_here(Here(lowest=(losses.index(low), low), validated=known))
    assert [alarm.kind for alarm in found] == ["loss"] * told
    if told:
        assert f"{losses[-1]:.3f} now, 1.800 after round 1" in found[0].what
        assert "--init-from" in found[0].fix


def test_the_checkpoint_to_go_back_to_is_named() -> None:
    log = EventLog()
    state = NodeState(NodeView(peer="me"), log=log)
    for number, loss in enumerate((2.0, 1.8, *([2.5] * RISEN_TIMES))):
        log.emit(RoundDone(round=number, validation_loss=loss))
    assert "that is kept with node export --best" in state.alarms_now()[0].fix
    log.emit(CheckpointSaved(round=9, path="/c/ckpt-00000009", best="ckpt-00000002"))
    assert "that is kept, ckpt-00000002, with node export" in state.alarms_now()[0].fix


def test_what_a_node_says_of_its_own_loss_comes_from_its_events() -> None:
    log = EventLog()
    state = NodeState(NodeView(peer="me"), log=log)
    for number, loss in enumerate((2.0, 1.8, *([2.5] * RISEN_TIMES))):
        log.emit(RoundDone(round=number, validation_loss=loss))
    assert [alarm.kind for alarm in state.alarms_now()] == ["loss"]
    for number in range(LOST_STEPS):
        log.emit(Step(step=number, round=5, loss=None, finite=False))
    assert [alarm.level for alarm in state.alarms_now()] == ["critical", "warning"]
    log.emit(Step(step=LOST_STEPS, round=5, loss=None))
    assert [alarm.level for alarm in state.alarms_now()] == ["warning"]


def test_a_loss_that_rises_is_told_however_many_rounds_are_not_evaluated() -> None:
    """Fragment 0 alone is evaluated, and in some modes one of a hundred rounds of its."""
    log = EventLog()
    state = NodeState(NodeView(peer="me"), log=log)
    for number, loss in enumerate((2.0, 1.8, *([2.5] * RISEN_TIMES))):
        assert state.alarms_now() == [], number
        log.emit(RoundDone(round=100 * number, validation_loss=loss))
        for more in range(1, 100):
            log.emit(RoundDone(round=100 * number + more))
    (alarm,) = state.alarms_now()
    assert "2.500 now, 1.800 after round 100" in alarm.what


def test_a_script_that_does_not_tell_its_loss_raises_no_alarm() -> None:
    """The Trainer logs it every few hundred steps; ``island.step`` does not ask for it."""
    log = EventLog()
    state = NodeState(NodeView(peer="me"), log=log)
    for number in range(3 * LOST_STEPS):
        log.emit(Step(step=number, round=0, loss=None))
    assert state.alarms_now() == []


def test_parameters_that_are_not_finite_are_told_though_the_loss_is() -> None:
    """Of a discriminator, say, whose loss nobody tells: no round would ever come of it."""
    log = EventLog()
    state = NodeState(NodeView(peer="me"), log=log)
    for times, peer in enumerate(("me", "other", "me")):
        assert state.alarms_now() == [], times
        log.emit(Rejected(peer=peer, reason=Reason.NON_FINITE))
    (alarm,) = state.alarms_now()
    assert (alarm.kind, alarm.level) == ("loss", "critical")
    assert "not finite 2 times in a row" in alarm.what
    log.emit(RoundDone(round=0, islands={"other": {"tokens": 8}, "me": {"loss": 2.0}}))
    assert state.alarms_now() == [alarm]
    log.emit(RoundDone(round=1, islands={"me": {"tokens": 8}}))
    assert state.alarms_now() == []


def test_where_no_checkpoint_has_been_made_yet_none_is_the_newest() -> None:
    log = EventLog()
    state = NodeState(NodeView(peer="me"), log=log)
    log.emit(CheckpointSkipped(round=4, reason="no room (E402)"))
    (alarm,) = state.alarms_now()
    assert alarm.what.endswith("round 4 was skipped: no room (E402).")


def test_no_room_for_checkpoints() -> None:
    log = EventLog()
    state = NodeState(NodeView(peer="me"), log=log)
    free = [10_000_000]
    state.providers.machine = lambda: MachineView(disk_free=free[0])
    assert state.alarms_now() == []
    log.emit(CheckpointSaved(round=3, path="x", bytes=4_000_000))
    assert state.alarms_now() == []
    free[0] = 7_000_000
    (alarm,) = state.alarms_now()
    assert (alarm.kind, alarm.level) == ("checkpoint", "warning")
    assert "7 MB are free on disk, and a checkpoint takes 4 MB" in alarm.what
    log.emit(CheckpointSkipped(round=4, reason="no room (E402)"))
    (alarm,) = state.alarms_now()
    assert (alarm.kind, alarm.level) == ("checkpoint", "critical")
    assert alarm.what.endswith("round 4 was skipped: no room (E402). The newest is of round 3.")
    assert "Free disk space" in alarm.fix
    log.emit(CheckpointSkipped(round=4, reason="the folder is gone (E105)"))
    (alarm,) = state.alarms_now()
    assert "disk space" not in alarm.fix
    assert alarm.fix.startswith("It trains on, and tries again.")
    free[0] = 20_000_000
    log.emit(CheckpointSaved(round=5, path="x", bytes=4_000_000))
    assert state.alarms_now() == []


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("no room (E402)", "It leaves, and tries again for a while. Free disk space now."),
        ("the folder is gone (E105)", "It leaves. Mend what is named."),
    ],
)
def test_who_leaves_without_a_checkpoint_does_not_train_on(reason: str, told: str) -> None:
    log = EventLog()
    state = NodeState(NodeView(peer="me"), log=log)
    log.emit(Stopping(reason="SIGTERM"))
    log.emit(CheckpointSkipped(round=4, reason=reason))
    (alarm,) = state.alarms_now()
    assert alarm.fix == told
