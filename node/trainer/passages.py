"""What a document has in common with the evaluation shard, and may not be trained on.

Two texts with the same words may be cut into documents, or worded, a little otherwise. So it is
stretches that are looked for, of a fixed length, whatever stands around them: the hashes of all
those of the shard are kept, and those of a training document, one for each of its places, looked up
among them.

What no more than a few documents have is text that is evaluated, in another cut: one that has much
of it is left out whole; of any other the passages are, and what stands before and behind them are
two documents. What more have is a licence, a heading or a phrase, part of how such text is written:
of these only long ones are left out, and after a thousand documents none. Else little would be left
of sources, logs and forms, and what was left would not be written as what is evaluated is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from node.data.batches import batches
from node.data.tokenizer import BYTES, Tokenizer

MIN_PASSAGE = 64  # bytes; shorter ones are common phrases
MIN_PASSAGE_TOKENS = 16  # likewise, of larger vocabularies
EDGE_TOKENS = 4
COPIES = 3  # documents that have a passage nearly to themselves; more have it in common
COMMON = 4  # times as long is what is left out of those
EVERYWHERE = 1000  # documents; what more have stays in the further ones
ANOTHER_CUT = 6  # a document is one where such a part of it is evaluated: a sixth
FILTER = 32  # places of the filter for each hash: one in so many of others gets through
MAX_FILTER_BITS = 26
ARRAYS = 4  # at once, in a batch
BASE = 0x9E3779B97F4A7C15  # of the hashes, which are polynomials modulo 2^64; odd

Tokens = npt.NDArray[np.integer[Any]]
Hashes = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]


class Passages:
    """The stretches of a shard, and how many documents have had each so far.

    What stands before and behind a passage may change the tokens at its edges, so with larger
    vocabularies these go with it. What is left of a document between two passages, or at its ends,
    goes as well where it is shorter than a stretch.
    """

    def __init__(
        self, shard: bytes, seq_len: int, tokenizer: Tokenizer, kind: np.dtype[Any]
    ) -> None:
        self.left_out = 0  # tokens
        self._kind, self._width = kind, kind.itemsize
        self._end = np.array([tokenizer.document_end], dtype=kind).tobytes()
        least, self._edge = (
            (MIN_PASSAGE, 0) if tokenizer.digest == BYTES else (MIN_PASSAGE_TOKENS, EDGE_TOKENS)
        )
        most = max(seq_len // 2, seq_len - 2 * self._edge)  # of a window, in other surroundings
        self._least, self._long = min(most, least), min(most, COMMON * least)
        windows = np.frombuffer(shard, dtype=kind).reshape(-1, seq_len + 1)
        hashes = [np.empty(0, np.uint64)]
        for window in windows:
            for piece in np.split(window, np.flatnonzero(window == tokenizer.document_end)):
                hashes.append(_stretches(piece[piece != tokenizer.document_end], self._least))
        self._hashes = np.unique(np.concatenate(hashes))
        self._had = np.zeros(len(self._hashes), np.uint16)  # documents, up to EVERYWHERE
        bits = min((1 + FILTER * len(self._hashes)).bit_length(), MAX_FILTER_BITS)
        self._shift = np.uint64(64 - bits)
        self._filter = np.zeros(1 << bits, np.bool_)  # looked into first: searching takes long
        self._filter[self._hashes >> self._shift] = True

    def trainable(
        self, coded: Iterable[bytes], held_out: Callable[[bytes], bool] = lambda document: False
    ) -> Iterator[bytes]:
        """What may be trained on of documents, each with its end; again documents with theirs.

        What is left of a document is one of its own, and may be one that is ``held_out``.
        """
        for batch in batches(coded, self._room):
            found = self._found(batch)
            for number, document in enumerate(batch):
                if number not in found:
                    yield document
                    continue
                left = self._left(len(document) // self._width - 1, *found[number])
                parts = [document[i * self._width : j * self._width] + self._end for i, j in left]
                parts = [part for part in parts if not held_out(part)]
                self.left_out += max(0, len(document) - sum(map(len, parts))) // self._width
                yield from parts

    def _room(self, document: bytes) -> int:
        """Bytes in memory to look for it: some arrays of hashes."""
        return len(document) // self._width * ARRAYS * np.dtype(np.uint64).itemsize

    def _found(self, batch: list[bytes]) -> dict[int, tuple[Places, Places]]:
        """By a document's number: where stretches of the shard begin in it, and which ones.

        All documents are looked through as one, since they are short: no stretch has the end of a
        document in it.
        """
        hashes = _stretches(np.frombuffer(b"".join(batch), self._kind), self._least)
        starts = np.flatnonzero(self._filter[hashes >> self._shift])
        if not len(starts):
            return {}
        which = np.searchsorted(self._hashes, hashes[starts])
        which = np.minimum(which, len(self._hashes) - 1)
        known = self._hashes[which] == hashes[starts]
        starts, which = starts[known], which[known]
        ends = np.cumsum([len(document) // self._width for document in batch])
        bounds = np.searchsorted(starts, ends).tolist()
        return {
            number: (starts[first:last] - end, which[first:last])
            for number, (first, last, end) in enumerate(
                zip([0, *bounds], bounds, [0, *ends.tolist()], strict=False)
            )
            if last > first
        }

    def _left(self, length: int, starts: Places, which: Places) -> list[tuple[int, int]]:
        """What is left of a document, which counts as one that had these stretches."""
        had = self._had[which]
        own = np.unique(which)
        self._had[own] = np.minimum(self._had[own] + 1, EVERYWHERE)
        few = _runs(starts[had < COPIES], self._least, apart=self._least)
        if sum(end - start for start, end in few) * ANOTHER_CUT >= length:
            return []
        common = _runs(starts[had < EVERYWHERE], self._least, apart=1)
        cuts = sorted([*few, *((at, end) for at, end in common if end - at >= self._long)])
        left, begin = [], 0
        for start, end in [*cuts, (length + self._edge, length)]:
            if start - self._edge - begin >= self._least:
                left.append((begin, start - self._edge))
            begin = max(begin, end + self._edge)
        return left


def _runs(starts: Places, length: int, apart: int) -> list[tuple[int, int]]:
    """Stretches of ``length`` that begin at ``starts``, as one where no more than this apart."""
    if not len(starts):
        return []
    parts = np.split(starts, np.flatnonzero(np.diff(starts) > apart) + 1)
    return [(int(part[0]), int(part[-1]) + length) for part in parts]


def _stretches(tokens: Tokens, length: int) -> Hashes:
    """The hash of the ``length`` tokens at each place: the sum of token · BASE^(those behind it).

    Two neighbours make one of twice the length, so it takes a few passes, whatever the length.
    """
    if len(tokens) < length:
        return np.empty(0, np.uint64)
    single = hashes = tokens.astype(np.uint64)
    have = 1
    for bit in f"{length:b}"[1:]:
        hashes = hashes[:-have] * np.uint64(pow(BASE, have, 2**64)) + hashes[have:]
        have *= 2
        if bit == "1":
            hashes = hashes[:-1] * np.uint64(BASE) + single[have:]
            have += 1
    return hashes
