"""The directory of a run over hivemind's DHT: entries and upkeep."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
from dht_kit import RUN, Swarm, keep_hiveminds_clock
from identity_kit import identity

from bootstrap.dht import Dht
from bootstrap.handshake import Gate, greet
from bootstrap.seeds import find_peers
from protocols.addresses import PeerAddress
from protocols.envelope import seal
from protocols.errors import Malformed
from protocols.http.transport import HttpTransport
from protocols.identity import PeerId
from protocols.memory.transport import Link, MemoryNetwork
from protocols.messages import Envelope, PeerRecord
from protocols.p2p import bindings
from protocols.tasks import beside
from protocols.whereabouts import Whereabouts


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(10):
        while not await condition():  # noqa: ASYNC110  nothing tells when a record has spread
            await asyncio.sleep(0.02)


async def test_everybody_finds_every_island(swarm: Swarm) -> None:
    await swarm.grow(8)
    for dht in swarm.dhts:
        dht.keep_announced()

    async def complete() -> bool:
        return all([len(await dht.islands()) == 8 for dht in swarm.dhts])

    await until(complete)
    found = await swarm.dhts[5].islands()
    assert found[identity(2).peer_id] == PeerRecord(identity(2).peer_id, ("192.0.2.2:4390",), "")
    assert swarm.whereabouts[5].get(identity(2).peer_id) is not None


async def test_runs_do_not_mix(swarm: Swarm) -> None:
    await swarm.add()
    await swarm.add(run=b"\x01" * 32)
    for index, dht in enumerate(swarm.dhts):
        await dht.announce(swarm.record(index))
    for index, dht in enumerate(swarm.dhts):
        assert list(await dht.islands()) == [identity(index + 1).peer_id]
    for dht in swarm.dhts:  # nobody's memory is for another run's records
        assert len(dht._node.protocol.storage) == 1


async def test_a_new_record_replaces_the_old_one_everywhere(swarm: Swarm) -> None:
    await swarm.grow(6)
    assert await swarm.dhts[4].announce(swarm.record(4))
    old = swarm.record(4)
    assert await swarm.dhts[4].announce(old)  # again: it is there
    swarm.whereabouts[4].publish(["192.0.2.5:9999"])
    assert await swarm.dhts[4].announce(swarm.record(4))
    assert not await swarm.dhts[4].announce(old)
    for dht in swarm.dhts:
        assert (await dht.islands())[identity(5).peer_id].addresses == ("192.0.2.5:9999",)


async def test_a_newer_sequence_wins_though_it_expires_sooner(swarm: Swarm) -> None:
    await swarm.grow(5)
    now = time.time()
    who = identity(3)
    for sequence, lifetime in ((10, 900.0), (11, 300.0)):
        record = PeerRecord(who.peer_id, (f"192.0.2.3:{sequence}",), "")
        data = seal(
            who, record, purpose="record", run=RUN, sequence=sequence, expires=now + lifetime
        )
        assert await swarm.dhts[2].announce(data)
    for dht in swarm.dhts:
        entry = (await dht.get("record"))[who.peer_id]
        assert Envelope.decode(entry).sequence == 11


async def test_records_survive_the_death_of_most_nodes(swarm: Swarm) -> None:
    await swarm.grow(12)
    for index, dht in enumerate(swarm.dhts):
        assert await dht.announce(swarm.record(index))
    for index in range(3):  # of the five replicas at most these die
        await swarm.transports[index].aclose()
    found = await swarm.dhts[-1].islands()
    assert len(found) == 12


async def test_records_are_announced_again_at_half_their_lifetime(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protocols.whereabouts.LIFETIME", 1.0)
    monkeypatch.setattr("bootstrap.dht.RETRY", 0.1)
    await swarm.grow(3)
    swarm.dhts[1].keep_announced()
    seen: set[int] = set()

    async def thrice() -> bool:
        found = await swarm.dhts[2].get("record")
        seen.update(Envelope.decode(entry).sequence for entry in found.values())
        return len(seen) == 3

    await until(thrice)


async def test_who_lost_everybody_meets_the_seeds_again(swarm: Swarm) -> None:
    await swarm.add()
    late = await swarm.add(refresh=0.1)
    seed = swarm.transports[0].peer_id
    assert late.neighbours() == [seed]
    table = late._node.protocol.routing_table
    del table[table.get(peer_id=bindings().PeerID.from_base58(seed))]
    assert late.neighbours() == []

    async def met() -> bool:
        return late.neighbours() == [seed]

    await until(met)


async def test_who_lost_everybody_and_whose_seeds_are_gone_joins_by_who_is_there(
    swarm: Swarm,
) -> None:
    """After a long cut the members find each other, and nobody else tells the directory."""
    await swarm.grow(3)
    late = await swarm.add(refresh=0.1)
    swarm.network.kill(swarm.transports[0].peer_id)
    table = late._node.protocol.routing_table
    for uid in list(table.uid_to_peer_id):
        del table[uid]
    there = [identity(2).peer_id, identity(1).peer_id]
    late.others = lambda: there

    async def met() -> bool:
        return {identity(2).peer_id, identity(3).peer_id} <= set(late.neighbours())

    await until(met)
    assert late._seeds == [identity(1).peer_id]


async def test_alone_and_with_dead_seeds_it_still_starts() -> None:
    network = MemoryNetwork(seed=3, link=Link(latency=0.0005))
    who = identity(1)
    transport = network.join(who.peer_id)
    whereabouts = Whereabouts(transport, who)
    whereabouts.publish(["192.0.2.1:4390"])
    dht = await Dht.start(transport, whereabouts, [identity(50).peer_id], RUN)
    assert await dht.join([identity(51).peer_id]) == 0
    own = whereabouts.own
    assert own is not None
    assert await dht.announce(own.data)
    assert list(await dht.islands()) == [who.peer_id]
    await dht.aclose()
    with pytest.raises(Malformed):
        await dht.get("diary")


async def test_hivemind_tells_the_time_as_the_node_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the machine, whose clock was set ahead since, all records have expired."""
    keep_hiveminds_clock(monkeypatch)

    def steady() -> float:
        return time.time() - 3 * 3600.0

    network = MemoryNetwork(seed=3, link=Link(latency=0.0005))
    dhts: list[Dht] = []
    for number in (1, 2):
        transport = network.join(identity(number).peer_id)
        whereabouts = Whereabouts(transport, identity(number), clock=steady)
        whereabouts.publish([f"192.0.2.{number}:4390"])
        seeds = [identity(1).peer_id] if dhts else []
        dhts.append(await Dht.start(transport, whereabouts, seeds, RUN, clock=steady))
        own = whereabouts.own
        assert own is not None
        assert await dhts[-1].announce(own.data)
    for dht in dhts:
        assert len(await dht.islands()) == 2
        await dht.aclose()


async def test_a_client_is_in_nobodys_table(swarm: Swarm) -> None:
    await swarm.grow(2)
    client = await swarm.add(client_mode=True)
    assert await client.announce(swarm.record(2))
    for dht in swarm.dhts[:2]:
        assert identity(3).peer_id not in dht.neighbours()
        assert identity(3).peer_id in await dht.islands()


async def test_from_a_seeds_address_to_the_list_of_islands_over_http() -> None:
    """What a newcomer does: dial, greet, join, announce, read."""
    async with AsyncExitStack() as stack:

        async def island(number: int, seeds: list[PeerAddress]) -> tuple[Dht, PeerAddress]:
            who = identity(number)
            transport = await stack.enter_async_context(HttpTransport(who, listen="127.0.0.1:0"))
            assert transport.listening is not None
            address = PeerAddress(*transport.listening, who.peer_id)
            whereabouts = Whereabouts(transport, who, transport.book)
            whereabouts.publish([address.hostport])
            run = RUN if not seeds else b""
            known: list[PeerId] = []
            for reached in (await find_peers(transport, seeds)).reached if seeds else []:
                greeting = await greet(transport, whereabouts, reached.peer, software="0.1.0")
                run = greeting.welcome.run
                known.append(reached.peer)
            Gate(transport, whereabouts, software="0.1.0", run=lambda: run)
            dht = await Dht.start(transport, whereabouts, known, run)
            stack.push_async_callback(dht.aclose)
            await stack.enter_async_context(beside(dht.maintain()))
            dht.keep_announced()
            return dht, address

        first, seed = await island(1, [])
        dhts = [first]
        for number in range(2, 6):
            dht, _ = await island(number, [PeerAddress(seed.host, seed.port)])
            dhts.append(dht)

        async def complete() -> bool:
            return all([len(await dht.islands()) == 5 for dht in dhts])

        await until(complete)
        assert set(dhts[4].neighbours()) == {identity(n).peer_id for n in range(1, 5)}


def test_hivemind_is_imported_beside_the_event_loop() -> None:
    """On a busy machine that takes seconds: in the loop the node would neither hear nor speak."""
    program = """
import asyncio, sys, threading
from identity_kit import identity
from bootstrap.dht import Dht
from protocols.memory.transport import MemoryNetwork
from protocols.whereabouts import Whereabouts

class Witness:
    asked = set()
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hivemind" or name == "bootstrap.records":
            self.asked.add(threading.current_thread() is threading.main_thread())

async def main():
    transport = MemoryNetwork(seed=3).join(identity(1).peer_id)
    dht = await Dht.start(transport, Whereabouts(transport, identity(1)), [], bytes(32))
    await dht.aclose()

assert "hivemind" not in sys.modules
sys.meta_path.insert(0, Witness())
asyncio.run(main())
print(Witness.asked)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "{False}\n", done.stderr
