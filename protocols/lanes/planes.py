"""The bytes of numbers, sorted by their place in each: a plane for each place.

Sign and exponent of a float stand in one plane, and the digits that look like noise in others.
Numbers are little-endian; bytes behind the last whole one are in no plane.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Plane = npt.NDArray[np.uint8]


def planes_of(data: bytes, width: int) -> list[Plane]:
    """Those of numbers of ``width`` bytes, 1, 2 or 4; the lowest places first."""
    numbers = np.frombuffer(data, f"<u{width}", len(data) // width)
    return [(numbers >> 8 * place).astype(np.uint8) for place in range(width)]


def joined(planes: Sequence[bytes | memoryview]) -> bytes:
    """The numbers that have these planes."""
    width = len(planes)
    numbers = np.frombuffer(planes[-1], np.uint8).astype(f"<u{width}")
    for plane in planes[-2::-1]:
        numbers <<= 8
        numbers |= np.frombuffer(plane, np.uint8)
    return numbers.tobytes()
