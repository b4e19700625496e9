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
from bootstrap.state.offers import offered
from gossip.membership.standing import seen_from
from gossip.place import Place
from node.entry.keeping import Hope, first_kept
from node.entry.looking import CALL_TIMEOUT_S
from node.entry.resuming import WITHIN_S, MovingDeadline, Resuming, Silent
from node.entry.targets import Target, targets
from node.entry.trying import Attempt, Looks, Patience
from node.entry.verifying import Verifying
from node.replicas.replica import ChainStanding
from protocols.errors import (
    RemoteProtocolError,
    Stale,
    TransportError,
)
from protocols.identity import PeerId
from protocols.messages import Announce, StateOffer, StateRequest

OFFER_TIMEOUT_S = 30.0  # until a source offers its state, or says that it is making a copy
TELL_S = 1.0  # a pause between two tries that is worth a line
RESUMES = 3  # tries to go on with an earlier download while nobody answers


@dataclass(frozen=True)
class Arrived:
    """What a download came to."""

    state: ChainStanding
    target: Target
    served: dict[PeerId, int]  # bytes that came from each source


@dataclass(frozen=True)
class Destination:
    """Where the state of a fragment is to go."""

    vectors: Sequence[torch.Tensor]  # fp32, base first
    fragment: int
    on_disk: PartialState | None  # what comes is kept there, too, and may be there from before

    @property
    def size(self) -> int:
        """Bytes of the state."""
        return StateBytes(self.vectors).length

    async def drop(self) -> None:
        """Remove what is on disk."""
        if self.on_disk is not None:
            await self.on_disk.beside(self.on_disk.drop)


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
        # nothing tells whether an island's own state is still worth having
        into = Destination(vectors, fragment, on_disk if self.proves else None)
        now = asyncio.get_running_loop().time
        patience, looks, told = Patience(into.size, now), Looks(), ""
        resumes = RESUMES if into.on_disk is not None else 0  # tries left to go on with that
        for pause in backoff(self.dice, first=0.2, last=5.0):
            looks.begin()
            found = await self.look(patience.until() - now())
            if found and resumes:
                tried = now()
                try:
                    return await self._resumed(found, into, progress)
                except (RemoteProtocolError, TransportError, TimeoutError) as error:
                    resumes = resumes - 1 if isinstance(error, Silent) else 0
                if resumes:
                    await asyncio.sleep(pause)
                else:
                    await into.drop()
                patience.excuse(tried)
                if resumes or now() > tried + TELL_S:
                    continue  # they have moved on meanwhile
            wanted = [one for one in found if self.wanted(one)]
            arrived = await self._first_of(wanted, into, progress, patience, looks)
            if arrived is not None:
                return arrived
            looks.in_vain(found, wanted, answered=self.answered)
            if now() + pause > patience.until():
                break
            if pause > TELL_S and looks.reason != told:
                self.broken(told := looks.reason)
            await asyncio.sleep(pause)
        raise looks.ended()

    async def _first_of(
        self,
        wanted: Sequence[Announce],
        into: Destination,
        progress: DownloadProgress,
        patience: Patience,
        looks: Looks,
    ) -> Arrived | None:
        """Download the first of the announced states that can be had; ``looks`` hears why not."""
        options = targets(seen_from(one, into.fragment) for one in wanted)
        async for kept in self._kept(options, into.fragment, patience):
            if isinstance(kept, RemoteProtocolError | TransportError):
                looks.failed(kept)
                continue
            target, state = kept
            attempt = Attempt(progress, patience)
            try:
                return await self._downloaded(target, state, into, attempt)
            except RemoteProtocolError as error:
                looks.failed(error)
            except TransportError as error:
                looks.failed(error)
                self._greeted.difference_update(target.sources)
                if attempt.came:
                    patience.renew()
                elif attempt.filled:  # it is not to be read again and again
                    await into.drop()
                if self.proves:
                    break  # look again: the same state may be had in a moment
        return None

    async def _downloaded(
        self,
        target: Target,
        state: ChainStanding,
        into: Destination,
        progress: DownloadProgress,
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
            WantedState(self.run, target.round, target.state, into.fragment),
            into.vectors,
            progress=progress,
            came=self.came,
            fellows=self._fellows,
            on_disk=into.on_disk,
        )
        served = {peer: one.bytes for peer, one in download.sources.items()}
        return Arrived(state, target, served)

    async def _resumed(
        self,
        found: Sequence[Announce],
        into: Destination,
        progress: DownloadProgress,
    ) -> Arrived:
        """Go on with the download that was broken off.

        Raises Silent where somebody may still have its state, and RemoteProtocolError,
        TransportError or TimeoutError where it cannot be had.
        """
        on_disk, fragment = into.on_disk, into.fragment
        assert on_disk is not None
        known: StateOffer | None = await on_disk.beside(on_disk.offer)
        if known is None or not known.round or known.length != into.size:
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
            return await self._downloaded(target, state, into, pace, kept_only=True)

    @property
    def _fellows(self) -> Fellows | None:
        sharing = self.sharing
        return None if sharing is None else Fellows(sharing, self.greet, self.mention)

    async def _kept(
        self,
        options: Sequence[Target],
        fragment: int,
        patience: Patience,
    ) -> AsyncIterator[tuple[Target, ChainStanding] | RemoteProtocolError | TransportError]:
        """The states that a source keeps for us, as they are proven, or why not."""
        async for target, proved in self._proved(options, fragment, patience.until()):
            if isinstance(proved, RemoteProtocolError | TransportError):
                if isinstance(proved, TransportError):  # one may have started anew
                    self._greeted.difference_update(target.sources)
                yield proved
                continue
            try:
                kept = await self._kept_of(target, proved, fragment, patience)
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
        patience: Patience,
    ) -> tuple[Target, ChainStanding]:
        """Have a source keep a state for us: this one, or its newest if it moved on; returns which.

        Those in office are asked first, and have all the time that a copy may take: names cost
        nothing. Each newcomer has an order of its own, so not all of them have the same sources.
        Raises the last source's failure if none keeps a state.
        """

        def order(peer: PeerId) -> tuple[bool, bool, float]:
            return peer in self._unable, peer not in state.roster, self.dice.random()

        target = replace(target, sources=tuple(sorted(target.sources, key=order)))

        async def asked(peer: PeerId, hope: Hope) -> tuple[Target, ChainStanding]:
            return await self._asked(peer, target, state, fragment, patience, hope)

        (target, state), _ = await first_kept(
            target.sources,
            asked,
            patience.size,
            state.roster.__contains__,
            until=patience.until,
            waited=patience.waited,
        )
        # the download asks who has its copy first, and last those who said nothing
        first, *others = target.sources
        others.sort(key=self._unable.__contains__)
        return replace(target, sources=(first, *others)), state

    async def _asked(
        self,
        peer: PeerId,
        target: Target,
        state: ChainStanding,
        fragment: int,
        patience: Patience,
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
                timeout=max(CALL_TIMEOUT_S, min(OFFER_TIMEOUT_S, patience.until() - now())),
                until=hope.end,
                making=makes,
            )
            hope.offers(now())
            found = target
            if offer.round > target.round:
                # this source alone: where the others stand by now is not known
                found = Target(offer.round, None, offer.digest, target.work, (peer,))
                state = await self._standing(found, fragment, patience.until())
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
