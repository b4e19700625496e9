"""A node that is started with what an operator got wrong, and peers that it meets."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from blake3 import blake3

from bootstrap.handshake import Gate
from bootstrap.manifest import Evaluation, Manifest
from bootstrap.signed_manifest import SignedManifest
from bootstrap.state import BlobServer
from protocols.http.transport import HttpTransport
from protocols.identity import Identity
from protocols.whereabouts import Whereabouts

CREATOR, OTHER = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2))
SHARD = bytes(129)
RUN = Manifest(evaluation=Evaluation(digest=blake3(SHARD).hexdigest(), sequences=1))


START = ("start", "--listen", "127.0.0.1:0", "--api", "127.0.0.1:0", "--wait-s", "0.05")

Prepare = Callable[[HttpTransport, Whereabouts], None]


def island(
    manifest: Manifest, *, blob: bytes = SHARD, **gate: Any
) -> tuple[SignedManifest, Prepare]:
    """The greeting, manifest and shard of an island of this run, as others see them."""
    signed = SignedManifest.create(manifest, CREATOR)

    def prepare(transport: HttpTransport, whereabouts: Whereabouts) -> None:
        options: dict[str, Any] = {"software": "0.1.0", "run": lambda: signed.run_id} | gate
        Gate(transport, whereabouts, observed=transport.observed, **options)
        BlobServer(transport, signed.run_id, manifest=signed.data, blobs=[blob])

    return signed, prepare


@contextmanager
def peer(prepare: Prepare) -> Iterator[str]:
    """A peer in a thread of its own; yields its ``HOST:PORT``."""
    address: list[str] = []
    up, done = threading.Event(), threading.Event()

    async def live() -> None:
        async with HttpTransport(CREATOR, listen="127.0.0.1:0") as transport:
            assert transport.listening is not None
            address.append("{}:{}".format(*transport.listening))
            whereabouts = Whereabouts(transport, CREATOR, transport.book)
            whereabouts.publish(address)
            prepare(transport, whereabouts)
            up.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    try:
        assert up.wait(10)
        yield address[0]
    finally:
        done.set()
        thread.join(10)


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Some other program: sends ``answer`` to whoever connects."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)
