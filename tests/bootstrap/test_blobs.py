"""The manifest and the evaluation shard, asked of one peer after the other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from blake3 import blake3
from state_kit import Identities

from bootstrap.manifest import Manifest
from bootstrap.signed_manifest import SignedManifest
from bootstrap.state import (
    BlobServer,
    fetch_blob,
    fetch_manifest,
)
from protocols.bodies import BufferFeed
from protocols.errors import (
    BadSignature,
    Disagreement,
    RemoteRefused,
    TransportError,
    Unreachable,
)
from protocols.identity import PeerId
from protocols.memory import virtual_time
from protocols.memory.transport import MemoryNetwork
from protocols.messages import ManifestRequest


def blob_bench(identities: Identities) -> tuple[MemoryNetwork, Any, list[PeerId], SignedManifest]:
    me, one, two = identities(3)
    network = MemoryNetwork()
    signed = SignedManifest.create(Manifest(), one)
    mine, peers = network.join(me.peer_id), []
    for identity in (one, two):
        transport = network.join(identity.peer_id)
        BlobServer(transport, signed.run_id, manifest=signed.data, blobs=[b"shard" * 100_000])
        peers.append(transport.peer_id)
    return network, mine, peers, signed


def test_blobs_and_the_manifest_arrive(identities: Identities) -> None:
    async def main() -> None:
        _, mine, peers, signed = blob_bench(identities)
        blob = b"shard" * 100_000
        digest = blake3(blob).digest()
        assert await fetch_blob(mine, peers, signed.run_id, digest, max_bytes=10**6) == blob
        assert (await fetch_manifest(mine, peers, signed.run_id)).manifest == signed.manifest
        with pytest.raises(RemoteRefused, match="gone"):
            await fetch_blob(mine, peers, signed.run_id, bytes(32), max_bytes=10**6)
        with pytest.raises(RemoteRefused, match="protocol"):
            await fetch_blob(mine, peers, bytes(32), digest, max_bytes=10**6)
        with pytest.raises(RemoteRefused, match="protocol"):
            await fetch_manifest(mine, peers, bytes(32))
        with pytest.raises(TransportError):  # more than I am ready to take
            await fetch_blob(mine, peers, signed.run_id, digest, max_bytes=1000)
        with pytest.raises(Unreachable):
            await fetch_blob(mine, [], signed.run_id, digest, max_bytes=1000)
        assert len(ManifestRequest(signed.run_id).encode()) < 64

    virtual_time.run(main())


@pytest.mark.parametrize("first", [True, False])
def test_a_peer_cannot_pass_itself_off_as_the_creator(identities: Identities, first: bool) -> None:
    """The run's id is the hash of its manifest: whoever signs that anew has a valid one."""
    *_, impostor = identities(4)

    async def main() -> None:
        network, mine, peers, signed = blob_bench(identities)
        forged = SignedManifest.create(signed.manifest, impostor)
        assert forged.run_id == signed.run_id
        transport = network.join(impostor.peer_id)
        BlobServer(transport, forged.run_id, manifest=forged.data, blobs=[])
        asked = [impostor.peer_id, *peers] if first else [*peers, impostor.peer_id]
        with pytest.raises(Disagreement, match=f"{impostor.peer_id} names {impostor.peer_id}"):
            await fetch_manifest(mine, asked, signed.run_id)
        network.kill(impostor.peer_id)
        assert (await fetch_manifest(mine, asked, signed.run_id)).creator == signed.creator

    virtual_time.run(main())


def test_the_next_peer_is_asked_when_one_lies_or_is_down(identities: Identities) -> None:
    async def main() -> None:
        network, mine, peers, signed = blob_bench(identities)
        blob = b"shard" * 100_000
        digest = blake3(blob).digest()

        def tamper(sender: PeerId, receiver: PeerId, name: str, data: bytes) -> bytes:
            return bytes(len(data)) if sender == peers[0] and len(data) > 100 else data

        network.tamper = tamper
        assert await fetch_blob(mine, peers, signed.run_id, digest, max_bytes=10**6) == blob
        assert (await fetch_manifest(mine, peers, signed.run_id)).data == signed.data
        with pytest.raises(BadSignature, match="another hash"):
            await fetch_blob(mine, peers[:1], signed.run_id, digest, max_bytes=10**6)
        network.kill(peers[0])
        assert await fetch_blob(mine, peers, signed.run_id, digest, max_bytes=10**6) == blob

    virtual_time.run(main())


@pytest.mark.parametrize("upload", [2e3, 2e5])
def test_a_slow_peer_does_not_keep_a_newcomer_for_long(
    identities: Identities, upload: float
) -> None:
    """It may say that there are as many bytes as may be, and send a few at a time for days."""

    async def main() -> None:
        network, mine, [_, honest], signed = blob_bench(identities)
        blob = b"shard" * 100_000
        slow = network.join(identities(4)[3].peer_id, upload=upload)

        async def trickle(peer: PeerId, header: bytes) -> BufferFeed:
            return BufferFeed(bytes(2**24))

        slow.on_pull("blob", trickle)
        clock = asyncio.get_running_loop().time
        began, wanted = clock(), blake3(blob).digest()
        options: dict[str, Any] = {"max_bytes": 2**24}
        peers = [slow.peer_id, honest]
        assert await fetch_blob(mine, peers, signed.run_id, wanted, **options) == blob
        assert clock() - began < 8.0

    virtual_time.run(main())


def test_where_all_links_are_slow_it_takes_its_time(identities: Identities) -> None:
    async def main() -> None:
        network, mine, _, signed = blob_bench(identities)
        blob = b"shard" * 400_000
        narrow = network.join(identities(4)[3].peer_id, upload=3e4)
        BlobServer(narrow, signed.run_id, manifest=signed.data, blobs=[blob])
        wanted = blake3(blob).digest()
        peers = [narrow.peer_id]
        assert await fetch_blob(mine, peers, signed.run_id, wanted, max_bytes=10**7) == blob

    virtual_time.run(main())


def test_nobody_is_waited_for_without_end(identities: Identities) -> None:
    async def main() -> None:
        network, mine, [_, honest], signed = blob_bench(identities)
        network.freeze(honest)
        with pytest.raises(TransportError):
            await fetch_blob(mine, [honest], signed.run_id, bytes(32), max_bytes=10**6)
        assert asyncio.get_running_loop().time() < 60.0

    virtual_time.run(main())
