"""Sending parameters from island to island: bounded, and resumed if a connection breaks.

A letter is the encoded vector and a trailer of twenty bytes (which exchange of its round it is of,
which letter it answers, and its push-sum weight), pushed over a lane as slices are
(:mod:`gossip.exchange.transfers`). Its header names its codec, one of those that the run allows:
each side of an exchange chooses its own. What arrives is checked before it counts: codec and length
before there is memory for it, that the sender takes part, and that every value is finite. Up to
``room`` letters are kept; then the oldest makes way, or, where none may be lost (``keep_all``), the
newest is refused.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from gossip.exchange.bodies import as_bytes, chunk_at
from gossip.exchange.transfers import AT_ONCE, Transfers
from gossip.pairs.account import NAME_BYTES, SERIES_BYTES, Account
from gossip.pairs.meeting import Post, Stamp, replaced
from gossip.pairs.receipts import LetterFeed, Receipt, ReceiptDrain
from gossip.wiring import Wiring
from protocols.asking import check_run
from protocols.bounds import MAX_PEERS
from protocols.codecs import Encoded, RangeCodec
from protocols.errors import Malformed, RemoteProtocolError, RemoteRefused
from protocols.identity import PeerId
from protocols.messages import TransferHeader
from protocols.transport import Incoming

VERB, WITHDRAW = "letter", "withdraw"
_TRAILER = struct.Struct(">HqHd")  # exchange, round and exchange it answers, weight
_OPENS = (-1, 0)  # it answers nothing
GONE_S = 40.0  # a sender tries again sooner, however often (postman.LAST_PAUSE_S)
PUSHES = 2 * AT_ONCE  # by one peer: a letter and the one before it, which may have broken


@dataclass(frozen=True)
class Letter:
    """One that is here, whole and checked."""

    stamp: Stamp
    weight: float  # of push-sum; 1 elsewhere
    body: Encoded


@dataclass
class Mail:
    """Whom a box of letters tells."""

    welcome: Callable[[PeerId], bool]  # whether a peer may send letters
    coming: Callable[[PeerId], None]
    broken: Callable[[PeerId], None]
    arrived: Callable[[Letter], None]
    dropped: Callable[[Stamp], None]
    rejected: Callable[[PeerId, RemoteProtocolError], None]
    counts: Callable[[Stamp], bool]  # whether an answer does


@dataclass
class Letters:
    """One node's letters of vectors fp32 [size], in ``codecs``; none: as ``wiring.codec``."""

    wiring: Wiring
    size: int
    mail: Mail
    room: int = 8
    keep_all: bool = False
    fragment: int = 0
    codecs: Sequence[str] = ()
    longest: Callable[[], float] = lambda: math.inf  # seconds that a letter may take to arrive
    heaviest: Callable[[], float] = lambda: 1.0  # weight that a letter may have
    account: Account | None = None  # of shares, whose names are those that are given in it
    held: dict[Stamp, Letter] = field(default_factory=dict)  # the oldest first
    _claimed: set[Stamp] = field(default_factory=set)  # of these: they make way for none
    transfers: Transfers = field(init=False)
    _arriving: dict[PeerId, Receipt] = field(default_factory=dict)
    _pushes: Counter[PeerId] = field(default_factory=Counter)  # going on, of any letter
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _series: bytes = field(default_factory=lambda: secrets.token_bytes(8))  # of this process
    # without an account: each peer's newest whole letter; who sent none for longest comes first
    _newest: dict[PeerId, bytes] = field(default_factory=dict)
    _void: dict[PeerId, bytes] = field(default_factory=dict)  # the newest share that it took back
    _entering: asyncio.Lock = field(default_factory=asyncio.Lock)
    _closing: bool = False  # no other letter begins to arrive
    _closed: bool = False  # none comes any more
    _quieter: asyncio.Event = field(default_factory=asyncio.Event)  # a transfer has ended

    def __post_init__(self) -> None:
        self.transfers = Transfers(self.wiring, judged=False)
        names = self.codecs or (self.wiring.codec.name,)
        self._codecs = {name: self.wiring.codec.named(name) for name in names}
        self._sizes = {
            name: codec.encoded_size(0, self.size) for name, codec in self._codecs.items()
        }

    @property
    def largest(self) -> int:
        """Bytes of a letter at most."""
        return max(self._sizes.values()) + _TRAILER.size

    # --- sending ---------------------------------------------------------------------------------

    async def send(
        self,
        post: Post,
        letter: Encoded,
        *,
        timeout: float,
        weight: float = 1.0,
        name: bytes = b"",
        again: bool = False,
        handed: Callable[[], None] = lambda: None,
    ) -> None:
        """Send an encoded vector where ``post`` says; ``timeout`` s without progress end it.

        Under one ``name`` (:meth:`name`) it arrives once, however often it is sent ``again`` before
        the next one to the same peer. ``handed`` is called before its last byte leaves: else it
        cannot have come. Raises TransportError, and RemoteProtocolError for an answer
        that makes no sense.
        """
        body, codec = as_bytes(letter.data), letter.codec
        trailer = memoryview(_TRAILER.pack(post.exchange, *(post.answers or _OPENS), weight))
        name = name or self.name()
        run = self.wiring.run
        header = TransferHeader(run, self.fragment, post.round, 0, self.size, codec.name, name, 0)
        chunks = codec.chunks(0, self.size)

        def feed_from(chunk: int) -> LetterFeed:
            at = chunks[chunk].offset if chunk < len(chunks) else len(body)
            return LetterFeed(body[at:], trailer, last=handed)

        await self.transfers.push(post.to, VERB, header, feed_from, timeout, ask=again)

    async def withdraw(self, to: PeerId, name: bytes, timeout: float) -> bool:
        """Whether a share has come; if it has not, it never will.

        Not to be asked while it is being sent. Raises TransportError where there is no answer, and
        RemoteProtocolError for one that makes no sense.
        """
        run, codec = self.wiring.run, self.wiring.codec.name
        header = TransferHeader(run, self.fragment, 0, 0, self.size, codec, name, 0)
        reply = await self.wiring.transport.call(to, WITHDRAW, header.encode(), timeout=timeout)
        answer = TransferHeader.decode(reply)
        if answer.basis != name or answer.done not in (0, self.size):
            raise Malformed("its answer is about something else")
        return bool(answer.done)

    def name(self) -> bytes:
        """A name that no other letter has."""
        return self._series + next(self._numbers).to_bytes(8, "big")

    def keep(self, round_: int, body: Encoded, weight: float) -> None:
        """Keep a letter that nobody accepted as one to this node, whatever room there is."""
        me, number = self.wiring.identity.peer_id, next(self._numbers)
        letter = Letter(Stamp(me, round_, 0, None, number), weight, body)
        self.held[letter.stamp] = letter
        self.mail.arrived(letter)

    # --- receiving -------------------------------------------------------------------------------

    async def last(self) -> None:
        """Refuse all other letters, and wait until those are here that are arriving."""
        self._closing = True
        while self._pushes:
            self._quieter.clear()
            await self._quieter.wait()

    def close(self) -> None:
        """Let no letter come any more: what is here now is all that ever will be."""
        self._closing = self._closed = True
        for receipt in self._arriving.values():
            receipt.cut()
        self._arriving.clear()

    def take(self, stamp: Stamp) -> Letter | None:
        """A letter out of the box; None where it had to make way."""
        self._claimed.discard(stamp)
        return self.held.pop(stamp, None)

    def claim(self, stamps: Iterable[Stamp]) -> None:
        """These will be taken, and are answered before: what one gains the other has to give."""
        self._claimed |= self.held.keys() & set(stamps)

    async def receive(self, sender: PeerId, header: TransferHeader, incoming: Incoming) -> None:
        """Take a letter in; raises RemoteProtocolError for one that is not to be had."""
        codec = self._check(sender, header)
        chunk, chunks = chunk_at(codec, header), codec.chunks(0, self.size)
        at = chunks[chunk].offset if chunk < len(chunks) else self._sizes[codec.name]
        if incoming.length != self._length(header) - at:
            raise Malformed(f"{incoming.length} bytes of a letter in {codec.name}")
        receipt = self._receipt(sender, header, at)
        self.mail.coming(sender)
        receipt.enter()
        self._pushes[sender] += 1
        whole = False  # by this transfer
        try:
            await self.transfers.receive(sender, header, incoming, ReceiptDrain(receipt, at))
            whole = True
            entering = self._enter(receipt, await self._checked(sender, receipt))
            if self.account is None:
                await entering
            else:  # whoever waits for the answer may go, but what is on disk counts
                await asyncio.shield(self.wiring.spawn(entering))
            if receipt.refused is not None:
                raise receipt.refused
        except BaseException:  # also cancellation: nobody is to wait for the rest of it
            if self._pushes[sender] == 1:  # else the next try of it is coming
                self.mail.broken(sender)
            raise
        finally:
            receipt.leave(self.wiring.now())
            self._pushes[sender] -= 1
            if not self._pushes[sender]:
                del self._pushes[sender]
            self._quieter.set()
            over = whole or (receipt.whole and not receipt.at_work)
            if over and self._arriving.get(sender) is receipt:
                del self._arriving[sender]

    async def _checked(self, sender: PeerId, receipt: Receipt) -> Letter:
        codec = self._codecs[receipt.header.codec]
        data, size = torch.frombuffer(receipt.data, dtype=torch.uint8), self._sizes[codec.name]
        body = data[:size]
        exchange, *named, weight = _TRAILER.unpack(bytes(receipt.data[size:]))
        answers = None if named[0] < 0 else (named[0], named[1])
        if not 0 < weight <= self.heaviest():  # NaN as well
            raise Malformed(f"a letter of weight {weight}")

        def check() -> None:
            for chunk in codec.chunks(0, self.size):
                codec.check_chunk(chunk, body[chunk.span])

        await self.wiring.offload(check)
        stamp = Stamp(sender, receipt.header.round, exchange, answers, next(self._numbers))
        return Letter(stamp, weight, Encoded(codec, body))

    async def _enter(self, receipt: Receipt, letter: Letter) -> None:
        """Put a letter into the box; or say in its receipt why its sender keeps it.

        Of a share it is on disk first that it has come.
        """
        sender, name = letter.stamp.sender, receipt.header.basis
        async with self._entering:
            receipt.refused = None
            if self._has_come(sender, name):
                return  # two tries have both come through
            if receipt.ended or self._closed or self._withdrawn(sender, name):
                # its sender may have been told that it has not come
                receipt.refused = RemoteRefused("late", "it made way, or its receiver leaves")
                return
            if self.account is None:
                _note(self._newest, sender, name)
            else:
                try:
                    await self.account.change(lambda b: b.take(sender, name, letter.weight))
                except OSError as error:
                    receipt.refused = RemoteRefused("full", f"it keeps no account: {error}")
                    return
            self._put(letter)

    def _free(self) -> list[Stamp]:
        """Of what is held, the oldest first, what nobody is about to take."""
        return [stamp for stamp in self.held if stamp not in self._claimed]

    def _put(self, letter: Letter) -> None:
        if self.keep_all:
            self.held[letter.stamp] = letter
        else:
            gone = replaced(self._free(), letter.stamp, self.mail.counts)
            for old in gone:
                self.held.pop(old, None)
            if letter.stamp not in gone:
                for oldest in self._free()[: max(0, len(self.held) - self.room + 1)]:
                    del self.held[oldest]
                    self.mail.dropped(oldest)
                self.held[letter.stamp] = letter
        self.mail.arrived(letter)

    async def withdrawn(self, sender: PeerId, header: TransferHeader) -> bytes:
        """Let a share not come any more, and say whether it has, for its sender."""
        check_run(header.run, self.wiring.run)
        if self.account is None or len(header.basis) != NAME_BYTES:
            raise Malformed("there are no shares of that name")
        async with self._entering:
            came = self._has_come(sender, header.basis)
            if not came and not self._withdrawn(sender, header.basis):
                _note(self._void, sender, header.basis)
                receipt = self._arriving.get(sender)
                if receipt is not None and receipt.header.basis == header.basis:
                    receipt.cut()
                    del self._arriving[sender]
        return replace(header, done=self.size if came else 0).encode()

    def _withdrawn(self, sender: PeerId, name: bytes) -> bool:
        """Whether its sender has taken a share back, or a later one: names grow in a series."""
        return _until(name, self._void.get(sender, b""))

    def _has_come(self, sender: PeerId, name: bytes) -> bool:
        """Whether a letter has; of an island's shares, by the one that came last.

        It gives none before it knows of the one before: each has come, or been taken back.
        """
        newest = self._came.get(sender, b"")
        if self.account is None or name == newest:
            return name == newest
        return _until(name, newest) and not self._withdrawn(sender, name)

    @property
    def _came(self) -> Mapping[PeerId, bytes]:
        """The name of each peer's newest whole letter."""
        return self._newest if self.account is None else self.account.balance.came

    def reached(self, sender: PeerId, header: TransferHeader) -> bytes:
        """How much of a letter is here, for the sender of the rest."""
        codec = self._check(sender, header)
        receipt, done = self._arriving.get(sender), 0
        if self._has_come(sender, header.basis):
            done = self.size
        elif receipt is not None and _same(receipt.header, header):
            # never all of it: the trailer has yet to come
            filled = min(receipt.filled, self._sizes[codec.name] - 1)
            done = codec.complete(0, self.size, filled)
        return replace(header, done=done).encode()

    def _check(self, sender: PeerId, header: TransferHeader) -> RangeCodec:
        """The codec of a letter that may come."""
        check_run(header.run, self.wiring.run)
        # who asks whether its letter has come is told so, whether it is still known here or not: it
        # would take a share back that counts here
        if not self.mail.welcome(sender) and not self._has_come(sender, header.basis):
            raise RemoteRefused("stranger", "announce yourself first")
        if (header.start, header.stop) != (0, self.size):
            raise Malformed("a letter is about a whole fragment")
        codec = self._codecs.get(header.codec)
        if codec is None or len(header.basis) != NAME_BYTES:
            raise Malformed(f"a letter in {header.codec}, not in {' or '.join(self._codecs)}")
        return codec

    def _length(self, header: TransferHeader) -> int:
        return self._sizes[header.codec] + _TRAILER.size

    def _receipt(self, sender: PeerId, header: TransferHeader, at: int) -> Receipt:
        """The receipt for a letter from byte ``at`` on; only a peer's newest letter goes on.

        Raises RemoteRefused ``again`` where more or less of it is here than when its sender asked,
        ``busy`` where tries of it are on their way, and ``full`` where there is no room, or this
        node leaves: it has not come then, for certain.
        """
        if self._has_come(sender, header.basis):
            raise RemoteRefused("again", "all of it came with the try before")
        if self._withdrawn(sender, header.basis):
            raise RemoteRefused("late", "its sender has taken it back")
        if self._pushes[sender] >= PUSHES:
            raise RemoteRefused("busy", "too many of its letters are on their way")
        receipt = self._arriving.get(sender)
        if receipt is not None and not _same(receipt.header, header):
            receipt = None
        if self._closing and receipt is None:
            raise RemoteRefused("full", "it leaves, and takes no letter along")
        if at > (receipt.filled if receipt is not None else 0):
            raise RemoteRefused("again", "it stands elsewhere by now")
        if receipt is not None:
            return receipt
        now = self.wiring.now()
        self._make_room(sender, now)
        receipt = Receipt(header, bytearray(self._length(header)), now + self.longest())
        self._arriving[sender] = receipt
        return receipt

    def _make_room(self, sender: PeerId, now: float) -> None:
        """For another letter of ``sender``; raises RemoteRefused ``full`` where there is none.

        A letter that broke off is kept for as long as one may take, not until its own time is over:
        by a narrow link it takes several tries.
        """
        arriving, longest = self._arriving, self.longest()
        for peer in [p for p, one in arriving.items() if one.left + longest < now]:
            arriving.pop(peer).cut()
        others = [peer for peer in arriving if peer != sender]
        held = len(self.held) if self.keep_all else 0
        if len(others) >= self.room:
            # it broke, and nobody has gone on with it, or it comes so slowly that others could not
            yielding = [p for p in others if not arriving[p].at_work or now > arriving[p].until]
        else:  # letters that wait are in the way: only its end is a reason to lose what has come
            yielding = [p for p in others if now > arriving[p].left + GONE_S]
        needed = max(0, len(others) + held - self.room + 1)
        if len(yielding) < needed:
            raise RemoteRefused("full", "no room for another letter")
        for peer in yielding[:needed]:
            arriving.pop(peer).cut()


def _note(names: dict[PeerId, bytes], sender: PeerId, name: bytes) -> None:
    """The newest name of a peer, of so many peers as are known at once."""
    names.pop(sender, None)
    names[sender] = name
    if len(names) > MAX_PEERS:
        del names[next(iter(names))]


def _until(name: bytes, last: bytes) -> bool:
    """Whether the names of one series come to ``name`` before ``last``, or with it."""
    return name[:SERIES_BYTES] == last[:SERIES_BYTES] and name <= last


def _same(one: TransferHeader, other: TransferHeader) -> bool:
    """Whether both are tries of one letter."""
    return (one.basis, one.codec) == (other.basis, other.codec)
