"""Who is believed to be ahead: names that claim much and show nothing hold up nobody for long."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from exchange_kit import run, until
from toy_replica import RUN

from gossip.catchup import claims, following
from gossip.catchup.following import Following
from gossip.catchup.replay import Ending
from gossip.membership.standing import first_announcement
from gossip.place import Place
from gossip.plans.certificate import genesis
from gossip.wiring import Wiring
from protocols.bounds import MAX_PEERS
from protocols.errors import Stale, Unreachable, Why
from protocols.identity import Identity, PeerId
from protocols.memory.transport import MemoryNetwork
from protocols.memory.virtual_time import inline
from protocols.messages import Announce
from protocols.tasks import Tasks

ME = Identity.from_seed(b"m" * 32)
HONEST, *LIARS = (Identity.from_seed(bytes([i, 7]) * 16).peer_id for i in range(30))
SHOWS_S = 0.5  # until an honest peer has shown how it came to its place

Shows = Callable[[claims.Shown], Awaitable[None]]


class Far:
    """As of a node that misses so much that only a download helps."""

    downloading = False
    link: object = None

    def heard(self, peer: PeerId, round_: int, now: float) -> None: ...

    def is_far(self, missing: int) -> bool:
        return True

    def replays(self, since: float | None) -> None: ...

    def replayed(self, seconds: float) -> None: ...

    def arrived(self) -> None: ...


class Scene:
    """One member that is behind, what it hears, and what others show when asked."""

    def __init__(self, wiring: Wiring, roster: Sequence[PeerId]) -> None:
        self.place, self.roster = Place(RUN, 0, 3, genesis(RUN), b"s" * 32, 5), tuple(roster)
        self.behind: list[Ending] = []
        self.asked: list[PeerId] = []
        self.claims: dict[PeerId, Announce] = {}
        self.shows: dict[PeerId, Shows] = {}
        unused, far, membership = (None, Far(), self)  # type: tuple[Any, Any, Any]
        self.following = Following(
            wiring=wiring,
            shape=unused,
            membership=membership,
            place=lambda: (self.place, self.roster),
            settled=lambda: asyncio.sleep(0.0),
            busy=lambda: False,
            held=unused,
            advance=unused,
            prove=self._prove,
            rejected=lambda peer, error: None,
            behind=self.behind.append,
            approach=far,
            link=lambda: 0.0,
        )

    def members_alive(self, now: float) -> list[Announce]:
        return list(self.claims.values())

    def announcement(self, peer: PeerId) -> Announce | None:
        return self.claims.get(peer)

    async def _prove(self, claim: Announce, shown: claims.Shown) -> None:
        self.asked.append(claim.peer)
        await self.shows[claim.peer](shown)

    def says(self, peer: PeerId, shows: Shows) -> None:
        """``peer`` announces that it is far ahead, and was heard."""
        first = first_announcement(peer, self.place, version="0", incarnation=1)
        further = {"status": "active", "round": 900, "work": 10**9, "head": b"h" * 32}
        self.claims[peer], self.shows[peer] = dataclasses.replace(first, **further), shows
        self.following.compare(self.claims[peer])


@asynccontextmanager
async def scene(roster: Sequence[PeerId] = ()) -> AsyncIterator[Scene]:
    async with asyncio.TaskGroup() as group:
        loop, unused = asyncio.get_running_loop(), None  # type: Any, Any
        transport = MemoryNetwork().join(ME.peer_id)
        spawn = Tasks(group).spawn
        yield Scene(Wiring(transport, ME, RUN, unused, spawn, inline, loop.time), roster)


async def true(shown: claims.Shown) -> None:
    await asyncio.sleep(SHOWS_S)


async def never(shown: claims.Shown) -> None:
    await asyncio.sleep(1e6)


async def false(shown: claims.Shown) -> None:
    raise Stale("it does not show the certificate it stands on")


async def gone(shown: claims.Shown) -> None:
    raise Unreachable("peer", Why.REFUSED)


def test_who_never_ends_its_proof_hides_nobody() -> None:
    async def story() -> None:
        async with scene() as here:
            for liar in LIARS[:20]:
                here.says(liar, never)
            here.says(HONEST, true)
            batches = 1 + 20 // following.MOST_ASKED
            took = await until(lambda: here.behind != [], batches * claims.PROOF_S + 1.0)
            assert here.behind == [Ending.FAR]
            assert took >= claims.PROOF_S  # those before it had their time

    run(story)


def test_those_in_office_are_asked_first_and_nobody_waits_for_others() -> None:
    async def story() -> None:
        async with scene([HONEST]) as here:
            for liar in LIARS:
                here.says(liar, never)
            here.says(HONEST, true)
            await until(lambda: here.behind != [], claims.PROOF_S + 2.0)
            first = here.asked.index(HONEST)
            assert first <= 1  # behind the one that was heard of first, and is asked alone

    run(story)


def test_who_could_not_show_it_is_left_alone_for_longer_each_time() -> None:
    async def story() -> None:
        for shows in (false, gone, never):
            async with scene() as here:
                asked: list[float] = []
                for second in range(400):
                    before = len(here.asked)
                    here.says(LIARS[0], shows)
                    await asyncio.sleep(1.0)
                    asked += [float(second)] * (len(here.asked) - before)
                assert 4 <= len(asked) <= 7  # after 5, 10, 20, 40, 80, 160 seconds
                gaps = [b - a for a, b in itertools.pairwise(asked)]
                assert all(b > a for a, b in itertools.pairwise(gaps))
                assert here.behind == []

    run(story)


def test_two_that_take_turns_in_being_silent_are_not_forgotten() -> None:
    async def story() -> None:
        async with scene() as here:
            for second in range(400):
                here.claims.clear()  # the other one is not alive any more
                here.says(LIARS[second // 10 % 2], false)
                await asyncio.sleep(1.0)
            assert len(here.asked) <= 14  # each after 5, 10, 20, 40, 80, 160 seconds

    run(story)


def test_only_so_many_that_are_left_alone_are_remembered() -> None:
    left = claims.LeftAlone()
    left.leave(HONEST, 0.0)
    left.leave(HONEST, 1.0)
    for n in range(2 * MAX_PEERS):
        left.leave(f"peer {n}", 1.0 + n / MAX_PEERS)
    assert len(left._until) == MAX_PEERS
    assert left.has(HONEST, 5.0), "those that were found out more often are kept"


def test_who_has_shown_it_in_the_end_is_believed_at_once() -> None:
    async def story() -> None:
        async with scene() as here:
            here.says(HONEST, gone)
            await until(lambda: here.asked != [], 5.0)
            await asyncio.sleep(claims.LEFT_S + 0.1)
            here.says(HONEST, true)
            await until(lambda: here.behind != [], SHOWS_S + 0.1)
            here.says(HONEST, true)  # as if its state had not come
            await until(lambda: len(here.behind) == 2, SHOWS_S + 0.1)

    run(story)


def test_who_claims_much_and_never_answers_costs_its_time_out_once() -> None:
    """A name with nobody behind it; whoever is in office is asked again."""

    async def story() -> None:
        async with scene([HONEST]) as here:
            asked: list[PeerId] = []

            async def look(source: PeerId, first: int) -> Ending:
                asked.append(source)
                await asyncio.sleep(5.0)
                raise Unreachable(source, Why.TIMEOUT)

            here.following._replay._follow = look  # type: ignore[method-assign]
            for _ in range(100):
                here.says(HONEST, never)
                here.says(LIARS[0], never)
                await asyncio.sleep(1.0)
            assert asked.count(LIARS[0]) <= 5  # after 5, 10, 20 and 40 seconds
            assert asked.count(HONEST) >= 8

    run(story)


def test_what_a_round_asks_for_does_not_wait_for_all_claims() -> None:
    """Those who voted have what is missed; there may be hundreds who claim to be ahead."""

    async def story() -> None:
        async with scene() as here:
            for liar in LIARS:
                here.says(liar, never)
            await asyncio.sleep(1.0)
            told: list[tuple[PeerId, ...]] = []
            replay = here.following._replay

            async def follow(sources: Sequence[PeerId], first: int) -> Ending:
                told.append(tuple(sources))
                return Ending.LEVEL

            replay.follow = follow  # type: ignore[method-assign]
            here.following.begin((HONEST,), vouched=True)
            await until(lambda: told != [], claims.PROOF_S + 1.0)
            assert told[0][0] == HONEST

    run(story)


PAGE = 128 * 1024


def test_long_proofs_do_not_crowd_each_other_out_on_a_slow_link() -> None:
    """Each would come in time by itself, and none would if all came at once."""

    async def story() -> None:
        async with scene() as here:
            link = asyncio.Lock()

            async def pages(shown: claims.Shown) -> None:
                for _ in range(16):
                    async with link:
                        await asyncio.sleep(PAGE / (100 * 1024))
                    shown(PAGE)

            for peer in LIARS:
                here.says(peer, pages)
            took = await until(lambda: here.behind != [], 60.0)
            assert here.behind == [Ending.FAR]
            assert took > claims.PROOF_S  # it was given more by what it had shown
            assert len(set(here.asked)) <= 2

    run(story)


def test_who_shows_a_little_at_a_time_is_given_little_more() -> None:
    async def story() -> None:
        async with scene() as here:

            async def trickle(shown: claims.Shown) -> None:
                while True:
                    await asyncio.sleep(1.0)
                    shown(100)

            here.says(LIARS[0], trickle)
            here.says(HONEST, true)
            await until(lambda: here.behind != [], 2 * claims.NEXT_S)
            assert here.asked[:2] == [LIARS[0], HONEST]
            here.claims.clear()
            await until(lambda: not here.following.under_way, 2 * claims.PROOF_S)
            here.says(LIARS[1], trickle)
            await asyncio.sleep(claims.PROOF_S + 1.0)
            here.says(LIARS[1], trickle)
            assert here.asked.count(LIARS[1]) == 1
            assert not here.following.under_way  # it was given up

    run(story)


def test_who_has_shown_much_holds_up_others_no_longer_than_a_call_takes() -> None:
    """However much it has shown: the next page may not come at all."""

    async def story() -> None:
        async with scene() as here:

            async def pages(shown: claims.Shown) -> None:
                for _ in range(100):
                    shown(PAGE)
                await asyncio.sleep(1e6)

            here.says(LIARS[0], pages)
            here.says(HONEST, true)
            await until(lambda: here.behind != [], claims.CALL_TIMEOUT_S + 2 * claims.NEXT_S)

    run(story)


def test_whoever_is_in_office_waits_for_no_strangers_proof() -> None:
    """As many as there is room for, each with page after page of a history that is everybody's."""

    async def story() -> None:
        async with scene([HONEST]) as here:

            async def pages(shown: claims.Shown) -> None:
                while True:
                    await asyncio.sleep(1.0)
                    shown(PAGE)

            for liar in LIARS[: claims.AT_ONCE]:
                here.says(liar, never)
            await until(lambda: len(here.asked) == claims.AT_ONCE, 40.0)
            here.says(HONEST, true)
            await until(lambda: here.behind != [], claims.NEXT_S + 1.0)
        async with scene([HONEST]) as here:
            here.says(LIARS[0], pages)
            await asyncio.sleep(30.0)
            here.says(LIARS[1], pages)
            here.says(HONEST, true)
            await until(lambda: here.behind != [], claims.NEXT_S + 1.0)
            assert LIARS[1] not in here.asked

    run(story)


def test_who_is_in_office_and_cannot_be_reached_is_asked_again_at_once() -> None:
    async def story() -> None:
        async with scene([HONEST]) as here:
            for _ in range(10):  # as if its link were dark
                here.says(HONEST, gone)
                await asyncio.sleep(1.0)
            here.says(HONEST, true)
            await until(lambda: here.behind != [], SHOWS_S + 0.1)

    run(story)


def test_who_is_left_alone_is_so_also_where_it_sends_something() -> None:
    """What comes from a round that this node has not come to names its sender."""

    async def story() -> None:
        async with scene() as here:
            asked: list[tuple[PeerId, ...]] = []
            replay = here.following._replay
            follow = replay.follow

            async def noted(sources: Sequence[PeerId], first: int) -> Ending | None:
                asked.append(tuple(sources))
                return await follow(sources, first)

            replay.follow = noted  # type: ignore[method-assign]
            here.says(LIARS[0], false)
            await until(lambda: asked != [] and not here.following.under_way, 5.0)
            for _ in range(20):
                here.following.begin((LIARS[0],))
                await asyncio.sleep(0.1)
            assert len(asked) == 1
            here.following.begin((LIARS[0],), vouched=True)
            await until(lambda: len(asked) == 2, 1.0)

    run(story)


def test_a_peer_that_was_left_alone_is_forgiven_in_time() -> None:
    left, now = claims.LeftAlone(), 0.0
    for wait in (5.0, 10.0, 20.0):
        left.leave(LIARS[0], now)
        assert left.has(LIARS[0], now + wait - 0.1)
        assert not left.has(LIARS[0], now + wait)
        now += wait
    left.leave(LIARS[0], now + 20.0 * claims.FORGOTTEN + 1.0)
    assert not left.has(LIARS[0], now + 20.0 * claims.FORGOTTEN + 1.0 + claims.LEFT_S)
    left.leave(LIARS[1], now)
    left.forgive(LIARS[1])
    assert not left.has(LIARS[1], now)
