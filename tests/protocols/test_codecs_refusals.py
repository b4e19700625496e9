"""Codecs at the edge: what must not pass is refused, by encoding and by decoding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from codec_kit import (
    FINE,
    KEPT,
    bounds,
    check,
    check_error,
    decode,
    decode_add,
    encode,
    encoded,
    normal,
    round_trip,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from protocols.codecs import CHUNK, NAMES, RangeCodec, codec
from protocols.codecs.kernels import FLOATS
from protocols.errors import LocalProtocolError, Malformed, NonFinite


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 300, CHUNK, CHUNK + 69])
def test_encode_refuses_what_is_not_finite(name: str, bad: float, place: int) -> None:
    values = normal(CHUNK + 70)
    values[place] = bad
    with pytest.raises(ValueError, match="finite"):
        encoded(name, values)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_decode_refuses_values_that_are_not_finite(name: str, bad: float) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    values = normal(100).to(dtype)
    values[41] = bad
    with pytest.raises(NonFinite):
        decode(name, values.view(torch.uint8), torch.empty(100))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in FLOATS])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 3e38, -3e38])
def test_decode_refuses_scales_that_no_encoder_writes(name: str, bad: float) -> None:
    data = encoded(name, normal(1000))
    data[2:4] = torch.tensor([bad], dtype=torch.bfloat16).view(torch.uint8)
    accumulator = torch.zeros(1000)
    with pytest.raises(NonFinite):
        decode_add(name, data, 1.0, accumulator)
    assert not accumulator.any()


@given(st.sampled_from(NAMES), st.integers(1, 600), st.binary(max_size=2500), st.booleans())
@settings(max_examples=300, deadline=None)
def test_a_check_refuses_what_decoding_refuses(
    name: str, count: int, noise: bytes, fitting: bool
) -> None:
    size = codec(name).encoded_size(count)
    if fitting:
        noise = (noise * (size // max(len(noise), 1) + 1))[:size] or bytes(size)

    def refused(work: Callable[[], None]) -> type[Exception] | None:
        try:
            work()
        except (Malformed, NonFinite) as error:
            return type(error)
        return None

    found = refused(lambda: check(name, noise, count))
    assert found is refused(lambda: decode(name, noise, torch.empty(count)))


@pytest.mark.parametrize("name", [name for name in FINE if name != "fp16"])
@pytest.mark.parametrize("huge", [1e38, -1e38, 1.7e38])
def test_huge_but_finite_values_travel(name: str, huge: float) -> None:
    values = torch.tensor([huge, -huge, huge / 3, 0.0] * 100)
    got = round_trip(name, values)
    assert torch.isfinite(got).all()
    assert ((got - values).abs() <= bounds(name, values)).all()


def test_fp16_refuses_what_it_cannot_hold() -> None:
    assert round_trip("fp16", torch.full((9,), 65504.0)).tolist() == [65504.0] * 9
    with pytest.raises(ValueError, match="fp16"):
        encoded("fp16", torch.tensor([1.0, 70000.0]))


@pytest.mark.parametrize("name", NAMES)
def test_zeros_subnormals_and_mixed_blocks(name: str) -> None:
    assert not round_trip(name, torch.zeros(1000)).any()
    mixed = normal(1024)
    mixed[256:512] = 0
    mixed[512:768] = 1e-42
    mixed[768:] *= 1e-30
    got = round_trip(name, mixed)
    check_error(name, mixed, got)
    assert not got[256:512].any()


@given(st.sampled_from(NAMES), st.integers(1, 600), st.binary(max_size=2500), st.data())
@settings(max_examples=300, deadline=None)
def test_arbitrary_bytes_decode_to_finite_values_or_are_refused(
    name: str, count: int, noise: bytes, data: st.DataObject
) -> None:
    size = codec(name).encoded_size(count)
    if data.draw(st.booleans()):
        noise = (noise * (size // max(len(noise), 1) + 1))[:size] or bytes(size)
    out = torch.empty(count)
    try:
        decode(name, noise, out)
    except Malformed:
        assert len(noise) != size or codec(name).sparse  # whose indices may be nonsense
    except NonFinite:
        assert len(noise) == size
    else:
        assert len(noise) == size
        assert torch.isfinite(out).all()


@pytest.mark.parametrize("name", [name for name in NAMES if codec(name).sparse])
def test_indices_that_no_encoder_writes_are_refused(name: str) -> None:
    """They would be written twice, in an order that differs between machines."""
    count, keep = 5000, KEPT[name]
    low = {"top12": 2, "top3": 4}[name]
    good = encoded(name, normal(count))
    places = slice(4, 4 + keep * low // 8)  # the low bits of the first group's indices
    unary = slice(places.stop, places.stop + (keep + 4096 // 2**low) // 8)

    def refused(data: Tensor) -> None:
        accumulator = torch.zeros(count)
        with pytest.raises(Malformed):
            decode_add(name, data, 1.0, accumulator)
        assert not accumulator.any()

    doubled = good.clone()
    doubled[places] = 0  # equal low bits, and more indices than high parts in places
    if keep <= 4096 >> low:  # else they cannot all differ
        doubled[unary] = torch.tensor([255] * (keep // 8) + [0] * (4096 // 2**low // 8))
    refused(doubled)
    for fill in (0, 255):
        wrong = good.clone()
        wrong[unary] = fill
        refused(wrong)
    one_less = good.clone()
    at = unary.start + int(torch.nonzero(good[unary])[0])
    one_less[at] &= one_less[at] - 1
    refused(one_less)
    # one index of the first group moved to the second: the total is right
    size = codec(name).encoded_size(4096)
    moved = torch.cat([good[:size], encoded(name, normal(4096))])
    moved[at] &= moved[at] - 1
    bits = moved[size + unary.start : size + unary.stop]
    free = int(torch.nonzero(bits != 255)[0])
    bits[free] |= bits[free] + 1
    with pytest.raises(Malformed):
        decode(name, moved, torch.empty(8192))


def test_misuse_is_our_own_bug() -> None:
    with pytest.raises(LocalProtocolError, match="the buffer has 3"):
        encode("bf16", torch.zeros(5), bytearray(3))
    with pytest.raises(LocalProtocolError, match="float32"):
        encode("bf16", torch.zeros(5, dtype=torch.float64), bytearray(10))
    with pytest.raises(LocalProtocolError, match="uint8"):
        encode("bf16", torch.zeros(5), torch.zeros(10))
    with pytest.raises(Malformed, match="zip"):
        codec("zip")


@pytest.mark.parametrize("name", ["int4", "fp32"])
def test_a_range_of_another_length_is_refused(name: str) -> None:
    """Also a longer one: nobody could say what else is in it."""
    ranged, out = RangeCodec(name, 1000), torch.empty(600)
    data = torch.zeros(ranged.encoded_size(700, 1300), dtype=torch.uint8)
    ranged.decode(700, data, out)
    for other in (data[:-1], torch.cat((data, data[:1]))):
        with pytest.raises(Malformed, match="do not hold"):
            ranged.decode(700, other, out)
