"""The codec of a flat vector whose parts want different ones."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from protocols.codecs.base import Buffer, Codec, byte_tensor, check_vector
from protocols.codecs.registry import codec
from protocols.errors import LocalProtocolError, Malformed


class Chunk(NamedTuple):
    """A piece of an encoded range that decodes alone."""

    start: int  # elements of the flat vector
    stop: int
    offset: int  # bytes from the start of the encoded range
    size: int

    @property
    def span(self) -> slice:
        """Its bytes in the encoded range."""
        return slice(self.offset, self.offset + self.size)


class RangeCodec:
    """The codec of a flat vector: ``name`` for [0, dense), bf16 behind it.

    Matrices come first in the flat layout and vectors (norms, biases) last; the latter are few
    and each of their elements counts, so they travel as bf16, or as fp32 with codec fp32.
    A range [start, stop) is encoded as its part before ``dense`` followed by its part behind.
    """

    def __init__(self, name: str, dense: int) -> None:
        self.name = name
        self.dense = dense
        self._matrices = codec(name)
        self._vectors = codec("fp32" if name == "fp32" else "bf16")

    @property
    def longer(self) -> float:
        """How much longer it may make a vector (:attr:`Codec.longer`)."""
        return self._matrices.longer

    def named(self, name: str) -> RangeCodec:
        """The codec of the same vector whose matrices travel as ``name``; may raise Malformed."""
        return self if name == self.name else RangeCodec(name, self.dense)

    def encoded_size(self, start: int, stop: int) -> int:
        """Bytes of the range, exactly."""
        return sum(one.encoded_size(b - a) for one, a, b in self._sections(start, stop))

    def size_as(self, name: str, start: int, stop: int) -> int:
        """Bytes of the range with the matrices as ``name``; may raise Malformed."""
        return self.named(name).encoded_size(start, stop)

    def chunks(self, start: int, stop: int) -> tuple[Chunk, ...]:
        """The pieces of the range in the order of their bytes, without gaps."""
        return _chunks(self.name, self.dense, start, stop)

    def complete(self, start: int, stop: int, received: int) -> int:
        """Elements from ``start`` on that the first ``received`` bytes of the range decode to."""
        whole = [c.stop for c in self.chunks(start, stop) if c.offset + c.size <= received]
        return max(whole, default=start) - start

    def encode_chunk(self, chunk: Chunk, values: Tensor, out: Buffer) -> None:
        """Encode ``values`` [chunk.stop - chunk.start] into ``out`` [chunk.size]."""
        self._of(chunk).encode_one(values, out)

    def decode_chunk(self, chunk: Chunk, data: Buffer, out: Tensor, weight: float = 1.0) -> None:
        """Decode the bytes of one chunk, times ``weight``; raises as :meth:`Codec.decode_one`."""
        self._of(chunk).decode_one(data, out, weight)

    def check_chunk(self, chunk: Chunk, data: Buffer) -> None:
        """Raise what decoding the bytes of one chunk would."""
        self._of(chunk).check_one(data, chunk.stop - chunk.start)

    def decode_add_chunk(
        self, chunk: Chunk, data: Buffer, weight: float, accumulator: Tensor
    ) -> None:
        """``accumulator += weight * decoded`` for one chunk, all of it or, on error, nothing."""
        self._of(chunk).decode_add_one(data, weight, accumulator)

    def encode(self, start: int, values: Tensor, out: Buffer) -> None:
        """Encode a whole range into ``out``, ``values`` being elements ``start`` on.

        Raises as :meth:`Codec.encode_one` does.
        """
        target, size = byte_tensor(out), self.encoded_size(start, start + len(values))
        check_vector(values)
        if len(target) != size:
            raise LocalProtocolError(
                f"{len(values)} elements as {self.name} need {size} bytes, "
                f"the buffer has {len(target)}"
            )
        for one in self.chunks(start, start + len(values)):
            part = values[one.start - start : one.stop - start]
            self.encode_chunk(one, part, target[one.span])

    def decode(self, start: int, data: Buffer, out: Tensor) -> None:
        """Decode a whole range into ``out``, whose first element is ``start``.

        Raises as :meth:`Codec.decode_one` does.
        """
        source = byte_tensor(data)
        check_vector(out)
        if len(source) != self.encoded_size(start, start + len(out)):
            raise Malformed(f"{len(source)} bytes do not hold {len(out)} elements")
        for one in self.chunks(start, start + len(out)):
            part = out[one.start - start : one.stop - start]
            self.decode_chunk(one, source[one.span], part)

    def _of(self, chunk: Chunk) -> Codec:
        return self._matrices if chunk.start < self.dense else self._vectors

    def _sections(self, start: int, stop: int) -> list[tuple[Codec, int, int]]:
        if not 0 <= start <= stop:
            raise LocalProtocolError(f"no range: {start} to {stop}")
        edge = min(max(start, self.dense), stop)
        both = (self._matrices, start, edge), (self._vectors, edge, stop)
        return [section for section in both if section[1] < section[2]]


class Encoded(NamedTuple):
    """A whole vector as it travels."""

    codec: RangeCodec
    data: Tensor  # uint8

    def decode_chunk(self, chunk: Chunk, out: Tensor) -> None:
        """One of the codec's chunks into float32 ``out`` [chunk.stop - chunk.start]."""
        data = self.data[chunk.span]
        self.codec.decode_chunk(chunk, data, out)


@lru_cache(maxsize=32)
def _chunks(name: str, dense: int, start: int, stop: int) -> tuple[Chunk, ...]:
    """Those of a range: each of a round's transfers asks for the same."""
    pieces: list[Chunk] = []
    before = 0
    for one, first, last in RangeCodec(name, dense)._sections(start, stop):
        pieces += [
            Chunk(first + a, first + b, before + offset, size)
            for a, b, offset, size in one.pieces(last - first)
        ]
        before += one.encoded_size(last - first)
    return tuple(pieces)
