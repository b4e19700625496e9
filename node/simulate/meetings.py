"""What is counted of a simulated run in pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossip.pairs.rounded import Rounded


@dataclass
class Meetings:
    """Exchanges of all islands, of models of so many elements."""

    elements: int
    ended: Counter[str] = field(default_factory=Counter)  # exchanges, by how they ended
    letters: Counter[str] = field(default_factory=Counter)  # of exchanges, by their codec
    # mean squares of every round: disagreement, and what inner steps moved
    apart: list[tuple[float, float]] = field(default_factory=list)

    def count(self, rounded: Rounded) -> None:
        """An island has come through a round."""
        self.ended.update(one.met.outcome for one in rounded.exchanged)
        self.letters.update(one.codec for one in rounded.exchanged if one.codec)
        if rounded.progress and rounded.spread.to_mean:
            self.apart.append((rounded.spread.square / self.elements, rounded.progress))

    def notes(self, views: Sequence[Tensor]) -> dict[str, float]:
        """What the run came to, with the parameters of all islands, float32 [n] each."""
        found = {"disagreement": _spread(views)}
        found |= {f"exchanges_{outcome}": float(n) for outcome, n in self.ended.items()}
        found |= {f"letters_{codec}": float(n) for codec, n in self.letters.items()}
        late = self.apart[len(self.apart) // 2 :]
        if late:  # in the run's second half; a ratio of means, as learning rates may end at 0
            disagreement, progress = map(sum, zip(*late, strict=True))
            found["disagreement_by_progress"] = disagreement / progress
        return found


def _spread(vectors: Sequence[Tensor]) -> float:
    """RMS distance of islands from their mean, against the mean's RMS."""
    stack = torch.stack(list(vectors))
    mean = stack.mean(0)
    return ((stack - mean).square().mean().sqrt() / mean.square().mean().sqrt()).item()
