"""Late work of this island, turned towards where the swarm went meanwhile (``rounds.align``).

What an island brings may have been learnt while the others went on for some rounds. It is rebased
on their result: :mod:`node.replicas.replica` says what of it was not merged, and θ is moved in the
trainer (:mod:`node.trainer.progress`). With this it is also turned, block by block, towards the
outer momentum (:func:`diloco.asynchronous.turning`). Only what is sent is turned, and here alone:
to everybody else it is a contribution like any other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from diloco.asynchronous import turning
from protocols.codecs import CHUNK

ROUNDED = 1e-6  # of a round: shares of all K, added up, may be short of one

Brought = Callable[[int, int, torch.Tensor], torch.Tensor]  # Δ of elements [start, stop), into out


class Turning:
    """How the present contribution of one fragment is turned; blocks are chunks of codecs.

    No checkpoint has it: late work that a node resumes with is sent as it is, once.
    """

    def __init__(self, momentum: torch.Tensor) -> None:
        """``momentum``: the outer optimizer's, fp32 [n], as it changes from round to round."""
        self._momentum = momentum
        self.gone = 0.0  # rounds that the others took while this island had work in hand
        self.at_work = False  # it has work in hand or takes steps; false at rest
        self._turns: list[tuple[float, float]] = []

    def note(self, share: float, *, mine: bool) -> None:
        """Rounds are over: whole ones, or of one the share of the islands that arrived in it."""
        if mine:
            self.reset()
        elif self.at_work:
            self.gone += share

    def train(self) -> None:
        """The island takes inner steps from the present base on, or goes on with them."""
        self.at_work = True

    def reset(self) -> None:
        """What the island had is merged, or given up: what it brings next begins with the base."""
        self.gone, self.at_work = 0.0, False

    def look(self, brought: Brought) -> None:
        """Decide how the snapshot that is there now is turned."""
        self._turns = []
        late, size = int(self.gone + ROUNDED), len(self._momentum)
        if not late:
            return  # less than a whole round late
        scratch = torch.empty(min(CHUNK, size))
        for start in range(0, size, CHUNK):
            stop = min(start + CHUNK, size)
            own = brought(start, stop, scratch[: stop - start])
            self._turns.append(turning(own, self._momentum[start:stop], late))

    def turn(self, start: int, stop: int, values: torch.Tensor) -> torch.Tensor:
        """Turn Δ of elements [start, stop) as decided, in place."""
        if not self._turns:
            return values
        for block in range(start // CHUNK, -(-stop // CHUNK)):
            first, last = max(start, block * CHUNK), min(stop, (block + 1) * CHUNK)
            keep, add = self._turns[block]
            here = values[first - start : last - start]
            here.mul_(keep).add_(self._momentum[first:last], alpha=add)
        return values
