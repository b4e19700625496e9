"""What this node keeps of the last rounds, for those who missed them.

A certificate and the encoded bytes of its parts are all that a member needs to repeat a round:
half a byte a parameter with int4.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from protocols.messages import Certificate

Parts = Mapping[tuple[int, int], torch.Tensor]  # range -> uint8, encoded


@dataclass
class Ledger:
    """The newest ``keep`` rounds of one fragment, oldest first."""

    keep: int
    _rounds: OrderedDict[int, tuple[Certificate, Parts]] = field(default_factory=OrderedDict)

    def add(self, certificate: Certificate, parts: Parts) -> None:
        """Keep a committed round; the oldest makes room."""
        self._rounds[certificate.outcome.round] = (certificate, parts)
        while len(self._rounds) > self.keep:
            self._rounds.popitem(last=False)

    def clear(self) -> None:
        """Forget all: this node has moved to another chain."""
        self._rounds.clear()

    def certificate(self, round_: int) -> Certificate | None:
        """The certificate of a round, if it is kept."""
        found = self._rounds.get(round_)
        return found[0] if found else None

    def newest(self) -> Certificate | None:
        """The certificate of the last round."""
        return next(reversed(self._rounds.values()))[0] if self._rounds else None

    def since(self, round_: int, count: int) -> tuple[Certificate, ...]:
        """Up to ``count`` certificates in order from ``round_`` on; empty if that one is gone."""
        found: list[Certificate] = []
        while len(found) < count and (kept := self._rounds.get(round_ + len(found))):
            found.append(kept[0])
        return tuple(found)

    def part(self, round_: int, start: int, stop: int, digest: bytes) -> torch.Tensor | None:
        """The encoded bytes of a certified part, if they are kept and have this digest."""
        found = self._rounds.get(round_)
        if found is None:
            return None
        certificate, parts = found
        for result in certificate.outcome.parts:
            if (result.start, result.stop, result.digest) == (start, stop, digest):
                return parts.get((start, stop))
        return None
