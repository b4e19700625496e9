"""A node that leaves, as far as :mod:`node.leaving` sees one."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

from bootstrap.manifest import Manifest
from gossip.membership.members import Liveness
from gossip.rounds.gathering import Gathering
from protocols.errors import OperatorError
from protocols.memory import virtual_time


class Leaver:
    """Notes what it does, in order."""

    def __init__(self, *others: Liveness, finishing: bool = False, script: Any = None) -> None:
        self.did: list[str] = []
        self.rests: list[str] | None = None  # what it had done when its trainer was put to rest
        self.finishing = finishing
        self.failed: OperatorError | None = None
        self.reporter = SimpleNamespace(round=1, rounds_committed=1)
        self.news = asyncio.Event()
        self.node = SimpleNamespace(
            daemon=SimpleNamespace(script=script), offload=virtual_time.inline
        )
        # who downloads from it, and for how long one may
        self.states = SimpleNamespace(readers=set(), longest_s=600.0)
        self.gathering = Gathering()
        self.replicas = (SimpleNamespace(place=SimpleNamespace(round=0)),)
        self.events = SimpleNamespace(emit=lambda event: self.did.append("says so"))
        self.config = SimpleNamespace(checkpoint_every=10)
        self.island = SimpleNamespace(stop=self._stop)
        self.conductor = SimpleNamespace(rest=self._rest)
        self.keeper = SimpleNamespace(save=self._save, took=0.0)
        self.manifest = Manifest.model_validate({"rounds": {"total_rounds": 9}})
        self.at_end = lambda said: said.round >= 9
        self.other = announce = SimpleNamespace(role="island", status="active", round=9, work=0)
        membership = SimpleNamespace(
            islands={n: SimpleNamespace(announce=announce) for n in range(len(others))},
            liveness=lambda peer, now: others[peer],
            alive=lambda now: [n for n, liveness in enumerate(others) if liveness == "alive"],
            announcement=lambda peer: announce if peer < len(others) else None,
        )
        self.mine = SimpleNamespace(status="active")
        presence = SimpleNamespace(leave=self._farewell, status=self.mine)
        chain = SimpleNamespace(
            membership=membership, settle=AsyncMock(), wait_for_all=MagicMock(), in_doubt=()
        )
        self.swarm = SimpleNamespace(
            membership=membership, now=lambda: 0.0, presence=presence, chains=(chain,)
        )

    async def _save(self, *, wait: bool, last: AsyncExitStack | None) -> bool:
        assert wait
        self.did.append("save" if last is None else "save, still from now on")
        return True

    async def _rest(self) -> None:
        self.rests = list(self.did)

    async def _stop(self) -> None:
        self.did.append("stop")

    async def _farewell(self) -> None:
        self.did.append("farewell")
