"""Fetching what the next steps read, so that training does not wait for a far-away file.

What an island reads follows from its place in the run (:mod:`node.trainer.sampler`), so a thread
computes the places to come and has their files fetched into the cache, in the order in which they
are read. Nothing else depends on it: a read that comes first fetches for itself, a failure here
is met again by the read, and where a run goes on from is the same with or without it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

from node.data.remote import FolderTokens
from node.trainer.numbers import following
from node.trainer.sampler import TOGETHER, Sampler
from protocols.errors import OperatorError

STEPS = 64  # inner steps looked ahead, in this round and in the next one


@dataclass(frozen=True)
class ReadPosition:
    """Where an island reads: see :meth:`Sampler.starts`."""

    round: int
    slot: int
    slots: int
    step: int


class Ahead:
    """One thread that has the files of the next steps here before they are read.

    Bounded: it looks :data:`STEPS` steps ahead, and no further than half of the cache holds, so
    that nothing is thrown out for it that is read sooner.
    """

    def __init__(self, tokens: FolderTokens, sampler: Sampler, steps: int = STEPS) -> None:
        self._tokens, self._sampler, self._steps = tokens, sampler, steps
        self._place: ReadPosition | None = None
        self._stretches: tuple[int, ...] | None = None  # None: what follows is the next round
        self._changed = threading.Condition()
        self._idle = False
        self._thread: threading.Thread | None = None

    def reading(self, place: ReadPosition) -> None:
        """The trainer reads here now; returns at once.

        The thread is woken once for as many steps as are computed together: it would take the
        processor from the trainer, and its windows from the sampler's cache.
        """
        place = replace(place, step=place.step // TOGETHER * TOGETHER)
        with self._changed:
            if place == self._place:
                return
            self._place, self._idle = place, False
            self._changed.notify_all()
        if self._thread is None:  # started by the process that reads: threads do not survive a fork
            self._thread = threading.Thread(target=self._run, name="data-ahead", daemon=True)
            self._thread.start()

    def expect(self, stretches: tuple[int, ...]) -> None:
        """These come next, where batches are numbered (:mod:`node.trainer.numbers`)."""
        with self._changed:
            self._stretches, self._idle = stretches, self._place is None
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait until all files for the last place have been tried; false if time ran out."""
        with self._changed:
            return self._changed.wait_for(lambda: self._idle, timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._idle)
                place, stretches = self._place, self._stretches
            assert place is not None
            for file in self._coming(place):
                if (self._place, self._stretches) != (place, stretches):
                    break
                try:
                    self._tokens.fetch(file)
                except OperatorError:
                    break  # the read that needs it tries again, and reports it
            with self._changed:
                if (self._place, self._stretches) == (place, stretches):
                    self._idle = True
                    self._changed.notify_all()

    def _coming(self, place: ReadPosition) -> Iterator[int]:
        """Files by number, each once, in the order in which they will be read."""
        seen: set[int] = set()
        room = self._tokens.cache_bytes // 2
        length, batch = self._sampler.seq_len + 1, self._sampler.batch_size
        for at, until in self._steps_from(place):
            rows = range(at.step * batch, until * batch)
            starts = self._sampler.compute(at.round, at.slot, at.slots, rows)
            for file in self._tokens.files(starts, length):
                if file in seen:
                    continue
                seen.add(file)
                room -= self._tokens.size_of(file)
                if room < 0:
                    return
                yield file

    def _steps_from(self, place: ReadPosition) -> Iterator[tuple[ReadPosition, int]]:
        """Steps to come, a few at once: where they begin, and the first step beyond.

        The trainer is in the first of them.
        """
        stretches, step = self._stretches, place.step
        if stretches is not None:  # numbered: steps of one round, some of them this island's
            for _ in range(0, self._steps + TOGETHER, TOGETHER):
                if (found := following(stretches, step)) is None:
                    return
                step = found + TOGETHER
                yield replace(place, step=found), step
            return
        next_round = replace(place, round=place.round + 1, step=0)
        for first, steps in ((place, self._steps + TOGETHER), (next_round, self._steps)):
            end = first.step + steps
            for step in range(first.step, end, TOGETHER):
                yield replace(first, step=step), min(step + TOGETHER, end)
