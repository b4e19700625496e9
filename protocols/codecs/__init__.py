"""How tensors become bytes: floats, blocks of integers, and the largest few, in chunks.

A codec turns ``n`` float32 values into ``encoded_size(n)`` bytes. The values are cut into
chunks of :data:`CHUNK` elements counted from the first one, so chunk ``k`` starts at byte
``k * encoded_size(CHUNK)`` and can be decoded as soon as it has arrived. Equal values give equal
bytes, whatever the number of threads and wherever the work was cut.

===== ========= =========================================== ==============================
name  bits/elem a chunk                                      error per element, at most
===== ========= =========================================== ==============================
fp32  32        the values                                   0
bf16  16        the values, rounded to nearest               2⁻⁸ of it
fp16  16        the values, rounded to nearest               2⁻¹¹ of it, or 2⁻²⁵
int8  8.06      a bf16 scale per 256, then one byte each     1/253 of its block's largest
int4  4.25      a bf16 scale per 64, then half a byte each   1/15.9 of its block's largest;
                                                             1/7.7 where it was clipped
===== ========= =========================================== ==============================

The others lose so much that an island has to keep what was lost and send it later
(:attr:`Codec.feedback`). Of each block, in L2, decoded values are nearer than zeros would be:

===== ========= =========================================== ==============================
name  bits/elem a chunk                                      relative error, Gaussian values
===== ========= =========================================== ==============================
int2  2.25      a bf16 scale per 64, then two bits each      0.34
int1  1.25      a bf16 scale per 64, then the signs          0.60
top12 0.88      the largest 512 of each 4096, two bits each  0.71
top3  0.29      the largest 128 of each 4096, two bits each  0.90
===== ========= =========================================== ==============================

int4 uses all 16 levels, -8 to 7: the element of largest magnitude is mapped to -8, by a negative
scale if it is positive, and what lies beyond 7 at the other end is clipped. Against the symmetric
-7 to 7 this takes 12 % off the L2 error of Gaussian blocks (0.095 against 0.108) at equal size.
Scales are bf16 since an fp16 scale has no room for pseudo-gradients of 1e-8. int2 and int1:
:mod:`protocols.codecs.lowbit`; how indices are written: :mod:`protocols.codecs.sparse`.

What does not travel: NaN, infinities, and magnitudes from 2¹²⁷ on in int8 and int4, from 2¹¹⁶ on
in those with feedback. Encoding raises :class:`ValueError` for them (our own training
diverged), decoding raises :class:`~protocols.errors.NonFinite`, so that they are refused at the
door; and :class:`~protocols.errors.Malformed` for indices that do not ascend. Block codecs flush
blocks whose scale would be under 2⁻¹²⁰ to zero, which keeps subnormals out of the arithmetic.

>>> one = RangeCodec("int4", dense=len(delta))
>>> data = torch.empty(one.encoded_size(0, len(delta)), dtype=torch.uint8)
>>> one.encode(0, delta, data)
>>> one.decode(0, data, out)
"""

from protocols.codecs.base import CHUNK, Codec
from protocols.codecs.ranges import Chunk, Encoded, RangeCodec
from protocols.codecs.registry import NAMES, codec

__all__ = ["CHUNK", "NAMES", "Chunk", "Codec", "Encoded", "RangeCodec", "codec"]
