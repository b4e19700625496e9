"""The transport of a member that lies (:mod:`lying_kit`): answers, bodies and moments as well."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from blake3 import blake3
from lying_kit import REFUSALS, Liar

from gossip.exchange.bodies import result_from, trailer_of
from gossip.plans.certificate import sign_result
from protocols.bodies import BufferFeed
from protocols.errors import ProtocolError, RemoteRefused, TransferStalled, TransportError
from protocols.identity import PeerId
from protocols.memory.transport import MemoryTransport
from protocols.messages import TransferHeader
from protocols.transport import MAX_CALL_BYTES, Buffer, Feed, Incoming, Outgoing

KINDS = ("cut", "long", "slow", "changed", "changed", "nothing")


def meddled(liar: Liar, name: str, header: bytes, feed: Feed) -> Feed:
    """Another body in its place."""
    kind = liar.dice.choice(KINDS)
    if name == "merged" and liar.two_faced and liar.dice.random() < 0.5:
        kind = "another"
    return Meddled(liar, feed, kind, header)


class Meddled:
    """A body that is not what it should be."""

    def __init__(self, liar: Liar, feed: Feed, kind: str, header: bytes) -> None:
        self._liar, self._feed, self._kind, self._header = liar, feed, kind, header
        self._whole = feed.length
        self.length = {
            "cut": feed.length // 2,
            "long": feed.length + liar.dice.choice([1, 1000, 10**6]),
            "nothing": 0,
        }.get(kind, feed.length)
        self._given = self._taken = 0
        self._at = liar.dice.randrange(max(1, feed.length))
        self._resting = False
        self._left = b""
        self._kept = bytearray()

    def attach(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._feed.attach(wake)

    def next(self) -> Buffer | None:
        if self._kind == "slow":
            return self._trickle()
        if self._taken >= self._whole:
            data = bytes(min(self.length - self._given, 65536))
        else:
            found = self._feed.next()
            if found is None:
                return None
            data = self._edited(bytes(found))
        data = data[: self.length - self._given]
        self._given += len(data)
        return data

    def _edited(self, data: bytes) -> bytes:
        first, self._taken = self._taken, self._taken + len(data)
        if self._kind == "another":
            return self._another(data, first)
        if self._kind == "changed" and first <= self._at < self._taken:
            at = self._at - first
            return data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]
        return data

    def _another(self, data: bytes, first: int) -> bytes:
        """Another merged part for each who gets it, with all that makes it valid."""
        try:
            header = TransferHeader.decode(self._header)
            codec = self._liar.codec.named(header.codec)
        except ProtocolError:
            return data
        size = codec.encoded_size(header.start, header.stop)
        if header.done or size >= self._whole:
            return data
        if first < size:
            at = self._at % size - first
            if 0 <= at < len(data):
                data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            self._kept += data
            return data
        try:
            result = result_from(header, self._liar.me, data)
        except ProtocolError:
            return data
        digest = blake3(bytes(self._kept)).digest()
        result = dataclasses.replace(result, digest=digest)
        signed = sign_result(self._liar.identity, self._liar.run, result)
        return trailer_of(signed, (len(data) - 96) // 8)

    def _trickle(self) -> Buffer | None:
        """A byte a second."""
        self._resting = not self._resting
        if self._resting:
            asyncio.get_running_loop().call_later(1.0, self._wake)
            return None
        if not self._left:
            data = self._feed.next()
            if data is None:
                self._resting = False
                return None
            self._left = bytes(data)
        piece, self._left = self._left[:1], self._left[1:]
        return piece


class LyingTransport:
    """The transport of a liar."""

    def __init__(self, inner: MemoryTransport, liar: Liar) -> None:
        self._inner, self._liar = inner, liar
        self._tasks: set[asyncio.Task[None]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _spawn(self, coroutine: Coroutine[Any, Any, object]) -> None:
        async def go() -> None:
            try:
                await coroutine
            except (TransportError, ProtocolError):
                return

        task = asyncio.get_running_loop().create_task(go())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def call(
        self, peer: PeerId, name: str, body: bytes, *, timeout: float,
        max_reply: int = MAX_CALL_BYTES,
    ) -> bytes:  # fmt: skip
        liar, dice = self._liar, self._liar.dice
        liar.note(name, body)
        body = liar.instead(name, body)
        how: dict[str, Any] = {"timeout": timeout, "max_reply": max_reply}
        if not liar.tempted(name, body):
            return await self._inner.call(peer, name, body, **how)
        others = [one for one in liar.names() if one != liar.me]
        for _ in range(dice.choice([0, 0, 1, 4])):
            words = liar.another(liar.again(name))
            self._spawn(self._inner.call(dice.choice(others), name, words, **how))
        kinds = ["field"] * 6 + ["again", "withhold", "twice", "delay", "junk", "elsewhere"]
        if name == "round":
            kinds += ["slander"] * 3
        match liar.way(*kinds):
            case "field":
                body = liar.say(body)
            case "again":
                body = liar.again(name)
            case "withhold":
                await asyncio.sleep(min(timeout, 1.0))
                raise TransferStalled("withheld")
            case "twice":
                self._spawn(self._inner.call(peer, name, liar.say(body), **how))
            case "delay":
                await asyncio.sleep(dice.choice([0.1, 1.0, 10.0]))
            case "junk":
                body = dice.randbytes(dice.choice([1, 100, 50_000]))
            case "elsewhere":
                self._spawn(self._inner.call(dice.choice(others), name, liar.again(name), **how))
            case "slander" if (slander := liar.slander(liar.again(name))) is not None:
                self._spawn(self._inner.call(peer, name, slander, **how))
        return await self._inner.call(peer, name, body, **how)

    async def push(
        self, peer: PeerId, name: str, header: bytes, body: Outgoing | Feed, *, timeout: float
    ) -> bytes:
        liar, dice = self._liar, self._liar.dice
        if liar.tempted(name):
            match liar.way("field", "body", "body", "withhold", "delay"):
                case "field":
                    header = liar.say(header)
                case "body" if not isinstance(body, Outgoing):
                    body = meddled(liar, name, header, body)
                case "withhold":
                    await asyncio.sleep(timeout)
                    raise TransferStalled("withheld")
                case "delay":
                    await asyncio.sleep(dice.choice([0.1, 1.0, 10.0]))
        return await self._inner.push(peer, name, header, body, timeout=timeout)

    @asynccontextmanager
    async def pull(
        self, peer: PeerId, name: str, header: bytes, *, max_length: int, timeout: float
    ) -> AsyncIterator[Incoming]:
        header = self._liar.say(header) if self._liar.tempted(name) else header
        async with self._inner.pull(
            peer, name, header, max_length=max_length, timeout=timeout
        ) as incoming:
            yield incoming

    def on_call(self, name: str, handler: Any, *, max_body: int = MAX_CALL_BYTES) -> None:
        liar, dice = self._liar, self._liar.dice

        async def lying(peer: PeerId, body: bytes) -> bytes:
            liar.note(name, body)
            reply: bytes = liar.made_up(name, body) or await handler(peer, body)
            if reply:
                liar.note(f"re: {name}", reply)
            if not liar.tempted(f"re: {name}"):
                return reply
            match liar.way("field", "field", "field", "again", "hold", "delay", "junk", "no"):
                case "field" if reply:
                    return liar.say(reply)
                case "again" if reply and (liar.two_faced or name != "round"):
                    return liar.again(f"re: {name}")  # an old promise tells of other votes
                case "hold":
                    await asyncio.sleep(60.0)
                case "delay":
                    await asyncio.sleep(dice.choice([0.1, 1.0, 10.0]))
                case "junk":
                    return dice.randbytes(dice.choice([1, 100, 50_000]))
                case "no":
                    raise RemoteRefused(dice.choice(REFUSALS), "a lie")
            return reply

        self._inner.on_call(name, lying, max_body=max_body)

    def on_push(self, name: str, handler: Any, *, max_length: int) -> None:
        liar, dice = self._liar, self._liar.dice

        async def lying(peer: PeerId, header: bytes, incoming: Incoming) -> bytes:
            if liar.tempted(f"re: {name}"):
                match liar.way("hold", "no", "delay"):
                    case "hold":
                        await asyncio.sleep(60.0)
                    case "no":
                        raise RemoteRefused(dice.choice(REFUSALS), "a lie")
                    case "delay":
                        await asyncio.sleep(dice.choice([0.1, 1.0, 10.0]))
            reply: bytes = await handler(peer, header, incoming)
            return reply

        self._inner.on_push(name, lying, max_length=max_length)

    def on_pull(self, name: str, handler: Any, *, slow: bool = False) -> None:
        liar = self._liar

        async def lying(peer: PeerId, header: bytes) -> Outgoing | Feed:
            if (made_up := liar.made_up(name, header)) is not None:
                return BufferFeed(made_up)
            body: Outgoing | Feed = await handler(peer, header)
            if isinstance(body, Outgoing) or not liar.tempted(name):
                return body
            return meddled(liar, name, header, body)

        self._inner.on_pull(name, lying, slow=slow)
