"""What all codecs share: the cut into chunks, the buffers, the checks."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from protocols.errors import LocalProtocolError, Malformed

CHUNK: Final = 131_072  # elements: half a megabyte, so that a chunk and its scratch stay in cache

Buffer = bytes | bytearray | memoryview | Tensor


class Scratch(threading.local):
    """Buffers each thread keeps: an allocation per chunk would cost as much as the encoding.

    One chunk is in work at a time, so all codecs share them; what is in them lasts until the call
    returns.
    """

    def __init__(self) -> None:
        self.values = torch.empty(CHUNK)  # what an encoder makes of its values; a product
        self.packed = torch.empty(CHUNK // 2)  # codes on their way into bytes, of int4
        self.half = torch.empty(CHUNK, dtype=torch.int16)  # bf16 and fp16, before they are checked
        self.codes = torch.empty(CHUNK, dtype=torch.uint8)  # one a byte, both ways
        # what a decoder has of its bytes; of an encoder the blocks that were filled up (`blocked`)
        self.decoded = torch.empty(CHUNK)
        self.levels = torch.empty(CHUNK)  # of an encoder that needs them beside `values`: int2
        self.checked = torch.empty(CHUNK)  # where Codec._check decodes to


scratch = Scratch()


class Codec(ABC):
    """One encoding. Instances hold no state; get them from :func:`codec`."""

    name: str
    bits: float  # per element of a long vector
    block: int  # elements that are encoded together, from the first of a chunk on
    feedback = False  # loses so much that what is lost must be sent later
    sparse = False  # sends a few elements of many, and of the others nothing
    # How many times as long it may make a vector at most: longer contributions are refused. Where
    # a step of rounding is 1 and a block of n has one element of the largest level m, the worst is
    # the highest √((m² + (n − 1) k²) / (m² + (n − 1) (k − ½)²)) over k.
    longer: float

    def encoded_size(self, count: int) -> int:
        """Bytes that ``count`` elements take, exactly."""
        whole, rest = divmod(count, CHUNK)
        return whole * self._size(CHUNK) + (self._size(rest) if rest else 0)

    def pieces(self, count: int) -> Iterator[tuple[int, int, int, int]]:
        """(start, stop) in elements and (offset, size) in bytes of each chunk."""
        step = self._size(CHUNK)
        for index, start in enumerate(range(0, count, CHUNK)):
            stop = min(start + CHUNK, count)
            yield start, stop, index * step, self._size(stop - start)

    # --- one chunk of at most CHUNK elements; longer vectors are a RangeCodec's -------------------

    def encode_one(self, values: Tensor, out: Buffer) -> None:
        """Encode float32 ``values`` [n] into ``out``, a writable buffer of ``encoded_size(n)``.

        Raises :class:`ValueError` if a value is not finite or too large for the codec.
        """
        target, count = byte_tensor(out), values.numel()
        if not 0 < count <= CHUNK or target.numel() != self._size(count):
            raise LocalProtocolError(f"{target.numel()} bytes of {self.name} for {count} elements")
        self._encode(values, target)

    def decode_one(self, data: Buffer, out: Tensor, weight: float = 1.0) -> None:
        """Decode ``data`` into float32 ``out`` [n], times ``weight``.

        Raises :class:`~protocols.errors.Malformed` if the length is not that of n elements and
        :class:`~protocols.errors.NonFinite` if a value is not finite; ``out`` may then be partly
        written.
        """
        if weight == 1.0:
            self._decode(self._one(data, out.numel()), out)
        else:
            self._decode_times(self._one(data, out.numel()), weight, out)

    def decode_add_one(self, data: Buffer, weight: float, accumulator: Tensor) -> None:
        """``accumulator += weight * decoded``, the product rounded before it is added.

        Codecs with scales multiply these with the weight, which saves a pass over the elements.

        With weights that sum to at most 1 the accumulator cannot overflow. Raises as
        :meth:`decode_one` does, and then nothing is added.
        """
        self._decode_add(self._one(data, accumulator.numel()), weight, accumulator)

    def check_one(self, data: Buffer, count: int) -> None:
        """Raise what :meth:`decode_one` to ``count`` elements would; costs less where it can."""
        self._check(self._one(data, count), count)

    def _one(self, data: Buffer, count: int) -> Tensor:
        source = byte_tensor(data)
        if not 0 < count <= CHUNK or source.numel() != self._size(count):
            raise Malformed(f"{source.numel()} bytes of {self.name} for {count} elements")
        return source

    @abstractmethod
    def _size(self, count: int) -> int:
        """Bytes of a chunk of 1 to CHUNK elements."""

    @abstractmethod
    def _encode(self, values: Tensor, out: Tensor) -> None:
        """One chunk, lengths checked."""

    @abstractmethod
    def _decode(self, data: Tensor, out: Tensor) -> None:
        """One chunk, lengths checked."""

    @abstractmethod
    def _decode_add(self, data: Tensor, weight: float, accumulator: Tensor) -> None:
        """One chunk, lengths checked; all of it or, on error, nothing."""

    def _decode_times(self, data: Tensor, weight: float, out: Tensor) -> None:
        """One chunk times ``weight``, lengths checked."""
        self._decode(data, out)
        out.mul_(weight)

    def _check(self, data: Tensor, count: int) -> None:
        """Raise what decoding one chunk would, lengths checked."""
        self._decode(data, scratch.checked[:count])


def byte_tensor(buffer: Buffer) -> Tensor:
    """A buffer as uint8 tensor, without a copy where it is writable."""
    if isinstance(buffer, Tensor):
        if buffer.dtype is not torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
            raise LocalProtocolError("a byte buffer must be a contiguous uint8 vector")
        return buffer
    view = memoryview(buffer).cast("B")
    if not len(view):
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


def check_vector(values: Tensor) -> None:
    """Raise LocalProtocolError for what is no vector of float32."""
    if values.dtype is not torch.float32 or values.dim() != 1 or not values.is_contiguous():
        raise LocalProtocolError("values must be a contiguous float32 vector")
