"""How fast a long body travels between two processes: ``python -m benchmarks.transport``.

``raw`` is what bare blocking sockets do (``sendall`` and ``recv_into``), ``plain`` and ``tls`` are
pushes of the transport from one buffer into another. They take turns; ``--json FILE`` keeps best
and median in GB/s and the CPU seconds per GB of either side. As root on Linux also the efficiency
of shaped links: bytes of the body / bandwidth / time, with TLS, between two network namespaces.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.netns import Network, available
from benchmarks.output import write
from protocols.bodies import BufferFeed, read_into
from protocols.http.transport import HttpTransport
from protocols.identity import Identity, PeerId
from protocols.transport import Incoming

KINDS = ("raw", "plain", "tls")
SERVER, CLIENT = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2))
PIECE = 1 << 20
PORT = 4390
TIMEOUT_S = 60.0


# --- the receiving process ----------------------------------------------------------------------


async def serve(host: str, size: int) -> None:
    """Take bodies of ``size`` bytes until standard input ends; each answer is the CPU time."""
    target = memoryview(bytearray(size))

    async def take(peer: PeerId, header: bytes, body: Incoming) -> bytes:
        began = time.process_time()
        await read_into(body, target)
        return str(time.process_time() - began).encode()

    async with contextlib.AsyncExitStack() as stack:
        ports = {"raw": PORT + 2}
        for port, kind in ((PORT, "tls"), (PORT + 1, "plain")):
            transport = HttpTransport(SERVER, listen=f"{host}:{port}", tls=kind == "tls")
            transport.on_push("take", take, max_length=size)
            await stack.enter_async_context(transport)
            ports[kind] = port
        listener = socket.create_server((host, ports["raw"]))
        with listener:
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.to_thread(_serve_raw, listener, target))
                try:
                    print("ready", flush=True)
                    await asyncio.to_thread(sys.stdin.read)
                finally:
                    listener.shutdown(socket.SHUT_RDWR)


def _serve_raw(listener: socket.socket, target: memoryview) -> None:
    while True:
        try:
            link, _ = listener.accept()
        except OSError:  # shut down
            return
        with link:
            while link.recv(1):
                began, at = time.process_time(), 0
                while at < len(target):
                    at += link.recv_into(target[at : at + PIECE])
                link.sendall(str(time.process_time() - began).encode().ljust(32))


# --- the sending process ------------------------------------------------------------------------


async def push(host: str, size: int, kinds: list[str], turns: int) -> list[dict[str, Any]]:
    """Send ``turns`` bodies in each way, in turns, over connections that are kept."""
    data = memoryview(os.urandom(size))  # zeros would be packed for a slow link
    results = []
    async with contextlib.AsyncExitStack() as stack:
        transports = {}
        for port, kind in ((PORT, "tls"), (PORT + 1, "plain")):
            transport = HttpTransport(CLIENT, tls=kind == "tls")
            transport.book.add(SERVER.peer_id, f"{host}:{port}")
            transports[kind] = await stack.enter_async_context(transport)
        link: socket.socket | None = None
        if "raw" in kinds:
            link = stack.enter_context(socket.create_connection((host, PORT + 2)))
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for turn in range(-1, turns):  # turn -1 only takes the buffers' page faults
            for kind in kinds:
                began, cpu = time.perf_counter(), time.process_time()
                if kind == "raw":
                    assert link is not None
                    answer = await asyncio.to_thread(_push_raw, link, data)
                else:
                    answer = await transports[kind].push(
                        SERVER.peer_id, "take", b"", BufferFeed(data), timeout=TIMEOUT_S
                    )
                if turn >= 0:
                    seconds = time.perf_counter() - began
                    sent = time.process_time() - cpu
                    results.append([kind, seconds, sent, float(answer)])
    return [dict(zip(("kind", "seconds", "client", "server"), r, strict=True)) for r in results]


def _push_raw(link: socket.socket, data: memoryview) -> bytes:
    link.sendall(b"x")
    for at in range(0, len(data), PIECE):
        link.sendall(data[at : at + PIECE])
    return link.recv(32, socket.MSG_WAITALL)


# --- both ---------------------------------------------------------------------------------------


def together(
    size: int, kinds: tuple[str, ...], turns: int, network: Network | None = None
) -> list[dict[str, Any]]:
    """Run both processes, in two namespaces if there is a network."""
    host = network.address("server") if network else "127.0.0.1"
    module = [sys.executable, "-m", "benchmarks.transport"]
    serving = [*module, "--serve", host, "--size", str(size)]
    pushing = [*module, "--push", host, "--size", str(size), "--turns", str(turns), *kinds]
    if network:
        serving, pushing = network.command("server", serving), network.command("client", pushing)
    server = subprocess.Popen(serving, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None
    assert server.stdout is not None
    with server:
        server.stdout.readline()
        done = subprocess.run(pushing, stdout=subprocess.PIPE, text=True, check=True)
        server.stdin.close()
    results: list[dict[str, Any]] = json.loads(done.stdout)
    return results


def measure(size: int, turns: int, links: dict[float, int]) -> dict[str, Any]:
    """All of it; ``links`` says how many bytes to send over a link of that many Mbit/s."""
    result: dict[str, Any] = {"bytes": size, "turns": turns, "python": platform.python_version()}
    runs = together(size, KINDS, turns)
    for kind in KINDS:
        mine = [run for run in runs if run["kind"] == kind]
        seconds = [run["seconds"] for run in mine]
        result[kind] = {
            "best_gb_s": round(size / min(seconds) / 1e9, 2),
            "median_gb_s": round(size / statistics.median(seconds) / 1e9, 2),
            **{
                f"{side}_cpu_s_per_gb": round(
                    statistics.median(run[side] for run in mine) / size * 1e9, 2
                )
                for side in ("client", "server")
            },
        }
    for mbit, amount in links.items() if available() else ():
        with Network(["server", "client"], mbit=mbit) as network:
            taken = [run["seconds"] for run in together(amount, ("tls",), 3, network)]
        result[f"link_efficiency_{mbit:g}mbit"] = round(
            amount * 8 / (mbit * 1e6) / statistics.median(taken), 4
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="the same figures of fewer bytes")
    parser.add_argument("--turns", type=int, default=0, help="bodies of each kind")
    parser.add_argument("--size", type=int, default=256 << 20, help="bytes of a body")
    parser.add_argument("--no-links", action="store_true", help="no shaped links")
    parser.add_argument("--serve", metavar="HOST", help=argparse.SUPPRESS)
    parser.add_argument("--push", metavar="HOST", help=argparse.SUPPRESS)
    parser.add_argument("kinds", nargs="*", default=list(KINDS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    turns = options.turns or (3 if options.quick else 9)
    if options.serve:
        asyncio.run(serve(options.serve, options.size))
    elif options.push:
        runs = asyncio.run(push(options.push, options.size, options.kinds, turns))
        print(json.dumps(runs))
    else:
        seconds = 1 if options.quick else 4
        links = {mbit: int(mbit * 1e6 / 8 * seconds) for mbit in (20.0, 100.0, 500.0)}
        result = measure(options.size, turns, {} if options.no_links else links)
        write(result, "-")
        if options.json:
            write(result, options.json)


if __name__ == "__main__":
    main()
