"""Newcomers whose links need longer for a round than the others: they get in all the same."""

from __future__ import annotations

import asyncio

import pytest
from catching_up_kit import BYTES, NEWCOMERS, ROUND_S, coming_together, played, scene
from exchange_kit import until
from suites import slow

from gossip.rounds.holding import ALONE, ENOUGH, FIRST_S, MARGIN_S, SLACK
from protocols.asking import ask
from protocols.identity import PeerId
from protocols.messages import CertificateRequest, Certificates

pytestmark = pytest.mark.usefixtures("remembered_signatures")


def bound(seconds: float, first: float = FIRST_S) -> float:
    """What all waits together may take in so many seconds, for a lone member."""
    return first + ALONE * seconds


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_a_link_that_is_slower_than_the_rounds_of_a_lone_member(codec: str) -> None:
    async def story() -> None:
        async with scene(codec=codec) as swarm:
            await asyncio.sleep(5.0)
            newcomer = swarm.join(NEWCOMERS[0], BYTES / (20 * ROUND_S))
            await until(lambda: swarm.are_members(newcomer), 30.0)
            assert swarm.longest() < 10.0
            before = newcomer.replica.counted
            await asyncio.sleep(15.0)
            assert newcomer.replica.counted > before + 5
            assert newcomer.behind.count("FAR") < 4
            assert newcomer.rejected == []

    played(story)


@pytest.mark.parametrize("newcomers", [1, 2])
def test_a_state_of_many_seconds_by_the_link_of_a_lone_member(newcomers: int) -> None:
    """It has made a hundred rounds meanwhile, and each takes longer to replay than to make."""

    async def story() -> None:
        async with scene(codec="fp32", uploads=[BYTES / 10.0]) as swarm:
            await asyncio.sleep(5.0)
            came = [swarm.join(one, BYTES / 10.0) for one in NEWCOMERS[:newcomers]]
            await until(lambda: swarm.are_members(*came), 60.0)
            assert all(one.behind.count("FAR") < 4 for one in came)

    played(story)


def test_who_only_downloads_since_its_first_replay_took_long_is_in_office_all_the_same() -> None:
    """As on a machine that was busy with starting it then."""

    async def story() -> None:
        async with scene(codec="int4", think=(1.0, 1.0)) as swarm:
            await asyncio.sleep(5.0)
            newcomer = swarm.join(NEWCOMERS[0], BYTES / ROUND_S)
            chain = newcomer.swarm.chains[0]
            chain.following.approach.downloaded(ROUND_S)
            chain.following.approach.replayed(1000.0)
            await until(lambda: newcomer.peer in newcomer.replica.roster, 10.0)
            assert chain.status.status == "active"
            await until(lambda: swarm.are_members(newcomer), 30.0)
            assert newcomer.behind.count("FAR") < 6

    played(story)


def test_two_newcomers() -> None:
    async def story() -> None:
        async with scene(codec="fp32") as swarm:
            await asyncio.sleep(5.0)
            newcomers = [swarm.join(one, BYTES / (20 * ROUND_S)) for one in NEWCOMERS[:2]]
            await until(lambda: swarm.are_members(*newcomers), 40.0)
            assert swarm.longest() < 10.0

    played(story)


@pytest.mark.parametrize(
    ("size", "after", "think"),
    [(40_000, 70.0, 1.3), (40_000, 70.0, 1.1), (38_000, 71.3, 1.3)],
)
def test_three_newcomers_at_once_by_the_link_of_a_lone_member(
    size: int, after: float, think: float
) -> None:
    """They share it, so each is there late, and the next round is replayed as slowly.

    The others wait for them by what they say of a state that comes in five chunks.
    """

    async def story() -> None:
        async with scene(
            codec="fp32", size=size, think=(think, think), uploads=[1e5], min_grace_s=1.0
        ) as swarm:
            await asyncio.sleep(after)
            newcomers = [swarm.join(one, 1e5) for one in NEWCOMERS[:3]]
            await until(lambda: swarm.are_members(*newcomers), 45.0)

    played(story)


def test_in_fragments() -> None:
    async def story() -> None:
        async with scene(codec="int4", fragments=2) as swarm:
            await asyncio.sleep(5.0)
            newcomer = swarm.join(NEWCOMERS[0], BYTES / (20 * ROUND_S))
            await until(lambda: swarm.are_members(newcomer), 40.0)
            assert swarm.longest() < 10.0

    played(story)


def test_among_several_it_is_waited_for_until_its_work_is_there() -> None:
    """In office the others could go on without its vote: it would never come to contribute."""

    async def story() -> None:
        async with scene(codec="fp32") as swarm:
            fast = [swarm.join(one, 12.5e6) for one in NEWCOMERS[1:3]]
            await until(lambda: swarm.are_members(*fast))
            newcomer = swarm.join(NEWCOMERS[0], BYTES / (10 * ROUND_S))
            await until(lambda: swarm.are_members(newcomer), 60.0)
            before = newcomer.replica.counted
            await asyncio.sleep(20.0)
            assert newcomer.replica.counted - before >= 4  # as often as the credit allows

    played(story)


def test_a_link_without_hope_costs_the_others_nothing() -> None:
    async def story() -> None:
        async with scene(codec="fp32") as swarm:
            await asyncio.sleep(5.0)
            alone = len(swarm.commits) / 5.0
            newcomer = swarm.join(NEWCOMERS[0], BYTES / 65.0)
            done, asked = len(swarm.commits), 0.0
            for _ in range(100):
                await asyncio.sleep(1.0)
                asked = max(asked, newcomer.swarm.status.behind_s)
            assert ENOUGH * asked > bound(105.0)
            assert newcomer.peer not in swarm.founders[0].replica.roster
            assert len(swarm.commits) - done > 0.9 * 100.0 * alone
            assert swarm.longest() < 3 * ROUND_S

    played(story)


def test_who_downloads_over_and_over_knows_why_until_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        async with scene(codec="fp32", think=(1.0, 1.0)) as swarm:
            await asyncio.sleep(5.0)
            swarm.founders[0].swarm.chains[0]._holding.credit = 0.0
            newcomer = swarm.join(NEWCOMERS[0], BYTES / 8.0)
            approach = newcomer.swarm.chains[0].following.approach
            with monkeypatch.context() as nobody_waits:
                nobody_waits.setattr("gossip.rounds.holding.share", lambda members: 0.0)
                await until(lambda: approach.narrow is not None, 90.0)
            assert approach.narrow is not None
            mine, others = approach.narrow
            assert mine > 3.0 > 2.0 > others
            await until(lambda: swarm.are_members(newcomer), 90.0)
            assert approach.narrow is None

    played(story)


@pytest.mark.parametrize(
    ("liars", "seconds"),
    [(1, 0.05), (6, 3.0), *slow((1, 3.0), (6, 0.05))],
)
def test_liars_cost_no_more_than_the_bound(liars: int, seconds: float) -> None:
    """They say for ever that they are nearly there."""

    async def story() -> None:
        async with scene(codec="int4") as swarm:
            await asyncio.sleep(5.0)
            alone = len(swarm.commits) / 5.0
            swarm.founders[0].swarm.chains[0]._holding.credit = 0.0
            for identity in NEWCOMERS[:liars]:
                member = swarm.join(identity, 12.5e6)
                following = member.swarm.chains[0].following
                following.asks = lambda: seconds  # type: ignore[method-assign]
                following.begin = lambda peers: None  # type: ignore[method-assign]
            done = len(swarm.commits)
            await asyncio.sleep(100.0)
            lost = 100.0 - (len(swarm.commits) - done) / alone
            assert lost < bound(100.0, 0.0) * 1.05 + 2.0
            if liars == 1 or seconds != 3.0:  # else they take turns
                assert swarm.longest() < SLACK * 3.0 + MARGIN_S + 3 * ROUND_S
            if liars == 1:  # after 10, 40 and 160 s
                assert lost < 3 * (SLACK * 3.0 + MARGIN_S) + 2.0

    played(story)


@pytest.mark.parametrize("role", ["seed", "observer"])
def test_nobody_waits_for_who_only_follows(role: str) -> None:
    async def story() -> None:
        async with scene(codec="fp32") as swarm:
            await asyncio.sleep(5.0)
            alone = len(swarm.commits) / 5.0
            follower = swarm.join(NEWCOMERS[0], BYTES / (20 * ROUND_S))
            follower.swarm.presence.note(role=role)
            done, asked = len(swarm.commits), 0.0
            for _ in range(200):
                await asyncio.sleep(0.1)
                asked = max(asked, follower.swarm.status.behind_s)
            assert asked == 0.0
            assert len(swarm.commits) - done > 0.9 * 20.0 * alone
            assert follower.replica.place.round > done  # it follows, by downloads
            follower.swarm.chains[0]._ask_to_wait = lambda: None  # type: ignore[method-assign]
            follower.swarm.presence.note(behind_s=1.0)  # and if it said so all the same
            done = len(swarm.commits)
            await asyncio.sleep(20.0)
            assert len(swarm.commits) - done > 0.9 * 20.0 * alone

    played(story)


def test_who_keeps_up_is_not_waited_for() -> None:
    """And replays what it missed, however much that was, unless the state is less."""

    async def story() -> None:
        async with scene(codec="int4", think=(0.3, 0.3)) as swarm:
            await asyncio.sleep(5.0)
            newcomer = swarm.join(NEWCOMERS[0], 12.5e6)
            asked = 0.0

            def is_member() -> bool:
                nonlocal asked
                asked = max(asked, newcomer.swarm.status.behind_s)
                return swarm.are_members(newcomer)

            await until(is_member)
            assert asked == 0.0
            assert swarm.longest() < 10 * ROUND_S

    played(story)


@pytest.mark.parametrize(
    ("codec", "upload"),
    [
        ("fp32", 1e6),  # a download takes as long as a round's exchange
        ("int4", 1e5),  # and here as long as several rounds
    ],
)
@pytest.mark.parametrize("tenth", [0, 3, 6, 9, *slow(1, 2, 4, 5, 7, 8, 10, 11)])
def test_two_halves_that_meet_at_any_moment_are_one_swarm_again(
    codec: str, upload: float, tenth: int
) -> None:
    """Who leaves a side decides nothing on it: else each is the heavier one in turn, for ever."""

    async def story() -> None:
        options = {"think": (1.0, 1.1), "min_grace_s": 1.0, "seed": tenth}
        async with scene(codec=codec, uploads=[upload], **options) as swarm:
            joining = [swarm.join(one, upload) for one in NEWCOMERS[:3]]
            await until(lambda: swarm.are_members(*joining), 60.0)
            members, before = [*swarm.founders, *joining], swarm.downloads
            peers = [member.peer for member in members]
            swarm.swarm.network.partition(set(peers[:2]), set(peers[2:]))
            await asyncio.sleep(15.0 + tenth / 10)
            swarm.swarm.network.heal()
            counted = [member.replica.counted for member in members]

            def together() -> bool:
                heads = {member.replica.place.previous for member in members}
                since = [member.replica.counted for member in members]
                return len(heads) == 1 and all(n > o for n, o in zip(since, counted, strict=True))

            await until(together, 45.0)
            assert swarm.downloads - before < 5

    played(story)


def test_who_shows_one_round_at_a_time_keeps_nobody_behind() -> None:
    """The others make rounds faster than that one shows them."""

    async def story() -> None:
        think, uploads = (0.5, 0.6), [1e7] * 4
        async with scene(4, size=10_000, think=think, uploads=uploads, seed=2) as here:
            behind, slow, *_ = here.founders
            ledger = slow.swarm.chains[0].ledger

            async def one_by_one(peer: PeerId, body: bytes) -> bytes:
                found = ledger.since(CertificateRequest.decode(body).round, 1)
                await asyncio.sleep(4.5)
                return Certificates(tuple(found)).encode()

            slow.swarm.wiring.transport.on_call("certificates", one_by_one)
            await asyncio.sleep(5.0)
            here.swarm.network.freeze(behind.peer)
            await asyncio.sleep(15.0)
            here.swarm.network.thaw(behind.peer)
            await until(coming_together(here.founders), 30.0)

    played(story)


def test_one_answer_has_no_more_certificates_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them may be as long as a plan; and one at least, or who asks would not go on."""

    async def story() -> None:
        async with scene(2, size=8000) as here:
            one, other = here.founders
            ledger = other.swarm.chains[0].ledger
            await until(lambda: len(ledger.since(0, 5)) == 5, 60.0)
            kept = [len(certificate.encode()) for certificate in ledger.since(0, 5)]
            transport = one.swarm.wiring.transport
            request = CertificateRequest(one.swarm.wiring.run, 0, 0, 5)
            for room, fit in ((sum(kept), 5), (sum(kept) - 1, 4), (sum(kept[:2]), 2), (1, 1)):
                monkeypatch.setattr("gossip.chain.service.CERTIFICATES_BYTES", room)
                shown = await ask(
                    transport, other.peer, "certificates", request, Certificates, timeout=2.0
                )
                assert shown.certificates == ledger.since(0, fit)

    played(story)
