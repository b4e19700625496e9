"""Which window of the corpus each island reads, as a pure function of where it is.

There is no sampler state: the window for (seed, round, slot, slots, step, row) is computed, so a
resumed island goes on where it was, and anybody can recompute who read what.

An epoch is a keyed permutation of the windows, cut into blocks of ``reserved`` windows, and each
round has the next block. In it the round's islands take turns: slot s of S takes the block's
windows s, s + S, s + 2S, ... as long as it trains, so islands with different numbers of inner
steps need not know of each other. Hence no window is read twice in an epoch, in whatever round or
by whatever island, as long as S * steps * batch_size <= ``reserved``. An island that goes on for
longer in a round (it hears nothing of the others, say) reads on in a permutation of that round's
own, and so do all islands of a corpus that has no whole block; there no window repeats within a
round until all have been read, but one of an earlier round may.

With ``pool`` the permutation has two levels: pools of that many neighbouring windows are permuted,
and the windows within each pool. Then what is read at one time lies together, and a cache of a few
files is enough (:mod:`node.data.remote`). What fills no whole pool is left out of an epoch, at the
beginning and the end of the corpus: where the pools begin is drawn for each epoch anew.

The permutation is a four-round Feistel network on the smallest even number of bits that holds
the count, walked along its cycle until it lands below the count (Black and Rogaway, "Ciphers with
arbitrary finite domains", 2002). It spreads data; it is no cipher.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from blake3 import blake3

Indices = npt.NDArray[np.uint64]
FEISTEL_ROUNDS = 4
TOGETHER = 16  # inner steps whose windows are computed at once


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

    ``batch_size`` is the island's sequences per inner step, ``reserved`` the windows that a round
    has for itself (0: none), ``pool`` the windows that are read together (0: all). Neighbouring
    windows share one token, the last target of one being the first input of the next.
    """

    tokens: int
    seq_len: int
    batch_size: int
    seed: int
    reserved: int = 0
    pool: int = 0

    def __post_init__(self) -> None:
        if self._in_all < 1:
            raise ValueError(
                f"{self.tokens} tokens are too few for sequences of {self.seq_len}: "
                f"need {2 * self.seq_len}"
            )

    @property
    def _in_all(self) -> int:
        """Windows in the corpus; one ``seq_len`` is left over for the epoch's random offset."""
        return (self.tokens - self.seq_len) // self.seq_len

    @property
    def windows(self) -> int:
        """Windows in an epoch: whole pools, where there are any.

        The epoch's offset decides which part of the corpus these do not reach.
        """
        pool = self.pool
        return self._in_all // pool * pool if 0 < pool <= self._in_all else self._in_all

    @property
    def rounds(self) -> int:
        """Rounds in an epoch that have windows of their own; 0 where a round needs more."""
        return self.windows // self.reserved if self.reserved else 0

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
        together, place = divmod(step, TOGETHER)
        several = _several(self, round, slot, slots, together)
        first = place * self.batch_size
        return several[first : first + self.batch_size][rows.start : rows.stop : rows.step]

    def compute(self, round: int, slot: int, slots: int, rows: range) -> npt.NDArray[np.int64]:
        """As :meth:`starts`, int64 [len(rows)], with ``rows`` counted through the whole round."""
        counter = np.arange(rows.start, rows.stop, rows.step, dtype=np.int64)
        counter = counter * slots + slot
        starts = np.empty_like(counter)
        own = counter < self.reserved if self.rounds else np.zeros(len(counter), dtype=bool)
        if own.any():
            epoch, block = divmod(round, self.rounds)
            starts[own] = self._permuted(counter[own] + block * self.reserved, "epoch", epoch)
        passes, places = np.divmod(counter, self.windows)
        for number in np.unique(passes[~own]):
            here = ~own & (passes == number)
            starts[here] = self._permuted(places[here], round, int(number))
        return starts

    def _permuted(self, places: npt.NDArray[np.int64], *key: int | str) -> npt.NDArray[np.int64]:
        """First tokens of the windows at ``places`` of the permutation with this key."""
        keys = _keys(self.seed, *key, count=FEISTEL_ROUNDS + 1)
        left_over = 1 + self._in_all - self.windows  # windows' worth, where an epoch may begin
        offset = int(keys[-1] % np.uint64(self.seq_len * left_over))
        size = self.pool if 0 < self.pool < self.windows else self.windows
        pools, inside = np.divmod(places, size)
        window = np.empty_like(places)
        for pool in np.unique(pools):
            here = pools == pool
            own = _keys(self.seed, *key, int(pool), count=FEISTEL_ROUNDS)
            inner = keys[:-1] if size == self.windows else own
            window[here] = permute(inside[here].astype(np.uint64), size, inner).astype(np.int64)
        if size < self.windows:
            moved = permute(pools.astype(np.uint64), self.windows // size, keys[:-1])
            window += moved.astype(np.int64) * size
        return window * self.seq_len + offset


@functools.lru_cache(maxsize=4)
def _several(
    sampler: Sampler, round: int, slot: int, slots: int, together: int
) -> npt.NDArray[np.int64]:
    """Windows of :data:`TOGETHER` steps, which take hardly longer to compute than those of one."""
    size = TOGETHER * sampler.batch_size
    starts = sampler.compute(round, slot, slots, range(together * size, (together + 1) * size))
    starts.flags.writeable = False
    return starts
