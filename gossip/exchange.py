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
import contextlib
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from gossip.bodies import Wiring as Wiring  # an exchange is made from it
from gossip.bodies import check_part, outgoing, pull_part, read_exactly
from gossip.certificate import basis_of, check_result, sign_result
from gossip.merging import Collecting, merge
from gossip.slicing import OwnSlices, Source
from gossip.validity import PartKey, Place, Shape, check_statement, key_of
from protocols.errors import (
    Malformed,
    RemoteProtocolError,
    RemoteRefused,
    TransportError,
    Unreachable,
    Why,
)
from protocols.identity import PeerId
from protocols.messages import Contribution, PartResult, Plan
from protocols.transport import Incoming

PLAN_WAIT_S = 5.0  # a slice may overtake the plan that announces it
TRIES = 3  # of a push whose connection breaks
AT_ONCE = 2  # pushes of one thing by one peer: the one that broke, and the next try


class Listener(Protocol):
    """Who is told what happens."""

    def held(self, result: PartResult) -> None: ...
    def fault(self, peer: PeerId, why: str) -> None: ...
    def lost(self, result: PartResult) -> None: ...
    def refused(self, peer: PeerId, why: str) -> None: ...


@dataclass
class Exchange:
    """The transfers of one round at one member."""

    wiring: Wiring
    place: Place
    shape: Shape
    source: Source
    listener: Listener
    plan: Plan | None = None
    parts: dict[PartKey, tuple[PartResult, torch.Tensor]] = field(default_factory=dict)
    bytes_sent: int = 0
    bytes_received: int = 0
    closed: bool = False
    _basis: bytes = b""  # of the plan
    _planned: dict[PartKey, int] = field(default_factory=dict)  # number of its contributors
    _collecting: dict[PartKey, Collecting] = field(default_factory=dict)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _own: OwnSlices = field(init=False)
    _sending: set[PartKey] = field(default_factory=set)
    _fetching: set[PartKey] = field(default_factory=set)
    _receiving: Counter[tuple[PeerId, PartKey]] = field(default_factory=Counter)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _watches: set[asyncio.Task[None]] = field(default_factory=set)
    _progress: dict[PeerId, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._own = OwnSlices(
            self.wiring, self.shape, self.source, lambda why: self.listener.refused(self.me, why)
        )

    @property
    def round(self) -> int:
        """The number of the round."""
        return self.place.round

    @property
    def me(self) -> PeerId:
        return self.wiring.identity.peer_id

    # --- by the plan -------------------------------------------------------------------------

    def work(self, plan: Plan) -> None:
        """Start whatever this plan asks of me and is not under way yet."""
        self.plan, self._basis = plan, basis_of(plan.contributors)
        contributes = any(c.peer == self.me and c.active for c in plan.contributors)
        others = sorted(plan.parts, key=lambda part: (part.owner <= self.me, part.owner))
        for part in others:  # start behind myself, so that not all send to one owner first
            if part.result is not None:
                key = key_of(part.result)
                if part.result.digest and key not in self.parts and key not in self._fetching:
                    self._fetching.add(key)
                    self._start(self._fetch(part.result, plan))
                continue
            key = (part.start, part.stop, part.owner, self._basis)
            self._planned[key] = len(plan.contributors)
            if part.owner == self.me:
                if key in self.parts:
                    self._spread(*self.parts[key], plan)  # not everybody has it, it seems
                else:
                    self._collect(key, plan)
            elif key not in self.parts:
                if contributes and key not in self._sending:
                    self._sending.add(key)
                    self._start(self._send_slice(key, plan))
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

    # --- contributing ------------------------------------------------------------------------

    async def _send_slice(self, key: PartKey, plan: Plan) -> None:
        start, stop, owner, basis = key
        place = self.place
        header = Contribution(
            place.run, place.fragment, place.round, start, stop, plan.codec, basis
        )
        encoded = await self._own.encoded(start, stop)
        if encoded is None:  # an empty body: nobody need wait for us
            encoded = torch.empty(0, dtype=torch.uint8)
        try:
            await self._push(owner, "slice", header.encode(), encoded, plan.patience_s)
        except RemoteRefused as error:
            if error.code != "late" and not self.closed:
                self.listener.fault(owner, f"refused my slice: {error}")
        except TransportError as error:
            if key not in self.parts and not self.closed:
                self.listener.fault(owner, f"took no slice: {error}")

    async def _push(
        self, peer: PeerId, name: str, header: bytes, data: torch.Tensor, patience: float
    ) -> None:
        """Push, and once more if the connection breaks. Raises TransportError."""
        for left in reversed(range(TRIES)):
            try:
                await self.wiring.transport.push(
                    peer, name, header, outgoing(data), timeout=patience
                )
            except Unreachable as error:
                if error.why is not Why.RESET or not left or self.closed:
                    raise
            else:
                self.bytes_sent += data.numel()
                return

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
        start, stop, _, basis = key
        plan = collecting.plan
        deadline = self.wiring.now() + plan.patience_s + 3 * plan.expected_s
        if any(c.peer == self.me and c.active for c in plan.contributors):
            mine = await self._own.encoded(start, stop)
            if mine is None:
                collecting.refused.add(self.me)
            else:
                collecting.slices[self.me] = mine
        await self._wait_for_slices(collecting, deadline)
        if self.closed or not (collecting.slices or not collecting.waits_for()):
            # over, or nothing came in: then the others find me at fault, rightly
            self._collecting.pop(key, None)
            return
        plan, before = collecting.plan, set(collecting.refused)
        encoded, digest, included = await self.wiring.offload(
            lambda: merge(self.wiring.codec, plan.contributors, collecting)
        )
        for peer in collecting.refused - before:
            self.listener.refused(peer, "its slice is not finite")
        collecting.slices.clear()
        unsigned = PartResult(
            self.place.fragment,
            self.place.round,
            start,
            stop,
            self.me,
            plan.codec,
            digest,
            included,
            basis,
            b"",
        )
        result = sign_result(self.wiring.identity, self.place.run, unsigned)
        if self._hold(result, encoded):
            self._spread(result, encoded, collecting.plan)

    async def _wait_for_slices(self, collecting: Collecting, deadline: float) -> None:
        async with self._changed:
            while not self.closed and (waiting := collecting.waits_for()):
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

    def _spread(self, result: PartResult, encoded: torch.Tensor, plan: Plan) -> None:
        """Send a part that I merged to everybody, starting behind myself."""
        at = plan.roster.index(self.me) if self.me in plan.roster else 0
        for peer in plan.roster[at + 1 :] + plan.roster[:at]:
            if peer != self.me:
                self._start(self._send_merged(peer, result, encoded, plan))

    async def _send_merged(
        self, peer: PeerId, result: PartResult, encoded: torch.Tensor, plan: Plan
    ) -> None:
        with contextlib.suppress(TransportError):  # if it lives, it fetches the part from anybody
            await self._push(peer, "merged", result.encode(), encoded, plan.patience_s)

    async def on_slice(self, sender: PeerId, header: Contribution, incoming: Incoming) -> bytes:
        """Take a contributor's slice. Raises RemoteRefused ``late`` when it is not wanted."""
        key = (header.start, header.stop, self.me, header.basis)
        await self._until_planned(key)
        collecting = self._collecting.get(key)
        if collecting is None or collecting.closed or sender not in collecting.waits_for():
            raise RemoteRefused("late", "this slice is not expected any more")
        if header.codec != collecting.plan.codec:
            raise Malformed("a slice in another codec than planned")
        data = None if incoming.length == 0 else await self._read(sender, incoming, key)
        async with self._changed:
            if collecting.closed or self.closed:
                raise RemoteRefused("late", "merged without this slice")
            if data is None:
                collecting.refused.add(sender)
            else:
                collecting.slices[sender] = data
            self._changed.notify_all()
        return b""

    async def _until_planned(self, key: PartKey) -> None:
        """Wait for the plan that has this part."""
        try:
            async with asyncio.timeout(PLAN_WAIT_S), self._changed:
                await self._changed.wait_for(lambda: self.closed or key in self._planned)
        except TimeoutError:
            raise RemoteRefused("late", "no plan has this part") from None
        if self.closed or key not in self._planned:
            raise RemoteRefused("late", "the round is over here")

    # --- receiving ---------------------------------------------------------------------------

    async def on_merged(self, sender: PeerId, result: PartResult, incoming: Incoming) -> bytes:
        """Take a merged part from its owner. Raises RemoteProtocolError or RemoteRefused."""
        if sender != result.owner or not result.digest:
            raise Malformed("not the owner's part")
        check_statement(result, self.place, self.shape)
        key = key_of(result)
        await self._until_planned(key)
        if any(i.contributor >= self._planned[key] for i in result.included):
            raise Malformed("a result that counts an unknown contributor")
        check_result(self.wiring.run, result)
        if key in self.parts:
            raise RemoteRefused("late", "held already")
        data = await self._read(sender, incoming, key)
        await self.wiring.offload(lambda: check_part(self.wiring.codec, result, data))
        self._hold(result, data)
        return b""

    async def _fetch(self, result: PartResult, plan: Plan) -> None:
        """Pull a part that is merged already, from its owner or from any other member."""
        key = key_of(result)
        sources = [result.owner, *(peer for peer in plan.roster if peer != result.owner)]
        try:
            for peer in [peer for peer in sources if peer != self.me] * 2:
                if self.closed or key in self.parts:
                    return
                try:
                    data = await pull_part(self.wiring, peer, result, plan.patience_s)
                except RemoteProtocolError as error:
                    self.listener.refused(peer, str(error))
                except TransportError:
                    continue
                else:
                    self.bytes_received += data.numel()
                    self._hold(result, data)
                    return
        finally:
            self._fetching.discard(key)
        if not self.closed and key not in self.parts:
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

    async def _read(self, sender: PeerId, incoming: Incoming, key: PartKey) -> torch.Tensor:
        def moved() -> None:
            self._progress[sender] = self.wiring.now()

        if self._receiving[sender, key] >= AT_ONCE:
            raise RemoteRefused("busy", "it is on its way already")
        self._receiving[sender, key] += 1
        try:
            size = self.wiring.codec.encoded_size(key[0], key[1])
            data = await read_exactly(incoming, size, moved)
        finally:
            self._receiving[sender, key] -= 1
        self.bytes_received += size
        return data

    def _hold(self, result: PartResult, data: torch.Tensor) -> bool:
        """Keep a part, the first that comes; whether it was news."""
        if self.closed or key_of(result) in self.parts:
            return False
        self.parts[key_of(result)] = (result, data)
        self.listener.held(result)
        return True

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.wiring.spawn(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
