"""Several islands as real processes: sharded ones, newcomers, leavers, and the last one left."""

from __future__ import annotations

import signal
import time
from functools import partial
from pathlib import Path

import pytest
from swarm_kit import (
    Island,
    Record,
    digests,
    gaps,
    islands,
    settings,
    until,
)

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

GRACE_S = 0.5
SLACK_S = 2.0  # on top of the grace: nobody waits for longer, whatever happens to others
RUN = {"inner_steps": 60, "total_rounds": 500, "min_grace_s": GRACE_S, "data__batch_size": 4}


def stop_all(swarm: list[Island]) -> None:
    """Ctrl-C for all; everyone must end well."""
    for island in swarm:
        island.signal(signal.SIGINT)
    for island in swarm:
        assert island.await_end(40) == 0, island.tail()


def agree(swarm: list[Island]) -> dict[int, set[str]]:
    """All states reported after each round; AssertionError where two differ."""
    found = digests(swarm)
    assert found
    assert {r: states for r, states in found.items() if len(states) != 1} == {}
    return found


def test_a_sharded_island_among_others(tmp_path: Path):
    """Two ranks that share one model, and two islands of one rank, in one run to its end."""
    rounds = 10
    with islands(tmp_path) as made:
        sharded = made.new("--nproc", "2", *settings(**RUN | {"total_rounds": rounds}))
        address = sharded.await_up()
        swarm = [sharded, made.new("--peers", address), made.new("--peers", address)]
        for island in swarm:
            assert island.await_end(200) == 0, island.tail()
    assert agree(swarm).keys() == set(range(rounds))
    last = [island.rounds()[rounds - 1] for island in swarm]
    assert len({done["state"] for done in last}) == 1
    assert max(done["members"] for done in sharded.events("round")) == 3
    assert (sharded.dir / "logs" / "trainer-rank1.log").exists()
    losses = [done["validation_loss"] for done in sharded.events("round")]
    assert losses[-1] < losses[0] - 0.5


def test_a_joiner_holds_nobody_up(tmp_path: Path, record_property: Record):
    """A newcomer gets the state from several peers while these train on as fast as before.

    All share a few cores, on which a starting process takes its part whatever it starts for. So
    "before" is while an island starts that has nothing to do with this run. Somebody else's
    load can spoil a comparison, which is then made again; a newcomer that held the others up
    would spoil them all.
    """
    with islands(tmp_path) as made:
        swarm = made.swarm(3, **RUN)

        def rate_while(*arguments: str) -> tuple[Island, float]:
            """An island that was started, and inner steps a second of the swarm meanwhile."""
            began, count = time.time(), sum(len(i.events("step")) for i in swarm)
            other = made.new(*arguments)
            until(lambda: other.events("step"), 90, "its first inner step")
            seconds = time.time() - began
            for island in swarm:
                assert max(gap.idle for gap in gaps(island, began)) < GRACE_S + SLACK_S
            return other, (sum(len(i.events("step")) for i in swarm) - count) / seconds

        ratios: list[float] = []
        while len(ratios) < 3 and max(ratios, default=0.0) < 0.9:
            stranger, before = rate_while(*settings(**RUN | {"seed": 1}))
            stranger.kill()
            joiner, during = rate_while("--peers", made.addresses())
            ratios.append(during / before)
            made.await_office(joiner, 4)
            joiner.signal(signal.SIGINT)
            assert joiner.await_end(40) == 0, joiner.tail()
        stop_all(swarm)
    agree([island for island in made.all if island.label == swarm[0].label])
    synced = next(e for e in joiner.events("join") if e["name"] == "sync")
    record_property("speed during a join, of before", ratios)
    record_property("sync", synced["text"])
    assert max(ratios) >= 0.9
    assert sum(count >= 64 * 1024 for count in synced["sources"].values()) >= 2
    assert synced["sources"].keys() <= {island.peer for island in swarm}


def test_a_joiner_anneals_with_the_others(tmp_path: Path, record_property: Record):
    """Its learning rate is that of where the swarm stands, once its cold moments allow it."""
    run = RUN | {"inner_steps": 20, "inner__warmup_steps": 0, "inner__total_steps": 1500}
    with islands(tmp_path) as made:
        first = made.new(*settings(**run))
        address = first.await_up()
        until(lambda: len(first.events("step")) > 300, 120, "a good part of the run", first.tail)
        joiner = made.new("--peers", address)
        until(lambda: len(joiner.events("step")) > 40, 120, "its first steps", joiner.tail)
        found = joiner.events("step")[40]
        then = [step for step in first.events("step") if step["time"] <= found["time"]]
        full = first.events("step")[0]["lr"]
        record_property("learning rates", (full, then[-1]["lr"], found["lr"]))
        assert found["lr"] == pytest.approx(then[-1]["lr"], rel=0.1)
        assert found["lr"] < 0.95 * full
        stop_all(made.all)


def test_a_leaver_is_not_waited_for(tmp_path: Path, record_property: Record):
    """Ctrl-C: a checkpoint, a farewell, and the others go on in the same moment."""
    with islands(tmp_path) as made:
        *others, leaver = made.swarm(3, **RUN)
        asked = time.time()
        leaver.signal(signal.SIGINT)
        assert leaver.await_end(20) == 0, leaver.tail()
        left = time.time()
        assert leaver.processes() == []
        assert any(e["time"] >= asked for e in leaver.events("checkpoint"))
        at = max(others[0].rounds())
        for island in others:
            farewell = partial(heard_farewell, island, leaver)
            until(farewell, 2, f"{island.name} hears the farewell")
            island.await_round(at + 3, 60)
            made.await_office(island, 2)
        stop_all(others)
    agree(made.all)
    record_property("left within s", left - asked)
    for island in others:
        idle = max(gap.idle for gap in gaps(island, asked - 1, left + 5))
        record_property(f"{island.name} idle at most s", idle)
        assert idle < GRACE_S + SLACK_S


def heard_farewell(island: Island, leaver: Island) -> bool:
    left = [event for event in island.events("peer_left") if event["peer"] == leaver.peer]
    return bool(left) and "farewell" in left[-1]["reason"]


def test_the_last_one_goes_on_alone(tmp_path: Path, record_property: Record):
    """One of two is killed: half of two is no majority, and still nobody stops."""
    with islands(tmp_path) as made:
        survivor, victim = made.swarm(2, **RUN)
        killed = time.time()
        at = max(survivor.rounds())
        victim.kill()
        until(lambda: not victim.processes(), 5, "its ranks end with it")
        survivor.await_round(at + 3, 40)
        # the round after next cannot have anything of the victim in it
        alone = next(e["time"] for e in survivor.events("round") if e["round"] == at + 2)
        made.come_back(victim)
        made.await_office(survivor, 2)
        made.await_office(victim, 2)
        survivor.await_round(max(survivor.rounds()) + 2, 60)
        stop_all(made.all)
    agree(made.all)
    record_property("on alone after s", alone - killed)
    assert alone - killed < 15
    idle = max(gap.idle for gap in gaps(survivor, killed - 1))
    record_property("idle at most s", idle)
    assert idle < GRACE_S + SLACK_S
    common = min(max(survivor.rounds()), max(victim.rounds()))
    assert survivor.rounds()[common]["state"] == victim.rounds()[common]["state"]


@pytest.mark.parametrize("together", [True, False], ids=["together", "one by one"])
def test_a_whole_swarm_restarts(tmp_path: Path, record_property: Record, together: bool):
    """All are killed at the same moment; from their checkpoints the run goes on."""
    with islands(tmp_path) as made:
        swarm = made.swarm(3, **RUN)
        until(lambda: all(len(i.events("checkpoint")) >= 2 for i in swarm), 60, "checkpoints")
        addresses = [island.await_up().partition("/")[0] for island in swarm]
        for island in swarm:
            island.signal(signal.SIGKILL)
        for island in swarm:
            assert island.wait(10)
        before = max(max(island.rounds()) for island in swarm)
        saved = [island.events("checkpoint")[-1]["round"] for island in swarm]
        killed = time.time()
        for island, address in zip(swarm, addresses, strict=True):
            island.start("--resume", "--listen", address, "--peers", ",".join(addresses))
            if not together:
                island.await_up()
        for island in swarm:
            made.await_office(island, 3)
        complete = time.time()
        swarm[0].await_round(max(before, *swarm[0].rounds()) + 2, 90)
        stop_all(swarm)
    record_property("killed after round", before)
    record_property("checkpoints", saved)
    record_property("complete again after s", complete - killed)
    # rounds after the newest checkpoint are lost with the memory of all who knew them, and are
    # decided anew; what everybody holds in the end is one chain
    for island in swarm:
        assert min(e["round"] for e in island.since_start("round")) >= min(saved)
    final = [island.rounds() for island in swarm]
    assert max(final[0]) > before
    for r in set(final[0]) & set(final[1]) & set(final[2]):
        assert len({rounds[r]["state"] for rounds in final}) == 1, f"round {r}"
    losses = [event["validation_loss"] for event in swarm[0].events("round")]
    assert losses[-1] < losses[0] - 0.5
