"""The exceptions of Atoll, in one tree.

::

    AtollError
    ├── OperatorError            shown to the person at the terminal: what, why, what to do, code
    ├── TransportError           the other end could not be used
    │   ├── Unreachable          no connection: DNS, refused, time-out, not Atoll, TLS
    │   ├── IdentityMismatch     somebody else answers at that address
    │   ├── TransferStalled      bytes stopped flowing, or the deadline passed
    │   └── RemoteRefused        the other end answered with an error of its own
    └── ProtocolError
        ├── LocalProtocolError   our own code broke the rules: a bug
        └── RemoteProtocolError  the peer broke the rules: refuse, count, go on
            ├── Malformed        does not decode, or exceeds a bound
            │   └── OtherVersion another version of Atoll may have made it so
            ├── BadSignature     signature, signer or certificate does not verify
            ├── Contradiction    signed two things of which one excludes the other
            │   └── Disagreement several peers say what only one of them can be right in
            ├── Stale            expired, replayed, or of another run, round or recipient
            ├── Late             what is due does not come, or not in time
            ├── Crowded          too many identities from one place
            └── NonFinite        a tensor with NaN or infinity
"""

from __future__ import annotations

import errno
from enum import StrEnum
from typing import ClassVar


def printable(text: str, kept: str = "") -> str:
    """Text in which others may have had a say, fit for a terminal and a log."""
    return "".join(c if c.isprintable() or c in kept else "?" for c in text)


def reason(error: Exception) -> str:
    """Why, in an exception's words; of the system's errors without their number and path."""
    return getattr(error, "strerror", None) or str(error)


def kind_and_reason(error: Exception, most: int = 500) -> str:
    """What an exception of a library is and says, at most so many characters of it."""
    return f"{type(error).__name__}: {error}"[:most]


def is_full(error: BaseException | None) -> bool:
    """Whether this machine's disk is, or what this user may have of it."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


# what to do where protocol versions differ (E202)
UPGRADE = "install the version the swarm uses (docs/operators/upgrade.md)"


class AtollError(Exception):
    """Base of everything Atoll raises on purpose."""


class OperatorError(AtollError):
    """An error for the operator: printed as text, as a traceback only by a script that it ends.

    ``code`` is one of the codes of docs/errors.md; ``exit_code`` is the process's exit status.
    """

    def __init__(self, code: str, what: str, why: str, fix: str, *, exit_code: int = 1) -> None:
        what, why, fix = (printable(text, kept="\n") for text in (what, why, fix))
        super().__init__(f"{what}: {why}")
        self.code = code
        self.what = what
        self.why = why
        self.fix = fix
        self.exit_code = exit_code
        self.add_note(f"  {code}; fix: {fix}")  # a traceback has its message alone, and notes

    def text(self) -> str:
        """The three lines an operator reads."""
        return f"error {self.code}: {self.what}\n  why: {self.why}\n  fix: {self.fix}"


class TransportError(AtollError):
    """The other end could not be used; retry elsewhere or later."""


class Why(StrEnum):
    """Reasons for :class:`Unreachable`, told apart for the operator (E101)."""

    DNS = "the name does not resolve"
    REFUSED = "nothing listens there (connection refused)"
    TIMEOUT = "no answer in time"
    NOT_ATOLL = "something that is not Atoll answers there"
    TLS = "the TLS handshake failed"
    RESET = "the connection broke"
    NO_ADDRESS = "no address is known for this peer"
    SELF = "that is this node itself"
    RELAY = "its relay does not bring the two together"
    NO_FILES = "this machine has no room for another connection"


class Unreachable(TransportError):
    """No usable connection to a peer or address."""

    def __init__(self, target: str, why: Why, detail: str = "") -> None:
        super().__init__(f"{target}: {why.value}{f' ({detail})' if detail else ''}")
        self.target = target
        self.why = why
        self.detail = detail


class IdentityMismatch(TransportError):
    """Another key than the expected one answered at that address (E103)."""

    def __init__(self, target: str, expected: str, got: str) -> None:
        super().__init__(f"{target}: expected {expected}, got {got or 'no valid identity'}")
        self.target = target
        self.expected = expected
        self.got = got


class TransferStalled(TransportError):
    """A body stopped flowing, fell under its minimum rate, or passed its deadline."""


class RemoteRefused(TransportError):
    """The peer's handler refused the request; ``code`` is a short machine-readable word."""

    def __init__(self, code: str, detail: str = "") -> None:
        code, detail = printable(code), printable(detail)
        super().__init__(f"{code}{f': {detail}' if detail else ''}")
        self.code = code
        self.detail = detail


class ProtocolError(AtollError):
    """Somebody broke the rules of the protocol."""


class LocalProtocolError(ProtocolError):
    """Our own code broke the rules: a bug, never caught."""


class Reason(StrEnum):
    """What refusals are counted by: one for each class of :class:`RemoteProtocolError`."""

    MALFORMED = "malformed"
    SIGNATURE = "signature"
    CONTRADICTION = "contradiction"
    STALE = "stale"
    LATE = "late"
    CROWDED = "crowded"
    NON_FINITE = "non-finite"
    OTHER = "other"


class RemoteProtocolError(ProtocolError):
    """The peer broke the rules: its message is refused and counted, nothing else happens."""

    reason: ClassVar[Reason] = Reason.OTHER

    @staticmethod
    def of(what: str, error: RemoteProtocolError | TransportError) -> RemoteProtocolError:
        """The same with ``what`` in front; of a peer that could not be used: :class:`Late`."""
        kind = type(error) if isinstance(error, RemoteProtocolError) else Late
        return kind(f"{what}: {error}")


class Malformed(RemoteProtocolError):
    """Bytes that do not decode, or exceed a bound."""

    reason = Reason.MALFORMED


class OtherVersion(Malformed):
    """What is not of a form that this version of Atoll knows, but may be of another's (E202)."""


class BadSignature(RemoteProtocolError):
    """A signature, signer or certificate that does not verify."""

    reason = Reason.SIGNATURE


class Contradiction(RemoteProtocolError):
    """Two things under one signature of which one excludes the other."""

    reason = Reason.CONTRADICTION


class Disagreement(Contradiction):
    """Peers, each under a valid signature, say things of which only one can be true."""


class Stale(RemoteProtocolError):
    """A message that expired, was seen before, or is meant for another run, round or peer."""

    reason = Reason.STALE


class Late(RemoteProtocolError):
    """What a peer owes does not come, or not in time: others go on without it."""

    reason = Reason.LATE


class Crowded(RemoteProtocolError):
    """One more identity from a place that has as many as it may."""

    reason = Reason.CROWDED


class NonFinite(RemoteProtocolError):
    """A tensor with NaN or infinity; it is dropped before it can reach an average."""

    reason = Reason.NON_FINITE
