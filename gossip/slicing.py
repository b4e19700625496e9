"""This island's own contribution, cut into slices: encoded on demand, withheld if it diverged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from gossip.bodies import Wiring
from gossip.validity import Shape

PIECE = 2**22  # elements looked at in one go


class Source(Protocol):
    """Where this member's own contribution comes from."""

    def delta(self, start: int, stop: int) -> torch.Tensor:
        """The pseudo-gradient of elements ``[start, stop)``, fp32 [stop − start]."""
        ...


@dataclass
class OwnSlices:
    """The slices of one round. ``refused`` is told once why there are none."""

    wiring: Wiring
    shape: Shape
    source: Source
    refused: Callable[[str], None]
    _judging: asyncio.Lock = field(default_factory=asyncio.Lock)
    _sound: bool | None = None

    async def encoded(self, start: int, stop: int) -> torch.Tensor | None:
        """My slice of a part (uint8); None where I have nothing that could be merged."""
        if not await self._is_sound():
            return None
        found: torch.Tensor | None = await self.wiring.offload(lambda: self._encode(start, stop))
        if found is None and self._sound:
            self._sound = False  # what was sent already is sound; nothing more is sent
            self.refused(f"own pseudo-gradient is beyond what {self.shape.codec} can carry")
        return found

    async def _is_sound(self) -> bool:
        """Whether all of my pseudo-gradient is finite: a part of a diverged one helps nobody."""
        async with self._judging:
            if self._sound is None:
                self._sound = bool(await self.wiring.offload(self._all_finite))
                if not self._sound:
                    self.refused("own pseudo-gradient is not finite")
        return self._sound

    def _all_finite(self) -> bool:
        for at in range(0, self.shape.size, PIECE):
            values = self.source.delta(at, min(at + PIECE, self.shape.size))
            # a small sum of squares proves it in one pass
            if not torch.dot(values, values).isfinite() and not values.isfinite().all():
                return False
        return True

    def _encode(self, start: int, stop: int) -> torch.Tensor | None:
        codec = self.wiring.codec
        out = torch.empty(codec.encoded_size(start, stop), dtype=torch.uint8)
        try:
            codec.encode(start, self.source.delta(start, stop), out)
        except ValueError:
            return None
        return out
