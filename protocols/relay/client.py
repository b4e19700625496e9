"""Calls to and of nodes that nobody can dial: the ends of what :mod:`protocols.relay.server` does.

A hidden node's address is that of its relay, ``relay/HOST:PORT/PEERID``. :meth:`Relays.connect`
turns it into a connection with the hidden node, whichever end dialled; the caller does TLS on it,
as on a connection to an address of the usual kind. :meth:`Relays.attend` is the
hidden node's side: it waits for calls, dials those who call, and hands the connections on to be
served.

Between two hidden nodes a way past the relay is tried first (:mod:`protocols.relay.punching`), but
not again for some minutes where none was found.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Protocol

from protocols.address_book import AddressBook
from protocols.addresses import relay_of
from protocols.connections.names import Names
from protocols.connections.sockets import first_byte
from protocols.errors import (
    Malformed,
    OperatorError,
    RemoteRefused,
    TransportError,
    Unreachable,
    Why,
)
from protocols.identity import PeerId
from protocols.limits import Limits
from protocols.relay.punching import PUNCH_S, inside, punched, reusable
from protocols.relay.server import DIAL, HOLD_S, JOIN_S, WAIT, RelayServer
from protocols.relay.wire import (
    MAX_BACK,
    MAX_CALLS_OF_ONE,
    TOKEN_BYTES,
    RelayCall,
    RelayCalls,
    RelayDial,
    RelayEnd,
    RelayMeeting,
    RelayWait,
    heard,
    introduce,
    say,
    spoken,
)

logger = logging.getLogger(__name__)

BACK_S = 2.5  # for a hidden node to dial back, before the relay is asked to carry
APART_S = 600.0  # after two ends have not met past the relay, that is not tried for this long
THROUGH_S = 120.0  # after a call that was not dialled back, the relay carries at once for this long
ANSWER_S = 5.0
MAX_ANSWERING = 128  # calls for which connections are being opened; further ones are left out
LATE_S = 15.0  # beyond the time for which a question is kept open: either end may be busy

_relaying: ContextVar[PeerId | None] = ContextVar("relaying", default=None)  # the hidden peer


class Call(Protocol):
    """:meth:`protocols.transport.Transport.call`."""

    def __call__(
        self, peer: PeerId, name: str, body: bytes, *, timeout: float, max_reply: int = ...
    ) -> Awaitable[bytes]: ...


def told_by(peer: PeerId) -> PeerId:
    """Which peer named the addresses of ``peer``: for a relay the hidden peer, else itself."""
    return _relaying.get() or peer


class Relays:
    """Both ends of relayed calls; :class:`protocols.http.transport.HttpTransport` owns it.

    ``mine`` tells the addresses at which this node can be dialled; none while it cannot.
    ``serve`` takes a connection, and who called for it, to be served like one that was accepted.
    """

    def __init__(
        self,
        peer_id: PeerId,
        call: Call,
        server: RelayServer,
        *,
        book: AddressBook,
        names: Names,
        limits: Limits,
        serve: Callable[[socket.socket, str], None],
        mine: Callable[[], Sequence[str]],
    ) -> None:
        self.mine = mine
        self.punches = True  # ways past relays are tried
        self.met = 0  # connections that went past a relay, of either end
        self._peer_id = peer_id
        self._call = call
        self._server = server
        self._book = book
        self._names = names
        self._limits = limits
        self._serve = serve
        self._expected: dict[bytes, asyncio.Future[socket.socket]] = {}  # by what is said
        self._through: dict[PeerId, float] = {}  # who did not dial back: until when it counts
        self._apart: dict[PeerId, float] = {}  # whom we did not meet past the relay: the same

    # --- calling ------------------------------------------------------------------------------

    async def connect(self, address: str, peer: PeerId) -> socket.socket:
        """A connection with ``peer``, which waits at the relay of ``address``; we speak first.

        Raises OSError and :class:`~protocols.errors.Unreachable`.
        """
        place = relay_of(address)
        relay = place.peer
        if relay is None or _relaying.get():
            raise Unreachable(address, Why.RELAY, "a relay has to be dialled directly")
        token = _relaying.set(peer)
        try:
            if relay != self._peer_id:
                self._book.add(relay, place.hostport, claimed_by=peer)
            if self._may_call_back(relay, peer):
                with contextlib.suppress(TimeoutError):
                    return await self._back(relay, peer)
                self._through[peer] = time.monotonic() + THROUGH_S
            if relay == self._peer_id:
                raise Unreachable(address, Why.RELAY, "it waits here and did not dial")
            return await self._carried(relay, peer, place.hostport)
        except (RemoteRefused, Malformed) as error:
            raise Unreachable(address, Why.RELAY, str(error)) from error
        finally:
            _relaying.reset(token)

    def _may_call_back(self, relay: PeerId, peer: PeerId) -> bool:
        if relay == self._peer_id:
            return True
        self._through = {p: at for p, at in self._through.items() if at > time.monotonic()}
        return peer not in self._through and bool(self.mine())

    async def _back(self, relay: PeerId, peer: PeerId) -> socket.socket:
        """Have the hidden node dial us; raises TimeoutError where it does not."""
        token = secrets.token_bytes(TOKEN_BYTES)
        coming: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        said = spoken(token)
        self._expected[said] = coming
        try:
            if relay == self._peer_id:
                self._server.tell(peer, RelayCall(self._peer_id, token, ()))
            else:
                where = tuple(self.mine()[:MAX_BACK])
                await self._ask(relay, RelayDial(peer, token, where, False))
            await asyncio.wait([coming], timeout=BACK_S)
            if not coming.done():
                raise TimeoutError
        except BaseException:  # also cancellation: what has come by then is closed
            if coming.done():
                coming.result().close()
            raise
        finally:
            del self._expected[said]
        return coming.result()

    async def _carried(self, relay: PeerId, peer: PeerId, where: str) -> socket.socket:
        """A connection through the relay, or past it where the two ends meet."""
        self._apart = {p: at for p, at in self._apart.items() if at > time.monotonic()}
        punch = self.punches and peer not in self._apart
        token = await self._ask(relay, RelayDial(peer, b"", (), punch))
        if len(token) != TOKEN_BYTES:
            raise Unreachable(relay, Why.NOT_ATOLL, "a token of another length")
        place = self._book.dialled_at(relay)
        sock, meeting = await self._entered(place.hostport if place else where, peer, token, punch)
        try:
            if meeting.addresses and punch:
                past = await punched(sock, meeting.addresses, listens=False, seconds=self._punch_s)
                if past is not None:
                    self.met += 1
                    sock.close()
                    return past
                self._apart[peer] = time.monotonic() + APART_S
            if not meeting.carries:
                raise Unreachable(relay, Why.RELAY, "it carries nothing, and no way past it opens")
        except BaseException:  # also cancellation: no connection is left half-open
            sock.close()
            raise
        return sock

    @property
    def _punch_s(self) -> float:
        return min(PUNCH_S, self._limits.connect / 2)

    async def _entered(
        self, where: str, whose: PeerId, token: bytes, punch: bool
    ) -> tuple[socket.socket, RelayMeeting]:
        """A connection with the relay for the call of ``token``, and what it says of the other end.

        Raises OSError, Malformed, and what an address that is none raises.
        """
        sock = await self._names.connected(where, whose, make=reusable)
        sock = await _introduced(sock, token)
        try:
            await say(sock, RelayEnd(punch, inside(sock)))
            return sock, await heard(sock, RelayMeeting)
        except BaseException:  # also cancellation
            sock.close()
            raise

    async def _ask(self, relay: PeerId, asked: RelayDial) -> bytes:
        return await self._call(relay, DIAL, asked.encode(), timeout=ANSWER_S, max_reply=64)

    def arrived(self, sock: socket.socket, said: bytes) -> bool:
        """A hidden node dialled and ``said`` for which call; returns whether we wait for it."""
        coming = self._expected.get(said)
        if coming is None or coming.done():
            return False
        coming.set_result(sock)
        return True

    # --- being called -------------------------------------------------------------------------

    async def reserve(self, relay: PeerId) -> float:
        """Ask ``relay`` to tell us of calls; returns the bytes a second it carries, 0: none.

        :meth:`attend` has to follow within seconds. Raises what :meth:`Transport.call` raises.
        """
        return (await self._wait(relay, begin=True)).rate

    async def attend(self, relay: PeerId, where: str) -> None:
        """Take the calls of which ``relay`` tells, until it does not answer any more.

        ``where``: its ``HOST:PORT``. Raises what :meth:`Transport.call` raises.
        """
        answering: Counter[PeerId] = Counter()  # by caller: its addresses may lead nowhere
        async with asyncio.TaskGroup() as group:
            try:
                while True:
                    for call in (await self._wait(relay, begin=False)).calls:
                        caller = call.caller
                        if (
                            answering[caller] < MAX_CALLS_OF_ONE
                            and answering.total() < MAX_ANSWERING
                        ):
                            answering[caller] += 1
                            group.create_task(self._take(relay, call, where)).add_done_callback(
                                partial(_answered, answering, caller)
                            )
            except TransportError as error:
                failure = error
        raise failure

    async def _wait(self, relay: PeerId, *, begin: bool) -> RelayCalls:
        body = RelayWait(begin).encode()
        timeout = ANSWER_S if begin else HOLD_S + LATE_S
        reply = await self._call(relay, WAIT, body, timeout=timeout, max_reply=RelayCalls.MAX_BYTES)
        try:
            calls: RelayCalls = RelayCalls.decode(reply)
        except Malformed as error:
            raise RemoteRefused("protocol", str(error)) from error
        return calls

    async def _take(self, relay: PeerId, call: RelayCall, where: str) -> None:
        """Dial whoever calls and serve it; nothing is raised: it will call again."""
        if not call.addresses and call.caller != relay:
            await self._meet(call, where)
            return
        for address in call.addresses[:MAX_BACK] or (where,):
            try:
                async with asyncio.timeout(self._limits.connect):
                    sock = await self._names.connected(address, call.caller)
                    sock = await _introduced(sock, call.token)
            except _NO_CALL as error:
                logger.debug("a call of %s at %s: %s", call.caller, address, error)
                continue
            self._serve(sock, call.caller)
            return

    async def _meet(self, call: RelayCall, where: str) -> None:
        """Take a call by way of the relay, or past it; the caller, who speaks first, chooses."""
        try:
            async with asyncio.timeout(self._limits.connect + JOIN_S):
                sock, meeting = await self._entered(where, call.caller, call.token, self.punches)
        except _NO_CALL as error:
            logger.debug("a call of %s through %s: %s", call.caller, where, error)
            return
        handed_on = False
        try:
            carries = meeting.carries
            if meeting.addresses and self.punches:
                past = await punched(sock, meeting.addresses, listens=True, seconds=self._punch_s)
                if past is not None:
                    self.met += 1
                    self._serve(past, call.caller)
                carries = carries and await self._speaks(sock)
            if carries:
                handed_on = True
                self._serve(sock, call.caller)
        finally:
            if not handed_on:
                sock.close()

    async def _speaks(self, sock: socket.socket) -> bool:
        """Whether the other end comes by the relay after all."""
        with contextlib.suppress(OSError):  # TimeoutError among them
            async with asyncio.timeout(self._limits.connect):
                return bool(await first_byte(sock))
        return False


def _answered(answering: Counter[PeerId], caller: PeerId, _: asyncio.Task[None]) -> None:
    answering[caller] -= 1
    if not answering[caller]:
        del answering[caller]


# of an address that may be anything, since the caller has made it up, or of a relay that is gone
_NO_CALL = (OSError, OperatorError, Malformed, ValueError)


async def _introduced(sock: socket.socket, token: bytes) -> socket.socket:
    try:
        sock.setblocking(False)
        await introduce(sock, token)
    except BaseException:  # also cancellation: no connection is left half-open
        sock.close()
        raise
    return sock
