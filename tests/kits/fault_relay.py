"""A process between members that corrupts what it passes on, or resets its connections.

TLS goes through it from end to end, so a flipped bit is found by whoever receives it.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass
from multiprocessing.connection import Connection

from fault_member import enter

PIECE = 64 * 1024
BUFFER = 128 * 1024  # little is under way in here: senders shall notice what receivers do
NO_LINGER = struct.pack("ii", 1, 0)  # close with a reset


def main(pipe: Connection, namespace: str, routes: dict[str, str]) -> None:
    """Pass on what comes to each address of ``routes`` to the other one, until killed."""
    enter(namespace)
    asyncio.run(Relay(routes).run(pipe))


@dataclass(eq=False)
class Way:
    """One direction of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    corrupt: bool = False

    async def run(self) -> None:
        while piece := await self.reader.read(PIECE):
            if self.corrupt:
                self.corrupt = False
                middle = len(piece) // 2
                piece = piece[:middle] + bytes([piece[middle] ^ 1]) + piece[middle + 1 :]
            self.writer.write(piece)
            await self.writer.drain()
        if self.writer.can_write_eof():
            self.writer.write_eof()

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self.writer.transport.abort()


class Relay:
    """The connections that go through here."""

    def __init__(self, routes: dict[str, str]) -> None:
        self.routes = routes
        self.ways: set[Way] = set()

    async def run(self, pipe: Connection) -> None:
        for here, there in self.routes.items():
            host, _, port = here.rpartition(":")
            await asyncio.start_server(self._taker(there), host, int(port), limit=PIECE)
        pipe.send("ready")
        commands: asyncio.Queue[str] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        loop.add_reader(pipe.fileno(), lambda: commands.put_nowait(pipe.recv()))
        while True:
            if await commands.get() == "reset":
                for way in list(self.ways):
                    way.reset()
            else:
                for way in self.ways:
                    way.corrupt = True
            pipe.send("done")

    def _taker(self, address: str):
        host, _, port = address.rpartition(":")

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                there = await asyncio.open_connection(host, int(port), limit=PIECE)
            except OSError:
                writer.transport.abort()
                return
            for stream in (writer, there[1]):
                sock = stream.get_extra_info("socket")
                for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                    sock.setsockopt(socket.SOL_SOCKET, option, BUFFER)
            ways = {Way(reader, there[1]), Way(there[0], writer)}
            self.ways |= ways
            try:
                async with asyncio.TaskGroup() as group:
                    for way in ways:
                        group.create_task(way.run())
            except* OSError:
                pass
            finally:
                self.ways -= ways
                for stream in (writer, there[1]):
                    stream.transport.abort()

        return take
