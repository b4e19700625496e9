"""What coarse codecs have lost of this island's contributions, until it is sent (error feedback).

:mod:`diloco.feedback` has the rules. Here is the vector, and what a committed round does to it:
exactly what its certificate includes is settled, everything else stays as it was.

While a round is on, the residual does not change, since every slice of it may be encoded again.
What the owner of a part loses by encoding the merged result is therefore noted beside it, for the
parts that this island merges, and added when the round commits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from diloco import feedback
from protocols.codecs import CHUNK, Chunk, RangeCodec
from protocols.identity import PeerId
from protocols.messages import Outcome, PartResult

Delta = Callable[[int, int, torch.Tensor], torch.Tensor]  # (start, stop, out): Δ into out


class Residual:
    """e of one island, float32 [N] in ``values``; zeros for an island that starts or joins."""

    def __init__(self, size: int, decay: float) -> None:
        self.values = torch.zeros(size)
        self.decay = decay
        self._owned: dict[int, torch.Tensor] = {}  # by first element; empty: merged twice

    def add_to(self, delta: torch.Tensor, start: int) -> torch.Tensor:
        """What is to be sent of elements from ``start`` on: Δ + decay · e, in place."""
        return feedback.compensate(delta, self.values[start : start + len(delta)], self.decay)

    def note_lost(
        self, codec: RangeCodec, chunk: Chunk, mean: torch.Tensor, data: torch.Tensor, share: float
    ) -> None:
        """This island has merged ``mean`` and encoded it as ``data``; its own share is in it.

        Called where data is handled. A chunk that is merged again in the same round (for another
        plan) leaves nothing behind, as it cannot be told which of the two will be certified.
        """
        if chunk.start in self._owned:
            self._owned[chunk.start] = torch.empty(0)
            return
        decoded = torch.empty_like(mean)
        codec.decode_chunk(chunk, data, decoded)
        self._owned[chunk.start] = feedback.lost_by_owner(mean, decoded, min(share, 1.0))

    def settle(self, outcome: Outcome, me: PeerId, codec: RangeCodec, delta: Delta) -> None:
        """The round is committed; ``delta`` still gives Δ as it was sent."""
        at = next((i for i, c in enumerate(outcome.contributors) if c.peer == me), None)
        lost: list[torch.Tensor] = []
        for part in outcome.parts:
            for included in part.included:
                if included.contributor == at and included.elements:
                    end = part.start + included.elements
                    if part.owner == me:
                        lost += self._settle_own(part, end, codec)
                    else:
                        self._settle_part(part, end, codec, delta)
        feedback.limit_lost(lost, [c.norm for c in outcome.contributors if c.weight > 0])
        self.forget_round()

    def settle_unseen(self, merged: Sequence[tuple[int, int]]) -> None:
        """The round is committed with work that is here no more; these elements were in it.

        Their residual went into that work, and what its coding lost is not known: they become 0.
        """
        for start, stop in merged:
            self.values[start:stop] = 0.0
        self.forget_round()

    def forget_round(self) -> None:
        """Nothing of what this island merges now will be certified."""
        self._owned.clear()

    def reset(self) -> None:
        """This island starts over: what it lost belongs to a course that has been left."""
        self.values.zero_()
        self.forget_round()

    def _settle_own(self, part: PartResult, end: int, codec: RangeCodec) -> list[torch.Tensor]:
        """Of a part that I have merged; returns the pieces of e that make up for what that lost."""
        pieces = []
        for chunk in codec.chunks(part.start, part.stop):
            if chunk.stop > end:  # only whole chunks are merged
                break
            here = self.values[chunk.start : chunk.stop]
            here.zero_()  # an owner adds its own values without coding them
            lost = self._owned.get(chunk.start)
            if lost is not None and len(lost) == len(here):
                pieces.append(here.copy_(lost))
        return pieces

    def _settle_part(self, part: PartResult, end: int, codec: RangeCodec, delta: Delta) -> None:
        scratch, out = torch.empty(CHUNK), torch.empty(CHUNK)
        for chunk in codec.chunks(part.start, part.stop):
            if chunk.stop > end:
                return
            here = self.values[chunk.start : chunk.stop]

            def coded(values: torch.Tensor, chunk: Chunk = chunk) -> torch.Tensor:
                data = torch.empty(chunk.size, dtype=torch.uint8)
                codec.encode_chunk(chunk, values, data)
                codec.decode_chunk(chunk, data, out[: len(values)])
                return out[: len(values)]

            values = delta(chunk.start, chunk.stop, scratch[: len(here)])
            feedback.keep_lost(values, here, self.decay, coded)
