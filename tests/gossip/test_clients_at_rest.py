"""Islands that are not drawn rest; once the trainer of one stands still, the others go on.

Members are whole nodes but for the model (:mod:`working_kit`), so it is seen as well that no inner
step counts twice.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from catching_up_kit import at_one_place, merging, played, scene
from exchange_kit import until
from simulated_swarm import Member
from working_kit import SIZE, WorkingSwarm

from bootstrap.manifest import Manifest
from gossip.chain.own_status import STUCK_S
from node.modes import clients_of
from node.trainer.leader import LONGEST_WAIT_S
from protocols.identity import PeerId

pytestmark = pytest.mark.usefixtures("remembered_signatures")

ROUNDS = {"inner_steps": 2, "total_rounds": 1_000_000, "codec": "fp32"}


def drawn_after(manifest: Manifest, members: list[Member], rests: int) -> tuple[int, Member]:
    """The first round from the third on from which somebody rests so often, and is drawn then."""
    choose = clients_of(manifest)
    assert choose is not None
    peers, place = sorted(member.peer for member in members), members[0].replica.place

    def drawn(round_: int) -> set[str]:
        return set(choose(replace(place, round=round_), peers))

    for first in range(3, 200):
        for member in members:
            told = [member.peer in drawn(first + later) for later in range(rests + 1)]
            if told == [False] * rests + [True]:
                return first, member
    raise AssertionError("nobody is drawn like this")


def hang(member: Member) -> asyncio.Event:
    """Its trainer reads nothing more, until the event is set."""
    line: Any = member.replica.life.trainer.line  # type: ignore[attr-defined]
    going, goes_on = asyncio.Event(), line.next
    line.commands = asyncio.Queue()  # it may be reading of the one that there was

    async def next_(seconds: float) -> Any:
        await going.wait()
        return await goes_on(seconds)

    line.next = next_
    return going


def heard(member: Member, of: Member) -> list[str]:
    """What a member finds that another one is, whenever that changes."""
    presence, found = member.swarm.presence, list[str]()
    told = presence.on_change

    def on_change(peer: PeerId, now: str, before: str) -> None:
        if peer == of.peer:
            found.append(now)
        told(peer, now, before)

    presence.on_change = on_change
    return found


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("rests", [1, 2])
def test_who_hangs_at_rest_is_replaced_once_it_is_drawn_and_comes_back(
    rests: int, count: int
) -> None:
    """Whether the others see it by a round that it does not apply, or none comes before its own."""

    rounds = ROUNDS | {"clients": 1 / count}  # one in each
    tables = {"mode": "fedavg", "rounds": rounds, "merge": {"rule": "mean"}}
    manifest = Manifest.model_validate(tables)

    async def story() -> None:
        async with scene(
            count,
            size=SIZE,
            codec="fp32",
            think=(0.4, 0.5),
            made=WorkingSwarm,
            manifest=manifest,
        ) as here:
            swarm = here.swarm
            assert isinstance(swarm, WorkingSwarm)
            round_, hung = drawn_after(manifest, here.founders, rests)
            # as one whose record of promises has outlived a restart
            hung.swarm.chains[0]._forgetting._lost = False
            others = [member for member in here.founders if member is not hung]
            await swarm.committed(round_, 120.0, every=0.01)
            trainer: Any = hung.replica.life.trainer  # type: ignore[attr-defined]
            await until(lambda: trainer.round == round_ and trainer.resting, 5.0, every=0.01)
            going, said = hang(hung), heard(others[0], hung)
            await asyncio.sleep(2 * STUCK_S)
            before = min(member.replica.place.round for member in others)
            await asyncio.sleep(15.0)
            assert said == ["joining"]
            assert min(member.replica.place.round for member in others) > before + 6
            going.set()
            await until(lambda: said == ["joining", "active"], LONGEST_WAIT_S + 10.0)
            await until(merging(here.founders), 60.0)
            swarm.over = True
            await until(lambda: at_one_place(here.founders), 30.0)
            swarm.check(here.founders)

    played(story)


def test_fragments_that_draw_by_rounds_of_their_own_keep_up_with_each_other() -> None:
    """Over links on which a fragment is on its way for as long as the inner steps take."""
    rounds = ROUNDS | {"clients": 0.25, "fragments": 2, "alpha": 0.0, "inner_steps": 4}
    tables = {"mode": "fedavg", "rounds": rounds, "merge": {"rule": "mean"}}

    async def story() -> None:
        async with scene(
            4,
            size=SIZE,
            codec="fp32",
            think=(0.5, 0.55),
            uploads=[8e4] * 4,
            fragments=2,
            made=WorkingSwarm,
            manifest=Manifest.model_validate(tables),
            wait_s=1.0,
        ) as here:
            swarm = here.swarm
            assert isinstance(swarm, WorkingSwarm)
            await swarm.committed(24, 200.0)
            behind = [m.replicas[0].place.round - m.replicas[1].place.round for m in here.founders]
            assert max(map(abs, behind)) <= 2
            swarm.over = True
            await until(lambda: at_one_place(here.founders), 30.0)
            swarm.check(here.founders)

    played(story)
