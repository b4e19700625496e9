"""Codecs: sizes, error bounds, equal bytes whatever the cut."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from codec_kit import (
    COARSE,
    FINE,
    LENGTHS,
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

from protocols.codecs import CHUNK, NAMES, RangeCodec, codec
from protocols.errors import LocalProtocolError, Malformed


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", LENGTHS)
def test_round_trip_stays_in_bounds_at_every_length(name: str, count: int) -> None:
    values = normal(count, seed=count)
    check_error(name, values, round_trip(name, values))


@given(
    st.lists(
        st.floats(-(2.0**126), 2.0**126, width=32, allow_subnormal=True), min_size=1, max_size=300
    ),
    st.sampled_from([name for name in FINE if name != "fp16"]),  # which has no room for them
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


# by codec: bits an element, and the error of normal values against their length
BITS = {
    "fp32": 32,
    "bf16": 16,
    "fp16": 16,
    "int8": 8.0625,
    "int4": 4.25,
    "int2": 2.25,
    "int1": 1.25,
    "top12": 0.8828125,
    "top3": 0.2890625,
}
RELATIVE = {
    "fp32": 0.0,
    "bf16": 0.0018,
    "fp16": 0.00023,
    "int8": 0.0071,
    "int4": 0.0955,
    "int2": 0.340,
    "int1": 0.602,
    "top12": 0.711,
    "top3": 0.896,
}


@pytest.mark.parametrize("name", NAMES)
def test_relative_error_of_normal_values(name: str) -> None:
    values, error = normal(4 * CHUNK, scale=1.0), RELATIVE[name]
    got = (round_trip(name, values) - values).norm() / values.norm()
    assert error * 0.9 <= got <= error


@pytest.mark.parametrize("name", NAMES)
def test_sizes(name: str) -> None:
    one, bits = codec(name), BITS[name]
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
        decode(name, piece, out)
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
    encode(name, shifted, odd)
    assert torch.equal(odd, expected)
    out = torch.empty_like(shifted)
    decode(name, odd, out)
    assert torch.equal(out, round_trip(name, values))


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_buffer(name: str) -> None:
    values = normal(777)
    expected, size = encoded(name, values), codec(name).encoded_size(777)
    writable = bytearray(size)
    encode(name, values, memoryview(writable))
    assert bytes(writable) == expected.numpy().tobytes()
    for data in (bytes(writable), writable, memoryview(bytes(writable)), expected):
        out = torch.empty(777)
        decode(name, data, out)
        assert torch.equal(out, round_trip(name, values))


@pytest.mark.parametrize("name", NAMES)
def test_decode_add_rounds_the_product_before_adding(name: str) -> None:
    values, accumulator = normal(CHUNK + 300), normal(CHUNK + 300, seed=1)
    product = torch.mul(round_trip(name, values), 0.25)  # exact, and so are the scales times it
    expected = torch.add(accumulator, product)
    decode_add(name, encoded(name, values), 0.25, accumulator)
    assert torch.equal(accumulator, expected)
    product = torch.mul(round_trip(name, values), 0.3)
    expected.add_(product)
    decode_add(name, encoded(name, values), 0.3, accumulator)
    if codec(name).bits >= 16 or codec(name).sparse:
        assert torch.equal(accumulator, expected)
    assert torch.allclose(accumulator, expected, rtol=2**-22, atol=2**-22 * product.abs().max())


def test_equal_magnitudes_are_taken_from_the_front() -> None:
    values = torch.full((4096,), -2.0)
    values[4000] = 3.0
    got = round_trip("top3", values)
    assert got[4000] == 3.0
    assert (got[:127] == -2.0).all()
    assert not got[127:4000].any()


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
        piece = data[one.span]
        ranged.decode_add_chunk(one, piece, 1.0, added[one.start - start : one.stop - start])
    assert torch.equal(added, out)


def test_range_codec_refuses_wrong_lengths_and_ranges() -> None:
    ranged = RangeCodec("int4", 1000)
    with pytest.raises(Malformed):
        ranged.decode(0, bytes(10), torch.empty(1000))
    with pytest.raises(LocalProtocolError):
        ranged.chunks(5, 2)
