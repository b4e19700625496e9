"""Looks for alarms now and then, and makes an event of each that begins or ends.

They are for the log, the terminal and whoever reads events; :mod:`node.monitor.alarms` says which
alarms there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from node.monitor.alarms import Alarm, Level
from node.monitor.event_log import EventLog
from node.monitor.events import AlarmEnded, AlarmRaised
from node.monitor.views import PeerView

LOOK_S = 2.0  # between two looks
ENDED_LOOKS = 3  # in a row without an alarm end it: one that flickers is said once
AGAIN_LOOKS = 30  # until a warning is said again, of other peers: a minute
NAMED_LOOKS = 300  # for which a peer is known to be one of an alarm's: ten minutes


@dataclass
class _Standing:
    """An alarm of one kind and level that was said, and has not ended."""

    peers: tuple[str, ...] = ()  # that it was of last
    said: int = 0  # in which look
    missed: int = 0  # looks in a row without it
    named: dict[str, int] = field(default_factory=dict)  # peer -> look in which it was last one


@dataclass
class Watch:
    """Says in the log which alarms begin and end; :meth:`look` is called every :data:`LOOK_S`.

    One whose peers change is said again for those it gains, but for peers that were among them a
    while ago: who comes and goes at a limit would fill the log.
    """

    alarms: Callable[[], Sequence[Alarm]]
    log: EventLog
    peers: Callable[[], Sequence[PeerView]]  # that are known
    _standing: dict[tuple[str, Level], _Standing] = field(default_factory=dict)
    _looks: int = 0

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Compare with the last looks."""
        self._looks += 1
        now: dict[tuple[str, Level], list[Alarm]] = {}
        for alarm in self.alarms():
            now.setdefault((alarm.kind, alarm.level), []).append(alarm)
        for key, alarms in now.items():
            self._stands(key, alarms)
        for key in [key for key in self._standing if key not in now]:
            self._is_missing(key)

    def _stands(self, key: tuple[str, Level], alarms: Sequence[Alarm]) -> None:
        """Of one kind there may be several, each of other peers."""
        begins = key not in self._standing
        standing = self._standing.setdefault(key, _Standing())
        known = {p: at for p, at in standing.named.items() if self._looks - at <= NAMED_LOOKS}
        may_say = begins or key[1] == "critical" or self._looks - standing.said >= AGAIN_LOOKS
        for alarm in alarms:
            first = begins and alarm is alarms[0]
            if first or (may_say and not known.keys() >= set(alarm.peers)):
                self._say(alarm)
                standing.said = self._looks
                known |= dict.fromkeys(alarm.peers, self._looks)
            known |= {peer: self._looks for peer in alarm.peers if peer in known}
        standing.named, standing.peers, standing.missed = known, alarms[-1].peers, 0

    def _say(self, alarm: Alarm) -> None:
        self.log.emit(
            AlarmRaised(
                alarm=alarm.kind,
                level=alarm.level,
                what=alarm.what,
                fix=alarm.fix,
                peers=alarm.peers,
            )
        )

    def _is_missing(self, key: tuple[str, Level]) -> None:
        standing, kind = self._standing[key], key[0]
        standing.missed += 1
        if standing.missed < ENDED_LOOKS:
            return
        del self._standing[key]
        if kind not in {kind for kind, _ in self._standing}:
            forgotten = self._forgotten(kind, standing.peers)
            self.log.emit(AlarmEnded(alarm=kind, peers=standing.peers, forgotten=forgotten))

    def _forgotten(self, kind: str, peers: tuple[str, ...]) -> tuple[str, ...]:
        """Silent peers that are no longer known: the alarm ends, though none of them is back."""
        if kind != "silence":
            return ()
        known = {view.peer for view in self.peers()}
        return tuple(peer for peer in peers if peer not in known)
