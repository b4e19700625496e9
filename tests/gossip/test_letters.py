"""Letters on the simulated network: whole, checked, bounded, and resumed where they break."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from letters_kit import SIZE, A, B, Box, C, with_boxes

from gossip.pairs.letters import PUSHES
from gossip.pairs.meeting import Post
from protocols.codecs import Encoded
from protocols.errors import RemoteRefused, TransportError
from protocols.memory.transport import Link


def test_a_letter_arrives_with_all_that_belongs_to_it() -> None:
    async def test(a: Box, b: Box, c: Box) -> None:
        await a.send(B, 3.0, answers=(2, 1), weight=0.25)
        (letter,) = b.arrived
        assert (letter.stamp.sender, letter.stamp.round, letter.stamp.exchange) == (A.peer_id, 4, 1)
        assert letter.stamp.answers == (2, 1)
        assert letter.weight == 0.25
        assert torch.equal(letter.body.data, a.body(3.0).data)
        assert b.letters.take(letter.stamp) is letter
        assert b.letters.take(letter.stamp) is None

    with_boxes(test)


def test_broken_letters_go_on_and_arrive_once() -> None:
    async def test(a: Box, b: Box, c: Box) -> None:
        for value in range(12):
            await a.send(B, float(value))
        assert len(b.arrived) == 12
        assert all(
            torch.equal(one.body.data, a.body(float(i)).data) for i, one in enumerate(b.arrived)
        )

    with_boxes(test, link=Link(latency=0.01, drop=0.3), keep_all=True, room=20)


def test_values_that_are_not_finite_are_refused() -> None:
    async def test(a: Box, b: Box, c: Box) -> None:
        data = torch.full((a.codec.encoded_size(0, SIZE),), 255, dtype=torch.uint8)
        body = Encoded(a.codec, data)
        with pytest.raises(RemoteRefused):
            await a.letters.send(Post(B.peer_id, 4, 0, None, awaited=False), body, timeout=5.0)
        assert b.arrived == []
        assert b.rejected

    with_boxes(test)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf"), 2.0**32 + 1])
def test_impossible_weights_are_refused(weight: float) -> None:
    async def test(a: Box, b: Box, c: Box) -> None:
        with pytest.raises(RemoteRefused):
            await a.send(B, 1.0, weight=weight)
        assert b.arrived == []

    with_boxes(test)


def test_what_weighs_more_than_it_may_is_refused() -> None:
    """As much as all islands may weigh: else one letter would take the place of all they learnt."""
    most = 2.0

    async def test(a: Box, b: Box, c: Box) -> None:
        nonlocal most
        with pytest.raises(RemoteRefused):
            await a.send(B, 1.0, weight=3.0)
        assert b.arrived == []
        most = 4.0
        await a.send(B, 1.0, weight=3.0)
        assert [letter.weight for letter in b.arrived] == [3.0]

    with_boxes(test, heaviest=lambda: most)


def test_another_codec_and_strangers_are_refused() -> None:
    async def test(a: Box, b: Box, c: Box) -> None:
        with pytest.raises(TransportError):
            await b.send(A, 1.0)  # int8, where bf16 is the run's
        a.strangers.add(C.peer_id)
        with pytest.raises(RemoteRefused, match="announce"):
            await c.send(A, 1.0)
        assert a.arrived == []

    with_boxes(test, codec="int8")


def test_the_newest_of_each_counts_and_room_is_bounded() -> None:
    async def test(a: Box, b: Box, c: Box) -> None:
        await a.send(B, 1.0)
        await a.send(B, 2.0)
        assert len(b.letters.held) == 1
        await c.send(B, 3.0)
        assert [stamp.sender for stamp in b.letters.held] == [C.peer_id]

    with_boxes(test, room=1)


def test_of_each_the_newest_opening_and_its_answers_to_two_letters_are_kept() -> None:
    async def test(a: Box, b: Box, c: Box) -> None:
        for answers in ((1, 0), (2, 0), None, (3, 0), (2, 0), None):
            await a.send(B, 1.0, answers=answers)
        assert [(s.number, s.answers) for s in b.letters.held] == [
            (3, (3, 0)),
            (4, (2, 0)),
            (5, None),
        ]

    with_boxes(test)


def test_an_answer_that_counts_makes_way_for_none_that_does_not() -> None:
    async def test(a: Box, b: Box, c: Box) -> None:
        b.in_vain = {(1, 0), (9, 0)}
        for answers in ((2, 0), (1, 0), (3, 0)):
            await a.send(B, 1.0, answers=answers)
        assert [stamp.answers for stamp in b.letters.held] == [(2, 0), (3, 0)]
        await a.send(B, 1.0, answers=(9, 0))
        assert [stamp.answers for stamp in b.letters.held] == [(2, 0), (3, 0)]
        assert len(b.arrived) == 4, "who waits for its letter is told that it is through"

    with_boxes(test)


def test_what_is_about_to_be_taken_makes_way_for_nothing() -> None:
    """It is answered before, so its sender has moved by it, or will."""

    async def test(a: Box, b: Box, c: Box) -> None:
        await a.send(B, 1.0)
        (first,) = b.arrived
        b.letters.claim([first.stamp])
        await a.send(B, 2.0)  # another opening of its sender
        await c.send(B, 3.0)  # and no room
        assert b.letters.take(first.stamp) is first
        assert [stamp.sender for stamp in b.letters.held] == [C.peer_id]
        await a.send(B, 4.0)
        assert [stamp.sender for stamp in b.letters.held] == [A.peer_id]

    with_boxes(test, room=1)


def test_where_none_may_be_lost_there_is_no_room_for_more() -> None:
    async def test(a: Box, b: Box, c: Box) -> None:
        await a.send(B, 1.0)
        await a.send(B, 2.0)
        with pytest.raises(RemoteRefused, match="room"):
            await c.send(B, 3.0)
        assert len(b.letters.held) == 2

    with_boxes(test, room=2, keep_all=True)


def test_each_letter_names_its_codec_and_any_that_the_run_allows_is_taken() -> None:
    async def test(a: Box, b: Box, c: Box) -> None:
        await a.send(B, 1.0, "int8")
        await a.send(B, 2.0, "fp32")
        await a.send(B, 3.0)
        assert [one.body.codec.name for one in b.arrived] == ["int8", "fp32", "bf16"]
        for value, letter in enumerate(b.arrived, 1):
            found = torch.empty(SIZE)
            letter.body.codec.decode(0, letter.body.data, found)
            assert found[[0, -1]].tolist() == pytest.approx([value, value], rel=0.01)
        with pytest.raises(RemoteRefused):
            await a.send(B, 1.0, "fp16")
        assert "fp16, not in" in b.rejected[-1]

    with_boxes(test, codecs=("fp32", "bf16", "int8"))


def test_broken_letters_of_any_codec_go_on() -> None:
    async def test(a: Box, b: Box, c: Box) -> None:
        names = ["fp32", "int8", "bf16"] * 4
        for value, name in enumerate(names):
            await a.send(B, float(value), name)
        assert [one.body.codec.name for one in b.arrived] == names

    more: dict[str, Any] = {"codecs": ("fp32", "bf16", "int8"), "keep_all": True, "room": 20}
    with_boxes(test, link=Link(latency=0.01, drop=0.3), **more)


def test_nothing_is_kept_of_letters_that_have_come() -> None:
    async def test(a: Box, b: Box, c: Box) -> None:
        for value in range(3):
            await a.send(B, float(value))
        assert not b.letters.transfers.receiving

    with_boxes(test)


def test_a_peer_has_a_bounded_number_of_letters_on_their_way() -> None:
    async def test(a: Box, b: Box, c: Box) -> None:
        sent = [a.send(B, float(value)) for value in range(PUSHES + 3)]
        ended = await asyncio.gather(*sent, return_exceptions=True)
        refused = [one for one in ended if isinstance(one, RemoteRefused)]
        assert [one.code for one in refused] == ["busy"] * 3
        assert len(b.arrived) == PUSHES
        await a.send(B, 9.0)

    with_boxes(test, keep_all=True, room=20)
