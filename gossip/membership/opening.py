"""Whether a signed announcement is one, and is what it says. Pure."""

from __future__ import annotations

from functools import lru_cache

from protocols.envelope import OpenedEnvelope, check_times, open_envelope
from protocols.errors import Malformed
from protocols.messages import MAX_ANNOUNCE_BYTES, Announce


def open_announce(envelope: bytes, run: bytes, now: float) -> OpenedEnvelope[Announce]:
    """A peer's own announcement. Raises RemoteProtocolError for one that is not valid."""
    opened = _opened(envelope, run)
    check_times(opened.expires, now)
    return opened


@lru_cache(maxsize=1024)
def _opened(envelope: bytes, run: bytes) -> OpenedEnvelope[Announce]:
    if len(envelope) > MAX_ANNOUNCE_BYTES:  # it would be passed on, and that has this bound
        raise Malformed(f"an announcement of {len(envelope)} bytes exceeds {MAX_ANNOUNCE_BYTES}")
    opened = open_envelope(envelope, Announce, purpose="announce", run=run, now=None)
    if opened.message.peer != opened.signer:
        raise Malformed("an announcement of somebody else")
    return opened
