"""The record on disk of the rounds in which a member has promised anything, for a restart.

A restarted member does not know what it had promised, voted for, or signed as the owner of a part.
So it keeps on disk *the last round in which it has promised anything*, and a mark of the
certificate that each of the latest :data:`KEPT` such rounds built on. Plans are adopted, and votes
cast, only by who has promised the ballot (:mod:`gossip.rounds.agreement`), so nothing that binds it
leaves it without a promise; and nothing leaves it, no message and no answer, before the round is
safely on the disk. Therefore:

- in a round that may be one of those on record it takes no part in deciding after a restart, since
  it may have voted, whether it began at that round or has come there by what others decided;
- in a later round, or one of the same number that builds on another certificate, it is bound by
  nothing, and takes part as if it had never been away. So a swarm that has started again from older
  checkpoints is held up in the first round alone; from checkpoints so old that there are no marks
  of the rounds after them, in each of these.

So no member votes for two outcomes of one round, whenever it is killed: before the round is on disk
nothing has left; afterwards it keeps out of it. A record that is missing, torn, or of another
member or run counts for nothing, and the member abstains as :mod:`gossip.chain.forgetting` says. A
disk that was restored to an earlier state must be treated as lost: remove the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from gossip.wiring import Wiring
from protocols.errors import RemoteProtocolError, RemoteRefused
from protocols.files import sync
from protocols.identity import PeerId

At = tuple[int, bytes]  # a round, and the hash of the certificate that it builds on

SECTOR = 512  # of a disk: what is no longer is written whole, or not at all
_HEAD = struct.Struct(">32s32sq")  # run, hash of the member's name, round
_CHECK = 16
KEPT = (SECTOR - _HEAD.size - _CHECK) // 2  # rounds up to the last one with a mark of what it was
_MARKS = struct.Struct(f">{KEPT}H")  # the last round's first
_NONE, _ANY = 0, 0xFFFF  # nothing was promised in a round; in this one, whatever it builds on
NOTHING = -1  # before the first round
AGAIN_S = 3.0  # until a disk that has refused is tried again
MOST_HELD = 1000  # messages held back: in a round that nobody decides there are ever more


@dataclass(frozen=True)
class Promised:
    """In which rounds a member has promised anything, as far as it is known."""

    last: int
    marks: tuple[int, ...] = (_ANY,) * KEPT  # of the last round, the one before, …

    def binds(self, round_: int, previous: bytes) -> bool:
        """Whether something may have been promised in the round that builds on this certificate."""
        back = self.last - round_
        if back < 0:
            return False
        return back >= KEPT or self.marks[back] in (_mark(previous), _ANY)

    def and_in(self, round_: int, previous: bytes) -> Promised:
        """The same, and something is promised in this round as well."""
        ahead = round_ - self.last
        if ahead > 0:
            between = (_NONE,) * min(ahead - 1, KEPT)
            return Promised(round_, (_mark(previous), *between, *self.marks)[:KEPT])
        if self.binds(round_, previous):
            return self
        marks = list(self.marks)
        marks[-ahead] = _mark(previous) if marks[-ahead] == _NONE else _ANY
        return Promised(self.last, tuple(marks))


def _mark(previous: bytes) -> int:
    """Of a certificate: another mark shows that it is another one."""
    return 1 + int.from_bytes(previous[:2], "big") % (_ANY - 1)


class PromiseRecord:
    """The record on disk, of one member in one fragment of a run."""

    def __init__(self, path: Path, run: bytes, me: PeerId) -> None:
        self._path, self._run, self._who = path, run, blake3(me.encode()).digest()
        self.promised = self._read()  # None: not known

    def write(self, at: At | None) -> None:
        """Have it on the disk when this returns; None: that nothing was promised yet. Blocks.

        Raises OSError.
        """
        round_, known = NOTHING if at is None else at[0] - 1, self.promised
        promised = known or Promised(round_)
        if at is not None:
            promised = promised.and_in(*at)
        data = _HEAD.pack(self._run, self._who, promised.last) + _MARKS.pack(*promised.marks)
        data += blake3(data).digest(_CHECK)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(descriptor, data, 0)  # of one sector, always the same: never half a new one
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if known is None:  # or its name may not be on the disk: the first time failed halfway
            sync(self._path.parent)
        self.promised = promised

    def _read(self) -> Promised | None:
        try:
            data = self._path.read_bytes()
        except OSError:
            return None
        body, check = data[:-_CHECK], data[-_CHECK:]
        if len(data) != SECTOR or blake3(body).digest(_CHECK) != check:
            return None
        run, who, last = _HEAD.unpack_from(body)
        if (run, who) != (self._run, self._who):
            return None
        return Promised(last, _MARKS.unpack_from(body, _HEAD.size))


class Promises:
    """Holds back what a member says until what it has promised is on disk."""

    def __init__(
        self,
        record: PromiseRecord | None,
        wiring: Wiring,
        failed: Callable[[RemoteProtocolError], None],
        over: Callable[[int], bool] = lambda round_: False,
    ) -> None:
        """Without a record nothing is held back; ``failed`` is told where it cannot be written.

        ``over``: whether a round is, so that nothing needs to be said in it any more.
        """
        self.record, self._wiring, self._failed, self._over = record, wiring, failed, over
        self._held: deque[tuple[At | None, Callable[[], None]]] = deque()
        self._writing = asyncio.Lock()

    def once_on_disk(self, at: At | None, say: Callable[[], None]) -> None:
        """Call ``say``, in the order of these calls, once the promise of a round is on disk.

        None: nothing was promised. A write that fails is tried again while the round lasts: a lone
        member has nobody else who would go on with the round.
        """
        if not self._held and (at is None or not self.unwritten(at)):
            say()
            return
        if len(self._held) >= MOST_HELD:
            return  # as if it were lost on the way
        self._held.append((at, say))
        if len(self._held) == 1:
            self._wiring.spawn(self._say())

    async def begin(self) -> None:
        """Nothing was promised under this identity."""
        with contextlib.suppress(OSError):  # without it, it abstains should it start again
            await self._kept(None)

    async def before_answer(self, at: At) -> None:
        """Return when an answer that contains a promise may leave. Raises RemoteRefused."""
        try:
            await self._kept(at)
        except OSError as error:
            raise RemoteRefused("unable", f"no promise can be kept here: {error}") from error

    async def _kept(self, at: At | None) -> None:
        """Return when it is on disk that a round's promise was made. Raises OSError."""
        async with self._writing:
            if (record := self.record) is not None and self.unwritten(at):
                await self._wiring.offload(lambda: record.write(at))

    def unwritten(self, at: At | None) -> bool:
        """Whether it is not on disk yet that a round's promise was made."""
        if self.record is None:
            return False
        promised = self.record.promised
        return promised is None or (at is not None and not promised.binds(*at))

    async def _say(self) -> None:
        told = False
        while self._held:
            at, say = self._held[0]
            try:
                if at is not None:  # a record of nothing would not be true where one was lost
                    await self._kept(at)
            except OSError as error:
                if not told:
                    why = f"what this member promises cannot be kept on disk: {error}"
                    self._failed(RemoteProtocolError(why))
                told = True
                if at is None or not self._over(at[0]):
                    await asyncio.sleep(AGAIN_S)
                    continue
            else:
                say()
                told = False
            self._held.popleft()
