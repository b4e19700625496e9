"""Spreading announcements through a large swarm: what a node passes on, and to whom. Sans-IO.

Up to :data:`EVERYBODY` peers are told directly what a node says of itself. In larger swarms that
would be N² messages at every heartbeat, so there news travel as rumours do (epidemic push: Demers
et al., "Epidemic algorithms for replicated database maintenance", 1987): what a node has not met
before it passes on once, to :data:`FANOUT` peers drawn anew for each batch, and all that came in
within :data:`PAUSE_S` in one message. Some 2 % of the peers are left out each time
(s = 1 − e^(−4s)); they get it when they next compare what they hold with somebody
(:meth:`gossip.membership.presence.Presence.ask`).

A node sends at most :data:`FANOUT` batches a pause, and each announcement :data:`FANOUT` times, or
twice as often where some peers are not in office. So what it sends does not grow with the swarm,
except for the number of announcements.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from itertools import islice

from blake3 import blake3

from protocols.identity import PeerId

EVERYBODY = 16  # peers that are all told directly
FANOUT = 4
PAUSE_S = 0.1  # seconds between two batches
BATCH_BYTES = 48 * 1024
MET = 4096  # announcements that are known to be no news
NAME_BYTES = 16  # that stand for one of them


class Rumours:
    """What a node has heard and not passed on yet."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._random = random.Random(me)  # so that a simulation can be repeated
        self._fresh: dict[PeerId, bytes] = {}  # the newest of each peer
        self._met: dict[bytes, None] = {}  # by their hash: nobody has looked at signatures yet

    def met(self, envelope: bytes) -> bool:
        """Whether an announcement has come before; from now on it has."""
        name = blake3(envelope).digest(NAME_BYTES)
        if name in self._met:
            return True
        if len(self._met) >= MET:
            for old in list(islice(self._met, MET // 4)):
                del self._met[old]
        self._met[name] = None
        return False

    def add(self, peer: PeerId, envelope: bytes) -> None:
        """This is news, and has to be passed on."""
        self.met(envelope)
        self._fresh.pop(peer, None)  # behind those that wait already
        self._fresh[peer] = envelope

    def batch(self) -> tuple[bytes, ...]:
        """What to pass on now, no more than a message holds; empty when there is nothing."""
        found: list[bytes] = []
        room = BATCH_BYTES
        while self._fresh:
            peer, envelope = next(iter(self._fresh.items()))
            room -= len(envelope) + 8
            if room < 0 and found:
                break
            found.append(envelope)
            del self._fresh[peer]
        return tuple(found)

    def targets(
        self,
        peers: Sequence[PeerId],
        there: Callable[[PeerId], bool],
        office: Collection[PeerId] = (),
    ) -> list[PeerId]:
        """Whom to tell: some of ``peers``, drawn from those who are ``there``.

        Those in ``office`` tell as many in office as others, so they hear of each other however
        many identities there are that pass nothing on.
        """
        groups, seats = [peers], set(office)
        if self._me in seats:
            groups = [[p for p in peers if (p in seats) is inside] for inside in (True, False)]
        found: list[PeerId] = []
        for group in groups:
            drawn = self._random.sample(group, min(len(group), 16 * FANOUT))
            found += islice(filter(there, drawn), FANOUT)
        return found

    def one_of(self, peers: Sequence[PeerId]) -> PeerId:
        """Any of them."""
        return self._random.choice(peers)
