"""Whatever befalls members and whatever some say, where each one's share is several parts.

As over long ways (`gossip.plans.dividing`); here by a draw for each plan and member, of short
vectors.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from test_any_order import drawn
from test_any_order_groups import by_rule, in_groups
from test_any_order_liars import anything_happens as with_liars
from test_any_order_liars import scheming
from trouble_kit import anything_happens

from gossip.plans.dividing import divided
from gossip.plans.grouping import Pieces
from gossip.plans.partition import MemberLink
from protocols.identity import PeerId

pytestmark = [
    pytest.mark.usefixtures("remembered_signatures", "several"),
    pytest.mark.timeout(300),
]


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    dice, more = random.Random(0), list[bool]()

    def counts(
        me: PeerId, links: Sequence[MemberLink], trips: Mapping[PeerId, float]
    ) -> dict[PeerId, int]:
        return {link.peer: dice.choice([1, 2, 3, 4]) for link in links}

    monkeypatch.setattr("gossip.plans.planning.by_owner", counts)

    def noted(pieces: Pieces, counts: Mapping[PeerId, int]) -> Pieces:
        found = divided(pieces, counts)
        more.append(len(found) > len(pieces))
        return found

    monkeypatch.setattr("gossip.plans.dividing.LEAST", 1024)
    monkeypatch.setattr("gossip.plans.grouping.divided", noted)
    yield
    assert any(more)


@pytest.mark.parametrize("seed", [300])
def test_whatever_happens_there_is_one_swarm(seed: int, tmp_path: Path) -> None:
    anything_happens(seed, drawn, tmp_path)


@pytest.mark.parametrize("seed", [304])
def test_whatever_happens_in_groups_there_is_one_swarm(seed: int, tmp_path: Path) -> None:
    anything_happens(seed, in_groups, tmp_path)


@pytest.mark.parametrize("seed", [300])
def test_whatever_happens_where_slices_are_judged_there_is_one_swarm(
    seed: int, tmp_path: Path
) -> None:
    anything_happens(seed, by_rule, tmp_path)


@pytest.mark.parametrize("seed", [300])
def test_whatever_some_say_the_others_are_one_swarm(seed: int, tmp_path: Path) -> None:
    with_liars(seed, tmp_path)


@pytest.mark.parametrize("seed", [300])
def test_what_is_wrong_in_one_thing_alone_is_not_taken(seed: int, tmp_path: Path) -> None:
    with_liars(seed, tmp_path, draw=scheming)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [301, 302, *range(400, 430)])
def test_whatever_happens_and_whatever_some_say_many_times(seed: int, tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(5)]
    for folder in folders:
        folder.mkdir()
    for draw, folder in zip((drawn, in_groups, by_rule), folders, strict=False):
        anything_happens(seed, draw, folder)
    with_liars(seed, folders[3])
    with_liars(seed, folders[4], draw=scheming)
