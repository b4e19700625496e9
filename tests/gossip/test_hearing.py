"""Names in office that never answer a candidate, where strangers come: who is taken for mute."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from company_kit import NOW, PATIENCE, SOON, Scene
from exchange_kit import until
from gossip_kit import PLACE
from round_kit import Peer, World
from simulated_swarm import simulated_swarm
from test_trial import ONES, Open, announce

from gossip.rounds.agreement import NONE
from gossip.rounds.hearing import IN_VAIN
from gossip.rounds.round import Round
from gossip.rounds.trial import Trial
from protocols.errors import Malformed, RemoteRefused, Stale
from protocols.identity import Identity, PeerId
from protocols.memory import virtual_time
from protocols.messages import PartResult, Passed, Prepare, Promise

pytestmark = pytest.mark.usefixtures("remembered_signatures")

STRANGER = Identity.from_seed(b"s" * 32).peer_id
LATE = NOW + IN_VAIN * PATIENCE + SOON


def asked(scene: Scene, *, trial: Trial | None) -> list[PeerId]:
    """All others are asked for their promise, and alive long after that; none has said anything."""
    scene.company.trial = trial
    scene.company.asks(scene.company.agreement.roster, NOW)
    scene.hears(LATE)
    scene.company.listen(LATE, PATIENCE)
    return scene.others


def test_who_never_answers_a_candidate_counts_no_more() -> None:
    scene = Scene()
    company = scene.company
    names = asked(scene, trial=Trial())
    assert company.able(LATE) == company.here(LATE) == (company.me,)
    assert not company.majority_alive(LATE)
    for one in names[:2]:
        company.hearing.heard(one)
    assert set(company.able(LATE)) == set(company.here(LATE)) == {company.me, *names[:2]}
    assert company.majority_alive(LATE)
    company.agreement.promised = (1, 1)  # where all are needed
    assert not company.intact(LATE)
    scene.adopt((1, 1))  # they were enough for a plan, so this is over
    company.listen(LATE + 60.0, PATIENCE)
    assert len(company.able(LATE)) == 5


def test_whom_a_candidate_has_not_asked_for_so_long_counts() -> None:
    scene = Scene()
    names = asked(scene, trial=Trial())
    scene.company.listen(LATE - 2 * SOON, PATIENCE)
    assert set(scene.company.able(LATE)) == {scene.company.me, *names}


def test_nobody_is_mute_sooner_than_the_silent_are_dead() -> None:
    scene = Scene()
    names = asked(scene, trial=Trial())
    floor, quick = scene.company.membership.patience.dead_floor_s, 0.01
    scene.company.listen(NOW + floor - SOON, quick)
    assert scene.company.hearing.mute == set()
    scene.company.listen(NOW + floor, quick)
    assert scene.company.hearing.mute == set(names)


def test_who_has_a_reason_to_be_silent_is_not_asked() -> None:
    """It abstains, or it has yet to come to this round."""
    scene = Scene()
    abstains, behind, *names = scene.others
    scene.announces(abstains, status="joining")
    scene.announces(behind, place=replace(PLACE, round=PLACE.round - 1))
    asked(scene, trial=Trial())
    assert scene.company.hearing.mute == set(names)


def test_where_no_strangers_come_everybody_is_waited_for() -> None:
    scene = Scene()
    names = asked(scene, trial=None)
    assert set(scene.company.able(LATE)) == {scene.company.me, *names}


def test_the_mute_do_not_come_back_with_a_reformed_roster() -> None:
    scene = Scene()
    company = scene.company
    mute, *others = asked(scene, trial=Trial())
    for one in others:
        company.hearing.heard(one)
    for roster in (company.agreement.roster, tuple(sorted([company.me, *others]))):
        assert company.next_roster(roster, True, LATE) == {company.me, *others}
        assert company.next_roster(roster, False, LATE) == {company.me, mute, *others}


def test_who_has_gone_on_elsewhere_is_not_mute() -> None:
    """My own link may be dead one way."""
    scene = Scene()
    names = asked(scene, trial=Trial())
    scene.announces(names[0], place=replace(PLACE, round=PLACE.round + 1))
    scene.hears(LATE)
    scene.company.listen(LATE, PATIENCE)
    assert scene.company.hearing.mute == set(names[1:])


def candidate() -> tuple[World, Round, Peer]:
    """A member that stands in a round without a plan, and one that it asks."""
    world = World(4, seed=1, think=(30.0, 31.0))
    world.run(1.0)
    first, other, *_ = world.peers.values()
    current = first.round
    assert current is not None
    current.company.trial = Trial()
    current._stand(0, current.roster, world.now)
    return world, current, other


def mute(world: World, current: Round) -> set[PeerId]:
    """Whom a candidate takes for mute that hears of all and still has no answer."""
    current.company.listen(world.now + 100.0, 1.0)
    return current.company.hearing.mute


def test_a_promise_is_an_answer_once_it_is_found_sound() -> None:
    world, current, other = candidate()
    peer, place = other.identity.peer_id, current.place
    assert len(mute(world, current)) == 3
    promise = Promise(*current.agreement.promised, 0, 0, None, ())
    made_up = PartResult(
        place.fragment, place.round, 0, 10, STRANGER, "int4", bytes(32), b"", bytes(32), bytes(64)
    )
    with pytest.raises(Malformed):
        current.on_message(peer, replace(promise, held=(made_up,)), world.now)
    assert peer in mute(world, current)
    current.on_message(peer, promise, world.now)
    assert mute(world, current) == set(current.roster) - {current.me, peer}


def test_who_stands_itself_is_not_mute_nor_is_who_refuses() -> None:
    world, current, other = candidate()
    peer = other.identity.peer_id
    stands = Prepare(
        current.place.fragment, current.place.round, 0, 99, b"elsewhere".ljust(32), current.roster
    )
    with pytest.raises(Stale):
        current.on_prepare(peer, stands, world.now)
    assert peer not in mute(world, current)
    _, refused, *_ = set(current.roster) - {current.me, peer}
    current.on_unpromised(refused)
    assert len(mute(world, current)) == 1


@pytest.mark.parametrize(("code", "heard"), [("doubted", True), ("unknown", False)])
def test_a_refusal_is_an_answer_but_not_that_nobody_takes_such_calls(
    code: str, heard: bool
) -> None:
    async def main() -> None:
        async with simulated_swarm(3, made=Open, think=(30.0, 31.0)) as swarm:
            await asyncio.sleep(1.0)
            first, other, _ = swarm.living()
            current = first.swarm.chains[0].round

            async def refuse(peer: PeerId, body: bytes) -> bytes:
                raise RemoteRefused(code)

            node = swarm.network.node(other.peer)
            assert node is not None
            node.transport.on_call("round", refuse, max_body=Passed.MAX_BYTES)
            current.company.hearing.ask([other.peer], 0.0)
            asks = current.proposer.prepare(0, current.roster)
            first.swarm.chains[0].sending.tell(current, (other.peer,), asks)
            await asyncio.sleep(1.0)
            assert current.company.hearing.silent(100.0) == (set() if heard else {other.peer})

    virtual_time.run(main())


@pytest.mark.parametrize(
    ("names", "again"),
    [
        pytest.param(1, 3, marks=pytest.mark.slow),  # the later epoch's roster has the name
        (2, 1),  # the first one's majority counts them
        pytest.param(2, 2, marks=pytest.mark.slow),
    ],
)
def test_names_in_office_stop_no_run_whose_members_start_again(
    names: int, again: int, tmp_path: Path
) -> None:
    async def main() -> None:
        async with simulated_swarm(
            3, made=Open, size=4000, think=(1.0, 1.1), records=tmp_path
        ) as swarm:
            members = list(swarm.members.values())
            silent = {one.peer_id for one in ONES[:names]}
            talk = asyncio.create_task(announce(swarm, ONES[:names], 300.0))

            def promised() -> bool:
                """All have promised a ballot of one round that the names decide as well."""
                rounds = [one.swarm.chains[0].round for one in members]
                return len({it.place.round for it in rounds}) == 1 and all(
                    silent <= set(it.roster) and it.agreement.promised > NONE for it in rounds
                )

            await until(promised, 60.0, every=0.005)
            stood = members[0].replica.place.round
            for one in members[:again]:
                await swarm.kill(one)
            await asyncio.sleep(0.5)
            for one in members[:again]:
                swarm.restart(one)
            await swarm.committed(stood + 3, 150.0)
            talk.cancel()
            swarm.agree()

    virtual_time.run(main())
