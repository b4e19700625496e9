"""The outer state where islands do not wait for a merge: they go on from what it will about be.

Mode ``eager`` (:mod:`diloco.eager`). When the trainer has left a snapshot, it is moved to a guess
of the new base, made of its own Δ and of what the others brought the last time; when the round
has committed, it is moved on by the difference to the true one. The state that all have in common
knows nothing of guesses, so certificates, digests, downloads and checkpoints are as in any mode.

For the trainer both moves are sums on θ. While a snapshot is out, ``sent`` is where θ was guessed
to be at that moment, and Δ is kept apart; so ``θ ← base + (θ − sent)`` corrects the guess.
"""

from __future__ import annotations

import torch

from diloco import eager, optimizers
from node.replica import OuterReplica, chunks, gaps
from protocols.messages import Outcome


class EagerReplica(OuterReplica):
    """As :class:`~node.replica.OuterReplica`, with two vectors more: Δ as sent, and others' work.

    A guess is made in three calls, while the vectors are the daemon's: :meth:`aim` puts how far θ
    is to move into ``sent``, the trainer does so, :meth:`arrived` makes a reference of it. With
    ``back`` the same takes the guess back, for a checkpoint: what is saved holds work alone. What
    the others brought last is in none: a node that resumes guesses its own share alone, once.
    """

    _delta: torch.Tensor | None = None  # Δ of the snapshot that is out
    _others: torch.Tensor | None = None  # of the last mean
    _share = 0.0  # this island's, of the last mean that it was in
    out = False  # Δ is kept in `_delta`
    guessed = False  # θ stands on a guess, and `sent` says where

    async def aim(self, *, back: bool = False) -> None:
        """Put what θ is to be moved by into ``sent``."""
        await self.offload(self._aim_back if back else self._aim)

    async def arrived(self, *, back: bool = False) -> None:
        """θ has been moved: ``sent`` is where it was at the snapshot, and the guess since."""

        def refer() -> None:
            assert self._delta is not None
            for here in chunks(len(self.base)):
                was = self.base[here] - self._delta[here]
                self.sent[here].copy_(was if back else was + self.sent[here])

        await self.offload(refer)
        self.guessed = not back

    def _aim(self) -> None:
        rates = self._rates_of(self.place.round)
        share = self._share or 1 / max(1, len(self.roster))
        if self._delta is None or len(self._delta) != len(self.base):
            self._delta = torch.empty_like(self.base)
        for here in chunks(len(self.base)):
            was = self.sent[here]
            if not self.out:
                torch.sub(self.base[here], was, out=self._delta[here])
            delta = self._delta[here]
            known = self._others[here] if self._others is not None else torch.zeros_like(was)
            guess = self.base[here].clone()
            vectors = {name: self.vectors[name][here].clone() for name in self.rule.vectors}
            self.rule.step(vectors, eager.expected(delta, share, known), guess, rates)
            was.copy_(guess - (self.base[here] - delta))
        self.out = True

    def _aim_back(self) -> None:
        assert self._delta is not None
        for here in chunks(len(self.base)):
            self.sent[here].copy_(self.base[here] - self._delta[here] - self.sent[here])

    # --- what a round does -----------------------------------------------------------------------

    def _learnt(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        if self._delta is None or not self.out:
            return super()._learnt(start, stop, out)
        return out.copy_(self._delta[start:stop])

    async def _hold(self) -> int | None:
        snapshot = await super()._hold()
        if snapshot is None:  # the trainer was started again, from base
            self.out = self.guessed = False
        return snapshot

    def _set_back(self, merged: list[tuple[int, int]]) -> None:
        if self.guessed and self._delta is not None:
            for start, stop in gaps(merged, len(self.base)):
                self.sent[start:stop] += self._delta[start:stop]
        else:
            super()._set_back(merged)
        self.out = self.guessed = False

    def _merge(self, here: slice, mean: torch.Tensor, rates: optimizers.Rates) -> None:
        if self._others is None:
            self._others = torch.zeros_like(self.base)
        self._others[here] = mean
        super()._merge(here, mean, rates)

    def _finish(self, mine: list[tuple[int, int]], outcome: Outcome) -> None:
        """After the outer step: leave the others' work of the mean."""
        self._share = share = self._share_of(outcome) if mine else 0.0
        if self._others is not None:
            would_be = share or 1 / max(1, len(self.roster))
            for start, stop in gaps(mine, len(self.base)):
                self._others[start:stop] = eager.others(self._others[start:stop], None, would_be)
            for start, stop in mine:
                own = self._delta[start:stop] if self._delta is not None else None
                self._others[start:stop] = eager.others(self._others[start:stop], own, share)

    def _share_of(self, outcome: Outcome) -> float:
        """The factor of this island's Δ in the mean: what a scale takes nobody else is given."""
        merged = {included.contributor for part in outcome.parts for included in part.included}
        counted = [outcome.contributors[index] for index in merged]
        whole = sum(one.weight for one in counted)
        own = sum(one.weight * one.scale for one in counted if one.peer == self.me)
        return own / whole if whole else 0.0
