"""Real nodes over ways that are long, lose packets, and are narrow on the way up.

Three machines on two continents, one of them at home: round trips of 80 to 160 ms, a packet of a
thousand lost on each way, 10 Mbit/s up. In the middle of it one machine is killed, one loses one
packet of fifty, one is cut off for a while; those who are there go on, and whoever comes back has
what the others have.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from machine_kit import SETTINGS, Machine, assert_same_bits, await_up

from benchmarks.farnet import FarNetwork, Way, available

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not available(), reason="needs Linux, root, ip, tc, cc and /dev/net/tun"),
]

WAYS = {
    "here": Way(50, 50, delay=10, loss=0.0005),
    "there": Way(50, 50, delay=70, loss=0.0005),
    "home": Way(10, 50, delay=10, loss=0.001),
}
PATIENCE_S = 200.0


@pytest.fixture
def network() -> Iterator[FarNetwork]:
    with FarNetwork(WAYS) as made:
        yield made


def of_all(machine: Machine) -> int:
    """Rounds that all three took part in, as one of them has them."""
    return sum(round_["members"] == 3 for round_ in machine.rounds())


def test_a_swarm_of_far_and_lossy_ways_goes_on(network: FarNetwork, tmp_path: Path) -> None:
    machines = [Machine(network, name, tmp_path) for name in WAYS]
    here, there, home = machines
    here.start("start", *SETTINGS)
    await_up(here)
    for other in (there, home):
        other.start("start", "--peers", here.where)
    for machine in machines:
        machine.awaits(lambda one=machine: of_all(one) >= 5, "rounds of all three", PATIENCE_S)

    there.stop()
    head = here.head()
    here.awaits(lambda: here.head() >= head + 5, "rounds of those who are left", PATIENCE_S)
    network.change("home", loss=0.02)
    there.start("start", "--resume", "--peers", here.where)
    seen = of_all(here)
    here.awaits(lambda: of_all(here) >= seen + 5, "rounds with the one that is back", PATIENCE_S)

    network.darken("home")
    head = here.head()
    here.awaits(lambda: here.head() >= head + 5, "rounds while one is cut off", PATIENCE_S)
    network.light("home")
    seen, head = of_all(here), here.head()
    home.awaits(lambda: home.head() > head, "it has caught up", PATIENCE_S)
    here.awaits(lambda: of_all(here) >= seen + 3, "rounds of all three again", PATIENCE_S)

    assert_same_bits(*machines)
    assert all("Traceback" not in machine.text for machine in machines)
