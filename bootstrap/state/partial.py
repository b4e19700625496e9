"""A state that is being downloaded, on disk as well: who is killed meanwhile goes on with it.

Which chunks are in place is nowhere noted: a chunk counts if its bytes have its hash, so whatever
a power cut has left is right or is fetched again. The state of a later round has no chunk in common
with it, as an outer step moves all elements. So what is here is of use as long as a source keeps
its copy (:data:`bootstrap.state.server.IDLE_S` after somebody has last read of it); or, where all
chunks are here, as long as others keep the rounds since. Copies are where chunks came from, so the
note names these peers, and without one there is nothing to go on with.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from bootstrap.state.chunks import Offer, check_offer
from bootstrap.state.digest import HASH_BYTES, StateBytes, count_chunks
from protocols.errors import ProtocolError
from protocols.identity import PeerId
from protocols.messages import StateOffer
from protocols.tasks import Offload

log = logging.getLogger(__name__)

SPARE = 2.0  # times the state's bytes are to be free before it is written to disk as well
MAX_LENGTH = 1 << 50  # of a state; only bounds what a damaged note may say
MAX_SOURCES = 8  # that are noted: the last ones that began to bring chunks


class PartialState:
    """One fragment's, in the file ``path``; beside it ``.offer``, and ``.whole`` once it is all.

    Methods wait for the disk and are to run ``beside`` the event loop, in threads that nothing
    else waits for. Errors of the disk end the keeping, and are raised to nobody.
    """

    def __init__(
        self,
        path: Path,
        run: bytes,
        beside: Offload = asyncio.to_thread,
        room: Callable[[], int] | None = None,
    ) -> None:
        """``room``: bytes of the disk that it may use half of; None: all that are free."""
        self._path, self._run, self.beside = path, run, beside
        self._room = room or (lambda: shutil.disk_usage(path.parent).free)
        self._note = path.with_name(f"{path.name}.offer")
        self._end = path.with_name(f"{path.name}.whole")
        self.round = 0  # of the state that is downloaded now
        self._handle: int | None = None
        self._offer: Offer | None = None
        self._sources: tuple[PeerId, ...] = ()
        self._using = threading.Lock()  # a number of a file that is closed may soon be another's

    @property
    def files(self) -> tuple[Path, ...]:
        """All that there may be of it."""
        return self._note, self._draft, self._end, self._path  # without its note the rest is none

    @property
    def whole(self) -> bool:
        """Whether all chunks had come."""
        return self._end.exists()

    def offer(self) -> StateOffer | None:
        """The offer of what is here in part, its ``readers`` those whom it came from.

        None: there is nothing of this run.
        """
        run = self._run
        try:
            with self._note.open("rb") as note:
                raw = note.read(len(run) + HASH_BYTES + StateOffer.MAX_BYTES)
            begins = len(run) + HASH_BYTES
            if raw[:begins] != run + blake3(raw[begins:]).digest():
                return None
            found: StateOffer = StateOffer.decode(raw[begins:])
            check_offer(found, min(found.length, MAX_LENGTH))
        except (OSError, ProtocolError):
            return None
        return found

    def accept(self, offer: Offer) -> None:
        """Keep what comes of this state from now on. What is here of another one is removed."""
        known = self.offer()
        try:
            if known is None or known.digest != offer.digest:
                self.drop()
                if self._room() < SPARE * offer.length:
                    return
                with self._path.open("wb") as file:
                    file.truncate(offer.length)
            handle = os.open(self._path, os.O_RDWR)
        except OSError as error:
            self._failed(error)
            return
        with self._using:
            self._close()
            self._handle, self._offer = handle, offer
            self._sources = known.readers if known and known.digest == offer.digest else ()

    def fill(self, state: StateBytes, offer: Offer) -> set[int]:
        """Read into ``state`` what is here of it; returns the chunks whose hashes are right."""
        found: set[int] = set()
        try:
            with self._path.open("rb", buffering=0) as file:
                for index in range(count_chunks(offer.length, offer.chunk)):
                    start, hasher = index * offer.chunk, blake3()
                    file.seek(start)
                    for piece in state.pieces(start, min(start + offer.chunk, offer.length)):
                        if file.readinto(piece) != len(piece):
                            break
                        hasher.update(piece)
                    if hasher.digest() == offer.hashes[index * HASH_BYTES :][:HASH_BYTES]:
                        found.add(index)
        except OSError as error:
            self._failed(error)
        return found

    def write(self, start: int, data: memoryview, source: PeerId | None) -> None:
        """A chunk that was checked; ``source`` has a copy, None: it came from another newcomer."""
        try:
            with self._using:
                if self._handle is not None and not os.fstat(self._handle).st_nlink:
                    self._close()  # removed meanwhile, as a checkpoint needed its room
                while self._handle is not None and data:
                    written = os.pwrite(self._handle, data, start)
                    start, data = start + written, data[written:]
                if self._handle is not None and source and source not in self._sources:
                    self._sources = (*self._sources, source)[-MAX_SOURCES:]
                    self._write_down()
        except OSError as error:  # a full disk
            self._failed(error)

    def finish(self) -> None:
        """All chunks are here: keep them until :meth:`drop`."""
        with suppress(OSError):
            if self._note.exists():
                self._end.touch(0o600)

    def close(self) -> None:
        """Write nothing more, and keep what is here."""
        with self._using:
            self._close()

    def drop(self) -> None:
        """Remove what is here."""
        self.close()
        for path in self.files:
            with suppress(OSError):
                path.unlink()

    @property
    def _draft(self) -> Path:
        return self._note.with_name(f"{self._note.name}.draft")

    def _write_down(self) -> None:
        offer = self._offer
        assert offer is not None
        shape = offer.digest, offer.length, offer.chunk, offer.hashes
        made = StateOffer(self.round, *shape, readers=self._sources).encode()
        with self._draft.open("wb") as note:
            note.write(self._run + blake3(made).digest() + made)
            note.flush()
            os.fsync(note.fileno())
        self._draft.replace(self._note)

    def _close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _failed(self, error: OSError) -> None:
        log.warning("the download is not kept on disk: %s", error)
        self.drop()
