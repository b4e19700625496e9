"""Moving the tensors of one round: slices to the owners, merged parts to everybody.

The driver side of a :class:`~protocols.messages.Plan`. A contributor pushes its slice of every
part to the part's owner; an owner merges (:mod:`gossip.merging`) and pushes the same bytes to
every member; what is merged already is pulled from whoever holds it. A later plan of the same
round changes only what it has to: transfers it still wants go on.

Results are reported to a :class:`Listener`: a part is held, a peer did not deliver, a merged
part is not to be had any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from blake3 import blake3

from gossip.agreement import PartKey, key_of
from gossip.certificate import check_result, sign_result
from gossip.merging import Collecting, as_bytes, merge
from protocols.codecs import RangeCodec
from protocols.errors import Malformed, RemoteRefused, Stale, TransportError
from protocols.identity import Identity, PeerId
from protocols.messages import Contribution, Part, PartRequest, PartResult, Plan
from protocols.transport import CHUNK_BYTES, Buffer, Incoming, Outgoing, Transport

T = TypeVar("T")
Offload = Callable[[Callable[[], T]], Awaitable[T]]
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]

PLAN_WAIT_S = 5.0  # a slice may overtake the plan that announces it


class Source(Protocol):
    """Where this member's own contribution comes from."""

    def delta(self, start: int, stop: int) -> torch.Tensor:
        """The pseudo-gradient of elements ``[start, stop)``, fp32 [stop − start]."""
        ...


class Listener(Protocol):
    """Who is told what happens."""

    def held(self, result: PartResult) -> None: ...
    def fault(self, peer: PeerId, why: str) -> None: ...
    def lost(self, result: PartResult) -> None: ...
    def refused(self, peer: PeerId, why: str) -> None: ...


@dataclass
class Wiring:
    """What every exchange of a node shares."""

    transport: Transport
    identity: Identity
    run: bytes
    codec: RangeCodec
    spawn: Spawn
    offload: Callable[[Callable[[], Any]], Awaitable[Any]]
    now: Callable[[], float]


@dataclass
class Exchange:
    """The transfers of one round at one member."""

    wiring: Wiring
    fragment: int
    round: int
    source: Source
    listener: Listener
    plan: Plan | None = None
    parts: dict[PartKey, tuple[PartResult, torch.Tensor]] = field(default_factory=dict)
    bytes_sent: int = 0
    bytes_received: int = 0
    closed: bool = False
    _collecting: dict[PartKey, Collecting] = field(default_factory=dict)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _sending: set[PartKey] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _watches: set[asyncio.Task[None]] = field(default_factory=set)
    _progress: dict[PeerId, float] = field(default_factory=dict)

    @property
    def me(self) -> PeerId:
        return self.wiring.identity.peer_id

    # --- by the plan -------------------------------------------------------------------------

    def work(self, plan: Plan) -> None:
        """Start whatever this plan asks of me and is not under way yet."""
        self.plan = plan
        contributes = any(c.peer == self.me and c.active for c in plan.contributors)
        others = sorted(plan.parts, key=lambda part: (part.owner <= self.me, part.owner))
        for part in others:  # start behind myself, so that not all send to one owner first
            if part.result is not None:
                if part.result.digest and key_of(part.result) not in self.parts:
                    self._start(self._fetch(part.result, plan))
                continue
            key = (part.start, part.stop, part.owner)
            if key in self.parts:
                continue
            if part.owner == self.me:
                self._collect(key, plan)
            elif contributes and key not in self._sending:
                self._sending.add(key)
                self._start(self._send_slice(part, plan))
            if part.owner != self.me:
                watch = self._start(self._watch(key, plan))
                self._watches.add(watch)
                watch.add_done_callback(self._watches.discard)
        self._start(self._announce_change())

    def stop(self) -> None:
        """The round is over here: stop waiting; what others still receive goes on."""
        self.closed = True
        self._start(self._announce_change())
        for task in list(self._watches):
            task.cancel()

    async def drain(self, timeout: float) -> None:
        """Let running transfers end, then cancel the rest."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=timeout)
        for task in list(self._tasks):
            task.cancel()

    # --- contributing ------------------------------------------------------------------------

    async def _send_slice(self, part: Part, plan: Plan) -> None:
        codec, key = self.wiring.codec, (part.start, part.stop, part.owner)
        header = Contribution(
            self.wiring.run, self.fragment, self.round, part.start, part.stop, plan.codec
        )
        encoded = await self._encode(part.start, part.stop)
        try:
            await self.wiring.transport.push(
                part.owner, "slice", header.encode(), outgoing(encoded), timeout=plan.patience_s
            )
            self.bytes_sent += codec.encoded_size(part.start, part.stop)
        except RemoteRefused as error:
            if error.code != "late" and not self.closed:
                self.listener.fault(part.owner, f"refused my slice: {error}")
        except TransportError as error:
            if key not in self.parts and not self.closed:
                self.listener.fault(part.owner, f"took no slice: {error}")

    async def _encode(self, start: int, stop: int) -> torch.Tensor:
        codec = self.wiring.codec

        def encode() -> torch.Tensor:
            out = torch.empty(codec.encoded_size(start, stop), dtype=torch.uint8)
            codec.encode(start, self.source.delta(start, stop), out)
            return out

        encoded: torch.Tensor = await self.wiring.offload(encode)
        return encoded

    # --- owning ------------------------------------------------------------------------------

    def _collect(self, key: PartKey, plan: Plan) -> None:
        collecting = self._collecting.get(key)
        if collecting is None:
            collecting = self._collecting[key] = Collecting(key[0], key[1], plan)
            self._start(self._merge_when_complete(key, collecting))
        else:
            collecting.renew(plan)

    async def _announce_change(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _merge_when_complete(self, key: PartKey, collecting: Collecting) -> None:
        start, stop, _ = key
        plan = collecting.plan
        if any(c.peer == self.me and c.active for c in plan.contributors):
            collecting.slices[self.me] = await self._encode(start, stop)
        deadline = self.wiring.now() + plan.patience_s + 3 * plan.expected_s
        async with self._changed:
            while waiting := collecting.waits_for():
                left = deadline - self.wiring.now()
                if left <= 0:
                    for peer in waiting:
                        self.listener.refused(peer, "its slice came too late")
                    break
                try:
                    async with asyncio.timeout(left):
                        await self._changed.wait()
                except TimeoutError:
                    continue
            collecting.closed = True
        plan = collecting.plan
        if not collecting.slices:
            return  # nothing arrived: the others will find me at fault, rightly
        before = set(collecting.refused)
        encoded, digest, included = await self.wiring.offload(
            lambda: merge(self.wiring.codec, plan.contributors, collecting)
        )
        for peer in collecting.refused - before:
            self.listener.refused(peer, "its slice is not finite")
        collecting.slices.clear()
        result = sign_result(
            self.wiring.identity,
            self.wiring.run,
            PartResult(
                self.fragment, self.round, start, stop, self.me, plan.codec, digest, included, b""
            ),
        )
        self._hold(result, encoded)
        roster = plan.roster
        at = roster.index(self.me) if self.me in roster else 0
        for peer in roster[at + 1 :] + roster[:at]:
            if peer != self.me:
                self._start(self._send_merged(peer, result, encoded, plan))

    async def _send_merged(
        self, peer: PeerId, result: PartResult, encoded: torch.Tensor, plan: Plan
    ) -> None:
        try:
            await self.wiring.transport.push(
                peer, "merged", result.encode(), outgoing(encoded), timeout=plan.patience_s
            )
            self.bytes_sent += encoded.numel()
        except TransportError:
            pass  # it will fetch the part from any member, or catch up, if it lives

    async def on_slice(self, sender: PeerId, header: Contribution, incoming: Incoming) -> bytes:
        """Take a contributor's slice. Raises RemoteRefused ``late`` when it is not wanted."""
        key = (header.start, header.stop, self.me)
        collecting = await self._expected(key)
        if collecting is None or collecting.closed or sender not in collecting.waits_for():
            raise RemoteRefused("late", "this slice is not expected any more")
        if header.codec != collecting.plan.codec:
            raise Malformed("a slice in another codec than planned")
        data = await self._read(sender, incoming, header.start, header.stop)
        async with self._changed:
            if collecting.closed:
                raise RemoteRefused("late", "merged without this slice")
            collecting.slices[sender] = data
            self._changed.notify_all()
        return b""

    async def _expected(self, key: PartKey) -> Collecting | None:
        """What collects this part's slices; waits for the plan that makes me its owner."""
        try:
            async with asyncio.timeout(PLAN_WAIT_S), self._changed:
                await self._changed.wait_for(lambda: self.closed or key in self._collecting)
        except TimeoutError:
            return None
        return self._collecting.get(key)

    # --- receiving ---------------------------------------------------------------------------

    async def on_merged(self, sender: PeerId, result: PartResult, incoming: Incoming) -> bytes:
        """Take a merged part from its owner."""
        if sender != result.owner or result.round != self.round:
            raise Stale("not the owner's part, or of another round")
        check_result(self.wiring.run, result)
        if key_of(result) in self.parts:
            raise RemoteRefused("late", "held already")
        data = await self._read(sender, incoming, result.start, result.stop)
        if await self.wiring.offload(lambda: blake3(as_bytes(data)).digest()) != result.digest:
            raise Malformed("the part does not match its digest")
        self._hold(result, data)
        return b""

    async def _fetch(self, result: PartResult, plan: Plan) -> None:
        """Pull a part that is merged already, from its owner or from any other member."""
        sources = [result.owner, *(peer for peer in plan.roster if peer != result.owner)]
        for peer in [peer for peer in sources if peer != self.me] * 2:
            if self.closed or key_of(result) in self.parts:
                return
            try:
                data = await pull_part(self.wiring, peer, result, plan.patience_s)
                self.bytes_received += data.numel()
            except (TransportError, Malformed):
                continue
            self._hold(result, data)
            return
        if not self.closed and key_of(result) not in self.parts:
            self.listener.lost(result)

    async def _watch(self, key: PartKey, plan: Plan) -> None:
        """Blame the owner of a part that does not come and does not move."""
        patience = 2.5 * plan.patience_s
        until = self.wiring.now() + patience + 4 * plan.expected_s
        while key not in self.parts and not self.closed and self.plan is plan:
            moved = self._progress.get(key[2], 0.0)
            left = max(until, moved + patience) - self.wiring.now()
            if left <= 0:
                self.listener.fault(key[2], "its part does not come")
                return
            await asyncio.sleep(min(left, patience))

    async def _read(
        self, sender: PeerId, incoming: Incoming, start: int, stop: int
    ) -> torch.Tensor:
        def moved() -> None:
            self._progress[sender] = self.wiring.now()

        size = self.wiring.codec.encoded_size(start, stop)
        data = await read_exactly(incoming, size, moved)
        self.bytes_received += size
        return data

    def _hold(self, result: PartResult, data: torch.Tensor) -> None:
        self.parts[key_of(result)] = (result, data)
        self.listener.held(result)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.wiring.spawn(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def pull_part(
    wiring: Wiring, peer: PeerId, result: PartResult, timeout: float
) -> torch.Tensor:
    """The encoded bytes of a merged part, checked. Raises TransportError or Malformed."""
    header = PartRequest(
        wiring.run, result.fragment, result.round, result.start, result.stop, result.digest
    )
    size = wiring.codec.encoded_size(result.start, result.stop)
    async with wiring.transport.pull(
        peer, "part", header.encode(), max_length=size, timeout=timeout
    ) as incoming:
        data = await read_exactly(incoming, size, lambda: None)
    if await wiring.offload(lambda: blake3(as_bytes(data)).digest()) != result.digest:
        raise Malformed("the part does not match its digest")
    return data


async def read_exactly(incoming: Incoming, size: int, moved: Callable[[], None]) -> torch.Tensor:
    """A body of exactly ``size`` bytes as a uint8 tensor; raises :class:`Malformed`."""
    if incoming.length != size:
        raise Malformed(f"{incoming.length} bytes where {size} belong")
    data = torch.empty(size, dtype=torch.uint8)
    view, at = as_bytes(data), 0
    async for chunk in incoming:
        view[at : at + len(chunk)] = chunk
        at += len(chunk)
        moved()
    return data


def outgoing(data: torch.Tensor) -> Outgoing:
    """A uint8 tensor as a body, in chunks that share its memory."""
    view = as_bytes(data)

    async def chunks() -> AsyncIterator[Buffer]:
        for at in range(0, len(view), CHUNK_BYTES):
            yield view[at : at + CHUNK_BYTES]

    return Outgoing(len(view), chunks())
