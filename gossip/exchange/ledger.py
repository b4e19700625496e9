"""What this node keeps of the last rounds, for members that missed them.

A certificate and the encoded bytes of its parts are all that a member needs to repeat a round:
half a byte a parameter with int4, four with fp32. The last few are kept in any case, and as long as
somebody is on the way here from an earlier round (:mod:`gossip.exchange.readers`) all from that one
on.

Rounds whose bytes add up to more than those of base and momentum (8 a parameter: 16 rounds of int4)
are never kept: downloading the state is cheaper then. Nor would more help a newcomer. It needs as
long for these as for the state itself, so if more are made during its download, its link is too
narrow for the rounds of this run. Of what is kept only the newest lies in memory, as much as half
an fp32 vector takes; the rest is in files without a name, mapped, so that the system has their
pages in memory while there is room. So they take up to 8 bytes a parameter of the disk (56 GB with
7 billion), while newcomers come. Nothing is written that would not leave a checkpoint its room, and
:data:`RESERVE` besides.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path

import torch

from gossip.exchange.bodies import as_bytes
from protocols.messages import Certificate
from protocols.tasks import Offload

Parts = Mapping[tuple[int, int], torch.Tensor]  # range -> uint8, encoded

SMALL = 64 * 1024 * 1024  # bytes that nobody minds
NOT_KEPT = "gone"  # the code of the refusal to give a part
MEMORY, ALL = 2, 8  # bytes an element of the vector: kept in memory, and kept at all
RESERVE = 2 * 1024**3  # bytes of the disk that rounds leave to all else that is written
MOST = 256  # rounds, however few bytes they have: a certificate may have hundreds of KB


def stored(parts: Parts, directory: Path) -> Parts:
    """The same parts from a file in ``directory`` that ends with them. Raises OSError."""
    with tempfile.TemporaryFile(dir=directory) as file:
        for data in parts.values():
            file.write(as_bytes(data))
        file.flush()
        whole = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE)
    found, at = {}, 0
    for key, data in parts.items():
        found[key] = torch.frombuffer(whole, dtype=torch.uint8, offset=at, count=len(data))
        at += len(data)
    return found


@dataclass
class Ledger:
    """The newest ``keep`` rounds of one fragment of ``size`` elements, oldest first.

    And those from ``needed()`` on, while the disk has room: ``room()`` says how many bytes it has.
    What is more than the bytes that may be in memory goes to ``directory`` (:meth:`excess`);
    without one only the newest round may be more.
    """

    keep: int
    size: int = 0
    directory: Path | None = None
    needed: Callable[[], int | None] = lambda: None
    room: Callable[[], float] = lambda: inf
    _rounds: OrderedDict[int, tuple[Certificate, Parts]] = field(default_factory=OrderedDict)
    _stored: set[int] = field(default_factory=set)  # rounds whose parts are in files

    def add(self, certificate: Certificate, parts: Parts) -> None:
        """Keep a committed round; the oldest make room."""
        self._rounds[certificate.outcome.round] = (certificate, parts)
        self._stored.discard(certificate.outcome.round)
        most = max(SMALL, (MEMORY if self.directory is None else ALL) * self.size)
        while len(self._rounds) > 1 and (self._bytes() > most or not self._wants_oldest()):
            oldest, _ = self._rounds.popitem(last=False)
            self._stored.discard(oldest)

    def _wants_oldest(self) -> bool:
        """Whether the oldest round is to be kept, as far as its bytes have room."""
        if len(self._rounds) <= self.keep:
            return True
        needed = self.needed()
        if needed is None or next(iter(self._rounds)) < needed or len(self._rounds) > MOST:
            return False
        to_come = sum(_size(parts) for _, parts in self.excess())
        return self.room() > (to_come + RESERVE if to_come or self._stored else 0)

    def clear(self) -> None:
        """Forget all: this node has moved to another chain."""
        self._rounds.clear()
        self._stored.clear()

    def excess(self) -> list[tuple[int, Parts]]:
        """Rounds whose parts are in memory and have no room there: to be :func:`stored`."""
        room, found = max(SMALL, MEMORY * self.size), []
        for round_, (_, parts) in reversed(self._rounds.items()):
            if parts and round_ not in self._stored:  # nothing takes no room, and makes no file
                room -= _size(parts)
                if room < 0 and self.directory is not None:
                    found.append((round_, parts))
        return found

    def replace(self, round_: int, before: Parts, now: Parts | None) -> None:
        """The parts of a round are in a file now, or there is no place for them (None)."""
        kept = self._rounds.get(round_)
        if kept is None or kept[1] is not before:
            return  # forgotten meanwhile
        self._rounds[round_] = (kept[0], {} if now is None else now)
        self._stored.add(round_)

    async def make_room(self, offload: Offload) -> None:
        """Move parts that have no room in memory to files, written in ``offload``."""
        if self.directory is None:
            return
        for round_, parts in self.excess():
            try:
                self.replace(round_, parts, await offload(partial(self._store, parts)))
            except OSError:  # no space: whoever missed the round downloads the state
                self.replace(round_, parts, None)

    def _store(self, parts: Parts) -> Parts:
        """See :func:`stored`; raises OSError as well where too little room would be left."""
        assert self.directory is not None
        if self.room() < _size(parts) + RESERVE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return stored(parts, self.directory)

    def _bytes(self) -> int:
        return sum(_size(parts) for _, parts in self._rounds.values())

    def certificate(self, round_: int) -> Certificate | None:
        """The certificate of a round, if it is kept."""
        found = self._rounds.get(round_)
        return found[0] if found else None

    def newest(self) -> Certificate | None:
        """The certificate of the last round."""
        return next(reversed(self._rounds.values()))[0] if self._rounds else None

    def since(self, round_: int, count: int) -> tuple[Certificate, ...]:
        """Up to ``count`` certificates in order from ``round_`` on; empty if that one is gone."""
        found: list[Certificate] = []
        while len(found) < count and (kept := self._rounds.get(round_ + len(found))):
            found.append(kept[0])
        return tuple(found)

    def part(self, round_: int, start: int, stop: int, digest: bytes) -> torch.Tensor | None:
        """The encoded bytes (uint8) of a certified part, if they are kept and have this digest."""
        found = self._rounds.get(round_)
        if found is None:
            return None
        certificate, parts = found
        for result in certificate.outcome.parts:
            if (result.start, result.stop, result.digest) == (start, stop, digest):
                return parts.get((start, stop))
        return None


def _size(parts: Parts) -> int:
    return sum(len(data) for data in parts.values())
