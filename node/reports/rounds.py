"""What the monitor is told in a run of certified rounds: each round, and who agrees after it."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from statistics import median_low

from gossip.chain.swarm import Swarm
from gossip.exchange.exchange import Exchange
from gossip.membership.spread import Published, Spread
from gossip.membership.standing import seen_from
from gossip.pairs.rounded import Rounded
from node.modes import at_will
from node.monitor.events import (
    RoundDone,
)
from node.reports.peers import RAW_BYTES, PeerReports
from node.trainer.channel import Applied
from protocols.identity import PeerId
from protocols.messages import Announce, Certificate, Contributor, Outcome

PAST = 64  # rounds of which the state is remembered: others may stand at any of them


@dataclass
class Pending:
    """A committed round whose merge the trainer has yet to apply."""

    certificate: Certificate
    planned: float  # when this node got the round's plan, monotonic
    committed: float  # likewise; equal for a round repeated from its certificate
    sent: int
    elements: int  # what was sent decodes to
    received: int
    spread: Spread
    state: bytes
    merging: float  # when every part was here, likewise
    repeated: bool  # see RoundDone


@dataclass
class Reporter(PeerReports):
    """Listens to swarm and conductor; emits one :class:`RoundDone` a round."""

    swarm: Swarm
    _came_at: int = 0  # the round at which the run stood when this node came
    _pending: dict[int, Pending] = field(default_factory=dict)  # by fragment
    _last_round: float | None = None  # when one was through,
    _last: dict[int, float] = field(default_factory=dict)  # and by fragment
    _last_codec: str = ""
    _published: Published = field(default_factory=Published)
    # states this node has had, by fragment and round
    _past: dict[int, dict[int, bytes]] = field(default_factory=dict)
    _merged: dict[int, Set[PeerId]] = field(default_factory=dict)  # in the last round, by fragment
    _behind: set[int] = field(default_factory=set)  # fragments in which the others were further
    # when each island became ready, by fragment and round
    _ready: dict[tuple[int, int], dict[PeerId, float]] = field(default_factory=dict)

    @property
    def round(self) -> int:
        """Rounds that all fragments have come through."""
        return min(chain.replica.place.round for chain in self.swarm.chains)

    def offices(self) -> list[tuple[PeerId, ...]]:
        """Who decides on the next round, by fragment."""
        return [chain.replica.roster for chain in self.swarm.chains]

    def narrow(self) -> tuple[float, float] | None:
        """See :meth:`PeerReports.narrow`; of the fragment that is slowest to come here."""
        found = (chain.following.approach.narrow for chain in self.swarm.chains)
        return max((one for one in found if one is not None), default=None)

    # --- hooks -----------------------------------------------------------------------------------

    def come(self) -> None:
        """See :meth:`PeerReports.come`: rounds that the others have had before are repeated."""
        alive = self.swarm.membership.members_alive(self.swarm.now())
        rounds = [announce.round for announce in alive if announce.status == "active"]
        self._came_at = median_low(rounds) if rounds else 0  # one alone may claim anything

    def on_committed(self, ended: Certificate | Rounded, exchange: Exchange | None) -> None:
        """The swarm has committed a round and the replica has stepped."""
        assert isinstance(ended, Certificate)
        certificate, fragment = ended, ended.outcome.fragment
        self.rounds_committed += fragment == 0 and certificate.outcome.round >= self._came_at
        sent = exchange.bytes_sent if exchange else 0
        now = self.now()
        chain = self.swarm.chains[fragment]
        self._remember(certificate)
        self.codec_news.look(chain)
        took_part = exchange is not None and exchange.plan is not None
        self.mute = self.mute and not took_part
        self._pending[fragment] = Pending(
            certificate,
            chain.timing.planned_at if took_part else now,
            now,
            sent,
            exchange.elements_sent if exchange else 0,
            exchange.bytes_received if exchange else 0,
            self._spread(fragment, certificate.outcome.round),
            chain.replica.place.state,
            min(now, max(chain.timing.held_at, chain.timing.planned_at)) if took_part else now,
            self._repeated(fragment, certificate.outcome.round) and not took_part,
        )
        self.state.round = self.round
        leaving = self.state.status == "leaving"  # rounds come until its farewell
        if not leaving and self.swarm.status.status in ("joining", "active"):
            self.state.status = "active" if self.swarm.status.status == "active" else "joining"
        if self.conductor is None or not self.conductor.beginning.there:
            self._done(fragment, None)

    def _done(self, fragment: int, applied: Applied | None) -> bool:
        """A round of a fragment is through, ``applied`` by the trainer if there is one."""
        pending = self._pending.pop(fragment, None)
        if pending is None:
            return False
        chain = self.swarm.chains[fragment]
        now, conductor = self.now(), self.conductor
        outcome = pending.certificate.outcome
        since, self._last_round = self._last_round, now
        wall = now - since if since is not None else None
        busy = conductor.pace.take_busy() if conductor else 0.0
        validation = applied.validation_loss if applied else None
        self._note_validation(validation)
        codec_before, self._last_codec = self._last_codec, outcome.codec
        counted = {i.contributor for result in outcome.parts for i in result.included}
        merged = {outcome.contributors[index].peer: index for index in counted}
        alive = self.swarm.membership.members_alive(self.swarm.now())
        live = self._mine + sum(a.role == "island" for a in alive)  # no servers: they do not train
        dropped = dropped_of(outcome)
        taken = conductor.readiness.snapshot_at[fragment] if conductor is not None else 0.0
        training = conductor is not None and taken > 0
        ready = self._ready.pop((fragment, outcome.round), {})
        for key in [k for k in self._ready if k[0] == fragment and k[1] < outcome.round]:
            del self._ready[key]
        snapshot_at = pending.committed
        last, self._last[fragment] = self._last.get(fragment, 0.0), now
        if taken > last:  # of this round
            snapshot_at = ready[self.swarm.me] = taken
        self._merged[fragment] = merged.keys()
        if pending.spread.to_mean:
            self._distances = pending.spread.to_mean
        self.events.emit(
            RoundDone(
                round=outcome.round,
                outcome="degraded" if dropped else "committed",
                total_rounds=self.manifest.rounds.total_rounds,
                fragment=outcome.fragment,
                fragments=len(self.swarm.chains),
                members=len(counted),
                live=live,
                loss=(conductor.pace.loss or None) if conductor else None,
                validation_loss=validation,
                tokens=sum(outcome.contributors[index].tokens for index in counted),
                sync_s=max(0.0, now - snapshot_at),
                wait_s=applied.waited_s if applied and wall and training else 0.0,
                utilisation=min(1.0, busy / wall) if wall and training else None,
                sent_bytes=pending.sent,
                received_bytes=pending.received,
                raw_bytes=RAW_BYTES * pending.elements,
                codec=outcome.codec,
                codec_before=codec_before if codec_before != outcome.codec else "",
                consensus=pending.spread.before,
                consensus_after=self._left(pending.spread),
                agreeing=self.agreeing(fragment),
                state=pending.state.hex(),
                eta_s=self._eta_s(outcome.round + 1, chain.round_s),
                dropped=dropped,
                phases={"compute": busy} | _phases(pending, ready, snapshot_at, now),
                islands=self._islands(
                    pending, ready, {p: outcome.contributors[i] for p, i in merged.items()}
                ),
                repeated=pending.repeated,
            )
        )
        return True

    def _repeated(self, fragment: int, round_: int) -> bool:
        """Whether the others have made a round before this node, as far as they have announced.

        True as well for the one with which it has come up to them.
        """
        alive = self.swarm.membership.members_alive(self.swarm.now())
        heads = [seen.round for a in alive if (seen := seen_from(a, fragment)).status == "active"]
        was = fragment in self._behind
        if heads and median_low(heads) > round_ + 1:  # one alone may claim anything
            self._behind.add(fragment)
        else:
            self._behind.discard(fragment)
        return was or fragment in self._behind

    def _islands(
        self,
        pending: Pending,
        ready: Mapping[PeerId, float],
        merged: Mapping[PeerId, Contributor],
    ) -> dict[str, dict[str, float]]:
        """What is known of each island: ``islands`` of :class:`~node.monitor.events.RoundDone`."""
        found: dict[str, dict[str, float]] = {}

        def note(name: str, values: Mapping[PeerId, float]) -> None:
            for peer, value in values.items():
                exact = isinstance(value, int)
                found.setdefault(peer, {})[name] = value if exact else round(value, 5)

        note("loss", self._losses())
        first = min(ready.values(), default=0.0)
        note("ready_s", {peer: at - first for peer, at in ready.items()})
        note("tokens", {peer: contributor.tokens for peer, contributor in merged.items()})
        note("scale", {peer: contributor.scale for peer, contributor in merged.items()})
        note("distance", pending.spread.to_mean)
        note("apart", pending.spread.apart)
        return found

    def on_learned(self, announce: Announce) -> None:
        """A peer announced something: when it was ready tells who waits for whom."""
        self._published.learn(announce)
        for chain in self.swarm.chains:
            here, seen = chain.replica.place.round, seen_from(announce, chain.fragment)
            if seen.ready and seen.round in (here, here + 1):
                since = self._ready.setdefault((chain.fragment, seen.round), {})
                since.setdefault(announce.peer, self.now())

    # --- consensus -------------------------------------------------------------------------------

    def _spread(self, fragment: int, round_: int) -> Spread:
        """How far apart the islands were before a round's merge; empty where that is not known."""
        there = {a.peer for a in self.swarm.membership.members_alive(self.swarm.now())}
        if self._mine:
            self._published.learn(self.swarm.status)
            there.add(self.swarm.me)
        if at_will(self.manifest):
            return self._published.newest(there)
        if len(self.swarm.chains) == 1:
            return self._published.of_turn(round_, there)
        turn: int | None
        readiness = self.conductor.readiness if self.conductor else None
        taken, turn = readiness.sketched[fragment] if readiness else (-1, 0)
        if taken != round_:  # nothing of ours was in it
            turn = self._published.usual_turn(there)
        return self._published.of_turn(turn, there)

    def _left(self, spread: Spread) -> float | None:
        """What is left of the spread after the last merge of each fragment."""
        chains = self.swarm.chains
        model = sum(chain.rules.size for chain in chains)
        return spread.after(
            [self._merged.get(chain.fragment, set()) for chain in chains],
            [chain.rules.size / model for chain in chains],
            self.manifest.rounds.alpha if len(chains) > 1 else 0.0,
        )

    def agreeing(self, fragment: int = 0) -> int:
        """Islands whose state is ours bit for bit, ours included; none where all others are dead.

        A seed is no island: the last count would stand for good there.
        """
        return self._mine + self._as_here(fragment)

    def _as_here(self, fragment: int) -> int:
        """Other islands at our place of the chain whose state is ours bit for bit."""
        chain = self.swarm.chains[fragment]
        here = chain.replica.place
        return sum(
            a.role == "island" and a.head == here.previous and a.state == here.state
            for a in chain.membership.members_alive(self.swarm.now())
        )

    def _remember(self, certificate: Certificate) -> None:
        """Where this node stands now; what it had on a fork that it left is forgotten."""
        outcome = certificate.outcome
        past = self._past.setdefault(outcome.fragment, {})
        if past.get(outcome.round) != outcome.state:
            past.clear()
        past[outcome.round + 1] = self.swarm.chains[outcome.fragment].replica.place.state
        if len(past) > PAST:
            del past[min(past)]

    def _agrees(self, announce: Announce) -> bool | None:
        """Whether it has our state in all fragments that it has at our round; None: it has none.

        False also if it is at another round where our state, as far as known, was different.
        """
        same = []
        for chain in self.swarm.chains:
            here, seen = chain.replica.place, seen_from(announce, chain.fragment)
            was = self._past.get(chain.fragment, {}).get(seen.round)
            if seen.round == here.round:
                same.append(seen.state == here.state)
            elif seen.status == "active" and was is not None and was != seen.state:
                same.append(False)
        return all(same) if same else None


def dropped_of(outcome: Outcome) -> dict[str, str]:
    """Whose work a round has planned with and does not have; where the roll is called, nobody's."""
    counted = {included.contributor for result in outcome.parts for included in result.included}
    return {
        str(contributor.peer): "its work did not arrive"
        for index, contributor in enumerate(outcome.contributors)
        if index not in counted and contributor.tokens
    }


def _phases(
    pending: Pending, ready: Mapping[PeerId, float], snapshot_at: float, now: float
) -> dict[str, float]:
    """Seconds from one moment of the round to the next, as this node saw them."""
    waited = [moment for moment in ready.values() if moment <= pending.planned]
    moments = {
        "ready": max(waited, default=snapshot_at),
        "match": pending.planned,
        "exchange": pending.merging,
        "certify": pending.committed,
        "apply": now,
    }
    phases, reached = {}, min(snapshot_at, pending.committed)
    for name, moment in moments.items():
        phases[name] = max(0.0, moment - reached)
        reached = max(reached, moment)
    return phases
