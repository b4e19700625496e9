"""The residual of an island over committed rounds: what is included is settled, the rest stays."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from node.residual import Residual
from protocols.codecs import CHUNK, RangeCodec
from protocols.identity import Identity, PeerId
from protocols.messages import Contributor, Included, Outcome, PartResult

SIZE = 3 * CHUNK + 5000
DENSE = SIZE - 700
CUT = 2 * CHUNK + 2048  # the first part has a chunk more than two
ME, OTHER = (Identity.generate().peer_id for _ in range(2))


def normal(seed: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def outcome(parts: Sequence[tuple[int, int, PeerId, Sequence[Included]]], codec: str) -> Outcome:
    results = tuple(
        PartResult(0, 1, start, stop, owner, codec, bytes(32), tuple(included), bytes(32), b"")
        for start, stop, owner, included in parts
    )
    contributors = (Contributor(OTHER, 1.0, 1, True), Contributor(ME, 1.0, 1, True))
    return Outcome(0, 1, bytes(32), bytes(32), codec, contributors, results, (ME, OTHER), 2)


class Delta:
    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __call__(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(self.values[start:stop])


def decoded(codec: RangeCodec, start: int, values: torch.Tensor) -> torch.Tensor:
    data = torch.empty(codec.encoded_size(start, start + len(values)), dtype=torch.uint8)
    codec.encode(start, values, data)
    out = torch.empty_like(values)
    codec.decode(start, data, out)
    return out


@pytest.mark.parametrize("name", ["int2", "int1", "top12", "top3", "int4"])
def test_exactly_what_was_included_is_settled(name: str) -> None:
    codec, residual = RangeCodec(name, DENSE), Residual(SIZE, 0.9)
    residual.values.copy_(normal(1))
    before, delta = residual.values.clone(), normal(2)
    x = residual.add_to(delta.clone(), 0)
    assert torch.equal(x, delta + before * 0.9)
    assert torch.equal(residual.values, before)

    reached = CHUNK  # the other owner gave up on us after a chunk
    residual.settle(
        outcome(
            [
                (0, CUT, OTHER, [Included(0, CUT), Included(1, reached)]),
                (CUT, SIZE, ME, [Included(0, SIZE - CUT), Included(1, SIZE - CUT)]),
            ],
            name,
        ),
        ME,
        codec,
        Delta(delta),
    )
    kept = x[:reached] - decoded(codec, 0, x[:CUT])[:reached]
    assert torch.equal(residual.values[:reached], kept)
    assert torch.equal(residual.values[reached:CUT], before[reached:CUT])
    assert not residual.values[CUT:].any()  # added as it was, to my own part


def test_nothing_included_leaves_everything() -> None:
    codec, residual = RangeCodec("int2", DENSE), Residual(SIZE, 0.9)
    residual.values.copy_(normal(1))
    for included in ([], [Included(0, SIZE)], [Included(1, 0)]):
        residual.settle(outcome([(0, SIZE, OTHER, included)], "int2"), ME, codec, Delta(normal(2)))
        assert torch.equal(residual.values, normal(1))


def test_what_i_lost_as_owner_comes_back_by_my_share() -> None:
    codec, residual = RangeCodec("int2", DENSE), Residual(SIZE, 0.9)
    mean, share = normal(3), 0.25
    data = torch.empty(codec.encoded_size(CUT, SIZE), dtype=torch.uint8)
    codec.encode(CUT, mean[CUT:], data)
    for chunk in codec.chunks(CUT, SIZE):
        piece = data[chunk.offset : chunk.offset + chunk.size]
        residual.note_lost(codec, chunk, mean[chunk.start : chunk.stop], piece, share)
    assert not residual.values.any()  # until the round commits
    everything = [
        (0, CUT, OTHER, [Included(0, CUT)]),
        (CUT, SIZE, ME, [Included(0, SIZE - CUT), Included(1, SIZE - CUT)]),
    ]
    residual.settle(outcome(everything, "int2"), ME, codec, Delta(normal(2)))
    lost = mean[CUT:] - decoded(codec, CUT, mean[CUT:])
    assert torch.allclose(residual.values[CUT:], lost / share)
    assert not residual.values[:CUT].any()

    residual.settle(outcome(everything, "int2"), ME, codec, Delta(normal(2)))
    assert not residual.values.any()  # noted for one round only


def test_a_chunk_merged_twice_leaves_nothing_behind() -> None:
    codec, residual = RangeCodec("int1", DENSE), Residual(SIZE, 0.9)
    chunk = codec.chunks(0, SIZE)[0]
    data = torch.empty(chunk.size, dtype=torch.uint8)
    codec.encode_chunk(chunk, normal(1)[:CHUNK], data)
    for _ in range(2):
        residual.note_lost(codec, chunk, normal(1)[:CHUNK], data, 0.5)
    residual.settle(
        outcome([(0, SIZE, ME, [Included(1, SIZE)])], "int1"), ME, codec, Delta(normal(2))
    )
    assert not residual.values.any()


def test_who_starts_over_has_nothing_to_make_up_for() -> None:
    residual = Residual(SIZE, 0.9)
    residual.values.copy_(normal(1))
    residual.reset()
    assert not residual.values.any()
