"""How a node leaves: with a checkpoint of all it has to itself, and nothing owed to others.

A node that alone decides on rounds stays until a newcomer on its way decides as well, and at the
end of the run all stay until those who are there have come to it: otherwise they would have come in
vain, and nobody could tell them so.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING

from bootstrap.manifest_gossip import PAIRED
from gossip.chain.chain import Chain
from gossip.membership.members import MEMBERS, THERE
from node.checkpoints.checkpoint import DiskFullError
from node.closing import newest_round
from node.errors import operator_error
from node.monitor.events import Notice
from node.monitor.wording import duration, short
from node.templates import stop_s
from protocols.errors import OperatorError
from protocols.identity import PeerId
from protocols.messages import Announce
from protocols.tasks import beside

if TYPE_CHECKING:
    from node.participation import Participation

HANDOVER_S = 600.0  # before the end of the run: for a newcomer's download, and to let it in
LOOK_S = 1.0
SETTLE_S = 10.0  # for shares of push-sum that are on their way
# after the last round others may still need our parts of it, and whoever has the state now has yet
# to say so
LINGER_S = 20.0
FAREWELL_S = 3.0
SLOW_S = 10.0  # for a checkpoint; then a notice says what takes long
TRIES, PAUSE_S = 4, 30.0  # for space on a full disk, where there is time for so many
ELSE_S = 25.0  # of the time to leave in, for all but the last checkpoint and its tries


async def leave(part: Participation, stack: AsyncExitStack) -> OperatorError | None:
    """Say farewell, make the final checkpoint, stop the trainer; at the end let others finish.

    Returns what is to be told last, and what the process's status says, where that checkpoint
    could not be made; or where the trainer has failed, as which this takes no longer than services
    give it.

    The farewell comes first, so that nobody waits for this node; then the trainer rests. It takes
    no round after the final checkpoint: where all leave at once, that round would be in nobody's.
    ``stack``, which ends this standstill, is unwound when nothing of the node runs any more.
    """
    unsaved, failed = None, part.failed
    try:
        async with asyncio.timeout(stop_s(part.keeper.took) if failed is not None else None):
            unsaved = await _leave(part, stack)
    except TimeoutError:
        if failed is None:
            raise
    return part.failed or unsaved  # it may have failed meanwhile


async def _leave(part: Participation, stack: AsyncExitStack) -> OperatorError | None:
    if not part.finishing:
        if part.failed is None:  # else it can let nobody in that trains with it
            await _hand_over(part)
        await _settle(part)
        _say_who_waits(part)
        await _farewell(part)
    if part.conductor is not None:
        await part.conductor.rest()
    if part.finishing:  # it stays for others, who go on giving
        await _settle(part)
    unsaved: OperatorError | None = None
    if part.config.checkpoint_every and part.island is not None and _learnt(part):
        # who is at the end of the run may owe others their last rounds, or the state
        owing = part.finishing and (
            _others(part) or _lacking(part) or _behind(part, part.states.readers)
        )
        last = None if owing else stack
        if not await _save_last(part, last):
            unsaved = _unsaved(part)
    if part.island is not None:
        await part.island.stop()
    if part.finishing:
        await _linger(part)
        await _farewell(part)
    return unsaved


def _learnt(part: Participation) -> bool:
    """Whether there is anything to save: without its trainer only what was merged here."""
    return part.failed is None or part.reporter.rounds_committed > 0


async def _hand_over(part: Participation) -> None:
    """Wait for those who are on their way in, where nobody but this node could let them in."""
    # scripts train no more, which only a round that calls the roll does without
    lame = part.node.daemon.script is not None and not part.gathering.on(part.replicas[0].place)
    if lame or not _on_the_way(part):
        return
    text = "a newcomer is on its way, and only this node could let it in: it leaves after that"
    text += f", or after {duration(HANDOVER_S)}"
    part.events.emit(Notice(text=f"{text} (Ctrl-C again ends it at once)"))
    if part.config.checkpoint_every and part.island is not None:
        await _save(part, None)
    for chain in part.swarm.chains:
        chain.wait_for_all()
    with suppress(TimeoutError):
        async with asyncio.timeout(HANDOVER_S):
            while _on_the_way(part):
                await _news(part)


def _say_who_waits(part: Participation) -> None:
    """Tell who leaves others without anybody that decides on rounds: a seed, say, or newcomers."""
    chains = [chain for chain in part.swarm.chains if isinstance(chain, Chain)]
    alone = any(chain.replica.roster == (chain.me,) for chain in chains)
    if alone and part.swarm.membership.alive(part.swarm.now()):
        text = "only this node decides on rounds: until it resumes, nobody can join the run"
        part.events.emit(Notice(text=text))


async def _save_last(part: Participation, last: AsyncExitStack | None) -> bool:
    """Make the final checkpoint; where the disk was full, try again while there is time."""
    keeper, clock = part.keeper, asyncio.get_running_loop().time
    began = clock()
    if await _save(part, last):
        return True
    failed = clock()
    # services give so long, and who is killed tells nobody; a whole one takes longer than this did
    until = began + stop_s(keeper.took) - max(keeper.took, failed - began) - ELSE_S
    longest = min((TRIES - 1) * PAUSE_S, until - failed)
    if isinstance(keeper.failed, DiskFullError) and longest >= PAUSE_S:
        wait = f"it is tried again every {PAUSE_S:.0f} s, for {longest:.0f} s"
        text = f"no room for the last checkpoint: free some space in {keeper.store.directory}"
        part.events.emit(Notice(text=f"{text}; {wait} (Ctrl-C again ends it at once, without)"))
        for _ in range(TRIES - 1):
            if clock() + PAUSE_S > until:
                break
            await asyncio.sleep(PAUSE_S)
            # a try copies all that it is to write, and fills the disk for others
            if await part.node.offload(keeper.fits) and await _save(part, last):
                return True
    return keeper.failed is None  # nothing was to be saved: the trainer has yet to begin


def _unsaved(part: Participation) -> OperatorError:
    """What is lost without the final checkpoint."""
    failed, at = part.keeper.failed, part.reporter.round
    saved = newest_round(part.keeper.store.directory)
    if saved is None:
        lacks = f"there is none, and the run stands at round {at}"
    elif saved < at:
        lacks = f"the newest is of round {saved}, and the run stands at round {at}"
    else:
        lacks = f"the newest is of round {saved}"
    code, fix = "E404", "see the trainer's log in the state directory"
    if isinstance(failed, OperatorError):
        code, fix = failed.code, failed.fix
    return operator_error(
        code,
        "the last checkpoint could not be made",
        why=f"{failed}; {lacks}: what came since is lost, but for what other islands have of it",
        fix=fix,
    )


async def _save(part: Participation, last: AsyncExitStack | None) -> bool:
    """Make a checkpoint, however long that takes; where it takes long, say so."""

    async def say() -> None:
        await asyncio.sleep(SLOW_S)
        text = (
            "the last checkpoint takes long: the trainer is at an inner step, or the disk is slow"
        )
        part.events.emit(Notice(text=f"{text} (Ctrl-C again ends it at once, without)"))

    async with beside(say()):
        return await part.keeper.save(wait=True, last=last)


async def _settle(part: Participation) -> None:
    """In push-sum: find out which sent shares arrived; the checkpoint has the weight of the others.

    This node accepts no more shares, as they would be in no checkpoint.
    """
    chains = part.swarm.chains
    with suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_S):
            await asyncio.gather(*(chain.settle() for chain in chains))
    if in_doubt := {peer for chain in chains for peer in chain.in_doubt}:
        names = ", ".join(map(short, sorted(in_doubt)))
        text = f"does not know whether shares of its weight have come: {names} did not answer"
        text += ", and will be asked when this island resumes"
        part.events.emit(Notice(text=text))


def _on_the_way(part: Participation) -> bool:
    """Whether somebody downloads the state or waits for a round, and nobody else decides rounds."""
    others, mine = _others(part), part.swarm.presence.status
    if mine.status != "active" or any(announce.status == "active" for announce in others):
        return False
    return bool(part.states.readers) or any(announce.status == "joining" for announce in others)


async def _farewell(part: Participation) -> None:
    with suppress(TimeoutError):  # they will notice
        async with asyncio.timeout(FAREWELL_S):
            await part.swarm.presence.leave()


def _others(part: Participation) -> list[Announce]:
    membership, now = part.swarm.membership, part.swarm.now()
    return [
        island.announce
        for peer, island in membership.islands.items()
        if island.announce.role in MEMBERS and membership.liveness(peer, now) in THERE
    ]


async def _linger(part: Participation) -> None:
    """Stay while others have yet to come to the end of the run; who reads the state has longer."""
    clock = asyncio.get_running_loop().time
    last = began = clock()  # when the state was last read by who lacks it
    readers, told = set[PeerId](), False
    # who has read it says where it stands once it has made something of it
    while (behind := _behind(part, readers | part.states.readers)) or _lacking(part):
        reading = behind & part.states.readers
        if reading and clock() - began <= part.states.longest_s:
            last = clock()
        if clock() - last > LINGER_S:
            return
        if reading and not told:
            text = "a newcomer downloads the state: this node stays until it has come to the end"
            text += f", for up to {duration(part.states.longest_s)}"
            part.events.emit(Notice(text=f"{text} (Ctrl-C again ends it at once)"))
            told = True
        readers |= reading
        await _news(part)


async def _news(part: Participation) -> None:
    """Until somebody announces something, or :data:`LOOK_S` are over."""
    part.news.clear()
    with suppress(TimeoutError):
        async with asyncio.timeout(LOOK_S):
            await part.news.wait()


def _lacking(part: Participation) -> bool:
    """Whether somebody is there that has yet to come to the end of the run."""
    # seeds follow certified rounds; where islands meet in pairs each state is an island's own
    roles = MEMBERS if part.manifest.mode in PAIRED else (*MEMBERS, "seed")
    now = part.swarm.now()
    there = (
        chain.membership.announcement(peer)
        for chain in part.swarm.chains
        for peer in chain.membership.alive(now)
    )
    return any(said and said.role in roles and not _at_end(part, said) for said in there)


def _behind(part: Participation, readers: set[PeerId]) -> set[PeerId]:
    """Who of these has yet to say that it is at the end of the run."""
    said = {peer: part.swarm.membership.announcement(peer) for peer in readers}
    return {peer for peer, one in said.items() if one is None or not _at_end(part, one)}


def _at_end(part: Participation, announce: Announce) -> bool:
    """Whether a peer waits for nothing more of the run."""
    return announce.status == "leaving" or part.at_end(announce)
