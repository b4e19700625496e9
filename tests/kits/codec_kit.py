"""Values through a codec and back, and the error that each element may have."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from protocols.codecs import CHUNK, NAMES, Chunk, RangeCodec, codec
from protocols.codecs.base import Buffer

LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, CHUNK - 1, CHUNK, CHUNK + 1)
COARSE = tuple(name for name in NAMES if codec(name).feedback)  # blocks are nearer than zeros
FINE = tuple(name for name in NAMES if name not in COARSE)  # each element is near what it was
KEPT = {"top12": 512, "top3": 128}  # of 4096
# how far a mean of encoded normal values may be from theirs, in L2, by codecs of FINE
ERRORS = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 1e-3, "int8": 2e-2, "int4": 0.2}


def normal(count: int, seed: int = 0, scale: float = 1e-3) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale


def whole(name: str) -> RangeCodec:
    """The codec of a vector of any length that travels as ``name`` to its end."""
    return RangeCodec(name, 2**62)


def encode(name: str, values: Tensor, out: Buffer) -> None:
    whole(name).encode(0, values, out)


def decode(name: str, data: Buffer, out: Tensor) -> None:
    whole(name).decode(0, data, out)


def decode_add(name: str, data: Buffer, weight: float, accumulator: Tensor) -> None:
    """``accumulator += weight * decoded``, chunk by chunk."""
    for chunk, piece in _pieces(name, data, len(accumulator)):
        here = accumulator[chunk.start : chunk.stop]
        whole(name).decode_add_chunk(chunk, piece, weight, here)


def check(name: str, data: Buffer, count: int) -> None:
    """Raise what decoding to ``count`` elements would."""
    for chunk, piece in _pieces(name, data, count):
        whole(name).check_chunk(chunk, piece)


def _pieces(name: str, data: Buffer, count: int) -> Iterator[tuple[Chunk, Buffer]]:
    """Each chunk with its bytes; what there is beyond is the last one's."""
    for chunk in whole(name).chunks(0, count):
        end = None if chunk.stop == count else chunk.offset + chunk.size
        yield chunk, data[chunk.offset : end]


def encoded(name: str, values: Tensor) -> Tensor:
    out = torch.empty(codec(name).encoded_size(len(values)), dtype=torch.uint8)
    encode(name, values, out)
    return out


def round_trip(name: str, values: Tensor) -> Tensor:
    out = torch.full_like(values, float("nan"))
    decode(name, encoded(name, values), out)
    return out


def bounds(name: str, values: Tensor) -> Tensor:
    """The error each element may have, as the table in the module's docstring says."""
    if name == "fp32":
        return torch.zeros_like(values)
    if name == "bf16":
        return values.abs() * 2**-8 + 1e-40
    if name == "fp16":
        return torch.maximum(values.abs() * 2**-11, torch.tensor(2.0**-25)) * (1 + 1e-6)
    if name not in ("int8", "int4"):
        raise ValueError(f"no bound of codec {name}'s errors is known")
    padded = in_blocks(values, codec(name).block)
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
    before, error = (in_blocks(x.double(), codec(name).block) for x in (values, got - values))
    # what is flushed to zero or rounded to bf16 is the slack
    assert (error.norm(dim=1) <= before.norm(dim=1) * (1 + 2**-16) + 2.0**-110).all()
    counts = values.abs() > before.abs().max() * 2.0**-100 if len(values) else values > 0
    assert (got * values.sign() >= 0)[counts].all()
    if codec(name).sparse:
        sent, sizes = in_blocks(got, 4096) != 0, in_blocks(values, 4096).abs()
        assert (sent.sum(1) <= KEPT[name]).all()
        largest_left = sizes.masked_fill(sent, 0).amax(1)
        smallest_sent = sizes.masked_fill(~sent, float("inf")).amin(1)
        flushed = sizes.amax(1) < 2.0**-110
        assert ((largest_left <= smallest_sent) | flushed).all()
