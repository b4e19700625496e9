"""All codecs by name."""

from __future__ import annotations

from typing import Final

import torch

from protocols.codecs.base import Codec
from protocols.codecs.formats import Float, Int4, Int8
from protocols.codecs.lowbit import Int1, Int2
from protocols.codecs.sparse import TopK
from protocols.errors import Malformed

_CODECS: Final[dict[str, Codec]] = {
    one.name: one
    for one in (
        Float("fp32", torch.float32, longer=1.001),
        Float("bf16", torch.bfloat16, longer=1.01),
        Float("fp16", torch.float16, longer=2.01),  # it may double what is below 2⁻²⁴
        Int8(),
        Int4(),
        Int2(),
        Int1(),
        TopK("top12", 512, low_bits=2),
        TopK("top3", 128, low_bits=4),
    )
}

NAMES: Final = tuple(_CODECS)


def codec(name: str) -> Codec:
    """The codec of that name; raises :class:`~protocols.errors.Malformed` for another one."""
    try:
        return _CODECS[name]
    except KeyError:
        raise Malformed(f"codec {name!r} is none of {', '.join(NAMES)}") from None
