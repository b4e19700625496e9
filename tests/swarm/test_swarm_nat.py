"""Behind a real address translator (netfilter in namespaces): the doctor, and training."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machine_kit import SETTINGS, Machine, assert_same_bits, await_merged, await_up
from nat_kit import INSIDE, dial_by, forward, let_ask, put_behind, put_beside

from benchmarks import farnet
from benchmarks.farnet import FarNetwork, Way
from benchmarks.netns import Network, available

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        not available() or not shutil.which("nft"),
        reason="namespaces need Linux, root, ip, tc and nft",
    ),
]
SEEDS = ("one", "two", "three")
OUTSIDE = "5.5.5.5"  # a router's address towards the internet


@pytest.fixture
def network() -> Iterator[Network]:
    with Network([*SEEDS, "router", "inside", "gate", "other"]) as made:
        yield made


def doctor(network: Network, name: str, directory: Path, peers: str) -> dict[str, dict[str, Any]]:
    """``node doctor --json`` in a namespace: the findings by name, of equal names the last."""
    words = ["-m", "node", "doctor", "--json", "--dir", str(directory), "--peers", peers]
    command = network.command(name, [sys.executable, *words])
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr
    found = {one["name"]: one for one in json.loads(done.stdout)["checks"]}
    found["exit"] = {"status": done.returncode}
    return found


@pytest.mark.parametrize("kind", ["full cone", "restricted", "symmetric"])
def test_the_doctor_tells_kinds_of_translators_apart(
    network: Network, tmp_path: Path, kind: str
) -> None:
    put_behind(network, "inside", "router", kind)
    seeds = [Machine(network, name, tmp_path).start("bootstrap") for name in SEEDS]
    for seed in seeds:
        await_up(seed)
    outer = network.address("router")
    found = doctor(network, "inside", tmp_path / "state", ",".join(s.where for s in seeds))
    assert (
        f"NAT with one outer address: peers see {outer}, this machine is {INSIDE}"
        in (found["nat"]["found"])
    )
    reach, mapping = found["reach"], found["mapping"]
    if kind == "full cone":
        assert "endpoint-independent" in mapping["found"]
        assert "full cone" in found["filtering"]["found"]
        assert reach["found"].startswith(f"a peer dialled back: direct at {outer}:4390")
    elif kind == "restricted":
        assert "endpoint-independent" in mapping["found"]
        assert "keeps ports" in mapping["found"]
        assert "restricted" in found["filtering"]["found"]
        assert reach["found"].startswith("outbound only: will use relay")
    else:
        assert (mapping["status"], mapping["found"][:18]) == ("warn", "endpoint-dependent")
        assert "filtering" not in found, "where every peer sees another port there is none to try"
        assert reach["found"].startswith("outbound only: will use relay")
    assert reach["status"] == ("ok" if kind == "full cone" else "warn")
    assert found["nat"]["status"] == ("ok" if kind == "full cone" else "warn")


@pytest.mark.parametrize("kind", ["restricted", "symmetric"])
def test_a_node_behind_a_translator_joins_and_trains(
    network: Network, tmp_path: Path, kind: str
) -> None:
    """Outbound only, through a relay where somebody has to call it; with work of its in rounds."""
    put_behind(network, "inside", "router", kind)
    open_, inside = (Machine(network, name, tmp_path) for name in ("one", "inside"))
    open_.start("start", *SETTINGS)
    await_up(open_)
    inside.start("start", "--peers", open_.where)
    await_merged(open_, inside)
    assert f"outbound only -> relay {open_.where}/{open_.peer}, dial-back ok" in inside.text
    assert json.loads(inside.api("/api/v1/state"))["node"]["reachability"].startswith(
        "outbound only, relay"
    )
    assert_same_bits(open_, inside)
    for machine in (inside, open_):
        machine.stop(signal.SIGTERM)


def test_a_node_whose_address_is_translated_as_in_clouds_is_dialled_there(
    network: Network, tmp_path: Path
) -> None:
    """It is told nothing of it, nor are those who join by it later."""
    put_behind(network, "inside", "router", "full cone")
    open_, inside, third = (Machine(network, name, tmp_path) for name in ("one", "inside", "two"))
    open_.start("start", *SETTINGS)
    await_up(open_)
    inside.start("start", "--peers", open_.where)
    await_merged(open_, inside)
    where = f"{network.address('router')}:4390"
    assert f"dial-back ok (direct at {where}, as peers see it)" in inside.text
    assert f"--peers {where}/{inside.peer}" in inside.text
    third.start("start", "--peers", where)
    await_merged(third, inside)
    for machine in (third, inside, open_):
        machine.stop(signal.SIGTERM)


def test_a_port_that_is_forwarded_while_a_node_runs_is_found(
    network: Network, tmp_path: Path
) -> None:
    put_behind(network, "inside", "router", "restricted")
    open_, inside = (Machine(network, name, tmp_path) for name in ("one", "inside"))
    open_.start("start", *SETTINGS)
    await_up(open_)
    inside.start("start", "--peers", open_.where)
    await_merged(open_, inside)
    assert "outbound only -> relay" in inside.text
    forward(network, "router", 4390)
    where = f"{network.address('router')}:4390"
    inside.awaits(lambda: f"this node's address is {where}" in inside.text, "an address of its own")
    assert json.loads(inside.api("/api/v1/state"))["node"]["reachability"] == ""
    await_merged(open_, inside)
    assert_same_bits(open_, inside)
    for machine in (inside, open_):
        machine.stop(signal.SIGTERM)


@pytest.mark.parametrize("relay", ["20Mbit", "0"])
def test_two_behind_translators_of_their_own_meet_past_the_relay(
    network: Network, tmp_path: Path, relay: str
) -> None:
    """It brings them together and carries nothing, also where it would carry nothing."""
    put_behind(network, "inside", "router", "restricted")
    put_behind(network, "other", "gate", "restricted")
    assert_meet(network, tmp_path, relay)


@pytest.mark.skipif(not farnet.available(), reason="links with a distance need cc and /dev/net/tun")
def test_two_behind_translators_that_refuse_strangers_meet(tmp_path: Path) -> None:
    """Over a distance: both ends' first packets have to be under way at once."""
    far, here = Way(up=50, down=50, delay=10), Way(up=50, down=50)
    ways = {"one": here, "router": far, "inside": here, "gate": far, "other": here}
    with FarNetwork(ways) as network:
        put_behind(network, "inside", "router", "refusing")
        put_behind(network, "other", "gate", "refusing")
        assert_meet(network, tmp_path, "0")


def test_two_behind_one_translator_meet_inside(network: Network, tmp_path: Path) -> None:
    """A translator as here does not send back in what came from inside for its own address."""
    put_behind(network, "inside", "router", "restricted")
    put_beside(network, "other", "router")
    assert_meet(network, tmp_path, "0")


def test_who_has_another_port_for_every_peer_is_carried(network: Network, tmp_path: Path) -> None:
    put_behind(network, "inside", "router", "symmetric")
    put_behind(network, "other", "gate", "restricted")
    seed, *two = trained(network, tmp_path, "20Mbit")
    assert count(seed, "swarm_sent_bytes", 'kind="relay"') > 0
    for machine in two:
        assert count(machine, "swarm_met_connections") == 0
        machine.stop(signal.SIGTERM)


@pytest.mark.skipif(not shutil.which("miniupnpd"), reason="needs a router: miniupnpd")
def test_a_router_forwards_the_port_where_it_is_asked(network: Network, tmp_path: Path) -> None:
    """Then the node can begin a run that others join from elsewhere, with nobody's help."""
    pytest.importorskip("miniupnpc")
    put_behind(network, "inside", "router", "restricted")
    router = let_ask(network, "router", OUTSIDE, tmp_path)
    dial_by(network, "one", OUTSIDE, "router")
    first, second = (Machine(network, name, tmp_path) for name in ("inside", "one"))
    first.start("start", "--map-port", *SETTINGS)
    where = f"{OUTSIDE}:4390"
    first.awaits(lambda: f"the router forwards {where} to this node" in first.text, "a port")
    first.awaits(lambda: f"--peers {where}/{first.peer}" in first.text, "how others join")
    assert forwarded(network) == 1
    second.start("start", "--peers", f"{where}/{first.peer}")
    await_merged(first, second)
    assert_same_bits(first, second)
    second.stop(signal.SIGTERM)
    first.stop(signal.SIGTERM)
    assert forwarded(network) == 0, "it lets go of the port"
    router.kill()


def forwarded(network: Network) -> int:
    """How many ports the router forwards."""
    command = network.command("router", ["nft", "list", "chain", "inet", "upnp", "to"])
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.count("dnat")


def assert_meet(network: Network, tmp_path: Path, relay: str) -> None:
    """The two islands behind translators merge, and nothing of it goes through the seed."""
    seed, *two = trained(network, tmp_path, relay)
    assert count(seed, "swarm_sent_bytes", 'kind="relay"') == 0
    for machine in two:
        assert count(machine, "swarm_met_connections") > 0
        state = json.loads(machine.api("/api/v1/state"))
        assert "past it" in state["node"]["reachability"]
    assert_same_bits(*two)
    for machine in two:
        machine.stop(signal.SIGTERM)


def trained(network: Network, tmp_path: Path, relay: str) -> list[Machine]:
    """A seed that is a relay at this speed, and two islands behind translators that have merged."""
    seed, inside, other = (Machine(network, name, tmp_path) for name in ("one", "inside", "other"))
    seed.start("bootstrap", "--relay", relay)
    await_up(seed)
    inside.start("start", "--peers", seed.where, *SETTINGS)
    inside.awaits(lambda: inside.head() >= 0, "a round by itself")
    other.start("start", "--peers", seed.where)
    await_merged(inside, other)
    await_merged(other, inside)
    return [seed, inside, other]


def count(machine: Machine, metric: str, label: str = "") -> float:
    """What a node's own counters say; 0 where they say nothing of it."""
    found = re.search(rf"^{metric}\S*{label}[^\n]* ([0-9.e+]+)$", machine.api("/metrics"), re.M)
    return float(found[1]) if found else 0.0
