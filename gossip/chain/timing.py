"""When things happened in the round under way, and how long a chain's rounds usually take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gossip.interval import Interval
from gossip.plans.estimating import budget_of, busiest_bytes
from gossip.plans.ladder import Chosen, Ladder
from gossip.plans.rules import Rules
from protocols.messages import Announce, Certificate, Plan


@dataclass
class Timing:
    """Moments of the round under way, and what is usual."""

    planned_at: float = 0.0  # when the round under way got its first plan
    held_at: float = 0.0  # when its newest merged part was here
    ladder: Ladder = field(default_factory=Ladder)
    chosen: Chosen | None = None  # how the newest round came to its codec, where links decide
    _interval: Interval = field(default_factory=Interval)
    _last_commit: float | None = None
    _caught_up: bool = False  # with the newest: this member came into the middle of the next

    @property
    def round_s(self) -> float:
        """Usual seconds from commit to commit; 0: not known yet."""
        return self._interval.usual_s

    def stand(self, codec: str | None) -> None:
        """``codec`` is that of the newest round, however this member came to it."""
        if codec != self.ladder.codec:
            self.ladder = Ladder(codec)

    def leapt(self) -> None:
        """A download has put this member elsewhere, past rounds that nobody counts."""
        self._last_commit = None

    def committed(
        self,
        now: float,
        certificate: Certificate,
        plan: Plan | None,
        rules: Rules,
        members: Sequence[Announce],
    ) -> None:
        """A round is over; ``plan`` is the one that it ended under, None: others decided it.

        ``members`` are those that were alive in it.
        """
        if len(rules.codecs) > 1 and rules.switch is None:
            self.chosen = self.ladder.explained(
                rules.codecs,
                certificate.outcome.codec,
                budget_of(members, rules, self.round_s).whole_s,
                plan.expected_s if plan is not None else None,
            )
        last, self._last_commit = self._last_commit, now
        part, self._caught_up = self._caught_up, plan is None
        if last is not None:
            self._interval.add(now - last, repeated=plan is None or part)
        took = self.held_at - self.planned_at
        smooth = plan is not None and plan.ballot == 0 and took > 0
        self.ladder.note(
            rules.codecs,
            certificate.outcome.codec,
            took if smooth else None,
            busiest_bytes(plan, rules) if plan is not None else 0.0,
            *budget_of(members, rules, self.round_s),
        )
