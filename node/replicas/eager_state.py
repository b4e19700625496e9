"""The outer state where islands do not wait for a merge: they go on from what it will about be.

Mode ``eager`` (:mod:`diloco.eager`). When the trainer has left a snapshot, it is moved to a guess
of the new base, made of its own Δ and of what the others brought the last time; when the round
has committed, it is moved on by the difference to the true one. The state that all have in common
knows nothing of guesses, so certificates, digests, downloads and checkpoints are as in any mode.

For the trainer both moves are sums on θ. While a snapshot is out, ``sent`` is where θ was guessed
to be at that moment, and the snapshot is kept apart; so ``θ ← base + (θ − sent)`` corrects the
guess.
"""

from __future__ import annotations

import torch

from diloco import eager, optimizers
from diloco.pseudo_gradient import pseudo_gradient
from node.replicas.replica import OuterReplica, chunks, gaps
from protocols.messages import Outcome


class EagerReplica(OuterReplica):
    """As an :class:`~node.replicas.replica.OuterReplica`, and a snapshot and others' work.

    A guess is made in three calls, while the vectors are the daemon's: :meth:`aim` puts how far θ
    is to move into ``sent``, the trainer moves, :meth:`arrived` makes ``sent`` a reference. With
    ``back`` the same takes the guess back, for a checkpoint: what is saved holds work alone. What
    the others brought last is in no checkpoint: a node that resumes guesses without it, once.
    """

    # the unanswered snapshot as the trainer left it; once its round steps `base`, its Δ
    _kept: torch.Tensor | None = None
    _others: torch.Tensor | None = None  # the others' part of the last mean
    _share = 0.0  # this island's in the last mean; 0: it was not in that
    out = False  # a snapshot is kept in `_kept`
    guessed = False  # θ stands on a guess, and `sent` says where

    async def aim(self, *, back: bool = False) -> None:
        """Put what θ is to be moved by into ``sent``."""
        await self.offload(self._aim_back if back else self._aim)

    async def arrived(self, *, back: bool = False) -> None:
        """θ has been moved: ``sent`` becomes the snapshot plus that move, or the snapshot again."""

        def refer() -> None:
            assert self._kept is not None
            for here in chunks(len(self.base)):
                was = self._kept[here]
                self.sent[here].copy_(was if back else was + self.sent[here])

        await self.offload(refer)
        self.guessed = not back

    async def leave(self) -> None:
        """θ begins anew at ``base``, on no guess; ``sent`` is the snapshot again, if one is out.

        What an exchange sends of it stays the same, bit for bit.
        """
        kept = self._kept
        if self.out and kept is not None:
            await self.offload(lambda: self.sent.copy_(kept))
        self.out = self.guessed = False

    def _aim(self) -> None:
        rates = self._rates_of(self.place.round)
        share = self._share or 1 / max(1, len(self.roster))
        if self._kept is None or len(self._kept) != len(self.base):
            self._kept = torch.empty_like(self.base)
        if not self.out:
            self._kept.copy_(self.sent)
            self.out = True
        for here in chunks(len(self.base)):
            was = self._kept[here]
            delta = self.base[here] - was
            known = self._others[here] if self._others is not None else torch.zeros_like(was)
            guess = self.base[here].clone()
            vectors = {name: self.vectors[name][here].clone() for name in self.rule.vectors}
            self.rule.step(vectors, eager.expected(delta, share, known), guess, rates)
            self.sent[here].copy_(guess - was)

    def _aim_back(self) -> None:
        assert self._kept is not None
        for here in chunks(len(self.base)):
            torch.sub(self._kept[here], self.sent[here], out=self.sent[here])

    # --- what a round does -----------------------------------------------------------------------

    def _learnt(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        if self._kept is None or not self.out:
            return super()._learnt(start, stop, out)
        return pseudo_gradient(self.base[start:stop], self._kept[start:stop], out)

    async def _hold(self) -> int | None:
        snapshot = await super()._hold()
        if snapshot is None:  # the trainer was started again, from base
            self.out = self.guessed = False
        return snapshot

    def _set_back(self, merged: list[tuple[int, int]]) -> None:
        if self._kept is not None:  # before `base` moves
            torch.sub(self.base, self._kept if self.out else self.sent, out=self._kept)
        if self.guessed and self._kept is not None:
            for start, stop in gaps(merged, len(self.base)):
                self.sent[start:stop] += self._kept[start:stop]
        else:
            super()._set_back(merged)
        self.out = self.guessed = False

    def _leave_theta(self, onto: torch.Tensor) -> None:
        """But for the guess that it stood on, which was no work of this island's."""
        self.sent.sub_(self.base).add_(onto)

    def _merge(self, here: slice, mean: torch.Tensor, rates: optimizers.Rates) -> None:
        if self._others is None:
            self._others = torch.zeros_like(self.base)
        self._others[here] = mean
        super()._merge(here, mean, rates)

    def _finish(self, mine: list[tuple[int, int]], outcome: Outcome) -> None:
        """After the outer step: take this island's own work out of the mean."""
        self._share = share = self._share_of(outcome) if mine else 0.0
        if self._others is not None:
            would_be = share or 1 / max(1, len(self.roster))
            for start, stop in gaps(mine, len(self.base)):
                self._others[start:stop] = eager.others(self._others[start:stop], None, would_be)
            for start, stop in mine:
                own = self._kept[start:stop] if self._kept is not None else None
                self._others[start:stop] = eager.others(self._others[start:stop], own, share)

    def _share_of(self, outcome: Outcome) -> float:
        """The factor of this island's Δ in the mean; what its scale takes goes to nobody else."""
        merged = {included.contributor for part in outcome.parts for included in part.included}
        counted = [outcome.contributors[index] for index in merged]
        whole = sum(one.weight for one in counted)
        own = sum(one.weight * one.scale for one in counted if one.peer == self.me)
        return own / whole if whole else 0.0
