"""Spreading news through a large swarm: what a node passes on, and to whom. Sans-IO.

Up to :data:`EVERYBODY` peers are told directly what a node says of itself. In larger swarms that
would be N² messages at every heartbeat, so there news travel as rumours do (epidemic push: Demers
et al., "Epidemic algorithms for replicated database maintenance", 1987): what a node has not met
before it passes on once, to :data:`FANOUT` peers drawn anew for each batch, and all that came in
within :data:`PAUSE_S` in one message. Some 2 % of the peers are left out each time
(s = 1 − e^(−4s)).

So everybody is sent everything :data:`FANOUT` times. What is long is therefore not pushed: a
heartbeat is a few bytes (:mod:`gossip.membership.pulse`) that name the announcement it belongs to,
and so is the rumour of a new announcement. Who does not have that asks whoever has named it. Only
the first few get an announcement pushed, from its origin and from those whom the origin has told:
nobody else can have it by then. A peer that a rumour has left out learns of it by the next
heartbeat.

A node sends at most :data:`FANOUT` batches a pause, and each heartbeat :data:`FANOUT` times, or
twice as often where some peers are not in office. So what it sends does not grow with the swarm,
except for the number of heartbeats.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from typing import TypeVar

from blake3 import blake3

from gossip.membership.pulse import Beat
from protocols.bounds import MAX_PEERS
from protocols.identity import PeerId
from protocols.messages import TAG_BYTES

EVERYBODY = 16  # peers that are all told directly
FANOUT = 4
PAUSE_S = 0.15  # seconds between two batches
AGAIN_S = 0.5  # seconds before somebody else is asked for what has not come
BATCH_BYTES = 48 * 1024
MET = 4096  # announcements that are known to be no news
NAME_BYTES = 16  # that stand for one of them

T = TypeVar("T")


class _Line:
    """Peers in an order that is drawn anew whenever all have had their turn.

    So a peer that has gone away is called soon by everybody, and found out.
    """

    def __init__(self, dice: random.Random) -> None:
        self._random = dice
        self._all: set[PeerId] = set()
        self._left: list[PeerId] = []

    def next(self, group: Sequence[PeerId], there: Callable[[PeerId], bool]) -> list[PeerId]:
        """The next few of a group, of those who are there."""
        if self._all != set(group):
            self._all, self._left = set(group), []
        found: list[PeerId] = []
        for _ in range(min(len(group), 16 * FANOUT)):
            if not self._left:
                self._left = self._random.sample(group, len(group))
            peer = self._left.pop()
            if peer not in found and there(peer):
                found.append(peer)
                if len(found) == FANOUT:
                    break
        return found


class Rumours:
    """What a node has heard and not passed on yet."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._random = random.Random(me)  # so that a simulation can be repeated
        self._fresh: dict[PeerId, bytes] = {}  # the newest of each peer
        self._beats: dict[PeerId, bytes] = {}  # the newest of each peer, as it travels
        self._met: dict[bytes, None] = {}  # by their hash: nobody has looked at signatures yet
        self._tags: dict[bytes, None] = {}  # of these
        self._asked: dict[bytes, float] = {}  # tags, and when somebody was asked for them
        self._lines = [_Line(self._random), _Line(self._random)]

    def met(self, envelope: bytes) -> bool:
        """Whether an announcement has come before; from now on it has."""
        name = blake3(envelope).digest(NAME_BYTES)
        if name in self._met:
            return True
        _remember(self._met, name, None)
        _remember(self._tags, name[:TAG_BYTES], None)
        return False

    def add(self, peer: PeerId, envelope: bytes) -> None:
        """This is news, and has to be passed on, to some who cannot have it."""
        self.met(envelope)
        self._beats.pop(peer, None)  # of an announcement before it
        self._fresh.pop(peer, None)  # behind those that wait already
        self._fresh[peer] = envelope

    def beat(self, peer: PeerId, beat: Beat) -> None:
        """This is news, and has to be passed on."""
        self._beats.pop(peer, None)
        self._beats[peer] = beat.packed()

    def beats(self) -> bytes:
        """The heartbeats to pass on now."""
        found = b"".join(islice(self._beats.values(), MAX_PEERS))
        for peer in list(islice(self._beats, MAX_PEERS)):
            del self._beats[peer]
        return found

    def wanted(self, tags: Iterable[bytes], now: float) -> set[bytes]:
        """Which of these to ask for now: what has never come, and nobody was just asked for."""
        found = {
            tag
            for tag in tags
            if tag not in self._tags and now - self._asked.get(tag, -math.inf) >= AGAIN_S
        }
        for tag in found:
            self._asked.pop(tag, None)
            _remember(self._asked, tag, now)
        return found

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
        return [
            peer
            for line, group in zip(self._lines, groups, strict=False)
            for peer in line.next(group, there)
        ]

    def one_of(self, peers: Sequence[PeerId]) -> PeerId:
        """Any of them."""
        return self._random.choice(peers)


def _remember(known: dict[bytes, T], key: bytes, value: T) -> None:
    if len(known) >= MET:
        for old in list(islice(known, MET // 4)):
            del known[old]
    known[key] = value
