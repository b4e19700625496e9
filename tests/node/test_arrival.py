"""Which state a newcomer takes, from whom, and for how long it tries."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
from arrival_kit import HONEST, LIAR, STRANGERS, Scene, forged, played, swarm
from exchange_kit import until
from gossip_kit import RUN
from lineage_kit import CREATOR, OTHERS, Chain, changing

from bootstrap.state import Download, DownloadProgress, NoSourceError, download_state, state_digest
from gossip.catchup import lineage
from gossip.catchup.claims import PROOF_S
from gossip.place import Place
from gossip.plans.certificate import genesis
from node.entry.looking import CALL_TIMEOUT_S, PATIENCE_S
from node.entry.targets import beyond
from protocols.errors import OperatorError
from protocols.identity import Identity, PeerId
from protocols.messages import Announce, Handover, Standing

pytestmark = pytest.mark.usefixtures("remembered_signatures")


def test_fifty_changes_of_office_later() -> None:
    async def story(scene: Scene) -> None:
        chain = changing(50)
        for who in OTHERS[:2]:
            scene.stand(who, chain, 5.0)
        found = await scene.arrive()
        assert found.target.round == 150
        assert set(found.state.roster) == set(chain.certificates[-1].outcome.next_roster)
        assert len(found.state.lineage) == 50
        assert scene.base.unique().tolist() == [5.0]

    played(story)


def test_who_became_known_meanwhile_is_asked_where_the_others_are_gone() -> None:
    async def story(scene: Scene) -> None:
        scene.stand(CREATOR, swarm(), 5.0)
        await scene.arrive(seed_known_at=10.0)
        assert 10 <= asyncio.get_running_loop().time() < 20

    played(story)


def place_of(announce: Announce) -> Place:
    return Place(RUN, 0, announce.round, announce.head, announce.state, announce.work)


def test_who_speaks_of_other_fragments_than_the_run_has_is_passed_over() -> None:
    """However much it claims: its places are not of the fragments that are asked for."""

    async def story(scene: Scene) -> None:
        chain = swarm()
        scene.stand(CREATOR, chain, 5.0)
        chain = swarm()
        chain.add()
        scene.stand(OTHERS[0], chain, 6.0, others=(Standing(True, 0, b"", b"", 0),))
        await scene.arrive()
        assert scene.base.unique().tolist() == [5.0]

    played(story)


def test_who_is_behind_takes_no_state_that_it_has_or_has_left_behind() -> None:
    """Those who have just started again are joining, and the only ones who are further."""

    async def story(scene: Scene) -> None:
        chain = swarm()
        scene.stand(CREATOR, chain, 3.0)
        chain = swarm()
        chain.add()
        mine = place_of(scene.stand(OTHERS[0], chain, 5.0))
        chain = swarm()
        chain.add()
        chain.add()
        scene.stand(OTHERS[1], chain, 7.0, status="joining")
        await scene.arrive(wanted=beyond(lambda: mine, 0))
        assert scene.base.unique().tolist() == [7.0]

    played(story)


def test_who_was_ahead_is_not_waited_for_once_nobody_is() -> None:
    async def story(scene: Scene) -> None:
        mine = place_of(scene.stand(CREATOR, swarm(), 5.0))
        with pytest.raises(OperatorError, match="nobody is further"):
            await scene.arrive(wanted=beyond(lambda: mine, 0))
        assert asyncio.get_running_loop().time() < 10

    played(story)


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_where_nobody_is_left_it_says_early_that_the_run_may_be_over(how: str) -> None:
    """As long as before it is tried all the same: who stopped may be back in a moment."""

    async def story(scene: Scene) -> None:
        scene.stand(CREATOR, swarm(), 5.0)
        for peer in (scene.seed.peer_id, CREATOR.peer_id):
            getattr(scene.network, how)(peer)
        arriving = asyncio.ensure_future(scene.arrive())
        await asyncio.sleep(PATIENCE_S / 4)
        (told,) = scene.broken
        assert "none of the peers that were greeted answers any more: the run may be over" in told
        with pytest.raises(OperatorError, match="the run may be over") as caught:
            await arriving
        assert "--resume" in caught.value.fix
        assert PATIENCE_S / 2 < asyncio.get_running_loop().time() <= PATIENCE_S + CALL_TIMEOUT_S

    played(story)


def test_a_peer_that_starts_again_meanwhile_is_not_taken_for_gone() -> None:
    async def story(scene: Scene) -> None:
        scene.stand(CREATOR, swarm(), 5.0)
        scene.network.freeze(scene.seed.peer_id)
        arriving = asyncio.ensure_future(scene.arrive())
        await asyncio.sleep(PATIENCE_S / 4)
        assert len(scene.broken) == 1
        announces, scene.announces = scene.announces, []
        scene.network.thaw(scene.seed.peer_id)
        await asyncio.sleep(PATIENCE_S / 4)
        assert scene.broken[1:] == ["no island has announced a state"]
        scene.announces = announces
        await arriving

    played(story)


def test_however_many_are_silent_it_ends_in_time() -> None:
    async def story(scene: Scene) -> None:
        silent = [Identity.from_seed(bytes([150 + n]) * 32).peer_id for n in range(60)]
        for peer in silent:
            scene.network.join(peer)
            scene.network.freeze(peer)
        with pytest.raises(OperatorError) as caught:
            await scene.arrive(entries=silent)
        assert caught.value.code == "E502"
        assert asyncio.get_running_loop().time() <= PATIENCE_S + CALL_TIMEOUT_S

    played(story)


@pytest.mark.parametrize("restarted", [False, True])
def test_where_those_at_the_entry_are_gone_those_whom_they_named_are_asked(restarted: bool) -> None:
    """``restarted``: who has the state lets in no strangers, and has forgotten the newcomer."""

    async def story(scene: Scene) -> None:
        source = scene.stand(CREATOR, swarm(), 5.0).peer
        async with asyncio.TaskGroup() as group:
            arriving = group.create_task(scene.arrive())
            await scene.learned.wait()
            scene.network.freeze(scene.seed.peer_id)
            scene.network.freeze(source)
            await until(lambda: scene.broken, 100.0)  # the operator is told that nothing comes
            scene.network.thaw(source)
            scene.strangers |= {source} if restarted else set()
            await arriving
        assert scene.base.unique().tolist() == [5.0]

    played(story)


def test_a_heavier_state_with_a_forged_chain_is_passed_over() -> None:
    async def story(scene: Scene) -> None:
        chain = swarm()
        scene.stand(CREATOR, chain, 5.0)
        scene.stand(OTHERS[0], chain, 5.0)
        lie, kept = forged(chain)
        scene.stand(LIAR, lie, 6.0, kept)
        found = await scene.arrive()
        assert found.target.head == chain.head
        assert scene.base.unique().tolist() == [5.0]
        assert scene.untrue == [LIAR.peer_id]

    played(story)


@pytest.mark.parametrize("names", [1, 60])
def test_a_claim_that_nobody_proves_keeps_nobody_from_what_others_have(names: int) -> None:
    """Whoever claims the most work is asked first, and says nothing: under however many names."""

    async def story(scene: Scene) -> None:
        chain = swarm()
        scene.stand(CREATOR, chain, 5.0)
        lie, kept = forged(chain)
        for n in range(names):
            silent = Identity.from_seed(bytes([150 + n]) * 32)
            scene.stand(silent, lie, 6.0, kept)
            scene.network.freeze(silent.peer_id)
        await scene.arrive()
        assert scene.base.unique().tolist() == [5.0]
        assert asyncio.get_running_loop().time() < PROOF_S + 10

    played(story)


def test_however_many_claim_other_places_and_are_silent_a_true_one_is_taken_in_time() -> None:
    async def story(scene: Scene) -> None:
        chain = swarm()
        scene.stand(CREATOR, chain, 5.0)
        for n in range(60):
            silent = Identity.from_seed(bytes([150 + n]) * 32)
            lie, kept = forged(chain)
            lie.work += n
            scene.stand(silent, lie, 6.0, kept)
            scene.network.freeze(silent.peer_id)
        await scene.arrive()
        assert scene.base.unique().tolist() == [5.0]
        assert asyncio.get_running_loop().time() < PATIENCE_S / 2

    played(story)


def test_not_all_newcomers_ask_the_same_members_in_office() -> None:
    office = [CREATOR, *(Identity.from_seed(bytes([200 + n]) * 32) for n in range(7))]
    asked = list[Sequence[PeerId]]()

    async def story(scene: Scene) -> None:
        chain = Chain()
        chain.add(office)
        chain.add()
        for who in office:
            scene.stand(who, chain, 5.0)
        arrival = scene.arrival()
        arrival.dice = random.Random(len(asked))
        found = await arrival.fetch([scene.base, scene.momentum], lambda *_: None)
        asked.append(found.target.sources)

    for _ in range(6):
        played(story)
    assert {frozenset(sources) for sources in asked} == {frozenset(o.peer_id for o in office)}
    assert len({sources[0] for sources in asked}) > 2
    assert len({frozenset(sources[:2]) for sources in asked}) > 4


def test_of_those_who_claim_the_same_who_answered_nothing_is_asked_last() -> None:
    async def story(scene: Scene) -> None:
        chain = swarm()
        silent = [Identity.from_seed(bytes([150 + n]) * 32) for n in range(12)]
        for who in [*silent, CREATOR]:
            scene.stand(who, chain, 5.0)
        first = sorted(who.peer_id for who in [*silent, CREATOR])
        before = first[: first.index(CREATOR.peer_id)]
        for who in silent:
            scene.network.freeze(who.peer_id)
        assert len(before) * CALL_TIMEOUT_S > PROOF_S, "it would be asked too late in every look"
        await scene.arrive()
        assert asyncio.get_running_loop().time() < PATIENCE_S

    played(story)


def test_nothing_but_a_forged_chain_is_an_error_of_its_own() -> None:
    async def story(scene: Scene) -> None:
        chain, kept = forged(swarm())
        scene.stand(LIAR, chain, 6.0, kept)
        with pytest.raises(OperatorError, match="history") as caught:
            await scene.arrive()
        assert caught.value.code == "E206"
        assert asyncio.get_running_loop().time() < 20
        assert scene.base.unique().tolist() == [0.0]

    played(story)


def test_a_history_with_a_gap_behind_a_full_record_is_named_as_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lineage, "MAX_BYTES", Handover.MAX_BYTES + 100)

    async def story(scene: Scene) -> None:
        scene.stand(OTHERS[0], changing(3), 6.0)
        with pytest.raises(OperatorError, match="no newcomer can follow") as caught:
            await scene.arrive()
        assert caught.value.code == "E206"

    played(story)


def test_who_has_moved_on_by_the_time_it_is_asked_gives_what_it_has() -> None:
    """Where rounds are short it always has; what it has then is proven like anything else."""

    async def story(scene: Scene) -> None:
        chain = swarm()
        for who in (CREATOR, OTHERS[0]):
            scene.stand(who, chain, 5.0)
        announced = chain.claim
        for state in scene.states:
            state.fill_(7.0)
        chain.add()
        chain.add()
        found = await scene.arrive()
        assert announced[0] == found.target.round - 2
        assert found.state.place.previous == chain.head
        assert found.target.state == state_digest(scene.states[:1] * 2)[0]
        assert scene.base.unique().tolist() == [7.0]
        assert len(found.served) == 2  # the other one was asked as well

    played(story)


def test_of_one_place_the_state_counts_that_most_in_office_hold() -> None:
    """Whoever follows the rounds can show the certificates, under any number of names."""

    async def story(scene: Scene) -> None:
        chain = swarm()
        scene.stand(CREATOR, chain, 5.0)
        for stranger in STRANGERS:
            scene.stand(stranger, chain, 6.0)
        await scene.arrive()
        assert scene.base.unique().tolist() == [5.0]

    played(story)


def test_who_has_moved_on_is_believed_in_office_first() -> None:
    async def story(scene: Scene) -> None:
        chain = swarm()
        for who in (*STRANGERS, CREATOR):
            scene.stand(who, chain, 5.0)
        for state in scene.states:
            state.fill_(6.0)
        scene.states[-1].fill_(7.0)
        chain.add()
        await scene.arrive()
        assert scene.base.unique().tolist() == [7.0]

    played(story)


@pytest.mark.parametrize("honest", HONEST[:2])
def test_who_has_moved_to_where_nobody_let_it_is_passed_over(honest: Identity) -> None:
    """Whoever of the two is asked first."""

    async def story(scene: Scene) -> None:
        chain = swarm()
        scene.stand(honest, chain, 5.0)
        lie = Chain()
        lie.certificates, lie.head = list(chain.certificates), chain.head
        lie.roster, lie.work = chain.roster, chain.work
        scene.stand(LIAR, lie, 5.0)
        scene.states[1].fill_(6.0)
        lie.add(voters=[LIAR], tokens=10**9)
        lie.roster = [LIAR]
        await scene.arrive()
        assert set(scene.untrue) <= {LIAR.peer_id}
        assert scene.base.unique().tolist() == [5.0]

    played(story)


def test_a_first_round_must_be_the_first() -> None:
    async def story(scene: Scene) -> None:
        liar = Chain()
        liar.head, liar.work = bytes(32), 10**9
        scene.stand(LIAR, liar, 6.0)
        scene.stand(CREATOR, Chain(), 5.0)
        found = await scene.arrive()
        assert found.state.place.previous == genesis(RUN)
        assert scene.base.unique().tolist() == [5.0]

    played(story)


@pytest.mark.parametrize("seconds", [8.0, 20.0, 80.0])
@pytest.mark.parametrize("who", ["seed", "source"])
@pytest.mark.parametrize("after", [0.0, 0.005, 0.02, 0.05, 0.1])
def test_a_newcomer_goes_on_when_a_frozen_peer_thaws(
    seconds: float, who: str, after: float
) -> None:
    """It takes connections, and bytes, and says nothing for a while."""

    async def story(scene: Scene) -> None:
        scene.stand(CREATOR, swarm(), 5.0)
        peer = scene.seed.peer_id if who == "seed" else CREATOR.peer_id
        async with asyncio.TaskGroup() as group:
            arriving = group.create_task(scene.arrive())
            await asyncio.sleep(after)
            scene.network.freeze(peer)
            await asyncio.sleep(seconds)
            scene.network.thaw(peer)
            await arriving
        assert scene.base.unique().tolist() == [5.0]
        assert asyncio.get_running_loop().time() < seconds + 40

    played(story)


@pytest.mark.parametrize("gives", [True, False])
def test_a_download_that_breaks_off_after_hours_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, gives: bool
) -> None:
    """Unless nothing came of it."""
    tries = 0

    async def breaking(*where: Any, progress: DownloadProgress, **options: Any) -> Download:
        nonlocal tries
        tries += 1
        if tries > 2:
            return await download_state(*where, progress=progress, **options)
        await asyncio.sleep(10_000.0)
        if gives:
            progress(1, 2, 1)
        raise NoSourceError("its only source is gone")

    monkeypatch.setattr("node.entry.arrival.download_state", breaking)

    async def story(scene: Scene) -> None:
        scene.stand(CREATOR, swarm(), 5.0)
        if gives:
            await scene.arrive()
            assert scene.base.unique().tolist() == [5.0]
            return
        with pytest.raises(OperatorError, match="only source") as caught:
            await scene.arrive()
        assert caught.value.code == "E502"

    played(story)
    assert tries == (3 if gives else 1)


@pytest.mark.parametrize("who", ["seed", "source"])
def test_who_stays_frozen_is_not_waited_for_without_end(who: str) -> None:
    async def story(scene: Scene) -> None:
        scene.stand(CREATOR, swarm(), 5.0)
        scene.network.freeze(scene.seed.peer_id if who == "seed" else CREATOR.peer_id)
        with pytest.raises(OperatorError) as caught:
            await scene.arrive()
        assert caught.value.code == "E502"
        assert asyncio.get_running_loop().time() < PATIENCE_S + 40

    played(story)
