"""Another host of this island and its ranks, as host 0 (:mod:`node.hosts.hub`) knows them."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass, field
from pathlib import Path

from node.hosts.wire import Halt, HostConnection

HOST_LOST = 1000  # "exit status" of a rank whose host is lost


@dataclass
class Host:
    """One of the other hosts, from its greeting on."""

    number: int
    name: str
    ranks: int
    connection: HostConnection
    process: bytes = b""  # as it calls itself
    prepared: bool = False
    leaving: asyncio.Event = field(default_factory=asyncio.Event)  # it was told to stop
    running: dict[int, RemoteRank] = field(default_factory=dict)  # by rank
    halted: int | None = None  # the life whose ranks it was told last to kill
    farewell: str = ""  # why it has left

    @property
    def shown(self) -> str:
        """As people are told of it."""
        return f"host {self.number} ({self.name})"

    def halt(self, life: int) -> None:
        """Have all ranks of a life killed: said once, since a host keeps only so many words."""
        if self.halted != life:
            self.halted = life
            self.connection.send(Halt(life))


class RemoteRank:
    """A rank on another host; the same to its supervisor as :class:`node.island.rank_process`'s."""

    def __init__(self, number: int, host: Host, life: int) -> None:
        self.number, self.host, self.life = number, host, life
        self.where = f" on {host.shown}"
        self.log = Path(f"trainer-rank{number}.log")  # of its host, which says where it lies
        self._tail = ""
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        """Its status as of a process of this host, or :data:`HOST_LOST`."""
        return await asyncio.shield(self._status)

    def signal(self, number: signal.Signals) -> None:
        """Any signal kills, and all ranks of its host; a host that is silent is found lost."""
        if not self._status.done():
            self.host.halt(self.life)

    def tail(self) -> str:
        """The end of its log."""
        return self._tail

    def ended(self, status: int, log: str, tail: str) -> None:
        """Note that it has ended; only the first call counts."""
        if not self._status.done():
            self.log, self._tail = Path(log), tail
            self._status.set_result(status)
