"""Heartbeats of a few bytes that nobody but their origin can make. Sans-IO.

A signature takes 64 bytes, and in a large swarm everybody hears every heartbeat of everybody. So an
announcement, which is signed, carries the end of a chain of hashes (Lamport, "Password
authentication with insecure communication", 1981), and the heartbeats between it and the next
announcement show the chain's earlier values, one after the other. Whoever has one can check the
next, and cannot make it: for that the hash would have to be inverted. Each value is hashed with its
origin and its number, so no attempt counts for two of them, and a chain is of use no longer than
its announcement: 80 bits are enough.

On the wire a beat is :data:`BEAT_BYTES` long: the tag of the announcement that it belongs to, its
number in the chain, and the value. The announcement itself is beat 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from blake3 import blake3

from protocols.identity import PeerId
from protocols.messages import BEAT_BYTES, PULSE_BYTES, TAG_BYTES

LENGTH = 64  # beats of one announcement


@dataclass(frozen=True, slots=True)
class Beat:
    """One sign of life, as it travels."""

    tag: bytes
    number: int
    value: bytes

    def packed(self) -> bytes:
        """Its bytes; beats stand one behind the other. An announcement without any has no value."""
        return self.tag + bytes([self.number]) + self.value.ljust(PULSE_BYTES, b"\x00")


def beats_in(packed: bytes) -> Iterator[Beat]:
    """The beats in a message; what is left over at its end is none."""
    for at in range(0, len(packed) - BEAT_BYTES + 1, BEAT_BYTES):
        number = at + TAG_BYTES
        yield Beat(packed[at:number], packed[number], packed[number + 1 : number + 1 + PULSE_BYTES])


def tag_of(data: bytes) -> bytes:
    """The short name of an announcement in its envelope, or of a sketch."""
    return blake3(data).digest(TAG_BYTES)


def tags_in(packed: bytes) -> set[bytes]:
    """The tags in a message."""
    return {packed[at : at + TAG_BYTES] for at in range(0, len(packed), TAG_BYTES)}


def packed(tags: Iterable[bytes]) -> bytes:
    """Tags as they travel."""
    return b"".join(sorted(tags))


class HashChain:
    """The beats of one announcement, as its origin makes them."""

    def __init__(self, peer: PeerId, secret: bytes) -> None:
        value = blake3(b"atoll pulse\x00" + secret).digest(PULSE_BYTES)
        values = [value]
        for number in range(LENGTH, 0, -1):
            values.append(value := _before(peer, number, value))
        self._values = values[::-1]
        self.number = 0  # of the last beat

    @property
    def pulse(self) -> bytes:
        """What the announcement says: everything that follows leads to it."""
        return self._values[0]

    @property
    def spent(self) -> bool:
        """Whether there are no more beats in it."""
        return self.number >= LENGTH

    @property
    def value(self) -> bytes:
        """That of the last beat."""
        return self._values[self.number]

    def next(self) -> bytes:
        """The value of the next beat."""
        self.number += 1
        return self.value


def leads(peer: PeerId, number: int, value: bytes, to: int, known: bytes) -> bool:
    """Whether beat ``number`` of a peer's chain comes after beat ``to``, whose value is known."""
    if not to < number <= LENGTH:
        return False
    for one in range(number, to, -1):
        value = _before(peer, one, value)
    return value == known


def _before(peer: PeerId, number: int, value: bytes) -> bytes:
    """The value of the beat before ``number``."""
    return blake3(b"atoll beat\x00" + peer.encode() + bytes([number]) + value).digest(PULSE_BYTES)
