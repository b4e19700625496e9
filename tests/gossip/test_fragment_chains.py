"""Several fragments' rounds in flight at once, over one transport: whole swarms on virtual time."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import replace

import pytest
from exchange_kit import until
from simulated_swarm import Member, SimulatedSwarm, simulated_swarm

from gossip.membership.standing import changed, fragments, seen_from, with_places
from gossip.place import Place
from gossip.rounds.round import Round
from protocols.bounds import MAX_FRAGMENTS
from protocols.errors import Malformed, RemoteRefused
from protocols.identity import Identity
from protocols.memory import virtual_time
from protocols.messages import CertificateRequest, Standing

pytestmark = pytest.mark.usefixtures("remembered_signatures")


def lengths(member: Member) -> list[int]:
    """Rounds committed, by fragment."""
    return [len(replica.history) for replica in member.replicas]


def in_flight(member: Member) -> list[int]:
    """Fragments whose round has a plan here and is not over."""
    chains = member.swarm.chains
    return [c.fragment for c in chains if c.exchange.plan is not None and not c.exchange.closed]


def test_rounds_of_different_fragments_are_in_flight_at_once() -> None:
    """On links on which a round takes most of the time between two rounds."""

    async def main() -> None:
        async with simulated_swarm(
            3, size=200_000, fragments=3, uploads=[1.5e5] * 3, think=(0.5, 0.8)
        ) as swarm:
            members = list(swarm.members.values())
            together: set[tuple[int, ...]] = set()
            while min(min(lengths(m)) for m in members) < 5:
                together.update(tuple(in_flight(member)) for member in members)
                await asyncio.sleep(0.02)
                assert asyncio.get_running_loop().time() < 120.0
            swarm.agree()
            pairs = {pair for some in together for pair in itertools.combinations(some, 2)}
            assert pairs == {(0, 1), (0, 2), (1, 2)}
            for member in members:
                assert member.rejected == []
                assert member.behind == []
                assert max(lengths(member)) - min(lengths(member)) <= 3
                for replica in member.replicas:
                    assert replica.counted >= 2
                # the fragments' chains are not each other's
                heads = [{head for head, _ in replica.history} for replica in member.replicas]
                assert not heads[0] & heads[1]
                assert not heads[1] & heads[2]

    virtual_time.run(main())


def test_kills_in_the_middle_leave_every_fragment_equal() -> None:
    """Who comes back catches up with each fragment, wherever that stands."""

    async def main() -> None:
        rng = random.Random(1)
        async with simulated_swarm(
            4, seed=1, size=60_000, fragments=2, uploads=[1.5e5] * 4
        ) as swarm:
            for _ in range(2):
                victim = rng.choice(swarm.living())
                await until(lambda victim=victim: len(in_flight(victim)) == 2, 60.0)
                await swarm.kill(victim)
                before = [max(lengths(m)[f] for m in swarm.living()) for f in range(2)]
                await asyncio.sleep(rng.uniform(6.0, 9.0))
                after = [max(lengths(m)[f] for m in swarm.living()) for f in range(2)]
                assert all(now > then for now, then in zip(after, before, strict=True))
                swarm.restart(victim)
            await asyncio.sleep(12.0)
            swarm.agree()
            for fragment in range(2):
                rounds = [lengths(member)[fragment] for member in swarm.members.values()]
                assert max(rounds) - min(rounds) <= 1
            for member in swarm.members.values():
                states = [chain.status.status for chain in member.swarm.chains]
                assert states == ["active", "active"]

    virtual_time.run(main())


def test_one_fragment_that_fails_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's messages on fragment 1 arrive: its rounds stand still, the others' go on."""
    ticked = Round.tick

    def silent(self: Round, now: float) -> list[object]:
        return [] if self.place.fragment == 1 and blocked else ticked(self, now)  # type: ignore[return-value]

    blocked = True
    monkeypatch.setattr(Round, "tick", silent)

    async def main() -> None:
        nonlocal blocked
        async with simulated_swarm(3, size=20_000, fragments=3) as swarm:
            members = list(swarm.members.values())
            await until(lambda: min(lengths(m)[0] for m in members) >= 8, 60.0)
            assert all(lengths(m)[1] == 0 and lengths(m)[2] >= 6 for m in members)
            blocked = False  # and as soon as it can it goes on, from where it stands
            await until(lambda: min(lengths(m)[1] for m in members) >= 3, 60.0)
            swarm.agree()
            assert not any(m.behind for m in members)

    virtual_time.run(main())


def test_a_newcomer_comes_into_office_in_every_fragment() -> None:
    async def main() -> None:
        async with simulated_swarm(2, size=20_000, fragments=3) as swarm:
            await asyncio.sleep(4.0)
            newcomer = swarm.start(
                Identity.from_seed(b"n" * 32), status="joining", new_identity=True
            )
            await until(lambda: all(r.counted for r in newcomer.replicas), 60.0)
            swarm.agree()
            assert all(newcomer.peer in chain.replica.roster for chain in newcomer.swarm.chains)
            assert newcomer.swarm.status.status == "active"

    virtual_time.run(main())


def test_what_is_asked_of_a_fragment_that_there_is_not() -> None:
    async def main(swarm: SimulatedSwarm) -> None:
        one, other = list(swarm.members.values())[:2]
        await until(lambda: min(lengths(one)) >= 1, 30.0)
        transport = one.swarm.wiring.transport
        for fragment in (2, 2**40):
            request = CertificateRequest(one.swarm.wiring.run, fragment, 0, 1)
            with pytest.raises(RemoteRefused):
                await transport.call(other.peer, "certificates", request.encode(), timeout=2.0)
        assert other.rejected[-1] == (one.peer, f"there is no fragment {2**40}")
        stranger = replace(one.swarm.status, others=())
        one.swarm.presence.status, before = stranger, one.swarm.presence.places
        one.swarm.presence.places = lambda: before()[:1]
        with pytest.raises(Malformed, match="number of fragments"):
            other.swarm.presence.learn(one.swarm.presence.envelope())

    async def with_swarm() -> None:
        async with simulated_swarm(2, size=20_000, fragments=2) as swarm:
            await main(swarm)

    virtual_time.run(with_swarm())


def test_an_announcement_seen_from_a_fragment() -> None:
    async def main() -> None:
        async with simulated_swarm(1, size=20_000) as swarm:
            [member] = swarm.members.values()
            place = member.replica.place
            places = [replace(place, fragment=f, round=f + 1, work=10 * f) for f in range(3)]
            said = with_places(member.swarm.status, places)
            assert fragments(said) == 3
            assert seen_from(said, 0) is said
            said = changed(said, 2, ready=True, tokens=7, loss=1.5)
            assert (said.ready, said.loss) == (False, 1.5)
            seen = seen_from(said, 2)
            assert (seen.ready, seen.tokens, seen.round, seen.work) == (True, 7, 3, 20)
            assert (seen.others, seen.peer, seen.loss) == ((), said.peer, 1.5)
            said = changed(said, 1, status="joining")
            statuses = [seen_from(said, fragment).status for fragment in range(3)]
            assert statuses == ["active", "joining", "active"]
            leaving = replace(said, status="leaving")
            assert {seen_from(leaving, fragment).status for fragment in range(3)} == {"leaving"}
            # a new place keeps what was said of the contribution
            moved = with_places(said, [replace(p, round=p.round + 1) for p in places])
            assert isinstance(moved.others[1], Standing)
            assert (moved.others[1].round, moved.others[1].tokens) == (4, 7)
            assert isinstance(place, Place)

    virtual_time.run(main())


def test_the_largest_announcement_can_be_passed_on() -> None:
    """With all fragments and eight IPv6 addresses it has a fifth of its bound to spare."""

    async def main() -> None:
        async with simulated_swarm(1, size=5_000, fragments=MAX_FRAGMENTS) as swarm:
            [member] = swarm.members.values()
            presence, prefix = member.swarm.presence, "2001:0db8:85a3:0000:0000:8a2e:0370"
            for chain in member.swarm.chains:
                chain.note(ready=True, tokens=2**40, steps=10**6, weight=1e12, eta=0.25, norm=1.5)
            presence.note(
                addresses=tuple(f"[{prefix}:000{n}]:65535" for n in range(8)),
                sketch=bytes(1024),
                admission=bytes(32),
                name="n" * 64,
                total_tokens=2**50,
            )
            known = presence.known()
            assert len(known.encode()) < 4096
            assert fragments(member.swarm.status) == MAX_FRAGMENTS

    virtual_time.run(main())
