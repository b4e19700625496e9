"""The outer state as it is at one moment, on its way to the disk while rounds go on.

It is as large as the model or several times that, so there is no copy of it: it is written from
where it lies. Only what is not written yet when a round is about to change it is copied, if the
memory for that is there; else the round waits until the disk has it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from bootstrap.signed_manifest import SignedManifest
from node.checkpoints.outer_files import numbers
from node.checkpoints.tensor_files import PIECE, Bytes, Entry
from protocols.tasks import Offload

COPIED = 1 << 26  # bytes that are copied at once, of which each is an allocation of its own
SPARE = 1.1  # of what is to be copied: others take memory meanwhile


class GivenUpError(Exception):
    """Nobody wants the file any more."""


@dataclass
class _Part:
    """What one fragment has of a vector that is not written yet: flat, and first what is in place.

    It is written from the front and copied from the back, so that what is written is not copied.
    """

    fragment: int
    values: Tensor  # where they lie
    copied: deque[Tensor] = field(default_factory=deque)  # what follows these and `copying`
    copying: Tensor = field(init=False)  # what follows them and is being copied, where it lies

    def __post_init__(self) -> None:
        self.copying = self.values[:0]

    @property
    def left(self) -> int:
        """Elements that are to be written."""
        return len(self.values) + len(self.copying) + sum(map(len, self.copied))

    def take(self, most: int) -> Tensor:
        """Up to so many of the first elements, which are to be written; none: all are."""
        if len(self.values):
            taken, self.values = self.values[:most], self.values[most:]
            return taken
        if len(self.copying) or not self.copied:
            taken, self.copying = self.copying[:most], self.copying[most:]
            return taken
        first = self.copied.popleft()
        if len(first) > most:
            self.copied.appendleft(first[most:])
        return first[:most]

    def begin_copy(self, most: int) -> Tensor:
        """Up to so many elements to be copied, the last that lie where they did; or none."""
        first = max(0, len(self.values) - most)
        self.copying, self.values = self.values[first:], self.values[:first]
        return self.copying

    def end_copy(self, copy: Tensor) -> None:
        """They are copied; some of them may have been written meanwhile."""
        if left := len(self.copying):
            self.copied.appendleft(copy[len(copy) - left :])
        self.copying = self.values[:0]


@dataclass
class FrozenOuter:
    """What :mod:`node.checkpoints.outer_files` is to write: vectors by name, by fragment.

    A fragment's vectors may change once :meth:`thaw` has returned; whoever changes them calls
    it. ``room`` tells how many bytes may be taken, None where nothing is known of that.
    """

    signed: SignedManifest
    vectors: Mapping[str, Sequence[Tensor]]
    offload: Offload
    room: Callable[[], int | None] = lambda: None
    weights: tuple[float, ...] = ()  # as in OuterFiles
    rounds: tuple[int, ...] = ()
    _parts: dict[str, list[_Part]] = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _measuring: asyncio.Lock = field(default_factory=asyncio.Lock)
    _over: asyncio.Event = field(default_factory=asyncio.Event)
    _given_up: bool = False

    def __post_init__(self) -> None:
        self._parts = {
            name: [_Part(fragment, part) for fragment, part in enumerate(parts)]
            for name, parts in self.vectors.items()
        }

    def entries(self) -> list[Entry]:
        """What the file is to have. Their pieces are read once, in any thread."""
        found = numbers(self.weights, self.rounds)
        for name, parts in self._parts.items():
            dtype = str(parts[0].values.dtype).removeprefix("torch.")
            with self._lock:  # a copy may be under way
                shape = (sum(part.left for part in parts),)
            found.append(Entry(name, dtype, shape, partial(self._pieces, parts)))
        return found

    def _pieces(self, parts: Sequence[_Part]) -> Iterator[Bytes]:
        buffer = torch.empty(PIECE // parts[0].values.element_size(), dtype=parts[0].values.dtype)
        for part in parts:
            while True:
                with self._lock:
                    if self._given_up:
                        raise GivenUpError
                    piece = part.take(len(buffer))
                    count = len(piece)
                    buffer[:count].copy_(piece)
                if not count:
                    break
                data: Bytes = buffer[:count].view(torch.uint8).numpy()
                yield data

    def close(self) -> None:
        """The file is written, or nobody wants it: a write or copy that is under way ends."""
        self._given_up = True
        self._over.set()

    async def thaw(self, fragment: int) -> None:
        """Return when what a fragment's vectors are now is written, or has been copied."""
        async with self._measuring:  # what one fragment's copy takes is not there for another's
            parts = [
                part for each in self._parts.values() for part in each if part.fragment == fragment
            ]
            if self._given_up:
                return
            needed = sum(part.values.nbytes for part in parts)
            room = self.room() if needed else None
            if room is None or needed * SPARE <= room:  # also of nothing: the last may be in hand
                await self.offload(lambda: self._copy(parts))
                return
        await self._over.wait()

    def _copy(self, parts: Sequence[_Part]) -> None:
        for part in parts:
            while not self._given_up:
                with self._lock:
                    piece = part.begin_copy(COPIED // part.values.element_size())
                if not len(piece):
                    break
                copy = piece.clone()  # without the lock: the file goes on meanwhile
                with self._lock:
                    part.end_copy(copy)
