"""How many inner steps come before an island's next contribution, given who else is there."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_high, median_low

from bootstrap.manifest import Manifest
from gossip.common import AnySwarm
from node.island.choosing import Chooser
from node.modes import at_will, clients_of
from node.monitor.events import Notice
from node.replicas.replica import OuterReplica
from protocols.identity import PeerId
from protocols.messages import UNKNOWN_ETA_S, Announce

LOOK_EVERY = 10  # inner steps between two looks at how far the others are


class Targets:
    """Of one island; ``replicas`` are by fragment, and fragment 0's roster decides."""

    def __init__(
        self, manifest: Manifest, me: PeerId, replicas: Sequence[OuterReplica], chooser: Chooser
    ) -> None:
        self.me, self.replicas, self.replica, self.chooser = me, replicas, replicas[0], chooser
        self._clients = clients_of(manifest)
        readers = not (manifest.script.layout or manifest.numbered)  # else it is nobody's affair
        self._readers = readers * manifest.data.islands

    def next(self, swarm: AnySwarm) -> int:
        """Inner steps until the next contribution; 0: the next round does without this island."""
        self._count_readers(swarm)
        if not self.drawn(swarm):
            return 0
        chosen = self.chooser.steps(swarm.membership.members_alive(swarm.now()))
        swarm.presence.note(wanted_steps=self.chooser.wanted)
        return chosen

    def _count_readers(self, swarm: AnySwarm) -> None:
        """Say, once, that a round has not as many windows as its islands read."""
        islands = len(self._reading(swarm))
        if 0 < self._readers < islands:
            text = f"{islands} islands read what a round has for {self._readers} (data.islands)"
            self.chooser.events.emit(Notice(text=f"{text}: some windows are read twice"))
            self._readers = 0

    def position(self, swarm: AnySwarm) -> int:
        """Where the others are in the learning rate's schedule, in inner steps; 0: nobody says.

        The median, but no further than so many rounds can have brought anybody: islands that come
        late or are slow are to end with the others, with the same learning rate. Where each
        arrival is a round, or rounds may be longer than usual, that bound is far off; so there the
        median is of this island's place and the bound as well, and one of two others who lies
        moves nobody: neither this island nor, through a newcomer, the others.
        """
        alive = swarm.membership.members_alive(swarm.now())
        said = [a.position for a in alive if a.role == "island" and a.position > 0]
        if not said:
            return 0
        rounds, begun = self.chooser.manifest.rounds, self.replica.place.round + 1
        bound = (max(rounds.inner_steps, rounds.most_steps) + rounds.overlap_steps) * begun
        if at_will(self.chooser.manifest) or rounds.most_steps > rounds.inner_steps:
            return min(median_low([*said, self.chooser.pace.position, bound]), bound)
        return min(median_high(said), bound)

    def slot(self, swarm: AnySwarm) -> tuple[int, int]:
        """This island's place among those that read this round's windows, and how many they are."""
        reading = self._reading(swarm)
        if self.me in reading:
            return reading.index(self.me), len(reading)
        return len(reading), len(reading) + 1  # out of office, and training on meanwhile

    def _reading(self, swarm: AnySwarm) -> list[PeerId]:
        """The roster without those that are known to be servers, which do not train."""
        said = ((peer, swarm.membership.announcement(peer)) for peer in self.replica.roster)
        return [peer for peer, announce in said if announce is None or announce.role != "server"]

    def drawn(self, swarm: AnySwarm) -> bool:
        """Whether this island is one of the round's clients, as far as it sees who is alive.

        A fragment draws by its own rounds, which may be behind those of another; all wait for those
        whom they have drawn.
        """
        choose = self._clients
        if choose is None or self.me not in self.replica.roster:
            return True
        said = swarm.membership.members_alive(swarm.now())
        alive = {a.peer for a in said if (a.role, a.status) == ("island", "active")}
        alive.add(self.me)
        return any(
            self.me in choose(replica.place, [peer for peer in replica.roster if peer in alive])
            for replica in self.replicas
        )

    def together(self, swarm: AnySwarm, done: int, target: int) -> int | None:
        """With a single merge, an island that began late ends with the others, not after them.

        The end that ``target`` becomes, after ``done`` steps; None: it stays. It may become later
        again, as paces are not what they were: only what is near is sure. By the pace of a first
        step, which compiles, everything is near.
        """
        if done % LOOK_EVERY or not (target and self.chooser.pace.settled):
            return None
        now = swarm.now()
        alive = swarm.membership.members_alive(now)
        said = [self._end(one, swarm.membership.eta(one.peer, now)) for one in alive]
        ends = [end for end in said if end is not None]
        if not ends and any(self._waits(one) for one in alive):
            return None  # those with whom it was to end are gone, and others have come to that end
        whole = self.chooser.own_inner_steps or self.chooser.whole
        end = self.chooser.together(done, whole, ends) or whole
        return end if end != target else None

    def _waits(self, other: Announce) -> bool:
        return other.role == "island" and other.status != "leaving" and other.ready

    def _end(self, other: Announce, eta: float) -> float | None:
        """Seconds until another island has taken all of the run's steps; None: it does not say.

        Who is ready after fewer has ended with others, or as its operator says. Before a step was
        timed it says what is usual (``UNTIMED_ETA_S``), or that it cannot begin: one that never
        takes all steps says so, too.
        """
        if other.role != "island" or other.status == "leaving":
            return None
        if other.ready:
            return 0.0 if other.steps >= self.chooser.whole else None
        timed = other.steps_per_second > 0 and other.eta < UNKNOWN_ETA_S
        return eta if timed else None
