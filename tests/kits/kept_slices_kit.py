"""An owner of a part that keeps slices, driven by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from gossip_kit import RUN, leader, plan_of

from gossip.exchange.bodies import as_bytes
from gossip.exchange.buffers import Whole
from gossip.exchange.kept_slices import KeptMerge, WeighedMerge
from gossip.exchange.merging import Contributions, PartMerge
from gossip.exchange.slicing import SealedFeed, SliceFeed
from gossip.plans.commitments import leaf, seal
from protocols.codecs import CHUNK, RangeCodec
from protocols.identity import Identity, PeerId
from protocols.messages import TransferHeader

MEMBERS = [Identity.from_seed(bytes([number]) * 32) for number in range(4)]
PEERS = [c.peer for c in plan_of(leader(MEMBERS), MEMBERS).contributors]
ME, *OTHERS = PEERS
BY_PEER = {identity.peer_id: identity for identity in MEMBERS}
START, STOP = 1024, 1024 + 5 * CHUNK // 2


class Values:
    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def delta(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(self.values[start - START : stop - START])


@dataclass
class Owner:
    """A merge of mine and three others' slices, driven by hand."""

    kind: type[PartMerge]
    codec_name: str = "fp32"
    more: dict[str, Any] = field(default_factory=dict)
    posted: list[Callable[[], None]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    merge: Any = field(init=False)
    values: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.codec = RangeCodec(self.codec_name, dense=STOP - 777)
        generator = torch.Generator().manual_seed(7)
        self.values = torch.randn(4, STOP - START, generator=generator)
        if issubclass(self.kind, KeptMerge):
            self.more.setdefault("order", PEERS)
        if self.kind is WeighedMerge:
            self.more.setdefault("weighed", lambda: self.told.append("weighed"))
            self.more.setdefault("header", self.header)
        more = dict(self.more)
        terms = {name: more.pop(name) for name in ("scales", "limits") if name in more}
        self.merge = self.kind(
            self.codec,
            START,
            STOP,
            Contributions(ME, dict.fromkeys(PEERS, 0.25), expected=PEERS, **terms),
            whole=Whole(STOP),
            post=self.posted.append,
            begun=lambda: self.told.append("begun"),
            finished=lambda: self.told.append("finished"),
            **more,
        )

    def bring(self, peer: PeerId, chunks: int = 99) -> None:
        first = self.merge.reached(peer)
        source = Values(self.values[PEERS.index(peer)])
        at = (self.codec, source, START, STOP, first)
        sealed = isinstance(self.merge, WeighedMerge)
        feed = (
            SealedFeed(*at, partial(seal, BY_PEER[peer], self.header)) if sealed else SliceFeed(*at)
        )
        drain = self.merge.drain(peer, first)
        assert drain.length == feed.length
        number = min(chunks, len(self.merge.chunks) - first)
        for _ in range(number + (sealed and first + number == len(self.merge.chunks))):
            data = bytes(feed.next())
            drain.room()[: len(data)] = data
            drain.took(len(data))

    def bring_unfit(self, peer: PeerId, loud: float) -> None:
        """A slice, rightly sealed, whose last chunk is ``loud`` times as large; 0: no numbers."""
        values = self.values[PEERS.index(peer)]
        body = []
        for chunk in (chunks := self.codec.chunks(START, STOP)):
            here = values[chunk.start - START : chunk.stop - START]
            data = torch.empty(chunk.size, dtype=torch.uint8)
            self.codec.encode_chunk(chunk, here * loud if chunk is chunks[-1] else here, data)
            body.append(data)
        if not loud:
            body[-1].fill_(255)
        stamp = seal(BY_PEER[peer], self.header, [leaf(as_bytes(data)) for data in body])
        drain = self.merge.drain(peer, 0)
        for data in (*map(bytes, map(as_bytes, body)), stamp):
            drain.room()[: len(data)] = data
            drain.took(len(data))

    @property
    def header(self) -> TransferHeader:
        return TransferHeader(RUN, 0, 3, START, STOP, self.codec_name, b"b" * 32, 0)

    def bring_all(self, peers: Sequence[PeerId] = tuple(OTHERS)) -> None:
        self.merge.settle(Values(self.values[0]))
        for peer in peers:
            self.bring(peer)
        self.run()

    def run(self) -> None:
        while self.posted:
            self.posted.pop(0)()

    def result(self) -> torch.Tensor:
        assert self.merge.done
        found = torch.empty(STOP - START)
        self.codec.decode(START, self.merge.result, found)
        return found
