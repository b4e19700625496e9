"""What checkpoints of a running node need: a keeper, and a trainer that takes its time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from bootstrap.signed_manifest import SignedManifest
from node.checkpoints.checkpoint import CheckpointStore
from node.checkpoints.saving import Keeper
from node.checkpoints.trainer_files import Asked
from node.island.pace import Pace
from node.monitor.event_log import EventLog
from node.replicas.replica import OuterReplica
from node.trainer.channel import Saved


class SlowTrainer:
    """Has copied its files at once, or at ``copies``; writes them when told to."""

    training, beginning = True, SimpleNamespace(checkpoint=None)

    def __init__(self, *, copies: bool = True) -> None:
        self.writing: asyncio.Future[Saved] | None = None
        self.copied: asyncio.Future[None] | None = None
        self.draft, self.pace, self._copies = Path(), Pace(), copies

    async def take_back(self) -> None:
        pass

    async def save(self, draft: Path) -> Asked:
        given_up = self.copied is not None and self.copied.cancelled()
        assert self.writing is None or self.writing.done() or given_up, "it writes another one"
        loop = asyncio.get_running_loop()
        self.draft, self.writing, self.copied = draft, loop.create_future(), loop.create_future()
        if self._copies:
            self.copied.set_result(None)
        return Asked(self.copied, self.writing)

    def write(self) -> None:
        folder = self.draft / "trainer"
        folder.mkdir(parents=True)
        (folder / "trainer.json").write_bytes(b"{}")
        assert self.writing is not None
        self.writing.set_result(Saved(directory=str(self.draft), problem="", full=False))


async def inline(work: Callable[[], Any]) -> Any:
    return work()


def keeper_at(directory: Path, events: list[Any]) -> Keeper:
    place = SimpleNamespace(round=3, previous=b"", state=b"state")
    replica = SimpleNamespace(
        me="me",
        place=place,
        residual=None,
        base=torch.zeros(2),
        vectors={},
        certificate=None,
        frozen=None,
        offload=inline,
    )
    return Keeper(
        CheckpointStore(directory),
        cast(SignedManifest, SimpleNamespace(run_id=b"run")),
        cast("list[OuterReplica]", [replica]),
        None,
        cast(EventLog, SimpleNamespace(emit=events.append)),
        nullcontext,
        inline,
        lambda: [cast(Any, None)],
    )
