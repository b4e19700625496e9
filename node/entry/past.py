"""How a run went while this node was not there: asked of its peers, and told to whoever asks.

Charts are to begin where the run does, on every node, and to have the rounds that a download has
passed over. What a peer tells of the past is for people to look at and is proven by nothing: no
decision is taken by it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Iterable, Iterator, Sequence

from bootstrap.seeds import backoff
from gossip.chain.swarm import Swarm
from gossip.common import AnySwarm
from node.monitor.history import History
from node.monitor.history_gaps import Gap, in_gaps, stand_for
from node.monitor.merged_tokens import MAX_MERGED, OTHERS
from node.monitor.views import can_be_drawn
from protocols.bounds import ENDLESS_ROUNDS, MAX_PEERS
from protocols.errors import RemoteProtocolError, RemoteRefused, TransportError
from protocols.identity import PeerId
from protocols.messages import MAX_PAST, Merged, Past, PastRequest, PastRound
from protocols.tasks import Offload
from protocols.transport import Transport

CALL_TIMEOUT_S = 10.0
MOST_TOLD = 8  # peers that have told something that those before them had not, of one asking
MOST_KNOWING = 32  # peers that have told something, of one asking
MAY_LACK = 1 / 8  # of the rounds that are asked for, in a row: rows may be of several rounds
LOOK_S = 60.0  # between two looks for gaps
AGAIN_S, LAST_AGAIN_S = 60.0, 3600.0  # until a gap that nobody knows is asked for again: the pauses
_COUNTS = ("members", "live")
_FIELDS = tuple(item.name for item in dataclasses.fields(PastRound))


def tell_past(transport: Transport, history: History) -> None:
    """Answer ``past`` with what ``history`` has of its run."""

    async def answer(peer: PeerId, body: bytes) -> bytes:
        wanted: PastRequest = PastRequest.decode(body)
        if wanted.run.hex() != history.run:
            raise RemoteRefused("run", "this node takes part in another")
        since, before = wanted.since, wanted.before
        found = history.columns(min(wanted.rows, MAX_PAST), since=since, before=before)["columns"]
        rows = zip(*(found[name] for name in _FIELDS), strict=True)
        # without the rounds from there on, which whoever asks goes through itself
        totals = history.merged.until(before) or {}
        totals.pop(OTHERS, None)  # who asks may know some of them
        most = sorted(totals.items(), key=lambda item: -item[1])[:MAX_PEERS]
        return Past(
            rounds=tuple(map(_round, rows)),
            merged=tuple(
                Merged(PeerId(island), min(max(0, tokens), MAX_MERGED)) for island, tokens in most
            ),
        ).encode()

    transport.on_call("past", answer)


def _round(values: tuple[float | None, ...]) -> PastRound:
    given = dict(zip(_FIELDS, values, strict=True))
    counts = {name: float(given[name] or 0) for name in _COUNTS}
    exact = {"round": int(given["round"] or 0), "time": float(given["time"] or 0)}
    rest = {n: None if (v := given[n]) is None else float(v) for n in _FIELDS[4:]}
    return PastRound(**exact, **counts, **rest)  # type: ignore[arg-type]


async def ask_past(
    transport: Transport,
    peers: Iterable[PeerId],
    history: History,
    offload: Offload,
    *,
    before: int,
) -> int:
    """Ask for the gaps up to ``before``, where this node goes on, or went on once.

    One peer after the other is asked for all of it, until one knows next to all, its last round
    included: those before it may not have come as far, or have been away as this node was. Returns
    the number of rows that were added.
    """
    history.expect(before)
    if not (gaps := history.gaps.until(before)):
        return 0
    rows, totals, knowing, told_more = list[PastRound](), dict[str, int](), 0, 0
    request = PastRequest(bytes.fromhex(history.run), gaps[0][0] + 1, before, MAX_PAST).encode()
    for peer in peers:
        try:
            reply = await transport.call(
                peer, "past", request, timeout=CALL_TIMEOUT_S, max_reply=Past.MAX_BYTES
            )
            told: Past = Past.decode(reply)
        except (TransportError, RemoteProtocolError):
            continue
        if not (fitting := _fitting(told.rounds, gaps)):
            continue
        knowing += 1
        if (joined := _joined(rows, fitting)) != rows:
            rows = joined
            for sum_ in told.merged:
                if sum_.tokens <= MAX_MERGED:
                    totals[sum_.peer] = max(totals.get(sum_.peer, 0), sum_.tokens)
            told_more += 1
        if _whole(rows, gaps) or told_more == MOST_TOLD or knowing == MOST_KNOWING:
            break
    if added := history.learn(list(map(_row, rows)), totals, before):
        await history.save(offload)
    return added


def _fitting(told: Iterable[PastRound], gaps: Sequence[Gap]) -> list[PastRound]:
    """Those of gaps that can be drawn, by ascending rounds."""
    found = list[PastRound]()
    for one in told:
        if (not found or one.round > found[-1].round) and in_gaps(gaps, one.round) and _likely(one):
            found.append(one)
    return found


def _joined(rows: list[PastRound], others: list[PastRound]) -> list[PastRound]:
    """Whichever are more, and what the others have before and after these."""
    if len(others) > len(rows):
        rows, others = others, rows
    first, last = rows[0].round, rows[-1].round
    before = [one for one in others if one.round < first]
    return [*before, *rows, *(one for one in others if one.round > last)]


def _whole(rows: Sequence[PastRound], gaps: Sequence[Gap]) -> bool:
    """Whether they go to the end, and next to nothing lacks before it."""
    end, last = gaps[-1][1], rows[-1].round
    missing = sum(min(high, last + 1) - low - 1 for low, high in gaps if low < last)
    stand = [rounds for _, rounds in stand_for(gaps, [one.round for one in rows])]
    return (
        end in (last + 1, ENDLESS_ROUNDS)
        and sum(stand) >= missing * (1 - MAY_LACK)
        and max(stand) <= max(1, missing * MAY_LACK)
    )


def _row(one: PastRound) -> dict[str, float | None]:
    row: dict[str, float | None] = {name: getattr(one, name) for name in _FIELDS}
    return row | {"outcome": 0.0, "failed": 0.0}


def _likely(one: PastRound) -> bool:
    """Whether it can be drawn: a stranger may say anything."""
    known = [value for name in _FIELDS if (value := getattr(one, name)) is not None]
    return all(map(can_be_drawn, known)) and 0 < one.time < time.time() + 86_400


class LookingBack:
    """Asks those who are there for what is missing here, until one has told what it has of it."""

    def __init__(
        self,
        transport: Transport,
        history: History,
        offload: Offload,
        swarm: AnySwarm,
        greeted: Iterable[PeerId],
    ) -> None:
        self._transport, self._history, self._offload = transport, history, offload
        self._swarm, self._greeted = swarm, tuple(greeted)
        self._asked = 0  # where the gaps ended that were asked for last
        self._pauses = _pauses()
        self._again_at = 0.0

    async def run(self, before: int) -> None:
        """Look again and again, until cancelled; ``before`` is where this node goes on."""
        self._history.expect(before)
        while True:
            await self._look(asyncio.get_running_loop().time())
            await asyncio.sleep(LOOK_S)

    async def _look(self, now: float) -> None:
        before = self._wanted()
        if before != self._asked:
            self._asked, self._pauses, self._again_at = before, _pauses(), now
        if not before or now < self._again_at:
            return
        self._again_at = now + next(self._pauses)
        alive = self._swarm.membership.alive(self._swarm.now())
        peers = dict.fromkeys([*self._greeted, *alive])
        await ask_past(self._transport, peers, self._history, self._offload, before=before)

    def _wanted(self) -> int:
        """Where the newest gap ends, 0: there is none.

        In pairs each island has a count of its own, which leaps where it lags behind the others':
        there nothing but what was before this node is missing.
        """
        certified = isinstance(self._swarm, Swarm)
        gaps = [gap for gap in self._history.gaps.open if certified or gap[0] < 0]
        return gaps[-1][1] if gaps else 0


def _pauses() -> Iterator[float]:
    return backoff(random.Random(), first=AGAIN_S, last=LAST_AGAIN_S)
