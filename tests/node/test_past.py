"""The past of a run, told to who comes later: what charts are drawn from, and no more than that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from past_kit import ALPS, ME, MESA, OTHERS, RUN, ask, history, play, through

from node.entry.past import tell_past
from node.monitor.events import Record, RoundDone
from node.monitor.history import History
from protocols.bounds import MAX_PEERS
from protocols.identity import Identity, PeerId
from protocols.memory.transport import MemoryTransport
from protocols.messages import MAX_PAST, Merged, Past, PastRequest, PastRound
from protocols.wire import MAX_INT


def test_charts_of_a_newcomer_begin_where_the_run_does(tmp_path: Path) -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        tell_past(others[0], history(range(30)))
        here = history(range(28, 31), tmp_path / "history.jsonl")
        reader = here.added
        assert await ask(mine, [ALPS], here, before=28) == 28
        columns = here.columns()["columns"]
        assert columns["round"] == list(range(31))
        assert columns["validation_loss"][:3] == [4.0, None, 3.998]
        assert columns["loss"][10] == 4.99
        assert columns["utilisation"][10] is None  # nobody here knows
        assert here.since(reader) is None  # a page that is open asks for all of it
        assert here.totals == {ALPS: 310, MESA: 155}
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
        taken = await ask(mine, [ALPS], here, before=2900)
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
        assert await ask(mine, [ALPS], history(range(5)), before=5) == 0
        fresh = History()
        fresh.begin(RUN)
        assert await ask(mine, [ALPS], fresh, before=0) == 0
        assert asked == []

    play(main)


def test_the_next_one_is_asked_where_one_does_not_know() -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        tell_past(others[0], history(range(9), run="ffff"))  # takes part in another run
        tell_past(others[1], history(range(9)))
        here = history(range(6, 7))
        assert await ask(mine, [ALPS, MESA], here, before=6) == 6

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
        assert await ask(mine, [ALPS], here, before=6) == 0
        assert json.dumps([here.columns(), here.totals]) == before

    play(main)


def test_islands_that_a_stranger_has_made_up_take_no_room_of_others() -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        made_up = [Identity.from_seed(n.to_bytes(32)).peer_id for n in range(1000, 2100)]
        for number, other in enumerate(others[:3]):
            names = made_up[number * MAX_PEERS : (number + 1) * MAX_PEERS]
            lie = Past((told(number),), tuple(Merged(name, 2) for name in names)).encode()

            async def past(peer: PeerId, body: bytes, lie: bytes = lie) -> bytes:
                return lie

            other.on_call("past", past)
        here = history(range(0))
        assert await ask(mine, OTHERS[:3], here, before=9) == 3
        through(here, range(9, 30))
        assert here.totals[ALPS] == 210
        assert sum(here.totals.values()) == 2200 + 21 * 15

    play(main)


def test_rounds_out_of_order_are_left_out() -> None:
    here = history(range(6, 8))
    rows: list[dict[str, float | None]] = [{"round": n, "time": 1.0} for n in (0, 2, 1, 2, 5, 6)]
    assert here.learn(rows, {}, 6) == 3
    assert here.columns()["columns"]["round"] == [0, 2, 5, 6, 7]
    assert here.learn(rows, {}, 6) == 0


def test_there_is_always_room_for_what_comes() -> None:
    small = History(max_rows=16)
    small.begin(RUN)
    small.expect(40)
    assert small.learn([{"round": n, "time": 1.0} for n in range(40)], {}, 40) == 8
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
        assert await ask(mine, [ALPS], here, before=6) >= 1
        assert max(here.totals.values()) <= 10**15
        islands = {ALPS: {"loss": 1.7e308, "tokens": 2**40}}
        here(Record(9, 1.7e9, RoundDone(round=8, loss=1.7e308, islands=islands)))
        tell_past(mine, here)
        request = PastRequest(bytes.fromhex(RUN), 0, MAX_INT, MAX_PAST).encode()
        reply = await others[1].call(ME, "past", request, timeout=9, max_reply=Past.MAX_BYTES)
        assert Past.decode(reply).rounds

    play(main)


def test_the_largest_past_has_room_in_its_message() -> None:
    one = PastRound(MAX_INT, *(1.1,) * 7)
    islands = tuple(Merged(ALPS, MAX_INT) for _ in range(MAX_PEERS))
    assert len(Past((one,) * MAX_PAST, islands).encode()) < Past.MAX_BYTES
