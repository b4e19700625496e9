"""How tensors become bytes: fp32, bf16, fp16, int8 and int4, in chunks that decode alone.

A codec turns ``n`` float32 values into ``encoded_size(n)`` bytes. The values are cut into
chunks of :data:`CHUNK` elements counted from the first one, so chunk ``k`` starts at byte
``k * encoded_size(CHUNK)`` and can be decoded as soon as it has arrived. Equal values give equal
bytes, whatever the number of threads and wherever the work was cut.

==== ========= =========================================== ==============================
name bits/elem a chunk                                      error per element, at most
==== ========= =========================================== ==============================
fp32 32        the values                                   0
bf16 16        the values, rounded to nearest               2⁻⁸ of it
fp16 16        the values, rounded to nearest               2⁻¹¹ of it, or 2⁻²⁵
int8 8.06      a bf16 scale per 256, then one byte each     1/253 of its block's largest
int4 4.25      a bf16 scale per 64, then half a byte each   1/15.9 of its block's largest;
                                                            1/7.7 where it was clipped
==== ========= =========================================== ==============================

int4 uses all 16 levels, -8 to 7: the element of largest magnitude is mapped to -8, by a negative
scale if it is positive, and what lies beyond 7 at the other end is clipped. Against the symmetric
-7 to 7 this takes 12 % off the L2 error of Gaussian blocks (0.095 against 0.108) at equal size.
Scales are bf16 since an fp16 scale has no room for pseudo-gradients of 1e-8.

What does not travel: NaN, infinities, and in block codecs magnitudes from 2¹²⁷ on. ``encode``
raises :class:`ValueError` for them (our own training diverged), ``decode`` raises
:class:`~protocols.errors.NonFinite`, so that they are refused at the door. Block codecs flush
blocks whose scale would be under 2⁻¹²⁰ to zero, which keeps subnormals out of the arithmetic.

>>> one = codec("int4")
>>> data = torch.empty(one.encoded_size(len(delta)), dtype=torch.uint8)
>>> one.encode(delta, data)
>>> one.decode_add(data, weight, accumulator)
"""

from protocols.codecs.base import CHUNK, Codec
from protocols.codecs.formats import NAMES, codec
from protocols.codecs.ranges import Chunk, RangeCodec

__all__ = ["CHUNK", "NAMES", "Chunk", "Codec", "RangeCodec", "codec"]
