"""How much is kept of what earlier plans of a round have moved. Sans-IO.

An earlier plan may come back, by a leader who knows of no other, so what it has moved is worth
keeping. But every ballot may bring another plan, and memory must not grow with their number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from gossip.plans.certificate import basis_of
from gossip.plans.validity import PartKey, key_of
from protocols.messages import Outcome, Plan


def keys_of(plan: Plan) -> list[PartKey]:
    """The parts that a plan asks for."""
    basis = basis_of(plan.codec, plan.contributors)
    return [
        (part.start, part.stop, part.owner, basis) if part.result is None else key_of(part.result)
        for part in plan.parts
    ]


def needed(plan: Plan | None, voted: Outcome | None) -> set[PartKey]:
    """What has to stay: a plan's parts, and those of an outcome that was voted for.

    A majority may have done so, and then the others fetch it.
    """
    keys = set() if plan is None else set(keys_of(plan))
    return keys if voted is None else keys | {key_of(result) for result in voted.parts}


@dataclass
class Retention:
    """The parts that plans have asked for, the longest ago first.

    Besides those of the newest plan, parts of up to ``room`` elements are kept: one vector's worth
    is what one earlier plan has asked for.
    """

    room: int
    _asked: dict[PartKey, None] = field(default_factory=dict)

    def ask(self, keys: Iterable[PartKey]) -> None:
        """A plan asks for these."""
        for key in keys:
            self._asked.pop(key, None)
            self._asked[key] = None

    def excess(
        self, now: Collection[PartKey], stay: Collection[PartKey], copies: Callable[[PartKey], int]
    ) -> list[PartKey]:
        """The parts to let go of; they are forgotten here.

        ``now`` is what the newest plan asks for, ``stay`` what has to stay however much it takes;
        ``copies`` tells how many times a part is in memory.
        """

        def takes(key: PartKey) -> int:
            return (key[1] - key[0]) * copies(key)

        old = [key for key in reversed(self._asked) if key not in now]
        room = self.room - sum(takes(key) for key in old if key in stay)
        gone = []
        for key in old:
            if key not in stay:
                room -= takes(key)
                if room < 0:
                    gone.append(key)
        for key in gone:
            del self._asked[key]
        return gone
