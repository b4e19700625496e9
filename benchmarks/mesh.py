"""Bare sockets, everybody to everybody over shaped links: what TCP itself leaves of a link.

    python -m benchmarks.mesh --mbit 100 --members 4 --bytes 20e6
    python -m benchmarks.mesh --mbit 100 --members 4 --bytes 20e6 --pace 4e6

The traffic of a butterfly without anything else of it: no encryption, no merging, no waiting. Each
member sends ``--bytes`` in all, in equal shares over a connection of its own to each other one.
``--pace`` bounds each connection to that many bytes a second (SO_MAX_PACING_RATE), ``--congestion``
names the algorithm that TCP is to use.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import threading
import time

from benchmarks.netns import Network, require
from node.interrupts import clean_up_at_any_end

PORT = 5000
PIECE = 1 << 20
SO_MAX_PACING_RATE = 47  # Linux's number; Python has no name for it
CONNECT_S = 20.0


def member(
    rank: int, count: int, share: int, pace: int, congestion: str, addresses: list[str]
) -> None:
    """One process: connect, then send and receive once for each line on standard input."""
    listener = socket.create_server((addresses[rank], PORT), backlog=count)
    outgoing = [_dialled(a) for i, a in enumerate(addresses) if i != rank]
    incoming = [listener.accept()[0] for _ in range(count - 1)]
    for sock in outgoing:
        if pace:
            sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, pace)
        if congestion:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    _say({"event": "met"})
    for _ in sys.stdin:
        start = time.monotonic()
        moves = [(_send, sock) for sock in outgoing] + [(_receive, sock) for sock in incoming]
        threads = [threading.Thread(target=move, args=(sock, share)) for move, sock in moves]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        _say({"start": start, "end": time.monotonic()})


def _dialled(address: str) -> socket.socket:
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            return socket.create_connection((address, PORT))
        except ConnectionRefusedError:  # it is not there yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _send(sock: socket.socket, left: int) -> None:
    piece = memoryview(bytes(PIECE))
    while left:
        left -= sock.send(piece[: min(left, PIECE)])


def _receive(sock: socket.socket, left: int) -> None:
    room = memoryview(bytearray(PIECE))
    while left:
        count = sock.recv_into(room[: min(left, PIECE)])
        if not count:
            raise ConnectionResetError("the other end has left")
        left -= count


def _say(fact: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(fact) + "\n")
    sys.stdout.flush()


def measure(
    mbit: float, count: int, total: int, pace: int, congestion: str, turns: int
) -> list[float]:
    """Seconds of each turn, from the first to begin until the last has all."""
    share = total // (count - 1)
    found = []
    with Network([f"m{i}" for i in range(count)], mbit=mbit) as net:
        addresses = [net.address(name) for name in net.names]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes = [
            net.python(
                name, "-m", "benchmarks.mesh", "--member", str(rank), "--bytes", str(share),
                "--pace", str(pace), "--congestion", congestion,
                "--addresses", *addresses, **pipes,
            )
            for rank, name in enumerate(net.names)
        ]  # fmt: skip
        for process in processes:
            process.stdout.readline()  # type: ignore[union-attr]
        for _ in range(turns):
            for process in processes:
                process.stdin.write("go\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
            facts = [json.loads(process.stdout.readline()) for process in processes]  # type: ignore[union-attr]
            found.append(max(f["end"] for f in facts) - min(f["start"] for f in facts))
    return found


def main() -> None:
    """Measure and print the share of the link that was used, turn by turn."""
    clean_up_at_any_end()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mbit", type=float, default=100)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--bytes", type=float, default=20e6)
    parser.add_argument("--pace", type=float, default=0)
    parser.add_argument("--congestion", default="", help="bbr, reno, ...; else cubic")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--member", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--addresses", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    pace, total, congestion = int(given.pace), int(given.bytes), given.congestion
    if given.addresses:
        member(given.member, len(given.addresses), total, pace, congestion, given.addresses)
        return
    require()
    for seconds in measure(given.mbit, given.members, total, pace, congestion, given.turns):
        used = total * 8 / (given.mbit * 1e6) / seconds
        print(f"{seconds:.3f} s, {used:.3f} of the link")


if __name__ == "__main__":
    main()
