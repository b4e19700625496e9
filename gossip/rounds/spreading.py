"""How one member tells all others of a large roster something: over two hops.

A leader that sent its plan to 255 members would fill its link with it: it is tens of kilobytes
long. So beyond :data:`SMALL` members it goes to about √N of them, and each passes it on to about
√N more, as signed by its author (:class:`~protocols.messages.Passed`). If a member does not take
what it is to pass on, those that it would have told are told directly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from blake3 import blake3

from protocols.identity import Identity, PeerId, verify
from protocols.messages import Passed, Plan, Votes

SMALL = 16  # members of a roster in which everybody tells everybody everything

_PASSED = b"atoll passed\x00"


def legs(peers: Sequence[PeerId]) -> list[tuple[PeerId, ...]]:
    """Who is told by whom: the first of each is told by the author, and tells the others."""
    if len(peers) < SMALL:
        return [(peer,) for peer in peers]
    count = math.isqrt(max(0, len(peers) - 1)) + 1
    return [tuple(peers[at::count]) for at in range(min(count, len(peers)))]


def passed(identity: Identity, run: bytes, message: Plan | Votes) -> Passed:
    """The message signed for being passed on, for nobody yet (``to``)."""
    body = message.encode()
    signature = identity.sign(_signed(run, message.fragment, body))
    return Passed(message.fragment, message.round, identity.peer_id, (), body, signature)


def check_passed(run: bytes, message: Passed) -> None:
    """Raise :class:`~protocols.errors.BadSignature` unless its author signed it."""
    verify(message.author, message.signature, _signed(run, message.fragment, message.body))


def _signed(run: bytes, fragment: int, body: bytes) -> bytes:
    return _PASSED + run + fragment.to_bytes(8, "big") + blake3(body).digest()
