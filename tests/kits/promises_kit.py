"""A member and the record of what it has promised."""

from __future__ import annotations

from pathlib import Path

from gossip.chain.promises import PromiseRecord
from protocols.identity import Identity

ME, OTHER = (Identity.from_seed(bytes([n]) * 32).peer_id for n in (1, 2))
RUN = b"r" * 32


def last(path: Path) -> int | None:
    """The last round on the record of this member."""
    promised = PromiseRecord(path, RUN, ME).promised
    return None if promised is None else promised.last
