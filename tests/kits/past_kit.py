"""Histories of nodes that tell each other of a run, over a simulated network."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from node.entry.past import ask_past
from node.monitor.event_log import EventLog
from node.monitor.events import Record, RoundDone
from node.monitor.history import MAX_ROWS, History
from protocols.identity import Identity, PeerId
from protocols.memory import virtual_time
from protocols.memory.transport import Link, MemoryNetwork, MemoryTransport
from protocols.messages import PastRound

ME, ALPS, MESA = (Identity.from_seed(bytes([n]) * 32).peer_id for n in range(1, 4))
OTHERS = [ALPS, MESA, *(Identity.from_seed(bytes([n]) * 32).peer_id for n in range(4, 14))]
RUN = "8c41"


def history(
    rounds: range, path: Path | None = None, run: str = RUN, max_rows: int = MAX_ROWS
) -> History:
    """As a node has it that was there in these rounds."""
    made, now = History(path, max_rows=max_rows), [1.7e9]
    made.begin(run)
    log = EventLog(clock=lambda: now[0])
    log.subscribe(made)
    for number in rounds:
        now[0] = 1.7e9 + 10 * number
        log.emit(
            RoundDone(
                round=number,
                members=3,
                live=4,
                loss=5 - number / 1000,
                validation_loss=4 - number / 1000 if number % 2 == 0 else None,
                consensus=0.1,
                islands={ALPS: {"loss": 3.0, "tokens": 10}, MESA: {"tokens": 5}},
            )
        )
    return made


def through(here: History, rounds: range) -> None:
    """The node is there in these rounds, too."""
    for number in rounds:
        islands: Any = {ALPS: {"loss": 3.0, "tokens": 10}, MESA: {"tokens": 5}}
        here(Record(number, 1.7e9 + 10 * number, RoundDone(round=number, islands=islands)))


def rounds_of(here: History) -> list[int]:
    """Which it has a row of."""
    rounds: list[int] = here.columns(2000)["columns"]["round"]
    return rounds


def sums(rounds: int) -> dict[str, int]:
    """Of so many rounds, each of which counts once."""
    return {ALPS: 10 * rounds, MESA: 5 * rounds}


def told(round_: int) -> PastRound:
    return PastRound(round_, 1.7e9, 1.0, 1.0, 1.0, None, None, None)


async def at_once(work: Callable[[], Any]) -> Any:
    return work()


def ask(
    mine: MemoryTransport, peers: list[PeerId], here: History, *, before: int
) -> Awaitable[int]:
    """:func:`ask_past`, with the file written on the spot."""
    return ask_past(mine, peers, here, at_once, before=before)


def play(
    main: Callable[[MemoryTransport, list[MemoryTransport]], Coroutine[Any, Any, None]],
) -> None:
    """``main`` gets this node's transport, and those of :data:`OTHERS`."""

    async def run() -> None:
        network = MemoryNetwork(seed=1, link=Link(latency=0.01))
        await main(network.join(ME), [network.join(peer) for peer in OTHERS])

    virtual_time.run(run())
