"""How far islands are apart: fragments added up, who is compared, and what a merge left."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch

from gossip.membership.sketch import SIZE, sketch, written
from gossip.membership.spread import (
    FARTHEST,
    REMEMBERED,
    Published,
    Spread,
    WholeSketch,
    in_pairs,
    turn_of,
)
from protocols.identity import PeerId

RUN = b"r" * 32
CUTS = (0, 40_000, 41_000, 130_000, 200_003)  # four fragments of unlike size


class Said:
    """What of an announcement matters here."""

    role = "island"

    def __init__(self, peer: str, turn: int, data: bytes, round_: int = 0) -> None:
        self.peer, self.sketch_round, self.sketch, self.round = peer, turn, data, round_


def names(many: Iterable[str]) -> set[PeerId]:
    return {PeerId(one) for one in many}


def learn(published: Published, *said: Any) -> None:
    for one in said:
        published.learn(one)


def data(*values: float) -> bytes:
    row = torch.zeros(SIZE)
    row[: len(values)] = torch.tensor(values)
    return bytes(row.numpy().tobytes())


def publish(vector: torch.Tensor, rounds: list[int]) -> tuple[int, bytes]:
    """An island's sketch after it took a snapshot of every fragment, in the rounds given."""
    whole, found = WholeSketch(len(CUTS) - 1), None
    for fragment, round_ in enumerate(rounds):
        piece = vector[CUTS[fragment] : CUTS[fragment + 1]]
        found = whole.add(fragment, round_, sketch(piece, RUN, start=CUTS[fragment]))
        assert (found is None) == (fragment < len(rounds) - 1), "not before all are there"
    assert found is not None
    return found


def test_distances_of_a_model_in_fragments_are_those_of_the_whole() -> None:
    """Within 15 %: of islands that differ in one fragment only as well."""
    generator = torch.Generator().manual_seed(5)
    centre = torch.randn(CUTS[-1], generator=generator)
    rows = centre + 0.01 * torch.randn(5, CUTS[-1], generator=generator)
    rows[4] = rows[0]
    rows[4, CUTS[2] : CUTS[3]] += 0.05 * torch.randn(CUTS[3] - CUTS[2], generator=generator)
    published = Published()
    for number, row in enumerate(rows):
        learn(published, Said(f"p{number}", *publish(row, [7, 7, 6, 6])))
    spread = published.of_turn(turn_of([7, 7, 6, 6]), names(f"p{n}" for n in range(5)))
    norm = rows.mean(0).norm()
    exact = (rows - rows.mean(0)).norm(dim=1) / norm
    pairs = torch.cdist(rows.double(), rows.double()).fill_diagonal_(torch.inf).min(dim=1).values
    for number in range(5):
        peer: Any = f"p{number}"
        assert spread.to_mean[peer] == pytest.approx(exact[number].item(), rel=0.15)
        assert spread.apart[peer] == pytest.approx((pairs[number] / norm).item(), rel=0.15)
    assert spread.before == pytest.approx(exact.mean().item(), rel=0.15)


def test_estimates_of_many_draws_are_within_fifteen_percent() -> None:
    """Of a model in fragments; the signs of a run are one draw, so over the ids of runs."""
    generator = torch.Generator().manual_seed(6)
    difference = torch.randn(CUTS[-1], generator=generator)
    exact, missed = difference.norm().item(), 0
    for run in range(200):
        name = run.to_bytes(32, "big")
        total = torch.zeros(SIZE)
        for start, stop in pairwise(CUTS):
            piece = sketch(difference[start:stop], name, start=start)
            total += torch.frombuffer(bytearray(piece), dtype=torch.float32)
        missed += abs(total.norm().item() / exact - 1) > 0.15
    assert missed <= 2


def test_only_sketches_of_the_same_rounds_are_compared() -> None:
    published = Published()
    everybody: Any = names("abc")
    learn(published, Said("a", 5, data(1.0)), Said("b", 5, data(1.0, 2.0)), Said("c", 4, data(9.0)))
    assert set(published.of_turn(5, everybody).to_mean) == {"a", "b"}
    assert set(published.newest(everybody).to_mean) == everybody
    assert published.usual_turn(everybody) == 5
    assert published.of_turn(4, everybody).before is None, "one alone is nowhere apart"
    assert published.of_turn(None, everybody) == Spread()


def test_who_is_ahead_by_a_fragment_is_remembered_where_it_was() -> None:
    published = Published()
    for turn in range(REMEMBERED):
        learn(published, Said("a", turn, data(float(turn))), Said("b", turn, data(1.0, turn)))
    learn(published, Said("a", REMEMBERED, data(7.0)))
    assert set(published.of_turn(REMEMBERED - 1, names("ab")).to_mean) == {"a", "b"}
    assert published.of_turn(0, names("ab")).before is None, "no longer"


def test_rounds_have_names_of_their_own() -> None:
    assert turn_of([12]) == 12
    assert turn_of([5, 4, 5]) != turn_of([5, 5, 4])
    assert 0 <= turn_of([5, 4, 5]) < 2**48


@pytest.mark.parametrize("bad", [b"", b"x" * 7, data(float("nan"))])
def test_what_is_no_sketch_is_passed_over(bad: bytes) -> None:
    published = Published()
    learn(published, Said("a", 1, bad), Said("b", 1, data(1.0)), Said("c", 1, data(2.0)))
    assert set(published.of_turn(1, names("abc")).to_mean) == {"b", "c"}
    assert WholeSketch(1).add(0, 1, bad) is None


def test_in_pairs_a_sketch_is_as_old_as_rounds_were_begun_since_its_oldest_part() -> None:
    whole, piece = WholeSketch(2, paired=True), data(1.0)

    def turn(fragment: int, round_: int) -> int:
        found = whole.add(fragment, round_, piece)
        assert found is not None
        return found[0]

    assert whole.add(0, 3, piece) is None
    assert [turn(1, 3), turn(0, 9), turn(1, 10), turn(0, 15), turn(1, 15)] == [3, 9, 10, 15, 15]
    assert [turn(1, 15) for _ in range(5)] == [15] * 5, "ranks that start again begin no round"
    assert [turn(0, round_) for round_ in range(16, 21)] == [16, 16, 17, 17, 18]


def test_in_pairs_whoever_is_rounds_ahead_is_compared_and_whose_sketch_is_old_is_not() -> None:
    me = PeerId("a")
    said: Any = [
        Said("a", 10, data(1.0), 10),
        Said("b", 9, data(2.0), 10),
        Said("far", 400, data(9.0), 401),
        Said("silent", 7, data(50.0), 10),  # has counted on since, and shown nothing
        Said("new", 10, b"", 10),
    ]
    spread, after = in_pairs(said, me, [[]])
    assert spread.apart.keys() == names(["a", "b", "far"])
    assert spread.apart[PeerId("far")] == pytest.approx(7 / 4)
    assert after == pytest.approx(spread.before), "nobody was met"
    _, after = in_pairs(said, me, [[PeerId("far")]])
    assert after == pytest.approx((1 + 2 + 1) / 3 / 4)  # 5, 2 and 5 about their mean
    # by fragment, with distances that lie evenly over the model: 3, 2 and 5 before
    _, after = in_pairs(said, me, [[PeerId("far")], []], [0.25, 0.75])
    parts = [(0.25 * a**2 + 0.75 * b**2) ** 0.5 for a, b in ((1, 3), (2, 2), (1, 5))]
    assert after == pytest.approx(sum(parts) / 3 / 4)
    assert in_pairs(said[1:], me, [[]]) == (Spread(), None), "its own is not there yet"


def drawn(count: int) -> dict[PeerId, torch.Tensor]:
    """Sketches of islands that trained from one start."""
    generator = torch.Generator().manual_seed(7)
    centre = torch.randn(SIZE, generator=generator)
    rows = centre + 0.01 * torch.randn(count, SIZE, generator=generator)
    return {PeerId(f"p{number}"): row for number, row in enumerate(rows)}


@pytest.mark.parametrize("count", [3, 4, 5, 9, 16])
@pytest.mark.parametrize("lie", ["far away", "the others' opposite", "as far as is believed"])
def test_who_makes_a_sketch_up_is_seen_and_moves_no_figure_of_the_others(
    count: int, lie: str
) -> None:
    honest, liar = drawn(count - 1), PeerId("liar")
    known = Spread.of(honest)
    total = torch.stack(list(honest.values())).sum(0)
    made_up = {
        "far away": torch.full((SIZE,), -3e38),
        "the others' opposite": -total,
        "as far as is believed": total / (count - 1) + 9 * 0.01 * torch.linspace(-1.7, 1.7, SIZE),
    }[lie]
    spread = Spread.of({liar: made_up, **honest})
    assert spread.apart[liar] > 3 * max(spread.apart[peer] for peer in honest)
    assert max(spread.to_mean.values()) <= FARTHEST
    assert spread.square < 2.1 * known.square
    if lie == "as far as is believed":
        return
    assert spread.outliers == {liar}
    assert spread.square == known.square
    assert (spread.before, spread.norm) == (known.before, known.norm)
    assert {peer: spread.to_mean[peer] for peer in honest} == known.to_mean
    assert {peer: spread.apart[peer] for peer in honest} == known.apart
    assert spread.after([honest.keys()]) == 0.0


def test_two_of_six_that_say_the_same_are_outliers_all_the_same() -> None:
    honest = drawn(4)
    same = dict.fromkeys((PeerId("x"), PeerId("y")), torch.full((SIZE,), 5.0))
    spread = Spread.of(honest | same)
    assert spread.outliers == same.keys()
    assert min(spread.to_mean[peer] for peer in same) > 1
    assert spread.before == Spread.of(honest).before


@pytest.mark.parametrize("count", [3, 4, 7])
def test_who_publishes_the_sketch_of_another_puts_nobody_else_outside(count: int) -> None:
    honest = drawn(count - 1)
    copied = Spread.of({PeerId("liar"): honest[PeerId("p0")], **honest})
    assert not copied.outliers
    before, known = copied.before, Spread.of(honest).before
    assert before is not None
    assert before == pytest.approx(known, rel=0.3)


def test_in_pairs_one_who_lies_changes_nothing_that_is_left() -> None:
    honest = drawn(5)
    said: Any = [Said(peer, 3, written(row), 3) for peer, row in honest.items()]
    lie: Any = Said("liar", 3, data(3e38), 3)
    me, met = PeerId("p0"), [[PeerId("p1"), PeerId("liar")]]
    spread, after = in_pairs([*said, lie], me, met)
    expected, left = in_pairs(said, me, met)
    assert spread.outliers == {"liar"}
    assert (spread.before, spread.square, after) == (expected.before, expected.square, left)
    assert in_pairs([*said[1:], Said("p0", 3, data(3e38), 3)], me, met)[1] is None


def test_what_a_merge_leaves() -> None:
    peers: Any = {"a": 0.1, "b": 0.2, "c": 0.6}
    spread = Spread(peers)
    assert spread.before == pytest.approx(0.3)
    assert spread.after([peers.keys()]) == 0
    assert spread.after([names("ab")]) == pytest.approx(0.2)
    # three quarters of the model were merged of everybody, of which a half stays
    halves = spread.after([peers.keys(), set()], [0.75, 0.25], 0.5)
    assert halves == pytest.approx(0.3 * (0.75 * 0.25 + 0.25) ** 0.5)
    assert (Spread().before, Spread().after([set()])) == (None, None)
    assert Spread(peers, {}, 2.0).square == pytest.approx(4 * (0.01 + 0.04 + 0.36) / 3)
