"""What a member knows of the rounds before when the next one begins."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from gossip.plans.ladder import Ladder
from protocols.identity import PeerId


@dataclass(frozen=True)
class Earlier:
    """How long rounds took, and who was not in them as planned."""

    round_s: float  # usual seconds from round to round
    ladder: Ladder = field(default_factory=Ladder)  # what exchanges took, and what was sent
    missed: Mapping[PeerId, int] = field(default_factory=dict)  # rounds without a member's work
    unreliable: Set[PeerId] = frozenset()  # left out of recent rounds: own no part, lead last
    mute: Set[PeerId] = frozenset()  # did nothing for their group: relay none
