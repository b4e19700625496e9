"""Modes that meet after every step, and fragments of late work, in rounds on a virtual clock."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from exchange_kit import until
from mode_swarm import CONSTANT, ModeSwarm, mode_swarm
from suites import slow

from node.replicas.sparse_state import SparseReplica
from protocols.bounds import NO_BOUND
from protocols.identity import Identity
from protocols.memory import virtual_time

pytestmark = pytest.mark.usefixtures("remembered_signatures")

ALLREDUCE: dict[str, Any] = {"mode": "allreduce", "inner": CONSTANT}
SWITCH = 12  # round from which signs travel
# and how far islands are from where they go, of how far they were, when the test is over
EVERY_STEP: dict[str, tuple[dict[str, Any], float]] = {
    "eager": ({"mode": "eager", "rounds": {"inner_steps": 20}}, 0.3),
    "adamw": (ALLREDUCE, 0.3),
    "onebit-adam": (
        ALLREDUCE | {"outer": {"optimizer": "onebit-adam", "warmup_rounds": SWITCH}},
        0.7,
    ),
    "powersgd": (ALLREDUCE | {"outer": {"optimizer": "powersgd", "rank": 4}}, 0.9),
    "sparta": ({"mode": "sparta", "rounds": {"share": 0.1}}, 0.7),
}


async def in_an_exchange(swarm: ModeSwarm, number: int) -> Any:
    """A member, at a moment at which its work is on its way."""
    member = list(swarm.members.values())[number]
    await until(lambda: not member.swarm.chains[0].under_way, 30.0)
    await until(lambda: member.swarm.chains[0].under_way, 30.0)
    return member


@pytest.mark.parametrize("name", ["eager", "adamw", "onebit-adam", "sparta", *slow("powersgd")])
def test_one_is_killed_in_a_round_and_comes_back_and_one_joins(name: str) -> None:
    """Whatever happens, a round leaves all who have it with the same bits (:class:`Walker`)."""
    given, far = EVERY_STEP[name]

    async def main() -> None:
        async with mode_swarm(given) as swarm:
            await swarm.go_on_by(8)
            victim = await in_an_exchange(swarm, 1)
            await swarm.kill(victim)
            await swarm.go_on_by(6)
            back = await swarm.again(victim)
            assert swarm.round_of(back) < max(swarm.rounds())
            newcomer = await swarm.join(Identity.from_seed(b"n" * 32))
            walkers = [swarm.walkers[m.peer][0] for m in (back, newcomer)]
            await until(lambda: all(w.contributed >= 3 for w in walkers), 120.0)
            await swarm.go_on_by(25)
            members = swarm.living()
            assert len(members) == 5
            assert not any(m.behind for m in members)
            # of what the killed one had begun to send
            assert {who for m in members for who, _ in m.rejected} <= {victim.peer}
            assert {m.swarm.status.status for m in members} == {"active"}
            assert set(walkers[0].replica.roster) == {m.peer for m in members}
            assert max(swarm.rounds()) - min(swarm.rounds()) <= 1
            assert max(swarm.far(m) for m in members) < far
            # each of those who were there all the time is in nearly every round
            always = [m for m in members if m not in (back, newcomer)]
            least = 0.8 * min(swarm.rounds())
            assert all(swarm.walkers[m.peer][0].contributed >= least for m in always)
            kept = [swarm.walkers[m.peer][0].replica.residual for m in members]
            if name in ("onebit-adam", "powersgd"):  # what was lost is each island's own
                values = [one.values for one in kept if one is not None]
                assert len(values) == 5
                assert all(one.any() for one in values)
                assert not any(values[0].equal(one) for one in values[1:])
            else:
                assert kept == [None] * 5
            if name == "sparta":
                one = walkers[0].replica
                assert isinstance(one, SparseReplica)
                assert one.size == 320
                assert max(swarm.rounds()) > 30  # three walks

    virtual_time.run(main())


@pytest.mark.parametrize("name", EVERY_STEP)
def test_a_round_that_nobody_can_end_leaves_everything_as_it_was(name: str) -> None:
    given, _ = EVERY_STEP[name]

    async def main() -> None:
        async with mode_swarm(given, 3) as swarm:
            await swarm.go_on_by(SWITCH + 2)
            await in_an_exchange(swarm, 0)
            members = list(swarm.members.values())
            swarm.network.partition(*({m.peer} for m in members))
            await asyncio.sleep(0.1)  # who has a majority's votes already may commit
            walkers = [swarm.walkers[m.peer][0] for m in members]
            before = [(w.replica.place, w.saved) for w in walkers]
            await asyncio.sleep(3.0)
            for walker, (place, saved) in zip(walkers, before, strict=True):
                one = walker.replica
                assert one.place == place
                for now, then in zip(one.state, saved.vectors, strict=True):
                    assert now.equal(then)
                if one.residual is not None and saved.residual is not None:
                    assert one.residual.values.equal(saved.residual)
            swarm.network.heal()
            await swarm.go_on_by(6)
            assert all(not m.behind for m in members)

    virtual_time.run(main())


FRAGMENTS = {"fragments": 2, "align": True, "dynamic_steps": False}
LATE: dict[str, dict[str, Any]] = {
    "async": {"mode": "async", "rounds": FRAGMENTS},
    "fedavg": {
        "mode": "fedavg",
        "outer": {"optimizer": "heavyball", "momentum": 0.5, "momentum_start": 0.5},
        "rounds": FRAGMENTS | {"clients": 0.5},
    },
}


@pytest.mark.parametrize("name", LATE)
def test_late_work_of_fragments_is_turned_in_each_of_them(name: str) -> None:
    """``rounds.align`` with ``rounds.fragments``: each has its own rounds, momentum and turns."""

    async def main() -> None:
        async with mode_swarm(LATE[name] | {"model": {"n_layers": 2}}) as swarm:
            assert swarm.rules.staleness == NO_BOUND
            slow = next(iter(swarm.members.values()))
            swarm.hurry[slow.peer] = 0.25
            walkers = [one for fragments in swarm.walkers.values() for one in fragments]
            await until(lambda: min(w.contributed for w in walkers) >= 5, 120.0)
            await swarm.go_on_by(5)
            for member in swarm.members.values():
                fragments = [w.replica.place.fragment for w in swarm.walkers[member.peer]]
                assert fragments == [0, 1]
                assert not member.rejected
                assert not member.behind
            late = {peer: [w.late for w in one] for peer, one in swarm.walkers.items()}
            if name == "async":  # who is slow is late in both fragments
                assert all(late[slow.peer]), late
            assert sum(sum(one) for one in late.values()) > 0
            assert swarm.far(slow) < 0.5

    virtual_time.run(main())


def test_what_is_said_to_be_ready_is_to_stay_until_its_round_is_over() -> None:
    """Also before there is a plan: a leader that has heard of it may plan with it at any time."""

    async def main() -> None:
        async with mode_swarm({"rounds": {"staleness": 0}}, 2) as swarm:
            quick, slow = swarm.members.values()
            swarm.hurry[slow.peer] = 0.1
            await swarm.go_on_by(1)
            chain = quick.swarm.chains[0]
            await until(lambda: not quick.swarm.status.ready)
            assert not chain.contributes, "what lies there is of the round before"
            await until(lambda: quick.swarm.status.ready)
            assert chain.contributes
            assert not chain.under_way

    virtual_time.run(main())
