"""The record on disk of the last round in which a member has promised anything, for a restart.

A restarted member does not know what it had promised, voted for, or signed as the owner of a part.
So it keeps one number for each fragment: *the last round in which it has promised anything*. Plans
are adopted, and votes cast, only by who has promised the ballot (:mod:`gossip.agreement`), so
nothing that binds it leaves it without a promise; and nothing leaves it, no message and no answer,
while that number is smaller than the round and not safely on the disk. Therefore:

- in a round up to the number it takes no part in deciding after a restart, since it may have voted;
- in every later round it is bound by nothing, and takes part as if it had never been away.

So no member votes for two outcomes of one round, whenever it is killed: before the number is on
disk nothing has left; afterwards it keeps out of that round. A record that is missing, torn, or
of another member or run counts for nothing, and the member abstains as :mod:`gossip.forgetting`
says. A disk that was restored to an earlier state must be treated as lost: remove the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
from collections import deque
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from gossip.wiring import Wiring
from protocols.errors import RemoteProtocolError, RemoteRefused
from protocols.identity import PeerId

_FORM = struct.Struct(">32s32sq")  # run, hash of the member's name, round
_CHECK = 16
NOTHING = -1  # before the first round
AGAIN_S = 3.0  # until a disk that has refused is tried again
MOST_HELD = 1000  # of what is to be said: in a round that nobody decides more comes all the time


class Record:
    """The number on disk, of one member in one fragment of a run."""

    def __init__(self, path: Path, run: bytes, me: PeerId) -> None:
        self._path, self._run, self._who = path, run, blake3(me.encode()).digest()
        self.last = self._read()  # None: not known

    def write(self, round_: int) -> None:
        """Have it on the disk when this returns. Blocks; raises OSError."""
        data = _FORM.pack(self._run, self._who, round_)
        data += blake3(data).digest(_CHECK)
        new = self.last is None  # or its name may not be on the disk: the first time failed halfway
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(descriptor, data, 0)  # of one sector, always the same: never half a new one
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if new:
            directory = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        self.last = round_

    def _read(self) -> int | None:
        try:
            data = self._path.read_bytes()
        except OSError:
            return None
        body, check = data[: _FORM.size], data[_FORM.size :]
        if len(body) != _FORM.size or blake3(body).digest(_CHECK) != check:
            return None
        run, who, round_ = _FORM.unpack(body)
        return int(round_) if (run, who) == (self._run, self._who) else None


class Promises:
    """Holds back what a member says until what it has promised is on disk."""

    def __init__(
        self,
        record: Record | None,
        wiring: Wiring,
        failed: Callable[[RemoteProtocolError], None],
        over: Callable[[int], bool] = lambda round_: False,
    ) -> None:
        """Without a record nothing is held back; ``failed`` is told where it cannot be written.

        ``over``: whether a round is, so that nothing needs to be said in it any more.
        """
        self.record, self._wiring, self._failed, self._over = record, wiring, failed, over
        self._held: deque[tuple[int, Callable[[], None]]] = deque()
        self._writing = asyncio.Lock()

    def then(self, round_: int | None, say: Callable[[], None]) -> None:
        """Say something, in this order: once it is on disk that a round's promise was made.

        None: nothing was promised. Where it cannot be written that is tried again while the round
        lasts: who is alone has nobody else who would go on with it.
        """
        if not self._held and (round_ is None or not self.needed(round_)):
            say()
            return
        if len(self._held) >= MOST_HELD:
            return  # as if it were lost on the way
        self._held.append((NOTHING if round_ is None else round_, say))
        if len(self._held) == 1:
            self._wiring.spawn(self._say())

    async def begin(self) -> None:
        """Nothing was promised under this identity."""
        with contextlib.suppress(OSError):  # without it, it abstains should it start again
            await self._kept(NOTHING)

    async def before_answer(self, round_: int) -> None:
        """Return when an answer may leave that promises something. Raises RemoteRefused."""
        try:
            await self._kept(round_)
        except OSError as error:
            raise RemoteRefused("unable", f"no promise can be kept here: {error}") from error

    async def _kept(self, round_: int) -> None:
        """Return when it is on disk that a round's promise was made. Raises OSError."""
        async with self._writing:
            if (record := self.record) is not None and self.needed(round_):
                await self._wiring.offload(lambda: record.write(round_))

    def needed(self, round_: int) -> bool:
        """Whether it is not on disk yet that a round's promise was made."""
        if self.record is None:
            return False
        return self.record.last is None or self.record.last < round_

    async def _say(self) -> None:
        told = False
        while self._held:
            round_, say = self._held[0]
            try:
                if round_ != NOTHING:  # which may not be true of a life before, if that is lost
                    await self._kept(round_)
            except OSError as error:
                if not told:
                    why = f"what this member promises cannot be kept on disk: {error}"
                    self._failed(RemoteProtocolError(why))
                told = True
                if not self._over(round_):
                    await asyncio.sleep(AGAIN_S)
                    continue
            else:
                say()
                told = False
            self._held.popleft()
