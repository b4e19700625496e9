"""A merge whose contributors and members are driven by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from blake3 import blake3
from codec_kit import ERRORS
from gossip_kit import leader, plan_of

from gossip.exchange.bodies import as_bytes
from gossip.exchange.buffers import Whole
from gossip.exchange.merging import Contributions, PartMerge
from gossip.exchange.slicing import SliceFeed, shares
from protocols.codecs import CHUNK, RangeCodec
from protocols.identity import Identity
from protocols.messages import Contributor

MEMBERS = [Identity.from_seed(bytes([number]) * 32) for number in range(4)]
PEERS = [c.peer for c in plan_of(leader(MEMBERS), MEMBERS).contributors]
ME = PEERS[0]
START, STOP = 1024, 1024 + 5 * CHUNK // 2  # three chunks of matrices, one of vectors
DENSE = STOP - 777


class Values:
    """A contribution in memory."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def delta(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        return self.values[start - START : stop - START]


@dataclass
class Owner:
    """A merge whose contributors and members are driven by hand."""

    codec: RangeCodec
    weights: Sequence[float] = (1.0, 2.0, 5.0)
    start: int = START
    stop: int = STOP
    posted: list[Callable[[], None]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    merge: PartMerge = field(init=False)
    values: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        size = self.stop - self.start
        self.values = [torch.randn(size, generator=generator) for _ in self.weights]
        self.merge = PartMerge(
            self.codec,
            self.start,
            self.stop,
            Contributions(
                ME, shares(contributors(*self.weights)), expected=PEERS[: len(self.weights)]
            ),
            whole=Whole(self.stop),
            post=self.posted.append,
            begun=lambda: self.told.append("begun"),
            finished=lambda: self.told.append("finished"),
        )

    def feed(self, number: int, first: int = 0) -> SliceFeed:
        return SliceFeed(self.codec, Values(self.values[number]), self.start, self.stop, first)

    def bring(
        self, number: int, chunks: int = 99, change: Callable[[bytes], bytes] = bytes
    ) -> None:
        """The next chunks of one contributor arrive."""
        first = self.merge.reached(PEERS[number])
        feed, drain = self.feed(number, first), self.merge.drain(PEERS[number], first)
        for _ in range(min(chunks, len(self.merge.chunks) - first)):
            data = change(bytes(feed.next()))
            room = drain.room()
            room[:] = data
            drain.took(len(data))

    def settle(self) -> None:
        self.merge.settle(Values(self.values[0]))
        self.turn()

    def turn(self) -> None:
        """Whatever was posted runs."""
        while self.posted:
            self.posted.pop(0)()

    def mean(self) -> torch.Tensor:
        assert self.merge.done
        assert self.told == ["begun", "finished"]
        assert blake3(as_bytes(self.merge.result)).digest() == self.merge.digest()
        out = torch.empty(self.stop - self.start)
        self.codec.decode(self.start, self.merge.result, out)
        return out

    def reference(self) -> torch.Tensor:
        """What ought to come out, in double, by what is said to be in it."""
        total = torch.zeros(self.stop - self.start, dtype=torch.float64)
        weight = torch.zeros_like(total)
        for peer, value, w in zip(PEERS, self.values, self.weights, strict=False):
            until = self.merge.elements(peer)
            total[:until] += w * value[:until].double()
            weight[:until] += w
        return torch.where(weight > 0, total / weight.clamp(min=1e-300), 0.0)


def contributors(*weights: float) -> list[Contributor]:
    return [Contributor(peer, w, 100, True) for peer, w in zip(PEERS, weights, strict=False)]


def close(found: torch.Tensor, wanted: torch.Tensor, codec: str) -> bool:
    return bool((found.double() - wanted).norm() <= ERRORS[codec] * wanted.norm())
