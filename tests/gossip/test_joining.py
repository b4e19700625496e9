"""Sums of groups at an owner: whatever is brought by whom, results say exactly what is merged."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossip.exchange.buffers import Whole
from gossip.exchange.group_sums import JointMerge, magnitude, mark_of, mark_size, marked
from gossip.exchange.merging import Contributions
from gossip.exchange.relaying import GroupMerge
from protocols.codecs import CHUNK, RangeCodec
from protocols.errors import Late, Malformed, NonFinite, RemoteProtocolError, RemoteRefused
from protocols.identity import PeerId

CHUNKS = 3
SIZE = CHUNKS * CHUNK
ME, A, B, C, D, E, F = (PeerId(name) for name in ("me", "a", "b", "c", "d", "e", "f"))
GROUPS = {A: (A, B, C), D: (D, E)}  # by relay; F comes by itself
WEIGHTS = {ME: 3.0, A: 1.0, B: 2.0, C: 5.0, D: 1.0, E: 4.0, F: 16.0}
TOTAL = sum(WEIGHTS.values())
SHARES = {peer: weight / TOTAL for peer, weight in WEIGHTS.items()}
VALUES = {peer: float(3**number) for number, peer in enumerate(WEIGHTS)}


class Own:
    """My own contribution: one value throughout, as everybody's."""

    def delta(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        return out.fill_(VALUES[ME])


class Scene:
    """A merge, and what was told of relays."""

    def __init__(
        self,
        codec: str = "fp32",
        limits: dict[PeerId, float] | None = None,
        scales: dict[PeerId, float] | None = None,
    ) -> None:
        self.told: list[tuple[PeerId, tuple[PeerId, ...], RemoteProtocolError]] = []
        self.codec = RangeCodec(codec, dense=SIZE)
        self.posted: list[Callable[[], None]] = []
        self.merge = JointMerge(
            self.codec,
            0,
            SIZE,
            Contributions(ME, SHARES, set(WEIGHTS), scales or {}, limits or {}),
            collected=GROUPS,
            dropped=lambda *what: self.told.append(what),
            whole=Whole(SIZE),
            post=self.posted.append,
            begun=lambda: None,
            finished=lambda: None,
        )
        self.merge.settle(Own())

    def bring(self, peer: PeerId) -> None:
        """The next chunk of a member's own slice."""
        self.merge.add(peer, self.merge.reached(peer), self.encoded(VALUES[peer]))

    def bring_sum(self, relay: PeerId, index: int, present: set[PeerId]) -> None:
        """A chunk of a group's sum."""
        brought = GROUPS[relay]
        total = sum(SHARES[peer] * VALUES[peer] for peer in brought if peer in present)
        data = self.encoded(total / magnitude(SHARES[peer] for peer in brought))
        mark = mark_of([peer in present for peer in brought])
        self.merge.add_sum(relay, index, data, mark)

    def encoded(self, value: float) -> torch.Tensor:
        chunk = self.merge.chunks[0]
        data = torch.empty(chunk.size, dtype=torch.uint8)
        self.codec.encode_chunk(chunk, torch.full((CHUNK,), value), data)
        return data

    def end(self) -> None:
        """Nothing more comes of anybody."""
        for relay in GROUPS:
            self.merge.drop(relay, Late("over"))
        for peer in WEIGHTS:
            self.merge.give_up(peer)
        while self.posted:
            self.posted.pop()()
        assert self.merge.done

    def is_true(self) -> bool:
        """Whether every chunk is the mean of those who are said to be in it."""
        found = torch.empty(SIZE)
        self.codec.decode(0, self.merge.result, found)
        for index in range(CHUNKS):
            stop = (index + 1) * CHUNK
            there = [peer for peer in WEIGHTS if self.merge.counted(peer) >= stop]
            weight = sum(WEIGHTS[peer] for peer in there)
            wanted = sum(WEIGHTS[peer] * VALUES[peer] for peer in there) / weight
            if not math.isclose(found[stop - 1].item(), wanted, rel_tol=1e-5):
                return False
        return True


PEERS = st.sampled_from([A, B, C, D, E, F])
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("sum"), st.sampled_from([A, D])),
        st.tuples(st.sampled_from(["bring", "give up", "lose"]), PEERS),
        st.tuples(st.just("drop"), st.sampled_from([A, D])),
    ),
    max_size=24,
)


@settings(max_examples=120, deadline=None)
@given(ACTIONS)
def test_whatever_happens_each_chunk_is_the_mean_of_those_said_to_be_in_it(
    actions: list[tuple[str, PeerId]],
) -> None:
    scene = Scene()
    merge = scene.merge
    sent = dict.fromkeys(GROUPS, 0)
    held = {relay: set(peers) for relay, peers in GROUPS.items()}  # whom each relay still has
    for action, peer in actions:
        try:
            if action == "sum" and sent[peer] < CHUNKS:
                scene.bring_sum(peer, sent[peer], held[peer])
                sent[peer] += 1
            elif action == "bring" and merge.reached(peer) < CHUNKS:
                scene.bring(peer)
            elif action == "lose":  # by its relay, which gives it up
                for members in held.values():
                    members.discard(peer)
            elif action == "give up":
                merge.give_up(peer)
            elif action == "drop":
                merge.drop(peer, Late("too slow"))
        except RemoteRefused:
            continue
    scene.end()
    assert scene.is_true()


def test_all_sums_in_one_mean() -> None:
    scene = Scene()
    assert [scene.merge.elements_by(relay) for relay in GROUPS] == [0, 0]
    for index in range(CHUNKS):
        scene.bring(F)
        assert scene.merge.relays_done == 0
        for relay, peers in GROUPS.items():
            scene.bring_sum(relay, index, set(peers))
            assert scene.merge.elements_by(relay) == (index + 1) * CHUNK
        assert scene.merge.merged == index + 1, "as soon as all have come"
    assert scene.merge.relays_done == len(GROUPS)
    while scene.posted:
        scene.posted.pop()()
    assert scene.merge.done
    assert all(scene.merge.counted(peer) == SIZE for peer in WEIGHTS)
    assert scene.is_true()
    assert scene.told == []


def test_a_group_whose_relay_is_dropped_goes_on_where_it_stood() -> None:
    scene = Scene()
    scene.bring_sum(A, 0, {A, B, C})
    assert scene.merge.waits_for() == {F}
    assert scene.merge.waits_for_relays() == {A, D}
    slow = Late("too slow")
    assert scene.merge.brings(A)
    scene.merge.drop(A, slow)
    assert not scene.merge.brings(A)
    assert scene.told == [(A, (A, B, C), slow)]
    assert scene.merge.waits_for() == {A, B, C, F}
    with pytest.raises(RemoteRefused, match="late"):
        scene.bring_sum(A, 1, {A, B, C})
    for _ in range(CHUNKS - 1):
        for peer in (A, B, C):
            scene.bring(peer)
    scene.end()
    assert [scene.merge.counted(peer) for peer in (A, B, C)] == [SIZE] * 3
    assert scene.is_true()


def test_what_came_by_itself_is_not_taken_again_in_a_sum() -> None:
    scene = Scene()
    scene.bring(B)  # its relay cannot be reached from it
    with pytest.raises(RemoteRefused, match="late"):
        scene.bring_sum(A, 0, {A, B, C})
    assert [(relay, members) for relay, members, _ in scene.told] == [(A, (A, C))]
    assert scene.merge.reached(A) == 0


def test_a_relay_may_go_on_without_one_that_comes_by_itself() -> None:
    scene = Scene()
    scene.bring(B)
    scene.bring_sum(A, 0, {A, C})
    assert (scene.told, scene.merge.open_to(B)) == ([], True)
    scene.end()
    assert scene.is_true()


def test_whom_its_relay_has_given_up_does_not_come_through_it_again() -> None:
    """It has been asked for its slice, and sends the same chunk by itself."""
    scene = Scene()
    scene.bring_sum(A, 0, {A, C})
    assert [(relay, members) for relay, members, _ in scene.told] == [(A, (B,))]
    scene.bring(B)
    with pytest.raises(RemoteRefused, match="late"):
        scene.bring_sum(A, 1, {A, B, C})
    scene.end()
    assert scene.is_true()


@pytest.mark.parametrize("piece", [100_003, 2**20])
def test_sums_come_in_pieces_of_any_length_each_with_its_mark(piece: int) -> None:
    scene = Scene()
    drain = scene.merge.sum_drain(D, 0)
    value = sum(SHARES[peer] * VALUES[peer] for peer in GROUPS[D])
    data = scene.encoded(value / magnitude(SHARES[peer] for peer in GROUPS[D]))
    one = data.numpy().tobytes() + mark_of([True, True])
    body = memoryview(one * CHUNKS)
    assert drain.length == len(body)
    while body:
        room = drain.room()[:piece]
        room[:], body = body[: len(room)], body[len(room) :]
        drain.took(len(room))
    assert scene.merge.arrived == {D: drain.length}
    assert [scene.merge.elements(peer) for peer in GROUPS[D]] == [SIZE] * 2
    assert scene.merge.sum_drain(A, 1).length == (CHUNKS - 1) * len(one)
    scene.end()
    assert scene.is_true()


def test_of_a_relay_that_was_dropped_the_rest_of_a_chunk_is_refused() -> None:
    scene = Scene()
    drain = scene.merge.sum_drain(D, 0)
    drain.room()
    drain.took(10)
    scene.merge.drop(D, Late("it trickles"))
    drain.room()
    with pytest.raises(RemoteRefused, match="late"):
        drain.took(1)
    assert scene.merge.arrived == {D: 10}


@pytest.mark.parametrize("what", ["nan", "too long", "before its turn", "a mark of nobody"])
def test_sums_that_are_refused_drop_their_relay(what: str) -> None:
    scene = Scene(limits={peer: VALUES[peer] * SIZE**0.5 for peer in WEIGHTS})
    brought, data = GROUPS[D], scene.encoded(1.0)
    mark, index = mark_of([True, True]), 0
    if what == "nan":
        data = data.clone()
        data[:4] = 255
    elif what == "too long":  # than the longest of the group, times what it is divided by
        data = scene.encoded(2.0 * VALUES[E] * SIZE**0.5)
    elif what == "before its turn":
        index = 1
    else:
        mark = b"\xff"
    with pytest.raises((NonFinite, Malformed)):
        scene.merge.add_sum(D, index, data, mark)
    if what != "before its turn":
        assert [relay for relay, _, _ in scene.told] == [D]
    assert all(scene.merge.reached(peer) == 0 for peer in brought)
    scene.end()
    assert scene.is_true()


def test_what_is_scaled_down_makes_a_shorter_sum() -> None:
    limits = {peer: VALUES[peer] * SIZE**0.5 for peer in WEIGHTS}
    scene = Scene(limits=limits, scales={D: 0.25, E: 0.25})
    mark, within = mark_of([True, True]), 0.25 * VALUES[E]
    scene.merge.add_sum(D, 0, scene.encoded(within), mark)
    with pytest.raises(Malformed, match="longer than all that is in it"):
        scene.merge.add_sum(D, 1, scene.encoded(2.0 * within), mark)


def test_a_sum_that_is_too_long_in_all_its_chunks_together_drops_its_relay() -> None:
    """Each of them alone is within what the group has announced for all three."""
    scene = Scene(limits={peer: VALUES[peer] * SIZE**0.5 for peer in WEIGHTS})
    data, mark = scene.encoded(1.3 * VALUES[E]), mark_of([True, True])
    scene.merge.add_sum(D, 0, data, mark)
    with pytest.raises(Malformed, match="longer than all that is in it"):
        scene.merge.add_sum(D, 1, data, mark)
    assert [relay for relay, _, _ in scene.told] == [D]
    assert scene.merge.reached(E) == 1


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_marks_name_who_is_there(present: list[bool]) -> None:
    members = [PeerId(str(number)) for number in range(len(present))]
    mark = mark_of(present)
    assert len(mark) == mark_size(len(present))
    assert marked(mark, members) == [p for p, here in zip(members, present, strict=True) if here]


def test_magnitudes_are_powers_of_two_above_the_sum() -> None:
    for shares in ([0.25, 0.25], [0.1], [1.0], [1e-9, 1e-9]):
        found = magnitude(shares)
        assert math.frexp(found)[0] == 0.5
        assert sum(shares) <= found <= 2 * sum(shares)


def test_a_relay_marks_its_own_values_only_where_they_are_in_the_sum() -> None:
    """Memory that was sound when it was looked at, and has changed since: it is no number now."""

    class Changed(Own):
        def delta(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
            return super().delta(start, stop, out) if not start else out.fill_(math.nan)

    merge = GroupMerge(
        RangeCodec("fp32", dense=SIZE),
        0,
        SIZE,
        Contributions(ME, SHARES, expected={ME, A}),
        brought=(ME, A),
        whole=Whole(SIZE),
        post=lambda go: go(),
        begun=lambda: None,
        finished=lambda: None,
    )
    for index in range(CHUNKS):
        merge.add(A, index, torch.full((CHUNK,), VALUES[A]).view(torch.uint8))
    merge.settle(Changed())
    assert [marked(mark, merge.brought) for mark in merge.marks] == [[ME, A], [A], [A]]
    sums = merge.result.view(torch.float32).view(CHUNKS, CHUNK)[:, 0]
    divisor = magnitude([SHARES[ME], SHARES[A]])
    mine, other = (SHARES[peer] * VALUES[peer] / divisor for peer in (ME, A))
    assert sums.tolist() == pytest.approx([mine + other, other, other])
