"""Watching a swarm from outside: what its members say of themselves, and nothing else.

An observer greets peers, asks them once a second for the announcements that they hold, and makes of
these the same state and history that a node has. It has no port, announces nothing, holds no
parameters and takes part in no round, so nobody can count it as a trainer. What only members see
(phases of rounds, traffic, who was dropped) it does not know.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from statistics import median, median_low
from typing import Any

from bootstrap.handshake import Clocks, Greeting, admission, greet
from bootstrap.manifest_gossip import PAIRED
from bootstrap.seeds import Reached, explain, find_peers
from bootstrap.state import fetch_manifest
from gossip.membership.members import Liveness, Membership
from gossip.membership.opening import open_announce
from gossip.membership.pulse import beats_in
from gossip.membership.spread import Published, Spread
from node import __version__, clock
from node.entry.past import ask_past
from node.errors import operator_error
from node.modes import at_will
from node.monitor.alarm_watch import Watch
from node.monitor.dashboard import Feed
from node.monitor.event_log import EventLog
from node.monitor.events import PeerJoined, PeerLeft, RoundDone
from node.monitor.history import History
from node.monitor.state import NodeState
from node.monitor.terminal.source import INTERVAL_S, POINTS, Picture
from node.monitor.views import NodeView, PeerView, RunView, can_be_drawn
from node.reports.links import LinkTable
from protocols.addresses import PeerAddress
from protocols.asking import ask
from protocols.bounds import ENDLESS_ROUNDS
from protocols.errors import (
    OperatorError,
    RemoteProtocolError,
    TransportError,
)
from protocols.http.transport import HttpTransport
from protocols.identity import Identity, PeerId
from protocols.messages import Announce, Known, KnownRequest
from protocols.whereabouts import Whereabouts

ASKED = 3  # peers at a time
CALL_TIMEOUT_S = 5.0
REST_S = 10.0  # before a peer that did not answer is asked again
BACK_LOOKS = 10  # in a row at an earlier round: it is no straggler whose company has left
SILENT_S = 30.0  # without any answer the seeds are dialled again


class Observer:
    """A source of pictures, from peers given as ``HOST:PORT[/ID]``."""

    def __init__(
        self,
        peers: Sequence[PeerAddress],
        invitation: str = "",
        *,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.title = "the swarm of " + ", ".join(peer.hostport for peer in peers[:3])
        self.identity = Identity.generate()
        self.transport = HttpTransport(self.identity)
        self.log = EventLog(clock=clock.wall)
        view = NodeView(peer=self.identity.peer_id, role="observer", started=clock.wall())
        self.state = NodeState(view, log=self.log, clock=clock.wall)
        self.history = History()
        self.log.subscribe(self.history)
        self.membership = Membership(self.identity.peer_id)
        self.state.providers.peers = self.views
        self.state.providers.agreeing = self._agreeing
        self.links = LinkTable(
            self.transport,
            self.identity.peer_id,
            lambda: self.membership.alive(time.monotonic()),
        )
        self.state.providers.all_links = self.links.look
        self._peers, self._invitation, self._interval_s = peers, invitation, interval_s
        self._whereabouts = Whereabouts(
            self.transport, self.identity, self.transport.book, clock=clock.wall
        )
        self._run = b""
        self._total = 0
        self._clocks = Clocks(math.inf)  # an observer may have any clock
        self._work = 0
        self._answered = time.monotonic()
        self._seen: dict[PeerId, bool] = {}
        self._failed: dict[PeerId, float] = {}  # since when
        self._distances: Mapping[PeerId, float] = {}  # to the mean, before the last merge
        self._turn = 0
        self._behind = 0  # looks in a row at which the swarm was at an earlier round than is shown
        self._published = Published()
        self._in_pairs = self._at_will = False  # how the run's islands meet
        self._watch = Watch(self.state.alarms_now, self.log, self.state.peers)
        self._feed = Feed(self.state, self.log, self.history)

    async def pictures(self) -> AsyncGenerator[Picture, None]:
        """Raises OperatorError where no peer can be reached, or none takes part in a run."""
        async with self.transport:
            await self._greet()
            while True:
                await asyncio.gather(self._ask(), self.links.ask())
                self._note()
                picture = self._feed.picture(POINTS) | {"links": self.state.links()}
                silent = time.monotonic() - self._answered
                if silent > SILENT_S:
                    picture["problem"] = f"nobody has answered for {silent:.0f} s"
                    await self._greet_again()
                yield picture
                await asyncio.sleep(self._interval_s)

    # --- the network -----------------------------------------------------------------------------

    async def _greet(self) -> None:
        dialled = await find_peers(self.transport, self._peers)
        failure: OperatorError | None = None
        greetings: list[Greeting] = []
        for reached in dialled.reached:
            try:
                greetings.append(await self._greeting(reached))
            except OperatorError as error:
                failure = error
        if not greetings:
            raise failure or operator_error("E501")
        runs = Counter(g.welcome.run for g in greetings if g.welcome.run)
        if not runs:
            raise operator_error(
                "E501",
                "the peers take part in no run",
                why="all that answered are seeds without one",
                fix="start the run, or give a peer that trains with --peers",
            )
        run = self._run or runs.most_common(1)[0][0]
        peers = [g.peer for g in greetings if g.welcome.run == run]
        if not self._run:
            signed = await self._manifest(peers, run)
            manifest = signed.manifest
            self._run, self._total = run, manifest.rounds.total_rounds
            self._in_pairs = manifest.mode in PAIRED
            self._at_will = self._in_pairs or at_will(manifest)
            self.history.begin(run.hex())
            self.state.run = RunView(
                id=run.hex(),
                label=manifest.label,
                total_rounds=self._total,
                manifest=manifest.model_dump(mode="json"),
            )
            self.state.status = "active"
            await ask_past(
                self.transport, peers, self.history, asyncio.to_thread, before=ENDLESS_ROUNDS
            )
        self._clocks = Clocks(math.inf)  # anew, as theirs may have been set meanwhile
        for greeting in greetings:
            self._clocks.add(greeting.peer, greeting.offset, greeting.round_trip)
        self._answered = time.monotonic()
        for greeting in greetings:
            self._learn(greeting.welcome.announces)

    async def _greeting(self, reached: Reached) -> Greeting:
        try:
            return await greet(
                self.transport,
                self._whereabouts,
                reached.peer,
                software=__version__,
                run=self._run,
                invitation=self._invitation,
                clock=clock.wall,
            )
        except TransportError as error:
            raise explain(reached.address.hostport, error) from error

    async def _manifest(self, peers: Sequence[PeerId], run: bytes) -> Any:
        try:
            return await fetch_manifest(self.transport, peers, run)
        except RemoteProtocolError as error:
            raise operator_error("E205", why=str(error)) from error
        except TransportError as error:
            raise operator_error("E502", why=str(error)) from error

    async def _greet_again(self) -> None:
        try:
            await self._greet()
        except OperatorError:
            return  # it is tried again as long as somebody watches

    async def _ask(self) -> None:
        """Hear from some of those who are there, others each time."""
        now = time.monotonic()
        book = self.transport.book
        rested = [p for p in book.peers() if now - self._failed.get(p, 0.0) > REST_S]
        alive = set(self.membership.alive(now))
        known = [peer for peer in rested if peer in alive] or rested
        self._turn += 1
        chosen = {known[(self._turn + i) % len(known)] for i in range(min(ASKED, len(known)))}
        await asyncio.gather(*map(self._ask_one, chosen))

    async def _ask_one(self, peer: PeerId) -> None:
        try:
            reply = await ask(
                self.transport, peer, "known", KnownRequest(), Known, timeout=CALL_TIMEOUT_S
            )
        except (TransportError, RemoteProtocolError):
            self._failed[peer] = time.monotonic()  # for us: what it announces still reaches us
            return
        self._answered = time.monotonic()
        self.membership.on_contact(peer, self._answered)
        self._learn(reply.announces)
        for beat in beats_in(reply.beats):
            self.membership.on_beat(beat, self._answered)
        for announce in self.membership.on_sketches(reply.sketches):
            self._published.learn(announce)

    def _learn(self, envelopes: Sequence[bytes]) -> None:
        now = time.monotonic()
        for envelope in envelopes:
            try:
                opened = open_announce(envelope, self._run, clock.wall() + self._clocks.offset)
            except RemoteProtocolError:
                continue  # stale, or not what it says: members tell their operators of that
            announce = opened.message
            proof = admission(self._invitation, self._run, announce.peer)
            if proof and not hmac.compare_digest(proof, announce.admission):
                continue
            self.membership.on_announce(announce, envelope, opened.sequence, now)
            if (island := self.membership.islands.get(announce.peer)) is not None:
                self._published.learn(island.announce)
            for address in announce.addresses:
                try:
                    self.transport.book.add(announce.peer, address)
                except OperatorError:
                    continue  # a stranger's words: no address at all

    # --- what it comes to ------------------------------------------------------------------------

    def _note(self) -> None:
        """Make events of what has changed since the last look."""
        now = time.monotonic()
        self.membership.forget_old(now)
        for peer, island in list(self.membership.islands.items()):
            alive = self.membership.liveness(peer, now) is Liveness.ALIVE
            if alive and not self._seen.get(peer):
                self.log.emit(PeerJoined.of(island.announce))
            elif not alive and self._seen.get(peer):
                self.log.emit(PeerLeft(peer=peer, reason="silent, or left"))
            self._seen[peer] = alive
        for peer in self._seen.keys() - self.membership.islands.keys():
            del self._seen[peer]
        members = self.membership.members_alive(now)
        head = usual_round(members)
        active = any(one.status == "active" for one in members)
        self._behind = self._behind + 1 if active and head < self.state.round else 0
        if self._behind >= BACK_LOOKS:  # all have gone back to an earlier state
            self._behind, self.state.round = 0, head
        elif head > self.state.round:
            if self._work or head == 1:
                self._round_done(head, members)
            self.state.round = head
        self._work = _work(head, members)
        self._watch.look()

    def _round_done(self, head: int, members: Sequence[Announce]) -> None:
        """The swarm has moved to ``head``: what was heard makes up its last round."""
        islands = [one for one in members if one.role == "island"]
        there = [one for one in islands if one.round == head]
        losses = {one.peer: one.loss for one in islands if one.loss and can_be_drawn(one.loss)}
        spread = self._spread(islands)
        self._distances = spread.to_mean
        # often of the round before: islands evaluate, and announce that, after the merge
        validation = [loss for one in there if can_be_drawn(loss := one.validation_loss) and loss]
        self.log.emit(
            RoundDone(
                round=head - 1,
                total_rounds=self._total,
                members=len(there),
                live=len(islands),
                loss=median(losses.values()) if losses else None,
                validation_loss=median(validation) if validation else None,
                tokens=max(0, _work(head, members) - self._work),
                consensus=spread.before,
                agreeing=None if self._in_pairs else _usual_state(islands, head)[1],
                state=_usual_state(islands, head)[0].hex(),
                islands={
                    peer: {name: value for name, value in values if value is not None}
                    for peer, values in {
                        one.peer: (
                            ("loss", losses.get(one.peer)),
                            ("distance", spread.to_mean.get(one.peer)),
                            ("apart", spread.apart.get(one.peer)),
                        )
                        for one in islands
                    }.items()
                },
            )
        )

    def _spread(self, islands: Sequence[Announce]) -> Spread:
        """How far apart the islands were before the last merges, by the sketches they publish."""
        there = {one.peer for one in islands}
        if self._at_will:
            return self._published.newest(there)
        return self._published.of_turn(self._published.usual_turn(there), there)

    def _agreeing(self, fragment: int) -> int:
        """How many have the usual state now: a round is told as half of them are through."""
        alive = self.membership.members_alive(time.monotonic())
        return _usual_state(alive, usual_round(alive))[1]

    def views(self) -> list[PeerView]:
        """All peers heard of; the observer itself is none of them."""
        now = time.monotonic()
        alive = self.membership.members_alive(now)
        head = usual_round(alive)
        usual, _ = _usual_state(alive, head)
        views = []
        for peer, island in self.membership.islands.items():
            said, live = island.announce, self.membership.liveness(peer, now)
            measured = self.transport.stats.by_peer.get(peer)
            views.append(
                replace(
                    PeerView.of(said),
                    status=said.status if live is Liveness.ALIVE else live.value,
                    link="direct" if measured and measured.round_trip else "none",
                    rtt_s=measured.round_trip if measured else None,
                    distance=self._distances.get(peer),
                    agrees=said.state == usual
                    if said.role == "island" and said.round == head and not self._in_pairs
                    else None,
                    clock_offset_s=self.links.offsets.get(peer),
                    silent_s=now - island.heard,
                )
            )
        return views


def usual_round(islands: Sequence[Announce]) -> int:
    """The round that half of those who take part have come to: one alone may claim anything."""
    active = [one.round for one in islands if one.status == "active"]
    return median_low(active or [one.round for one in islands] or [0])


def _usual_state(members: Sequence[Announce], head: int) -> tuple[bytes, int]:
    """The state that most islands have at a round, and how many they are."""
    states = Counter(one.state for one in members if (one.role, one.round) == ("island", head))
    return states.most_common(1)[0] if states else (b"", 0)


def _work(head: int, islands: Sequence[Announce]) -> int:
    """Tokens merged up to a round, as most of those who stand there say."""
    return median_low([one.work for one in islands if one.round == head] or [0])
