"""Which connections a node has accepted, and which makes way where there are as many as may be.

Strangers, who have proven no key or are not admitted, make way for each other, the oldest first.
They always have some places, so that newcomers have time to shake hands, and take none from those
who are admitted (without an invitation: everybody who has proven a key). Where more are admitted
than there are places, an idle connection makes way, of the key or the address that has most of
them: keys cost nothing, addresses do. That may be the new one. A connection that serves a request
never makes way for another.

It is cut only where the bodies of calls in memory, and answers that are not taken yet, are too much
together: then one of the address that has most, of bodies the newest, of answers the one of which
nothing was taken for longest, whichever are more there. No call waits for room, or a peer that
draws out its body would block it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeVar

from protocols.identity import PeerId
from protocols.limits import Limits
from protocols.stats import TransportStats

_Key = TypeVar("_Key")
_FOR_STRANGERS = 16  # one place in this many


class Connection:
    """One that was accepted, until :meth:`ended`; whoever serves it says what it is for."""

    def __init__(self, among: Connections, source: str) -> None:
        self.source = source
        self.cut: Callable[[], object] = lambda: None  # ends it where it has to make way
        self.peer: PeerId | None = None
        self.dialled = False  # by this node, since a relay has told of a call
        self.requests = 0  # under way
        self.held = 0  # bytes of their bodies, or of an answer
        self.answers = False  # it is an answer
        self._among = among

    def proven(self, peer: PeerId) -> None:
        """Its other end has proven that it is ``peer``."""
        self._among.proven(self, peer)

    def expected(self) -> None:
        """Somebody waits for it and bounds it: it makes way for nobody."""
        self._among.expected(self)

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """A request is under way."""
        self.requests += 1
        self._among.changed(self)
        try:
            yield
        finally:
            self.requests -= 1
            self._among.changed(self)

    def holds(self, count: int) -> None:
        """``count`` bytes of a body have come, and are kept until its request is served."""
        self._among.holds(self, count)

    def answer(self, count: int) -> None:
        """``count`` bytes are kept until the other end has taken them."""
        self.answers = True
        self._among.holds(self, count)

    def taken(self) -> None:
        """The other end has taken something of the answer."""
        self._among.taken(self)

    def ended(self) -> None:
        """It is closed."""
        self._among.ended(self)


class Connections:
    """The open ones of a listener. ``admitted``: whether a peer is more than a stranger."""

    def __init__(
        self, limits: Limits, stats: TransportStats, admitted: Callable[[PeerId], bool]
    ) -> None:
        self._limits = limits
        self._stats = stats
        self._admitted = admitted
        self._open: set[Connection] = set()
        self._of_source: Counter[str] = Counter()
        self._of_peer: Counter[PeerId] = Counter()
        self._strangers: dict[Connection, None] = {}  # the oldest first
        self._holding: dict[Connection, None] = {}  # since it came or some was taken: longest first
        self._held = 0  # by all of them
        self._idle: dict[Connection, None] = {}  # of the others, without a request; longest first

    def open(self, source: str) -> Connection | None:
        """Another one from ``source``; None: it is to be refused."""
        if self._of_source[source] >= self._limits.per_ip or not self._has_room():
            self._stats.capped_connections += 1
            return None
        connection = Connection(self, source)
        self._open.add(connection)
        self._of_source[source] += 1
        self._strangers[connection] = None
        return connection

    def proven(self, connection: Connection, peer: PeerId) -> None:
        """See :meth:`Connection.proven`."""
        connection.peer = peer
        if connection in self._open:
            self._of_peer[peer] += 1
            self.changed(connection)

    def expected(self, connection: Connection) -> None:
        """See :meth:`Connection.expected`."""
        if connection in self._strangers:
            self._let_in(connection)

    def changed(self, connection: Connection) -> None:
        """It has another peer, or another number of requests."""
        self._idle.pop(connection, None)
        if not connection.requests:
            self._release(connection)
        if connection not in self._open or connection.peer is None:
            return
        if connection in self._strangers:
            if self._admitted(connection.peer):
                self._let_in(connection)
        elif not connection.requests:
            self._idle[connection] = None

    def holds(self, connection: Connection, count: int) -> None:
        """See :meth:`Connection.holds` and :meth:`Connection.answer`."""
        if connection not in self._open or not count:
            return
        connection.held += count
        self._holding[connection] = None
        self._held += count
        while self._held > self._limits.bodies:
            self._cut(self._of_most_held())

    def taken(self, connection: Connection) -> None:
        """See :meth:`Connection.taken`."""
        if connection in self._holding:
            del self._holding[connection]
            self._holding[connection] = None

    def _of_most_held(self) -> Connection:
        """The one to be cut where too much is held."""
        by_source: Counter[str] = Counter()
        for one in self._holding:
            by_source[one.source] += one.held
        source = max(reversed(self._holding), key=lambda one: by_source[one.source]).source
        held = [one for one in self._holding if one.source == source]
        answers = [one for one in held if one.answers]
        if 2 * sum(one.held for one in answers) >= by_source[source]:
            return answers[0]
        return next(one for one in reversed(held) if not one.answers)

    def _release(self, connection: Connection) -> None:
        """The bodies that it holds are not needed any more."""
        connection.answers = False
        if connection.held:
            self._held -= connection.held
            connection.held = 0
            del self._holding[connection]

    def ended(self, connection: Connection) -> None:
        """See :meth:`Connection.ended`."""
        if connection not in self._open:
            return
        self._open.remove(connection)
        self._release(connection)
        self._strangers.pop(connection, None)
        self._idle.pop(connection, None)
        _less(self._of_source, connection.source)
        if connection.peer is not None:
            _less(self._of_peer, connection.peer)

    def _has_room(self) -> bool:
        """Whether there is room for one more; the oldest strangers are cut for it."""
        while len(self._open) >= self._limits.total:
            if not self._strangers:
                return False
            oldest = next(iter(self._strangers))
            if oldest.peer is not None and self._admitted(oldest.peer):
                self._let_in(oldest)  # it has greeted us meanwhile, on another connection
            else:
                self._cut(oldest)
        return True

    def _let_in(self, connection: Connection) -> None:
        """It is no stranger any more; where too many are admitted, one idle one is cut."""
        del self._strangers[connection]
        self.changed(connection)
        places = self._limits.total - self._limits.total // _FOR_STRANGERS
        if len(self._open) - len(self._strangers) > places:
            idlest = self._idlest()
            if idlest is not None:
                self._cut(idlest)

    def _cut(self, connection: Connection) -> None:
        self._stats.capped_connections += 1
        self.ended(connection)  # its task takes a moment to end
        connection.cut()

    def _idlest(self) -> Connection | None:
        """The longest idle one of the peer or source that has most."""
        return max(self._idle, key=self._weight, default=None)

    def _weight(self, connection: Connection) -> tuple[int, int]:
        assert connection.peer is not None
        by_peer = self._of_peer[connection.peer]
        return max(self._of_source[connection.source], by_peer), by_peer


def _less(counts: Counter[_Key], key: _Key) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
