"""How a node leaves: no round is lost that nobody else has."""

from __future__ import annotations

from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from gossip.membership import Liveness
from node.leaving import save_last

if TYPE_CHECKING:
    from node.participation import Participation


class Leaver:
    """Somebody whose rounds go on while a checkpoint is written, unless it stands still."""

    def __init__(self, *others: Liveness, gone_by_then: bool = False, role: str = "island") -> None:
        self.liveness = list(others)
        self.gone_by_then = gone_by_then
        self.place = SimpleNamespace(round=5)
        self.saved: list[int] = []
        announce = SimpleNamespace(role=role)
        membership = SimpleNamespace(
            islands={n: SimpleNamespace(announce=announce) for n in range(len(others))},
            liveness=lambda peer, now: self.liveness[peer],
        )
        self.swarm = SimpleNamespace(membership=membership, now=lambda: 0.0)
        self.replicas = [SimpleNamespace(place=self.place)]
        self.keeper = self

    async def save(self, *, wait: bool, last: AsyncExitStack | None) -> None:
        assert wait
        self.saved.append(self.place.round)
        if last is None:
            self.place.round += 1
        if self.gone_by_then:
            self.liveness = [Liveness.LEFT for _ in self.liveness]


@pytest.mark.parametrize(
    ("leaver", "saved"),
    [
        (Leaver(), [5]),
        (Leaver(Liveness.ALIVE, role="observer"), [5]),
        (Leaver(Liveness.DEAD, Liveness.LEFT), [5]),
        (Leaver(Liveness.ALIVE, Liveness.LEFT), [5]),
        (Leaver(Liveness.SUSPECT), [5]),
        (Leaver(Liveness.ALIVE, gone_by_then=True), [5, 6]),
    ],
)
async def test_the_last_checkpoint_has_all_rounds_that_nobody_else_has(
    leaver: Leaver, saved: list[int]
) -> None:
    async with AsyncExitStack() as stack:
        await save_last(cast("Participation", leaver), stack)
    assert leaver.saved == saved
    rounds_of_others = any(one in (Liveness.ALIVE, Liveness.SUSPECT) for one in leaver.liveness)
    others_have_them = rounds_of_others and leaver.place.round == 6
    assert others_have_them or leaver.place.round == saved[-1]
