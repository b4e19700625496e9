"""One part merged whatever arrives when: each element is the mean of those said to be in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from merging_kit import DENSE, PEERS, START, Owner, Values, close

from gossip.exchange import merging
from gossip.exchange.bodies import as_bytes
from gossip.exchange.buffers import SMALL, Buffers, Whole, buffers
from gossip.exchange.feeds import MergedFeed
from gossip.exchange.merging import Contributions, PartMerge
from protocols.codecs import CHUNK, Chunk, RangeCodec
from protocols.identity import Identity


class Link:
    """One direction of a connection: bytes arrive in pieces; it can break and be taken up again."""

    def __init__(self, owner: Owner, number: int, first: int) -> None:
        self.feed = owner.feed(number, first)
        self.drain = owner.merge.drain(PEERS[number], first)
        self.bytes = b""
        self.left = self.feed.length

    def move(self, count: int) -> None:
        while count and self.left:
            if not self.bytes:
                self.bytes = bytes(self.feed.next())
            room = self.drain.room()
            step = min(count, len(room), len(self.bytes))
            room[:step] = self.bytes[:step]
            self.bytes = self.bytes[step:]
            self.left -= step
            count -= step
            self.drain.took(step)


ACTIONS = st.one_of(
    st.tuples(st.just("move"), st.integers(1, 3), st.integers(1, 600_000)),
    st.tuples(st.just("break"), st.integers(1, 3), st.just(0)),
    st.tuples(st.just("double"), st.integers(1, 3), st.just(0)),
    st.tuples(st.just("give up"), st.integers(1, 3), st.just(0)),
    st.tuples(st.just("settle"), st.booleans(), st.just(0)),
    st.tuples(st.just("turn"), st.just(0), st.just(0)),
    st.tuples(st.just("read"), st.integers(0, 1), st.just(0)),
)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["fp32", "bf16", "int8", "int4"]),
    st.lists(ACTIONS, max_size=40),
    st.lists(st.just(0.0) | st.floats(1e-9, 100), min_size=4, max_size=4),
)
def test_whatever_happens_each_element_is_the_mean_of_those_said_to_be_in_it(
    name: str, actions: list[tuple[str, int, int]], weights: list[float]
) -> None:
    """No work lost, none counted twice: what `elements` says is what is in the bytes."""
    owner = Owner(RangeCodec(name, DENSE), weights=weights)
    merge = owner.merge
    links = {number: [Link(owner, number, 0)] for number in (1, 2, 3)}
    readers = [(MergedFeed(merge, merge.result, 0, 3), bytearray()) for _ in range(2)]

    def move(number: int, count: int) -> None:
        for link in links[number]:
            if PEERS[number] in merge.waits_for():
                link.move(count)

    for what, number, count in actions:
        match what:
            case "move":
                move(number, count)
            case "break":
                links[number] = [Link(owner, number, merge.reached(PEERS[number]))]
            case "double":
                links[number] = [*links[number], Link(owner, number, merge.reached(PEERS[number]))][
                    -2:
                ]
            case "give up":
                merge.give_up(PEERS[number])
            case "settle":
                merge.settle(Values(owner.values[0]) if number else None)
            case "turn":
                owner.turn()
            case "read":
                readers[number][1].extend(readers[number][0].next() or b"")
    merge.settle(Values(owner.values[0]))
    for number in (1, 2, 3):
        move(number, 10**9)
    owner.turn()
    assert close(owner.mean(), owner.reference(), name)
    merge.seal(b"end")
    for feed, read in readers:
        while piece := feed.next():
            read.extend(piece)
        assert bytes(read) == bytes(as_bytes(merge.result)) + b"end"
        assert feed.given == feed.length


@pytest.mark.parametrize("name", ["fp32", "int8"])
def test_memory_of_a_merge(name: str) -> None:
    """The result, and of sums and slices a few chunks: contributors that keep step need no more."""
    sizes: list[int] = []
    empty = torch.empty

    def counted(*shape: int, **options: Any) -> torch.Tensor:
        made: torch.Tensor = empty(*shape, **options)
        sizes.append(made.numel() * made.element_size())
        return made

    def taken(size: int) -> torch.Tensor:
        sizes.append(size if size >= SMALL else 0)  # else counted above
        return take(size)

    take, stop = buffers.take, START + 16 * CHUNK
    owner = Owner(RangeCodec(name, stop), stop=stop)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", counted)
        patch.setattr(buffers, "take", taken)
        links = [Link(owner, number, 0) for number in (1, 2)]
        owner.settle()
        for _ in range(16):
            for link in links:
                link.move(owner.merge.chunks[0].size)
        owner.turn()
    assert owner.merge.done
    assert sum(sizes) <= 8 * CHUNK * 4


class Keeping:
    """A source that is told what its merges lose."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.noted: list[tuple[int, torch.Tensor, torch.Tensor, float]] = []

    def delta(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(self.values[start:stop])

    def note_lost(
        self, codec: RangeCodec, chunk: Chunk, mean: torch.Tensor, data: torch.Tensor, share: float
    ) -> None:
        decoded = torch.empty_like(mean)
        codec.decode_chunk(chunk, data, decoded)
        self.noted.append((chunk.start, mean.clone(), decoded, share))


def test_an_owner_is_told_what_its_encoding_has_lost() -> None:
    size = 2 * CHUNK + 300
    codec = RangeCodec("int2", dense=size - 100)
    source = Keeping(torch.randn(size, generator=torch.Generator().manual_seed(0)))
    me, other = (Identity.generate().peer_id for _ in range(2))
    merge = PartMerge(
        codec, 0, size, Contributions(me, {me: 0.75, other: 0.25}, expected=[other]),
        whole=Whole(size), post=lambda job: job(), begun=lambda: None, finished=lambda: None,
    )  # fmt: skip
    merge.settle(source)
    chunk = merge.chunks[0]
    data = torch.empty(chunk.size, dtype=torch.uint8)
    codec.encode_chunk(chunk, torch.ones(CHUNK), data)
    merge.add(other, 0, data)
    merge.give_up(other)  # after its first chunk
    assert merge.done
    starts, means, received, told = zip(*source.noted, strict=True)
    assert starts == tuple(chunk.start for chunk in merge.chunks)
    assert told == pytest.approx((0.75, *[1.0] * (len(starts) - 1)))
    whole = torch.empty(size)
    codec.decode(0, merge.result, whole)
    assert torch.equal(torch.cat(received), whole)
    assert torch.allclose(torch.cat(means)[CHUNK:], source.values[CHUNK:])


def test_an_owner_whose_norm_was_clipped_is_told_its_share_all_the_same() -> None:
    """Divided by less, what it has lost would be longer, and clipped more, from round to round."""
    codec, source = RangeCodec("int2", dense=CHUNK), Keeping(torch.ones(CHUNK))
    me, other = (Identity.generate().peer_id for _ in range(2))
    contributions = Contributions(me, {me: 0.75, other: 0.25}, [other], scales={me: 0.125})
    merge = PartMerge(
        codec, 0, CHUNK, contributions,
        whole=Whole(CHUNK), post=lambda job: job(), begun=lambda: None, finished=lambda: None,
    )  # fmt: skip
    data = torch.empty(merge.chunks[0].size, dtype=torch.uint8)
    codec.encode_chunk(merge.chunks[0], 2.0 * torch.ones(CHUNK), data)
    merge.add(other, 0, data)
    merge.settle(source)
    ((_, mean, _, told),) = source.noted
    assert told == pytest.approx(0.75)
    assert torch.allclose(mean, torch.full((CHUNK,), 0.75 * 0.125 + 0.25 * 2.0), atol=1e-3)


def test_sums_go_back_to_the_pool_once_the_part_is_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long slow members receive it, the next rounds take no more from the system."""
    pool, stop = Buffers(), START + 16 * CHUNK
    monkeypatch.setattr(merging, "buffers", pool)
    owners, mapped = [], []
    for _ in range(3):
        owners.append(owner := Owner(RangeCodec("int8", stop), stop=stop))
        owner.settle()
        owner.bring(1)  # all of it, before the other begins
        owner.bring(2)
        owner.turn()
        assert owner.merge.done
        mapped.append(pool._mapped)
    assert 16 * CHUNK * 4 <= mapped[0] <= 20 * CHUNK * 4
    assert mapped[-1] == mapped[0]
