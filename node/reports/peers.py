"""What the monitor is told of peers: who is there, links, traffic; alike in all modes."""

from __future__ import annotations

import ipaddress
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from bootstrap.manifest import Manifest
from gossip.common import AnySwarm
from gossip.exchange.exchange import Exchange
from gossip.membership.members import Liveness
from gossip.pairs.rounded import Rounded
from node.conductor import Conductor
from node.errors import operator_error
from node.monitor.event_log import EventLog
from node.monitor.events import Notice, PeerJoined, PeerLeft, PeerSuspected, Problem, Rejected
from node.monitor.state import NodeState
from node.monitor.views import PeerView, Traffic
from node.monitor.wording import short
from node.reports.codecs import CodecNews
from node.reports.links import LinkTable, Measuring
from node.trainer.channel import Applied
from protocols.addresses import host_of, is_relayed
from protocols.bounds import ENDLESS_ROUNDS
from protocols.errors import RemoteProtocolError
from protocols.identity import PeerId
from protocols.messages import Announce, Certificate
from protocols.rate_limit import RateLimit

RAW_BYTES = 4  # of an element in fp32
KINDS = {  # of traffic, by the name of the verb that carried it
    "slice": "gradients",
    "evidence": "gradients",
    "merged": "gradients",
    "sum": "gradients",
    "part": "gradients",
    "letter": "parameters",
    "chunk": "state",
    "shared": "state",
    "moment": "state",
    "blob": "state",
    "p2p": "dht",
    "relay": "relay",  # carried between two others
}
NOTICES = {  # about a peer, by what is told of it
    "awaited": "holds the next round back for {}",
    "expelled": "counts on {} no more",
}


REFUSALS_A_S, REFUSALS_AT_ONCE = 2.0, 512.0  # that are written down; all are counted
ANYBODY = PeerId("")  # identities cost nothing: the bound is for all of them together


@dataclass
class PeerReports(ABC):
    """Listens to swarm and conductor; what a round is, subclasses know."""

    manifest: Manifest
    swarm: AnySwarm
    conductor: Conductor | None  # None: a seed, without a trainer
    events: EventLog
    state: NodeState
    transport: Measuring
    now: Callable[[], float] = time.monotonic
    rounds_committed: int = 0  # since this node came, none that are only repeated
    _distances: Mapping[PeerId, float] = field(default_factory=dict)  # in the last round
    written: RateLimit = field(
        default_factory=lambda: RateLimit(REFUSALS_A_S, REFUSALS_AT_ONCE), repr=False
    )
    mute: bool = False  # its disk keeps nothing that it promises

    def __post_init__(self) -> None:
        self.codec_news = CodecNews(self.events)
        membership = self.swarm.membership
        self.links = LinkTable(
            self.transport,
            self.swarm.me,
            lambda: membership.alive(self.swarm.now()),
            self.now,
        )
        providers = self.state.providers
        providers.peers = self.peers
        providers.offices = self.offices
        providers.narrow = self.narrow
        providers.agreeing = self.agreeing
        providers.traffic = self.traffic
        providers.links = self.links.own
        providers.all_links = self.links.look

    @property
    def _mine(self) -> int:
        """What this node adds to a count of islands."""
        return int(self.conductor is not None)

    @property
    @abstractmethod
    def round(self) -> int:
        """Rounds that are through."""

    @abstractmethod
    def come(self) -> None:
        """This node takes part from here on, where the run stands by what others have announced."""

    @abstractmethod
    def on_committed(self, ended: Certificate | Rounded, exchange: Exchange | None) -> None:
        """A round is through at this node, and the replica has stepped.

        ``ended``: its certificate, or in pairs what the round came to. ``exchange``: how a
        certified round's tensors travelled; None where this node had no part in that.
        """

    def on_applied(self, applied: Applied) -> bool:
        """The trainer has applied the newest round, if any; returns whether there was one."""
        if applied.fragment is None:  # it has begun
            told = [self._done(chain.fragment, applied) for chain in self.swarm.chains]
            return any(told)
        return self._done(applied.fragment, applied)

    @abstractmethod
    def _done(self, fragment: int, applied: Applied | None) -> bool:
        """A round of a fragment is through, ``applied`` by the trainer if there is one."""

    def _eta_s(self, done: int, round_s: float) -> float | None:
        """Seconds until the run's end after so many rounds; None: it has none, or nobody knows."""
        total = self.manifest.rounds.total_rounds
        return max(0, total - done) * round_s or None if total < ENDLESS_ROUNDS else None

    def _losses(self) -> dict[PeerId, float]:
        """Of the newest inner step of each island that has told of one, this one's own too."""
        alive = self.swarm.membership.members_alive(self.swarm.now())
        losses = {one.peer: one.loss for one in alive if one.loss}
        if self.conductor is not None and self.conductor.pace.loss:
            losses[self.swarm.me] = self.conductor.pace.loss
        return losses

    def _note_validation(self, loss: float | None) -> None:
        if loss is not None:
            self.swarm.presence.note(validation_loss=loss)

    @abstractmethod
    def on_learned(self, announce: Announce) -> None:
        """A peer announced something."""

    @abstractmethod
    def _agrees(self, announce: Announce) -> bool | None:
        """Whether it has our state; None where that cannot be told."""

    def on_peer(self, peer: PeerId, what: str, why: str) -> None:
        """The liveness of a peer has changed, or it did not deliver."""
        announce = self.swarm.membership.announcement(peer)
        if what == Liveness.ALIVE and announce is not None:
            self.events.emit(PeerJoined.of(announce))
        elif what == Liveness.SUSPECT:
            self.events.emit(PeerSuspected(peer=peer, reason="silent, or not to be reached"))
        elif what in NOTICES:
            name = announce.name if announce is not None and announce.name else short(peer)
            self.events.emit(Notice(text=f"{NOTICES[what].format(name)}: {why}"))
        elif what == "fault":
            self.events.emit(PeerSuspected(peer=peer, reason=why))
        elif what in (Liveness.DEAD, Liveness.LEFT):
            reason = "said farewell" if what == Liveness.LEFT else "gone"
            self.events.emit(PeerLeft(peer=peer, reason=reason))

    def on_rejected(self, peer: PeerId, error: RemoteProtocolError) -> None:
        """Something a peer sent was refused; or, by its disk, what this node itself was to send.

        In that case this node takes no part in rounds, and alone can make none. That is told
        once, and again only after it has had a part again.
        """
        if self.written.take(ANYBODY):
            self.events.emit(Rejected(peer=peer, reason=error.reason, detail=str(error)))
        else:  # a peer that floods this node must not push older events out of its log
            self.state.rejected[error.reason] += 1
        if peer == self.swarm.me and not self.mute:
            self.mute = True
            mute = operator_error(
                "E105",
                "this node takes no part in rounds: its state directory cannot be written",
                why=str(error),
                fix="see to that: this node tries again every few seconds, and goes on by itself",
            )
            self.events.emit(Problem.of(mute))

    # --- on request ------------------------------------------------------------------------------

    def peers(self) -> list[PeerView]:
        """Everybody this node knows of, itself first."""
        now = self.swarm.now()
        views = []
        members = self.swarm.membership.islands.items()
        for peer, announce, silent, status in [
            (self.swarm.me, self.swarm.status, 0.0, self.swarm.status.status),
            *(
                (
                    peer,
                    island.announce,
                    now - island.heard,
                    island.announce.status
                    if (live := self.swarm.membership.liveness(peer, now)) is Liveness.ALIVE
                    else live.value,
                )
                for peer, island in members
            ),
        ]:
            mine = peer == self.swarm.me
            measured = None if mine else self.transport.stats.peer(peer)
            views.append(
                replace(
                    PeerView.of(announce),
                    status=status,
                    round=self.round if mine else announce.round,
                    link="self" if mine else link_of(announce.addresses),
                    rtt_s=measured.round_trip if measured else None,
                    agrees=True if mine else self._agrees(announce),
                    address=kind_of(announce.addresses),
                    distance=self._distances.get(peer),
                    clock_offset_s=self.links.offsets.get(peer),
                    silent_s=silent,
                )
            )
        return views

    def offices(self) -> list[tuple[PeerId, ...]]:
        """Who decides on the next round, by fragment; where islands gossip nobody does."""
        return []

    def narrow(self) -> tuple[float, float] | None:
        """Seconds of a round, here and with the others, where this node does not catch up."""
        return None

    def agreeing(self, fragment: int = 0) -> int | None:
        """Islands whose state is this node's now; where they gossip each has its own."""
        return None

    def traffic(self) -> dict[str, Traffic]:
        """Bytes by kind since the start."""
        stats = self.transport.stats
        sent: dict[str, int] = {}
        received: dict[str, int] = {}
        for source, totals in ((stats.out_by_name, sent), (stats.in_by_name, received)):
            for name, count in source.items():
                kind = KINDS.get(name, "control")
                totals[kind] = totals.get(kind, 0) + count
        return {k: Traffic(sent.get(k, 0), received.get(k, 0)) for k in {*sent, *received}}


def link_of(addresses: Sequence[str]) -> Literal["direct", "relay"]:
    """Whether a peer is dialled, or called through its relay."""
    return "relay" if addresses and all(map(is_relayed, addresses)) else "direct"


def kind_of(addresses: Sequence[str]) -> str:
    """What kind of address the first one is: ``public IPv4``, ``private IPv6``, ``name``."""
    if not addresses:
        return ""
    if is_relayed(addresses[0]):
        return "relay"
    try:
        address = ipaddress.ip_address(host_of(addresses[0]))
    except ValueError:
        return "name"
    if address.is_loopback:
        return "loopback"
    return f"{'public' if address.is_global else 'private'} IPv{address.version}"
