"""Small things by content hash: the manifest and the evaluation shard."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from blake3 import blake3

from bootstrap.signed_manifest import SignedManifest
from protocols.asking import check_run
from protocols.bodies import BufferFeed
from protocols.errors import (
    BadSignature,
    Disagreement,
    RemoteProtocolError,
    RemoteRefused,
    TransferStalled,
    TransportError,
    Unreachable,
    Why,
)
from protocols.identity import PeerId
from protocols.messages import Blob, Envelope, ManifestRequest
from protocols.transport import Feed, Transport

STALL_S = 15.0  # without a byte


@dataclass(frozen=True, slots=True)
class Deadline:
    """The deadline of a body: ``patience_s``, and a second more per ``rate`` bytes that came."""

    patience_s: float
    rate: float


# the last is the slowest allowed
DEADLINES = (Deadline(5.0, 2**20), Deadline(10.0, 2**16), Deadline(30.0, 2**14))


class TooSlow(TransferStalled):
    """Bytes came, but fewer than a :class:`Deadline` asks for."""


class BlobServer:
    """Serves the manifest of one run, in its envelope, and blobs by their BLAKE3 hash.

    What is not in the table does not exist: nothing a peer sends is ever used as a path.
    """

    def __init__(
        self, transport: Transport, run: bytes, *, manifest: bytes, blobs: Iterable[bytes]
    ) -> None:
        self._run = run
        self._manifest = manifest
        self._blobs = {blake3(blob).digest(): blob for blob in blobs}
        transport.on_pull("manifest", self._on_manifest)
        transport.on_pull("blob", self._on_blob)

    async def _on_manifest(self, peer: PeerId, header: bytes) -> Feed:
        del peer  # whoever may connect may know what the run is
        check_run(ManifestRequest.decode(header).run, self._run)
        return BufferFeed(self._manifest)

    async def _on_blob(self, peer: PeerId, header: bytes) -> Feed:
        del peer
        request = Blob.decode(header)
        check_run(request.run, self._run)
        if request.digest not in self._blobs:
            raise RemoteRefused("gone", "no such blob")
        return BufferFeed(self._blobs[request.digest])


async def fetch_manifest(
    transport: Transport, peers: Sequence[PeerId], run: bytes
) -> SignedManifest:
    """The manifest of ``run``, from all of ``peers`` that have a valid one.

    The run's id does not say who has created it, and anybody can sign a manifest: so those peers
    have to name one creator. Raises :class:`Disagreement` where they do not, and where no peer has
    a valid one the last peer's failure: a :class:`TransportError`, or a
    :class:`RemoteProtocolError` where it sent something else.
    """
    request = ManifestRequest(run).encode()

    async def fetch(peer: PeerId) -> SignedManifest | TransportError | RemoteProtocolError:
        try:
            data = await _pull(
                transport, peer, "manifest", request, Envelope.MAX_BYTES, DEADLINES[-1]
            )
            return SignedManifest.open(data, run)
        except (TransportError, RemoteProtocolError) as error:
            return error

    answers = await asyncio.gather(*map(fetch, peers))
    creators = {
        answer.creator: (answer, peer)
        for answer, peer in zip(answers, peers, strict=True)
        if isinstance(answer, SignedManifest)
    }
    if len(creators) > 1:
        said = (f"{peer} names {creator}" for creator, (_, peer) in sorted(creators.items()))
        raise Disagreement("who has created the run: " + ", ".join(said))
    if creators:
        return next(iter(creators.values()))[0]
    raise next((one for one in reversed(answers) if isinstance(one, Exception)), _nobody())


async def fetch_blob(
    transport: Transport,
    peers: Sequence[PeerId],
    run: bytes,
    digest: bytes,
    *,
    max_bytes: int,
) -> bytes:
    """The bytes with this BLAKE3 hash from the first of ``peers`` that has them and is fast enough.

    A peer may announce as many as ``max_bytes``, and send them as slowly as it likes. So the next
    one is asked soon; where none is fast, slow ones are asked again, with more patience.

    Raises as :func:`fetch_manifest` does.
    """
    request = Blob(run, digest).encode()
    failure: Exception = _nobody()
    asked = list(peers)
    for deadline in DEADLINES:
        slow = []
        for peer in asked:
            try:
                data = await _pull(transport, peer, "blob", request, max_bytes, deadline)
                if (await asyncio.to_thread(blake3, data)).digest() == digest:
                    return data
                failure = BadSignature(f"{peer} sent bytes with another hash")
            except TooSlow as error:
                failure = error
                slow.append(peer)
            except (TransportError, RemoteProtocolError) as error:
                failure = error
        asked = slow
    raise failure


async def _pull(
    transport: Transport,
    peer: PeerId,
    name: str,
    header: bytes,
    max_length: int,
    deadline: Deadline,
) -> bytes:
    data = bytearray()  # grows with what arrives, not with what was announced
    end = asyncio.get_running_loop().time() + deadline.patience_s
    try:
        async with (
            asyncio.timeout_at(end) as limit,
            transport.pull(peer, name, header, max_length=max_length, timeout=STALL_S) as incoming,
        ):
            async for piece in incoming:
                data += piece
                limit.reschedule(end + len(data) / deadline.rate)
    except TimeoutError as error:
        raise TooSlow(f"{peer}: {len(data)} bytes of the {name} in all") from error
    return bytes(data)


def _nobody() -> Unreachable:
    return Unreachable("any peer", Why.NO_ADDRESS, "none was given")
