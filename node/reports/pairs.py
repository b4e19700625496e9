"""What the monitor is told in a run of gossip: each island's own rounds, and every exchange."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gossip.exchange.exchange import Exchange
from gossip.pairs.rounded import Rounded
from gossip.pairs.swarm import Pairs
from node.monitor.events import Exchanged, ExchangesChosen, RoundDone
from node.monitor.views import PeerView
from node.reports.peers import RAW_BYTES, PeerReports
from node.trainer.channel import Applied
from protocols.messages import Announce, Certificate

LOST = "it could not be reached"


@dataclass
class GossipReports(PeerReports):
    """Emits an :class:`Exchanged` for each exchange and a :class:`RoundDone` for each round."""

    swarm: Pairs
    # by fragment: what the trainer has yet to apply, and exchanges in a round
    _pending: dict[int, Rounded] = field(default_factory=dict)
    _exchanges: dict[int, int] = field(default_factory=dict)
    _codecs: dict[int, str] = field(default_factory=dict)  # of the newest letter of this island's
    _last: float | None = None  # when the last round was through, of any fragment
    _tokens: int = 0  # trained up to the last round, or the trainer's beginning

    def __post_init__(self) -> None:
        super().__post_init__()
        self._exchanges = {chain.fragment: chain.neighbours for chain in self.swarm.chains}

    @property
    def round(self) -> int:
        """This island's own count, that all fragments have come through."""
        return min(chain.replica.place.round for chain in self.swarm.chains)

    def come(self) -> None:
        """See :meth:`PeerReports.come`: rounds are this island's own, and repeated by nobody."""

    def on_committed(self, ended: Certificate | Rounded, exchange: Exchange | None) -> None:
        """The outer step of a round is taken; there is no ``exchange``, but letters."""
        assert isinstance(ended, Rounded)
        self.rounds_committed += ended.fragment == 0
        self.state.round = self.round
        if self.state.status != "leaving" and self.swarm.status.status == "active":
            self.state.status = "active"
        for one in ended.exchanged:
            met = one.met
            self.events.emit(
                Exchanged(
                    round=met.round,
                    exchange=met.exchange,
                    fragment=ended.fragment,
                    partner=met.partner or "",
                    outcome=met.outcome,
                    seconds=met.seconds,
                    sent_bytes=one.sent,
                    received_bytes=one.received,
                    others=met.others,
                    difference=one.difference,
                    codec=one.codec,
                )
            )
        if ended.exchanges != self._exchanges[ended.fragment]:
            self.events.emit(
                ExchangesChosen(
                    round=ended.round + 1,
                    fragment=ended.fragment,
                    exchanges=ended.exchanges,
                    before=self._exchanges[ended.fragment],
                    distance=ended.spread.square / self._elements,
                    progress=ended.progress,
                    bound=self.manifest.gossip.bound,
                    lost=ended.lost,
                )
            )
            self._exchanges[ended.fragment] = ended.exchanges
        self.codec_news.look(self.swarm.chains[ended.fragment])
        self._pending[ended.fragment] = ended

    @property
    def _elements(self) -> int:
        """Of the model."""
        return sum(chain.size for chain in self.swarm.chains)

    def on_applied(self, applied: Applied) -> bool:
        """See :meth:`PeerReports.on_applied`: the next round counts from the trainer's beginning.

        What a checkpoint says of this island is of rounds before, and what a trainer that died had
        trained since its last round is lost.
        """
        through = super().on_applied(applied)
        if applied.fragment is None and self.conductor is not None:
            self._tokens = self.conductor.pace.tokens
        return through

    def _done(self, fragment: int, applied: Applied | None) -> bool:
        """A round of a fragment is through, and applied."""
        pending = self._pending.pop(fragment, None)
        if pending is None or applied is None or self.conductor is None:
            return False
        chain = self.swarm.chains[fragment]
        now, pace = self.now(), self.conductor.pace
        wall = now - self._last if self._last is not None else None
        self._last = now
        busy = pace.take_busy()
        self._note_validation(applied.validation_loss)
        spread = pending.spread
        self._distances = spread.to_mean
        missed = {
            str(one.met.partner): LOST for one in pending.exchanged if one.met.outcome == "lost"
        }
        tokens, self._tokens = pace.tokens - self._tokens, pace.tokens
        mixed = {peer for one in pending.exchanged for peer in one.met.mixed}
        codec_before = self._codecs.get(fragment, "")
        codec = next((one.codec for one in reversed(pending.exchanged) if one.codec), codec_before)
        self._codecs[fragment] = codec
        sent = sum(one.sent for one in pending.exchanged)
        alive = self.swarm.membership.members_alive(self.swarm.now())
        islands: dict[str, dict[str, float]] = {
            str(peer): {"distance": round(d, 5), "apart": round(spread.apart[peer], 5)}
            for peer, d in spread.to_mean.items()
        }
        for peer, loss in self._losses().items():
            islands.setdefault(peer, {})["loss"] = round(loss, 5)
        islands.setdefault(self.swarm.me, {})["tokens"] = tokens
        self.events.emit(
            RoundDone(
                round=pending.round,
                outcome="degraded" if missed else "committed",
                total_rounds=self.manifest.rounds.total_rounds,
                fragment=fragment,
                fragments=len(self.swarm.chains),
                members=1 + len(mixed),
                live=self._mine + len(alive),
                loss=pace.loss or None,
                validation_loss=applied.validation_loss,
                tokens=tokens,
                sync_s=max(0.0, now - pending.began),
                wait_s=applied.waited_s if wall else 0.0,
                utilisation=min(1.0, busy / wall) if wall else None,
                sent_bytes=sent,
                received_bytes=sum(one.received for one in pending.exchanged),
                raw_bytes=RAW_BYTES * sum(one.elements for one in pending.exchanged),
                codec=codec,
                codec_before=codec_before if codec_before != codec else "",
                consensus=spread.before,
                consensus_after=pending.after,
                agreeing=None,
                state=chain.status.state.hex(),
                eta_s=self._eta_s(pending.round + 1, chain.core.patience.cycle_s),
                dropped=missed,
                phases={
                    "compute": busy,
                    "exchange": pending.ended - pending.began,
                    "apply": max(0.0, now - pending.ended),
                },
                islands=islands,
            )
        )
        return True

    def peers(self) -> list[PeerView]:
        """Everybody this node knows of; nobody's state can agree with another's."""
        return [replace(view, agrees=None) for view in super().peers()]

    def on_learned(self, announce: Announce) -> None:
        """Nothing of others' announcements is counted."""

    def _agrees(self, announce: Announce) -> bool | None:
        return None  # islands have no state in common
