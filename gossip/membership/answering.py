"""The answer to who is there, bounded in number and size: announcements, heartbeats, sketches."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from blake3 import blake3

from gossip.membership.pulse import Beat, tag_of
from gossip.membership.sketch import name_in
from protocols.bounds import MAX_PEERS
from protocols.messages import BEAT_BYTES, MAX_ANNOUNCE_BYTES, TAG_BYTES, Known

MAX_KNOWN = 256  # announcements in an answer, and sketches
NO_BEAT = Beat(b"", 0, b"")


@dataclass(frozen=True)
class Held:
    """What is held of one member, and may be passed on."""

    envelope: bytes  # its announcement
    beat: Beat  # its newest heartbeat
    sketch: bytes


def short_name(envelope: bytes) -> bytes:
    """The short name of an announcement, for those who have it."""
    return blake3(envelope).digest(8)


def answer(held: Iterable[Held], but: Container[bytes], want: Container[bytes] | None) -> Known:
    """What is held, in this order, without announcements whose :func:`short_name` is in ``but``.

    With ``want``, only announcements and sketches with these tags.
    """
    room = Known.MAX_BYTES - MAX_ANNOUNCE_BYTES - BEAT_BYTES * MAX_PEERS
    found, sketches, beats = list[bytes](), list[bytes](), list[Beat]()

    def put(data: bytes, into: list[bytes]) -> None:
        nonlocal room
        room -= len(data) + 8
        if room > 0 and len(into) < MAX_KNOWN:
            into.append(data)

    for one in held:
        tag, beat, sketch = tag_of(one.envelope), one.beat, one.sketch
        if short_name(one.envelope) not in but if want is None else tag in want:
            put(one.envelope, found)
        if beat.value and len(beats) < MAX_PEERS and (want is None or tag in want):
            beats.append(beat)
        named = beat.value and name_in(sketch) != sketch  # the announcement has its name alone
        if named and (not but if want is None else name_in(sketch)[:TAG_BYTES] in want):
            put(sketch, sketches)
    return Known(tuple(found), b"".join(beat.packed() for beat in beats), tuple(sketches))
