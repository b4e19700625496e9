"""How far islands are apart, from the sketches that they publish (sketch.py). Sans-IO.

Nothing travels here: how news do is :mod:`gossip.membership.rumours`, and plans
:mod:`gossip.rounds.spreading`.

An island publishes one sketch of its whole model: the sum of those of its fragments, each of the
last snapshot before its merge. The signs are the same in the whole run, so any two sketches can be
compared; whether they should be is another question. In rounds that all take together, only those
made of the same rounds of all fragments are compared (:func:`turn_of`): an island that missed a
round of one fragment would seem far away in it, and is not. Where islands contribute at will, or
meet in pairs, there are no common rounds, and the newest sketch of each is compared.

Nobody can check a sketch, so what is said of all goes by what most of them say. One that lies far
from most others is left out of it (:data:`OUTLIER`), and shown as it is, so that it is found.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import inf
from statistics import fmean

import torch
from blake3 import blake3

from gossip.membership import sketch
from protocols.bounds import MAX_PEERS
from protocols.identity import PeerId
from protocols.messages import Announce

REMEMBERED = 4  # sketches of one island: it may be some fragments ahead of the merge looked at
OUTLIER = 10.0  # times as far from most others as is usual: from three on an alarm tells of it
CLOSE = 0.1  # times the usual norm: nobody that near is an outlier, even if others are equal
FARTHEST = 1e3  # of relative distances: a made-up sketch may be anywhere
TRUSTED = 1.25  # times what most say: by so much healthy islands may be further apart
# rounds that a sketch may be old where islands meet in pairs, as its island counts them: where the
# count leaps, the sketch's round leaps along
FRESH = 2


def turn_of(rounds: Sequence[int]) -> int:
    """A number for what a sketch is made of, by the round of each fragment's snapshot.

    With one fragment that is its round; else a hash, which is equal where all rounds are.
    """
    if len(rounds) == 1:
        return rounds[0]
    text = ",".join(map(str, rounds)).encode()
    return int.from_bytes(blake3(b"atoll turn\x00" + text).digest(6), "big")


class WholeSketch:
    """The sketch of an island's whole model, from those of the fragments' last snapshots."""

    def __init__(self, fragments: int, *, paired: bool = False) -> None:
        """``paired``: there are no turns in common, and its round says how old the sketch is."""
        self._paired = paired
        self._rounds = [-1] * fragments
        self._parts, self._newest = 0, [0] * fragments  # made so far, and up to each newest
        self._pieces = [torch.zeros(sketch.SIZE) for _ in range(fragments)]

    def add(self, fragment: int, round_: int, data: bytes) -> tuple[int, bytes] | None:
        """A fragment's new sketch: the whole model's, and its turn.

        None until there was a snapshot of every fragment, or where one is not finite.
        """
        piece = sketch.read(data)
        if piece is None:
            return None
        if round_ != self._rounds[fragment]:
            self._parts += 1
            self._newest[fragment] = self._parts
        self._rounds[fragment], self._pieces[fragment] = round_, piece
        if min(self._rounds) < 0:
            return None
        total = torch.stack(self._pieces).double().sum(0)
        turn = round_ - self._age if self._paired else turn_of(self._rounds)
        return turn, sketch.written(total)

    @property
    def _age(self) -> int:
        """Rounds since the oldest part, by how many were begun: the numbers may leap."""
        return (self._parts - min(self._newest)) // len(self._newest)


@dataclass(frozen=True)
class Spread:
    """Distances (L2) of islands before a merge, over the norm of their mean."""

    to_mean: Mapping[PeerId, float] = field(default_factory=dict)
    apart: Mapping[PeerId, float] = field(default_factory=dict)  # to the nearest other
    norm: float = 0.0  # L2, of the mean
    outliers: Set[PeerId] = frozenset()  # not in the mean, nor in what is said of all
    usual: float = inf  # L2 distance of one island to another, as most pairs have it

    @classmethod
    def of(cls, sketches: Mapping[PeerId, torch.Tensor]) -> Spread:
        """From fp32 [SIZE] of each island; empty for fewer than two.

        How far an island is from most others is the median of its distances, the lower one of
        two. So what fewer than half publish changes little of what is said of the others.
        """
        if (count := len(sketches)) < 2:
            return cls()
        rows = torch.stack(list(sketches.values())).double()
        pairs = sketch.distances(rows).fill_diagonal_(inf)
        typical = pairs.kthvalue(count // 2, dim=1).values
        usual = typical.median()
        near = typical <= torch.maximum(OUTLIER * usual, CLOSE * rows.norm(dim=1).median())
        mean = rows[near].mean(0)
        norm = max(mean.norm().item(), 1e-30)
        nearest = pairs.min(dim=1).values

        def relative(distances: torch.Tensor) -> dict[PeerId, float]:
            return dict(zip(sketches, (distances / norm).clamp_max(FARTHEST).tolist(), strict=True))

        return cls(
            relative((rows - mean).norm(dim=1)),
            relative(nearest),
            norm,
            frozenset(peer for peer, here in zip(sketches, near.tolist(), strict=True) if not here),
            usual.item(),
        )

    @property
    def compared(self) -> dict[PeerId, float]:
        """Distances to the mean of those that are no outliers."""
        return {peer: d for peer, d in self.to_mean.items() if peer not in self.outliers}

    @property
    def before(self) -> float | None:
        """Mean distance to the mean; None while fewer than two islands published a sketch."""
        return fmean(self.compared.values()) if self.to_mean else None

    @property
    def square(self) -> float:
        """Mean squared distance to the mean, in the units of parameters.

        At most a little more than follows from the distance of most pairs, so that few islands
        cannot have all others exchange more.
        """
        if not (distances := self.compared.values()):
            return 0.0
        by_pairs = self.usual**2 / 2 * (1 - 1 / len(distances))
        return min(fmean((d * self.norm) ** 2 for d in distances), TRUSTED * by_pairs)

    def after(
        self, merged: Sequence[Set[PeerId]], shares: Sequence[float] = (1.0,), alpha: float = 0.0
    ) -> float | None:
        """What the last merge of each fragment left of :attr:`before`.

        ``merged``: whose work was in it, and ``shares``: how much of the model it is, by fragment.
        A merged island keeps ``alpha`` of what set it apart, the others all of it. A distance is
        taken to lie evenly over the elements of the model. Work done while a merge was under way
        is not seen.
        """
        if not self.to_mean:
            return None
        return fmean(
            distance
            * sum(
                share * (alpha**2 if peer in there else 1.0)
                for there, share in zip(merged, shares, strict=True)
            )
            ** 0.5
            for peer, distance in self.compared.items()
        )


def in_pairs(
    said: Iterable[Announce],
    me: PeerId,
    mixed: Sequence[Iterable[PeerId]],
    shares: Sequence[float] = (1.0,),
) -> tuple[Spread, float | None]:
    """By what islands published of θ before their exchanges; and what is left of it afterwards.

    ``mixed``: whom this island has met, and ``shares``: how much of the model that was about, by
    fragment. What is left is the mean relative distance to the mean, with distances taken to lie
    evenly over the model. Islands many rounds ahead of others, or behind, are compared all the
    same, since they meet.
    """
    found = {
        a.peer: values
        for a in said
        if a.round - a.sketch_round <= FRESH and (values := sketch.read(a.sketch)) is not None
    }
    if len(found) < 2 or me not in found:
        return Spread(), None
    spread = Spread.of(found)
    found = {peer: values for peer, values in found.items() if peer not in spread.outliers}
    if me not in found:
        return spread, None
    square = torch.zeros(len(found), dtype=torch.float64)
    for met, share in zip(mixed, shares, strict=True):
        here, after = found[me], dict(found)
        for peer in met:  # sketches are linear: that of a mean is the mean of them
            if peer in found:
                here = (here + found[peer]) / 2
                after[peer] = after[me] = here
        distances = sketch.distances_to_mean(torch.stack(list(after.values())))
        square += share * distances.double().square()
    return spread, min(square.sqrt().mean().item() / spread.norm, FARTHEST)


class Published:
    """The last sketches of every island, as they were announced."""

    def __init__(self) -> None:
        self._of: dict[PeerId, deque[tuple[int, torch.Tensor]]] = {}

    def learn(self, announce: Announce) -> None:
        """Take in an announcement; what is no sketch, or known, is passed over."""
        if not announce.sketch or announce.role != "island":
            return
        kept = self._of.get(announce.peer)
        if kept and kept[-1][0] == announce.sketch_round:
            return
        values = sketch.read(announce.sketch)
        if values is None:
            return
        if kept is None:
            if len(self._of) >= MAX_PEERS:
                self._of.pop(next(iter(self._of)))
            kept = self._of[announce.peer] = deque(maxlen=REMEMBERED)
        kept.append((announce.sketch_round, values))

    def of_turn(self, turn: int | None, peers: Container[PeerId]) -> Spread:
        """Of all of ``peers`` whose sketch of that turn is known."""
        return Spread.of(
            {
                peer: values
                for peer, kept in self._of.items()
                if peer in peers
                for its, values in kept
                if its == turn
            }
        )

    def newest(self, peers: Container[PeerId]) -> Spread:
        """Of the newest sketch of each of ``peers``, whatever it is made of."""
        return Spread.of({p: kept[-1][1] for p, kept in self._of.items() if p in peers})

    def usual_turn(self, peers: Iterable[PeerId]) -> int | None:
        """The turn that most of ``peers`` have published; None: nobody has any."""
        turns = Counter(turn for p in peers for turn, _ in self._of.get(p, ()))
        return max(turns, key=lambda turn: (turns[turn], turn)) if turns else None
