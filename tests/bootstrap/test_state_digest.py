"""The digest of the outer state: every bit, the shape, chunks that grow with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Barrier

import pytest
import torch
from blake3 import blake3
from state_kit import vectors
from torch import Tensor

from bootstrap.state import (
    chunk_size,
    state_digest,
)
from bootstrap.state import digest as module
from bootstrap.state.chunks import check_offer
from bootstrap.state.digest import HASH_BYTES, StateBytes, copied, count_chunks, root
from protocols.errors import LocalProtocolError, Malformed
from protocols.messages import StateOffer


def test_digest_is_of_the_bytes_chunk_by_chunk() -> None:
    base, momentum = vectors()
    data = base.numpy().tobytes() + momentum.numpy().tobytes()
    for chunk in (64 * 1024, 4 * 1024 * 1024):
        expected = b"".join(
            blake3(data[at : at + chunk]).digest() for at in range(0, len(data), chunk)
        )
        digest, hashes = state_digest([base, momentum], chunk)
        assert hashes == expected
        assert digest == root(len(data), chunk, expected)
    assert state_digest([base, momentum]) == state_digest([base, momentum], chunk_size(len(data)))


@pytest.mark.parametrize("threads", [1, 2, 5, 100])
def test_threads_change_neither_digest_nor_copies(threads: int) -> None:
    originals = vectors(count=100_003)
    whole = state_digest(originals, 2**16, threads=1)
    assert state_digest(originals, 2**16, threads) == whole
    copies, *found = copied(originals, 2**16, threads)
    assert tuple(found) == whole
    for copy, original in zip(copies, originals, strict=True):
        assert copy.equal(original)
        original += 1
    assert state_digest(copies, 2**16)[0] == whole[0] != state_digest(originals, 2**16)[0]


@pytest.mark.parametrize("work", [state_digest, copied])
def test_a_large_state_is_hashed_by_several_threads(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[Sequence[Tensor]], object]
) -> None:
    meeting = Barrier(2, timeout=20.0)  # broken where one thread comes alone

    def hasher(*data: bytes) -> blake3:
        if not data:  # for a chunk
            meeting.wait()
        return blake3(*data)

    monkeypatch.setattr(module, "blake3", hasher)
    monkeypatch.setattr(module, "THREADED_BYTES", 2**20)
    monkeypatch.setattr(module, "CORES", 2)
    work([torch.zeros(2**18)])


def test_every_bit_and_the_shape_count() -> None:
    base, momentum = vectors(count=40_000)
    digests = {state_digest([base, momentum])[0], state_digest([momentum, base])[0]}
    for place in (0, 39_999):
        for vector in (base, momentum):
            bits = vector.view(torch.int32)
            bits[place] ^= 1
            digests.add(state_digest([base, momentum])[0])
            bits[place] ^= 1
    digests.add(state_digest([base, momentum], 2**20)[0])
    digests.add(state_digest([base[:-1], momentum[:-1]])[0])
    assert len(digests) == 8


@pytest.mark.parametrize("lengths", [(40_000,), (40_000, 40_000), (9, 16_400, 16_400, 1)])
def test_a_state_has_as_many_vectors_as_its_outer_optimizer_wants(lengths: tuple[int, ...]) -> None:
    parts = [torch.randn(length) for length in lengths]
    data = b"".join(part.numpy().tobytes() for part in parts)
    state = StateBytes(parts)
    assert state.length == len(data)
    for start, stop in ((0, len(data)), (30, 40), (36, 65_600), (len(data) - 5, len(data))):
        assert b"".join(state.pieces(start, stop)) == data[start:stop]
    copy = [torch.zeros(length) for length in lengths]
    for at in range(0, len(data), 60_000):
        StateBytes(copy).write(at, memoryview(data)[at : at + 60_000])
    assert all(a.equal(b) for a, b in zip(copy, parts, strict=True))
    assert state_digest(copy) == state_digest(parts)


@pytest.mark.parametrize(
    ("length", "chunk"),
    [
        (8, 2**16),
        (2**22, 2**16),
        (2**22 + 8, 2**17),
        (2**28, 2**22),
        (2**38, 2**22),
        (2**40, 2**24),
    ],
)
def test_chunks_grow_with_the_state(length: int, chunk: int) -> None:
    assert chunk_size(length) == chunk


@pytest.mark.parametrize("length", [2**38, 2**38 + 8, 564 * 10**9, 3 * 4 * 2**40])
def test_an_offer_has_room_for_the_hashes_of_the_largest_state(length: int) -> None:
    """Of 2^40 parameters with two more vectors; the preset 70b has 564 GB."""
    chunk = chunk_size(length)
    hashes = bytes(HASH_BYTES * count_chunks(length, chunk))
    offer = StateOffer(1, root(length, chunk, hashes), length, chunk, hashes)
    assert StateOffer.decode(offer.encode()) == offer
    check_offer(offer, length)


@pytest.mark.parametrize(
    ("length", "chunk"), [(2**20 - 8, 2**16), (2**20 + 8, 2**16), (2**20, 2**15), (2**20, 2**23)]
)
def test_an_offer_of_another_shape_is_refused_though_its_digest_is_right(
    length: int, chunk: int
) -> None:
    """Of another length than the state has here, or in chunks that nobody cuts it into."""
    hashes = bytes(HASH_BYTES * count_chunks(length, chunk))
    offer = StateOffer(1, root(length, chunk, hashes), length, chunk, hashes)
    with pytest.raises(Malformed, match="offers"):
        check_offer(offer, 2**20)


@pytest.mark.parametrize(
    "bad",
    [
        (torch.zeros(0), torch.zeros(0)),
        (),
        (torch.zeros(4, dtype=torch.float64), torch.zeros(4)),
        (torch.zeros(8)[::2], torch.zeros(4)),
    ],
)
def test_other_vectors_are_our_own_bug(bad: tuple[Tensor, ...]) -> None:
    with pytest.raises(LocalProtocolError):
        state_digest(bad)
