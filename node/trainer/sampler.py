"""Which window of the corpus each island reads, as a pure function of where it is.

There is no sampler state: the window for (seed, round, slot, slots, step, row) is computed, so a
resumed island goes on where it was, and anybody can recompute who read what. In a round, the
islands count through one sequence of numbers in turn (slot s of S takes s, s + S, s + 2S, ...)
and a keyed permutation of the windows turns numbers into windows. Hence two slots never share a
window in a round until all windows have been read; then the next epoch's permutation starts.
Another round is another permutation.

The permutation is a four-round Feistel network on the smallest even number of bits that holds
the count, walked along its cycle until it lands below the count (Black and Rogaway, "Ciphers with
arbitrary finite domains", 2002). It spreads data; it is no cipher.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from blake3 import blake3

Indices = npt.NDArray[np.uint64]
FEISTEL_ROUNDS = 4


def _keys(*parts: int | str, count: int) -> Indices:
    """``count`` 64-bit keys derived from the parts; endianness is fixed for all machines."""
    digest = blake3("/".join(map(str, parts)).encode()).digest(8 * count)
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _scramble(x: Indices) -> Indices:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(indices: Indices, size: int, keys: Indices) -> Indices:
    """Images of ``indices`` (each below ``size``) under a keyed permutation of ``range(size)``.

    ``keys`` is uint64 [FEISTEL_ROUNDS]; the result has the shape of ``indices``. At most about
    four passes are expected, since the Feistel domain is at most four times ``size``.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    out = indices.astype(np.uint64)
    walking = np.ones(out.shape, dtype=bool)
    while walking.any():
        value = out[walking]
        left, right = value >> half, value & mask
        for key in keys:
            left, right = right, left ^ (_scramble(right + key) & mask)
        value = (left << half) | right
        out[walking] = value
        walking[walking] = value >= np.uint64(size)
    return out


@dataclass(frozen=True)
class Sampler:
    """Windows of ``seq_len`` + 1 tokens in a corpus of ``tokens``; raises ValueError if too short.

    ``batch_size`` is the island's sequences per inner step. Neighbouring windows share one token,
    the last target of one being the first input of the next.
    """

    tokens: int
    seq_len: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.windows < 1:
            raise ValueError(
                f"{self.tokens} tokens are too few for sequences of {self.seq_len}: "
                f"need {2 * self.seq_len}"
            )

    @property
    def windows(self) -> int:
        """Windows in an epoch. One ``seq_len`` is left over for the epoch's random offset."""
        return (self.tokens - self.seq_len) // self.seq_len

    def starts(
        self, round: int, slot: int, slots: int, step: int, rows: range | None = None
    ) -> npt.NDArray[np.int64]:
        """First tokens of the windows of one inner step, int64 [len(rows)].

        ``slot`` of ``slots`` is the island's place among the round's islands, ``step`` its inner
        step within the round, ``rows`` the part of the batch that a rank or micro-batch takes
        (all of it by default). Raises ValueError for a place outside its bounds.
        """
        rows = range(self.batch_size) if rows is None else rows
        if not 0 <= slot < slots or round < 0 or step < 0:
            raise ValueError(f"no such place: round {round}, slot {slot} of {slots}, step {step}")
        if len(rows) and not (min(rows) >= 0 and max(rows) < self.batch_size):
            raise ValueError(f"{rows} lies outside a batch of {self.batch_size}")
        counter = np.arange(rows.start, rows.stop, rows.step, dtype=np.int64)
        counter = (counter + step * self.batch_size) * slots + slot
        epochs, places = np.divmod(counter, self.windows)
        starts = np.empty_like(counter)
        for epoch in np.unique(epochs):
            keys = _keys(self.seed, round, int(epoch), count=FEISTEL_ROUNDS + 1)
            offset = int(keys[-1] % np.uint64(self.seq_len))
            inside = epochs == epoch
            window = permute(places[inside].astype(np.uint64), self.windows, keys[:-1])
            starts[inside] = window.astype(np.int64) * self.seq_len + offset
        return starts
