"""What an island offers to exchanges in pairs: its state of one fragment, read, mixed and moved on.

A node's is :class:`node.replicas.own_state.OwnReplica`. In certified rounds the counterpart is
:class:`gossip.hooks.Replica`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gossip.pairs.letters import Letter
from gossip.place import Place
from protocols.codecs import Encoded


class PairReplica(Protocol):
    """The state of one island, as far as exchanges are concerned."""

    @property
    def place(self) -> Place: ...

    @property
    def lost(self) -> float:
        """Mean square of an element of what the codec of the newest letter lost."""
        ...

    @property
    def gives(self) -> bool:
        """Whether letters may be sent: without weight there is no share to give."""
        ...

    async def start(self) -> None:
        """What the trainer has learnt becomes what is exchanged."""
        ...

    async def encode(self, receivers: int, codec: str) -> tuple[Encoded, float]:
        """What is exchanged, as a letter to ``receivers`` peers, and the letter's weight."""
        ...

    async def take_back(self, letter: Encoded | None, weight: float) -> None:
        """A letter that did not arrive; None: only its weight is known, at any time."""
        ...

    async def mix(self, letters: Sequence[tuple[Letter, Encoded | None]]) -> float:
        """Move by each letter's difference to an own one; returns the RMS of the first."""
        ...

    async def finish(self, round_: int, *, ours: bool) -> None:
        """Take the outer step; then ``place`` is the one after round ``round_``.

        ``ours``: the trainer's snapshot is still the one that was exchanged.
        """
        ...
