"""One part merged chunk by chunk: weights, prefixes, arrivals in any order, unfit chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from blake3 import blake3
from gossip_kit import leader, plan_of
from hypothesis import given, settings
from hypothesis import strategies as st

from gossip.bodies import as_bytes
from gossip.buffers import Whole
from gossip.merging import AT_A_TIME, MergedFeed, PartMerge, SliceDrain
from gossip.slicing import NEGLIGIBLE, SliceFeed, largest, shares, within
from protocols.codecs import CHUNK, Chunk, RangeCodec
from protocols.errors import Malformed, NonFinite, RemoteRefused
from protocols.identity import Identity
from protocols.messages import Contributor

MEMBERS = [Identity.from_seed(bytes([number]) * 32) for number in range(4)]
PEERS = [c.peer for c in plan_of(leader(MEMBERS), MEMBERS).contributors]
ME = PEERS[0]
START, STOP = 1024, 1024 + 5 * CHUNK // 2  # three chunks of matrices, one of vectors
DENSE = STOP - 777
ERRORS = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 1e-3, "int8": 2e-2, "int4": 0.2}


class Values:
    """A contribution in memory."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def delta(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        return self.values[start - START : stop - START]


@dataclass
class Owner:
    """A merge whose contributors and members are driven by hand."""

    codec: RangeCodec
    weights: Sequence[float] = (1.0, 2.0, 5.0)
    start: int = START
    stop: int = STOP
    posted: list[Callable[[], None]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    merge: PartMerge = field(init=False)
    values: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        size = self.stop - self.start
        self.values = [torch.randn(size, generator=generator) for _ in self.weights]
        self.merge = PartMerge(
            self.codec,
            self.start,
            self.stop,
            shares=shares(contributors(*self.weights)),
            expected=PEERS[: len(self.weights)],
            me=ME,
            whole=Whole(self.stop),
            post=self.posted.append,
            begun=lambda: self.told.append("begun"),
            finished=lambda: self.told.append("finished"),
        )

    def feed(self, number: int, first: int = 0) -> SliceFeed:
        return SliceFeed(self.codec, Values(self.values[number]), self.start, self.stop, first)

    def bring(
        self, number: int, chunks: int = 99, change: Callable[[bytes], bytes] = bytes
    ) -> None:
        """The next chunks of one contributor arrive."""
        first = self.merge.reached(PEERS[number])
        feed, drain = self.feed(number, first), SliceDrain(self.merge, PEERS[number], first)
        for _ in range(min(chunks, len(self.merge.chunks) - first)):
            data = change(bytes(feed.next()))
            room = drain.room()
            room[:] = data
            drain.took(len(data))

    def settle(self) -> None:
        self.merge.settle(Values(self.values[0]))
        self.turn()

    def turn(self) -> None:
        """Whatever was posted runs."""
        while self.posted:
            self.posted.pop(0)()

    def mean(self) -> torch.Tensor:
        assert self.merge.done
        assert self.told == ["begun", "finished"]
        assert blake3(as_bytes(self.merge.result)).digest() == self.merge.digest()
        out = torch.empty(self.stop - self.start)
        self.codec.decode(self.start, self.merge.result, out)
        return out

    def reference(self) -> torch.Tensor:
        """What ought to come out, in double, by what is said to be in it."""
        total = torch.zeros(self.stop - self.start, dtype=torch.float64)
        weight = torch.zeros_like(total)
        for peer, value, w in zip(PEERS, self.values, self.weights, strict=False):
            until = self.merge.elements(peer)
            total[:until] += w * value[:until].double()
            weight[:until] += w
        return torch.where(weight > 0, total / weight.clamp(min=1e-300), 0.0)


def contributors(*weights: float) -> list[Contributor]:
    return [Contributor(peer, w, 100, True) for peer, w in zip(PEERS, weights, strict=False)]


def close(found: torch.Tensor, wanted: torch.Tensor, codec: str) -> bool:
    return bool((found.double() - wanted).norm() <= ERRORS[codec] * wanted.norm())


@pytest.mark.parametrize("name", list(ERRORS))
def test_the_weighted_mean(name: str) -> None:
    owner = Owner(RangeCodec(name, DENSE))
    owner.bring(1)
    owner.settle()
    assert not owner.merge.merged
    owner.bring(2)
    owner.turn()
    assert [owner.merge.elements(peer) for peer in PEERS] == [STOP - START] * 3 + [0]
    assert close(owner.mean(), owner.reference(), name)


def test_a_chunk_is_merged_as_soon_as_all_have_brought_it() -> None:
    owner = Owner(RangeCodec("int8", DENSE))
    owner.settle()
    feed = MergedFeed(owner.merge, 0, 0)
    woken: list[int] = []
    feed.attach(lambda: woken.append(owner.merge.merged))
    owner.bring(1, 2)
    assert feed.next() is None
    owner.bring(2, 1)
    assert owner.merge.merged == 1
    assert len(feed.next() or b"") == owner.merge.chunks[1].offset
    assert feed.next() is None
    owner.bring(2)
    assert owner.merge.merged == 2
    owner.bring(1)
    owner.turn()
    assert woken[0] == 1
    assert woken[-1] == len(owner.merge.chunks)


def test_my_own_values_are_added_as_they_are() -> None:
    """With codec int4 a member that merges alone loses nothing on the way in."""
    codec = RangeCodec("int4", DENSE)
    owner = Owner(codec, weights=(1.0,))
    owner.settle()
    direct = torch.empty(codec.encoded_size(START, STOP), dtype=torch.uint8)
    codec.encode(START, owner.values[0], direct)
    assert torch.equal(owner.merge.result, direct)


def test_a_long_part_leaves_room_for_others() -> None:
    owner = Owner(RangeCodec("fp32", DENSE), weights=(1.0,), stop=START + 3 * AT_A_TIME * CHUNK)
    owner.merge.settle(Values(owner.values[0]))
    assert owner.merge.merged == AT_A_TIME
    owner.turn()
    assert owner.merge.done


@pytest.mark.parametrize("name", ["fp32", "int4"])
def test_who_is_given_up_on_stays_in_what_it_has_brought(name: str) -> None:
    owner = Owner(RangeCodec(name, DENSE))
    owner.settle()
    owner.bring(1)
    owner.bring(2, 2)
    assert owner.merge.waits_for() == {PEERS[2]}
    owner.merge.give_up(PEERS[2])
    owner.turn()
    assert owner.merge.elements(PEERS[2]) == 2 * CHUNK
    assert close(owner.mean(), owner.reference(), name)
    with pytest.raises(RemoteRefused, match="late"):
        owner.bring(2, 1)


def test_who_has_no_weight_is_not_in_it_and_not_waited_for() -> None:
    """Its work is not in the mean, so it must not be taken for merged."""
    owner = Owner(RangeCodec("fp32", DENSE), weights=(1.0, 0.0, 1.0))
    owner.settle()
    assert owner.merge.waits_for() == {PEERS[2]}
    owner.bring(2)
    owner.turn()
    assert owner.merge.elements(PEERS[1]) == 0
    assert close(owner.mean(), owner.reference(), "fp32")


@pytest.mark.parametrize("weights", [(0.0, 0.0), (1.0, 1.0)])
def test_nobody_has_anything(weights: tuple[float, float]) -> None:
    owner = Owner(RangeCodec("int4", DENSE), weights=weights)
    owner.merge.settle(None)
    owner.merge.give_up(PEERS[1])
    owner.turn()
    assert not owner.mean().any()
    assert [owner.merge.elements(peer) for peer in PEERS] == [0] * 4


@pytest.mark.parametrize("weights", [(1e-30, 1e-30), (2.0**40, 1.0), (1e-300, 2.0**40)])
def test_extreme_weights(weights: tuple[float, float]) -> None:
    owner = Owner(RangeCodec("fp32", DENSE), weights=weights)
    owner.settle()
    owner.bring(1)
    owner.turn()
    assert close(owner.mean(), owner.reference(), "fp32")


def test_shares_of_what_is_left_when_the_heaviest_is_gone() -> None:
    owner = Owner(RangeCodec("fp32", DENSE), weights=(1.0, 2.0**40, 3.0))
    owner.settle()
    owner.bring(2)
    owner.merge.give_up(PEERS[1])
    owner.turn()
    assert close(owner.mean(), owner.reference(), "fp32")


def test_shares() -> None:
    assert shares(contributors(0.0, 0.0)) == {}
    assert shares(contributors(1.0, 0.0, 3.0)) == {PEERS[0]: 0.25, PEERS[2]: 0.75}
    assert shares(contributors(NEGLIGIBLE / 2, 1.0)) == {PEERS[1]: 1.0}


@pytest.mark.parametrize("name", list(ERRORS))
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_chunk_that_is_not_finite_ends_its_sender_there(name: str, poison: float) -> None:
    owner = Owner(RangeCodec(name, DENSE))
    owner.settle()
    owner.bring(1)
    owner.bring(2, 1)
    kind = {"fp32": torch.float32, "fp16": torch.float16}.get(name, torch.bfloat16)
    bad = bytes(torch.full((1,), poison, dtype=kind).view(torch.uint8).tolist())
    with pytest.raises(NonFinite):  # the first value, or the first block's scale
        owner.bring(2, 1, lambda data: bad + data[len(bad) :])
    owner.turn()
    assert owner.merge.elements(PEERS[2]) == CHUNK
    assert close(owner.mean(), owner.reference(), name)


@pytest.mark.parametrize(
    ("name", "block", "levels", "code"), [("int4", 64, 8.0, 0), ("int8", 256, 127.0, 127)]
)
def test_a_mean_beyond_what_the_codec_carries_is_cut_to_what_it_carries(
    name: str, block: int, levels: float, code: int
) -> None:
    """What a decoder takes is a little more than what an encoder makes."""
    owner = Owner(RangeCodec(name, DENSE), weights=(1e-9, 1e-9, 1.0))
    owner.settle()
    owner.bring(1)
    scale = torch.tensor([1.005 * 2.0**127 / levels]).to(torch.bfloat16).view(torch.uint8)

    def loud(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[:2] = bytes(scale.tolist())
        changed[2 * CHUNK // block] = code
        return bytes(changed)

    owner.bring(2, 1, loud)
    owner.bring(2)
    owner.turn()
    assert owner.mean().isfinite().all()
    assert owner.mean().abs().max() >= 2.0**125


def test_fp32_sums_that_overflow_are_cut() -> None:
    owner = Owner(RangeCodec("fp32", DENSE), weights=(1.0, 1.0, 1.0))
    owner.values = [torch.full((STOP - START,), 3.4e38) for _ in range(3)]
    owner.settle()
    owner.bring(1)
    owner.bring(2)
    owner.turn()
    assert owner.mean().isfinite().all()


def test_chunks_again_and_chunks_before_their_turn() -> None:
    owner = Owner(RangeCodec("int8", DENSE))
    owner.settle()
    size = owner.merge.chunks[0].size
    data = torch.frombuffer(bytearray(owner.feed(1).next() or b""), dtype=torch.uint8)
    owner.merge.add(PEERS[1], 0, data)
    owner.merge.add(PEERS[1], 0, torch.zeros(size, dtype=torch.uint8))  # ignored
    with pytest.raises(Malformed):
        owner.merge.add(PEERS[1], 2, data)
    owner.bring(1)
    owner.bring(2)
    owner.turn()
    assert close(owner.mean(), owner.reference(), "int8")


def test_when_it_is_closed_nothing_more_is_taken_or_read() -> None:
    owner = Owner(RangeCodec("fp32", DENSE))
    owner.settle()
    owner.bring(1)
    owner.merge.close()
    with pytest.raises(RemoteRefused, match="late"):
        owner.bring(2)
    owner.turn()
    assert not owner.merge.merged


@pytest.mark.parametrize("name", list(ERRORS))
def test_how_large_a_contribution_may_be(name: str) -> None:
    codec = RangeCodec(name, DENSE)
    bound = largest(codec)
    assert bound == (65504.0 if name == "fp16" else 2.0**126)
    values = torch.full((1000,), 1.0)
    assert within(values, bound)
    values[-1] = -bound
    assert within(values, bound)
    values[-1] = -bound * 1.01
    assert not within(values, bound)
    values[-1] = math.nan
    assert not within(values, bound)


# --- any order of arrivals ------------------------------------------------------------------------


class Link:
    """One direction of a connection: bytes arrive in pieces; it can break and be taken up again."""

    def __init__(self, owner: Owner, number: int, first: int) -> None:
        self.feed = owner.feed(number, first)
        self.drain = SliceDrain(owner.merge, PEERS[number], first)
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
    readers = [(MergedFeed(merge, 0, 3), bytearray()) for _ in range(2)]

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

    stop = START + 16 * CHUNK
    owner = Owner(RangeCodec(name, stop), stop=stop)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", counted)
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
        codec, 0, size, shares={me: 0.75, other: 0.25}, expected=[other], me=me, whole=Whole(size),
        post=lambda job: job(), begun=lambda: None, finished=lambda: None,
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
