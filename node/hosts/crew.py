"""What an island asks of its other hosts: to be there, and to start their share of the ranks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from node.config import NodeConfig
from node.data.folder import is_folder
from node.data.stream_recipe import is_recipe, read_recipe
from node.errors import operator_error
from node.hosts.hub import Hub
from node.hosts.interface import untold
from node.hosts.meeting import meeting
from node.hosts.remote import Host, RemoteRank
from node.hosts.tokens import fingerprint
from node.hosts.wire import Job
from node.island.fitting import Fitting
from node.island.hardware import Hardware, device_memory
from node.outermost import first_known
from node.trainer.dims import ParallelDims
from node.trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from node.entry.entrance import Run

Fit = Callable[[int, int], ParallelDims]  # ranks, hosts -> layout; raises ValueError


@dataclass
class Crew:
    """The other hosts of an island, as :class:`node.island.island.Island` uses them."""

    hub: Hub
    own_ranks: int  # of host 0
    layout: Fit
    fitting: Fitting | None = None  # what fitted into memory earlier, with the hosts that come
    _idle: int = 0  # ranks that the layout has no use for, as told

    @property
    def grown(self) -> bool:
        """Whether a host is there that the present ranks were started without."""
        return self.hub.grown

    @property
    def enough(self) -> bool:
        """Whether the island can go on without hosts that are lost."""
        return self.hub.enough

    async def muster(self, *, again: bool) -> list[Host]:
        """Wait for the other hosts; raises OperatorError E409, E410."""
        return await self.hub.muster(again=again)

    def fit(self, settings: TrainerSettings, hosts: Sequence[Host]) -> TrainerSettings:
        """Settings with the layout for the ranks there are; raises OperatorError E409."""
        ranks = self.own_ranks + sum(host.ranks for host in hosts)
        try:
            dims = self.layout(ranks, 1 + len(hosts))
        except ValueError as error:
            raise operator_error(
                "E409", f"the island cannot go on with {ranks} ranks", why=str(error)
            ) from error
        if settings.dims is not None and settings.dims != dims:
            self.hub.say(f"this island goes on with {1 + len(hosts)} hosts: {dims}")
        self._tell_idle(ranks, dims, settings.device)
        changes = {"ranks": dims.size, "dims": dims, "hosts": 1 + len(hosts)}
        before, settings = settings.layout, settings.model_copy(update=changes)
        if dims == before or self.fitting is None:
            return settings
        if micro_batch := self.fitting.known(settings):
            self.hub.say(self.fitting.told)
        elif dims.size > before.size:  # what fewer ranks were short for says nothing of these
            micro_batch = self.fitting.asked
        else:
            return settings
        return settings.model_copy(update={"micro_batch": micro_batch})

    def _tell_idle(self, ranks: int, dims: ParallelDims, device: str) -> None:
        """Say of how many ranks there is no use, once for each number."""
        idle = max(0, ranks - dims.size)
        if idle and idle != self._idle:
            what = "GPUs" if device == "cuda" else "ranks"
            self.hub.say(
                f"{idle} of this island's {ranks} {what} have nothing to do: its layout ({dims}) "
                f"is of {dims.size}. Where --layout or --dp-shard says how many, leave that out; "
                "else a step has too few sequences for more, or what ranks share does not divide"
            )
        self._idle = idle

    def shares(self, ranks: int, hosts: Sequence[Host]) -> list[range]:
        """Which ranks each host starts, host 0 first; the last ones may have none left."""
        shares, first = [], 0
        for has in (self.own_ranks, *(host.ranks for host in hosts)):
            shares.append(range(first, min(ranks, first + has)))
            first = shares[-1].stop
        return shares

    def launch(
        self, host: Host, life: int, settings: TrainerSettings, ranks: range, store: str
    ) -> list[RemoteRank]:
        """Have a host start its ranks, which meet at ``store``."""
        return self.hub.launch(host, life, settings.model_dump_json(), ranks, store)

    def met(self) -> None:
        """All ranks have come together."""
        self.hub.met()

    def failed(self, host: Host, *, refused: bool) -> bool:
        """A host's ranks were the cause; returns whether the others go on without it."""
        return self.hub.failed(host, refused=refused)

    def merged(self) -> None:
        """A round has been merged."""
        self.hub.merged()

    def reached_at(self, hosts: Sequence[Host]) -> str:
        """This host's address as the others see it."""
        address = self.hub.reached_at(hosts)
        if text := untold(address, os.environ):
            self.hub.say(text)
        return address


async def open_hub(
    config: NodeConfig,
    device: str,
    say: Callable[[str], None],
    leaving: Callable[[], bool],
    stack: AsyncExitStack,
) -> Hub | None:
    """Listen for this island's other hosts until ``stack`` ends; None where there are none.

    ``leaving``: whether this node is about to end.
    """
    place = meeting(config, os.environ)
    if place is None:
        return None
    hub = Hub(place, device, say, leaving)
    await hub.open()

    async def close(
        kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if error is not None and not isinstance(error, asyncio.CancelledError):
            hub.say_why(first_known(error))
        await hub.aclose()

    stack.push_async_exit(close)
    return hub


def crew_of(
    hub: Hub | None,
    config: NodeConfig,
    settings: TrainerSettings,
    parameters: int,
    own: Hardware,
    fitting: Fitting | None,
) -> Crew | None:
    """The other hosts of an island of ``parameters`` that is laid out over all by ``settings``."""
    if hub is None:
        return None
    manifest, full, (device, ranks) = settings.manifest, settings.layout, own
    memory = device_memory(device, ranks)

    def layout(left: int, hosts: int) -> ParallelDims:
        return config.refit(full, left, hosts, memory, parameters, manifest.model, manifest.data)

    return Crew(hub, ranks, layout, fitting)


def job_of(run: Run, tokens: str, own_data: str, cache: Path) -> Job:
    """What the other hosts need for the same tokens as this host's. Blocks."""
    place = tokens if is_folder(tokens) else own_data
    if is_recipe(tokens):  # of data that was given at an earlier start, perhaps
        place = read_recipe(tokens).place
    return Job(
        run.manifest.model_dump_json().encode(),
        run.shard,
        run.tokenizer,
        place,
        fingerprint(tokens, run.manifest.model.vocab_size, cache),
    )
