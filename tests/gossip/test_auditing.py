"""Whether one chunk of a part was merged from what was sent, by what its owner shows of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import pytest
import torch
from gossip_kit import PLACE, RUN, leader, plan_of
from hypothesis import given
from hypothesis import strategies as st
from kept_slices_kit import BY_PEER, ME, MEMBERS, OTHERS, PEERS, START, STOP, Owner

from gossip.exchange.auditing import Case
from gossip.exchange.kept_slices import WeighedMerge
from gossip.exchange.slicing import shares
from gossip.plans.certificate import basis_of, sign_result
from gossip.plans.commitments import packed, unpacked
from gossip.plans.weighing import gram_of, sign_gram
from protocols.codecs import CHUNK, NAMES
from protocols.counts import pack_counts
from protocols.errors import Malformed
from protocols.identity import PeerId
from protocols.messages import Contributor, Outcome, PartResult

SCALES = dict(zip(PEERS, (1.5, 0.5, 2.0, 0.0), strict=True))


def merged_by(owner: Owner, scales: Mapping[PeerId, float] = SCALES) -> Case:
    """What is to be seen of what an owner has made of all that was brought to it."""
    contributors = tuple(Contributor(peer, 1.0, 10, True, 1e6) for peer in PEERS)
    draft = plan_of(leader(MEMBERS), MEMBERS, contributors=contributors, draft=True)
    merge: WeighedMerge = owner.merge
    gram = gram_of(BY_PEER[ME], owner.header, draft, merge.seals, merge.products)
    final = tuple(dataclasses.replace(c, scale=scales[c.peer]) for c in contributors)
    counted = shares(final)
    merge.merge_with({peer: share * scales[peer] for peer, share in counted.items()})
    owner.run()
    counts = pack_counts([merge.counted(c.peer) for c in final])
    name = owner.codec_name
    digest, basis = merge.digest(), basis_of(name, final)
    result = PartResult(0, 3, START, STOP, ME, name, digest, counts, basis, b"")
    result = sign_result(BY_PEER[ME], RUN, result)
    outcome = Outcome(0, 3, PLACE.previous, PLACE.state, name, final, (result,), tuple(PEERS), 1000)
    return Case(RUN, outcome, result, merge.result, gram, 1, owner.codec)


def brought(codec: str = "int4", peers: tuple[PeerId, ...] = tuple(OTHERS)) -> Owner:
    owner = Owner(WeighedMerge, codec)
    owner.bring_all(peers)
    assert owner.told == ["weighed"]
    return owner


def verdict(case: Case, owner: Owner) -> str:
    return case.judge(memoryview(owner.merge.shown().evidence(case.number)))


@pytest.mark.parametrize("codec", NAMES)
def test_what_was_merged_as_it_was_sent_is_found_right(codec: str) -> None:
    owner = brought(codec)
    case = merged_by(owner)
    for number in range(len(case.chunks)):
        one = dataclasses.replace(case, number=number)
        assert len(owner.merge.shown().evidence(number)) == one.size
        assert verdict(one, owner) == ""


def test_who_was_missing_is_not_missed() -> None:
    owner = Owner(WeighedMerge)
    owner.merge.give_up(OTHERS[2])
    owner.bring_all(tuple(OTHERS[:2]))
    case = merged_by(owner, dict(zip(PEERS, (1.0, 1.5, 1.5, 0.0), strict=True)))
    assert case.present == tuple(PEERS[:3])
    assert verdict(case, owner) == ""


def test_who_only_merges_shows_what_others_have_sent() -> None:
    owner = Owner(WeighedMerge)
    owner.merge.settle(None)
    for peer in OTHERS:
        owner.bring(peer)
    owner.run()
    case = merged_by(owner, dict(zip(PEERS, (0.0, 1.5, 1.5, 1.0), strict=True)))
    assert case.present == tuple(OTHERS)
    assert verdict(case, owner) == ""


# --- lies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", NAMES)
@pytest.mark.parametrize("by", [-1.0, 1.03, 0.0])
def test_another_sum_is_found(codec: str, by: float) -> None:
    owner = brought(codec)
    honest = owner.merge._sum_of_all
    owner.merge._sum_of_all = lambda index: honest(index).mul_(by)
    assert verdict(merged_by(owner), owner) == "another sum than that of its slices"


def test_one_element_far_off_is_found() -> None:
    owner = brought("int8")
    honest = owner.merge._sum_of_all

    def sum_of_all(index: int) -> torch.Tensor:
        total: torch.Tensor = honest(index)
        total[7] = 10.0
        return total

    owner.merge._sum_of_all = sum_of_all
    assert "another sum" in verdict(merged_by(owner), owner)


def test_other_scales_than_those_certified_are_found() -> None:
    owner = brought()
    case = merged_by(owner)
    more = tuple(
        dataclasses.replace(c, scale=2 * c.scale if c.peer == ME else c.scale)
        for c in case.outcome.contributors
    )
    other = dataclasses.replace(case.outcome, contributors=more)
    assert "another sum" in verdict(dataclasses.replace(case, outcome=other), owner)


@pytest.mark.parametrize("by", [2.0, 1.0001])
def test_products_of_something_else_are_found(by: float) -> None:
    owner = brought()
    peers, products = owner.merge._products[1]
    owner.merge._products[1] = (peers, by * products)
    owner.merge._tree = owner.merge._by_chunk()
    assert "not those of its slices" in verdict(merged_by(owner), owner)


def handed_over(case: Case) -> Case:
    """The same, where a later plan has had another member merge the part."""
    result = dataclasses.replace(case.result, owner=OTHERS[0])
    return dataclasses.replace(case, result=result, merged=None)


def test_who_has_weighed_a_part_answers_for_its_products_alone_if_another_merges_it() -> None:
    owner = brought()
    merged_by(owner)
    other = dict.fromkeys(PEERS, 1.0)  # what comes out of it is not what was certified
    case = handed_over(merged_by(owner, other))
    assert case.owner == ME
    assert verdict(case, owner) == ""
    owner = Owner(WeighedMerge, "int4")
    honest = owner.merge._multiply

    def multiply(index: int) -> None:
        honest(index)
        owner.merge._products[-1][1].mul_(0.5)

    owner.merge._multiply = multiply
    owner.bring_all(tuple(OTHERS))
    assert "not those of its slices" in verdict(handed_over(merged_by(owner)), owner)


def test_a_sum_of_products_that_is_none_is_found() -> None:
    owner = brought()
    case = merged_by(owner)
    other = packed(0.5 * unpacked(case.gram.products))
    gram = sign_gram(
        BY_PEER[ME], RUN, dataclasses.replace(case.gram, products=other, signature=b"")
    )
    assert "not the sum" in verdict(dataclasses.replace(case, gram=gram), owner)


def test_a_slice_that_nobody_has_sent_is_found() -> None:
    """The owner has made it up, and cannot have the contributor's signature."""
    owner = brought()
    owner.merge._seals[OTHERS[0]] = owner.merge._seals[OTHERS[0]][:32] + b"s" * 64
    assert "has not sent" in verdict(merged_by(owner), owner)


def test_who_was_weighed_and_not_merged_is_found() -> None:
    owner = Owner(WeighedMerge)
    owner.merge.give_up(OTHERS[2])
    owner.bring_all(tuple(OTHERS[:2]))
    case = merged_by(owner, dict(zip(PEERS, (1.0, 1.5, 1.5, 0.0), strict=True)))
    all_of_them = tuple(dataclasses.replace(c, scale=1.0) for c in case.outcome.contributors)
    other = dataclasses.replace(case.outcome, contributors=all_of_them)
    assert "less than" in verdict(dataclasses.replace(case, outcome=other), owner)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
def test_an_owner_that_brings_something_infinite_itself_is_found(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it states of its norm is as good as any other beside an infinite one."""
    monkeypatch.setattr("gossip.exchange.kept_slices.within", lambda *_: True)  # it does not look
    told = brought(codec).merge._products[1]  # as if its slice were an honest one
    owner = Owner(WeighedMerge, codec)
    owner.values[0][CHUNK + 7] = math.inf
    owner.bring_all()
    owner.merge._products[1] = told
    owner.merge._tree = owner.merge._by_chunk()
    assert "cannot be merged" in verdict(merged_by(owner), owner)


# --- what is no evidence --------------------------------------------------------------------------


@given(at=st.floats(0, 1, exclude_max=True), by=st.integers(1, 255))
def test_evidence_with_one_byte_changed_is_none(at: float, by: int) -> None:
    """Nobody can be convicted by it, whoever shows it."""
    case, evidence = prepared()
    changed = bytearray(evidence)
    changed[int(at * len(evidence))] ^= by
    with pytest.raises(Malformed):
        case.judge(memoryview(changed))


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x"])
def test_evidence_of_another_size_is_none(change: Callable[[bytes], bytes]) -> None:
    case, evidence = prepared()
    with pytest.raises(Malformed, match="bytes of evidence"):
        case.judge(memoryview(change(evidence)))


def test_the_evidence_of_another_chunk_is_none() -> None:
    owner = brought()
    case = merged_by(owner)
    with pytest.raises(Malformed):
        case.judge(memoryview(owner.merge.shown().evidence(0)))


_PREPARED: list[tuple[Case, bytes]] = []


def prepared() -> tuple[Case, bytes]:
    """The same for all examples."""
    if not _PREPARED:
        owner = brought()
        case = merged_by(owner)
        _PREPARED.append((case, owner.merge.shown().evidence(case.number)))
    return _PREPARED[0]
