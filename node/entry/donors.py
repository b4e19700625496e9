"""A newcomer's inner moments from another island: asked for, checked, and handed to the trainer.

Also the other side: having the own trainer's moments copied for newcomers. Neither is of any
consequence to rounds; who gets none warms its learning rate up (:mod:`node.trainer.optim`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bootstrap.manifest import Manifest
from bootstrap.state import DownloadProgress, Moments, download_moments, offered_moments
from node.checkpoints.trainer_files import Taken
from node.conductor import Conductor
from node.trainer.channel import ChannelClosedError
from node.trainer.layout import Layout
from node.trainer.moments import FLOAT_BYTES, MomentLayout, faults, mapped, moments_last
from protocols.errors import (
    Malformed,
    OperatorError,
    RemoteProtocolError,
    RemoteRefused,
    TransportError,
    Unreachable,
    Why,
)
from protocols.identity import PeerId
from protocols.tasks import Offload
from protocols.transport import Transport

GIVEN, TAKEN = "moments.given", "moments.taken"  # files in the state directory, while in use
COPY_S, STEPS = 120.0, 4.0  # for the trainer's copy: and this many of its inner steps
LONGEST_STEP_S = 300.0  # the most that a donor's step counts for, whatever it says
SLOW_DISK = 50e6  # bytes a second, the least at which the copy should be written
SLOW_LINK = 4e6  # bytes a second that are reckoned with where the link is not known
MAX_DONORS = 3  # that are asked
# a download may take TIMES what the state took, which is about as large, plus LEAST_S; and as long
# again with each of PARTS that has come: the state came from many peers, moments come from one.
# Each donor has its share of that to answer in, so that a silent one does not use up all
TIMES, LEAST_S, PARTS = 3.0, 60.0, 8

FAILURES = (TransportError, RemoteProtocolError, OSError, TimeoutError)


def clean(directory: Path) -> None:
    """Remove what a killed node has left."""
    for name in (GIVEN, TAKEN):
        (directory / name).unlink(missing_ok=True)


@dataclass
class Giving:
    """Copies of this island's moments; ``copy`` is for :class:`bootstrap.state.MomentsServer`."""

    conductor: Conductor
    moment_layout: MomentLayout
    directory: Path
    offload: Offload

    async def copy(self) -> Moments:
        """The trainer's moments, in a file without a name; raises :class:`RemoteRefused`."""
        path, size = self.directory / GIVEN, FLOAT_BYTES * self.moment_layout.size
        limit_s = COPY_S + STEPS * self.conductor.pace.step_s + size / SLOW_DISK
        if not self.conductor.training:
            raise RemoteRefused("none", "no trainer is at work here")
        try:
            path.touch(0o600)
            async with asyncio.timeout(limit_s):
                donated = await self.conductor.files.donate(path)
            if not donated.steps or donated.problem:
                why = "its disk" if donated.problem else "its moments are cold themselves"
                raise RemoteRefused("none", why)
            vector = await self.offload(lambda: mapped(path, self.moment_layout.size))
        except (ChannelClosedError, TimeoutError, OSError) as error:
            raise RemoteRefused("none", "its trainer gave none") from error
        finally:
            # what is mapped stays until it is dropped, and a trainer that still writes stops
            path.unlink(missing_ok=True)
        return Moments(donated.steps, vector)


@dataclass
class Taking:
    """Fetches a donor's moments into a file for the trainer."""

    transport: Transport
    manifest: Manifest
    directory: Path
    offload: Offload
    greet: Callable[[PeerId], Awaitable[None]]  # strangers are given nothing
    progress: DownloadProgress = lambda done, total, sources: None

    async def take(
        self, donors: Sequence[PeerId], state_s: float | None, *, step_s: float = 0.0
    ) -> tuple[Taken, str]:
        """Moments of the first donor, in random order, whose can be used; and a text about them.

        ``state_s``: what the state's download took (None: not known), ``step_s``: what an inner
        step takes a donor, in seconds. Raises one of ``FAILURES``: what became of the last donor
        that was asked.
        """
        if not moments_last(self.manifest):
            raise RemoteRefused("none", "this run's islands have none that another could use")
        layout = await self.offload(lambda: Layout.of_manifest(self.manifest))
        moment_layout = MomentLayout.of(layout, self.manifest.inner)
        path = self.directory / TAKEN
        failure: Exception = Unreachable("any donor", Why.NO_ADDRESS, "no island is active")
        began, steps_s = time.monotonic(), STEPS * min(step_s, LONGEST_STEP_S)
        if state_s is None:
            state_s = FLOAT_BYTES * moment_layout.size / SLOW_LINK
        limit_s = LEAST_S + TIMES * state_s + MAX_DONORS * steps_s
        answer_s = limit_s / MAX_DONORS
        try:
            async with asyncio.timeout(limit_s) as limit:
                told = _Extending(limit, limit_s, self.progress)
                for peer in random.sample(list(donors), min(len(donors), MAX_DONORS)):
                    try:
                        steps = await self._take(peer, moment_layout, path, answer_s, told)
                    except (TransportError, RemoteProtocolError) as error:
                        failure = error
                        continue
                    took, size = time.monotonic() - began, FLOAT_BYTES * moment_layout.size
                    said = f"of {steps:,} steps, {size / 1e6:.1f} MB from {peer} in {took:.1f} s"
                    return Taken(path, steps), said
                raise failure
        except BaseException:  # also cancellation: leave no half-written file behind
            path.unlink(missing_ok=True)
            raise

    async def _take(
        self,
        peer: PeerId,
        moment_layout: MomentLayout,
        path: Path,
        answer_s: float,
        progress: DownloadProgress,
    ) -> int:
        """Fill the file; the steps that the moments have seen."""
        with contextlib.suppress(TransportError, OperatorError):  # the request below then says why
            await self.greet(peer)
        run, inner = self.manifest.run_id, self.manifest.inner
        size = FLOAT_BYTES * moment_layout.size
        offer = await offered_moments(self.transport, peer, run, size, timeout=answer_s)
        vector = await self.offload(lambda: mapped(path, moment_layout.size, create=True))
        await download_moments(
            self.transport, peer, run, offer, [vector], offload=self.offload, progress=progress
        )
        if wrong := await self.offload(lambda: faults(vector, moment_layout, inner)):
            raise Malformed(f"{peer} offers moments of which {wrong}")
        return offer.steps


@dataclass
class _Extending:
    """Puts the end of a time limit off by ``seconds`` with every part that has come."""

    limit: asyncio.Timeout
    seconds: float
    progress: DownloadProgress
    _parts: int = 0  # that have come, of the donor that has given the most

    def __call__(self, done: int, total: int, sources: int) -> None:
        self.progress(done, total, sources)
        parts = PARTS * done // total
        if parts > self._parts and not self.limit.expired():
            self._parts = parts
            self.limit.reschedule(asyncio.get_running_loop().time() + self.seconds)
