"""Newcomers that give each other what they have of a state, while they are still downloading it.

Where a run begins, or a link comes back, many want the same state of the one peer that has it. If
only that peer sent it, the last would have it once it had gone out for each of them. So an offer
names the other readers of the copy; newcomers ask each other which chunks are in place, and take
from peers with the whole state what no other newcomer has yet (as in BitTorrent, Cohen 2003). What
comes from a fellow is checked by its hash like all chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from protocols.asking import check_run
from protocols.errors import RemoteRefused
from protocols.identity import PeerId
from protocols.messages import ChunkRequest, InPlace, InPlaceRequest
from protocols.transport import Feed, Transport


class Shared(Protocol):
    """A download as far as it has come."""

    @property
    def digest(self) -> bytes:
        """Of the state."""
        ...

    def in_place(self) -> bytes:
        """A bit for each chunk, the lowest of a byte first."""
        ...

    def chunk_in_place(self, index: int, used: Callable[[], None]) -> Feed | None:
        """A chunk, None where it is not here.

        ``used``: see :class:`~bootstrap.state.copies.ChunkFeed`.
        """
        ...

    def is_shared_by(self, peer: PeerId) -> None:
        """A peer downloads the same."""
        ...


class Sharing:
    """Answers ``fellow`` calls and ``shared`` pulls of those who download what this node does."""

    def __init__(self, transport: Transport, run: bytes) -> None:
        self._run = run
        self._open: dict[tuple[int, int], Shared] = {}  # by fragment and round
        transport.on_call("fellow", self._on_fellow)
        transport.on_pull("shared", self._on_shared)

    @contextmanager
    def open(self, fragment: int, round_: int, shared: Shared) -> Iterator[None]:
        """Give others what comes of a state, as long as it is being downloaded."""
        key = (fragment, round_)
        self._open[key] = shared
        try:
            yield
        finally:
            if self._open.get(key) is shared:
                del self._open[key]

    async def _on_fellow(self, peer: PeerId, body: bytes) -> bytes:
        request = InPlaceRequest.decode(body)
        shared = self._of(request.run, request.fragment, request.round)
        if shared.digest != request.digest:
            raise RemoteRefused("gone", "another state is downloaded here")
        shared.is_shared_by(peer)
        return InPlace(shared.in_place()).encode()

    async def _on_shared(self, peer: PeerId, header: bytes) -> Feed:
        del peer  # whoever is admitted may have it
        request = ChunkRequest.decode(header)
        shared = self._of(request.run, request.fragment, request.round)

        def goes_on() -> None:  # once the download has ended the vectors change
            if self._open.get((request.fragment, request.round)) is not shared:
                raise RemoteRefused("gone", "nothing is downloaded here any more")

        feed = shared.chunk_in_place(request.index, goes_on)
        if feed is None:
            raise RemoteRefused("gone", f"chunk {request.index} is not here")
        return feed

    def _of(self, run: bytes, fragment: int, round_: int) -> Shared:
        check_run(run, self._run)
        if (found := self._open.get((fragment, round_))) is None:
            raise RemoteRefused("gone", "nothing is downloaded here")
        return found
