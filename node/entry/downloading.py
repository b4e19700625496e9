"""Taking the others' state once a member is there: where it cannot replay, or they went on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bootstrap.state import DownloadProgress, PartialState
from gossip.catchup.replay import Ending
from gossip.chain.chain import Chain
from gossip.common import AnySwarm
from gossip.membership.standing import seen_from
from node.entry.arrival import Arrival
from node.entry.targets import after, beyond, is_beyond, targets
from node.entry.trying import CaughtUp
from node.replicas.replica import OuterReplica


async def take_state(
    chain: Chain,
    replica: OuterReplica,
    arrival: Arrival,
    ending: Ending,
    told: DownloadProgress,
    on_disk: PartialState | None = None,
) -> None:
    """Download what the others stand at and move there, keeping local work where possible.

    ``told`` hears of the progress. What comes is kept ``on_disk``, too, and what is there of an
    earlier start is gone on with. A member that comes level meanwhile, by a round that was on its
    way, needs none. Raises OperatorError as :meth:`Arrival.fetch` does: whoever was ahead may be
    gone, and the next one who is asks again.
    """
    fragment, before = replica.place.fragment, replica.place.round
    vectors = [torch.empty_like(vector) for vector in replica.state]
    arrival.wanted = beyond(lambda: replica.place, fragment)
    arrival.suits = lambda there: is_beyond(replica.place, there)
    with chain.following.downloading() as approach:
        arrival.came = approach.came

        def progress(done: int, total: int, sources: int) -> None:
            if not sources:
                approach.had(done / total)
            told(done, total, sources)

        try:
            state = (await arrival.fetch(vectors, progress, fragment, on_disk)).state
        except CaughtUp:
            if ending not in (Ending.FAR, Ending.GONE):
                raise
            approach.had(1.0)  # which says nothing of how long downloads take
            return
        most = replica.manifest.rounds.max_staleness
        keep = kept_after(ending, state.place.round - before, most)
        await chain.move(
            lambda: replica.jump(
                vectors,
                state,
                keep=keep,
                decided=chain.following.decided,
                sent=chain.exchange.sent,
            ),
            state.place,
            state.certificate,
            state.lineage,
            diverged=ending is Ending.DIVERGED,
            forked=ending is Ending.FORKED,
        )


async def take_newer(
    swarm: AnySwarm,
    replicas: Sequence[OuterReplica],
    arrival: Arrival,
    told: Callable[[], DownloadProgress],
) -> None:
    """Bring what a newcomer to pairs has downloaded up to date, before it begins to train.

    ``told`` makes what hears of the progress of one fragment. Raises OperatorError as
    :meth:`Arrival.fetch` does: what was fetched before is kept.
    """
    said = await arrival.look()
    for replica in replicas:
        fragment = replica.place.fragment
        newest = targets(seen_from(one, fragment) for one in said)
        if not newest or newest[0].round <= replica.place.round:
            continue
        arrival.wanted = after(replica.place.round, fragment)
        vectors = [torch.empty_like(vector) for vector in replica.state]
        state = (await arrival.fetch(vectors, told(), fragment)).state
        async with swarm.still():
            await replica.jump(vectors, state, keep="nothing")


def kept_after(ending: Ending, missed: int, most: int) -> str:
    """What is kept of local work (:meth:`OuterReplica.jump`) over so many rounds.

    It is dropped after more than ``most``. But a replay keeps it however late, so a download that
    takes the place of a replay does too.
    """
    if ending is Ending.FORKED:
        return "all"
    return "nothing" if missed > most and ending is not Ending.FAR else "local"
