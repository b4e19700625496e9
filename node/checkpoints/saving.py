"""Checkpoints of a running node: the outer state, the place in the chain, and the trainer's files.

Both halves go into one draft (:mod:`node.checkpoints.checkpoint`), so a checkpoint is one
consistent moment or it does not exist. While no round is applied the daemon freezes its part
(:mod:`node.checkpoints.freezing`) and asks the trainer for its own. The trainer copies that after
its present inner step, which may take minutes; rounds applied meanwhile reach it after the copy.
Both are written while training goes on.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bootstrap.manifest import Manifest
from bootstrap.signed_manifest import SignedManifest
from diloco.optimizers import named
from gossip.catchup.lineage import Lineage
from gossip.place import Place
from node.checkpoints.checkpoint import (
    CheckpointError,
    CheckpointStore,
    DiskFullError,
    FolderGoneError,
)
from node.checkpoints.copying import Copying
from node.checkpoints.earlier import moments_in, take_over
from node.checkpoints.freezing import FrozenOuter
from node.checkpoints.index import Facts, bytes_in
from node.checkpoints.outer_files import PREFIX, write_beside, write_outer
from node.checkpoints.patience import Patience
from node.checkpoints.restoring import standing_files
from node.checkpoints.trainer_files import Asked, Taken
from node.checkpoints.under_way import room_beside
from node.conductor import Conductor
from node.doctor.machine import STAGED_VECTORS
from node.monitor.event_log import EventLog
from node.monitor.events import CheckpointSaved, CheckpointSkipped, Notice
from node.monitor.machine import Machine
from node.monitor.wording import duration
from node.replicas.own_state import OwnReplica
from node.replicas.replica import OuterReplica
from node.templates import STOP_S, stop_s
from node.trainer.channel import ChannelClosedError
from protocols.errors import OperatorError
from protocols.tasks import Offload

MIN_PAUSE_S = 0.1
RARELY = 10.0  # times what the last checkpoint took: the least pause between those by time
UNWRITTEN = (DiskFullError, FolderGoneError, CheckpointError)


def _available() -> int | None:
    return Machine(Path())().memory_available


@dataclass(frozen=True)
class _Outer:
    """The outer state, with the certificate and the lineage of each fragment, encoded."""

    files: FrozenOuter
    place: Place  # of fragment 0
    standing: list[tuple[bytes, bytes] | None]


@dataclass
class Keeper:
    """Writes this node's checkpoints, one at a time."""

    store: CheckpointStore
    signed: SignedManifest
    replicas: Sequence[OuterReplica]  # by fragment
    conductor: Conductor | None
    events: EventLog
    still: Callable[[], AbstractAsyncContextManager[Any]]  # no round is applied meanwhile
    offload: Offload
    lineages: Callable[[], Sequence[Lineage]]
    copying: Copying | None = None  # to a second place for them
    leaving: Callable[[], bool] = lambda: False  # whether the last one is about to be made
    newest: Path | None = None  # of this island since it joined
    # the newest outer state that was evaluated (its digest, of fragment 0), and its loss. Such a
    # state is in a checkpoint, in each mode: what all share, or in pairs this island's own. Of a
    # model in fragments the others may have moved since: each of them by a round, as a rule
    validated: tuple[str, float] | None = None
    failed: Exception | None = None  # why there is none of the last try; None once there is one
    took: float = 0.0  # seconds, for the newest
    available: Callable[[], int | None] = _available  # bytes of memory; None: not known
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _full: bool = False
    _deserted: bool = False  # the trainer has not given its part of the last one
    _began: float = field(default_factory=time.monotonic)  # start of the newest, or of this keeper
    _told: set[str] = field(default_factory=set)  # what is said once

    def __post_init__(self) -> None:
        self._patience = Patience(
            lambda: self.conductor.pace.step_s if self.conductor is not None else 0.0
        )

    async def save(self, *, wait: bool = False, last: AsyncExitStack | None = None) -> bool:
        """Write a checkpoint of this moment; False (and an event) where it could not be done.

        No event where it failed as a script has gone, and the last checkpoint follows; nor without
        ``wait`` where the one before found the disk full as well.

        Does nothing while another one is being written; with ``wait`` this one follows it, and is
        copied to the second place on return, if that can be. Does nothing either while the trainer
        has yet to begin from a checkpoint, which holds more than one without the trainer would.
        After the ``last`` one no round is applied until that stack is unwound. With ``wait`` it is
        made without the trainer where that has ended, or does not answer.
        """
        if self.conductor is not None and self.conductor.beginning.checkpoint is not None:
            return False
        if self._lock.locked() and not wait:
            return False
        with self._patience.hurried() if wait else nullcontext():
            async with self._lock:
                saved = await self._save(last, follows=not wait)
                if not saved and wait and self._deserted:
                    saved = await self._save(last, alone=True)
        if wait and self.copying is not None:
            await self.copying.done()
        return saved

    def note_loss(self, round_: int, loss: float) -> None:
        """The trainer stands on the base of this round, and has evaluated it."""
        place = self.replicas[0].place
        if place.round == round_ and math.isfinite(loss):
            self.validated = place.state.hex(), loss

    def fits(self) -> bool:
        """Whether the disk has room for one like the newest, as far as that is known. Blocks."""
        size = 0
        if self.newest is not None:
            with suppress(OSError):
                size = bytes_in(self.newest)
        return room_beside(self.store.directory, size) >= 0

    async def moments(self) -> Taken | None:
        """Those of the newest checkpoint, for a trainer that is started again."""
        found: Taken | None = await self.offload(lambda: moments_in(self.newest))
        return found

    async def by_time(self, every: float) -> None:
        """Save where rounds are further apart than ``every`` seconds, while there is training.

        What was learnt in a long round is not to be lost. But a checkpoint takes disk and memory
        from all else, so of a large model they are rarer.
        """
        while True:
            pause = max(every, RARELY * self.took)
            if pause > every:
                self._say_once(
                    "pause",
                    f"a checkpoint takes {duration(self.took)} here, so in rounds that are long "
                    f"there are {duration(pause)} between two of them, and not {duration(every)}",
                )
            left = self._began + pause - time.monotonic()
            await asyncio.sleep(max(left, MIN_PAUSE_S))
            if left <= 0 and self.conductor is not None and self.conductor.training:
                await self.save()

    async def _save(
        self, last: AsyncExitStack | None, *, follows: bool = False, alone: bool = False
    ) -> bool:
        self._began = started = time.monotonic()
        self._deserted = False
        try:
            with self.store.draft() as draft:
                facts = await self._fill(draft, last, alone)
                saved = await self.offload(lambda: self.store.commit(draft, facts))
        except (*UNWRITTEN, ChannelClosedError, TimeoutError) as error:
            # said once, but of who leaves each time: there is no later one that has it all
            again = follows and self._full and isinstance(error, DiskFullError)
            gone = follows and isinstance(error, ChannelClosedError) and self.leaving()
            if not (again or gone):
                code = f" ({error.code})" if isinstance(error, OperatorError) else ""
                self.events.emit(
                    CheckpointSkipped(round=self.replicas[0].place.round, reason=f"{error}{code}")
                )
            self.failed, self._full = error, isinstance(error, DiskFullError)
            self._deserted = isinstance(error, ChannelClosedError | TimeoutError)
            return False
        self.failed, self._full, self.newest = None, False, saved.path
        self.took = time.monotonic() - started
        best = await self.offload(self.store.best)
        if self.copying is not None:
            await self.copying.soon(saved.path)
        self.events.emit(
            CheckpointSaved(
                round=facts.round,
                path=str(saved.path),
                bytes=sum(file.bytes for file in saved.facts.files.values()),
                seconds=self.took,
                best=best.name if best is not None else "",
            )
        )
        if stop_s(self.took) > STOP_S:
            self._say_once(
                "stop",
                f"a checkpoint takes {duration(self.took)} here: who stops this node is to give "
                f"it {stop_s(self.took)} s (systemd: TimeoutStopSec=, Docker: --stop-timeout, "
                "Kubernetes: terminationGracePeriodSeconds:), or the last one may be lost",
            )
        return True

    def _say_once(self, what: str, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self.events.emit(Notice(text=text))

    async def _fill(self, draft: Path, last: AsyncExitStack | None, alone: bool) -> Facts:
        """Write both parts. On return, also by an error, nobody writes into the draft any more."""
        asked: Asked | None = None
        outer: _Outer | None = None
        try:
            async with self._asking(draft, last, alone) as asked:
                outer = await self._outer(asked)
            # side by side: a round that waits for the one does not wait for the other as well
            both = self._copied(asked, outer), self._written(draft, outer)
            for failed in await asyncio.gather(*both, return_exceptions=True):
                if failed is not None:
                    raise failed
            facts = self._facts(outer.place)
            if asked is None and self.conductor is not None:
                at = tuple(replica.place.round for replica in self.replicas)
                await self.offload(lambda: take_over(self.newest, facts, at, draft))
        except Exception:  # whatever it was, and it is passed on: the draft is about to be removed
            if asked is not None and asked.copied.done() and not asked.copied.cancelled():
                with suppress(TimeoutError):  # else its files come back into a folder that is gone
                    await asked.all_written(draft, self._patience.seconds)
            elif asked is not None:
                asked.written.cancel()  # nobody waits for it any more
            raise
        finally:
            if outer is not None:
                self._thaw(outer)
        await self._trainer_done(draft, asked)
        return facts

    @asynccontextmanager
    async def _asking(
        self, draft: Path, last: AsyncExitStack | None, alone: bool
    ) -> AsyncIterator[Asked | None]:
        """Ask the trainer for its part; inside the block no round changes the outer state.

        With ``last``, none does until that is unwound. ``alone``: do not ask the trainer.
        """
        conductor = None if alone else self.conductor
        while True:
            if conductor is not None and conductor.training:
                async with self._patience.limited():
                    await conductor.take_back()
            async with AsyncExitStack() as stack:
                # a round that is applied waits for the trainer, too
                async with self._patience.limited():
                    await stack.enter_async_context(self.still())
                asked = None
                if conductor is not None and conductor.training:
                    asked = await conductor.save(draft)
                    if asked is None:
                        continue
                if last is not None:
                    last.push_async_exit(stack.pop_all())
                    self.still = nullcontext  # from now on no round is applied anyway
                yield asked
                return

    async def _outer(self, asked: Asked | None = None) -> _Outer:
        """Freeze the outer state and its place in the chain: later rounds do not change them.

        ``asked``: memory is left for the trainer's copy of this, until it is done.
        """
        replicas = self.replicas
        standing = [
            (certificate.encode(), lineage.encode()) if certificate is not None else None
            for certificate, lineage in zip(
                (replica.certificate for replica in replicas), self.lineages(), strict=True
            )
        ]
        own = [replica for replica in replicas if isinstance(replica, OwnReplica)]
        weights = tuple(replica.weight for replica in own)
        vectors = {"base": [replica.base for replica in replicas]}
        for name in replicas[0].vectors:
            vectors[PREFIX + name] = [replica.vectors[name] for replica in replicas]
        residuals = [r.residual.values for r in replicas if r.residual is not None]
        if residuals:
            vectors["residual"] = residuals
        staged = STAGED_VECTORS * sum(part.nbytes for part in vectors["base"])

        def room() -> int | None:
            left = self.available()
            to_come = asked is not None and not asked.copied.done()
            return left - staged if left is not None and to_come else left

        files = FrozenOuter(
            self.signed,
            vectors,
            replicas[0].offload,  # a round waits for what it has to copy
            room,
            weights,
            tuple(replica.place.round for replica in own),
        )
        for each in replicas:
            each.frozen = files
        return _Outer(files, replicas[0].place, standing)

    def _thaw(self, outer: _Outer) -> None:
        outer.files.close()
        for replica in self.replicas:
            replica.frozen = None

    async def _copied(self, asked: Asked | None, outer: _Outer) -> None:
        """Wait until the trainer has copied its part; if it does not, give the outer part up."""
        if asked is None:
            return
        try:
            async with self._patience.limited():
                await asked.copied
        except BaseException:  # cancelled as well: the write that nobody wants is to end
            outer.files.close()
            raise

    async def _written(self, draft: Path, outer: _Outer) -> None:
        try:
            await self.offload(lambda: self._write(draft, outer))
        finally:
            self._thaw(outer)

    def _write(self, draft: Path, outer: _Outer) -> None:
        write_outer(draft, outer.files)
        write_beside(draft, self.store.directory.parent)
        for fragment, encoded in enumerate(outer.standing):
            if encoded is not None:
                for path, data in zip(standing_files(draft, fragment), encoded, strict=True):
                    path.write_bytes(data)

    async def _trainer_done(self, draft: Path, asked: Asked | None) -> None:
        """Wait for the trainer's files; raises what kept it from writing them."""
        if asked is None:
            return
        await asked.all_written(draft, self._patience.seconds)
        saved = asked.written.result()
        if saved.full:
            raise DiskFullError(draft, saved.problem)
        if saved.problem:
            raise CheckpointError(draft, saved.problem, "see the log")

    def _facts(self, place: Place) -> Facts:
        pace = self.conductor.pace if self.conductor is not None else None
        state, loss = self.validated or ("", None)
        return Facts(
            run=self.signed.run_id.hex(),
            round=place.round,
            step=pace.step if pace else 0,
            tokens=pace.tokens if pace else 0,
            head=place.previous.hex(),
            state=place.state.hex(),
            peer=self.replicas[0].me,
            validation=loss if state == place.state.hex() else None,
        )


def floats_saved(manifest: Manifest) -> int:
    """fp32 numbers a parameter in a checkpoint: the outer state, θ and Adam's two moments.

    And the residual, where codecs are so coarse that what they lose is sent later.
    """
    rule = named(manifest.outer.optimizer)
    return 1 + len(rule.vectors) + 3 + (manifest.rounds.feeds_back or rule.factors)
