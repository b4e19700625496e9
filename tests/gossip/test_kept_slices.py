"""Parts whose slices are kept: merged column by column, or weighed first and merged then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kept_slices_kit import BY_PEER, ME, OTHERS, PEERS, START, STOP, Owner, Values

from diloco import robust
from gossip.exchange.bodies import as_bytes
from gossip.exchange.kept_slices import ColumnMerge, WeighedMerge
from gossip.exchange.merging import AT_A_TIME, PartMerge
from gossip.exchange.slicing import largest
from gossip.plans.commitments import leaf, packed, seal
from gossip.plans.weighing import unpack
from protocols.codecs import CHUNK
from protocols.errors import BadSignature, Malformed, NonFinite

CODECS = ["fp32", "int8"]
ERRORS = {"fp32": 1e-5, "int8": 2e-2}


def products_of(merge: WeighedMerge) -> torch.Tensor:
    return unpack(packed(merge.products.total), len(merge.seals))


def close(got: torch.Tensor, want: torch.Tensor, codec: str) -> bool:
    return bool((got - want).norm() <= ERRORS[codec] * want.norm())


# --- column by column -----------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_the_median_of_each_element(codec: str) -> None:
    owner = Owner(ColumnMerge, codec, {"column": robust.coordinate_median})
    owner.bring_all()
    want = robust.coordinate_median(owner.values, [1.0] * 4)
    assert close(owner.result(), want, codec)
    assert owner.told == ["begun", "finished"]
    assert all(owner.merge.counted(peer) == STOP - START for peer in PEERS)


def test_a_chunk_is_merged_as_soon_as_everybody_has_brought_it() -> None:
    owner = Owner(ColumnMerge, more={"column": robust.trimmed_mean})
    owner.merge.settle(Values(owner.values[0]))
    owner.bring(OTHERS[0])
    owner.bring(OTHERS[1], 2)
    assert owner.merge.merged == 0
    owner.bring(OTHERS[2], 1)
    assert owner.merge.merged == 1
    owner.merge.give_up(OTHERS[2])
    assert owner.merge.merged == 2
    owner.bring(OTHERS[1])
    want = robust.trimmed_mean(owner.values, [1.0] * 4)
    rest = robust.trimmed_mean(owner.values[:3], [1.0] * 3)
    got = owner.result()
    assert torch.allclose(got[:CHUNK], want[:CHUNK], atol=1e-6)
    assert torch.allclose(got[CHUNK:], rest[CHUNK:], atol=1e-6)
    assert owner.merge.counted(OTHERS[2]) == CHUNK


def test_nobody_brings_anything() -> None:
    owner = Owner(ColumnMerge, more={"column": robust.coordinate_median})
    owner.merge.settle(None)
    for peer in OTHERS:
        owner.merge.give_up(peer)
    owner.run()
    assert not owner.result().any()


# --- weighed first --------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_products_first_then_the_sum_by_coefficients(codec: str) -> None:
    owner = Owner(WeighedMerge, codec)
    owner.bring_all()
    merge = owner.merge
    assert owner.told == ["weighed"]
    assert list(merge.seals) == PEERS
    assert merge.merged == 0
    wide = owner.values.double()
    assert (products_of(merge) - wide @ wide.T).norm() < ERRORS[codec] * (wide @ wide.T).norm()
    coefficients = dict(zip(PEERS, [0.4, 0.3, 0.2, 0.1], strict=True))
    merge.merge_with(coefficients)
    owner.run()
    want = torch.tensor([0.4, 0.3, 0.2, 0.1]) @ owner.values
    assert close(owner.result(), want, codec)
    assert owner.told == ["weighed", "begun", "finished"]


def test_who_is_left_out_is_not_counted() -> None:
    owner = Owner(WeighedMerge)
    owner.bring_all()
    owner.merge.merge_with({ME: 0.5, OTHERS[1]: 0.5})
    owner.run()
    assert torch.allclose(owner.result(), (owner.values[0] + owner.values[2]) / 2, atol=1e-6)
    assert [owner.merge.counted(peer) > 0 for peer in PEERS] == [True, False, True, False]


def test_a_slice_that_breaks_off_is_not_present() -> None:
    owner = Owner(WeighedMerge)
    owner.merge.settle(Values(owner.values[0]))
    owner.bring(OTHERS[0], 2)
    owner.bring(OTHERS[1])
    owner.bring(OTHERS[2])
    assert owner.told == []
    owner.merge.give_up(OTHERS[0])
    owner.run()
    assert owner.told == ["weighed"]
    assert list(owner.merge.seals) == [ME, OTHERS[1], OTHERS[2]]
    wide = owner.values[[0, 2, 3]].double()
    assert torch.allclose(products_of(owner.merge), wide @ wide.T)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("loud", [0.0, 1e4])
def test_a_sealed_slice_whose_last_chunk_is_unfit_is_not_present(codec: str, loud: float) -> None:
    """It holds no numbers, or is louder than was announced; the seal on it is right."""
    owner = Owner(WeighedMerge, codec, {"limits": dict.fromkeys(PEERS, 2e3)})
    owner.merge.settle(Values(owner.values[0]))
    owner.bring(OTHERS[1])
    owner.bring(OTHERS[2])
    with pytest.raises((NonFinite, Malformed)):
        owner.bring_unfit(OTHERS[0], loud)
    owner.run()
    assert owner.told == ["weighed"]
    assert list(owner.merge.seals) == [ME, OTHERS[1], OTHERS[2]]
    wide = owner.values[[0, 2, 3]].double()
    assert (products_of(owner.merge) - wide @ wide.T).norm() < ERRORS[codec] * (
        wide @ wide.T
    ).norm()


@pytest.mark.parametrize("lie", ["of another slice", "of somebody else"])
def test_a_slice_whose_seal_is_not_its_own_is_not_present(lie: str) -> None:
    """Nobody could be held to it afterwards."""
    owner, (peer, other, _) = Owner(WeighedMerge), OTHERS
    owner.merge.settle(Values(owner.values[0]))
    *before, last = owner.merge.chunks
    owner.bring(peer, len(before))
    data = torch.empty(last.size, dtype=torch.uint8)
    owner.codec.encode_chunk(last, owner.values[1, last.start - START :], data)
    whole = [*owner.merge._leaves[peer], leaf(as_bytes(data))]
    if lie == "of another slice":
        stamp = seal(BY_PEER[peer], owner.header, [*whole[:-1], leaf(b"else")])
    else:
        stamp = seal(BY_PEER[other], owner.header, whole)
    with pytest.raises((BadSignature, Malformed)):
        owner.merge.add_last(peer, len(before), data, stamp)
    assert peer not in owner.merge.waits_for()
    for honest in OTHERS[1:]:
        owner.bring(honest)
    owner.run()
    assert owner.told == ["weighed"]
    assert list(owner.merge.seals) == [ME, *OTHERS[1:]]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("kind", "more"),
    [(ColumnMerge, {"column": robust.coordinate_median}), (WeighedMerge, {})],
)
def test_of_mine_that_is_no_number_any_more_nothing_is_merged(
    kind: type[PartMerge], more: dict[str, Any], codec: str
) -> None:
    """Memory that was sound when it was looked at, and has changed since."""
    owner = Owner(kind, codec, dict(more))
    owner.values[0, CHUNK + 5] = float("nan")
    owner.bring_all()
    if kind is WeighedMerge:
        assert list(owner.merge.seals) == OTHERS
        owner.merge.merge_with(dict.fromkeys(OTHERS, 0.25))
        owner.run()
        assert close(owner.result(), owner.values[1:].sum(0) / 4, codec)
        return
    with_mine = robust.coordinate_median(owner.values[:, :CHUNK], [1.0] * 4)
    without = robust.coordinate_median(owner.values[1:, CHUNK:], [1.0] * 3)
    assert close(owner.result(), torch.cat([with_mine, without]), codec)
    assert owner.merge.elements(ME) == CHUNK


def test_without_a_contribution_of_mine() -> None:
    owner = Owner(WeighedMerge)
    owner.merge.settle(None)
    for peer in OTHERS:
        owner.bring(peer)
    owner.run()
    assert list(owner.merge.seals) == OTHERS


def test_products_of_huge_values_are_finite() -> None:
    owner = Owner(WeighedMerge)
    owner.values[1] *= 1e30
    owner.bring_all()
    assert owner.merge.products.total.isfinite().all()


def test_products_are_multiplied_a_few_chunks_at_a_time() -> None:
    owner = Owner(WeighedMerge)
    owner.merge.settle(Values(owner.values[0]))
    for peer in OTHERS:
        owner.bring(peer)
    assert len(owner.merge.chunks) == AT_A_TIME
    assert owner.told == ["weighed"]


def test_a_merge_that_was_closed_stays_silent() -> None:
    owner = Owner(WeighedMerge)
    owner.merge.settle(Values(owner.values[0]))
    owner.bring(OTHERS[0])
    owner.merge.close()
    for peer in OTHERS:
        owner.merge.give_up(peer)
    owner.run()
    assert owner.told == []


# --- what all merges refuse -----------------------------------------------------------------------

KINDS = [
    (PartMerge, {}),
    (ColumnMerge, {"column": robust.coordinate_median}),
    (WeighedMerge, {}),
]


@pytest.mark.parametrize(("kind", "more"), KINDS)
@pytest.mark.parametrize("codec", CODECS)
def test_a_slice_that_is_longer_than_announced(
    kind: type[PartMerge], more: dict[str, Any], codec: str
) -> None:
    """The chunks up to the one with which it became too long are kept."""
    owner = Owner(kind, codec, dict(more))
    first = owner.values[1, :CHUNK].norm().item()
    limits = {OTHERS[0]: 1.1 * first, OTHERS[1]: 1.1 * owner.values[2].norm().item()}
    owner = Owner(kind, codec, dict(more) | {"limits": limits})
    owner.bring(OTHERS[0], 1)
    with pytest.raises(Malformed, match="longer"):
        owner.bring(OTHERS[0])
    owner.bring(OTHERS[1])
    assert owner.merge.elements(OTHERS[0]) == CHUNK
    assert owner.merge.elements(OTHERS[1]) == STOP - START
    assert owner.merge.waits_for() == {OTHERS[2]}


@pytest.mark.parametrize(("kind", "more"), KINDS)
def test_who_announces_nothing_may_send_zeros_only(
    kind: type[PartMerge], more: dict[str, Any]
) -> None:
    owner = Owner(kind, more=dict(more) | {"limits": dict.fromkeys(PEERS, 0.0)})
    owner.values[1] = 0
    owner.bring(OTHERS[0])
    with pytest.raises(Malformed, match="longer"):
        owner.bring(OTHERS[1])


@pytest.mark.parametrize(("kind", "more"), KINDS)
def test_a_value_that_is_not_finite(kind: type[PartMerge], more: dict[str, Any]) -> None:
    owner = Owner(kind, more=dict(more))
    data = torch.full((CHUNK,), float("nan")).view(torch.uint8)
    with pytest.raises(NonFinite):
        owner.merge.add(OTHERS[0], 0, data)
    assert OTHERS[0] not in owner.merge.waits_for()


@pytest.mark.parametrize("codec", CODECS)
def test_scales_of_the_mean(codec: str) -> None:
    """What is scaled down is not given to the others."""
    scales = dict(zip(PEERS, [1.0, 0.5, 0.0, 1.0], strict=True))
    owner = Owner(PartMerge, codec, {"scales": scales})
    owner.bring_all()
    want = torch.tensor([0.25, 0.125, 0.0, 0.25]) @ owner.values
    assert close(owner.result(), want, codec)


@pytest.mark.parametrize("codec", CODECS)
def test_a_sum_that_no_number_holds_is_cut_off(codec: str) -> None:
    """Each value that came is a number; a part of others would be refused by everybody."""
    owner = Owner(PartMerge, codec, {"scales": {OTHERS[0]: 64.0}})
    owner.values[1] = 0.9 * largest(owner.codec)
    owner.values[1, ::2] *= -1
    owner.bring_all()
    found = owner.result()
    assert found.isfinite().all()
    assert torch.equal(found.sign(), owner.values[1].sign())
    assert found.abs().min() > 0.9 * largest(owner.codec)


def test_scales_where_somebody_is_missing() -> None:
    scales = dict(zip(PEERS, [1.0, 0.5, 1.0, 1.0], strict=True))
    owner = Owner(PartMerge, more={"scales": scales})
    owner.merge.give_up(OTHERS[2])
    owner.merge.settle(Values(owner.values[0]))
    owner.bring(OTHERS[0])
    owner.bring(OTHERS[1])
    owner.run()
    want = torch.tensor([1.0, 0.5, 1.0]) @ owner.values[:3] / 3
    assert torch.allclose(owner.result(), want, atol=1e-5)
