"""Signed envelopes: messages that are stored or passed on by others than their author.

The signature covers every field, so an envelope made for one purpose, run or time cannot be used
for another. A reader checks, in this order: bounds, purpose, run, that it is for anyone, expiry,
canonical form, the signature, and the body.

>>> data = seal(identity, record, purpose="record", expires=now + 60, sequence=7)
>>> opened = open_envelope(data, PeerRecord, purpose="record", now=now)
>>> opened.signer, opened.message

Times are seconds since the Unix epoch. Clocks of peers differ, so an envelope is still taken up
to :data:`CLOCK_SKEW` after its expiry.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar, cast

from protocols.errors import Malformed, Stale
from protocols.identity import Identity, PeerId, verify
from protocols.messages import Envelope
from protocols.wire import Message

CLOCK_SKEW = 30.0
MAX_LIFETIME = 86400.0  # an expiry further off than that is refused

_DOMAIN = b"atoll envelope 1\x00"  # what this key signs elsewhere begins differently

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class OpenedEnvelope(Generic[M]):
    """A message whose envelope held, and what the envelope said."""

    message: M
    signer: PeerId
    sequence: int
    expires: float


def seal(
    identity: Identity,
    message: Message,
    *,
    purpose: str,
    expires: float,
    sequence: int,
    run: bytes = b"",
) -> bytes:
    """Sign a message; returns the bytes of its :class:`~protocols.messages.Envelope`.

    ``sequence`` must grow with every envelope of this key, purpose and run.
    """
    unsigned = Envelope(
        signer=identity.peer_id,
        purpose=purpose,
        run=run,
        recipient="",
        sequence=sequence,
        expires=expires,
        body=message.encode(),
        signature=b"",
    )
    return replace(unsigned, signature=identity.sign(_signed(unsigned))).encode()


def open(  # read as envelope.open
    data: bytes,
    *,
    now: float | None,
    purpose: str | None = None,
    run: bytes | None = None,
    max_lifetime: float = MAX_LIFETIME,
) -> Envelope:
    """Check an envelope without knowing what is in it; ``None`` takes any purpose or run.

    With ``now=None`` the caller has to :func:`check_times`. Raises :class:`Malformed`,
    :class:`Stale` and :class:`~protocols.errors.BadSignature`.
    """
    envelope = cast(Envelope, Envelope.decode(data))
    if purpose is not None and envelope.purpose != purpose:
        raise Stale(f"an envelope for {envelope.purpose!r} where {purpose!r} is due")
    if run is not None and envelope.run != run:
        raise Stale("an envelope of another run")
    if envelope.recipient:
        raise Stale("an envelope for one recipient")
    if now is not None:
        check_times(envelope.expires, now, max_lifetime=max_lifetime)
    if envelope.encode() != data:
        raise Malformed("not in canonical form")
    verify(envelope.signer, envelope.signature, _signed(envelope))
    return envelope


def check_times(expires: float, now: float, *, max_lifetime: float = MAX_LIFETIME) -> None:
    """Raise :class:`Stale` for an envelope that has expired, or claims to live too long."""
    if expires + CLOCK_SKEW <= now:
        raise Stale(f"expired {now - expires:.0f} s ago")
    if expires > now + max_lifetime + CLOCK_SKEW:
        raise Stale("an envelope that claims to live too long")


def open_envelope(
    data: bytes,
    cls: type[M],
    *,
    purpose: str,
    now: float | None,
    run: bytes = b"",
    max_lifetime: float = MAX_LIFETIME,
) -> OpenedEnvelope[M]:
    """Check an envelope and decode the message in it.

    Raises :class:`Malformed`, :class:`Stale` and :class:`~protocols.errors.BadSignature`.
    """
    envelope = open(data, now=now, purpose=purpose, run=run, max_lifetime=max_lifetime)
    message: M = cls.decode(envelope.body)
    return OpenedEnvelope(message, envelope.signer, envelope.sequence, envelope.expires)


def _signed(envelope: Envelope) -> bytes:
    return _DOMAIN + replace(envelope, signature=b"").encode()
