"""A relay's work for its group: add up its slices for the owner, pass the merged part back.

Slices are collected as an owner does (:mod:`gossip.exchange.collecting`), with another end: chunks
are not divided by the weight of who is in them, and are streamed to the part's owner with a mark of
who that is. Passing on needs no arithmetic: what has arrived of the merged part and is sound goes
to the group, byte for byte, and the trailer with the owner's signature after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from gossip.exchange.bodies import as_bytes, trailer_size
from gossip.exchange.buffers import Whole, buffers
from gossip.exchange.collected import CollectedPart
from gossip.exchange.collecting import Collecting
from gossip.exchange.feeds import MergedFeed
from gossip.exchange.group_sums import magnitude, mark_of, mark_size
from gossip.exchange.lateness import merged_patience_s
from gossip.exchange.merging import Contributions, PartMerge
from gossip.exchange.receiving import Inflow
from gossip.exchange.routing import Paths
from gossip.plans.validity import PartKey
from protocols.codecs import RangeCodec
from protocols.errors import Malformed, RemoteProtocolError, RemoteRefused, TransportError
from protocols.identity import PeerId
from protocols.messages import Plan, TransferHeader
from protocols.transport import Buffer


class _Apart(Whole):
    """Memory of its own for a sum: the merged part has its place in the vector."""

    def __init__(self) -> None:
        super().__init__(0)

    def take(self, codec: RangeCodec, start: int, stop: int) -> torch.Tensor:
        return buffers.take(codec.encoded_size(start, stop))


class GroupMerge(PartMerge):
    """The sum of the slices of ``brought``, with a mark for each chunk of whose are in it.

    Divided by the magnitude (:mod:`gossip.exchange.group_sums`) of all their shares, whoever is in.
    """

    def __init__(
        self,
        codec: RangeCodec,
        start: int,
        stop: int,
        contributions: Contributions,
        *,
        brought: tuple[PeerId, ...],
        **kwargs: Any,
    ) -> None:
        kwargs["whole"] = _Apart()
        divisor = magnitude(contributions.shares[peer] for peer in brought)
        ours = {peer: contributions.shares[peer] / divisor for peer in brought}
        contributions = dataclasses.replace(contributions, shares=ours)
        super().__init__(codec, start, stop, contributions, **kwargs)
        self.brought = brought
        self.marks: list[bytes] = []  # of the chunks that are merged

    def _merge(self, index: int) -> None:
        super()._merge(index)
        mine = self._source is not None and index < self._sound
        self.marks.append(
            mark_of(
                [
                    mine if peer == self._me else self._reached.get(peer, 0) > index
                    for peer in self.brought
                ]
            )
        )

    def _balance(self, total: torch.Tensor, count: int, weight: float) -> None:
        """Nothing: the owner, which knows of all groups, makes up for missing contributors."""

    def _note_lost(self, *args: Any) -> None:
        """Codecs that send later what they lose have no groups."""


class SumFeed:
    """A group's sum on its way to the owner while it is merged: each chunk, then its mark."""

    def __init__(self, merge: GroupMerge, first: int) -> None:
        self._merge, self._index = merge, first
        self._view = as_bytes(merge.result)
        self._marks_next = False
        left = merge.chunks[first:]
        self.length = sum(chunk.size for chunk in left) + len(left) * mark_size(len(merge.brought))
        self.given = 0  # bytes handed out

    def attach(self, wake: Callable[[], None]) -> None:
        """To be woken when a chunk is merged."""
        if not self._merge.done:
            self._merge.wakes.append(wake)

    def next(self) -> Buffer | None:
        """The next chunk or its mark; None while there is nothing."""
        if self._index >= self._merge.merged:
            return None
        found: Buffer
        if self._marks_next:
            found = self._merge.marks[self._index]
            self._index += 1
        else:
            chunk = self._merge.chunks[self._index]
            found = self._view[chunk.span]
        self._marks_next = not self._marks_next
        self.given += len(found)
        return found


class SharedInflow(Inflow):
    """A merged part on its way in that is passed on as far as it is sound."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.trailer = b""
        self.spoilt = False
        self.wakes: list[Callable[[], None]] = []

    @property
    def ready_bytes(self) -> int:
        """How many bytes are here and sound. Raises Malformed once they turn out not to be."""
        if self.spoilt:
            raise Malformed("the part turned out to be unsound")
        return self.offset(self.checked)

    def check(self) -> None:
        """As :meth:`Inflow.check`."""
        super().check()
        self.wake()

    def end(self, trailer: bytes) -> None:
        """All of it is here, and right."""
        self.trailer = trailer
        self.wake()
        self.wakes.clear()

    def spoil(self) -> None:
        """What has come of it is discarded: stop passing it on."""
        self.spoilt = True
        self.wake()
        self.wakes.clear()

    def wake(self) -> None:
        """Tell those who pass it on that there is more."""
        for wake in self.wakes:
            wake()


@dataclass
class Relaying(Collecting):
    """The parts that this member relays for its group in one round.

    What it collects goes by whose slices that is, too: of two plans with one basis the groups may
    have other members.
    """

    # by range and basis: what it collects, and the owner's part that this is for
    _ends: dict[PartKey, tuple[PartKey, PartKey]] = field(default_factory=dict)
    _passing: dict[tuple[PartKey, PeerId], tuple[SharedInflow, asyncio.Task[None]]] = field(
        default_factory=dict
    )

    def collect(
        self, key: PartKey, header: TransferHeader, plan: Plan, brought: tuple[PeerId, ...]
    ) -> None:
        """Merge the slices of ``brought`` for the owner of a part, or go on with it.

        ``header`` has what they are named by. Those of another group are added up anew.
        """
        mine = (key[0], key[1], self.me, header.basis)
        if self._ends.get(self._as_mine(key), (mine, key)) != (mine, key):
            self.drop(key)
        self._ends[self._as_mine(key)] = (mine, key)
        self.work(mine, header, plan, Paths({self.me: brought}))

    def collects(self, key: PartKey) -> bool:
        """Whether a part's slices are merged here for its owner."""
        end = self._ends.get(self._as_mine(key))
        return end is not None and end[1] == key

    def collects_range(self, header: TransferHeader) -> bool:
        """Whether slices of this range are merged here for somebody else."""
        return (header.start, header.stop, self.me, header.basis) in self._parts

    def drop(self, key: PartKey) -> None:
        """The group's slices go straight to the owner now."""
        end = self._ends.pop(self._as_mine(key), None)
        if end is not None:
            self._end(end[0])

    def forget(self, key: PartKey) -> None:
        """Nobody wants this part any more: neither collect it nor pass it on."""
        if self.collects(key):
            self.drop(key)
        for passing in [passing for passing in self._passing if passing[0] == key]:
            _, task = self._passing.pop(passing)
            task.cancel()

    def pass_on(
        self, key: PartKey, header: TransferHeader, plan: Plan, inflow: SharedInflow,
        peers: Iterable[PeerId],
    ) -> None:  # fmt: skip
        """Send the group what comes of a merged part."""
        for peer in peers:
            before = self._passing.get((key, peer))
            if peer in (self.me, key[2]) or (before is not None and before[0] is inflow):
                continue
            task = self.transfers.start(
                self._pass(peer, header, plan, inflow, again=before is not None)
            )
            self._passing[key, peer] = (inflow, task)

    async def stopped(self) -> None:
        """As :meth:`Collecting.stopped`."""
        await super().stopped()
        self._ends.clear()
        self._passing.clear()

    async def _pass(
        self, peer: PeerId, header: TransferHeader, plan: Plan, inflow: SharedInflow, *, again: bool
    ) -> None:
        trailer = trailer_size(len(plan.contributors))
        patience = merged_patience_s(plan.patience_s, plan.expected_s)
        # if it lives, it asks the owner
        with contextlib.suppress(TransportError, RemoteProtocolError):
            await self.transfers.push(
                peer,
                "merged",
                dataclasses.replace(header, done=0),
                lambda first: MergedFeed(inflow, inflow.data, first, trailer),
                patience,
                ask=again,
            )

    def _as_mine(self, key: PartKey) -> PartKey:
        return (key[0], key[1], self.me, key[3])

    # --- where the ends differ from an owner's ---------------------------------------------------

    def _merge_for(
        self,
        key: PartKey,
        header: TransferHeader,
        plan: Plan,
        paths: Paths,
        part: Callable[[], CollectedPart],
    ) -> Callable[..., PartMerge]:
        return functools.partial(GroupMerge, brought=paths.collected[self.me])

    def _seal(self, part: CollectedPart, loop: asyncio.AbstractEventLoop) -> None:
        """The last chunk is merged: there is nothing to state but what is in the marks."""
        part.merge.seal(b"")

    def _spread(self, part: CollectedPart) -> None:
        """Stream the sum to the part's owner."""
        owner = next((key[2] for mine, key in self._ends.values() if mine == part.key), None)
        if self.transfers.closed or owner is None:
            return
        running = part.sending.get(owner)
        if running is None or running.done():
            part.sending[owner] = self.transfers.start(
                self._send(part, owner, again=running is not None)
            )

    async def _send(self, part: CollectedPart, peer: PeerId, *, again: bool) -> None:
        plan, merge = part.plan, part.merge
        assert isinstance(merge, GroupMerge)
        patience = merged_patience_s(plan.patience_s, plan.expected_s)
        try:
            await self.transfers.push(
                peer, "sum", part.header, lambda first: SumFeed(merge, first), patience, ask=again
            )
        except (TransportError, RemoteProtocolError) as error:
            late = isinstance(error, RemoteRefused) and error.code in ("early", "late")
            if not late and not self.transfers.closed:
                self.listener.fault(peer, f"took no sum: {error}")
