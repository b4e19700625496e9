"""The outer state as it is at one moment, on its way to the disk while rounds go on.

It is as large as the model or several times that, so there is no copy of it: it is written from
where it lies. Only what is not written yet when a round is about to change it is copied, if the
memory for that is there; else the round waits until the disk has it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from bootstrap.signed_manifest import SignedManifest
from node.checkpoints.outer_files import numbers
from node.checkpoints.tensor_files import PIECE, Bytes, Entry
from protocols.tasks import Offload

SPARE = 1.1  # of what is to be copied: others take memory meanwhile


class GivenUpError(Exception):
    """Nobody wants the file any more."""


@dataclass
class _Part:
    """What one fragment has of a vector; ``values`` begin behind what was written already."""

    fragment: int
    values: Tensor  # flat


@dataclass
class FrozenOuter:
    """What :mod:`node.checkpoints.outer_files` is to write: vectors by name, by fragment.

    A fragment's vectors may change once :meth:`release` has returned; whoever changes them calls
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
            shape = (sum(len(part.values) for part in parts),)
            found.append(Entry(name, dtype, shape, partial(self._pieces, parts)))
        return found

    def _pieces(self, parts: Sequence[_Part]) -> Iterator[Bytes]:
        buffer = torch.empty(PIECE // parts[0].values.element_size(), dtype=parts[0].values.dtype)
        for part in parts:
            while True:
                with self._lock:
                    if self._given_up:
                        raise GivenUpError
                    piece = part.values[: len(buffer)]
                    count = len(piece)
                    buffer[:count].copy_(piece)
                    part.values = part.values[count:]
                if not count:
                    break
                data: Bytes = buffer[:count].view(torch.uint8).numpy()
                yield data

    def close(self) -> None:
        """The file is written, or nobody wants it: a write or copy that is under way ends.

        Without the lock, which a copy of much holds for seconds.
        """
        self._given_up = True
        self._over.set()

    async def release(self, fragment: int) -> None:
        """Return when what a fragment's vectors are now is written, or has been copied."""
        async with self._measuring:  # what one fragment's copy takes is not there for another's
            parts = [
                part for each in self._parts.values() for part in each if part.fragment == fragment
            ]
            needed = sum(part.values.nbytes for part in parts)
            if not needed or self._given_up:
                return
            room = self.room()
            if room is None or needed * SPARE <= room:
                await self.offload(lambda: self._copy(parts))
                return
        await self._over.wait()

    def _copy(self, parts: Sequence[_Part]) -> None:
        for part in parts:
            with self._lock:  # vector by vector, so that the file goes on in between
                if self._given_up:
                    return
                part.values = part.values.clone()
