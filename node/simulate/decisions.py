"""What followed from measured links in a simulated run: inner steps, τ, codecs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from node.monitor.event_log import EventLog
from node.monitor.events import KnobSet, Record
from protocols.messages import Certificate


@dataclass
class Decisions:
    """Of all islands of a run."""

    told: list[dict[str, object]] = field(default_factory=list)  # as they are written to JSON
    _codecs: dict[tuple[int, int], str] = field(default_factory=dict)  # by fragment and round

    def log_of(self, island: int, clock: Callable[[], float]) -> EventLog:
        """An island's log; it was the ``island``-th to come, and ``clock`` is virtual."""

        def heard(record: Record) -> None:
            if isinstance(record.event, KnobSet):
                moment = {"virtual_s": round(record.time, 3), "island": island}
                self.told.append(moment | dataclasses.asdict(record.event))

        log = EventLog(clock=clock)
        log.subscribe(heard)
        return log

    def committed(self, certificate: Certificate) -> None:
        """A certified round is over; called once by every member."""
        outcome = certificate.outcome
        self._codecs[outcome.fragment, outcome.round] = outcome.codec

    def notes(self) -> dict[str, float]:
        """Rounds by their codec, where there was more than one."""
        found = Counter(self._codecs.values())
        return {f"rounds_{name}": float(n) for name, n in found.items()} if len(found) > 1 else {}
