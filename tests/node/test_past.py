"""The past of a run, told to who comes later: what charts are drawn from, and no more than that."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.entry.past import ask_past, tell_past
from node.monitor.event_log import EventLog
from node.monitor.events import Record, RoundDone
from node.monitor.history import History
from protocols.bounds import MAX_PEERS
from protocols.identity import Identity, PeerId
from protocols.memory import virtual_time
from protocols.memory.transport import Link, MemoryNetwork, MemoryTransport
from protocols.messages import MAX_PAST, Merged, Past, PastRequest, PastRound
from protocols.wire import MAX_INT

ME, ALPS, MESA = (Identity.from_seed(bytes([n]) * 32).peer_id for n in range(1, 4))
RUN = "8c41"


def history(rounds: range, path: Path | None = None, run: str = RUN) -> History:
    """As a node has it that was there in these rounds."""
    made, now = History(path), [1.7e9]
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


def play(
    main: Callable[[MemoryTransport, list[MemoryTransport]], Coroutine[Any, Any, None]],
) -> None:
    async def run() -> None:
        network = MemoryNetwork(seed=1, link=Link(latency=0.01))
        await main(network.join(ME), [network.join(ALPS), network.join(MESA)])

    virtual_time.run(run())


def test_charts_of_a_newcomer_begin_where_the_run_does(tmp_path: Path) -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        tell_past(others[0], history(range(30)))
        here = history(range(28, 31), tmp_path / "history.jsonl")
        reader = here.added
        assert await ask_past(mine, [ALPS], here, before=28) == 28
        columns = here.columns()["columns"]
        assert columns["round"] == list(range(31))
        assert columns["validation_loss"][:3] == [4.0, None, 3.998]
        assert columns["loss"][10] == 4.99
        assert columns["utilisation"][10] is None  # nobody here knows
        assert here.since(reader) is None  # a page that is open asks for all of it
        assert here.totals == {ALPS: 300, MESA: 150}
        again = History(tmp_path / "history.jsonl")
        again.begin(RUN)
        assert again.columns()["columns"]["round"] == list(range(31))
        assert again.totals == here.totals

    play(main)


def test_a_long_run_is_told_in_few_rows() -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        tell_past(others[0], history(range(3000)))
        here = History()
        here.begin(RUN)
        taken = await ask_past(mine, [ALPS], here, before=2900)
        assert MAX_PAST // 2 <= taken <= MAX_PAST
        rounds = here.columns(2000)["columns"]["round"]
        assert rounds[0] < 10
        assert rounds[-1] == 2899
        assert rounds == sorted(set(rounds))

    play(main)


def test_who_was_there_from_the_begin_asks_nobody() -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        asked = list[PeerId]()

        async def past(peer: PeerId, body: bytes) -> bytes:
            asked.append(peer)
            return b""

        others[0].on_call("past", past)
        assert await ask_past(mine, [ALPS], history(range(5)), before=5) == 0
        fresh = History()
        fresh.begin(RUN)
        assert await ask_past(mine, [ALPS], fresh, before=0) == 0
        assert asked == []

    play(main)


def test_the_next_one_is_asked_where_one_does_not_know() -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        tell_past(others[0], history(range(9), run="ffff"))  # takes part in another run
        tell_past(others[1], history(range(9)))
        here = history(range(6, 7))
        assert await ask_past(mine, [ALPS, MESA], here, before=6) == 6

    play(main)


def told(round_: int, **more: Any) -> PastRound:
    values = {
        "time": 1.7e9, "members": 1.0, "live": 1.0, "loss": 1.0, "validation_loss": None,
        "consensus": None, "consensus_after": None,
    }  # fmt: skip
    return PastRound(round=round_, **(values | more))


@pytest.mark.parametrize(
    "rounds",
    [
        (),
        (told(0, loss=1e300),),
        (told(0, time=9e15),),
        (told(0, time=-5.0),),
        (told(7), told(8)),  # not of the past
    ],
)
def test_what_cannot_be_drawn_is_left_out(rounds: tuple[PastRound, ...]) -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        async def lie(peer: PeerId, body: bytes) -> bytes:
            return Past(rounds, (Merged(ALPS, 10**15),)).encode()

        others[0].on_call("past", lie)
        here = history(range(6, 8))
        before = json.dumps([here.columns(), here.totals])
        assert await ask_past(mine, [ALPS], here, before=6) == 0
        assert json.dumps([here.columns(), here.totals]) == before

    play(main)


def test_rounds_out_of_order_are_left_out() -> None:
    here = history(range(6, 8))
    rows: list[dict[str, float | None]] = [{"round": n, "time": 1.0} for n in (0, 2, 1, 2, 5, 6)]
    assert here.prepend(rows, {}) == 3
    assert here.columns()["columns"]["round"] == [0, 2, 5, 6, 7]
    assert here.prepend(rows, {}) == 0


def test_there_is_always_room_for_what_comes() -> None:
    small = History(max_rows=16)
    small.begin(RUN)
    assert small.prepend([{"round": n, "time": 1.0} for n in range(40)], {}) == 8
    assert small.first == 32


_floats = st.floats(allow_nan=False, allow_infinity=False)
_counts = st.one_of(st.integers(0, MAX_INT), st.sampled_from([10**15, MAX_INT]))
_optional = st.none() | _floats
_told = st.builds(
    PastRound,
    round=st.integers(0, 5) | _counts,
    time=st.just(1.7e9) | _floats,
    members=_floats,
    live=_floats,
    loss=_optional,
    validation_loss=_optional,
    consensus=_optional,
    consensus_after=_optional,
)


@given(st.lists(_told, max_size=8), st.dictionaries(st.sampled_from([ALPS, MESA]), _counts))
def test_whatever_one_peer_tells_can_be_told_to_the_next(
    rounds: list[PastRound], totals: dict[PeerId, int]
) -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        async def lie(peer: PeerId, body: bytes) -> bytes:
            merged = tuple(Merged(peer, tokens) for peer, tokens in totals.items())
            return Past((told(0), *rounds), merged).encode()

        others[0].on_call("past", lie)
        here = history(range(6, 8))
        assert await ask_past(mine, [ALPS], here, before=6) >= 1
        assert max(here.totals.values()) <= 10**15
        islands = {ALPS: {"loss": 1.7e308, "tokens": 2**40}}
        here(Record(9, 1.7e9, RoundDone(round=8, loss=1.7e308, islands=islands)))
        tell_past(mine, here)
        request = PastRequest(bytes.fromhex(RUN), MAX_INT, MAX_PAST).encode()
        reply = await others[1].call(ME, "past", request, timeout=9, max_reply=Past.MAX_BYTES)
        assert Past.decode(reply).rounds

    play(main)


def test_the_largest_past_has_room_in_its_message() -> None:
    one = PastRound(MAX_INT, *(1.1,) * 7)
    islands = tuple(Merged(ALPS, MAX_INT) for _ in range(MAX_PEERS))
    assert len(Past((one,) * MAX_PAST, islands).encode()) < Past.MAX_BYTES
