"""Codecs: sizes, error bounds, equal bytes whatever the cut, and refusal of what must not pass."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from protocols.codecs import CHUNK, NAMES, RangeCodec, codec
from protocols.errors import LocalProtocolError, Malformed, NonFinite

LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, CHUNK - 1, CHUNK, CHUNK + 1)
BLOCK = {"int8": 256, "int4": 64, "int2": 64, "int1": 64, "top12": 4096, "top3": 4096}
FINE = ("fp32", "bf16", "fp16", "int8", "int4")  # each element is near what it was
COARSE = ("int2", "int1", "top12", "top3")  # each block is nearer than zero would be
KEPT = {"top12": 512, "top3": 128}  # of 4096


def normal(count: int, seed: int = 0, scale: float = 1e-3) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale


def encoded(name: str, values: Tensor) -> Tensor:
    out = torch.empty(codec(name).encoded_size(len(values)), dtype=torch.uint8)
    codec(name).encode(values, out)
    return out


def round_trip(name: str, values: Tensor) -> Tensor:
    out = torch.full_like(values, float("nan"))
    codec(name).decode(encoded(name, values), out)
    return out


def bounds(name: str, values: Tensor) -> Tensor:
    """The error each element may have, as the table in the module's docstring says."""
    if name == "fp32":
        return torch.zeros_like(values)
    if name == "bf16":
        return values.abs() * 2**-8 + 1e-40
    if name == "fp16":
        return torch.maximum(values.abs() * 2**-11, torch.tensor(2.0**-25)) * (1 + 1e-6)
    block = BLOCK[name]
    padded = torch.nn.functional.pad(values, (0, -len(values) % block)).view(-1, block)
    largest = padded.abs().amax(1, keepdim=True).expand(padded.shape)
    if name == "int8":
        bound = largest / 253
    else:
        highest, lowest = padded.amax(1, keepdim=True), padded.amin(1, keepdim=True)
        sign = torch.where(highest + lowest < 0, -1.0, 1.0)  # of the element mapped to -8
        clipped = padded * sign < -7.45 / 8 * largest
        bound = torch.where(clipped, largest / 7.7, largest / 15.9)
    tiny = largest < 2.0**-113  # flushed to zero
    return torch.where(tiny, largest, bound).reshape(-1)[: len(values)]


def in_blocks(values: Tensor, block: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, -len(values) % block)).view(-1, block)


def check_error(name: str, values: Tensor, got: Tensor) -> None:
    """What the module's docstring promises of the codec."""
    if name in FINE:
        assert ((got - values).abs() <= bounds(name, values)).all()
        return
    before, error = (in_blocks(x.double(), BLOCK[name]) for x in (values, got - values))
    # what is flushed to zero or rounded to bf16 is the slack
    assert (error.norm(dim=1) <= before.norm(dim=1) * (1 + 2**-16) + 2.0**-110).all()
    counts = values.abs() > before.abs().max() * 2.0**-100 if len(values) else values > 0
    assert (got * values.sign() >= 0)[counts].all()
    if name in KEPT:
        sent, sizes = in_blocks(got, 4096) != 0, in_blocks(values, 4096).abs()
        assert (sent.sum(1) <= KEPT[name]).all()
        largest_left = sizes.masked_fill(sent, 0).amax(1)
        smallest_sent = sizes.masked_fill(~sent, float("inf")).amin(1)
        flushed = sizes.amax(1) < 2.0**-110
        assert ((largest_left <= smallest_sent) | flushed).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", LENGTHS)
def test_round_trip_stays_in_bounds_at_every_length(name: str, count: int) -> None:
    values = normal(count, seed=count)
    check_error(name, values, round_trip(name, values))


@given(
    st.lists(
        st.floats(-(2.0**126), 2.0**126, width=32, allow_subnormal=True), min_size=1, max_size=300
    ),
    st.sampled_from(("fp32", "bf16", "int8", "int4")),
)
@settings(max_examples=400, deadline=None)
def test_any_finite_values_stay_in_bounds(numbers: list[float], name: str) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    check_error(name, values, round_trip(name, values))


@given(
    st.lists(
        st.floats(-(2.0**115), 2.0**115, width=32, allow_subnormal=True)
        | st.sampled_from((0.0, -0.0, 1.0, -1.0)),
        min_size=1,
        max_size=300,
    ),
    st.integers(1, 40),
    st.sampled_from(COARSE),
)
@settings(max_examples=400, deadline=None)
def test_coarse_codecs_bring_any_finite_values_nearer(
    numbers: list[float], times: int, name: str
) -> None:
    values = torch.tensor(numbers, dtype=torch.float32).repeat(times)
    check_error(name, values, round_trip(name, values))


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("fp32", 0.0),
        ("bf16", 0.0018),
        ("fp16", 0.00023),
        ("int8", 0.0071),
        ("int4", 0.0955),
        ("int2", 0.340),
        ("int1", 0.602),
        ("top12", 0.711),
        ("top3", 0.896),
    ],
)
def test_relative_error_of_normal_values(name: str, error: float) -> None:
    values = normal(4 * CHUNK, scale=1.0)
    got = (round_trip(name, values) - values).norm() / values.norm()
    assert error * 0.9 <= got <= error


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("fp32", 32),
        ("bf16", 16),
        ("fp16", 16),
        ("int8", 8.0625),
        ("int4", 4.25),
        ("int2", 2.25),
        ("int1", 1.25),
        ("top12", 0.8828125),
        ("top3", 0.2890625),
    ],
)
def test_sizes(name: str, bits: float) -> None:
    one = codec(name)
    assert one.bits == bits
    assert one.encoded_size(0) == 0
    assert one.encoded_size(CHUNK) * 8 == bits * CHUNK
    assert one.encoded_size(3 * CHUNK + 5) == 3 * one.encoded_size(CHUNK) + one.encoded_size(5)
    for count in range(1, 700):
        assert 0 <= one.encoded_size(count) - bits * count / 8 <= 80


@pytest.mark.parametrize("name", NAMES)
def test_a_chunk_decodes_alone_and_equals_itself_inside_the_stream(name: str) -> None:
    one, values = codec(name), normal(3 * CHUNK + 1001)
    data, step = encoded(name, values), codec(name).encoded_size(CHUNK)
    whole = round_trip(name, values)
    for index in range(4):
        part = values[index * CHUNK : (index + 1) * CHUNK]
        piece = data[index * step : index * step + one.encoded_size(len(part))]
        assert torch.equal(piece, encoded(name, part))
        out = torch.empty_like(part)
        one.decode(piece, out)
        assert torch.equal(out, whole[index * CHUNK : (index + 1) * CHUNK])


@pytest.mark.parametrize("name", NAMES)
def test_threads_and_memory_offsets_do_not_change_the_bytes(name: str) -> None:
    values = normal(2 * CHUNK + 77)
    expected = encoded(name, values)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: encoded(name, values), range(12)):
            assert torch.equal(got, expected)
    torch.set_num_threads(2)
    assert torch.equal(encoded(name, values), expected)
    shifted = torch.empty(len(values) + 3)[3:]
    shifted.copy_(values)
    odd = torch.empty(len(expected) + 1, dtype=torch.uint8)[1:]
    codec(name).encode(shifted, odd)
    assert torch.equal(odd, expected)
    out = torch.empty_like(shifted)
    codec(name).decode(odd, out)
    assert torch.equal(out, round_trip(name, values))


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_buffer(name: str) -> None:
    values = normal(777)
    expected, size = encoded(name, values), codec(name).encoded_size(777)
    writable = bytearray(size)
    codec(name).encode(values, memoryview(writable))
    assert bytes(writable) == expected.numpy().tobytes()
    for data in (bytes(writable), writable, memoryview(bytes(writable)), expected):
        out = torch.empty(777)
        codec(name).decode(data, out)
        assert torch.equal(out, round_trip(name, values))


@pytest.mark.parametrize("name", NAMES)
def test_decode_add_rounds_the_product_before_adding(name: str) -> None:
    values, accumulator = normal(CHUNK + 300), normal(CHUNK + 300, seed=1)
    product = torch.mul(round_trip(name, values), 0.25)  # exact, and so are the scales times it
    expected = torch.add(accumulator, product)
    codec(name).decode_add(encoded(name, values), 0.25, accumulator)
    assert torch.equal(accumulator, expected)
    product = torch.mul(round_trip(name, values), 0.3)
    expected.add_(product)
    codec(name).decode_add(encoded(name, values), 0.3, accumulator)
    if codec(name).bits >= 16 or name in KEPT:
        assert torch.equal(accumulator, expected)
    assert torch.allclose(accumulator, expected, rtol=2**-22, atol=2**-22 * product.abs().max())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 300, CHUNK, CHUNK + 69])
def test_encode_refuses_what_is_not_finite(name: str, bad: float, place: int) -> None:
    values = normal(CHUNK + 70)
    values[place] = bad
    with pytest.raises(ValueError, match="finite"):
        encoded(name, values)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_decode_refuses_values_that_are_not_finite(name: str, bad: float) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    values = normal(100).to(dtype)
    values[41] = bad
    with pytest.raises(NonFinite):
        codec(name).decode(values.view(torch.uint8), torch.empty(100))


@pytest.mark.parametrize("name", ["int8", "int4", *COARSE])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 3e38, -3e38])
def test_decode_refuses_scales_that_no_encoder_writes(name: str, bad: float) -> None:
    data = encoded(name, normal(1000))
    data[2:4] = torch.tensor([bad], dtype=torch.bfloat16).view(torch.uint8)
    accumulator = torch.zeros(1000)
    with pytest.raises(NonFinite):
        codec(name).decode_add(data, 1.0, accumulator)
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

    found = refused(lambda: codec(name).check(noise, count))
    assert found is refused(lambda: codec(name).decode(noise, torch.empty(count)))


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4"])
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
        codec(name).decode(noise, out)
    except Malformed:
        assert len(noise) != size or name in KEPT  # whose indices may be nonsense
    except NonFinite:
        assert len(noise) == size
    else:
        assert len(noise) == size
        assert torch.isfinite(out).all()


@pytest.mark.parametrize("name", list(KEPT))
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
            codec(name).decode_add(data, 1.0, accumulator)
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
        codec(name).decode(moved, torch.empty(8192))


def test_equal_magnitudes_are_taken_from_the_front() -> None:
    values = torch.full((4096,), -2.0)
    values[4000] = 3.0
    got = round_trip("top3", values)
    assert got[4000] == 3.0
    assert (got[:127] == -2.0).all()
    assert not got[127:4000].any()


def test_misuse_is_our_own_bug() -> None:
    with pytest.raises(LocalProtocolError, match="the buffer has 3"):
        codec("bf16").encode(torch.zeros(5), bytearray(3))
    with pytest.raises(LocalProtocolError, match="float32"):
        codec("bf16").encode(torch.zeros(5, dtype=torch.float64), bytearray(10))
    with pytest.raises(LocalProtocolError, match="uint8"):
        codec("bf16").encode(torch.zeros(5), torch.zeros(10))
    with pytest.raises(Malformed, match="zip"):
        codec("zip")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("start", "stop"),
    [
        (0, 500_000),
        (256, 299_264),
        (131_072, 300_001),
        (299_008, 300_001),
        (300_001, 400_000),
        (7, 7),
    ],
)
def test_range_codec_chunks_tile_the_range(name: str, start: int, stop: int) -> None:
    dense, vector = 300_001, normal(500_000)
    ranged = RangeCodec(name, dense)
    chunks = ranged.chunks(start, stop)
    place, offset = start, 0
    for one in chunks:
        assert (one.start, one.offset) == (place, offset)
        assert one.stop <= dense or one.start >= dense
        place, offset = one.stop, offset + one.size
    assert (place, offset) == (stop, ranged.encoded_size(start, stop))

    data = torch.empty(offset, dtype=torch.uint8)
    ranged.encode(start, vector[start:stop], data)
    out = torch.full((stop - start,), float("nan"))
    ranged.decode(start, data, out)
    behind = vector[max(start, dense) : max(stop, dense)]
    tail = round_trip("fp32" if name == "fp32" else "bf16", behind) if len(behind) else behind
    assert torch.equal(out[len(out) - len(tail) :], tail)
    head = vector[start : min(stop, dense)]
    check_error(name, head, out[: len(head)])

    added, received = torch.zeros(stop - start), 0
    for one in chunks:  # as they arrive
        assert ranged.complete(start, stop, received + one.size - 1) == one.start - start
        received += one.size
        assert ranged.complete(start, stop, received) == one.stop - start
        piece = data[one.offset : one.offset + one.size]
        ranged.decode_add_chunk(one, piece, 1.0, added[one.start - start : one.stop - start])
    assert torch.equal(added, out)


def test_range_codec_refuses_wrong_lengths_and_ranges() -> None:
    ranged = RangeCodec("int4", 1000)
    with pytest.raises(Malformed):
        ranged.decode(0, bytes(10), torch.empty(1000))
    with pytest.raises(LocalProtocolError):
        ranged.chunks(5, 2)
