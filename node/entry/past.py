"""How a run went before this node came: asked of a peer, and told to whoever comes later.

Charts are to begin where the run does, on every node. What a peer tells of the past is for people
to look at and is proven by nothing: no decision is taken by it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable

from node.monitor.history import History
from node.monitor.views import can_be_drawn
from protocols.bounds import MAX_PEERS
from protocols.errors import RemoteProtocolError, RemoteRefused, TransportError
from protocols.identity import PeerId
from protocols.messages import MAX_PAST, Merged, Past, PastRequest, PastRound
from protocols.transport import Transport

CALL_TIMEOUT_S = 10.0
MAX_MERGED = 10**15  # tokens of one island: whoever says more has made it up
_COUNTS = ("members", "live")
_FIELDS = tuple(item.name for item in dataclasses.fields(PastRound))


def tell_past(transport: Transport, history: History) -> None:
    """Answer ``past`` with what ``history`` has of its run."""

    async def answer(peer: PeerId, body: bytes) -> bytes:
        wanted: PastRequest = PastRequest.decode(body)
        if wanted.run.hex() != history.run:
            raise RemoteRefused("run", "this node takes part in another")
        found = history.columns(min(wanted.rows, MAX_PAST), before=wanted.before)["columns"]
        rows = zip(*(found[name] for name in _FIELDS), strict=True)
        most = sorted(history.totals.items(), key=lambda item: -item[1])[:MAX_PEERS]
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
    transport: Transport, peers: Iterable[PeerId], history: History, *, before: int
) -> int:
    """Ask peers one after the other until one knows more; the number of rows that were added."""
    if not before or history.first == 0:
        return 0
    request = PastRequest(bytes.fromhex(history.run), before, MAX_PAST).encode()
    for peer in peers:
        try:
            reply = await transport.call(
                peer, "past", request, timeout=CALL_TIMEOUT_S, max_reply=Past.MAX_BYTES
            )
            told: Past = Past.decode(reply)
        except (TransportError, RemoteProtocolError):
            continue
        rows = [_row(one) for one in told.rounds if _likely(one)]
        totals: dict[str, int] = {
            one.peer: one.tokens for one in told.merged if one.tokens <= MAX_MERGED
        }
        if rows and (added := history.prepend(rows, totals)):
            return added
    return 0


def _row(one: PastRound) -> dict[str, float | None]:
    row: dict[str, float | None] = {name: getattr(one, name) for name in _FIELDS}
    return row | {"outcome": 0.0, "failed": 0.0}


def _likely(one: PastRound) -> bool:
    """Whether it can be drawn: a stranger may say anything."""
    known = [value for name in _FIELDS if (value := getattr(one, name)) is not None]
    return all(map(can_be_drawn, known)) and 0 < one.time < time.time() + 86_400
