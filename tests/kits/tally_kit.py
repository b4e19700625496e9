"""What becomes of every inner step, where each changes an element of its own by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from toy_replica import RUN

from gossip.plans.certificate import genesis, outcome_hash
from protocols.identity import PeerId
from protocols.messages import Outcome


class Island(Protocol):
    """The outer parameters of one, and its own."""

    me: PeerId
    base: torch.Tensor
    theta: torch.Tensor


@dataclass
class Tally:
    """What has become of each inner step, which is an element that it has changed by one."""

    learnt: list[list[PeerId]]  # by fragment, whose step each element is, in order
    order: list[list[int]]  # the elements in that order
    merged: dict[bytes, tuple[bytes, dict[int, float]]] = field(default_factory=dict)
    disturbed: set[PeerId] = field(default_factory=set)  # may have lost what they had learnt
    liars: set[PeerId] = field(default_factory=set)  # whose own contribution is what they like
    forked: bool = False  # what others had learnt went into someone's next contribution

    @classmethod
    def of(cls, fragments: int, size: int, seed: int) -> Tally:
        """None yet; fragments have ``size`` elements each."""
        random = torch.Generator().manual_seed(seed)
        order = [torch.randperm(size, generator=random).tolist() for _ in range(fragments)]
        return cls([[] for _ in range(fragments)], order)

    def learn(self, fragment: int, who: PeerId) -> int:
        """The element that one more step changes."""
        learnt = self.learnt[fragment]
        learnt.append(who)
        return self.order[fragment][len(learnt) - 1]

    def note(self, outcome: Outcome, means: dict[tuple[int, int], torch.Tensor]) -> None:
        """A round is committed, and this is what owners have made of its contributions."""
        head = outcome_hash(outcome)
        if head in self.merged or self.forked:
            return
        whose = dict(zip(self.order[outcome.fragment], self.learnt[outcome.fragment], strict=False))
        found: dict[int, float] = {}
        for part in outcome.parts:
            mean = means.get((part.start, part.stop))
            if mean is None:
                continue
            for at in torch.nonzero(mean.abs() > 1e-4).flatten().tolist():
                there = [
                    outcome.contributors[i.contributor] for i in part.included if i.elements > at
                ]
                whole = sum(contributor.weight for contributor in there)
                own = [c.weight * c.scale for c in there if c.peer == whose.get(part.start + at)]
                if not own and self.liars.intersection(c.peer for c in there):
                    continue  # what it says of how much has come moves its own chunks elsewhere
                assert own, "a step of somebody who is not in it"
                found[part.start + at] = mean[at].item() * whole / own[0]
        self.merged[head] = outcome.previous, found

    def counts(self, fragment: int, head: bytes, islands: Sequence[Island]) -> dict[int, float]:
        """How often each step counts on the way to ``head``, or is yet to be sent.

        ``islands`` stand there.
        """
        there = dict.fromkeys(self.order[fragment][: len(self.learnt[fragment])], 0.0)
        while head != genesis(RUN):
            head, found = self.merged[head]
            for element, much in found.items():
                there[element] += much
        for island in islands:
            own = (island.base - island.theta).tolist()
            for element, who in zip(there, self.learnt[fragment], strict=True):
                if who == island.me:
                    there[element] += own[element]
        return there

    def check(self, fragment: int, head: bytes, islands: Sequence[Island]) -> None:
        """Raise unless each step counts once; with the death of an island its own may be lost."""
        there = self.counts(fragment, head, islands)
        living = {island.me for island in islands}
        for element, who in zip(there, self.learnt[fragment], strict=True):
            much, least = there[element], float(who in living and who not in self.disturbed)
            assert least - 0.01 < much < 1.01, f"{much} of a step of {who}"
