"""Networks of network namespaces on one machine: shaped links, and links that go dark.

Every name gets a namespace of its own with one interface, a veth pair into a bridge; token buckets
(`tc tbf`) on both of its ends bound what it sends and what it receives. Only Linux, only as root.

>>> with Network(["a", "b"], mbit=100) as net:
...     server = net.python("a", "-m", "http.server", "--bind", net.address("a"))
...     net.darken("a")  # from now on all packets from and to "a" are lost, nobody is told

Whatever a process that was killed has left behind is removed by the next one that makes a network.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

PREFIX = "atoll"  # of the namespaces' names: atoll-PID-COUNTER-NAME
QUEUE_MS = 50  # of packets that wait for tokens, then they are dropped
MIN_BURST = 32 * 1024  # bytes
BURST_MS = 2  # at high rates: timers need not be exact, and what the kernel sends in one piece, up
# to 64 KiB, stays whole; cut into packets before the bucket it takes both cores at 500 Mbit
ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
_numbers = itertools.count()


def available() -> bool:
    """Whether this process can make networks here."""
    tools = all(shutil.which(tool) for tool in ("ip", "tc"))
    return sys.platform == "linux" and os.geteuid() == 0 and tools


def require() -> None:
    """End the program where this process cannot make networks."""
    if not available():
        sys.exit("shaped links need Linux, root, and the commands ip and tc")


class Network:
    """Namespaces by name, all on one bridge; made on entry and gone on exit, processes included.

    ``mbit`` bounds each direction of every link (None: unshaped), headers counted: on the wire
    TCP over Ethernet takes 1.045 bytes for each byte carried. ``congestion``: of TCP, by default as
    Linux comes, whatever this machine is set to.
    """

    def __init__(
        self, names: Sequence[str], *, mbit: float | None = None, congestion: str = "cubic"
    ) -> None:
        self.names = tuple(names)
        self._mbit = mbit
        self._congestion = congestion
        self._label = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"
        self._hub = f"{self._label}-hub"
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Self:
        remove_leftovers()
        _allow(self._congestion)
        try:
            self._make()
        except BaseException:  # also Ctrl-C: half a network would stay in the kernel
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill what still runs in the namespaces and remove them."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()
        for namespace in _namespaces():
            if namespace.startswith(f"{self._label}-"):
                ip("netns", "del", namespace)

    # --- processes -------------------------------------------------------------------------------

    def address(self, name: str) -> str:
        """The IPv4 address of ``name``."""
        high, low = divmod(self.names.index(name) + 1, 250)
        return f"10.77.{high}.{low + 1}"

    def path(self, name: str) -> str:
        """The file that stands for the namespace of ``name``: what ``setns`` wants."""
        return f"/run/netns/{self._namespace(name)}"

    def command(self, name: str, arguments: Sequence[str]) -> list[str]:
        """``arguments`` as a command that runs inside of ``name``."""
        return ["ip", "netns", "exec", self._namespace(name), *arguments]

    def start(self, name: str, arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process inside of ``name``; its pid is that of the program itself."""
        process = subprocess.Popen(self.command(name, arguments), **options)
        self._processes.append(process)
        return process

    def python(self, name: str, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
        """Start this Python with ``arguments`` inside of ``name``."""
        return self.start(name, [sys.executable, *arguments], **options)

    # --- faults ----------------------------------------------------------------------------------

    def darken(self, name: str) -> None:
        """Lose all packets from and to ``name``; connections are not told."""
        ip("-n", self._hub, "link", "set", self._port(name), "down")

    def light(self, name: str) -> None:
        """Undo :meth:`darken`."""
        ip("-n", self._hub, "link", "set", self._port(name), "up")

    def cut(self, names: Sequence[str]) -> None:
        """Leave ``names`` a network of their own: nobody hears anything from the other side."""
        if "beside" not in ip("-n", self._hub, "link", "show", "type", "bridge"):
            beside = ("link", "add", "beside", "type", "bridge", "forward_delay", "0")
            ip("-n", self._hub, *beside)
            ip("-n", self._hub, "link", "set", "beside", "up")
        for name in names:
            ip("-n", self._hub, "link", "set", self._port(name), "master", "beside")

    def join(self, names: Sequence[str]) -> None:
        """Undo :meth:`cut`."""
        for name in names:
            ip("-n", self._hub, "link", "set", self._port(name), "master", "bridge")

    def rate(self, name: str, mbit: float | None) -> None:
        """Bound both directions of the link of ``name``; None: as fast as the machine can."""
        for namespace, device in self._ends(name):
            _shape(namespace, device, mbit)

    def shut(self, name: str) -> None:
        """Let nobody open a TCP connection to ``name``, which may open its own: as behind a NAT.

        The first packets are lost without an answer. Not together with :meth:`rate`.
        """
        tc, port = ["tc", "-n", self._hub], self._port(name)
        _run(*tc, *f"qdisc add dev {port} root handle 1: htb default 1".split())
        for number in (1, 2):
            _run(*tc, *f"class add dev {port} parent 1: classid 1:{number} htb rate 10gbit".split())
        _run(*tc, *f"qdisc add dev {port} parent 1:2 pfifo limit 0".split())
        syn_alone = "u32 match ip protocol 6 0xff match u8 0x02 0x12 at 33 flowid 1:2"
        _run(*tc, *f"filter add dev {port} parent 1: protocol ip prio 1 {syn_alone}".split())

    # --- making ----------------------------------------------------------------------------------

    def _make(self) -> None:
        ip("netns", "add", self._hub)
        self._open()
        for name in self.names:
            namespace = self._namespace(name)
            ip("netns", "add", namespace)
            self._plug(name)
            setting = "/proc/sys/net/ipv4/tcp_congestion_control"
            ip("netns", "exec", namespace, "sh", "-c", f"echo {self._congestion} > {setting}")
            ip("-n", namespace, "link", "set", "lo", "up")
            ip("-n", namespace, "addr", "add", f"{self.address(name)}/16", "dev", "eth0")
            ip("-n", namespace, "link", "set", "eth0", "up")

    def _open(self) -> None:
        """Make what lies between all members, in the namespace of the hub."""
        ip("-n", self._hub, "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
        ip("-n", self._hub, "link", "set", "bridge", "up")

    def _plug(self, name: str) -> None:
        """Give the namespace of ``name`` its interface eth0, the other end of which is there."""
        port = self._port(name)
        pair = ("veth", "peer", "name", "eth0", "netns", self._namespace(name))
        ip("-n", self._hub, "link", "add", port, "type", *pair)
        ip("-n", self._hub, "link", "set", port, "master", "bridge", "up")
        if self._mbit is not None:
            self.rate(name, self._mbit)

    def _namespace(self, name: str) -> str:
        return f"{self._label}-{self.names.index(name)}"

    def _port(self, name: str) -> str:
        return f"port{self.names.index(name)}"

    def _ends(self, name: str) -> tuple[tuple[str, str], tuple[str, str]]:
        return (self._hub, self._port(name)), (self._namespace(name), "eth0")


def _allow(congestion: str) -> None:
    """Namespaces may be set to what the machine lets its users choose, and to nothing else."""
    allowed = ALLOWED.read_text().split()
    if congestion not in allowed:
        ALLOWED.write_text(" ".join([*allowed, congestion]))


def remove_leftovers() -> None:
    """Remove the namespaces of processes that are gone."""
    for namespace in _namespaces():
        made_by = re.match(rf"{PREFIX}-(\d+)-", namespace)
        if made_by and not os.path.exists(f"/proc/{made_by[1]}"):
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


def _shape(namespace: str, device: str, mbit: float | None) -> None:
    tc = ["tc", "-n", namespace, "qdisc"]
    subprocess.run([*tc, "del", "dev", device, "root"], check=False, capture_output=True)
    if mbit is not None:
        burst = max(MIN_BURST, int(mbit * 1e6 / 8 * BURST_MS / 1000))
        bucket = ["tbf", "rate", f"{mbit * 1000:.0f}kbit", "burst", str(burst)]
        _run(*tc, "add", "dev", device, "root", *bucket, "latency", f"{QUEUE_MS}ms")


def _namespaces() -> list[str]:
    listed = ip("netns", "list").splitlines()
    return [line.split()[0] for line in listed if line.startswith(f"{PREFIX}-")]


def ip(*arguments: str) -> str:
    """Run the command ip; OSError with what it has said if that fails."""
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
