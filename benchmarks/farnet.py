"""Networks of namespaces whose links have a distance: delay, loss, and an uplink that is narrower.

For kernels without `netem`: a small program in C (``farnet.c``, compiled when it is needed) holds
a tap interface of each namespace and passes packets on, later or not at all. Good for some hundred
Mbit/s in all. Only Linux, only as root, only with a C compiler.

>>> home = Way(up=10, down=50, delay=40, loss=0.001)
>>> with FarNetwork({"a": home, "b": home, "c": Way(up=50, down=50)}) as net:
...     server = net.python("a", "-m", "http.server", "--bind", net.address("a"))
...     net.change("a", loss=0.01)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from benchmarks import netns
from benchmarks.netns import QUEUE_MS, Network

SOURCE = Path(__file__).with_suffix(".c")
MOST = 64  # members, as in farnet.c


def available() -> bool:
    """Whether this process can make such networks here."""
    return netns.available() and shutil.which("cc") is not None and Path("/dev/net/tun").exists()


@dataclass(frozen=True)
class Way:
    """What lies between a member and the middle of the network.

    A round trip between two members takes twice the sum of their delays, and a packet between them
    has both losses before it.
    """

    up: float  # Mbit/s, headers counted as in Network
    down: float  # Mbit/s
    delay: float = 0.0  # milliseconds, each direction
    loss: float = 0.0  # of packets, each direction, each by itself


class FarNetwork(Network):
    """A :class:`Network` with a :class:`Way` for each member, which may change at any time.

    But nobody can be shut off as behind a NAT: packets are passed on whatever they carry.

    ``queue_ms``: how much waits in front of each link before packets are dropped; as long as the
    round trip is usual. ``seed``: of what is lost.
    """

    def __init__(
        self,
        ways: Mapping[str, Way],
        *,
        queue_ms: float = QUEUE_MS,
        seed: int = 0,
        congestion: str = "cubic",
    ) -> None:
        if len(ways) > MOST:
            raise ValueError(f"at most {MOST} members, not {len(ways)}")
        super().__init__(list(ways), congestion=congestion)
        self._ways = dict(ways)
        self._sides = dict.fromkeys(ways, 0)
        self._pipes: list[IO[str]] = []  # to and from the program
        self._queue_ms = queue_ms
        self._seed = seed

    def close(self) -> None:
        """See :class:`Network`."""
        super().close()
        for pipe in self._pipes:
            pipe.close()

    # --- faults ----------------------------------------------------------------------------------

    def change(self, name: str, **changes: float) -> None:
        """Give some of a member's ``up``, ``down``, ``delay`` and ``loss`` other values."""
        self._ways[name] = replace(self._ways[name], **changes)
        self._set(name)

    def darken(self, name: str) -> None:
        """Lose all packets from and to ``name``; connections are not told."""
        self._sides[name] = -1 - self.names.index(name)  # alone on its side
        self._set(name)

    def light(self, name: str) -> None:
        """Undo :meth:`darken`."""
        self.join([name])

    def cut(self, names: Sequence[str]) -> None:
        """Leave ``names`` a network of their own: nobody hears anything from the other side."""
        for name in names:
            self._sides[name] = 1
            self._set(name)

    def join(self, names: Sequence[str]) -> None:
        """Undo :meth:`cut`."""
        for name in names:
            self._sides[name] = 0
            self._set(name)

    def rate(self, name: str, mbit: float | None) -> None:
        """Bound both directions of the link of ``name``."""
        if mbit is None:
            raise ValueError("these links have a rate")
        self.change(name, up=mbit, down=mbit)

    # --- making ----------------------------------------------------------------------------------

    def _open(self) -> None:
        with tempfile.TemporaryDirectory(prefix="atoll-") as folder:
            program = os.path.join(folder, "farnet")
            subprocess.run(["cc", "-O2", "-o", program, str(SOURCE)], check=True)
            taps = [self._port(name) for name in self.names]
            arguments = [program, str(self._queue_ms), str(self._seed), *taps]
            process = subprocess.Popen(
                ["ip", "netns", "exec", self._hub, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._processes.append(process)
            assert process.stdin is not None
            assert process.stdout is not None
            self._pipes = [process.stdin, process.stdout]
            self._expect("ready")

    def _plug(self, name: str) -> None:
        index, namespace = self.names.index(name), self._namespace(name)
        hardware = f"02:00:00:00:{index >> 8:02x}:{index & 255:02x}"
        move = ("netns", namespace, "name", "eth0", "address", hardware)
        netns.ip("-n", self._hub, "link", "set", self._port(name), *move)
        self._set(name)

    def _set(self, name: str) -> None:
        way = self._ways[name]
        rates = f"{way.up} {way.down} {way.delay} {way.loss}"
        told, _ = self._pipes
        told.write(f"{self.names.index(name)} {rates} {self._sides[name]}\n")
        told.flush()
        self._expect("set")

    def _expect(self, word: str) -> None:
        heard = self._pipes[1].readline()
        if heard != f"{word}\n":
            raise OSError(f"the program that passes packets on has ended: {heard!r}")


def everywhere(names: Sequence[str], way: Way, **options: Any) -> FarNetwork:
    """A network all of whose members have the same way."""
    return FarNetwork(dict.fromkeys(names, way), **options)
