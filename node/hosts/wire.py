"""What the hosts of one island say to each other beside training, by authenticated TCP.

Host 0 listens at the rendezvous endpoint, the others connect to it::

    host 0                               another host
    Challenge(nonce)              ->
                                  <-     Hello(who, nonce, proof)
    Welcome(proof) or Farewell    ->
    Job(manifest, shard, …)       ->     makes its training tokens
                                  <-     Prepared, or Farewell with what is missing
    Launch(life, settings, store) ->     starts its ranks
                                  <-     RankEnded, for each of them
    Halt(life)                    ->     kills them; RankEnded follows all the same
                                  <-     Leaving, when it is told to stop and has ranks
    Beat                         <->     every :data:`BEAT_S` seconds
    Farewell                     <->     the end, in order

Frames are those of :mod:`node.trainer.channel`. Either side proves that it knows the rendezvous
id, without showing it. What the ranks exchange travels by gloo or NCCL, which know no secrets: the
network between the hosts of an island has to be trusted.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from typing import Annotated, get_args

from blake3 import blake3

from bootstrap.manifest import MAX_SHARD_BYTES
from node.data.tokenizer import MAX_TOKENIZER_BYTES
from node.trainer.framing import READ_BYTES, Unframer, frame
from protocols.errors import AtollError, Malformed, OperatorError, reason
from protocols.wire import Max, Message, decode_any

BEAT_S = 2.0
SILENT_BEATS = 5  # in a row without a word, after which the other side is lost
SILENT_S = SILENT_BEATS * BEAT_S
GREETING_S = 20.0  # for a stranger to show who it is
FAREWELL_S = 3.0  # for a last word to leave
JSON_BYTES = 1024 * 1024
# a job has the evaluation shard and the tokenizer's file
MAX_GREETED_FRAME = MAX_SHARD_BYTES + MAX_TOKENIZER_BYTES + 2 * JSON_BYTES
PROOF_BYTES = 32
_CONTEXT = "Atoll 2026-11-21 hosts of one island"  # of blake3's key derivation

TEXT_BYTES = 8192
Text = Annotated[str, Max(TEXT_BYTES)]
Json = Annotated[bytes, Max(JSON_BYTES)]
Proof = Annotated[bytes, Max(PROOF_BYTES)]


class Challenge(Message, kind=130):
    """Host 0's first word to whoever connects."""

    nonce: Proof


class Hello(Message, kind=131):
    """Another host: who it is and what it has."""

    version: Annotated[str, Max(64)]
    host: int  # its number, from 1 on
    name: Annotated[str, Max(256)]
    ranks: int
    device: Annotated[str, Max(16)]
    nonce: Proof
    proof: Proof
    process: Proof = b""  # made up by its process: machines may have one name


class Welcome(Message, kind=132):
    """Host 0 knows the rendezvous id as well."""

    proof: Proof


class Job(Message, kind=133, max_bytes=MAX_GREETED_FRAME):
    """The run, and what is needed to make the training tokens that host 0 has."""

    manifest: Json
    shard: Annotated[bytes, Max(MAX_SHARD_BYTES)]
    tokenizer: Annotated[bytes, Max(MAX_TOKENIZER_BYTES)]
    place: Text  # host 0's --data
    tokens: Proof  # fingerprint, see node.hosts.tokens


class Prepared(Message, kind=134):
    """The tokens are there, and are the same."""


class Launch(Message, kind=135, max_bytes=2 * JSON_BYTES):
    """Start ranks ``first`` to ``first + count - 1``; none, where the layout needs fewer."""

    life: int
    settings: Json  # TrainerSettings; paths are host 0's
    first: int
    count: int
    store: Annotated[str, Max(300)]  # HOST:PORT where the ranks meet


class Halt(Message, kind=136):
    """Kill the ranks of this life."""

    life: int


class RankEnded(Message, kind=137):
    """A rank has ended: with a status, or by a signal."""

    life: int
    rank: int
    status: int
    signal: int  # 0: none
    log: Text
    tail: Text


class Beat(Message, kind=138):
    """Nothing but a sign of life."""


class Farewell(Message, kind=139):
    """The end: ``code`` is empty where all is well, else what the operator is to be told."""

    code: Annotated[str, Max(8)]
    what: Text
    why: Text = ""
    fix: Text = ""


class Leaving(Message, kind=140):
    """This host was told to stop. Its ranks run on until host 0 says farewell."""


def fitting(text: str) -> str:
    """The text, cut at its end where it is too long to travel."""
    return text.encode(errors="replace")[:TEXT_BYTES].decode(errors="ignore")


def farewell(error: OperatorError) -> Farewell:
    """What the other side is told of an error, however long its texts are."""
    return Farewell(error.code, fitting(error.what), fitting(error.why), fitting(error.fix))


Word = (
    Challenge
    | Hello
    | Welcome
    | Job
    | Prepared
    | Launch
    | Halt
    | RankEnded
    | Leaving
    | Beat
    | Farewell
)
WORDS: tuple[type[Word], ...] = get_args(Word)


class HostLostError(AtollError):
    """The other side is gone, silent, or broke the rules; the text says which."""


class HostConnection:
    """One connection between two hosts of an island."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._unframer = Unframer()
        self._words: list[Word] = []
        self.lost = False  # whether the other side is gone: no farewell is sent
        self.heard = 0  # bytes so far
        self.silent = 0  # beats in a row without a word

    @property
    def own_address(self) -> str:
        """The address of this host as the other one sees it."""
        return str(self._writer.get_extra_info("sockname")[0])

    def admit(self) -> None:
        """From here on large frames are taken: the other side is no stranger."""
        self._unframer.limit = MAX_GREETED_FRAME

    def send(self, word: Word) -> None:
        """Queue a message; one that cannot be sent shows as silence of the other side."""
        if not self._writer.is_closing():
            self._writer.write(frame(word))

    async def receive(self) -> Word:
        """The next message that is no beat; raises :class:`HostLostError`."""
        while True:
            while self._words:
                word = self._words.pop(0)
                if not isinstance(word, Beat):
                    return word
            try:
                data = await self._reader.read(READ_BYTES)
                self._words += [decode_any(raw, *WORDS) for raw in self._unframer.feed(data)]
            except OSError as error:
                self.lost = True
                raise HostLostError(f"the connection broke ({reason(error)})") from error
            except Malformed as error:
                raise HostLostError(f"it sent what is no message of a host: {error}") from error
            if not data:
                self.lost = True
                raise HostLostError("it closed the connection")
            self.heard += len(data)

    async def watch(self) -> None:
        """Send signs of life; raises :class:`HostLostError` when none come back.

        Silence is counted in beats, not by the clock: after a time in which this process itself
        stood still, what the other side sent meanwhile is read first.
        """
        while self.silent < SILENT_BEATS:
            self.send(Beat())
            before = self.heard
            await asyncio.sleep(BEAT_S)
            self.silent = self.silent + 1 if self.heard == before else 0
        raise HostLostError(f"no sign of life for {SILENT_BEATS * BEAT_S:.0f} s")

    async def falls_silent(self, beats: int) -> bool:
        """Whether nothing comes any more, for so many beats: waits until that is known."""
        for _ in range(beats + 1):
            if self.lost or self.silent >= beats:
                return True
            await asyncio.sleep(BEAT_S)
        return self.lost or self.silent >= beats

    async def flush(self, timeout: float) -> None:
        """Wait until what was sent has left, ``timeout`` seconds at most."""
        try:
            async with asyncio.timeout(timeout):
                await self._writer.drain()
                self._writer.close()
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self.close()

    def close(self) -> None:
        """End the connection at once."""
        self._writer.transport.abort()


def nonce() -> bytes:
    """What the other side has to show its proof over."""
    return secrets.token_bytes(PROOF_BYTES)


def signed(challenge: bytes, mine: bytes, host: int) -> tuple[bytes, bytes, bytes]:
    """The parts that both proofs cover: the nonces, and the number that the other host claims."""
    return challenge, mine, host.to_bytes(8, "big")


def proof(key: str, *parts: bytes) -> bytes:
    """Bytes which prove that their maker knows ``key``."""
    derived = blake3(key.encode(), derive_key_context=_CONTEXT).digest()
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return blake3(message, key=derived).digest()


def proven(key: str, shown: bytes, *parts: bytes) -> bool:
    """Whether ``shown`` is the proof."""
    return hmac.compare_digest(proof(key, *parts), shown)
