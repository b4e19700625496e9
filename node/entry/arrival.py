"""Getting to where the swarm is: which state to take, from whom, and the download itself."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from bootstrap.seeds import backoff
from bootstrap.state import (
    Came,
    DownloadProgress,
    Fellows,
    PartialState,
    Sharing,
    Sources,
    WantedState,
    download_state,
)
from bootstrap.state.digest import StateBytes
from bootstrap.state.offers import making_s, offered
from gossip.membership.standing import seen_from
from gossip.place import Place
from node.entry.keeping import Hope, first_kept
from node.entry.looking import CALL_TIMEOUT_S, PATIENCE_S
from node.entry.resuming import WITHIN_S, MovingDeadline, Resuming, Silent
from node.entry.targets import Target, targets
from node.entry.verifying import Verifying
from node.errors import operator_error
from node.replicas.replica import ChainStanding
from protocols.errors import (
    RemoteProtocolError,
    Stale,
    TransportError,
)
from protocols.identity import PeerId
from protocols.messages import Announce, StateOffer, StateRequest

OFFER_TIMEOUT_S = 30.0  # until a source offers its state, or says that it is making a copy
COPIES = 3  # that are waited for beyond PATIENCE_S: some sources only claim to make one
TELL_S = 1.0  # a pause between two tries that is worth a line
RESUMES = 3  # tries to go on with an earlier download while nobody answers
MAX_UNTRUE = 3
MAX_UNWANTED = 3


@dataclass(frozen=True)
class Arrived:
    """What a download came to."""

    state: ChainStanding
    target: Target
    served: dict[PeerId, int]  # bytes that came from each source


@dataclass(kw_only=True)
class Arrival(Verifying):
    """Downloads the swarm's state into given vectors."""

    proves: ClassVar[bool] = True  # whether claims are proven before the state is fetched

    dice: random.Random = field(default_factory=random.Random)  # for pauses between tries
    broken: Callable[[str], object] = lambda why: None  # told why nothing comes, while it tries
    # told which peer makes a copy of how many bytes, while that is waited for
    making: Callable[[PeerId, int], object] = lambda peer, size: None
    # the same of the place of a state of which some is on disk
    suits: Callable[[Place], bool] = lambda place: True
    sharing: Sharing | None = None  # with others who download the same
    came: Came = lambda share: None  # told how much of a state has come, for estimates
    mention: Callable[[PeerId, PeerId], object] = lambda peer, by: None  # who was named by whom
    _unable: set[PeerId] = field(default_factory=set)  # have kept no state when asked
    _waited: float = 0.0  # seconds in all for copies that were being made

    async def fetch(
        self,
        vectors: Sequence[torch.Tensor],
        progress: DownloadProgress,
        fragment: int = 0,
        on_disk: PartialState | None = None,
    ) -> Arrived:
        """Fill ``vectors`` (fp32, base first) with the swarm's state of a fragment.

        The heaviest of those ``wanted`` whose history verifies is taken. Raises OperatorError E502
        when none could be had in time, or nobody has a wanted one any more, and E206 when nobody
        shows a history that holds. A download that breaks off after hours leaves as much time for
        the next one as there was for it. First it is tried to go on with what is ``on_disk`` of an
        earlier start, which takes none of that time; again where nobody answers, who may be back.
        """
        loop = asyncio.get_running_loop()
        began = attempt = loop.time()
        size, self._waited = StateBytes(vectors).length, 0.0

        def until() -> float:
            return began + PATIENCE_S + min(self._waited, COPIES * making_s(size))

        reason, told = "no island has announced a state", ""
        resumes = 0  # tries to go on with what is on disk
        untrue = unwanted = 0  # looks in a row that brought only lies, or nothing wanted
        came = filled = False  # whether anything of the last download came, or was on disk
        if not self.proves:
            on_disk = None  # nothing tells whether an island's own state is still worth having
        to_resume = on_disk

        def noted(done: int, total: int, sources: int) -> None:
            nonlocal came, filled, began
            came = came or sources > 0
            if not sources and done:  # reading it takes minutes, and is no patience with others
                filled, began = True, began + loop.time() - attempt
            progress(done, total, sources)

        for pause in backoff(self.dice, first=0.2, last=5.0):
            wrong, silent, found = "", False, await self.look(until() - loop.time())
            if to_resume is not None and found:
                tried, resumes = loop.time(), resumes + 1
                try:
                    return await self._resumed(found, vectors, progress, fragment, to_resume)
                except (RemoteProtocolError, TransportError, TimeoutError) as error:
                    again = isinstance(error, Silent) and resumes < RESUMES
                if again:
                    await asyncio.sleep(pause)
                else:
                    await to_resume.beside(to_resume.drop)
                    to_resume = None
                began += loop.time() - tried
                if again or loop.time() > tried + TELL_S:
                    continue  # they have moved on meanwhile
            said = [one for one in found if self.wanted(one)]
            options = targets(seen_from(one, fragment) for one in said)
            async for kept in self._kept(options, fragment, until, size):
                if isinstance(kept, RemoteProtocolError):
                    wrong = str(kept)  # the next best may be true
                    continue
                if isinstance(kept, TransportError):  # a claim costs nothing
                    reason, silent = str(kept), True
                    continue
                target, state = kept
                came = filled = False
                attempt = loop.time()
                try:
                    return await self._downloaded(target, state, vectors, noted, fragment, on_disk)
                except RemoteProtocolError as error:
                    wrong = str(error)
                except TransportError as error:
                    reason, silent = str(error), True
                    self._greeted.difference_update(target.sources)
                    if came:
                        began, self._waited = loop.time(), 0.0
                    elif filled and on_disk is not None:  # it is not to be read again and again
                        await on_disk.beside(on_disk.drop)
                    if self.proves:
                        break  # look again: the same state may be had in a moment
            untrue = untrue + 1 if wrong and not silent else 0
            if untrue >= MAX_UNTRUE:
                raise operator_error("E206", why=wrong)
            unwanted = unwanted + 1 if found and not said else 0
            if unwanted >= MAX_UNWANTED:
                reason = "nobody is further than this node any more"
                break
            if loop.time() + pause > until():
                break
            if pause > TELL_S and reason != told:
                self.broken(told := reason)
            await asyncio.sleep(pause)
        raise operator_error("E502", "the swarm's state could not be fetched", why=reason)

    async def _downloaded(
        self,
        target: Target,
        state: ChainStanding,
        vectors: Sequence[torch.Tensor],
        progress: DownloadProgress,
        fragment: int,
        on_disk: PartialState | None,
        *,
        kept_only: bool = False,
    ) -> Arrived:
        download = await download_state(
            self.transport,
            Sources(
                target.sources,
                state.roster,
                kept_only=kept_only,
                offer_timeout=OFFER_TIMEOUT_S,
            ),
            WantedState(self.run, target.round, target.state, fragment),
            vectors,
            progress=progress,
            came=self.came,
            fellows=self._fellows,
            on_disk=on_disk,
        )
        served = {peer: one.bytes for peer, one in download.sources.items()}
        return Arrived(state, target, served)

    async def _resumed(
        self,
        found: Sequence[Announce],
        vectors: Sequence[torch.Tensor],
        progress: DownloadProgress,
        fragment: int,
        on_disk: PartialState,
    ) -> Arrived:
        """Go on with the download that was broken off.

        Raises Silent where somebody may still have its state, and RemoteProtocolError,
        TransportError or TimeoutError where it cannot be had.
        """
        known: StateOffer | None = await on_disk.beside(on_disk.offer)
        if known is None or not known.round or known.length != StateBytes(vectors).length:
            raise Stale("nothing of it is known")
        async with asyncio.timeout(WITHIN_S) as limit:
            await self._introduce(known.readers)
            resuming = Resuming(
                self.transport, self.run, self.founders, fragment, self.offload, known
            )
            whole: bool = await on_disk.beside(lambda: on_disk.whole)
            sources = known.readers if whole else await resuming.keepers()
            options = targets(seen_from(one, fragment) for one in found)
            there = (known.round, known.digest)
            said = next((one for one in options if (one.round, one.state) == there), None)
            state = await resuming.standing(sources, said)
            if not self.suits(replace(state.place, state=known.digest)):
                raise Stale("this node is as far by now")
            if said is not None:
                self._check_held(said, state, options)
            target = Target(known.round, None, known.digest, 0, sources)
            pace = MovingDeadline(limit, progress)
            return await self._downloaded(
                target, state, vectors, pace, fragment, on_disk, kept_only=True
            )

    @property
    def _fellows(self) -> Fellows | None:
        sharing = self.sharing
        return None if sharing is None else Fellows(sharing, self.greet, self.mention)

    async def _kept(
        self,
        options: Sequence[Target],
        fragment: int,
        until: Callable[[], float],
        size: int,
    ) -> AsyncIterator[tuple[Target, ChainStanding] | RemoteProtocolError | TransportError]:
        """The states of ``size`` bytes that a source keeps for us, as they are proven, or why not.

        ``until`` moves on while a source makes its copy.
        """
        async for target, proved in self._proved(options, fragment, until()):
            if isinstance(proved, RemoteProtocolError | TransportError):
                if isinstance(proved, TransportError):  # one may have started anew
                    self._greeted.difference_update(target.sources)
                yield proved
                continue
            try:
                kept = await self._kept_of(target, proved, fragment, until, size)
            except RemoteProtocolError as error:
                yield error
            except TransportError as error:
                self._greeted.difference_update(target.sources)
                yield error
                return  # look again: the same state may be had in a moment
            else:
                yield kept

    async def _kept_of(
        self,
        target: Target,
        state: ChainStanding,
        fragment: int,
        until: Callable[[], float],
        size: int,
    ) -> tuple[Target, ChainStanding]:
        """Have a source keep a state for us: this one, or its newest if it moved on; returns which.

        Those in office are asked first, and have all the time that a copy may take: names cost
        nothing. Raises the last source's failure if none keeps a state.
        """

        def order(peer: PeerId) -> tuple[bool, bool, float]:
            stranger = peer not in state.roster  # which may choose its name
            return peer in self._unable, stranger, self.dice.random() if stranger else 0.0

        async def asked(peer: PeerId, hope: Hope) -> tuple[Target, ChainStanding]:
            return await self._asked(peer, target, state, fragment, until, hope)

        (target, state), _ = await first_kept(
            sorted(target.sources, key=order),
            asked,
            size,
            state.roster.__contains__,
            until=until,
            waited=self._has_waited,
        )
        # the download asks who has its copy first, and last those who said nothing
        first, *others = target.sources
        others.sort(key=self._unable.__contains__)
        return replace(target, sources=(first, *others)), state

    def _has_waited(self, seconds: float) -> None:
        self._waited += seconds

    async def _asked(
        self,
        peer: PeerId,
        target: Target,
        state: ChainStanding,
        fragment: int,
        until: Callable[[], float],
        hope: Hope,
    ) -> tuple[Target, ChainStanding]:
        """Have one source keep its state; what it says is noted in ``hope``.

        Where rounds are short, a state of a given round would be gone each time it is asked for.
        """
        now = asyncio.get_running_loop().time

        def makes() -> None:
            if not hope.making:
                self.making(peer, hope.size)
            hope.makes(now())

        try:
            offer = await offered(
                self.transport,
                peer,
                StateRequest(self.run, target.round, fragment, or_newer=True),
                timeout=max(CALL_TIMEOUT_S, min(OFFER_TIMEOUT_S, until() - now())),
                until=hope.end,
                making=makes,
            )
            hope.offers(now())
            found = target
            if offer.round > target.round:
                # this source alone: where the others stand by now is not known
                found = Target(offer.round, None, offer.digest, target.work, (peer,))
                state = await self._standing(found, fragment, until())
        except (TransportError, RemoteProtocolError):
            self._unable.add(peer)
            raise
        except asyncio.CancelledError:  # another one was quicker
            if hope.silent and now() >= hope.until:
                self._unable.add(peer)
            raise
        self._unable.discard(peer)
        others = [source for source in target.sources if source != peer]
        return replace(found, sources=(peer, *others)), state
