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
from collections.abc import Iterable, Iterator

from bootstrap.seeds import backoff
from gossip.chain.swarm import Swarm
from gossip.common import AnySwarm
from node.monitor.history import History
from node.monitor.history_gaps import in_gaps
from node.monitor.merged_tokens import MAX_MERGED, OTHERS
from node.monitor.views import can_be_drawn
from protocols.bounds import ENDLESS_ROUNDS, MAX_PEERS
from protocols.errors import RemoteProtocolError, RemoteRefused, TransportError
from protocols.identity import PeerId
from protocols.messages import MAX_PAST, Merged, Past, PastRequest, PastRound
from protocols.tasks import Offload
from protocols.transport import Transport

CALL_TIMEOUT_S = 10.0
MOST_TOLD = 8  # peers that have told something, of one asking
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

    One peer after the other is asked for what those before it had not, until one knows the last
    round: the first may not have come as far. Those that know nothing of it do not count. Returns
    the number of rows that were added.
    """
    history.expect(before)
    if not (gaps := history.gaps.until(before)):
        return 0
    rows, totals = list[dict[str, float | None]](), dict[str, int]()
    newest, answered = gaps[0][0], 0
    for peer in peers:
        request = PastRequest(bytes.fromhex(history.run), newest + 1, before, MAX_PAST).encode()
        try:
            reply = await transport.call(
                peer, "past", request, timeout=CALL_TIMEOUT_S, max_reply=Past.MAX_BYTES
            )
            told: Past = Past.decode(reply)
        except (TransportError, RemoteProtocolError):
            continue
        known = len(rows)
        for one in told.rounds:
            if one.round > newest and in_gaps(gaps, one.round) and _likely(one):
                rows.append(_row(one))
                newest = one.round
        if len(rows) == known:
            continue
        for sum_ in told.merged:
            if sum_.tokens <= MAX_MERGED:
                totals[sum_.peer] = max(totals.get(sum_.peer, 0), sum_.tokens)
        answered += 1
        if before in (newest + 1, ENDLESS_ROUNDS) or answered == MOST_TOLD:
            break
    if added := history.learn(rows, totals, before):
        await history.save(offload)
    return added


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
