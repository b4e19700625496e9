"""The doctor between peers: whom it reaches, clocks, translators, relays, what a link carries."""

import asyncio
import socket
import time
import zlib

import pytest
from doctor_kit import config
from gossip_kit import announce_of
from http_kit import NOBODY

from bootstrap.dial_back import Reach
from bootstrap.handshake import Gate, shared_token
from bootstrap.manifest import Manifest
from bootstrap.probe import BYTES_A_MINUTE, MAX_BYTES, ProbeServer, probe
from bootstrap.signed_manifest import SignedManifest
from bootstrap.state import BlobServer
from node.doctor import machine, nat
from node.doctor.network import _ip, network
from protocols import envelope
from protocols.errors import RemoteRefused
from protocols.http.transport import HttpTransport
from protocols.identity import Identity
from protocols.memory.network import Link, MemoryNetwork
from protocols.memory.virtual_time import run as run_virtually
from protocols.transport import CHUNK_BYTES
from protocols.whereabouts import Whereabouts

pytestmark = pytest.mark.usefixtures("own_directory")

# --- peers --------------------------------------------------------------------------------------


@pytest.fixture
async def seed():
    """``await seed(…)``: a node as far as a doctor can see one; returns its join address."""
    opened = []

    async def start(admits=None, signed=None, **options):
        transport = HttpTransport(Identity.generate(), listen="127.0.0.1:0")
        await transport.start()
        opened.append(transport)
        whereabouts = Whereabouts(transport, transport.identity, transport.book)
        whereabouts.publish([f"127.0.0.1:{transport.listening[1]}"])
        more = {"admits": admits} if admits else {}
        Gate(
            transport,
            whereabouts,
            software="0.1.0",
            run=lambda: signed.run_id if signed else b"r" * 32,
            observed=transport.observed,
            **more,
            **options,
        )
        ProbeServer(transport)
        if signed:
            BlobServer(transport, signed.run_id, manifest=signed.data, blobs=[])
        return f"127.0.0.1:{transport.listening[1]}/{transport.peer_id}"

    yield start
    for transport in opened:
        await transport.aclose()


def by_name(findings):
    return {one.name: one for one in findings}


async def test_a_peer_in_order(tmp_path, seed):
    found = by_name(await network(config(tmp_path, peers=[await seed()])))
    assert {name: one.status for name, one in found.items()} == dict.fromkeys(
        ("peer", "run", "clock", "reach", "nat", "speed"), "ok"
    )
    assert "dialled back" in found["reach"].found
    assert "own address 127.0.0.1" in found["nat"].found
    assert "Mbit/s up" in found["speed"].found


async def test_seeds_count_as_no_islands(tmp_path, seed):
    now = time.time()
    told = []
    for role in ("island", "seed", "server"):
        who = Identity.generate()
        said = announce_of(who.peer_id, role=role)
        about = {"purpose": "announce", "run": b"r" * 32}
        told.append(envelope.seal(who, said, sequence=1, expires=now + 60, **about))
    found = await network(config(tmp_path, peers=[await seed(announces=lambda: tuple(told))]))
    assert "1 island announced" in by_name(found)["run"].found


async def test_the_run_that_is_looked_at_is_the_peers(tmp_path, seed):
    signed = SignedManifest.create(Manifest(name="theirs"), Identity.generate())
    learned = []
    peers = [await seed(signed=signed)]
    await network(config(tmp_path, peers=peers), learned.append)
    assert learned == [signed.manifest]
    await network(config(tmp_path, peers=[await seed()]), learned.append)
    assert len(learned) == 1  # a peer that does not tell


async def test_a_peer_that_cannot_dial_back(tmp_path, seed, monkeypatch):
    monkeypatch.setattr("bootstrap.dial_back.TIMEOUT_S", 0.5)
    found = by_name(await network(config(tmp_path, peers=[await seed()], public_addr=NOBODY)))
    assert found["reach"].status == "fail"
    assert "E302" in found["reach"].found
    assert "--public-addr" in found["reach"].found
    assert found["reach"].why == Reach.NO


async def test_a_node_that_listens_on_loopback_is_told_so(tmp_path, seed, monkeypatch):
    """No firewall lets peers in there."""
    monkeypatch.setattr(HttpTransport, "observed", lambda self, peer: "192.0.2.9:50000")
    monkeypatch.setattr("node.doctor.network.outward_address", lambda towards: "192.0.2.9")
    found = by_name(await network(config(tmp_path, peers=[await seed()])))
    assert found["nat"].status == "ok"
    assert "it listens at 127.0.0.1" in found["reach"].why
    assert "--listen 0.0.0.0:0" in found["reach"].fix


async def test_over_a_vpn_it_is_dialled_by_its_address_there(tmp_path, seed, monkeypatch):
    def towards(place):
        return place if place.startswith("127.") else "192.168.1.20"

    monkeypatch.setattr("node.entry.own_address.address_towards", towards)
    everywhere = config(tmp_path, peers=[await seed()], listen="0.0.0.0:0")
    assert by_name(await network(everywhere))["reach"].found == "a peer dialled back: direct"


async def test_a_public_address_that_is_not_where_it_comes_from_is_believed(tmp_path, seed):
    away = "192.0.2.7:4390"
    found = by_name(await network(config(tmp_path, peers=[await seed()], public_addr=away)))
    assert found["reach"].status == "ok"
    assert found["reach"].found == f"not tested: {Reach.ELSEWHERE}"


async def test_a_node_that_nobody_can_dial_is_told_its_relay(tmp_path, seed, monkeypatch):
    async def nobody(transport, peers):
        return Reach.NO

    monkeypatch.setattr("node.doctor.network.reach", nobody)
    peer = await seed()
    found = by_name(await network(config(tmp_path, peers=[peer])))
    assert found["reach"].status == "warn"
    assert f"outbound only: will use relay {peer.partition('/')[0]}" in found["reach"].found
    assert "E302" in found["reach"].why
    only = by_name(await network(config(tmp_path, peers=[peer], require_reachable=True)))
    assert only["reach"].status == "fail"
    assert "--require-reachable" in only["reach"].found


async def test_peers_that_would_not_relay(tmp_path, seed, monkeypatch):
    async def nobody(transport, peers):
        return Reach.NO

    monkeypatch.setattr("node.doctor.network.reach", nobody)
    monkeypatch.setattr("protocols.relay.server.MAX_WAITING", 0)
    found = by_name(await network(config(tmp_path, peers=[await seed()])))
    assert found["reach"].status == "fail"
    assert "none of them would relay" in found["reach"].found


# --- NAT ------------------------------------------------------------------------------------------


async def test_two_peers_say_as_what_they_see_one_port(seed):
    peers = [(await seed()).partition("/")[0] for _ in range(2)]
    found = await nat.mapping(peers)
    assert found.seen == (f"127.0.0.1:{found.local_port}",) * 2
    assert nat.mapping_finding(found).status == "ok"
    assert "keeps ports" in nat.mapping_finding(found).found


async def test_a_peer_that_does_not_say_is_left_out(seed):
    found = await nat.mapping([NOBODY, (await seed()).partition("/")[0]])
    assert len(found.seen) == 1
    assert "cannot be told" in nat.mapping_finding(found).found


async def test_peers_over_ipv4_and_ipv6_are_not_compared(monkeypatch):
    told = {"a": "203.0.113.1:7000", "b": "[2001:db8::1]:4000", "c": "203.0.113.1:7000"}

    async def seen_from(peer, port):
        return told[peer], 4000

    monkeypatch.setattr("node.doctor.nat.seen_from", seen_from)
    assert (await nat.mapping("ab")).seen == ("203.0.113.1:7000",)
    assert (await nat.mapping("abc")).seen == ("203.0.113.1:7000",) * 2


async def test_a_peer_that_sees_ipv4_mapped_is_looked_up_over_ipv4(monkeypatch):
    asked = []

    async def lookup(host, port, *, family):
        asked.append(family)
        return [(family, 1, 6, "", ("192.0.2.7", 0))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup)
    assert await _ip("peer.example", "[::ffff:203.0.113.7]:5") == "192.0.2.7"
    assert await _ip("peer.example", "nonsense") == "peer.example"
    assert asked == [socket.AF_INET]


@pytest.mark.parametrize(
    ("seen", "status", "told"),
    [
        (("203.0.113.1:7000", "203.0.113.1:7000"), "ok", "port 4000 becomes 7000"),
        (("203.0.113.1:4000", "203.0.113.1:4000"), "ok", "keeps ports"),
        (("203.0.113.1:7000", "203.0.113.1:7001"), "warn", "endpoint-dependent"),
        (("203.0.113.1:7000", "203.0.113.2:7000"), "warn", "endpoint-dependent"),
        (("203.0.113.1:7000",), "ok", "1 of the two peers"),
        ((), "ok", "0 of the two peers"),
    ],
)
def test_kinds_of_mapping(seen, status, told):
    found = nat.mapping_finding(nat.Mapping(4000, seen))
    assert found.status == status
    assert told in found.found


async def test_a_public_address_tried_from_inside(seed):
    where = (await seed()).partition("/")[0]
    assert (await nat.hairpin(where)).status == "ok"
    found = await nat.hairpin(NOBODY)
    assert (found.status, found.name) == ("warn", "hairpin")
    assert "--peers" in found.fix
    assert (await nat.hairpin("no address")).status == "warn"  # what a peer has made up


async def test_behind_a_translator_the_mapping_is_a_finding(tmp_path, seed, monkeypatch):
    """Peers see another address: what kind of NAT that is, and its address from inside."""
    monkeypatch.setattr("node.doctor.network.outward_address", lambda towards: "10.9.9.9")
    peers = [await seed(), await seed()]
    found = by_name(await network(config(tmp_path, peers=peers)))
    assert "NAT with one outer address" in found["nat"].found
    assert found["mapping"].found.startswith("endpoint-independent")
    assert found["hairpin"].status == "ok"  # on loopback the outer address is this machine's


async def test_a_peer_may_be_given_by_its_name(tmp_path, seed, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "node.doctor.network.outward_address", lambda towards: asked.append(towards) or towards
    )
    peer = (await seed()).replace("127.0.0.1", "localhost")
    found = by_name(await network(config(tmp_path, peers=[peer])))
    assert asked == ["127.0.0.1"]
    assert found["nat"].found.startswith("none")


async def test_a_peer_that_is_not_there_beside_one_that_is(tmp_path, seed):
    alone = await network(config(tmp_path, peers=[NOBODY]))
    assert [(one.status, one.found[:4]) for one in alone] == [("fail", "E101")]
    both = await network(config(tmp_path, peers=[NOBODY, await seed()]))
    assert [one.status for one in both if one.name == "peer"] == ["warn", "ok"]


async def test_a_clock_that_is_off(tmp_path, seed):
    import time

    found = by_name(
        await network(config(tmp_path, peers=[await seed(clock=lambda: time.time() + 60)]))
    )
    assert found["clock"].status == "fail"
    assert "behind the median of 1 peers" in found["clock"].why


async def test_an_invitation_that_is_wanted(tmp_path, seed):
    peer = await seed(admits=shared_token("open sesame"))
    found = by_name(await network(config(tmp_path, peers=[peer])))
    assert "E203" in found["greeting"].found
    found = by_name(await network(config(tmp_path, peers=[peer], invitation="open sesame")))
    assert found["reach"].status == "ok"


async def test_the_port_of_a_node_that_runs_is_left_alone(tmp_path, seed):
    from node.statedir import StateDir

    home = StateDir(tmp_path / "state")
    home.lock()
    try:
        found = by_name(await network(config(tmp_path, peers=[await seed()])))
        assert "not tested: process" in found["reach"].found
        assert [one.found for one in machine.ports(config(tmp_path))] != []
        assert "has them" in machine.ports(config(tmp_path))[0].found
    finally:
        home.unlock()
    assert home.holder() is None


async def test_without_peers_it_says_so(tmp_path):
    assert [one.status for one in await network(config(tmp_path))] == ["warn"]


@pytest.mark.parametrize(
    ("seen", "begins", "translated"),
    [
        ([], "cannot be told", False),
        ([("203.0.113.7:52011", "203.0.113.7")], "none", False),
        ([("[::ffff:203.0.113.7]:5", "203.0.113.7")], "none", False),
        (
            [("203.0.113.7:1", "192.168.1.4"), ("203.0.113.7:2", "192.168.1.4")],
            "NAT with one",
            True,
        ),
        ([("203.0.113.7:1", "10.0.0.4"), ("203.0.113.8:2", "10.0.0.4")], "NAT with several", True),
        ([("203.0.113.7:1", "100.66.0.4")], "carrier-grade", True),
    ],
)
def test_what_is_said_of_a_nat(seen, begins, translated):
    found = nat.describe(seen)
    text, does = found.text, found.translated
    assert text.startswith(begins)
    assert does is translated


# --- the probe ----------------------------------------------------------------------------------


async def _pull(transport, peer):
    """Have ``peer`` send the largest body it gives; its bytes."""
    header = MAX_BYTES.to_bytes(8, "little")
    count = 0
    async with transport.pull(peer, "probe", header, max_length=MAX_BYTES, timeout=5) as incoming:
        async for piece in incoming:
            count += len(piece)
    return count


def test_a_probe_measures_a_link_and_is_bounded():
    async def main():
        net = MemoryNetwork(seed=1, upload=2e6)
        one, other = (net.join(Identity.generate().peer_id) for _ in range(2))
        ProbeServer(other)
        speeds = await probe(one, other.peer_id)
        assert speeds.upload == pytest.approx(2e6, rel=0.25)
        assert speeds.download == pytest.approx(2e6, rel=0.25)
        fast = MemoryNetwork(seed=1, link=Link(latency=0.0))
        one, other = (fast.join(Identity.generate().peer_id) for _ in range(2))
        ProbeServer(other)
        for _ in range(BYTES_A_MINUTE // MAX_BYTES):
            assert await _pull(one, other.peer_id) == MAX_BYTES
        with pytest.raises(RemoteRefused) as refused:
            await _pull(one, other.peer_id)
        assert refused.value.code == "busy"

    run_virtually(main())


def test_readers_of_a_probe_share_its_noise():
    """Each may read as slowly as it likes, and many may. Zeros would be packed for a slow link."""

    async def main():
        net = MemoryNetwork(seed=1)
        server = ProbeServer(net.join(Identity.generate().peer_id))
        lying_in = set()
        for length in (MAX_BYTES, MAX_BYTES - 1, 1):
            feed = await server._give("", length.to_bytes(8, "little"))
            pieces = []
            while piece := feed.next():
                pieces.append(memoryview(piece))
            lying_in |= {id(piece.obj) for piece in pieces}
            whole = b"".join(pieces)
            assert len(zlib.compress(whole[:CHUNK_BYTES])) >= min(length, CHUNK_BYTES)
            assert len(whole) == length
            assert feed.length == length
        assert len(lying_in) == 1

    run_virtually(main())
