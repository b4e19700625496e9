"""What an owner makes up for is no louder than others' work, however small its share is."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from gossip_kit import counts_of

from bootstrap.manifest_rounds import Merge
from diloco.pseudo_gradient import norm
from gossip.exchange.buffers import Whole
from gossip.exchange.merging import Contributions, PartMerge
from gossip.exchange.slicing import shares
from node.replicas.mixing import mix_of
from node.replicas.residual import Residual
from protocols.codecs import Chunk, RangeCodec
from protocols.counts import Included
from protocols.identity import Identity, PeerId
from protocols.messages import Contributor, Outcome, PartResult

SIZE = 4 * 4096
DECAY = 0.95
ROUNDS = 16


def normal(seed: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


class Island:
    """One that learns the same in each round: something that all do, and something of its own."""

    def __init__(self, number: int, weight: float) -> None:
        self.peer: PeerId = Identity.from_seed(bytes([number]) * 32).peer_id
        self.weight = weight
        self.learnt = normal(0) + normal(number)
        self.residual = Residual(SIZE, DECAY)

    def progress(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(self.learnt[start:stop])

    def delta(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        return self.residual.add_to(self.progress(start, stop, out), start)

    def norm(self) -> float:
        return norm(self.delta(0, SIZE, torch.empty(SIZE)))

    def note_lost(
        self, codec: RangeCodec, chunk: Chunk, mean: torch.Tensor, data: torch.Tensor, share: float
    ) -> None:
        self.residual.note_lost(codec, chunk, mean, data, share)


def merged(
    islands: Sequence[Island], contributors: Sequence[Contributor], owner: Island, chunk: Chunk,
    codec: RangeCodec,
) -> None:  # fmt: skip
    """A part of one chunk, which its owner merges."""
    scales = {one.peer: one.scale for one in contributors}
    merge = PartMerge(
        codec, chunk.start, chunk.stop,
        Contributions(owner.peer, shares(contributors), [one.peer for one in islands], scales),
        whole=Whole(SIZE), post=lambda job: job(), begun=lambda: None, finished=lambda: None,
    )  # fmt: skip
    for one in islands:
        if one is not owner:
            data = torch.empty(chunk.size, dtype=torch.uint8)
            values = one.delta(chunk.start, chunk.stop, torch.empty(chunk.stop - chunk.start))
            codec.encode_chunk(chunk, values, data)
            merge.add(one.peer, 0, data)
    merge.settle(owner)
    assert merge.done


def round_of(islands: Sequence[Island], owners: Sequence[Island], codec: RangeCodec) -> Outcome:
    """A committed round, in which parts of one size belong to ``owners``."""
    contributors = mix_of(Merge()).scaled(
        [Contributor(one.peer, one.weight, 1, True, one.norm()) for one in islands]
    )
    step = SIZE // len(owners)
    included = counts_of([Included(at, step) for at in range(len(islands))])
    parts = []
    for at, owner in enumerate(owners):
        start, stop = at * step, (at + 1) * step
        (chunk,) = codec.chunks(start, stop)
        merged(islands, contributors, owner, chunk, codec)
        parts.append(
            PartResult(
                0, 1, start, stop, owner.peer, codec.name, bytes(32), included, bytes(32), b""
            )
        )
    roster = tuple(one.peer for one in islands)
    return Outcome(
        0, 1, bytes(32), bytes(32), codec.name, contributors, tuple(parts), roster, len(roster)
    )


def scales_of(
    islands: Sequence[Island], owners: Sequence[Island], codec: RangeCodec, who: Island
) -> list[float]:
    """What ``who`` counts for in each round."""
    found = []
    for _ in range(ROUNDS):
        outcome = round_of(islands, owners, codec)
        found.append(next(c.scale for c in outcome.contributors if c.peer == who.peer))
        for one in islands:
            one.residual.settle(outcome, one.peer, codec, one.progress)
    return found


@pytest.mark.parametrize("name", ["int2", "int1", "top12", "top3"])
def test_an_island_with_few_tokens_that_owns_a_part_goes_on_counting(name: str) -> None:
    islands = [Island(number, 10.0) for number in (1, 2, 3)] + [Island(4, 1.0)]
    scales = scales_of(islands, islands, RangeCodec(name, SIZE), islands[-1])
    assert min(scales) > 0.6


@pytest.mark.parametrize("name", ["int2", "int1", "top12", "top3"])
def test_an_island_that_merges_for_all_goes_on_counting(name: str) -> None:
    islands = [Island(number, 1.0) for number in range(1, 9)]
    scales = scales_of(islands, islands[:1], RangeCodec(name, SIZE), islands[0])
    assert min(scales) > 0.6


@pytest.mark.parametrize("name", ["int2", "int1", "top12", "top3"])
def test_equal_islands_make_up_for_all_that_they_lose(name: str) -> None:
    """Nothing is taken off what was noted."""
    codec, islands = RangeCodec(name, SIZE), [Island(number, 1.0) for number in (1, 2, 3, 4)]
    for _ in range(4):
        outcome = round_of(islands, islands, codec)
        for one in islands:
            noted = {start: lost.clone() for start, lost in one.residual._owned.items()}
            one.residual.settle(outcome, one.peer, codec, one.progress)
            ((start, lost),) = noted.items()
            assert lost.any()
            assert torch.equal(one.residual.values[start : start + len(lost)], lost)


def test_what_is_noted_is_shrunk_as_a_whole_to_the_median_norm() -> None:
    codec, residual = RangeCodec("int2", SIZE), Residual(SIZE, DECAY)
    me, other = (Island(number, 1.0).peer for number in (1, 2))
    mean, step = normal(3), SIZE // 4
    parts, lost = [], []
    for at, owner in enumerate((me, other, me, me)):
        (chunk,) = codec.chunks(at * step, (at + 1) * step)
        if owner == me:
            data = torch.empty(chunk.size, dtype=torch.uint8)
            values = mean[chunk.start : chunk.stop]
            codec.encode_chunk(chunk, values, data)
            residual.note_lost(codec, chunk, values, data, 0.01)
            back = torch.empty(step)
            codec.decode_chunk(chunk, data, back)
            lost.append(values - back)
        # the last part is not settled: nothing of mine is in it
        included = counts_of([Included(1, step)] if at < 3 else [])
        parts.append(
            PartResult(
                0, 1, chunk.start, chunk.stop, owner, "int2", bytes(32), included, bytes(32), b""
            )
        )
    norms = (0.0, 50.0, 7.0, 9.0, 1000.0)
    peers = (Island(3, 1.0).peer, me, other, Island(4, 1.0).peer, Island(5, 1.0).peer)
    weights = (1.0, 1.0, 1.0, 1.0, 0.0)  # the last one counts for nothing
    contributors = tuple(
        Contributor(peer, weight, 1, True, length)
        for peer, weight, length in zip(peers, weights, norms, strict=True)
    )
    outcome = Outcome(0, 1, bytes(32), bytes(32), "int2", contributors, tuple(parts), peers, 5)
    residual.settle(outcome, me, codec, lambda start, stop, out: out.copy_(normal(5)[start:stop]))
    whole = math.hypot(norm(lost[0]), norm(lost[1]))
    assert torch.allclose(residual.values[:step], lost[0] * (9.0 / whole), rtol=1e-4)
    assert torch.allclose(residual.values[2 * step : 3 * step], lost[1] * (9.0 / whole), rtol=1e-4)
    assert residual.values[step : 2 * step].norm() > 9.0  # what my own encoding has lost stays
    assert not residual.values[3 * step :].any()
