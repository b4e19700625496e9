"""Streams of protobufs in both directions, made of calls.

A stream is opened by the caller under a random name; input items travel with ``send`` calls,
which return when the handler's queue has room, and output items come back from ``next`` calls,
which wait until there are some. Both run at once, so neither side can fill the other's memory.
hivemind's DHT needs no streams; its averaging and its tests do.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from contextlib import suppress
from typing import TypeVar

from protocols.asking import ask
from protocols.errors import Malformed, RemoteRefused, TransportError
from protocols.identity import PeerId
from protocols.messages import RemoteReply, StreamStep
from protocols.tasks import Background, Spawn, beside
from protocols.transport import Transport

logger = logging.getLogger(__name__)

QUEUE = 8  # items waiting on either side
BATCH_BYTES = 256 * 1024  # one `next` brings items until it holds this much
BATCH_ITEMS = 64
POLL = 5.0  # seconds one `next` waits before it returns empty-handed
IDLE = 60.0  # seconds without a step of the caller after which a stream ends
STEP_TIMEOUT = 30.0
MAX_STREAMS = 256  # of all callers
MAX_STREAMS_PER_PEER = 32

T = TypeVar("T")
Open = Callable[[PeerId, str, AsyncIterator[bytes]], AsyncIterator[bytes]]


async def asingle(items: AsyncIterable[T]) -> T:
    """The only item of a stream; ``Malformed`` if it has none or more."""
    found = [item async for item in items]
    if len(found) != 1:
        raise Malformed(f"a stream of {len(found)} items where one was due")
    return found[0]


class _Served:
    """The handler's side of a stream: two queues and the task between them."""

    def __init__(self, spawn: Spawn, ended: Callable[[], object]) -> None:
        self._spawn = spawn
        self._inputs: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUE)
        self._outputs: asyncio.Queue[bytes] = asyncio.Queue(QUEUE)
        self._error = ""
        self._ended = ended
        self._idle: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None]

    def start(self, outputs: AsyncIterator[bytes]) -> None:
        """Run the handler, whose inputs are :meth:`read`."""
        self.task = self._spawn(self._run(outputs))
        self.touch()

    def touch(self) -> None:
        """The caller is alive: start its idle time anew."""
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(IDLE, self.cancel)

    def cancel(self) -> None:
        """End the stream; the handler sees a cancellation."""
        if self._idle is not None:
            self._idle.cancel()
        self.task.cancel()
        self._ended()

    async def put(self, item: bytes | None) -> None:
        """Hand an input item to the handler (None: the last has come); waits for room."""
        # a handler that returned early never empties its queue
        async with beside(self._inputs.put(item)) as putting:
            await asyncio.wait({putting, self.task}, return_when=asyncio.FIRST_COMPLETED)

    async def take(self) -> RemoteReply:
        """Output items that are ready, after waiting for the first at most `POLL` seconds."""
        bodies: list[bytes] = []
        size = 0
        async with beside(self._outputs.get()) as getting:
            await asyncio.wait(
                {getting, self.task}, timeout=POLL, return_when=asyncio.FIRST_COMPLETED
            )
            if getting.done():
                bodies.append(getting.result())
                size = len(bodies[0])
        while not self._outputs.empty() and size < BATCH_BYTES and len(bodies) < BATCH_ITEMS:
            bodies.append(self._outputs.get_nowait())
            size += len(bodies[-1])
        done = self.task.done() and self._outputs.empty()
        if done:
            self.cancel()
        return RemoteReply(
            error=self._error if done else "", record=b"", bodies=tuple(bodies), done=done
        )

    async def _run(self, outputs: AsyncIterator[bytes]) -> None:
        try:
            async for body in outputs:
                await self._outputs.put(body)
        except asyncio.CancelledError:
            self._error = "CancelledError: the stream was cancelled"
            raise
        except Exception as failure:  # whatever a handler raises is its answer
            logger.debug("a stream handler failed", exc_info=True)
            self._error = f"{type(failure).__name__}: {failure}"[:256]

    async def read(self) -> AsyncIterator[bytes]:
        """The input items, until the caller's last."""
        while (item := await self._inputs.get()) is not None:
            yield item


class Streams:
    """All streams of one node, served and called."""

    def __init__(self, transport: Transport, open_: Open) -> None:
        self._transport = transport
        self._open = open_
        self._served: dict[tuple[PeerId, bytes], _Served] = {}
        self._handling = Background()
        transport.on_call("p2p-stream", self._serve, max_body=StreamStep.MAX_BYTES)

    async def call(
        self, peer: PeerId, name: str, inputs: AsyncIterable[bytes]
    ) -> AsyncGenerator[bytes, None]:
        """Open a stream at ``peer``, feed it ``inputs``, yield its outputs.

        Raises what the transport raises, and ``RemoteRefused`` for an error of the handler.
        Closing the generator cancels the handler.
        """
        stream = os.urandom(16)
        await self._step(peer, stream, "open", name)
        broken: list[Exception] = []  # what went wrong with the inputs
        done = False
        try:
            async with beside(self._send(peer, stream, inputs, broken)):
                while not done:
                    try:
                        reply = await self._step(peer, stream, "next")
                    except RemoteRefused:
                        done = True
                        raise
                    finally:
                        if broken:
                            raise broken[0]
                    done = reply.done
                    for body in reply.bodies:
                        yield body
                    if reply.error:
                        raise RemoteRefused("handler", reply.error)
        finally:
            if not done:
                with suppress(TransportError):  # the other end is gone, and the stream with it
                    await self._step(peer, stream, "cancel")

    async def _send(
        self, peer: PeerId, stream: bytes, inputs: AsyncIterable[bytes], broken: list[Exception]
    ) -> None:
        try:
            async for body in inputs:
                await self._step(peer, stream, "send", bodies=(body,))
            await self._step(peer, stream, "end")
        except RemoteRefused:
            return  # the handler needs no more input; what it said comes with `next`
        except Exception as error:  # noqa: BLE001  the inputs are the caller's, so is their error
            broken.append(error)
            with suppress(TransportError):
                await self._step(peer, stream, "cancel")  # wakes our `next`, which raises this

    async def _step(
        self, peer: PeerId, stream: bytes, verb: str, name: str = "", bodies: tuple[bytes, ...] = ()
    ) -> RemoteReply:
        step = StreamStep(stream=stream, verb=verb, handler=name, bodies=bodies)
        return await ask(
            self._transport, peer, "p2p-stream", step, RemoteReply, timeout=STEP_TIMEOUT
        )

    async def _serve(self, caller: PeerId, body: bytes) -> bytes:
        step: StreamStep = StreamStep.decode(body)
        key = (caller, step.stream)
        if step.verb == "open":
            self._start(key, step.handler)
            return _OPEN
        served = self._served.get(key)
        if served is None:
            raise RemoteRefused("ended", "no such stream")
        served.touch()
        if step.verb == "next":
            return (await served.take()).encode()
        if step.verb == "send":
            for item in step.bodies:
                await served.put(item)
        elif step.verb == "end":
            await served.put(None)
        elif step.verb == "cancel":
            served.cancel()
        else:
            raise Malformed("an unknown step")
        return _OPEN

    def _start(self, key: tuple[PeerId, bytes], name: str) -> None:
        caller = key[0]
        mine = sum(1 for peer, _ in self._served if peer == caller)
        if key in self._served or len(self._served) >= MAX_STREAMS or mine >= MAX_STREAMS_PER_PEER:
            raise RemoteRefused("busy", "too many streams")
        ended = functools.partial(self._served.pop, key, None)
        served = _Served(self._handling.spawn, ended)
        outputs = self._open(caller, name, served.read())  # refuses what has no handler
        self._served[key] = served
        served.start(outputs)

    async def aclose(self) -> None:
        """Cancel every stream served here and wait for the handlers to end."""
        for served in list(self._served.values()):
            served.cancel()
        await self._handling.join()


_OPEN = RemoteReply(error="", record=b"", bodies=(), done=False).encode()
