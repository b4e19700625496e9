"""Greetings: what fits, what is refused and in which words, clocks."""

from __future__ import annotations

import pytest
from greeting_kit import OTHER, RUN, Host, refusal_of, refused, two_hosts
from identity_kit import identity

from bootstrap.handshake import Clocks, shared_token
from protocols.errors import OperatorError, RemoteRefused
from protocols.messages import PROTOCOL_VERSION, Hello, Welcome
from protocols.whereabouts import Whereabouts


@pytest.fixture
def hosts() -> tuple[Host, Host]:
    return two_hosts()


async def test_a_newcomer_learns_the_run_and_both_learn_addresses(
    hosts: tuple[Host, Host],
) -> None:
    newcomer, seed = hosts
    gate = seed.gate(announces=lambda: [b"one", b"two"], observed=lambda peer: "198.51.100.7:5")
    assert not gate.admitted(newcomer.peer)
    greeting = await newcomer.greet(seed)
    assert greeting.welcome.run == RUN
    assert greeting.welcome.announces == (b"one", b"two")
    assert greeting.welcome.observed == "198.51.100.7:5"
    assert gate.admitted(newcomer.peer)
    for host, other in ((newcomer, seed), (seed, newcomer)):
        known = host.whereabouts.get(other.peer)
        assert known is not None
        own = other.whereabouts.own
        assert own is not None
        assert known.data == own.data


async def test_another_run_is_named(hosts: tuple[Host, Host]) -> None:
    newcomer, seed = hosts
    seed.gate()
    error = await refused("E201", newcomer, seed, run=OTHER)
    assert OTHER.hex()[:16] in error.why
    assert RUN.hex()[:16] in error.why
    # nobody asks for a run but who has one of its own, or goes on from a checkpoint
    assert "an empty --dir, without --resume" in error.fix


async def test_who_answers_with_another_run_than_it_was_asked_for_is_not_followed(
    hosts: tuple[Host, Host],
) -> None:
    """Who greets looks itself: the other end may let in anybody."""
    newcomer, seed = hosts

    async def any_run(peer: str, body: bytes) -> bytes:
        return Welcome(PROTOCOL_VERSION, "0.1.0", RUN, 0.0, "", b"", ()).encode()

    seed.transport.on_call("hello", any_run)
    error = await refused("E201", newcomer, seed, run=OTHER)
    assert OTHER.hex()[:16] in error.why
    assert RUN.hex()[:16] in error.why


async def test_a_seed_without_a_run_fits_any(hosts: tuple[Host, Host]) -> None:
    newcomer, seed = hosts
    brought: list[tuple[str, bytes]] = []
    seed.gate(
        run=lambda: brought[0][1] if brought else b"",
        brought=lambda peer, run: brought.append((peer, run)),
    )
    assert (await newcomer.greet(seed)).welcome.run == b""
    assert not brought
    # the first to bring one hears of none yet; whoever comes later hears of that one
    assert (await newcomer.greet(seed, run=OTHER)).welcome.run == b""
    assert brought == [(newcomer.peer, OTHER)]
    assert (await newcomer.greet(seed, run=OTHER)).welcome.run == OTHER
    await refused("E201", newcomer, seed, run=RUN)
    assert len(brought) == 1


async def test_who_is_not_let_in_is_told_of(hosts: tuple[Host, Host]) -> None:
    newcomer, seed = hosts
    told: list[tuple[str, str]] = []
    seed.gate(admits=shared_token("s3cret"), refused=lambda peer, code: told.append((peer, code)))
    await refused("E203", newcomer, seed)
    await refused("E201", newcomer, seed, run=OTHER, invitation="s3cret")
    await newcomer.greet(seed, invitation="s3cret")
    assert told == [(newcomer.peer, "E203"), (newcomer.peer, "E201")]


async def test_versions_are_both_told_from_either_side(
    hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    newcomer, seed = hosts
    seed.gate()

    async def future(peer: str, body: bytes) -> bytes:
        raise RemoteRefused("version", "protocol 7, atoll 9.0\x1b[31m")

    async def unreadable(peer: str, body: bytes) -> bytes:
        return b"\xc1"

    async def newer(peer: str, body: bytes) -> bytes:
        return Welcome(8, "9.1", RUN, 0.0, "", b"", ()).encode()

    for answer, said in (
        (future, "protocol 7, atoll 9.0?[31m"),
        (unreadable, "cannot read"),
        (newer, "protocol 8, atoll 9.1"),
    ):
        seed.transport.on_call("hello", answer)
        error = await refused("E202", newcomer, seed)
        assert f"this node: protocol {PROTOCOL_VERSION}, atoll 0.2.0" in error.why
        assert said in error.why
    seed.gate()
    monkeypatch.setattr("bootstrap.handshake.PROTOCOL_VERSION", 1)
    old = Hello(0, "0.0.1", b"", 0.0, "", b"")
    with pytest.raises(RemoteRefused) as raised:
        await newcomer.transport.call(seed.peer, "hello", old.encode(), timeout=5)
    assert raised.value.code == "version"
    assert raised.value.detail == "protocol 1, atoll 0.1.0"
    with pytest.raises(RemoteRefused) as raised:
        await newcomer.transport.call(seed.peer, "hello", b"garbage", timeout=5)
    assert raised.value.code == "protocol"


@pytest.mark.parametrize("protocol", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
async def test_no_other_version_is_let_in_older_or_newer(
    hosts: tuple[Host, Host], protocol: int
) -> None:
    newcomer, seed = hosts
    gate = seed.gate()
    hello = Hello(protocol, "0.2.0", RUN, 0.0, "", b"")
    assert await refusal_of(hello, newcomer, seed) == "version"
    assert not gate.admitted(newcomer.peer)


async def test_somebody_elses_record_is_refused(hosts: tuple[Host, Host]) -> None:
    newcomer, seed = hosts
    gate = seed.gate()
    foreign = seed.whereabouts.own
    assert foreign is not None
    hello = Hello(PROTOCOL_VERSION, "0.1.0", b"", 0.0, "", foreign.data)
    assert await refusal_of(hello, newcomer, seed) == "protocol"
    assert not gate.admitted(newcomer.peer)


async def test_announcements_are_cut_to_what_fits(hosts: tuple[Host, Host]) -> None:
    newcomer, seed = hosts
    gate = seed.gate(announces=lambda: [bytes(4096)] * 1000)
    greeting = await newcomer.greet(seed)
    assert 200 < len(greeting.welcome.announces) <= 256
    assert gate.admitted(newcomer.peer)


async def test_a_newcomer_to_a_large_swarm_hears_of_as_many_as_a_greeting_names(
    hosts: tuple[Host, Host],
) -> None:
    newcomer, seed = hosts
    seed.gate(announces=lambda: [bytes(100)] * 1000)
    assert len((await newcomer.greet(seed)).welcome.announces) == 256


async def test_those_let_in_are_bounded(
    hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    newcomer, seed = hosts
    monkeypatch.setattr("bootstrap.handshake.MAX_ADMITTED", 2)
    gate = seed.gate()
    for number in range(10, 14):
        await Host(newcomer.transport.network, number).greet(seed)
    assert [gate.admitted(identity(n).peer_id) for n in range(10, 14)] == [False, False, True, True]


async def test_a_wrong_clock_is_measured_and_told(hosts: tuple[Host, Host]) -> None:
    newcomer, seed = hosts
    now = 1_000_000.0
    seed.whereabouts = Whereabouts(seed.transport, seed.identity, clock=lambda: now)
    newcomer.whereabouts = Whereabouts(newcomer.transport, newcomer.identity, clock=lambda: now)
    seed.gate(clock=lambda: now + 10.0)
    ticks = iter([now, now + 0.2])
    greeting = await newcomer.greet(seed, clock=lambda: next(ticks))
    assert greeting.offset == pytest.approx(9.9)
    assert greeting.round_trip == pytest.approx(0.2)
    clocks = Clocks()
    clocks.check()
    clocks.add(seed.peer, greeting.offset, greeting.round_trip)
    with pytest.raises(OperatorError) as raised:
        clocks.check()
    assert raised.value.code == "E301"
    assert "9.9 s behind the median of 1 peers; at most 3 s" in raised.value.why
    assert "timedatectl" in raised.value.fix


@pytest.mark.parametrize("off", [-86_400.0, -2 * 3600.0, 2 * 3600.0, 86_400.0])
async def test_a_clock_that_is_hours_off_is_told_as_that(
    hosts: tuple[Host, Host], off: float
) -> None:
    """As where local time is taken for UTC: its record has expired, or lives too long."""
    newcomer, seed = hosts
    now = 1_000_000.0
    seed.whereabouts = Whereabouts(seed.transport, seed.identity, clock=lambda: now)
    newcomer.whereabouts = Whereabouts(
        newcomer.transport, newcomer.identity, clock=lambda: now + off
    )
    newcomer.whereabouts.publish(["192.0.2.2:4390"])
    seed.gate(clock=lambda: now)
    greeting = await newcomer.greet(seed, clock=lambda: now + off)
    assert greeting.offset == pytest.approx(-off)


async def test_a_clock_that_is_put_back_by_hours_leaves_a_record_that_holds(
    hosts: tuple[Host, Host],
) -> None:
    newcomer, seed = hosts
    now = 1_000_000.0
    ahead = 3 * 3600.0
    theirs = Whereabouts(newcomer.transport, newcomer.identity, clock=lambda: now + ahead)
    theirs.publish(["192.0.2.2:4390"])
    ahead = 0.0
    own = theirs.own
    assert own is not None
    ours = Whereabouts(seed.transport, seed.identity, clock=lambda: now)
    assert ours.learn(own.data).record.addresses == ("192.0.2.2:4390",)


def test_the_median_outvotes_a_liar_and_slow_links_are_granted_doubt() -> None:
    clocks = Clocks(limit=3.0)
    for number, offset in enumerate((0.1, -0.2, 500.0)):
        clocks.add(identity(number + 1).peer_id, offset, 0.02)
    clocks.check()
    assert clocks.offset == 0.1
    ahead = Clocks(limit=3.0)
    ahead.add(identity(1).peer_id, -4.0, 2.5)
    ahead.check()
    ahead.add(identity(1).peer_id, -4.0, 0.1)
    with pytest.raises(OperatorError, match=r"4\.0 s ahead of"):
        ahead.check()
    ahead.add(identity(1).peer_id, 0.0, 5.0)  # a worse measurement changes nothing
    assert ahead.offset == -3.0


@pytest.mark.parametrize("lie", [500.0, -500.0, 1.7e308])
def test_no_single_peer_moves_the_clock_beyond_the_limit(lie: float) -> None:
    """A seed that is asked again while the node runs: with such a clock nobody would hear it."""
    clocks = Clocks(limit=3.0)
    clocks.add(identity(1).peer_id, 0.2, 0.02)
    clocks.check()
    clocks.add(identity(1).peer_id, lie, 0.01)
    assert abs(clocks.offset) == 3.0
    with pytest.raises(OperatorError):
        clocks.check()


async def test_a_record_that_does_not_hold_is_left_out(hosts: tuple[Host, Host]) -> None:
    newcomer, seed = hosts
    own = newcomer.whereabouts.own
    assert own is not None

    async def lying(peer: str, body: bytes) -> bytes:
        return Welcome(
            PROTOCOL_VERSION, "0.1.0", RUN, 0.0, "", own.data[:-1] + b"\x00", ()
        ).encode()

    seed.transport.on_call("hello", lying)
    assert (await newcomer.greet(seed)).welcome.run == RUN
    assert newcomer.whereabouts.get(seed.peer) is None
