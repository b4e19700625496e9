"""The inner optimizer's moments of the whole model as one flat fp32 vector, and that as a file.

First ``exp_avg`` of all parameters in the layout's order, then ``exp_avg_sq`` of those that AdamW
trains. Which these are follows from the manifest, so a donor may share the model among its ranks in
another way than the newcomer. The file lies on the host of daemon and rank 0, little-endian and
without a header.
"""

from __future__ import annotations

import math
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from bootstrap.manifest import Inner, Manifest
from node.monitor.memory import available
from node.trainer.layout import Entry, Layout
from node.trainer.optim import by_muon
from node.trainer.optimizer_state import counted_beside, moment_of, new_moments
from node.trainer.weights import Weights

FIRST, SECOND = "exp_avg", "exp_avg_sq"
FLOAT_BYTES = 4
PIECE = 1 << 24  # bytes that are written at once: between two it can be given up
SPARE = 1.1  # of the memory for copies: others take some meanwhile
# what rounding adds to the bound of a first moment, and what second moments lose below 2^-126
SLACK, UNSEEN = 1.01, 1e-18


def moments_last(manifest: Manifest) -> bool:
    """Whether islands keep moments from round to round, of an optimizer that the manifest names."""
    kept = manifest.inner.keep_moments and manifest.mode != "allreduce"  # which uses none
    return kept and not manifest.script.layout


@dataclass(frozen=True)
class MomentRange:
    """Where one moment of a parameter lies: elements ``[start, start + entry.size)``."""

    moment: str
    entry: Entry
    start: int
    second: MomentRange | None = None  # of a first moment that has one beside it

    def view(self, vector: Tensor) -> Tensor:
        """Its part [shape] of the vector of all moments."""
        return vector[self.start : self.start + self.entry.size].view(self.entry.shape)


@dataclass(frozen=True)
class MomentLayout:
    """All of them, in order; ``size`` elements together."""

    ranges: tuple[MomentRange, ...]
    size: int

    @classmethod
    def of(cls, layout: Layout, inner: Inner) -> MomentLayout:
        """Of a run's model and inner optimizer."""
        seconds: dict[str, MomentRange] = {}
        at = layout.size
        for entry in layout.entries:
            if not by_muon(inner, entry.name, entry.shape):
                seconds[entry.name] = MomentRange(SECOND, entry, at)
                at += entry.size
        firsts = [MomentRange(FIRST, e, e.offset, seconds.get(e.name)) for e in layout.entries]
        return cls((*firsts, *seconds.values()), at)


def mapped(path: Path, size: int, *, create: bool = False) -> Tensor:
    """A file as a vector, fp32 [size]; without ``create`` what is written to it stays in memory.

    Raises OSError where it cannot be had, also where the disk is full.
    """
    if create:
        with path.open("wb") as file:
            if hasattr(os, "posix_fallocate"):  # else a full disk would be a bus error, later
                os.posix_fallocate(file.fileno(), 0, FLOAT_BYTES * size)
            else:
                file.truncate(FLOAT_BYTES * size)
    if path.stat().st_size != FLOAT_BYTES * size:
        raise OSError(f"{path} is not of {size} moments")
    return torch.from_numpy(np.memmap(path, np.float32, "r+" if create else "c", shape=(size,)))


class Donation:
    """Moments on their way into a file, in order, while training goes on; on rank 0.

    ``room``: bytes that copies may take; where there is no room :meth:`add` waits for the disk.
    """

    def __init__(self, path: Path, steps: int, room: float) -> None:
        """``steps``: that the moments have seen. Who waits for ``path`` has made that file."""
        self.path, self.steps, self._room = path, steps, room
        self.given_up = False  # whether nobody waits for it any more
        self._problem = ""
        self._held = 0  # bytes of copies
        self._pending: deque[tuple[Future[None], int]] = deque()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="moments")
        self._file: BinaryIO | None = None
        try:
            self._file = path.open("r+b", buffering=0)
        except FileNotFoundError:
            self.given_up = True
        except OSError as error:
            self._problem = _said(error)

    def add(self, whole: Tensor) -> None:
        """Copy what comes next; what happens to ``whole`` from then on does not matter."""
        size = FLOAT_BYTES * whole.numel()
        while self._pending and (self._pending[0][0].done() or self._held + size > self._room):
            written, freed = self._pending.popleft()
            written.result()
            self._held -= freed
        if self._problem or self.given_up:
            return
        copy = whole.to("cpu", torch.float32, copy=True).contiguous().view(-1)
        self._held += size
        self._pending.append((self._pool.submit(self._append, copy), size))

    def _append(self, copy: Tensor) -> None:
        if self._problem or self._file is None:
            return
        left = copy.numpy().data.cast("B")
        try:
            while left and not self.given_up:
                left = left[self._file.write(left[:PIECE]) :]
                if not os.fstat(self._file.fileno()).st_nlink:  # removed by who waited for it
                    self.given_up = True
        except OSError as error:
            self._problem = _said(error)

    @property
    def done(self) -> bool:
        """Whether all that was added is written, or cannot be."""
        return not self._pending or self._pending[-1][0].done()

    def finish(self) -> str:
        """Wait until it is; what went wrong, empty on success."""
        self._pool.shutdown()
        if self._file is not None:
            with suppress(OSError):  # nothing is buffered
                self._file.close()
        return self._problem

    def give_up(self) -> None:
        """Write no more of it."""
        self.given_up = True
        self.finish()


@torch.no_grad()
def donate(
    path: Path, steps: int, layout: MomentLayout, weights: Weights, optimizer: torch.optim.Optimizer
) -> Donation | None:
    """Gather copies of the moments on rank 0, zeros where there are none yet; None on other ranks.

    Every rank must call it. They are written while training goes on, as far as there is memory
    for the copies and for those of a checkpoint that may be asked for meanwhile.
    """
    donation = None
    if weights.ranks.leads:
        left = available()
        reserved = FLOAT_BYTES * (weights.layout.size + layout.size)
        donation = Donation(path, steps, math.inf if left is None else left / SPARE - reserved)
    states = optimizer.state
    for part in layout.ranges:

        def pick(parameter: Tensor, moment: str = part.moment) -> Tensor:
            kept: dict[str, Tensor] = states.get(parameter, {})
            return kept[moment] if moment in kept else torch.zeros_like(parameter)

        whole = weights.gather(part.entry.name, pick)  # after a failure, too: it is collective
        if donation is not None:
            assert whole is not None
            donation.add(whole)
    return donation


def _said(error: OSError) -> str:
    return str(error) or type(error).__name__


@torch.no_grad()
def read(
    path: Path, steps: int, layout: MomentLayout, weights: Weights, optimizer: torch.optim.Optimizer
) -> None:
    """Put a file's moments, which have seen ``steps`` steps, into the optimizer of all ranks.

    Every rank must call it. Raises OSError on rank 0 where the file is not there.
    """
    vector = mapped(path, layout.size) if weights.ranks.leads else None
    kept: dict[str, dict[str, torch.dtype | None]] = {}
    for part in layout.ranges:
        kept.setdefault(part.entry.name, {})[part.moment] = None
    counted, states = counted_beside(optimizer), optimizer.state
    for name, moments in kept.items():
        for parameter in weights.parts.get(name, ()):
            beside = parameter in counted
            states[parameter] = new_moments(parameter, moments, steps, beside=beside)
    for part in layout.ranges:
        whole = None if vector is None else part.view(vector)
        weights.set(part.entry.name, whole, moment_of(states, part.moment))


def faults(vector: Tensor, layout: MomentLayout, inner: Inner) -> str:
    """Why moments [size] from elsewhere are of no use; empty where nothing speaks against them.

    They must be finite, second moments not negative, and where β₁² < β₂ first moments no larger
    than any gradients could have made them beside their second ones: with Cauchy and Schwarz,
    |m| ≤ (1 - β₁) / √((1 - β₂)(1 - β₁²/β₂)) · √v. So no element's first step can be beyond bounds.
    """
    beta1, beta2 = inner.betas
    limit = math.inf
    if beta1**2 < beta2:
        limit = SLACK * (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))
    for part in reversed(layout.ranges):  # second moments first: the others are held against them
        name, view = part.entry.name, part.view(vector)
        if not bool(torch.isfinite(view).all()):
            return f"{part.moment} of {name} is not finite"
        if part.moment == SECOND and bool((view < 0).any()):
            return f"{part.moment} of {name} is negative"
        if part.second is not None and math.isfinite(limit):
            bound = part.second.view(vector).sqrt().mul_(limit).add_(UNSEEN)
            if bool((view.abs() > bound).any()):
                return f"{part.moment} of {name} is larger than its second moments allow"
    return ""
