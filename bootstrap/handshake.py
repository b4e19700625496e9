"""The greeting: the first call on a new link, in which two peers find out whether they fit.

The caller says :class:`~protocols.messages.Hello`, the other answers
:class:`~protocols.messages.Welcome` or refuses: another protocol version, no valid invitation, or
another run. Both learn the other's signed address; the caller also learns the announcements the
other holds, and how far its own clock is off.

>>> gate = Gate(transport, whereabouts, software="0.1.0", run=lambda: run_id)
>>> greeting = await greet(transport, whereabouts, seed, software="0.1.0", run=run_id)
>>> clocks.add(seed, greeting.offset, greeting.round_trip); clocks.check()
"""

from __future__ import annotations

import hmac
import logging
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache

from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from bootstrap.dht import CLOCK_LIMIT
from bootstrap.dial_back import DialBack
from protocols.envelope import open_envelope
from protocols.errors import (
    UPGRADE,
    Malformed,
    OperatorError,
    RemoteProtocolError,
    RemoteRefused,
    Stale,
    printable,
)
from protocols.identity import PeerId
from protocols.messages import PROTOCOL_VERSION, Announce, Hello, Welcome
from protocols.transport import Transport
from protocols.whereabouts import Whereabouts

logger = logging.getLogger(__name__)

GREET_TIMEOUT = 10.0  # seconds
MAX_ANNOUNCES = 256
ANNOUNCES_BYTES = 900 * 1024  # of all announcements in one Welcome
OPEN_TO_STRANGERS = ("hello", "announce", "where", "p2p")
MAX_ADMITTED = 4096
LEAST_INVITATION = 12  # characters: a peer that is shown a proof can try guesses
MAX_SHOWN = 200  # characters of a stranger's text in an error

SET_CLOCK = "set the clock: sudo timedatectl set-ntp true (or: sudo chronyc makestep)"

Admits = Callable[[PeerId, PeerId, str], bool]  # the caller, whom it greets, what it shows


def anyone(caller: PeerId, greeted: PeerId, shown: str) -> bool:
    """The rule of an open run."""
    return True


@lru_cache(maxsize=16)
def _key(token: str) -> bytes:
    """The key of proofs of a run's token: each guess at the token costs as much as deriving it.

    Some 0.1 s and 32 MiB (RFC 7914). All runs have one salt: a caller greets before it knows the
    run, and for a salt named by the other end that end could have tried guesses beforehand.
    """
    return Scrypt(salt=b"atoll invitation", length=32, n=2**15, r=8, p=1).derive(token.encode())


def shared_token(token: str) -> Admits:
    """The rule of a run whose members share one secret; compared in constant time."""
    _key(token)  # now, and not while somebody waits for an answer
    return lambda caller, greeted, shown: hmac.compare_digest(
        shown.encode(), _shown(token, caller, greeted).encode()
    )


def _shown(token: str, caller: PeerId, greeted: PeerId) -> str:
    """What a greeting carries to prove that the caller knows the run's token; empty without one.

    It holds between these two alone: anybody may answer at an address that is given without an id.
    """
    if not token:
        return ""
    between = f"atoll greeting\x00{caller}\x00{greeted}"
    return hmac.digest(_key(token), between.encode(), "sha256").hex()


def admission(token: str, run: bytes, peer: PeerId) -> bytes:
    """What a peer's announcements carry to prove that it knows the run's token; empty without one.

    It holds for this peer in this run alone, so a peer that sees it cannot use it.
    """
    if not token:
        return b""
    return hmac.digest(_key(token), b"atoll admission\x00" + run + peer.encode(), "sha256")


@dataclass
class Gate:
    """Answers the greetings of newcomers, and remembers whom it let in."""

    transport: Transport
    whereabouts: Whereabouts
    _: KW_ONLY
    software: str
    run: Callable[[], bytes]  # as of now; empty: this node takes part in none yet, which fits any
    admits: Admits = anyone
    announces: Callable[[], Iterable[bytes]] = tuple
    # a caller's address as the transport sees it, where it can
    observed: Callable[[PeerId], str] = lambda peer: ""
    # told of a caller let in that has a run while this node has none; the caller hears of no run
    # until this node has taken one
    brought: Callable[[PeerId, bytes], None] = lambda peer, run: None
    # told of a caller not let in, with the error that it will show (E201, E202 or E203)
    refused: Callable[[PeerId, str], None] = lambda peer, code: None
    clock: Callable[[], float] = time.time
    _admitted: OrderedDict[PeerId, None] = field(init=False, default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.transport.on_call("hello", self._answer, max_body=Hello.MAX_BYTES)
        DialBack(self.transport, self.whereabouts, admitted=self.admitted, observed=self.observed)

    def admitted(self, peer: PeerId) -> bool:
        """Whether ``peer`` was let in; if this node forgot, it is asked to greet again."""
        return peer in self._admitted

    async def _answer(self, peer: PeerId, body: bytes) -> bytes:
        hello: Hello = Hello.decode(body)
        if hello.protocol != PROTOCOL_VERSION:
            self.refused(peer, "E202")
            raise RemoteRefused("version", _version(PROTOCOL_VERSION, self.software))
        # before the run is told, and in the same words whether it is missing or wrong
        if not self.admits(peer, self.transport.peer_id, hello.invitation):
            self.refused(peer, "E203")
            raise RemoteRefused("invitation", "the invitation is missing or not valid")
        run = self.run()
        if run and hello.run and run != hello.run:
            self.refused(peer, "E201")
            raise RemoteRefused("run", run.hex())
        if hello.record:
            try:
                self.whereabouts.learn(hello.record, expected=peer)
            except Stale as error:  # of a clock that is hours off, which our answer tells it of
                logger.info("the address record of %s does not hold: %s", peer, error)
        self._admitted[peer] = None
        self._admitted.move_to_end(peer)
        if len(self._admitted) > MAX_ADMITTED:
            self._admitted.popitem(last=False)
        if hello.run and not run:
            self.brought(peer, hello.run)
        own = self.whereabouts.own
        return Welcome(
            protocol=PROTOCOL_VERSION,
            software=self.software,
            run=run,
            time=self.clock(),
            observed=self.observed(peer),
            record=own.data if own else b"",
            announces=_that_fit(self.announces()),
        ).encode()


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a greeting brought. ``offset`` is their clock minus ours, in seconds."""

    peer: PeerId
    welcome: Welcome
    offset: float
    round_trip: float


async def greet(
    transport: Transport,
    whereabouts: Whereabouts,
    peer: PeerId,
    *,
    software: str,
    run: bytes = b"",
    invitation: str = "",
    clock: Callable[[], float] = time.time,
) -> Greeting:
    """Greet ``peer``; ``run`` empty: whichever it has.

    Raises :class:`OperatorError` E201 (another run), E202 (protocol version) and E203 (invitation:
    not the run's, or the run has none), and what :meth:`Transport.call` raises.
    """
    own = whereabouts.own
    sent = clock()
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        software=software,
        run=run,
        time=sent,
        invitation=_shown(invitation, transport.peer_id, peer),
        record=own.data if own else b"",
    )
    try:
        reply = await transport.call(
            peer, "hello", hello.encode(), timeout=GREET_TIMEOUT, max_reply=Welcome.MAX_BYTES
        )
    except RemoteRefused as error:
        raise _refusal(peer, run, software, error) from error
    received = clock()
    try:
        welcome: Welcome = Welcome.decode(reply)
    except Malformed as error:
        raise _versions(peer, software, "it answers in a form this node cannot read") from error
    if welcome.protocol != PROTOCOL_VERSION:
        raise _versions(peer, software, _version(welcome.protocol, _clean(welcome.software)))
    if run and welcome.run and welcome.run != run:
        raise _other_run(peer, run, welcome.run.hex())
    if invitation and _uninvited(welcome, invitation):
        raise OperatorError(
            "E203",
            "an invitation is given, and the run has none",
            f"all whom {peer} knows take part without one, so this node would listen to nobody",
            "leave out --invitation (ATOLL_INVITATION, the line in node.toml), or have all start "
            "with it",
        )
    if welcome.record:
        try:
            whereabouts.learn(welcome.record, expected=peer)
        except RemoteProtocolError as error:  # the peer is proven, and reached, without it
            logger.info("%s gives an address record that does not hold: %s", peer, error)
    # as NTP does: their time was read half way between our two (RFC 5905, section 8)
    return Greeting(peer, welcome, welcome.time - (sent + received) / 2, received - sent)


class Clocks:
    """How far this machine's clock is off, by the greetings of several peers."""

    def __init__(self, limit: float = CLOCK_LIMIT) -> None:
        self._limit = limit
        self._samples: dict[PeerId, tuple[float, float]] = {}

    def add(self, peer: PeerId, offset: float, round_trip: float) -> None:
        """Take a measurement (seconds, theirs minus ours); the quickest of a peer counts."""
        held = self._samples.get(peer)
        if held is None or round_trip <= held[1]:
            self._samples[peer] = (offset, round_trip)

    def forget(self) -> None:
        """Measure anew: this machine's clock is another one now."""
        self._samples.clear()

    @property
    def peers(self) -> list[PeerId]:
        """Whose clocks were measured."""
        return list(self._samples)

    @property
    def offset(self) -> float:
        """The median over peers of their clock minus ours; 0 before any measurement.

        Never beyond the limit: no node starts with such a clock (:meth:`check`), and what peers
        say later, perhaps a single one, must not cut this node off.
        """
        return min(max(self._median, -self._limit), self._limit)

    @property
    def _median(self) -> float:
        return statistics.median(o for o, _ in self._samples.values()) if self._samples else 0.0

    def check(self) -> None:
        """Raise :class:`OperatorError` E301 if the median is beyond the limit.

        A slow link may hide up to half a round trip, which is granted.
        """
        if not self._samples:
            return
        doubt = statistics.median(trip for _, trip in self._samples.values()) / 2
        if abs(self._median) - doubt <= self._limit:
            return
        side = "behind" if self._median > 0 else "ahead of"
        raise OperatorError(
            "E301",
            "the clock is wrong",
            f"it is {abs(self._median):.1f} s {side} the median of {len(self._samples)} peers; "
            f"at most {self._limit:g} s is allowed",
            SET_CLOCK,
        )


def _uninvited(welcome: Welcome, invitation: str) -> bool:
    """Whether others are there, none of whom proves that it knows the invitation."""
    found = False
    for envelope in welcome.announces:
        try:
            announce = open_envelope(
                envelope, Announce, purpose="announce", run=welcome.run, now=None
            ).message
        except RemoteProtocolError:
            continue  # members open it again, and report it
        if hmac.compare_digest(
            announce.admission, admission(invitation, welcome.run, announce.peer)
        ):
            return False
        found = True
    return found


def _refusal(peer: PeerId, run: bytes, software: str, error: RemoteRefused) -> Exception:
    detail = _clean(error.detail)
    if error.code == "version":
        return _versions(peer, software, detail)
    if error.code == "protocol":
        return _versions(peer, software, "it cannot read this node's greeting")
    if error.code == "run":
        return _other_run(peer, run, detail)
    if error.code == "invitation":
        return OperatorError(
            "E203",
            "the invitation is missing or not valid",
            f"{peer} admits only those with a valid one",
            "ask somebody in the run for it and give it with --invitation",
        )
    return error


def _versions(peer: PeerId, software: str, theirs: str) -> OperatorError:
    return OperatorError(
        "E202",
        "protocol versions differ",
        f"this node: {_version(PROTOCOL_VERSION, software)}; {peer}: {theirs}",
        UPGRADE,
    )


def _other_run(peer: PeerId, ours: bytes, theirs: str) -> OperatorError:
    return OperatorError(
        "E201",
        "the peer trains another run",
        f"this node wants run {ours.hex()[:16]}, {peer} has {theirs[:16] or 'none'}",
        "give the peers of your run with --peers, or join theirs with an empty --dir, without "
        "--resume and settings of a run (--run, --preset, --mode, --set)",
    )


def _version(protocol: int, software: str) -> str:
    return f"protocol {protocol}, atoll {software}"


def _clean(text: str) -> str:
    """A stranger's words, bounded and made fit for a terminal."""
    return printable(text[:MAX_SHOWN])


def _that_fit(announces: Iterable[bytes]) -> tuple[bytes, ...]:
    fitting: list[bytes] = []
    room = ANNOUNCES_BYTES
    for data in announces:
        room -= len(data) + 8
        if room < 0 or len(fitting) == MAX_ANNOUNCES:
            break
        fitting.append(data)
    return tuple(fitting)
