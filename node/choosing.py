"""How many inner steps an island takes between contributions, and how many before it waits.

Chosen from what was measured, unless the run or the operator has fixed them. Every choice that
differs from the one before is an event (:class:`~node.monitor.events.KnobSet`) with its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from bootstrap.manifest import Manifest
from diloco.fragments import delay_for
from diloco.knobs import inner_steps as for_exposure
from node.monitor.event_log import EventLog
from node.monitor.events import KnobSet
from node.pace import Pace, Usual, fastest_of, inner_steps
from protocols.messages import Announce

ALIKE = 0.05  # ends that differ by less are the same
TOLD = 0.1  # choices that differ by less from what was told last are not told


@dataclass
class Chooser:
    """The choices of one island; ``own_steps`` is the operator's, 0: none."""

    manifest: Manifest
    pace: Pace
    events: EventLog
    own_steps: int = 0
    wanted: int = 0  # inner steps a round that this island's links ask for, which it announces
    exchange: Usual = field(default_factory=Usual)  # seconds from a plan to its last merged part
    transfer: Usual = field(default_factory=Usual)  # a fragment's seconds on the way
    _told: dict[str, int] = field(default_factory=dict)

    def steps(self, others: Sequence[Announce]) -> int:
        """H of this island: the swarm's, and ⌊H · v / v_max⌋ where it is slower (2401.09135)."""
        rounds, mine = self.manifest.rounds, self.pace.steps_per_second
        speeds = [announce.steps_per_second for announce in others]
        whole = self._of_all(others)
        if self.own_steps:
            self._tell("own_steps", self.own_steps, {}, "set with --inner-steps")
            return self.own_steps
        if not rounds.dynamic_steps:
            return whole
        chosen = inner_steps(whole, mine, speeds)
        fastest = fastest_of([mine, *speeds])
        inputs = {"inner_steps": float(whole), "steps_per_second": mine, "fastest": fastest}
        why = "as quick as the fastest" if chosen == whole else "slower: to be done with the others"
        self._tell("own_steps", chosen, inputs, why)
        return chosen

    def together(self, done: int, target: int, etas: Sequence[float]) -> int | None:
        """Where there is one merge only: the end that lets this island end with the others.

        ``done`` of ``target`` steps are taken; ``etas`` are the others' seconds to the end. None:
        it stays as it is.
        """
        speed = self.pace.steps_per_second
        if not etas or speed <= 0:
            return None
        end = done + max(etas) * speed
        return max(1, math.ceil(end)) if end < (1 - ALIKE) * target else None

    def tau(self) -> int:
        """Inner steps to take after a snapshot before its outcome is waited for."""
        rounds, speed = self.manifest.rounds, self.pace.steps_per_second
        if rounds.fragments == 1:
            return rounds.overlap_steps
        if rounds.tau or speed <= 0:
            return rounds.tau or 1
        chosen = delay_for(self.transfer.most, 1 / speed, rounds.inner_steps)
        inputs = {"transfer_s": self.transfer.most, "steps_per_second": speed}
        self._tell("tau", chosen, inputs, "results are on their way for so long")
        return chosen

    def _of_all(self, others: Sequence[Announce]) -> int:
        """H of the fastest: the most that anybody's links ask for, since all have to agree."""
        rounds, speed = self.manifest.rounds, self.pace.steps_per_second
        if not rounds.most_steps:
            return rounds.inner_steps
        fastest = fastest_of([speed, *(announce.steps_per_second for announce in others)])
        if self.exchange.mean and fastest > 0:
            found = for_exposure(
                self.exchange.most,
                1 / fastest,
                overlap_steps=self.tau(),
                transfers=rounds.fragments,
                exposed=rounds.exposed,
                least=rounds.inner_steps,
                most=rounds.most_steps,
            )
            self.wanted = found.inner_steps
            why = found.why
        else:
            why = "no exchange was timed yet"
        asked = [self.wanted, *(announce.wanted_steps for announce in others)]
        chosen = min(rounds.most_steps, max(rounds.inner_steps, *asked))
        inputs = {
            "exchange_s": self.exchange.most,
            "fastest": fastest,
            "exposed": rounds.exposed,
            "wanted": float(self.wanted),
            "wanted_by_others": float(max(asked[1:], default=0)),
        }
        self._tell("inner_steps", chosen, inputs, why)
        return chosen

    def _tell(self, name: str, value: int, inputs: dict[str, float], why: str) -> None:
        before = self._told.get(name)
        if before is not None and abs(value - before) <= TOLD * before:
            return
        self._told[name] = value
        self.events.emit(KnobSet(name=name, value=value, before=before, inputs=inputs, why=why))
