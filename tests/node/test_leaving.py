"""How a node leaves: no round is lost that nobody else has."""

from __future__ import annotations

import asyncio
import math
from contextlib import AsyncExitStack, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from gossip_kit import PLACE
from leaving_kit import Leaver
from simulated_swarm import simulated_swarm

from bootstrap.manifest import Manifest
from gossip.membership.members import Liveness
from node.errors import operator_error
from node.leaving import LINGER_S, LOOK_S, leave
from node.monitor.event_log import EventLog
from node.monitor.state import NodeState
from node.monitor.views import NodeView
from node.participation import Participation
from node.runtime import Node
from node.templates import stop_s
from protocols.errors import OperatorError
from protocols.memory import virtual_time


@pytest.mark.parametrize("alone", [True, False])
def test_who_alone_decides_on_rounds_says_what_that_means_for_those_who_stay(alone: bool) -> None:
    async def main() -> None:
        async with simulated_swarm(2) as swarm:
            await asyncio.sleep(5.0)
            first, second = swarm.members.values()
            told: list[str] = []
            part: Any = Leaver()
            part.swarm, part.events.emit = first.swarm, lambda event: told.append(event.text)
            if alone:  # the other one stays, as a seed would
                second.swarm.presence.note(role="seed")
                second.swarm.presence.tell()
                await asyncio.sleep(0.5)
                first.replicas[0]._roster = (first.peer,)
            await leave(part, AsyncExitStack())
            assert ["until it resumes" in text for text in told] == [True] * alone

    virtual_time.run(main())


@pytest.mark.parametrize("others", [(), (Liveness.ALIVE,), (Liveness.LEFT, Liveness.SUSPECT)])
async def test_no_round_comes_after_the_last_checkpoint_and_nobody_waits(others: Any) -> None:
    leaver: Any = Leaver(*others)
    await leave(leaver, AsyncExitStack())
    assert leaver.did == ["farewell", "save, still from now on", "stop"]
    assert leaver.rests == ["farewell"], "what is trained after it nobody merges"


@pytest.mark.parametrize("finishing", [True, False])
async def test_no_share_comes_after_the_last_checkpoint(finishing: bool) -> None:
    """At the end of the run neither: those for whom it stays there go on giving."""
    leaver: Any = Leaver(Liveness.ALIVE, finishing=finishing)
    (chain,) = leaver.swarm.chains
    chain.settle.side_effect = lambda: leaver.did.append("takes no more")
    await leave(leaver, AsyncExitStack())
    assert leaver.did.count("takes no more") == 1
    assert leaver.did.index("takes no more") < leaver.did.index(
        "save" if finishing else "save, still from now on"
    )


async def test_at_the_end_of_the_run_it_stays_for_those_who_are_not_there_yet() -> None:
    leaver: Any = Leaver(Liveness.ALIVE, finishing=True)
    await leave(leaver, AsyncExitStack())
    assert leaver.did == ["save", "stop", "farewell"]
    alone: Any = Leaver(Liveness.LEFT, finishing=True)
    await leave(alone, AsyncExitStack())
    assert alone.did == ["save, still from now on", "stop", "farewell"]


@pytest.mark.parametrize(
    ("mode", "role", "status", "stays"),
    [
        ("diloco", "island", "active", True),
        ("diloco", "island", "joining", True),
        ("diloco", "server", "active", True),
        ("diloco", "seed", "active", True),
        ("diloco", "observer", "active", False),
        ("gossip", "seed", "active", False),  # has no state to bring to an end
    ],
)
def test_it_stays_for_who_is_there_and_lacks_the_last_round(
    mode: str, role: str, status: str, stays: bool
) -> None:
    """A newcomer as well: nobody else could tell it that the run is over."""

    async def main() -> float:
        leaver: Any = Leaver(Liveness.ALIVE, finishing=True)
        tables = {"mode": mode, "rounds": {"total_rounds": 9}}
        leaver.manifest = Manifest.model_validate(tables)
        leaver.other.role, leaver.other.status, leaver.other.round = role, status, 8
        clock = asyncio.get_running_loop().time
        began, leaving = clock(), asyncio.ensure_future(leave(leaver, AsyncExitStack()))
        await asyncio.sleep(LINGER_S / 2)
        assert ("farewell" in leaver.did) is not stays
        leaver.other.round = 9
        leaver.news.set()
        await leaving
        assert leaver.did[1:] == ["stop", "farewell"]
        assert (leaver.did[0] == "save") is stays, "else it stands still from then on"
        return clock() - began

    assert virtual_time.run(main()) <= LINGER_S / 2 + LOOK_S


def test_it_stays_no_longer_than_that_for_who_does_not_come_to_the_end() -> None:
    async def main() -> float:
        leaver: Any = Leaver(Liveness.ALIVE, finishing=True)
        leaver.other.round = 8
        began = asyncio.get_running_loop().time()
        await leave(leaver, AsyncExitStack())
        return asyncio.get_running_loop().time() - began

    assert LINGER_S < virtual_time.run(main()) <= LINGER_S + 2 * LOOK_S


@pytest.mark.parametrize("said", [None, 8, 9])
@pytest.mark.parametrize("comes", [True, False])
def test_at_the_end_of_the_run_it_stays_for_who_reads_the_state(
    said: int | None, comes: bool
) -> None:
    """A large one takes longer, and who has it announces itself, and takes the last rounds, only
    then. Who has announced that it stands at the end waits for nothing."""

    async def main() -> list[str]:
        leaver: Any = Leaver(*[Liveness.ALIVE] * (said is not None), finishing=True)
        leaver.other.round = said
        leaver.states.readers = {0}
        leaving = asyncio.ensure_future(leave(leaver, AsyncExitStack()))
        await asyncio.sleep(3 * LINGER_S)
        leaver.states.readers = set()
        if said != 9:
            await asyncio.sleep(LINGER_S - 2 * LOOK_S)
            assert leaver.did == ["save", "stop", "says so"]
            leaver.other.round = 9 if comes else 8
            leaver.swarm.membership.announcement = lambda peer: leaver.other
            leaver.news.set()
        await asyncio.wait_for(leaving, (2 if comes or said == 9 else 4) * LOOK_S)
        did: list[str] = leaver.did
        return did

    assert virtual_time.run(main()) == ["save", "stop", *["says so"] * (said != 9), "farewell"]


def test_it_stays_for_a_slow_download_for_as_long_as_it_says() -> None:
    async def main() -> float:
        leaver: Any = Leaver(finishing=True)
        leaver.states.readers, leaver.states.longest_s = {0}, 7200.0
        told: list[str] = []
        leaver.events.emit = lambda event: told.append(event.text)
        began = asyncio.get_running_loop().time()
        await leave(leaver, AsyncExitStack())
        assert "for up to 2h00m" in told[0]
        return asyncio.get_running_loop().time() - began - 7200.0

    assert LINGER_S - LOOK_S <= virtual_time.run(main()) <= LINGER_S + 2 * LOOK_S


@pytest.mark.parametrize("script", [False, True])
async def test_the_only_one_in_office_stays_until_a_newcomer_is_in_it(script: bool) -> None:
    """A script, which trains no more, before the first round alone: that calls the roll."""
    leaver: Any = Leaver(script=object() if script else None)
    leaver.gathering.least = 3 * script
    leaver.states.readers = {7}
    leaving = asyncio.ensure_future(leave(leaver, AsyncExitStack()))
    for _ in range(10):
        await asyncio.sleep(0)
    assert leaver.did == ["says so", "save"]  # who cannot wait ends it now, with nothing lost
    leaver.states.readers, leaver.other.status = set(), "joining"
    leaver.swarm.membership.islands[0] = SimpleNamespace(announce=leaver.other)
    leaver.swarm.membership.liveness = lambda peer, now: Liveness.ALIVE
    leaver.news.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert leaver.did == ["says so", "save"]
    leaver.other.status = "active"
    leaver.news.set()
    await asyncio.wait_for(leaving, 5)
    assert leaver.did[2:] == ["farewell", "save, still from now on", "stop"]


@pytest.mark.parametrize("why", ["another decides", "not in office itself", "script", "nobody"])
async def test_else_it_leaves_at_once(why: str) -> None:
    there = [Liveness.ALIVE] if why == "another decides" else []
    leaver: Any = Leaver(*there, script=object() if why == "script" else None)
    leaver.states.readers = {7} if why != "nobody" else set()
    if why == "not in office itself":
        leaver.mine.status = "joining"
    await asyncio.wait_for(leave(leaver, AsyncExitStack()), 5)
    assert leaver.did == ["farewell", "save, still from now on", "stop"]


async def test_a_newcomer_that_never_comes_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("node.leaving.HANDOVER_S", 0.05)
    monkeypatch.setattr("node.leaving.LOOK_S", 0.01)
    leaver: Any = Leaver()
    leaver.states.readers = {7}
    await asyncio.wait_for(leave(leaver, AsyncExitStack()), 5)
    assert leaver.did[-2:] == ["save, still from now on", "stop"]


async def test_who_waits_for_a_checkpoint_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.leaving.SLOW_S", 0.01)
    leaver: Any = Leaver()
    save = leaver.keeper.save

    async def slowly(*, wait: bool, last: AsyncExitStack | None) -> bool:
        await asyncio.sleep(0.1)
        return bool(await save(wait=wait, last=last))

    leaver.keeper.save = slowly
    await asyncio.wait_for(leave(leaver, AsyncExitStack()), 5)
    assert leaver.did == ["farewell", "says so", "save, still from now on", "stop"]


DEFECT = operator_error("E999", why="of what listens to the script")


@pytest.mark.parametrize("merged", [0, 2])
async def test_who_leaves_as_its_trainer_has_failed_saves_what_was_merged(merged: int) -> None:
    """And says farewell, and waits for no newcomer; what it ends with is the failure."""
    leaver: Any = Leaver()
    leaver.states.readers, leaver.failed = {7}, DEFECT
    leaver.reporter.rounds_committed = merged
    assert await asyncio.wait_for(leave(leaver, AsyncExitStack()), 5) is DEFECT
    assert leaver.did == ["farewell", *["save, still from now on"] * bool(merged), "stop"]


async def test_a_trainer_that_fails_meanwhile_is_told_of_as_well() -> None:
    leaver: Any = Leaver()
    save = leaver.keeper.save

    async def fails(*, wait: bool, last: AsyncExitStack | None) -> bool:
        leaver.failed = DEFECT
        return bool(await save(wait=wait, last=last))

    leaver.keeper.save = fails
    assert await leave(leaver, AsyncExitStack()) is DEFECT
    assert leaver.did == ["farewell", "save, still from now on", "stop"]


def test_a_failed_trainer_s_node_takes_no_longer_to_leave_than_services_give_it() -> None:
    async def main() -> float:
        leaver: Any = Leaver()
        leaver.failed, leaver.keeper.took = DEFECT, 100.0
        leaver.keeper.save = lambda **given: asyncio.sleep(math.inf)
        began = asyncio.get_running_loop().time()
        assert await leave(leaver, AsyncExitStack()) is DEFECT
        return asyncio.get_running_loop().time() - began

    assert virtual_time.run(main()) == stop_s(100.0)


@pytest.mark.parametrize("last", [True, False])
async def test_a_trainer_that_cannot_be_kept_alive_has_its_node_leave_in_order(last: bool) -> None:
    """Any other error ends it at once, without a checkpoint of what that has left behind."""
    reasons: list[str] = []
    part: Any = Leaver()
    part.node.leave = reasons.append

    async def run() -> None:
        raise DEFECT

    conductor: Any = SimpleNamespace(run=run, failed=DEFECT if last else None)
    with nullcontext() if last else pytest.raises(OperatorError):
        await Participation._conduct(part, conductor)
    assert part.failed is conductor.failed
    assert reasons == ["E999: internal error"] * last


@pytest.mark.parametrize(
    ("why", "told"), [("rounds", "3 rounds done, as --rounds says"), ("seconds", "1 s are over")]
)
def test_who_stops_by_itself_says_so_to_its_peers_and_here(why: str, told: str) -> None:
    """As after Ctrl-C: else the others would wait for it, and its operator see no reason."""

    async def main() -> None:
        async with simulated_swarm(2) as swarm:
            await asyncio.sleep(5.0)
            first, second = swarm.members.values()
            log = EventLog()
            state = NodeState(NodeView(peer=first.peer), log=log)
            stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            node: Any = SimpleNamespace(
                events=log,
                config=SimpleNamespace(rounds=3),
                daemon=SimpleNamespace(stop_reason=stopped, stop=stopped.set_result),
            )
            node.leave = lambda reason: Node.leave(node, reason)
            part: Any = Leaver()
            part.manifest, part.swarm, part.replicas = Manifest(), first.swarm, first.replicas
            if why == "rounds":
                ends: Any = Participation(node, MagicMock())
                ends.replicas = (SimpleNamespace(manifest=Manifest(), place=PLACE),)
                ends.reporter = SimpleNamespace(round=4, rounds_committed=3)
                ends._on_moved()
            else:
                await Node._stop_after(node, 1.0)
            assert await stopped == told
            assert [record.event.kind for record in log.recent] == ["stopping"]
            assert state.status == "leaving"
            await leave(part, AsyncExitStack())
            heard = second.swarm.membership.announcement(first.peer)
            assert heard is not None
            assert heard.status == "leaving"

    virtual_time.run(main())
