"""Networks whose links have a distance: what they promise. Needs Linux, root and a C compiler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from netns_kit import GIVE, TAKE

from benchmarks.farnet import FarNetwork, Way, available, everywhere
from benchmarks.netns import remove_leftovers

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.skipif(not available(), reason="needs Linux, root, ip, tc, cc and /dev/net/tun"),
]

ANSWER = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
    here.bind((sys.argv[1], 5000))
    print("listening", flush=True)
    while True:
        data, sender = here.recvfrom(2000)
        here.sendto(data, sender)
"""
ASK = """
import socket, statistics, sys, time
count, size, pause = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
    here.connect((sys.argv[1], 5000))
    sent, heard, trips, last = {}, 0, [], time.monotonic() + 0.5
    for i in range(count):
        sent[i] = time.monotonic()
        here.settimeout(5)
        here.send(i.to_bytes(4, "big").ljust(size, b"."))
        last = time.monotonic() + pause
        while (left := last - time.monotonic()) > 0:
            here.settimeout(left)
            try:
                data = here.recv(2000)
            except TimeoutError:
                break
            heard += 1
            trips.append(time.monotonic() - sent[int.from_bytes(data[:4], "big")])
    here.settimeout(0.5)
    try:
        while True:
            here.recv(2000)
            heard += 1
    except TimeoutError:
        pass
    print(heard, min(trips, default=9.0))
"""


def listen(net: FarNetwork, name: str, program: str) -> None:
    child = net.python(name, "-c", program, net.address(name), stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == "listening\n"


def ask(net: FarNetwork, asker: str, of: str, program: str, *arguments: object) -> list[float]:
    words = [sys.executable, "-c", program, net.address(of), *map(str, arguments)]
    done = subprocess.run(
        net.command(asker, words), capture_output=True, text=True, check=True, timeout=60
    )
    return [float(word) for word in done.stdout.split()]


def test_a_way_has_its_length_and_each_direction_its_rate() -> None:
    ways = {"a": Way(up=8, down=40, delay=20), "b": Way(up=80, down=80, delay=5)}
    with FarNetwork(ways, queue_ms=100) as net:
        listen(net, "a", ANSWER)
        heard, trip = ask(net, "b", "a", ASK, 10, 100, 0.2)
        assert heard == 10
        assert 0.05 <= trip < 0.07  # 2 * (20 + 5) ms
        for taker, giver, mbit in (("a", "b", 40), ("b", "a", 8)):
            listen(net, taker, TAKE)
            (took,) = ask(net, giver, taker, GIVE, 1_000_000)
            least = 1_000_000 * 8 / (mbit * 1e6)
            assert least < took < 2 * least + 0.5, (taker, giver)


def test_packets_are_lost_as_often_as_asked_for() -> None:
    with everywhere(["a", "b"], Way(up=100, down=100, loss=0.1)) as net:
        listen(net, "a", ANSWER)
        heard, _ = ask(net, "b", "a", ASK, 2000, 100, 0.0005)
        assert abs(heard / 2000 - 0.9**4) < 0.06  # up and down, there and back
        net.change("a", loss=0.0)
        net.change("b", loss=0.0)
        heard, _ = ask(net, "b", "a", ASK, 500, 100, 0.0005)
        assert heard == 500


def test_what_would_wait_too_long_is_dropped() -> None:
    with everywhere(["a", "b"], Way(up=1, down=1), queue_ms=50) as net:
        listen(net, "a", ANSWER)
        heard, _ = ask(net, "b", "a", ASK, 200, 1000, 0.0)
        assert 6 <= heard <= 12  # 50 ms of 1 Mbit/s are 6 kB


def test_links_go_dark_and_networks_fall_apart() -> None:
    with everywhere(["a", "b", "c"], Way(up=10, down=10)) as net:
        listen(net, "a", ANSWER)

        def reaches(name: str) -> bool:
            return ask(net, name, "a", ASK, 3, 100, 0.1)[0] > 0

        assert reaches("b")
        net.darken("b")
        assert not reaches("b")
        assert reaches("c")
        net.light("b")
        net.cut(["a", "c"])
        assert not reaches("b")
        assert reaches("c")
        net.join(["a", "c"])
        assert reaches("b")


def test_nothing_is_left_behind() -> None:
    crash = (
        "from benchmarks.farnet import *; import os\n"
        "with everywhere(['a'], Way(1, 1)) as net:\n    print(net._processes[0].pid, flush=True)\n"
        "    os.abort()"
    )
    crashing = subprocess.Popen(
        [sys.executable, "-c", crash],
        env=os.environ | {"PYTHONPATH": "."},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert crashing.stdout is not None
    with crashing.stdout:
        emulator = int(crashing.stdout.readline())
    assert crashing.wait(30) == -signal.SIGABRT
    end = time.monotonic() + 10
    while os.path.exists(f"/proc/{emulator}"):
        assert time.monotonic() < end
        time.sleep(0.01)
    remove_leftovers()
    left = subprocess.check_output(["ip", "netns", "list"], text=True)
    assert f"atoll-{crashing.pid}-" not in left
