"""One call, push or pull between two :class:`~protocols.memory.transport.MemoryTransport` ends.

An exchange lives in both ends at once, but what one end learns of the other travels through two
:class:`~protocols.memory.network.Pipe`, so it takes its time and meets the network's faults.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from protocols.bodies import send_body
from protocols.errors import (
    RemoteRefused,
    TransferStalled,
    Unreachable,
    Why,
)
from protocols.handlers import refusal
from protocols.limits import Limits
from protocols.memory.body import Body, patiently
from protocols.memory.network import Pipe
from protocols.tasks import resolve
from protocols.transport import Outgoing

if TYPE_CHECKING:
    from protocols.memory.transport import MemoryTransport

log = logging.getLogger(__name__)

HEAD_BYTES = 200  # what a request or a reply costs beside its body
HANDSHAKE_BYTES = 1400  # each way, once per connection
CLOSE_BYTES = 60
IDLE_TIMEOUT = Limits().stall  # seconds a serving peer waits for a body that does not move


class MemoryExchange:
    """A call, a push or a pull: opened by ``caller``, answered by ``callee``.

    ``result`` is the caller's: the reply, or for a pull the (empty) head before the body. With
    ``patient``, ``timeout`` counts from the last progress, else from the start.
    """

    def __init__(
        self,
        caller: MemoryTransport,
        callee: MemoryTransport,
        name: str,
        timeout: float,
        *,
        patient: bool,
    ) -> None:
        network = caller.network
        self.caller = caller
        self.callee = callee
        self.name = name
        self.body: Body | None = None
        self.pump: asyncio.Task[None] | None = None  # sends a push, at the caller
        self.handler: asyncio.Task[None] | None = None  # serves, at the callee
        self.out = Pipe(network, caller.node, callee.node)
        self.back = Pipe(network, callee.node, caller.node)
        self._network = network
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[bytes] = self._loop.create_future()
        self._timeout = timeout
        self._patient = patient
        self._progress = self._loop.time()
        self._timer = self._loop.call_later(timeout, self._watch)
        self._sent_at = self._progress
        self.took = 0.0  # seconds that the handler of a call or push worked
        self._connected = False
        self._broken = False
        self.sent = 0  # bytes of the body that are on the way or have arrived
        self._unread = 0  # of these, what nobody has read yet
        self._gate: asyncio.Future[None] | None = None
        self._break_at = network.drops(caller.peer_id, callee.peer_id)

    # --- the caller's end -----------------------------------------------------------------------

    def __enter__(self) -> MemoryExchange:
        self.caller.exchanges[self] = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        self.caller.exchanges.pop(self, None)
        self.result.cancel()
        if self in self.callee.exchanges:  # it is still at work: tell it that nobody listens
            self.out.send(CLOSE_BYTES, self.break_callee)

    def connect(self, then: Callable[[], None]) -> None:
        """Make sure that there is a connection, then go on."""
        if self.caller.connected(self.callee):
            self._connected = True
            then()
            return

        def reached() -> None:
            alive = self.callee.node.alive
            self._note("connect" if alive else "refused", self.caller, self.callee, 0)
            if alive:
                self.back.send(HANDSHAKE_BYTES, answered)
            else:
                self.back.send(CLOSE_BYTES, partial(self.break_caller, Why.REFUSED))

        def answered() -> None:
            if not self.result.done():
                self._connected = True
                self._advance()
                self.caller.remember(self.callee)
                then()

        self.out.send(HANDSHAKE_BYTES, reached)

    def request(
        self, kind: str, head: bytes, serve: Callable[[bytes], Coroutine[Any, Any, None]]
    ) -> None:
        """Send the head of the exchange; ``serve`` runs at the other end when it arrives."""
        self._sent_at = self._loop.time()
        head = self._tampered(head, self.caller, self.callee)
        self._note(kind, self.caller, self.callee, len(head))
        self.caller.stats.sent(self.callee.peer_id, self.name, len(head))

        def arrived() -> None:
            if not self.callee.node.alive:
                self.back.send(CLOSE_BYTES, partial(self.break_caller, Why.RESET))
            elif kind == "call" and self._break_at is not None and self._break_at < 0.5:
                self.reset()  # the other half breaks when the reply is due
            else:
                self.callee.stats.received(self.caller.peer_id, self.name, len(head))
                self.handler = self.callee.spawn(self, serve(head))

        self.out.send(HEAD_BYTES + len(head), arrived)

    @property
    def elapsed(self) -> float:
        """Seconds since the request was sent, connecting not included."""
        return self._loop.time() - self._sent_at

    def finish(self) -> None:
        """End an exchange that was for the sake of the connection."""
        self.result.set_result(b"")

    def _watch(self) -> None:
        """Fires when time is up, or would be without the progress made since."""
        if self._patient:
            until = max(self._progress, self.out.working_until(), self.back.working_until())
            until += self._timeout
            if until > self._loop.time():
                self._timer = self._loop.call_at(until, self._watch)
                return
        self._note("stalled", self.caller, self.callee, 0)
        if self._connected:
            self._fail(TransferStalled(f"{self.name}: no progress for {self._timeout} s"))
        else:
            self._fail(Unreachable(self.callee.peer_id, Why.TIMEOUT))

    def _advance(self) -> None:
        self._progress = self._loop.time()

    def stop_watching(self) -> None:
        """The body has a clock of its own, which runs only while somebody waits for data."""
        self._timer.cancel()

    def _fail(self, error: BaseException) -> None:
        if not self.result.done():
            self.result.set_exception(error)

    def break_caller(self, why: Why) -> None:
        """Tell the caller that the connection is gone."""
        self.caller.forget(self.callee)
        error = Unreachable(self.callee.peer_id, why)
        self._fail(error)
        if self.body is not None:
            self.body.fail(error)

    # --- the callee's end -----------------------------------------------------------------------

    def break_callee(self) -> None:
        """Tell the callee that the connection is gone: its handler is cancelled, once."""
        first, self._broken = not self._broken, True
        if first and self.handler is not None:
            self.handler.cancel()

    async def answer(self, handler: Awaitable[bytes]) -> None:
        """Run a handler of a call or push and send what it returns, or its refusal."""
        reply: bytes = b""
        error: RemoteRefused | None = None
        started = self._loop.time()
        try:
            reply = self._tampered(await handler, self.callee, self.caller)
        except Exception as raised:  # noqa: BLE001  # whatever a handler raises is its answer
            error = refusal(raised, self.name)
        self.took = self._loop.time() - started
        self._reply(reply, error)

    async def answer_pull(self, handler: Awaitable[Outgoing], max_length: int) -> None:
        """Run a handler of a pull and send the body it returns, or its refusal."""
        try:
            outgoing = await handler
            if outgoing.length > max_length:
                raise RemoteRefused("too_large", f"a body of {outgoing.length} bytes")
        except Exception as raised:  # noqa: BLE001  # whatever a handler raises is its answer
            self._reply(b"", refusal(raised, self.name))
            return
        if self._broken:
            return
        self.body = Body(outgoing.length, self.back, self._timeout, self._read)
        self._reply(b"", None)
        try:
            await self._send_body(outgoing, self.back, IDLE_TIMEOUT)
        except Exception:  # the body's source is the handler's code: its error is logged here
            log.exception("the body of %r broke off", self.name)
            self.reset()

    def _reply(self, reply: bytes, error: RemoteRefused | None) -> None:
        if self._broken:
            return
        if self._break_at is not None and self.body is None:
            self.reset()
            return
        self._note("refuse" if error else "reply", self.callee, self.caller, len(reply))
        self.callee.stats.sent(self.caller.peer_id, self.name, len(reply))
        if error is None:
            self.callee.stats.requests_by_name[self.name] += 1
        else:
            self.callee.stats.refused_requests += 1
            self.callee.stats.stalled_bodies += error.code == "stalled"

        def arrived() -> None:
            if self.result.done():
                return
            self.caller.stats.received(self.callee.peer_id, self.name, len(reply))
            if error is not None:
                self.result.set_exception(error)
            else:
                self.result.set_result(reply)

        self.back.send(HEAD_BYTES + len(reply), arrived)

    # --- bodies ---------------------------------------------------------------------------------

    def expect(self, length: int) -> None:
        """A push of ``length`` bytes will follow the request."""
        self.body = Body(length, self.out, IDLE_TIMEOUT, self._read)

    async def push_body(self, outgoing: Outgoing) -> None:
        """The caller's pump of a push; an error of the body's source becomes the push's own."""
        try:
            await self._send_body(outgoing, self.out, self._timeout)
        except Exception as error:  # noqa: BLE001  # raised again where push() waits
            self._fail(error)

    async def _send_body(self, outgoing: Outgoing, pipe: Pipe, idle: float) -> None:
        sender, receiver = pipe.source.transport, pipe.target.transport
        window = pipe.window()

        async def write(piece: memoryview) -> None:
            while self._unread >= window:
                self._gate = self._loop.create_future()
                await patiently(self._gate, pipe, idle)
            size = len(piece)
            self.sent += size
            if self._break_at is not None and self.sent > self._break_at * outgoing.length:
                self.reset()
                await self._loop.create_future()  # until reset() cancels this task
            data = bytearray(self._tampered(piece, sender, receiver))
            self._unread += size
            left = pipe.send(size, partial(self._deliver, data, receiver, sender))
            self._advance()
            if left > self._loop.time():
                gone = self._loop.create_future()
                self._network.schedule(left, partial(resolve, gone))
                await gone

        await send_body(outgoing, write, partial(sender.stats.sent, receiver.peer_id, self.name))

    def _deliver(self, data: bytearray, receiver: MemoryTransport, sender: MemoryTransport) -> None:
        if self.body is not None:
            receiver.stats.received(sender.peer_id, self.name, len(data))
            self._advance()
            self.body.deliver(data)

    def _read(self, size: int) -> None:
        self._unread -= size
        self._advance()
        if self._gate is not None:
            resolve(self._gate)

    async def end_pump(self) -> None:
        """Stop sending and wait until the body's source is closed."""
        if self.pump is not None:
            self.pump.cancel()
            await asyncio.gather(self.pump, return_exceptions=True)

    # --- both -----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Break the connection at both ends now."""
        self._note("reset", self.caller, self.callee, 0)
        self.break_callee()
        self.break_caller(Why.RESET)

    def end_of(self, dead: MemoryTransport) -> None:
        """One end has died: it learns at once, the other when the reset reaches it."""
        if dead is self.caller:
            self.break_caller(Why.RESET)
            self.out.send(CLOSE_BYTES, self.break_callee)
        if dead is self.callee:
            self.break_callee()
            self.back.send(CLOSE_BYTES, partial(self.break_caller, Why.RESET))

    def _tampered(
        self, data: bytes | memoryview, source: MemoryTransport, target: MemoryTransport
    ) -> bytes:
        if self._network.tamper is None:
            return bytes(data)
        return self._network.tamper(source.peer_id, target.peer_id, self.name, bytes(data))

    def _note(
        self, event: str, source: MemoryTransport, target: MemoryTransport, size: int
    ) -> None:
        self._network.note(event, source.peer_id, target.peer_id, self.name, size)
