"""What a chain of rounds needs from whoever runs it: the state it changes, and whom it tells.

:class:`Replica` is the outer state (a node's is :mod:`node.replicas.replica`), :class:`Hooks` are
callbacks. Swarms in pairs have them, too, but for what is said of rounds: each
:class:`gossip.pairs.roamer.Roamer` tells ``applied`` of its own kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from gossip.catchup.replay import Ending
from gossip.exchange.exchange import Exchange
from gossip.place import Place
from protocols.errors import RemoteProtocolError
from protocols.identity import PeerId
from protocols.messages import Announce, Certificate, Plan


class Replica(Protocol):
    """The outer state of one fragment at this node."""

    @property
    def place(self) -> Place: ...

    @property
    def roster(self) -> tuple[PeerId, ...]: ...

    def delta(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        """This island's pseudo-gradient (:class:`gossip.exchange.slicing.DeltaSource`)."""
        ...

    async def apply(
        self, certificate: Certificate, parts: dict[tuple[int, int], torch.Tensor]
    ) -> None:
        """Take the outer step of a committed round; ``place`` and ``roster`` move on."""
        ...


@dataclass
class Hooks:
    """Whom a swarm and its chains tell. All are called on the event loop and must not block."""

    # a certified round has moved the replica; without an exchange it was replayed
    applied: Callable[[Certificate, Exchange | None], None] = lambda certificate, exchange: None
    moved: Callable[[], None] = lambda: None  # a download has put a replica elsewhere
    # an attempt at a round has come to nothing: the plan it went by, and the one that takes its
    # place; None: the round is abandoned
    gave_up: Callable[[Plan, Plan | None], None] = lambda before, plan: None
    # alive, suspect, …; joining or active, where only that has changed; fault, …
    peer: Callable[[PeerId, str, str], None] = lambda peer, what, why: None
    rejected: Callable[[PeerId, RemoteProtocolError], None] = lambda peer, error: None
    notice: Callable[[str], None] = lambda text: None  # what the operator is to know
    # only a download of the fragment's state can help
    behind: Callable[[int, Ending], None] = lambda fragment, ending: None
    learned: Callable[[Announce], None] = lambda announce: None  # news of a peer
