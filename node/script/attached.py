"""The daemon's side of a script that trains by itself: an island whose ranks it did not start."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bootstrap.manifest import Manifest
from node.errors import operator_error
from node.interrupts import SCRIPT_GONE
from node.island.island import STOP_GRACE_S, Island
from node.island.rank_ends import TrainerDied
from node.script.fingerprint import NOT_COMPARED, Fingerprint
from node.trainer.channel import ChannelClosedError, Leaving, Report, Stop, Stopped, Terms
from node.trainer.framing import frame
from node.trainer.settings import TrainerSettings
from node.trainer.shared import SharedVectors
from protocols.errors import Malformed, OperatorError


@dataclass(frozen=True)
class Script:
    """What a daemon inherits from the script that started it."""

    channel: socket.socket
    vectors: SharedVectors
    layout: str  # digest, hex, of the flat layout of the script's model
    frozen: Fingerprint = NOT_COMPARED

    async def beat(self) -> None:
        """Show the script that this node lives, as long as its event loop does."""
        await self.vectors.keep_beating()


class Attached(Island):
    """The script that started this daemon. ``on_gone`` is called once when it leaves or dies."""

    def __init__(
        self,
        script: Script,
        manifest: Manifest,
        directory: Path,
        wait_s: float,
        on_gone: Callable[[str], None],
    ) -> None:
        settings = TrainerSettings(manifest=manifest, tokens=Path(), wait_s=wait_s)
        super().__init__(settings, script.vectors, directory)
        self.script, self.on_gone = script, on_gone

    async def start(self) -> None:
        """Begin to listen; the script's word that it is ready may be waiting already."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self.script.channel)
        self._supervisor = self._background.spawn(self._heard(self._follow(reader)))
        overlap = self.settings.manifest.rounds.overlap_steps
        await self.send(Terms(overlap, self.settings.wait_s))

    async def stop(self) -> None:
        """Tell the script that it is over, and wait until it has heard."""
        self._stopping = True
        if self._supervisor is None:
            return
        if self.alive:
            with suppress(ChannelClosedError, TimeoutError):  # it went by itself, or hears nothing
                async with asyncio.timeout(STOP_GRACE_S):
                    await self.send(Stop())
                    await asyncio.wait((self._supervisor,))
        self._supervisor.cancel()
        await asyncio.wait((self._supervisor,))
        self._supervisor = None

    async def _follow(self, reader: asyncio.StreamReader) -> None:
        """Read what the script reports until it is gone."""
        try:
            await self._read(reader)
            if self._failed is not None:
                raise Malformed(self._failed.text)
        except Exception as error:  # it is passed on
            from node.script.session import ended  # there already, and slow to load for ranks

            if self._writer is not None:  # what it trains from now on nobody would merge
                self._writer.write(frame(ended(self._told(error))))
            raise
        finally:
            self.vectors.clear()
            if self._writer is not None:
                self._writer.close()
        if not self._stopping:
            self._events.put_nowait(Stopped())
            self.on_gone(SCRIPT_GONE)

    def _defect(self, error: Exception) -> TrainerDied:
        """As of ranks, but it ends this node: a script is not started again."""
        told = self._told(error)
        return TrainerDied(0, None, "", told.code, told.what, self._log, "", told)

    def _told(self, error: Exception) -> OperatorError:
        why = f"{type(error).__name__}: {error}; the traceback is in {self._log}"
        return operator_error("E999", why=why)

    def _take(self, report: Report) -> None:
        if isinstance(report, Leaving):
            self.on_gone("the training script has ended")
        else:
            super()._take(report)
