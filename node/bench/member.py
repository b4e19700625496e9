"""A swarm member without a trainer: its pseudo-gradient is noise (:mod:`node.bench.noise`).

Everything between is the real thing: identity, transport, presence, rounds, exchange. When all
members that were agreed on have met, they take rounds back to back and report what each took.

>>> await Member(Settings(listen="0.0.0.0:4390", members=2), took=print).run()
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from bootstrap.seeds import explain
from gossip.catchup.replay import Ending
from gossip.chain.swarm import Swarm
from gossip.hooks import Hooks
from gossip.membership.members import Membership
from gossip.membership.presence import Presence
from gossip.membership.standing import first_announcement
from gossip.place import Place
from gossip.plans.grouping import Grouping
from gossip.plans.rules import Rules
from gossip.wiring import Wiring
from node import __version__
from node.bench.memory import forget_peak, peak_bytes, resident_bytes
from node.bench.noise import Noise
from node.bench.settings import Settings
from node.bench.watching import Stage, Watch, WatchedChain, WatchedTransport
from node.entry.own_address import outward_address
from node.errors import operator_error
from node.monitor.processors import usable_cores
from protocols.addresses import hostport
from protocols.codecs import RangeCodec
from protocols.errors import TransportError
from protocols.identity import Identity, PeerId
from protocols.messages import Announce
from protocols.tasks import Tasks, offload_to

TOKENS = 1000  # that each contribution claims to be trained on
MEET_EVERY_S = 0.1
LINGER_S = 10.0  # to stay for others that have not finished
FAREWELL_S = 2.0
AGREED = "--members, --size, --codec, --rounds, --groups"  # and --max-group
KEPT = 2  # merged rounds kept, for members that were too slow to vote and ask for them


@dataclass(frozen=True)
class Taken:
    """What one round took at this member."""

    round: int
    moments: dict[Stage, float]  # time.monotonic, seconds
    contributors: int  # those of which something was merged
    merged: float  # share of all members' elements that were merged
    sent: int  # bytes of bodies
    received: int
    peak_bytes: int  # resident memory above what it was before the vector was made
    digest: str  # of the merged vector, equal on all members
    cpu_s: float = 0.0  # of this process, from ready until the mean is in its memory

    @property
    def seconds(self) -> float | None:
        """From this member's plan to the merged vector; None where it has missed the round."""
        planned = self.moments.get(Stage.PLANNED)
        return None if planned is None else self.moments[Stage.APPLIED] - planned


@dataclass
class Member:
    """One member, from the port that it opens to its farewell. It reports by the callbacks."""

    settings: Settings
    identity: Identity = field(default_factory=Identity.generate)
    opened: Callable[[PeerId, str], None] = lambda peer, address: None  # where others reach it
    passed: Callable[[Stage, int], None] = lambda stage, round_: None  # see Watch.told
    took: Callable[[Taken], None] = lambda taken: None
    said: Callable[[str], None] = lambda text: None  # of peers and refusals, for people
    turn: Callable[[int], Awaitable[None]] | None = None  # waited for before a round
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _met: frozenset[PeerId] = frozenset()  # the members, once they have met
    _ending: bool = False  # too many came

    async def run(self) -> None:
        """Meet the others and take the rounds. Raises OperatorError E303, E501 or E502."""
        settings, watch = self.settings, Watch(self.passed)
        codec = RangeCodec(settings.codec, settings.size)
        transport = WatchedTransport(
            self.identity,
            listen=settings.listen,
            tls=settings.tls,
            max_upload=settings.max_upload or None,
            cores=usable_cores(),
        )
        transport.watch = watch
        pool = ThreadPoolExecutor(2, thread_name_prefix="bench")
        offload = offload_to(pool)
        with pool:
            async with transport, asyncio.TaskGroup() as group:
                tasks, now = Tasks(group), asyncio.get_running_loop().time
                wiring = Wiring(
                    transport, self.identity, settings.run, codec, tasks.spawn, offload, now
                )
                idle = resident_bytes()
                replica = Noise(settings, codec, watch, offload)
                try:
                    presence = self._presence(wiring, replica, transport)
                    replica.meet(await self._meet(wiring, presence))
                    chain = self._chain(wiring, replica, presence, watch)
                    tasks.spawn(Swarm((chain,)).run())
                    await self._rounds(chain, replica, transport, idle)
                    await self._leave(presence)
                finally:
                    tasks.cancel()

    # --- meeting ---------------------------------------------------------------------------------

    def _address(self, transport: WatchedTransport) -> str:
        assert transport.listening is not None
        host, port = transport.listening
        if host in ("0.0.0.0", "::"):
            host = outward_address()
        address = self.settings.advertise or hostport(host, port)
        self.opened(self.identity.peer_id, address)
        return address

    def _presence(self, wiring: Wiring, replica: Noise, transport: WatchedTransport) -> Presence:
        def remember(announce: Announce) -> None:
            self._news.set()
            for there in announce.addresses:
                transport.book.add(announce.peer, there)
            stranger = self._met and announce.peer not in self._met
            if stranger and self._too_many(presence) and not self._ending:
                self._ending = True
                wiring.spawn(self._end_with_too_many(presence))

        presence = Presence(
            wiring,
            Membership(self.identity.peer_id),
            _first_announcement(
                self.identity.peer_id,
                self._address(transport),
                replica.place,
                self.settings.region,
            ),
            lambda: (replica.place,),
            wall=time.time,
        )
        presence.on_news = remember
        return presence

    async def _meet(self, wiring: Wiring, presence: Presence) -> tuple[PeerId, ...]:
        """Wait until all members are there.

        Raises OperatorError E501 where they do not come, or more than was agreed on.
        """
        settings, known = self.settings, presence.membership.islands
        deadline = wiring.now() + settings.patience_s
        missed: dict[str, str] = {}  # why a peer is not met, by its address
        while len(known) + 1 < settings.members:
            if wiring.now() > deadline:
                raise operator_error(
                    "E501",
                    f"{len(known) + 1} of {settings.members} members came",
                    why="; ".join(
                        [
                            f"the others did not within {settings.patience_s:.0f} s",
                            *filter(None, missed.values()),
                        ]
                    ),
                    fix=f"give all the same {AGREED} and --max-group, and one as peer",
                )
            for address in settings.peers:
                why = await self._not_met(wiring, presence, address)
                if why and why != missed.get(address):
                    self.said(f"{why}; trying again")  # it may just not have started yet
                missed[address] = why
            if self._too_many(presence):
                break  # before it tells: those who have met already go on
            presence.tell()
            await asyncio.sleep(MEET_EVERY_S)
        if self._too_many(presence):
            await self._end_with_too_many(presence)
        self._met = frozenset([*known, self.identity.peer_id])
        return tuple(sorted(self._met))

    def _too_many(self, presence: Presence) -> int:
        """How many members are there, where that is more than was agreed on; else 0."""
        membership, now = presence.membership, presence.wiring.now()
        there = 1 + sum(membership.there(peer, now) for peer in membership.islands)
        return there if there > self.settings.members else 0

    async def _end_with_too_many(self, presence: Presence) -> None:
        """Raise E501: whoever met others than these would wait for them in each round.

        The others are told of each other first: some may have met without some. It says no
        farewell, or who hears that before would count one less.
        """
        agreed, came = self.settings.members, self._too_many(presence)
        envelopes = {peer: one.envelope for peer, one in presence.membership.islands.items()}
        try:
            async with asyncio.timeout(FAREWELL_S), asyncio.TaskGroup() as group:
                for there in presence.membership.alive(presence.wiring.now()):
                    for peer, envelope in envelopes.items():
                        if peer != there:
                            group.create_task(presence.say(there, "announce", envelope))
        except TimeoutError:
            pass  # who has not heard of the others goes on alone
        raise operator_error(
            "E501",
            f"{came} members came, --members says {agreed}",
            why="it was started on more machines than that, or once more on one before the others "
            "had noticed that it was gone",
            fix="start all again, each with the same --members",
        )

    async def _not_met(self, wiring: Wiring, presence: Presence, address: str) -> str:
        """Ask a peer whom it knows; returns why it cannot be a member, empty where it is one."""
        try:
            peer = await wiring.transport.dial(address)
        except TransportError as error:
            found = explain(address, error)
            return f"{found.what}: {found.why}"
        await presence.ask(peer)
        if peer in presence.membership.islands or peer == self.identity.peer_id:
            return ""
        return (
            f"{address} answers, but is no member of this bench: it trains, or has other {AGREED} "
            "or --max-group"
        )

    def _chain(
        self, wiring: Wiring, replica: Noise, presence: Presence, watch: Watch
    ) -> WatchedChain:
        settings = self.settings

        def behind(fragment: int, ending: Ending) -> None:
            wiring.spawn(self._left_behind(presence, ending))

        hooks = Hooks(
            peer=lambda peer, now, before: self.said(f"{peer} {before} -> {now}"),
            rejected=lambda peer, error: self.said(f"{peer} is refused: {error}"),
            behind=behind,
            learned=presence.on_news,
        )
        rules = Rules(
            settings.size,
            (settings.codec,),
            wiring.codec.size_as,
            quorum=settings.quorum,
            grouping=Grouping(settings.groups, settings.max_group),
        )
        return WatchedChain(wiring, replica, rules, presence, hooks, KEPT, watch=watch)

    # --- rounds ----------------------------------------------------------------------------------

    async def _rounds(
        self, chain: WatchedChain, replica: Noise, transport: WatchedTransport, idle: int
    ) -> None:
        watch = chain.watch
        while (round_ := replica.place.round) < self.settings.rounds:
            await replica.offload(replica.draw)
            replica.moved.clear()
            if all(i.announce.round >= round_ for i in chain.membership.islands.values()):
                chain.ledger.clear()  # no member needs it, and it must not count in peak memory
            if self.turn is not None:
                await self.turn(round_)
            watch.begin(round_)
            before = transport.stats.in_by_name.total(), transport.stats.out_by_name.total()
            forget_peak()
            computed = time.process_time()
            watch.pass_(Stage.READY)
            chain.update(
                ready=True, tokens=TOKENS, steps=1, weight=float(TOKENS), eta=0.0, norm=replica.norm
            )
            await replica.moved.wait()
            stats, peak = transport.stats, peak_bytes() - idle
            chain.presence.note(  # the next plan's parts and patience follow from them
                upload=stats.upload.read() or 0.0, download=stats.download.read() or 0.0
            )
            # or the slowest could be left out next time, and would lack processor time now
            await self._others_at(chain.presence, round_ + 1)
            digest = await replica.offload(replica.digest)
            self.took(
                Taken(
                    round_,
                    watch.moments,
                    replica.contributors,
                    replica.included,
                    transport.stats.out_by_name.total() - before[1],
                    transport.stats.in_by_name.total() - before[0],
                    peak,
                    digest.hex(),
                    replica.computed - computed,
                )
            )

    async def _others_at(self, presence: Presence, round_: int) -> None:
        """Wait ``patience_s`` for the others at most, and then go on.

        A member out of office may stay alive and come no further.
        """
        try:
            async with asyncio.timeout(self.settings.patience_s):
                await self._until_at(presence, round_)
        except TimeoutError:
            self.said(f"not all who are there have come to round {round_}: it begins all the same")

    async def _until_at(self, presence: Presence, round_: int) -> None:
        """Wait until all live members have come to ``round_``."""
        membership, now = presence.membership, presence.wiring.now
        while any(
            a.round < round_ and a.peer in self._met for a in membership.members_alive(now())
        ):
            self._news.clear()
            try:
                async with asyncio.timeout(MEET_EVERY_S):  # a silent member makes no news
                    await self._news.wait()
            except TimeoutError:
                continue

    async def _leave(self, presence: Presence) -> None:
        """Stay until the others have all rounds too, or are gone; then say farewell."""
        try:
            async with asyncio.timeout(LINGER_S):
                await self._until_at(presence, self.settings.rounds)
        except TimeoutError:
            self.said("the others have not come to the end yet")
        await _farewell(presence)

    async def _left_behind(self, presence: Presence, ending: Ending) -> None:
        """Raise E502: there is no state to download here, and the others go on without it."""
        await _farewell(presence)
        raise operator_error(
            "E502",
            f"this member was left behind in round {presence.status.round}",
            why=f"{ending.value}: it stood still, or heard nothing, for more than {KEPT} rounds",
            fix="start all members again, and let none of them be stopped or sleep",
        )


async def _farewell(presence: Presence) -> None:
    try:
        async with asyncio.timeout(FAREWELL_S):
            await presence.leave()
    except TimeoutError:
        return  # the others notice without it


def _first_announcement(me: PeerId, address: str, place: Place, region: str) -> Announce:
    return first_announcement(
        me,
        place,
        incarnation=int(time.time() * 1000),
        addresses=(address,),
        version=__version__,
        region=region,
    )
