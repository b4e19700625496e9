"""From a trainer's snapshot to a contribution that is ready: its weight, its norm, its sketch.

Norm and sketch are a pass over the parameters each, beside the event loop. If the snapshot's round
commits meanwhile without this work, the work is not offered to the next round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from bootstrap.manifest import Manifest
from bootstrap.manifest_gossip import PAIRED
from gossip.common import AnySwarm
from gossip.membership.sketch import sketch
from gossip.membership.spread import WholeSketch
from gossip.plans.ramp import ramp
from node.island.island import Island
from node.island.ownership import VectorOwnership
from node.modes import by_gradients, is_over, weight_of
from node.replicas.own_state import OwnReplica
from node.replicas.replica import OuterReplica
from node.trainer.channel import Snapshot
from node.trainer.layout import Outline


class NotFinite(Exception):
    """What would be contributed has NaN or infinity in it, or a norm beyond all bounds."""


class Readiness:
    """For one island; its lists are by fragment."""

    def __init__(
        self,
        manifest: Manifest,
        island: Island,
        replicas: tuple[OuterReplica, ...],
        layout: Outline,
        ownership: VectorOwnership,
    ) -> None:
        fragments = len(replicas)
        self.manifest, self.island, self.replicas = manifest, island, replicas
        self._layout, self._ownership = layout, ownership
        self.merged = [0] * fragments  # rounds that merged work of ours
        self.snapshot_at = [0.0] * fragments  # when the last one came, in the event loop's time
        self.snapshot_of = [-1] * fragments  # and for which round
        self.snapshot_step = [0] * fragments  # and after how many inner steps of this cycle
        self._merged_step = 0  # the furthest of these whose snapshot was merged
        # round of the last snapshot, and turn of the sketch that was made with it
        self.sketched = [(-1, 0)] * fragments
        self._whole = WholeSketch(fragments, paired=manifest.mode in PAIRED)

    def answered(self, fragment: int, *, contributed: bool) -> None:
        """A round has ended; ``contributed``: with this island's snapshot."""
        self.merged[fragment] += contributed
        if contributed:
            self._merged_step = max(self._merged_step, self.snapshot_step[fragment])
        if fragment == 0:  # steps are counted from here
            self.snapshot_step, self._merged_step = [0] * len(self.merged), 0

    def came(self, swarm: AnySwarm, snapshot: Snapshot, now: float) -> None:
        """A snapshot has been taken, in this moment of the event loop."""
        fragment = snapshot.fragment
        self.snapshot_at[fragment] = now
        # in pairs a round exchanges its first snapshot, even if the ranks were restarted since
        again = snapshot.round == self.snapshot_of[fragment] and swarm.chains[fragment].has_work
        self.snapshot_of[fragment] = snapshot.round
        # with another round it is of an earlier cycle
        if snapshot.round == self.replicas[fragment].place.round and not again:
            self.snapshot_step[fragment] = snapshot.round_step

    def withdraw(self, swarm: AnySwarm, fragment: int, eta: float) -> None:
        """Announce that this island is not ready, since its trainer goes back to the base.

        But not where its snapshot may still be merged: the round would wait for a next snapshot,
        which waits for that merge (:meth:`keep`).
        """
        if not (chain := swarm.chains[fragment]).contributes:
            chain.update(ready=False, eta=eta)

    def keep(self, swarm: AnySwarm, fragment: int) -> None:
        """Let no new snapshot replace the last one while that may still be merged.

        The round that counts it ends with a merge; after that the next snapshot may come.
        """
        self.island.vectors.keep(fragment, on=swarm.chains[fragment].contributes)

    def steps_read(self, swarm: AnySwarm) -> int:
        """Inner steps of this cycle whose data a trainer that begins anew does not read again."""
        return self.steps_read_of([chain.has_work for chain in swarm.chains])

    def steps_read_of(self, offered: Sequence[bool]) -> int:
        """Inner steps of this cycle whose windows a trainer that begins anew does not read again.

        The base has what was learnt from them, or will have it.
        ``offered``: by fragment, whether the last snapshot may still be merged.
        """
        still = (step * kept for step, kept in zip(self.snapshot_step, offered, strict=True))
        return max(self._merged_step, *still)

    def is_out(self, snapshot: Snapshot) -> bool:
        """Whether ``sent`` still is this snapshot, and waits for the round it was taken for.

        False once the daemon has taken the fragment: what it writes there answers the snapshot.
        Ask again after every await.
        """
        fragment, round_ = snapshot.fragment, snapshot.round
        return (
            self.replicas[fragment].place.round == round_
            and self.island.vectors.snapshot(fragment) == round_
            and not self._ownership.is_taken(fragment)
        )

    def out_since(self, fragment: int) -> float | None:
        """When the present round's snapshot came; None: the last one is of an earlier round."""
        of_this_round = self.snapshot_of[fragment] == self.replicas[fragment].place.round
        return self.snapshot_at[fragment] if of_this_round else None

    async def flaw(self, snapshot: Snapshot) -> str:
        """Why a snapshot is of no use to anybody; empty where it may be.

        In certified rounds the differences travel, and :mod:`gossip.exchange.slicing` checks them.
        """
        if not snapshot.finite:
            return "not finite"
        replica = self.replicas[snapshot.fragment]
        if not isinstance(replica, OwnReplica) or not self.is_out(snapshot):
            return ""
        found: str = await replica.offload(replica.flaw)
        return found if self.is_out(snapshot) else ""

    async def contribution(
        self, snapshot: Snapshot, swarm: AnySwarm, *, ramped: bool
    ) -> dict[str, Any] | None:
        """What to announce of a snapshot; None where it has been answered, or the run is over.

        ``ramped``: the island came into a run under way, and its first rounds count for less.
        Raises :class:`NotFinite`.
        """
        fragment, round_ = snapshot.fragment, snapshot.round
        replica = self.replicas[fragment]
        if not self.is_out(snapshot):
            return None  # the swarm has moved on: its Apply is under way and gives this work back
        if is_over(self.manifest, round_, replica.place.work):
            return None  # the last checkpoint is being written
        # of gradients there is no sketch: all islands stand at the same parameters
        learnt = replica.base if by_gradients(self.manifest) else replica.sent
        start = self._layout.cuts[fragment].start
        norm, projection = await replica.offload(
            lambda: (replica.norm(), sketch(learnt, self.manifest.run_id, start=start))
        )
        if not self.is_out(snapshot):
            return None  # the round has committed meanwhile, without this work
        if not math.isfinite(norm):  # the trainer's look came before: memory has failed, or grown
            raise NotFinite("not finite")
        if whole := self._whole.add(fragment, round_, projection):
            self.sketched[fragment] = (round_, whole[0])
            swarm.presence.note(sketch_round=whole[0], sketch=whole[1])
        # of steps that changed something; one at least, so that a round has some weight
        steps = max(snapshot.steps - snapshot.skipped, 1)
        trained = snapshot.tokens * steps // max(snapshot.steps, 1)
        weight = weight_of(self.manifest, trained, steps)
        return {
            "tokens": snapshot.tokens,
            "steps": snapshot.steps,
            "weight": weight * (ramp(self.merged[fragment]) if ramped else 1.0),
            "norm": norm,
        }
