"""How the parts of a plan get about among members of :mod:`round_kit`: who has what, no bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blake3 import blake3

from gossip.plans.certificate import basis_of, sign_result
from gossip.plans.validity import PartKey, key_of
from gossip.rounds.round import Round
from protocols.counts import pack_counts
from protocols.identity import PeerId
from protocols.messages import PartResult, Plan

if TYPE_CHECKING:
    from round_kit import Peer, World


class Parts:
    def __init__(self, world: World) -> None:
        self.world = world

    def work(self, peer: Peer, current: Round, plan: Plan) -> None:
        me = peer.identity.peer_id
        contributes = any(c.peer == me and c.active for c in plan.contributors)
        for part in plan.parts:
            if part.result is not None:
                if part.result.digest:
                    self.world.after(0.05, lambda r=part.result: self.fetch(peer, current, r, 0))
                continue
            key = (part.start, part.stop, part.owner, basis_of(plan.codec, plan.contributors))
            if contributes:
                self.world.deliver(peer, part.owner, lambda t, k=key: self.take(t, current, k, me))
            if part.owner == me:
                self.take(peer, current, key, None)
                self.world.after(
                    plan.patience_s,
                    lambda k=key: self.merge(peer, current, plan, k, late=True),
                )
            self.world.after(2.5 * plan.patience_s, lambda k=key: self.miss(peer, current, plan, k))

    def take(self, owner: Peer, current: Round, key: PartKey, who: PeerId | None) -> None:
        if who is not None:
            owner.slices.setdefault(key, set()).add(who)
        mine = owner.round
        if mine is not None and mine.agreement.plan is not None:
            self.merge(owner, mine, mine.agreement.plan, key, late=False)

    def merge(self, owner: Peer, current: Round, plan: Plan, key: PartKey, *, late: bool) -> None:
        if owner.round is not current or key in owner.merged or not owner.alive or owner.frozen:
            return
        open_parts = {(p.start, p.stop, p.owner) for p in plan.parts if p.result is None}
        if key[:3] not in open_parts or key[3] != basis_of(plan.codec, plan.contributors):
            return
        arrived = owner.slices.get(key, set())
        wanted = {c.peer for c in plan.contributors if c.active}
        if not late and wanted - arrived:
            return
        owner.merged.add(key)
        counts = pack_counts([(key[1] - key[0]) * (c.peer in arrived) for c in plan.contributors])
        content = repr((key, counts)).encode()
        result = sign_result(
            owner.identity,
            current.place.run,
            PartResult(
                0, plan.round, *key[:3], plan.codec, blake3(content).digest(), counts, key[3], b""
            ),
        )
        for other in plan.roster:
            if other == owner.identity.peer_id:
                self.hold(owner, result)
            else:
                self.world.deliver(owner, other, lambda t: self.hold(t, result))

    def hold(self, peer: Peer, result: PartResult) -> None:
        current = peer.round
        if current is None or result.round != current.place.round:
            return
        peer.held[result.round, key_of(result)] = result
        self.world.do(peer, current.on_held(result, self.world.now))

    def fetch(self, peer: Peer, current: Round, result: PartResult, attempt: int) -> None:
        if peer.round is not current or not peer.alive or peer.frozen:
            return
        if (result.round, key_of(result)) in peer.held:
            self.world.do(peer, current.on_held(result, self.world.now))
            return
        if any((result.round, key_of(result)) in o.held for o in self.world.reachable(peer)):
            self.hold(peer, result)
            return
        if attempt < 2:
            self.world.after(0.2, lambda: self.fetch(peer, current, result, attempt + 1))
        else:
            self.world.do(peer, current.on_lost(result, self.world.now))

    def miss(self, peer: Peer, current: Round, plan: Plan, key: PartKey) -> None:
        """The part did not come in time: ask around, else the owner is at fault."""
        if peer.round is not current or not peer.alive or peer.frozen or current.finished:
            return
        if (plan.round, key) in peer.held or key[2] == peer.identity.peer_id:
            return
        for other in self.world.reachable(peer):
            if (known := other.held.get((plan.round, key))) is not None:
                self.hold(peer, known)
                return
        self.world.do(peer, current.on_fault(key[2], self.world.now))
