"""Which connection makes way where there are as many as there may be."""

from __future__ import annotations

from contextlib import ExitStack

from protocols.connections.accepted import Connection, Connections
from protocols.identity import PeerId
from protocols.limits import Limits
from protocols.stats import TransportStats


class Table:
    """Connections, and which of them were cut."""

    def __init__(self, total: int, *, per_ip: int = 100, bodies: int = 0) -> None:
        self.stats = TransportStats()
        self.known: set[str] | None = None  # None: everybody is admitted
        limits = Limits(total=total, per_ip=per_ip, bodies=bodies)
        self.all = Connections(limits, self.stats, self.admits)
        self.cut: list[Connection] = []

    def admits(self, peer: PeerId) -> bool:
        return self.known is None or peer in self.known

    def open(self, source: str, peer: str = "") -> Connection | None:
        """Another one; with ``peer`` it proves at once whose it is."""
        connection = self.all.open(source)
        if connection is None:
            return None
        connection.cut = lambda: self.cut.append(connection)
        if peer:
            connection.proven(PeerId(peer))
        return connection

    def busy(self, connection: Connection) -> None:
        """It serves a request from now on."""
        connection.requests += 1
        self.all.changed(connection)

    def fill(self, *held: tuple[str, str]) -> list[Connection]:
        made = [self.open(source, peer) for source, peer in held]
        assert None not in made
        assert not self.cut
        return [one for one in made if one is not None]


def test_who_makes_keys_keeps_nobody_out() -> None:
    """The longest idle of the address with most goes, whatever others have."""
    table = Table(16)
    held = table.fill(*((f"evil{n % 2}", f"key{n}") for n in range(11)), *[("here", "first")] * 4)
    newcomers = [table.open(f"there{n}", f"new{n}") for n in range(3)]
    assert None not in newcomers
    assert table.cut == held[:3]
    assert table.stats.capped_connections == 3


def test_whose_address_has_most_does_not_push_others_out() -> None:
    """Its other connections all serve, so it is the new one that goes."""
    table = Table(16)
    held = table.fill(
        *(("evil", f"key{n}") for n in range(10)), *(("a", f"b{n}") for n in range(5))
    )
    for one in held[:10]:
        table.busy(one)
    new = table.open("evil", "another")
    assert table.cut == [new]
    assert table.open("c", "d") is not None
    assert table.cut == [new, held[10]]


def test_of_one_address_whoever_has_most_gives_one_up() -> None:
    table = Table(16)
    held = table.fill(*(("lan", f"peer{n}") for n in range(12)), *[("lan", "many")] * 3)
    table.open("lan", "new")
    assert table.cut == [held[12]]
    held[13].ended()
    table.open("lan", "newer")
    assert table.cut == [held[12]]


def test_a_key_that_comes_from_many_addresses_has_most() -> None:
    table = Table(16)
    held = table.fill(
        *((f"site{n // 2}", f"peer{n}") for n in range(12)), *((a, "evil") for a in "abc")
    )
    table.open("d", "new")
    assert table.cut == [held[12]]


def test_the_longest_idle_goes_and_none_that_serves() -> None:
    table = Table(16)
    held = table.fill(*[("lan", "one")] * 15)
    with held[0].serving():
        pass
    with held[1].serving():
        table.open("lan", "one")
        assert table.cut == [held[2]]
    for one in (held[0], *held[3:]):
        table.busy(one)
    table.open("lan", "one")
    assert table.cut[1].source == "lan"
    assert table.cut[1] is not held[1]
    table.busy(held[1])
    new = table.open("other", "two")
    assert table.cut[2] not in held
    assert table.cut[2] is not new
    assert table.stats.capped_connections == 3


def test_where_all_serve_a_new_one_is_refused() -> None:
    table = Table(16)
    for one in table.fill(*(("a", f"peer{n}") for n in range(15))):
        table.busy(one)
    new = table.open("b", "new")
    assert table.cut == [new]


def test_a_request_that_begins_before_the_proof_is_one() -> None:
    """As where a key is only claimed, by the request itself."""
    table = Table(16)
    held = table.fill(*[("a", "")] * 15)
    for one in held:
        one.requests += 1
        one.proven(PeerId("one"))
    new = table.open("b", "two")
    assert table.cut == [new]
    held[0].requests -= 1
    table.all.changed(held[0])
    assert table.open("b", "two") is not None
    assert table.cut == [new, held[0]]


def test_strangers_go_first_and_who_was_greeted_is_none() -> None:
    table = Table(4)
    table.known = {"friend"}
    _, silent, greeted, other = table.fill(
        ("a", "friend"), ("b", ""), ("c", "greeted"), ("d", "other")
    )
    table.known.add("greeted")
    assert table.open("e", "friend") is not None
    assert table.open("f", "friend") is not None
    assert table.cut == [silent, other]
    assert table.open("g") is None
    assert greeted not in table.cut


def test_greetings_that_were_heard_elsewhere_let_no_more_in_than_there_are_places() -> None:
    table = Table(16)
    table.known = set()
    held = table.fill(*(("a", f"peer{n}") for n in range(16)))
    table.known |= {f"peer{n}" for n in range(16)}
    assert table.open("b") is not None
    assert table.cut == [held[0]]


def test_who_is_shaking_hands_takes_no_place_of_those_admitted() -> None:
    table = Table(32)
    table.fill(*(("evil", f"key{n}") for n in range(30)))
    first, second = table.open("a"), table.open("b")
    assert first is not None
    assert second is not None
    table.open("c")
    assert table.cut == [first]
    second.proven(PeerId("second"))
    assert len(table.cut) == 2
    assert table.cut[1].source == "evil"


def test_what_somebody_waits_for_makes_no_way() -> None:
    table = Table(16)
    held = table.fill(*[("a", "")] * 14, ("b", "one"))
    for one in held[:14]:
        one.expected()
    table.open("c", "two")
    table.open("d", "three")
    assert table.cut == [held[14], table.cut[1]]
    assert table.cut[1].source == "c"


def test_bodies_of_calls_are_bounded_all_together() -> None:
    """The newest from the address that has brought most is given up."""
    table = Table(16, bodies=100)
    here, *evil = table.fill(("a", "one"), *(("evil", f"key{n}") for n in range(4)))
    with ExitStack() as stack:
        for one in (here, *evil):
            stack.enter_context(one.serving())
        here.holds(30)
        for one in evil:
            one.holds(20)
        assert table.cut == [evil[3]]
        evil[3].holds(50)  # its task has not ended yet
        evil[0].holds(10)
        here.holds(10)
        assert table.cut == [evil[3], evil[2]]
    assert table.all._held == 0
    assert not table.all._holding
    for one in (here, evil[0]):
        with one.serving():
            one.holds(100)
    assert len(table.cut) == 2


def test_whose_address_has_brought_most_does_not_push_the_bodies_of_others_out() -> None:
    """Though theirs came last."""
    table = Table(16, bodies=100)
    here, *evil = table.fill(("a", "one"), *(("evil", f"key{n}") for n in range(2)))
    with ExitStack() as stack:
        for one in (*evil, here):
            stack.enter_context(one.serving())
            one.holds(40)
        assert table.cut == [evil[1]]


def test_answers_that_nobody_takes_count_as_bodies_do() -> None:
    """The one of which nothing was taken for longest is given up, of the address that has most."""
    table = Table(16, bodies=100)
    here, *evil = table.fill(("a", "one"), *(("evil", f"key{n}") for n in range(4)))
    with ExitStack() as stack:
        for one in (here, *evil):
            stack.enter_context(one.serving())
        here.answer(30)
        for one in evil[:3]:
            one.answer(20)
        evil[0].taken()
        evil[3].answer(20)
        assert table.cut == [evil[1]]
        here.holds(20)
        assert table.cut == [evil[1], evil[2]]
        evil[1].taken()  # its task has not ended yet
    assert table.all._held == 0
    assert not table.all._holding
    with here.serving():
        here.answer(0)
    assert not table.all._holding


def test_of_an_address_it_is_what_there_is_most_of_that_makes_way() -> None:
    """Who draws out bodies pushes no answers to others of its address out, nor the reverse."""
    for answers, cut in ((1, 3), (3, 0)):
        table = Table(16, bodies=100)
        held = table.fill(*(("lan", f"key{n}") for n in range(4)))
        with ExitStack() as stack:
            for number, one in enumerate(held):
                stack.enter_context(one.serving())
                (one.answer if number < answers else one.holds)(30)
        assert table.cut == [held[cut]]
        with held[2].serving():  # a request of a connection that had an answer before
            held[2].holds(101)
        assert table.cut == [held[cut], held[2]]


def test_nothing_is_kept_of_what_has_ended() -> None:
    table = Table(2, per_ip=1)
    first, second = table.fill(("a", ""), ("b", "two"))
    assert table.open("a", "three") is None
    assert table.open("c", "four") is not None
    assert table.cut == [first]
    first.ended()  # its task comes to its end
    with first.serving():
        first.proven(PeerId("one"))
    second.ended()
    assert table.open("a", "one") is not None
    for one in list(table.all._open):
        one.ended()
    for kept in (table.all._open, table.all._of_source, table.all._of_peer):
        assert not kept
    assert not table.all._idle
    assert not table.all._strangers
