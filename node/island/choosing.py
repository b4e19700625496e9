"""How many inner steps an island takes between contributions, and how many before it waits.

Chosen from what was measured, unless the run or the operator has fixed them. Where all merge in one
round all take the most that anybody's links ask for. In pairs nobody has to agree, but islands
whose rounds have unlike lengths count apart and answer each other late: so an island takes what its
own exchanges ask for, but never less than the median of all, which is whose rounds the run counts,
nor so much more that answers to its letters, or its own ones, would come too late to count
(``rounds.max_staleness``). Every choice that differs by more than a tenth from what was told last
is an event (:class:`~node.monitor.events.KnobSet`) with its inputs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean, median_low

from bootstrap.manifest import Manifest
from bootstrap.manifest_gossip import PAIRED
from diloco.fragments import delay_for
from diloco.knobs import Decision
from diloco.knobs import inner_steps as for_exposure
from gossip.plans.estimating import fastest_of
from node.island.pace import Pace, Usual, inner_steps
from node.modes import once
from node.monitor.event_log import EventLog
from node.monitor.events import KnobSet
from protocols.messages import Announce

ALIKE = 0.05  # ends that differ by less are the same
TOLD = 0.1  # choices that differ by less from what was told last are not told
RECENT = 8  # exchanges of islands in pairs that count
IN_STEP = 1.25  # times the median's H: an island that asks for no more takes the median


@dataclass
class Chooser:
    """The choices of one island; ``own_inner_steps`` is the operator's, 0: none."""

    manifest: Manifest
    pace: Pace
    events: EventLog
    own_inner_steps: int = 0
    wanted: int = 0  # inner steps a round that this island's links ask for, which it announces
    # seconds from a plan to its last merged part; of islands in pairs, of letters on their way
    exchange: Usual = field(default_factory=Usual)
    transfer: Usual = field(default_factory=Usual)  # a fragment's seconds on the way
    whole: int = field(init=False)  # H of the swarm, as it was chosen last
    _told: dict[str, int] = field(default_factory=dict)
    _newest: deque[float] = field(init=False)  # of the seconds that exchanges took

    def __post_init__(self) -> None:
        self.whole = self.manifest.rounds.inner_steps
        self._newest = deque(maxlen=RECENT * self.manifest.rounds.fragments)

    def timed(self, seconds: float) -> None:
        """Note the seconds that an exchange took."""
        self.exchange.add(seconds)
        self._newest.append(seconds)

    def steps(self, others: Sequence[Announce]) -> int:
        """H of this island: the swarm's, and ⌊H · v / v_max⌋ where it is slower (2401.09135)."""
        rounds, mine = self.manifest.rounds, self.pace.steps_per_second
        speeds = [announce.steps_per_second for announce in others]
        whole = rounds.inner_steps
        if rounds.most_steps:
            whole = self._in_pairs(others) if self.manifest.mode in PAIRED else self._of_all(others)
        self.whole = whole
        if self.own_inner_steps:
            self._tell("own_inner_steps", self.own_inner_steps, {}, "set with --inner-steps")
            return self.own_inner_steps
        if once(self.manifest):  # :meth:`together` looks again and again, and this once
            return whole
        if not rounds.dynamic_steps or mine <= 0:  # nothing is chosen before a step was timed
            return whole
        chosen = inner_steps(whole, mine, speeds)
        fastest = fastest_of([mine, *speeds])
        inputs = {"inner_steps": float(whole), "steps_per_second": mine, "fastest": fastest}
        why = "as quick as the fastest" if chosen == whole else "slower: to be done with the others"
        if others or "own_inner_steps" in self._told:  # alone it is H, which the run says
            self._tell("own_inner_steps", chosen, inputs, why)
        return chosen

    def together(self, done: int, whole: int, ends: Sequence[float]) -> int | None:
        """Where there is one merge only: the end that lets this island end with the others.

        ``done`` of ``whole`` steps are taken; ``ends`` are the seconds in which others come to the
        end of all of theirs. Ends that follow from others' do not belong there: two islands would
        follow whatever either measures, and only downwards. None: after all of its own steps.

        The earliest counts. Among strangers the median does, this island's own end being one of
        them, or each could end the training of all by its word.
        """
        speed = self.pace.steps_per_second
        if not ends or speed <= 0:
            return None
        left = min(ends)
        if self.manifest.merge.trust == "open":
            left = median_low([*ends, (whole - done) / speed])
        end = done + left * speed
        return max(1, math.ceil(end)) if end < (1 - ALIKE) * whole else None

    def tau(self) -> int:
        """Inner steps to take after a snapshot before its outcome is waited for."""
        rounds, speed = self.manifest.rounds, self.pace.steps_per_second
        if rounds.fragments == 1:
            return self.whole if rounds.overlaps_all else rounds.overlap_steps
        if rounds.tau or speed <= 0:
            return rounds.tau or 1
        chosen = delay_for(self.transfer.most, 1 / speed, rounds.inner_steps)
        inputs = {"transfer_s": self.transfer.most, "steps_per_second": speed}
        self._tell("tau", chosen, inputs, "results are on their way for that long")
        return chosen

    def _of_all(self, others: Sequence[Announce]) -> int:
        """H of the fastest: the most that anybody's links ask for, since all have to agree."""
        rounds, speed = self.manifest.rounds, self.pace.steps_per_second
        fastest = fastest_of([speed, *(announce.steps_per_second for announce in others)])
        if self.exchange.mean and fastest > 0:
            found = for_exposure(
                self.exchange.most,
                1 / fastest,
                overlap_steps=None if rounds.overlaps_all else self.tau(),
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
        chosen = rounds.steps_for(max(asked))
        inputs = {
            "exchange_s": self.exchange.most,
            "fastest": fastest,
            "exposed": rounds.exposed,
            "wanted": float(self.wanted),
            "wanted_by_others": float(max(asked[1:], default=0)),
        }
        self._tell("inner_steps", chosen, inputs, why)
        return chosen

    def _in_pairs(self, others: Sequence[Announce]) -> int:
        """H of the fastest where rounds are each island's own.

        An island asks for what its exchanges take in the mean. One whose usual exchange takes that
        long has a narrow link itself, and takes more steps than the median. One that was only held
        up by a partner's narrow link does not, or its H would depend on whom it met last.
        """
        rounds, mine = self.manifest.rounds, self.pace.steps_per_second
        least, most = rounds.inner_steps, rounds.most_steps
        fastest = fastest_of([mine, *(announce.steps_per_second for announce in others)])
        beat = fastest if rounds.dynamic_steps else mine  # whose steps are counted
        mean_s, usual_s, usually = 0.0, 0.0, least
        why = "no exchange was timed yet"

        def asked_by(seconds: float) -> Decision:
            return for_exposure(
                seconds,
                1 / beat,
                transfers=rounds.fragments,
                exposed=rounds.exposed,
                least=least,
                most=most,
            )

        if self._newest and mine > 0:
            hidden_s = self.tau() / mine
            beyond = [max(0.0, seconds - hidden_s) for seconds in self._newest]
            mean_s, usual_s = mean(beyond), median_low(beyond)
            found, usually = asked_by(mean_s), asked_by(usual_s).inner_steps
            self.wanted, why = found.inner_steps, found.why
        asked = [n for n in (self.wanted, *(one.wanted_steps for one in others)) if n > 0]
        median = min(most, max(least, median_low(asked))) if asked else least
        furthest = min(most, max(1, rounds.max_staleness // 2) * median)
        alike = usually <= IN_STEP * median
        chosen = median if alike else min(usually, furthest)
        if alike and chosen != self.wanted and asked:
            why = "the median island asks for that many: to be ready, and done, with the others"
        elif chosen < usually:
            why = f"{usually} steps would be needed: answers would come too late to count"
        inputs = {
            "beyond_overlap_s": mean_s,
            "usually_s": usual_s,
            "steps_per_second": beat,
            "exposed": rounds.exposed,
            "wanted": float(self.wanted),
            "median": float(median),
        }
        self._tell("inner_steps", chosen, inputs, why)
        return chosen

    def _tell(self, name: str, value: int, inputs: dict[str, float], why: str) -> None:
        before = self._told.get(name)
        if before is not None and abs(value - before) <= TOLD * before:
            return
        self._told[name] = value
        self.events.emit(KnobSet(name=name, value=value, before=before, inputs=inputs, why=why))
