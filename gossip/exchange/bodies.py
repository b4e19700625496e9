"""The format of a merged part on the wire, and where in a body its chunks begin.

A merged part is streamed while it is merged, so what its owner states about it comes last: the
body is the encoded part and a trailer of a length that both ends know beforehand::

    BLAKE3 of the encoded part (32) | elements of each contributor, 8 each | signature (64)

in the order of the plan's contributors, big endian. Header and trailer make up the
:class:`~protocols.messages.PartResult` that the owner has signed.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import torch

from protocols.bounds import MAX_PEERS
from protocols.codecs import RangeCodec
from protocols.counts import pack_counts, runs_of
from protocols.errors import Malformed
from protocols.identity import PeerId
from protocols.messages import PartResult, TransferHeader

_DIGEST, _COUNT, _SIGNATURE = 32, 8, 64


def trailer_size(contributors: int) -> int:
    """Bytes of a trailer under a plan with this many contributors."""
    return _DIGEST + _COUNT * contributors + _SIGNATURE


MAX_TRAILER = trailer_size(MAX_PEERS)


def trailer_of(result: PartResult, contributors: int) -> bytes:
    """What is sent behind a part."""
    numbers = bytearray(_COUNT * contributors)
    for run in runs_of(result.counts):
        many = run.elements.to_bytes(_COUNT, "big") * (run.stop - run.first)
        numbers[_COUNT * run.first : _COUNT * run.stop] = many
    return result.digest + numbers + result.signature


def result_from(header: TransferHeader, owner: PeerId, trailer: bytes) -> PartResult:
    """The owner's statement, not verified yet; raises :class:`Malformed` for none at all."""
    counts = _counts(trailer[_DIGEST:-_SIGNATURE])
    if any(run.elements > header.stop - header.start for run in runs_of(counts)):
        raise Malformed("more elements than the part has")
    return result_of(header, owner, trailer[:_DIGEST], counts, trailer[-_SIGNATURE:])


def result_of(
    header: TransferHeader, owner: PeerId, digest: bytes, counts: bytes, signature: bytes = b""
) -> PartResult:
    """What an owner states about the part of a transfer."""
    return PartResult(
        header.fragment,
        header.round,
        header.start,
        header.stop,
        owner,
        header.codec,
        digest,
        counts,
        header.basis,
        signature,
    )


@lru_cache(maxsize=256)
def _counts(numbers: bytes) -> bytes:
    """The counts of a trailer as a result has them; most parts of a round have the same."""
    return pack_counts(struct.unpack(f">{len(numbers) // _COUNT}Q", numbers))


def chunk_at(codec: RangeCodec, header: TransferHeader) -> int:
    """The number of the chunk a transfer begins with; Malformed if none begins there.

    ``codec`` is any of the vector's; the transfer names its own.
    """
    at = header.start + header.done
    chunks = codec.named(header.codec).chunks(header.start, header.stop)
    for index, chunk in enumerate(chunks):
        if chunk.start == at:
            return index
    if at == header.stop:
        return len(chunks)
    raise Malformed("no chunk begins there")


def as_bytes(data: torch.Tensor) -> memoryview:
    """A uint8 tensor's memory."""
    return memoryview(data.numpy())  # type: ignore[arg-type]  # numpy's stubs lack Buffer on 3.11
