"""An island whose address changes under its connections: its translator forgets, or it moves.

Home routers drop their tables when they restart, and get another address from the provider. From
then on what comes from the island has another source, and what belongs to its old connections goes
nowhere, in the middle of a round. Real nodes behind netfilter.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine_kit import SETTINGS, Machine, assert_same_bits, await_merged, await_up
from nat_kit import put_behind

from benchmarks.netns import Network, available

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.timeout(500),
    pytest.mark.skipif(
        not available() or not shutil.which("nft"),
        reason="namespaces need Linux, root, ip, tc and nft",
    ),
]
MOVED = "10.77.0.200"  # where the provider puts the router


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(["one", "two", "router", "inside"], mbit=50) as made:
        yield made


def on(network: Network, name: str, *words: str) -> None:
    """Run something on one of the machines."""
    subprocess.run(network.command(name, words), check=True, capture_output=True)


def move(network: Network, name: str = "router") -> None:
    """A machine gets another address; what a router has translated is forgotten with the old."""
    on(network, name, "ip", "addr", "del", f"{network.address(name)}/16", "dev", "eth0")
    on(network, name, "ip", "addr", "add", f"{MOVED}/16", "dev", "eth0")


@pytest.mark.parametrize("kind", ["restricted", "symmetric"])
def test_the_outer_address_changes_in_the_middle_of_rounds(
    network: Network, tmp_path: Path, kind: str
) -> None:
    put_behind(network, "inside", "router", kind)
    one, two, inside = (Machine(network, name, tmp_path) for name in ("one", "two", "inside"))
    one.start("start", *SETTINGS)
    await_up(one)
    two.start("start", "--peers", one.where)
    inside.start("start", "--peers", one.where)
    await_merged(one, inside)
    await_merged(one, two)

    before = one.head()
    move(network)
    await_merged(one, two, 2)  # the others are not held up by it
    await_merged(one, inside)  # and it is back under its new address, without being started again
    await_merged(two, inside)
    assert one.head() > before + 3
    assert inside.process is not None
    assert inside.process.poll() is None
    assert_same_bits(one, two, inside)
    for machine in (inside, two, one):
        machine.stop(signal.SIGTERM)


def test_a_machine_that_has_another_address_is_called_there(
    network: Network, tmp_path: Path
) -> None:
    """As after a lease that was not renewed: the node goes on, and a newcomer finds it there."""
    one, two, third = (Machine(network, name, tmp_path) for name in ("one", "two", "router"))
    one.start("start", *SETTINGS)
    await_up(one)
    two.start("start", "--peers", one.where)
    await_merged(one, two)

    move(network, "one")
    told = f"this node's address is {MOVED}:4390 now (dial-back ok (direct))"
    one.awaits(lambda: told in one.text, "others are told")
    node = json.loads(one.api("/api/v1/state"))["node"]
    assert node["join_address"] == f"{MOVED}:4390/{one.peer}"
    third.start("start", "--peers", two.where)  # which knows where the first one is now
    await_merged(two, third)
    await_merged(one, third)
    # the two may have gone on apart while they did not reach each other: whole since the newcomer
    theirs, ours = ({r["round"]: r["state"] for r in each.rounds()} for each in (third, one))
    shared = theirs.keys() & ours.keys()
    assert shared
    assert [theirs[r] for r in shared] == [ours[r] for r in shared]
    for machine in (third, two, one):
        machine.stop(signal.SIGTERM)
