"""Peers met before, of whom nobody tells any more, are looked for where they were.

Announcements and the DHT tell who is there, for as long as they last. After a cut that lasted
longer, or a power cut after which this node came up before the others, only the peer cache still
knows of them. What it knows may be wrong by now: another run's peer may be there, which must not
be brought this one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress

from bootstrap.handshake import Greeting
from bootstrap.seeds import backoff, dial_all
from node.entry.entrance import Entrance
from protocols.addresses import PeerAddress, parse_peers
from protocols.errors import OperatorError, TransportError
from protocols.identity import PeerId

AT_ONCE = 4  # dialled in one look, of up to 64
FIRST_S, LAST_S = 30.0, 600.0  # until one is dialled again: the pauses


class MetBefore:
    """The cached peers of one node, each tried now and then while it is not known to the swarm."""

    def __init__(self, entrance: Entrance) -> None:
        self._entrance = entrance
        self._rng = random.Random()
        self._next: dict[PeerAddress, tuple[float, Iterator[float]]] = {}  # when, and the pauses

    async def look(self, run: bytes, known: Callable[[PeerId], bool], now: float) -> list[Greeting]:
        """Greet a few who are not ``known``: those that take part in ``run``. Raises nothing."""
        entrance = self._entrance
        given = {seed.hostport for seed in parse_peers(entrance.config.peers)}  # dialled anyway
        missing = [
            place
            for place in entrance.cache.load()
            if place.peer is not None and not known(place.peer) and place.hostport not in given
        ]
        self._next = {place: self._next.get(place, (now, _pauses())) for place in missing}
        due = [place for place, (at, _) in self._next.items() if at <= now]
        chosen = self._rng.sample(due, min(len(due), AT_ONCE))
        for place in chosen:
            _, pauses = self._next[place]
            self._next[place] = now + next(pauses), pauses
        greetings = []
        for reached in (await dial_all(entrance.transport, chosen)).reached:
            with suppress(OperatorError, TransportError):  # it is one try of many
                # asked for no run: one that has none is not to take this one from here
                greeting = await entrance.measure(reached.peer, b"")
                if greeting.welcome.run == run:
                    greetings.append(greeting)
        return greetings


def _pauses() -> Iterator[float]:
    return backoff(random.Random(), first=FIRST_S, last=LAST_S)
