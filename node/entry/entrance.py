"""On the way into a run: peers are greeted and compared with, and hand the run over.

The answer is a :class:`Run`: manifest, evaluation shard, tokenizer, and the peers met on the way.
A run of the node's own is made elsewhere (:mod:`node.reading`). The state itself is fetched later
(:mod:`node.entry.arrival`), when there is memory for it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from functools import partial
from math import ceil
from pathlib import Path
from typing import TypeVar

from bootstrap.handshake import Clocks, Greeting, greet
from bootstrap.manifest import MAX_SHARD_BYTES, Manifest
from bootstrap.seeds import PeerCache, Reached, Unreached, backoff, dial_all, explain, find_peers
from bootstrap.signed_manifest import SignedManifest
from bootstrap.state import fetch_blob, fetch_manifest
from gossip.membership.members import MEMBERS
from gossip.membership.opening import open_announce
from node import __version__, clock
from node.config import NodeConfig
from node.data.tokenizer import BYTES, MAX_TOKENIZER_BYTES
from node.entry.differing import differences, listed
from node.entry.outbound import Outbound
from node.entry.own_address import OwnPlace
from node.entry.reaching import Reaching
from node.errors import operator_error
from node.modes import is_over
from node.monitor.event_log import EventLog
from node.monitor.events import JoinProgress, Notice, Problem
from protocols.addresses import PeerAddress, parse_peers
from protocols.envelope import OpenedEnvelope
from protocols.errors import (
    Disagreement,
    IdentityMismatch,
    OperatorError,
    OtherVersion,
    RemoteProtocolError,
    TransportError,
    Unreachable,
    Why,
)
from protocols.identity import PeerId
from protocols.messages import Announce
from protocols.transport import Transport
from protocols.whereabouts import Whereabouts

T = TypeVar("T")

logger = logging.getLogger(__name__)

PASSING = ("E101", "E501", "E502")  # may pass in a moment: seeds that are just starting
TAKE_FROM_S = 30.0  # a seed tries this long to get a run from the peer that brought it
GONE_AFTER = 5  # greetings in a row that a seed does not answer: one may be lost


@dataclass
class Run:
    """A run this node takes part in."""

    signed: SignedManifest
    shard: bytes  # evaluation shard
    created: bool  # by this node, just now
    greetings: list[Greeting] = field(default_factory=list)
    tokens: str = ""  # where those of training are, if they were prepared together with the shard
    place: str = ""  # what these were made of; empty for the recipe
    tokenizer: bytes = b""  # its file; empty for the byte tokenizer
    init_from: Path | None = None  # the folder with the weights that a run just made starts from

    @property
    def manifest(self) -> Manifest:
        return self.signed.manifest

    @property
    def blobs(self) -> list[bytes]:
        """What newcomers fetch by the hashes in the manifest."""
        return [blob for blob in (self.shard, self.tokenizer) if blob]

    @property
    def peers(self) -> list[PeerId]:
        """Peers that were greeted and take part in the run."""
        run = self.signed.run_id
        return [g.peer for g in self.greetings if g.welcome.run == run]

    def said_to_be_over(self, now: float) -> bool:
        """Whether most members say so that are known to those who were greeted.

        Anybody may announce itself as a member, so it is a hint, and that of no single one.
        """
        newest: dict[PeerId, OpenedEnvelope[Announce]] = {}
        for envelope in (one for g in self.greetings for one in g.welcome.announces):
            with suppress(RemoteProtocolError):  # told of once this node takes part
                opened = open_announce(envelope, self.signed.run_id, now)
                held = newest.get(opened.signer)
                if held is None or held.sequence < opened.sequence:
                    newest[opened.signer] = opened
        said = [one.message for one in newest.values() if one.message.role in MEMBERS]
        over = sum(is_over(self.manifest, one.round, one.work) for one in said)
        return 2 * over > len(said)


@dataclass
class Entrance:
    """What is needed on the way in."""

    config: NodeConfig
    transport: Transport
    whereabouts: Whereabouts
    cache: PeerCache
    clocks: Clocks
    events: EventLog
    outbound: Outbound
    own_end: InitVar[Callable[[PeerId], str]]  # see :class:`Reaching`
    place: InitVar[OwnPlace]
    reaching: Reaching = field(init=False)
    _greeted: Callable[[], Awaitable[str]] | None = None  # what is still to be checked with them
    _told: set[tuple[PeerAddress, type[TransportError]]] = field(default_factory=set)

    def __post_init__(self, own_end: Callable[[PeerId], str], place: OwnPlace) -> None:
        self.reaching = Reaching(
            self.config, self.transport, self.whereabouts, self.events, self.outbound,
            own_end, place, self._greet,
        )  # fmt: skip

    async def patiently(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat an attempt for ``config.wait_s`` seconds while it may go otherwise next time."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.config.wait_s if self.config.wait_s else float("inf")
        for pause in backoff(random.Random()):
            try:
                return await attempt()
            except OperatorError as error:
                left = end - loop.time()
                if error.code not in PASSING or left <= 0:
                    raise
                pause = min(pause, left)
                self.events.emit(
                    Problem.of(error, fix=f"trying again in {ceil(pause)} s; {error.fix}")
                )
            await asyncio.sleep(pause)
        raise AssertionError("backoff never ends")

    async def greet_seeds(self, run: bytes) -> list[Greeting]:
        """Dial the seeds (or the cached peers) and greet those who answer.

        ``run`` empty: whichever they have, which must be that of the seeds where some are given:
        the cached ones may be of another run that this directory was in. Raises OperatorError
        (E101, E103, E2xx, E301, E501).
        """
        seeds = parse_peers(self.config.peers)
        cache = self.cache if run or not seeds else None
        dialled = await find_peers(self.transport, seeds, cache)
        self._tell(one for one in dialled.missed if one.address in seeds)
        self._progress(1, "dial", _dial_text(dialled.reached))
        greetings = []
        failure: OperatorError | None = None
        for reached in dialled.reached:
            try:
                greeting = await self._greet(reached.address.hostport, reached.peer, run)
            except OperatorError as error:
                failure = error
                continue
            greetings.append(greeting)
        if not greetings:
            assert failure is not None
            raise failure
        self.clocks.check()
        places = [PeerAddress(r.address.host, r.address.port, r.peer) for r in dialled.reached]
        self.cache.remember(places)
        self._greeted = partial(self.reaching.check, greetings, places, run)
        return greetings

    async def pass_checks(self) -> None:
        """Tell that all was compared and this machine has what the run needs; be reachable.

        Only after peers were greeted. Raises E302 (:meth:`Reaching.check`).
        """
        if self._greeted is None:
            return
        check, self._greeted = self._greeted, None
        passed = ["protocol", "config", f"clock {self.clocks.offset:+.2f} s"]
        passed += ["invitation"] * bool(self.config.invitation)
        passed += ["disk"] * (self.config.role == "island" and self.config.checkpoint_every > 0)
        self._progress(2, "checks", f"{', '.join(passed)} ok")
        self._progress(3, "reach", await check())

    async def claim(self, run: bytes, greetings: list[Greeting]) -> list[Greeting]:
        """Bring a run that was just made to seeds that have none.

        All nodes ask them in the same order: the first that is there takes one run of several that
        are brought to it. Raises OperatorError E502 where that is another node's (try again: there
        is a run to join by then).
        """
        again: list[Greeting] = []
        for greeting in sorted(greetings, key=lambda one: one.peer):
            if not again:
                await self._be_taken(greeting.peer, run)
                again.append(greeting)  # from before: nobody else takes part
                continue
            try:
                again.append(await self._greet(greeting.peer, greeting.peer, run))
            except OperatorError as error:
                if error.code not in ("E101", "E201"):
                    raise
                again.append(greeting)
        return again

    async def _be_taken(self, seed: PeerId, run: bytes) -> None:
        """Wait until a seed has the run from this node. Raises OperatorError E502 if from another.

        It is begun all the same where the seed goes away, or takes none for a while: it is brought
        the run again (:meth:`visit_seeds`).
        Where fetching takes the seed longer, it may have another's run by the time it is done.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + TAKE_FROM_S
        creator: PeerId | None = None
        missed = 0
        for pause in backoff(random.Random(), first=0.1, last=1.0):
            try:
                answer = await self._greet(seed, seed, run)
                creator = await self._creator(seed, run) if answer.welcome.run else None
                missed = 0
            except OperatorError as error:
                if error.code == "E201":
                    break
                if error.code != "E101":
                    raise
                missed += 1
                if missed == GONE_AFTER:  # it went away: it knows of no other
                    return
            if creator is not None:
                break
            if loop.time() > end:
                text = f"{seed} has not taken the run in {TAKE_FROM_S:g} s: it begins without"
                self.events.emit(Notice(text=text))
                return
            await asyncio.sleep(pause)
        if creator != self.transport.peer_id:
            raise operator_error(
                "E502",
                "another run began there just now",
                why=f"{seed} has been told of it in the meantime",
                fix="it is joined instead, if its settings are the same",
            )

    async def _creator(self, peer: PeerId, run: bytes) -> PeerId | None:
        """Whose run a peer has, since its id does not say; None: it cannot tell yet."""
        try:
            return (await fetch_manifest(self.transport, [peer], run)).creator
        except (TransportError, RemoteProtocolError) as error:
            logger.info("%s does not say who has created the run: %s", peer, error)
            return None

    async def take_from(self, peer: PeerId, run: bytes) -> Run:
        """The run that a caller has brought to this seed; tries for a while: it is starting.

        Not where nothing says where the caller is, or what it has is no such run: it can bring it
        again.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + TAKE_FROM_S
        for pause in backoff(random.Random(), first=0.2, last=5.0):
            try:
                return await self.take([await self._greet(peer, peer, run)], None)
            except OperatorError as error:
                if error.code not in PASSING or _nowhere(error) or loop.time() > end:
                    raise
            await asyncio.sleep(pause)
        raise AssertionError("backoff never ends")

    async def visit_seeds(self, run: bytes, known: Callable[[PeerId], bool]) -> list[Greeting]:
        """Greet the seeds that are not among those ``known``: they may have started anew.

        So a seed that has lost its run is brought it again. Nothing is raised: it is one try of
        many.
        """
        greetings = []
        dialled = await dial_all(self.transport, parse_peers(self.config.peers))
        self._tell(one for one in dialled.missed if isinstance(one.error, IdentityMismatch))
        for reached in dialled.reached:
            if not known(reached.peer):
                try:
                    greetings.append(await self._greet(reached.address.hostport, reached.peer, run))
                except OperatorError as error:
                    logger.info("seed %s: %s", reached.address, error)
        return greetings

    def _tell(self, missed: Iterable[Unreached]) -> None:
        """Warn once of each address given that leads to nobody, or to another identity."""
        for one in missed:
            if (told := (one.address, type(one.error))) not in self._told:
                self._told.add(told)
                self.events.emit(Problem.of(explain(one.address.hostport, one.error)))

    async def _greet(self, where: str, peer: PeerId, run: bytes) -> Greeting:
        stood = clock.wall() - clock.since_boot()
        try:
            greeting = await self.measure(peer, run)
        except TransportError as error:
            raise explain(where, error) from error
        if abs(clock.wall() - clock.since_boot() - stood) < 1.0:  # else it was put meanwhile
            self.clocks.add(peer, greeting.offset, greeting.round_trip)
        self.reaching.greeted(peer)
        return greeting

    async def measure(self, peer: PeerId, run: bytes) -> Greeting:
        """A greeting that nothing follows from. Raises as :func:`bootstrap.handshake.greet`."""
        return await greet(
            self.transport,
            self.whereabouts,
            peer,
            software=__version__,
            run=run,
            invitation=self.config.invitation,
            clock=clock.wall,  # what the offset is added to, whoever sets the machine's
        )

    async def take(self, greetings: list[Greeting], own: Manifest | None) -> Run:
        """The run of the peers that were greeted. Raises OperatorError E201, E501 and others."""
        runs = [g.welcome.run for g in greetings if g.welcome.run]
        if not runs:
            await self.reaching.check_insisted(greetings)
            raise operator_error(
                "E501",
                "the peers take part in no run",
                why=f"{len(greetings)} answered, and no run is there yet: they are seeds without "
                "one, or islands that are still starting",
                fix="wait for the run's islands, or create a run there with "
                "`node start --run FILE.toml --peers ...`",
            )
        run = runs[0]
        if any(other != run for other in runs):
            raise operator_error(
                "E201",
                "the peers train different runs",
                why=", ".join(sorted({r.hex()[:8] for r in runs})),
                fix="give only peers of the run you want with --peers",
            )
        peers = [g.peer for g in greetings if g.welcome.run == run]
        signed = await self._fetched(fetch_manifest(self.transport, peers, run), wrong="E205")
        found = [] if own is None else differences(own, signed.manifest)
        if found:
            raise operator_error(
                "E201",
                f"the swarm trains another run ({signed.manifest.label})",
                why=listed(found, own),
                fix=f"leave out {self._own_run(own)} to take the swarm's, or give peers of yours",
            )
        blobs = {"": b"", BYTES: b""}
        named = (
            (signed.manifest.evaluation.digest, MAX_SHARD_BYTES),
            (signed.manifest.data.tokenizer, MAX_TOKENIZER_BYTES),
        )
        for digest, limit in named:
            if digest not in blobs:
                wanted = bytes.fromhex(digest)
                blobs[digest] = await self._fetched(
                    fetch_blob(self.transport, peers, run, wanted, max_bytes=limit)
                )
        shard, tokenizer = (blobs[digest] for digest, _ in named)
        return Run(signed, shard, created=False, greetings=greetings, tokenizer=tokenizer)

    def _own_run(self, own: Manifest | None) -> str:
        """What has given this node a run of its own."""
        if self.config.run is not None:
            return "--run"
        if own is not None and own.script.layout:
            return "run=... of node.join"
        return "--preset, --mode and --set"

    async def _fetched(self, fetching: Awaitable[T], *, wrong: str = "E502") -> T:
        """``wrong``: the code of the error where what came does not verify."""
        try:
            return await fetching
        except Disagreement as error:
            raise operator_error(
                "E502",
                "the peers do not agree whose run it is",
                why=str(error),
                fix="give only peers that you trust with --peers; where several islands have just "
                "begun the same run, this node tries again by itself",
            ) from error
        except OtherVersion as error:
            what = "the run's manifest is of another version of Atoll"
            raise operator_error("E202", what, why=str(error)) from error
        except RemoteProtocolError as error:
            raise operator_error(wrong, why=str(error)) from error
        except TransportError as error:
            raise operator_error(
                "E502",
                "no peer could hand over the run",
                why=str(error),
                fix="try again, or give other peers with --peers",
            ) from error

    def _progress(self, step: int, name: str, text: str) -> None:
        self.events.emit(JoinProgress(step=step, name=name, text=text))


def _nowhere(error: OperatorError) -> bool:
    """Whether a peer could not be called as no address of it is known."""
    cause = error.__cause__
    return isinstance(cause, Unreachable) and cause.why is Why.NO_ADDRESS


def _dial_text(reached: list[Reached]) -> str:
    quickest = min(reached, key=lambda item: item.seconds)
    more = f" and {len(reached) - 1} more" if len(reached) > 1 else ""
    return f"ok {quickest.seconds * 1000:.0f} ms, peer verified{more}"
