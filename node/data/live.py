"""Training from a data set that is streamed: who reads which of its texts.

A stream cannot be permuted as a whole, so here a round has a stretch of it. Round r's stretch
begins where that of round r - 1 ends. Its texts are dealt in order into ``data.islands`` parts,
each to the part that has the fewest bytes so far, until every part has enough for the inner steps
that a round is to take; the texts that are held out for evaluation are passed over. The island in
slot s of S has part s. It makes tokens of that part alone, in a file, and reads the file's windows
in the order that a sampler of its own gives them (:mod:`node.trainer.sampler`). So

- no text is read by two islands in one pass over the data set, nor in two rounds,
- who read what follows from the stream's order, the round and the slot: anybody can read up to
  there and deal again; nothing is kept but the parts of two rounds, and the next one, made ahead,
- a resumed island finds its place by a mark: examples so far, and the library's own state.

Where batches are numbered through the run (:mod:`node.trainer.numbers`) a stretch is one part, of a
quarter of a round's inner steps, and batch n of that many steps lies in part n // steps. An island
makes those parts alone of which it reads batches, and passes over the others.

Only bytes are counted to tell where a stretch ends, so the parts of others cost reading, not
tokenizing. Islands beyond ``data.islands`` share parts, taking turns at its windows. An island
that trains for longer in a round than planned reads its part again, in another order.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import numpy.typing as npt
from torch import Tensor

from bootstrap.manifest import Manifest
from node.data.stream_parts import Parts
from node.data.stream_recipe import Recipe
from node.trainer.data import gather, targets, token_type
from node.trainer.numbers import following
from node.trainer.sampler import Sampler
from protocols.errors import OperatorError


class StreamData:
    """Batches from a stream; reads as :class:`node.trainer.data.TrainingData` does.

    While one round is trained on, a thread makes this island's part of the next one.
    """

    def __init__(self, recipe: Recipe, manifest: Manifest, cache: Path) -> None:
        """Raises OperatorError E604, E605, and OSError."""
        self._data, self._count = manifest.data, recipe.parts
        apart, end = manifest.model.attention == "document", manifest.model.document_end
        self._document_end = end if apart else None
        self.parts = Parts(recipe, token_type(manifest.model.vocab_size), cache, end)
        self._steps = recipe.part_steps  # of a part of numbered batches
        self._open: tuple[tuple[int, int], npt.NDArray[Any], Sampler] | None = None
        self._stretches: tuple[int, ...] = ()
        self._following: int | None = None  # the part that is made ahead

    @property
    def numbered(self) -> bool:
        """False as well for a stream that was begun by a version that dealt it out by rounds."""
        return self._steps is not None

    @property
    def headway(self) -> int:
        """See :class:`node.trainer.data.Batches`."""
        return self.parts.headway

    def expect(self, stretches: tuple[int, ...]) -> None:
        """Note the batches that come next, and have the part after the open one made."""
        self._stretches = stretches
        self._look_ahead()

    def batch(
        self, round: int, slot: int, slots: int, step: int, rows: range | None = None
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [rows, seq_len] each; see :meth:`TrainingData.batch`."""
        if not 0 <= slot < slots:
            raise ValueError(f"no such place: slot {slot} of {slots}")
        if self._steps is not None:
            round, step = divmod(step, self._steps)
        part, turn = slot % self._count, slot // self._count
        sharing = len(range(part, slots, self._count))
        tokens, sampler = self._part(round, part)
        starts = sampler.starts(round, turn, sharing, step, rows)
        window = gather(tokens, starts, sampler.seq_len + 1)
        return window[:, :-1], targets(window, self._document_end)

    def _part(self, round: int, part: int) -> tuple[npt.NDArray[Any], Sampler]:
        if self._open is None or self._open[0] != (round, part):
            tokens = self.parts.get(round, part)
            data = self._data
            sampler = Sampler(len(tokens), data.seq_len, data.batch_size, data.seed)
            self._open = (round, part), tokens, sampler
            self._look_ahead()
        return self._open[1], self._open[2]

    def _look_ahead(self) -> None:
        """Make the part that follows the open one in a thread, once it is known which that is."""
        if self._open is None:
            return
        round, part = self._open[0]
        next_round: int | None = round + 1
        if self._steps is not None:
            number = following(self._stretches, (round + 1) * self._steps)
            next_round = None if number is None else number // self._steps
        if next_round is not None and next_round != self._following:
            self._following = next_round
            threading.Thread(
                target=self._ahead, args=(next_round, part), name="stream-ahead", daemon=True
            ).start()

    def _ahead(self, round: int, part: int) -> None:
        # the read that needs the part tries again, and says what is wrong
        with contextlib.suppress(OperatorError):
            self.parts.get(round, part)
