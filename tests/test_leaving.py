"""How a node leaves: no round is lost that nobody else has."""

from __future__ import annotations

from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from gossip.membership import Liveness
from node.leaving import leave


class Leaver:
    """Notes what it does, in order."""

    def __init__(self, *others: Liveness, finishing: bool = False) -> None:
        self.did: list[str] = []
        self.finishing = finishing
        self.config = SimpleNamespace(checkpoint_every=10)
        self.island = SimpleNamespace(stop=self._stop)
        self.keeper = SimpleNamespace(save=self._save)
        announce = SimpleNamespace(role="island")
        membership = SimpleNamespace(
            islands={n: SimpleNamespace(announce=announce) for n in range(len(others))},
            liveness=lambda peer, now: others[peer],
        )
        presence = SimpleNamespace(leave=self._farewell)
        self.swarm = SimpleNamespace(
            membership=membership, now=lambda: 0.0, presence=presence, chains=()
        )

    async def _save(self, *, wait: bool, last: AsyncExitStack | None) -> None:
        assert wait
        self.did.append("save" if last is None else "save, still from now on")

    async def _stop(self) -> None:
        self.did.append("stop")

    async def _farewell(self) -> None:
        self.did.append("farewell")


@pytest.mark.parametrize("others", [(), (Liveness.ALIVE,), (Liveness.LEFT, Liveness.SUSPECT)])
async def test_no_round_comes_after_the_last_checkpoint_and_nobody_waits(others: Any) -> None:
    leaver: Any = Leaver(*others)
    await leave(leaver, AsyncExitStack())
    assert leaver.did == ["farewell", "save, still from now on", "stop"]


async def test_at_the_end_of_the_run_it_stays_for_those_who_are_not_there_yet() -> None:
    leaver: Any = Leaver(Liveness.ALIVE, finishing=True)
    await leave(leaver, AsyncExitStack())
    assert leaver.did == ["save", "stop", "farewell"]
    alone: Any = Leaver(Liveness.LEFT, finishing=True)
    await leave(alone, AsyncExitStack())
    assert alone.did == ["save, still from now on", "stop", "farewell"]
