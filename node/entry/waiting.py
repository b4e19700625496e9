"""What a node waits for, in words, before it takes part; it leaves where that cannot come.

A newcomer for the next round, which lets it in, and for who is to make that; a run's creator for as
many islands as ``--wait-for`` says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gossip.chain.chain import Chain
from gossip.membership.members import Liveness
from gossip.rounds.gathering import Gathering
from node.checkpoints.restoring import Restored
from node.monitor.event_log import EventLog
from node.monitor.events import JoinProgress, Notice
from node.monitor.wording import duration, short
from node.replicas.replica import OuterReplica
from protocols.bounds import MAX_ROSTER
from protocols.messages import UNKNOWN_ETA_S, Announce

LOOK_S = 1.0
FIRST_S = 10.0  # what takes no longer is not worth a line
LONGEST_S = 300.0  # between two lines; each pause is longer than the one before
_GROWS = 1.5
NAMED = 3
OVERDUE_S, OVERDUE = 30.0, 3.0  # late: after OVERDUE times what members said, and OVERDUE_S


@dataclass
class Waiting:
    """Tells now and then why a newcomer does not take part yet, by what the others announce."""

    chain: Chain  # of fragment 0
    events: EventLog
    at_end: Callable[[Announce], bool]  # whether a peer has come to the end of the run
    leave: Callable[[str], None]  # for this reason: nothing is left to wait for
    _most_s: float = 0.0  # the most that a member has said it needs, since the last round

    async def run(self) -> None:
        """Until it is let in."""
        began, round_ = self.chain.now(), self.chain.replica.place.round
        pause, due = FIRST_S, began + FIRST_S
        while self.chain.status.status == "joining":
            now = self.chain.now()
            if self.chain.replica.place.round != round_:
                began, round_, self._most_s = now, self.chain.replica.place.round, 0.0
            text = self._look(now - began)
            if now >= due and self._ended(now):
                self.leave(
                    "the run is over, and who has its last rounds left before they were here"
                )
                return
            if text and now >= due:
                self.events.emit(JoinProgress(step=6, name="wait", text=text))
                pause = min(LONGEST_S, pause * _GROWS)
                due = now + pause
            await asyncio.sleep(LOOK_S)

    def _ended(self, now: float) -> bool:
        """Whether most who decide on rounds came to the run's end and left, and nobody else is
        further than this node.
        """
        membership, office = self.chain.membership, self.chain.replica.roster
        if any(membership.liveness(peer, now) is not Liveness.LEFT for peer in office):
            return False
        last = [one for peer in office if (one := membership.announcement(peer)) is not None]
        there = (membership.announcement(peer) for peer in membership.alive(now))
        here = self.chain.replica.place.round
        ahead = any(one is not None and one.round > here for one in there)
        return 2 * sum(map(self.at_end, last)) > len(office) and not ahead

    def _look(self, waited: float) -> str:
        """What it waits for; empty while it has yet to come to where the others are."""
        membership, now = self.chain.membership, self.chain.now()
        office, here = self.chain.replica.roster, self.chain.replica.place.round
        there = {a.peer: a for a in membership.members_alive(now) if a.peer in office}
        if not there:
            names = ", ".join(short(peer) for peer in office[:NAMED])
            left = all(membership.liveness(peer, now) is Liveness.LEFT for peer in office)
            seen = "they have left" if left else "none of them is there"
            return (
                f"waits for those who decide on rounds, and {seen}: {names}; with one of them "
                "(node start --resume) it goes on"
            )
        if max(announce.round for announce in there.values()) > here + 1:
            return ""
        if len(office) >= MAX_ROSTER:
            return (
                f"waits until one of the {MAX_ROSTER} members leaves: a run has no room for more "
                "that train and decide"
            )
        etas = {
            peer: membership.eta(peer, now) for peer in there if there[peer].eta < UNKNOWN_ETA_S
        }
        if not etas and not here:  # it may wait for more islands, or have yet to begin
            names = ", ".join(there[peer].name or short(peer) for peer in sorted(there)[:NAMED])
            return f"waits for the run to begin: {names} lets in all who are there then"
        if not etas:
            return "waits to be let in by the next round"
        last = max(etas, key=lambda peer: etas[peer])
        self._most_s = max(self._most_s, etas[last])
        name = there[last].name or short(last)
        if waited < OVERDUE_S + OVERDUE * self._most_s:
            needs = duration(etas[last])
            return f"waits to be let in by the next round: {name} is ready in {needs}"
        return (
            f"waits to be let in by the next round, and none has come for {duration(waited)}, "
            f"though {name} said it needs {duration(self._most_s)}: its log and alarms say why "
            "(what it learns may not be finite)"
        )


@dataclass
class Gatherer:
    """Tells how many islands are there, of those that a run's creator waits for."""

    chain: Chain  # of fragment 0
    events: EventLog

    async def run(self) -> None:
        """Until the run begins, or this node leaves before."""
        gathering, told = self.chain.gathering, -1
        while gathering.on(self.chain.replica.place) and not gathering.ended:
            there = gathering.there(self.chain.round.company, self.chain.now())
            if there != told:
                text = f"{there} of {gathering.least} islands are there"
                text += ": the run begins once all are"
                self.events.emit(JoinProgress(step=6, name="wait", text=text))
                told = there
            await asyncio.sleep(LOOK_S)


def gathering_of(
    islands: int, replica: OuterReplica, *, restored: Restored | None, events: EventLog
) -> Gathering:
    """Whom this node waits for, as ``--wait-for`` says: nobody, unless it alone can begin the run.

    Who has trained in it before goes on with that.
    """
    if islands < 2:
        return Gathering()
    trained = restored is not None and restored.trained is not None
    if trained or replica.place.round or replica.roster != (replica.me,):
        text = "--wait-for does nothing: the run has begun, or is another node's to begin"
        events.emit(Notice(text=text))
        return Gathering()
    return Gathering(islands)
