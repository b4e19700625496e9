"""How an owner merges where groups bring sums instead of slices (:mod:`gossip.plans.grouping`).

A relay streams the sum of share·scale·x over its group chunk by chunk, and with each chunk a mark
of whose slices are in it, so the owner knows of every contributor how much is merged, as without
groups. Sums are divided by the power of two that brings them to the magnitude of a mean, which
costs no bit and keeps them within what a codec carries (:func:`magnitude`). As everybody's chunks
come in order, what is merged of a contributor is a prefix, whoever brought it. So a contributor may
come by itself from any chunk on: when its relay is dropped, the group goes on with the chunk that
it would have brought next.

A sum cannot be taken apart. One that contains what its contributor has brought by itself
meanwhile is refused, and its relay dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from gossip.exchange.drains import MergeDrain
from gossip.exchange.merging import Contributions, PartMerge
from gossip.exchange.slicing import add_up, squared_norm
from protocols.codecs import RangeCodec
from protocols.errors import Late, Malformed, NonFinite, RemoteProtocolError, RemoteRefused
from protocols.identity import PeerId

Dropped = Callable[[PeerId, tuple[PeerId, ...], RemoteProtocolError], None]


def mark_size(members: int) -> int:
    """Bytes of a mark that tells which of so many are in a chunk."""
    return -(-members // 8)


def mark_of(present: Sequence[bool]) -> bytes:
    """A bit for each contributor of a group, the first one lowest."""
    bits = sum(1 << at for at, here in enumerate(present) if here)
    return bits.to_bytes(mark_size(len(present)), "little")


def magnitude(shares: Iterable[float]) -> float:
    """What the sum of a group with these shares is divided by: the next power of two.

    Relay and owner must find the same one; ``sum`` depends on the version of Python.
    """
    return 2.0 ** math.frexp(math.fsum(shares))[1]


def marked(mark: bytes, members: Sequence[PeerId]) -> list[PeerId]:
    """Who is in a chunk; raises :class:`Malformed` for bits of nobody."""
    bits = int.from_bytes(mark, "little")
    if bits >> len(members):
        raise Malformed("a mark of contributors that are not in the group")
    return [peer for at, peer in enumerate(members) if bits >> at & 1]


class JointMerge(PartMerge):
    """A part that relays bring sums for: ``collected`` names each relay's contributors.

    ``dropped(relay, members, why)`` tells that a relay is not waited for any more, or has given up
    on some: these ``members`` have to send their slices themselves now.
    """

    def __init__(
        self,
        codec: RangeCodec,
        start: int,
        stop: int,
        contributions: Contributions,
        *,
        collected: Mapping[PeerId, tuple[PeerId, ...]],
        dropped: Dropped,
        **kwargs: Any,
    ) -> None:
        super().__init__(codec, start, stop, contributions, **kwargs)
        self.collected = dict(collected)
        self._dropped = dropped
        self._brought = dict.fromkeys(collected, 0)  # chunks, by relays that are not dropped
        self._via = {peer: relay for relay, peers in collected.items() for peer in peers}
        self._magnitudes = {
            relay: magnitude(self._shares[peer] for peer in peers)
            for relay, peers in collected.items()
        }
        # a divided sum is no longer than the longest slice in it; and it is encoded once more
        longer = self.codec.longer
        limits, scales = contributions.limits, contributions.scales
        self._sum_room: dict[PeerId, float] = {}  # in squared norm
        for relay, peers in collected.items():
            if all(peer in limits for peer in peers):
                bound = longer * max(limits[peer] * scales.get(peer, 1.0) for peer in peers)
                self._sum_room[relay] = bound * bound

    # --- what may be asked from any thread -------------------------------------------------------

    @property
    def empty(self) -> bool:
        """Nobody's values are in or will come, and I have none to add."""
        return super().empty and not self._brought

    def waits_for(self) -> set[PeerId]:
        """Contributors that have yet to bring something themselves."""
        return self.awaited() - set(self._via)

    def open_to(self, peer: PeerId) -> bool:
        """Whether a contributor may bring its slice; it may whether or not it has a relay."""
        return peer in self.awaited()

    def waits_for_relays(self) -> set[PeerId]:
        """Which relays have yet to bring something."""
        waiting, via = self.awaited(), dict(self._via)
        return {via[peer] for peer in waiting if peer in via}

    @property
    def relays_done(self) -> int:
        """How many relays have brought all."""
        return sum(count == len(self.chunks) for count in tuple(self._brought.values()))

    def elements_by(self, relay: PeerId) -> int:
        """How many elements a relay has brought, counted from the part's beginning."""
        number = self._brought.get(relay, 0)
        return self.chunks[number - 1].stop - self.start if number else 0

    def brings(self, relay: PeerId) -> bool:
        """Whether a relay's sums are taken."""
        return relay in self._brought

    # --- where data is handled -------------------------------------------------------------------

    def add(self, peer: PeerId, index: int, data: torch.Tensor) -> None:
        """As :meth:`PartMerge.add`: from then on the contributor comes by itself."""
        super().add(peer, index, data)
        self._via.pop(peer, None)

    def add_sum(self, relay: PeerId, index: int, data: torch.Tensor, mark: bytes) -> None:
        """A group's chunk, encoded (uint8), and whose slices are in it; one brought before is
        ignored.

        Raises RemoteRefused ``late`` where it is too late for it, and NonFinite or Malformed for
        what does not decode; the relay is dropped in all these cases.
        """
        if relay not in self._brought:
            raise RemoteRefused("late", "merged without its group")
        if index != self._brought[relay]:
            if index < self._brought[relay]:
                return
            raise Malformed("a chunk before its turn")
        try:
            present = marked(mark, self.collected[relay])
            self._check_present(relay, index, present)
            if present:
                self._take_sum(relay, index, data)
        except (NonFinite, Malformed, RemoteRefused) as error:
            self.drop(relay, RemoteProtocolError.of("its group's sum", error))
            raise
        self._brought[relay] += 1
        for peer in present:
            self._reached[peer] += 1
            self._counts[index] += 1
            self._weights[index] += self._shares[peer]
            self._missing[index] -= peer in self._expected
        self._let_come(relay, set(self.collected[relay]) - set(present))
        self._advance()

    def sum_drain(self, relay: PeerId, first: int) -> MergeDrain:
        """For a group's sums from the ``first`` chunk on; behind each comes its mark."""
        mark = mark_size(len(self.collected[relay]))
        moved, whole = partial(self.sum_moved, relay), partial(self.add_sum, relay)
        return MergeDrain(self.chunks, first, moved, whole, lambda index: mark)

    def sum_moved(self, relay: PeerId, count: int) -> None:
        """As :meth:`PartMerge.moved`, of a relay."""
        if relay not in self._brought:
            raise RemoteRefused("late", "merged without its group")
        self.arrived[relay] = self.arrived.get(relay, 0) + count

    def drop(self, relay: PeerId, why: RemoteProtocolError) -> None:
        """Take no more of a relay; its group is to come by itself."""
        if self._brought.pop(relay, None) is None:
            return
        members = [peer for peer, through in self._via.items() if through == relay]
        for peer in members:
            del self._via[peer]
        if not self._closed and not self.done:
            waiting = self.waits_for()
            self._dropped(relay, tuple(peer for peer in members if peer in waiting), why)

    def close(self) -> None:
        """As :meth:`PartMerge.close`."""
        super().close()
        self._brought.clear()
        self._dropped = _nobody

    # --- inside ----------------------------------------------------------------------------------

    def _let_come(self, relay: PeerId, absent: set[PeerId]) -> None:
        """A relay has given these up: maybe only their link to it failed, and they can reach me."""
        absent = {peer for peer in absent if self._via.get(peer) == relay}
        if relay in absent:  # it has nothing to bring itself
            absent.discard(relay)
            self.give_up(relay)
        for peer in absent:
            del self._via[peer]
        absent &= self.waits_for()
        if absent:
            why = Late("has not got all slices of its group")
            self._dropped(relay, tuple(sorted(absent)), why)

    def _check_present(self, relay: PeerId, index: int, present: Sequence[PeerId]) -> None:
        if index < self.merged:
            raise RemoteRefused("late", "merged without its group")
        for peer in present:
            if self._reached.get(peer) != index or self._via.get(peer) != relay:
                raise RemoteRefused("late", "a sum with what has come by itself as well")

    def _take_sum(self, relay: PeerId, index: int, data: torch.Tensor) -> None:
        """Add a sum, or raise NonFinite or Malformed and add nothing."""
        total, scratch = self._sum(index), self._scratch()
        values = self._finite(index, data, scratch)
        if relay in self._sum_room:
            square = squared_norm(values)
            if square > self._sum_room[relay]:
                raise Malformed("a sum that is longer than all that is in it is said to be")
            self._sum_room[relay] -= square
        add_up(total, values, self._magnitudes[relay], first=not self._counts[index])
        self._spare.append(scratch)


def _nobody(relay: PeerId, members: tuple[PeerId, ...], why: RemoteProtocolError) -> None:
    """The round is over here."""
