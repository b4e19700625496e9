"""Islands that nobody can dial, as behind a home router: real nodes in network namespaces.

What the network does to them: whoever tries to open a connection to a hidden machine hears
nothing, and what such a machine opens itself works.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machine_kit import SETTINGS, Machine, assert_same_bits, await_merged, await_up

from benchmarks.netns import Network, available

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.timeout(500),
    pytest.mark.skipif(not available(), reason="namespaces need Linux, root, ip and tc"),
]


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(["seed", "open", "home", "flat"]) as made:
        for hidden in ("home", "flat"):
            made.shut(hidden)
        yield made


@pytest.fixture
def machines(network: Network, tmp_path: Path) -> dict[str, Machine]:
    """Four machines, of which ``home`` and ``flat`` cannot be dialled."""
    return {name: Machine(network, name, tmp_path) for name in network.names}


def carried(machine: Machine) -> float:
    """Bytes that a machine has carried for others."""
    found = re.search(r'sent[^\n]*kind="relay"[^\n]*\} ([0-9.e+]+)', machine.api("/metrics"))
    return float(found[1]) if found else 0.0


def await_relay(hidden: Machine, relay: Machine) -> None:
    """Wait until a hidden node says that its relay is gone, and that it has this one now."""
    now = f"peers call this node through {relay.where}"
    hidden.awaits(lambda: now in hidden.text, "another relay")
    assert re.search(r"E302: the relay \S+ is gone", hidden.text)


def test_a_hidden_island_takes_part_and_comes_back_when_killed(
    machines: dict[str, Machine], record_property: Any
) -> None:
    """Its work is merged, and nothing has to be carried: it dials the open island itself."""
    open_, home = machines["open"], machines["home"]
    open_.start("start", *SETTINGS)
    await_up(open_)
    home.start("start", "--peers", open_.where)
    await_merged(open_, home)
    relay = f"{open_.where}/{open_.peer}"
    assert f"outbound only -> relay {relay}, dial-back ok" in home.text
    assert f"node start --peers {relay}" in home.text  # what others can join by
    state = json.loads(home.api("/api/v1/state"))
    assert state["node"]["reachability"] == f"outbound only, relay {relay}"
    home.stop()
    home.start("start", "--resume", "--peers", open_.where)
    await_merged(open_, home)
    assert carried(open_) == 0
    assert_same_bits(open_, home)
    for machine in (home, open_):
        machine.stop(signal.SIGTERM)


def test_two_hidden_islands_and_a_relay_that_dies(
    machines: dict[str, Machine], record_property: Any
) -> None:
    """Between them the relay carries; when it is gone, they go on through the open island."""
    seed, open_, home, flat = (machines[name] for name in ("seed", "open", "home", "flat"))
    seed.start("bootstrap")
    await_up(seed)
    open_.start("start", "--peers", seed.where, *SETTINGS)
    await_up(open_)
    for hidden in (home, flat):
        hidden.start("start", "--peers", seed.where)
    await_merged(home, flat)
    await_merged(flat, home)
    record_property("carried_bytes", carried(seed))
    assert carried(seed) > 0
    seed.stop()
    for hidden in (home, flat):
        await_relay(hidden, open_)
    for hidden in (home, flat):
        await_merged(open_, hidden)
    await_merged(home, flat)
    open_.awaits(lambda: carried(open_) > 0, "what one of them has for the other")
    assert_same_bits(open_, home, flat)
    for machine in (home, flat, open_):
        machine.stop(signal.SIGTERM)


def test_over_a_vpn_a_node_is_dialled_by_its_address_there(
    network: Network, machines: dict[str, Machine]
) -> None:
    """Its way to the internet is another interface, by which no other gets to it."""
    first, second = machines["seed"], machines["open"]
    for number, machine in enumerate((first, second), start=1):
        lan = f"192.168.{number}"
        for words in (
            ("link", "add", "lan0", "type", "veth", "peer", "name", "router"),
            ("addr", "add", f"{lan}.2/24", "dev", "lan0"),
            ("link", "set", "lan0", "up"),
            ("link", "set", "router", "up"),
            ("route", "add", "default", "via", f"{lan}.1"),
        ):
            subprocess.run(network.command(machine.name, ["ip", *words]), check=True)
    first.start("start", *SETTINGS)
    await_up(first)
    second.start("start", "--peers", first.where)
    await_merged(first, second)
    assert "reach    dial-back ok (direct)" in second.text
    assert f"node start --peers {second.where}/{second.peer}" in second.text
    for machine in (second, first):
        machine.stop(signal.SIGTERM)


def test_one_that_must_be_reachable_is_refused(machines: dict[str, Machine]) -> None:
    seed, home = machines["seed"], machines["home"]
    seed.start("bootstrap")
    await_up(seed)
    home.start("start", "--peers", seed.where, "--require-reachable")
    assert home.process is not None
    assert home.process.wait(100) == 1
    assert "error E302: peers cannot dial this node" in home.text
    assert "--require-reachable" in home.text
    assert "Traceback" not in home.text
