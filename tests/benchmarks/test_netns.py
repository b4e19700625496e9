"""Networks of namespaces: what benchmarks and fault tests rely on. Needs Linux and root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from netns_kit import GIVE, TAKE

from benchmarks.netns import ALLOWED, Network, available, remove_leftovers

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.skipif(not available(), reason="namespaces need Linux, root, ip and tc"),
]

REACH = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 5001), timeout=0.5)
except ConnectionRefusedError:
    print("reached")
except TimeoutError:
    print("silence")
"""


def seconds(net: Network, count: int) -> float:
    """How long ``count`` bytes take from b to a."""
    taking = net.python("a", "-c", TAKE, net.address("a"), stdout=subprocess.PIPE, text=True)
    assert taking.stdout is not None
    assert taking.stdout.readline() == "listening\n"
    took = ask(net, GIVE, str(count))
    assert taking.wait(10) == 0
    taking.stdout.close()
    return float(took)


def ask(net: Network, program: str, *arguments: str) -> str:
    command = net.command("b", [sys.executable, "-c", program, net.address("a"), *arguments])
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_links_have_their_rate_and_go_dark() -> None:
    with Network(["a", "b"], mbit=80) as net:
        assert 0.5 < seconds(net, 5_000_000) / (5_000_000 * 8 * 1.045 / 80e6) < 2
        net.rate("a", 8)
        assert 0.5 < seconds(net, 500_000) / (500_000 * 8 * 1.045 / 8e6) < 2
        assert ask(net, REACH) == "reached\n"
        net.darken("a")
        assert ask(net, REACH) == "silence\n"
        net.light("a")
        assert ask(net, REACH) == "reached\n"


def test_nothing_is_left_behind() -> None:
    with Network(["a"]) as net:
        child = net.start("a", ["sleep", "60"])
        assert child.poll() is None
    assert child.poll() is not None
    crash = "from benchmarks.netns import Network; import os\nwith Network(['a']): os.abort()"
    crashing = subprocess.Popen([sys.executable, "-c", crash], env=os.environ | {"PYTHONPATH": "."})
    assert crashing.wait(30) == -signal.SIGABRT
    assert f"atoll-{crashing.pid}-" in namespaces()
    remove_leftovers()
    assert f"atoll-{crashing.pid}-" not in namespaces()
    assert f"atoll-{os.getpid()}-" not in namespaces()


def namespaces() -> str:
    return subprocess.check_output(["ip", "netns", "list"], text=True)


def test_a_machine_that_lets_its_users_choose_no_cubic_is_no_obstacle() -> None:
    before = ALLOWED.read_text()
    others = [name for name in before.split() if name != "cubic"]
    try:
        ALLOWED.write_text(" ".join(others))
        with Network(["a"]) as net:
            setting = ["cat", "/proc/sys/net/ipv4/tcp_congestion_control"]
            assert subprocess.check_output(net.command("a", setting), text=True) == "cubic\n"
        assert set(ALLOWED.read_text().split()) == {*others, "cubic"}  # nothing is taken away
    finally:
        ALLOWED.write_text(before)
