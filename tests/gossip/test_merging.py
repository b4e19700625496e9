"""One part merged chunk by chunk: weights, prefixes, arrivals in any order, unfit chunks."""

from __future__ import annotations

import math

import pytest
import torch
from codec_kit import FINE
from merging_kit import DENSE, PEERS, START, STOP, Owner, Values, close, contributors

from gossip.exchange.feeds import MergedFeed
from gossip.exchange.merging import AT_A_TIME
from gossip.exchange.slicing import NEGLIGIBLE, largest, shares, within
from protocols.codecs import CHUNK, RangeCodec
from protocols.errors import Malformed, NonFinite, RemoteRefused


@pytest.mark.parametrize("name", FINE)
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
    feed = MergedFeed(owner.merge, owner.merge.result, 0, 0)
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


def test_what_stands_behind_the_part_is_sent_as_soon_as_it_is_known() -> None:
    owner = Owner(RangeCodec("int8", DENSE), weights=(1.0,))
    feed = MergedFeed(owner.merge, owner.merge.result, 0, 3)
    woken: list[int] = []
    feed.attach(lambda: woken.append(feed.given))
    owner.settle()
    assert len(feed.next() or b"") == len(owner.merge.result) == feed.length - 3
    assert feed.next() is None
    owner.merge.seal(b"abc")
    assert woken[-1] == feed.length - 3
    assert feed.next() == b"abc"
    assert feed.next() is None
    assert not owner.merge.wakes, "nothing more will come"


def test_my_own_values_are_added_as_they_are() -> None:
    """With codec int4 a member that merges alone loses nothing on the way in."""
    codec = RangeCodec("int4", DENSE)
    owner = Owner(codec, weights=(1.0,))
    owner.settle()
    direct = torch.empty(codec.encoded_size(START, STOP), dtype=torch.uint8)
    codec.encode(START, owner.values[0], direct)
    assert torch.equal(owner.merge.result, direct)


@pytest.mark.parametrize("name", FINE)
@pytest.mark.parametrize("alone", [False, True])
def test_of_mine_that_is_no_number_any_more_nothing_is_merged(name: str, alone: bool) -> None:
    """Memory that was sound when it was looked at, and has changed since."""
    codec = RangeCodec(name, DENSE)
    owner = Owner(codec, weights=(1.0,) if alone else (1.0, 2.0, 5.0))
    owner.values[0][CHUNK + 5] = math.nan
    if not alone:
        owner.bring(1)
        owner.bring(2)
    owner.settle()
    assert owner.merge.elements(PEERS[0]) == owner.merge.chunks[0].stop - START
    owner.values[0].nan_to_num_()  # only in what is compared with
    assert close(owner.mean(), owner.reference(), name)


def test_it_is_empty_until_somebodys_values_are_in() -> None:
    others, mine = (Owner(RangeCodec("fp32", DENSE)) for _ in range(2))
    assert others.merge.empty
    others.bring(1, 1)
    assert not others.merge.empty
    mine.settle()
    assert not mine.merge.empty
    unfit = Owner(RangeCodec("fp32", DENSE), weights=(1.0,))
    unfit.values[0][0] = math.nan
    unfit.settle()
    assert unfit.merge.empty


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


def test_of_who_is_given_up_on_the_rest_of_a_chunk_is_refused() -> None:
    """It may be hours in coming, and who brings it keeps the merge in memory meanwhile."""
    owner = Owner(RangeCodec("int8", DENSE))
    drain = owner.merge.drain(PEERS[2], 0)
    drain.room()
    drain.took(10)
    owner.merge.give_up(PEERS[2])
    drain.room()
    with pytest.raises(RemoteRefused, match="late"):
        drain.took(1)
    assert owner.merge.arrived == {PEERS[2]: 10}


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


@pytest.mark.parametrize("name", FINE)
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


@pytest.mark.parametrize("name", FINE)
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
