"""The ranks of one island: how they meet, their mesh, and what all of them do at once.

With one rank there is no process group, unless FSDP is to offload it. With several, :class:`Ranks`
has a mesh whose axes are those of :class:`~node.trainer.dims.ParallelDims`. Rank 0 alone sees the
daemon. What all ranks must do alike at a step boundary is broadcast by it.
"""

from __future__ import annotations

import atexit
import datetime
import math
import os
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # torch lists no names
    FileStore,
    Store,
    TCPStore,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from node.entry.own_address import INTERNET, outward_address
from node.hosts.interface import GLOO, told
from node.trainer.dims import ParallelDims
from protocols.connections.listening import is_own_name

COLLECTIVE_S = 600.0
HOST = torch.device("cpu")  # said each time: a script may have made another device the default one
TOLD_S = 5.0  # seconds that a failed rank waits to tell the others, which may not come


@dataclass(frozen=True)
class Ranks:
    """This process's place among the island's ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None  # None for a rank without a process group, and for those of a script
    dims: ParallelDims = field(default_factory=ParallelDims)
    # groups made here: for what is on the CPU (none: the default one), and for background work
    _control: list[dist.ProcessGroup] = field(default_factory=list)
    _background: list[dist.ProcessGroup] = field(default_factory=list)

    @classmethod
    def alone(cls, device: torch.device) -> Ranks:
        """A single rank, without a process group."""
        return cls(0, 1, device, None)

    @classmethod
    def join(
        cls,
        rank: int,
        dims: ParallelDims,
        device: torch.device,
        store: str,
        collective_s: float = COLLECTIVE_S,
        listening: int | None = None,
        *,
        alone: bool = True,
    ) -> Ranks:
        """Meet the other ranks at a store: ``file://PATH`` (a path as it is), or ``HOST:PORT``.

        ``alone``: a single rank has no process group; else it has one, and a mesh of one.

        A collective call that takes longer than ``collective_s`` seconds fails.
        On one host a file needs no port, so there is none to race for. It grows with each further
        process group, so it had better not be on a disk. On several hosts rank 0 serves the store
        on a socket that listens already, whose descriptor is ``listening``.
        """
        if dims.size == 1 and alone:
            return cls.alone(device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        timeout = datetime.timedelta(seconds=collective_s)
        path = store.removeprefix("file://")
        if path != store:  # not as the URL that torch takes, where # and ? end a path
            meeting: Store = FileStore(path, dims.size)
            meeting.set_timeout(timeout)
        else:
            host, _, port = store.rpartition(":")
            meeting = TCPStore(
                host.strip("[]"),
                int(port),
                dims.size,
                rank == 0,
                timeout,
                master_listen_fd=listening,
            )
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            rank=rank,
            world_size=dims.size,
            timeout=timeout,
            store=meeting,
        )
        axes = dims.axes
        mesh = init_device_mesh(
            device.type, tuple(axes.values()), mesh_dim_names=tuple(axes.keys())
        )
        return cls(rank, dims.size, device, mesh, dims)

    @classmethod
    def met(cls, device: torch.device) -> Ranks:
        """The ranks of a process group that was made elsewhere; one alone where there is none.

        It may be one of NCCL alone, so what is agreed on travels by a group of gloo beside it, over
        the interface that leads to torchrun's host, unless the environment names another. How
        NCCL goes is the script's affair.
        """
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return cls.alone(device)
        if master := os.environ.get("MASTER_ADDR"):
            with suppress(OSError):  # a name that does not resolve: gloo looks for itself
                own = outward_address(
                    INTERNET if is_own_name(master) else socket.gethostbyname(master)
                )
                os.environ.update({k: v for k, v in told(own, os.environ).items() if k == GLOO})
        size = dist.get_world_size()
        ranks = cls(dist.get_rank(), size, device, None, _control=[_gloo()])
        atexit.register(ranks.release)
        return ranks

    @property
    def control(self) -> dist.ProcessGroup | None:
        """The group for what is on the CPU; None: the default one."""
        return self._control[0] if self._control else None

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which talks to the daemon."""
        return self.rank == 0

    def at(self, axis: str) -> int:
        """This rank's coordinate on an axis of the mesh."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(axis)

    def axis(self, name: str) -> DeviceMesh:
        """The mesh of one axis, of the ranks that differ from this one on it alone."""
        assert self.mesh is not None
        return self.mesh[name]

    @property
    def data_rank(self) -> int:
        """Which part of a batch's rows this rank reads, of ``dims.data``."""
        place = self.at("dp_replicate") * self.dims.axes["dp_shard"] + self.at("dp_shard")
        return place * self.dims.ep + self.at("ep")

    def broadcast(self, data: bytes) -> bytes:
        """Rank 0's bytes, on every rank."""
        if self.size == 1:
            return data
        length = torch.tensor([len(data)], device=HOST)
        dist.broadcast(length, src=0, group=self.control)
        if not int(length):
            return b""  # torch makes no tensor of nothing
        if self.leads:
            body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        else:
            body = torch.empty(int(length), dtype=torch.uint8, device=HOST)
        dist.broadcast(body, src=0, group=self.control)
        return body.numpy().tobytes()

    def background(self) -> dist.ProcessGroup | None:
        """A group of all ranks for what runs beside training; every rank must call it first."""
        if self.size > 1 and not self._background:
            self._background.append(_gloo())
        return self._background[0] if self._background else None

    def sum(self, value: Tensor) -> Tensor:
        """The sum of a tensor over the ranks, in place and on every rank."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def all_true(self, value: bool) -> bool:
        """Whether ``value`` holds on every rank."""
        if self.size == 1:
            return value
        flag = torch.tensor([int(value)], device=HOST)
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=self.control)
        return bool(flag)

    def each(self, value: int) -> list[int]:
        """The ``value`` that every rank has, by rank."""
        if self.size == 1:
            return [value]
        own = torch.tensor([value], device=HOST)
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, group=self.control)
        return [int(one) for one in found]

    def unanimous(self, well: bool) -> bool:
        """Whether all ranks are ``well`` after what each of them did by itself.

        A rank that is not gets False after :data:`TOLD_S` seconds at most: the others may wait for
        it in a call that it has left. One that comes later finds the connection closed, as with
        a rank that is gone. (Point to point, and not one collective call: that would go on after it
        has timed out, and keep the process from ending.)
        """
        if self.size == 1:
            return well
        patience = {} if well else {"timeout": datetime.timedelta(seconds=TOLD_S)}
        word = torch.tensor([int(well)], device=HOST)
        try:
            if self.leads:
                said = {rank: torch.zeros_like(word) for rank in range(1, self.size)}
                for rank, theirs in said.items():
                    _wait(dist.irecv(theirs, rank, group=self.control), patience)
                word *= int(all(said.values()))
                for rank in (rank for rank, theirs in said.items() if theirs):
                    _wait(dist.isend(word, rank, group=self.control), patience)
            else:
                _wait(dist.isend(word, 0, group=self.control), patience)
                if well:
                    _wait(dist.irecv(word, 0, group=self.control), patience)
        except RuntimeError:
            if well:
                raise
        return bool(word)

    def release(self) -> None:
        """Take the groups down that were made here beside the default one; no other rank is needed.

        This waits for their threads: one that drops a tensor only while Python shuts down ends the
        process with SIGABRT, since it cannot get the interpreter's lock any more.
        """
        for groups in (self._control, self._background):
            while groups:
                with suppress(ValueError):  # the default one is gone, and all others with it
                    dist.destroy_process_group(groups.pop())

    def leave(self) -> None:
        """Take all process groups down."""
        if self.mesh is not None:
            self.release()
            dist.destroy_process_group()


def _gloo() -> dist.ProcessGroup:
    """A new group of all ranks, each of which must call this."""
    group = dist.new_group(backend="gloo")
    assert group is not None
    return group


def _wait(work: dist.Work | None, patience: dict[str, datetime.timedelta]) -> None:
    assert work is not None
    work.wait(**patience)


def share(batch: int, rank: int, ranks: int, micro_batch: int) -> list[range]:
    """A data rank's rows of the batch, in parts of at most ``micro_batch``.

    Row i belongs to rank i mod ``ranks``. All ranks get equally many parts, since each part is one
    round of collective calls; so a rank with a row less than others may have an empty one.
    """
    rows = range(rank, batch, ranks)
    parts = math.ceil(math.ceil(batch / ranks) / micro_batch)
    cuts = [len(rows) * i // parts for i in range(parts + 1)]
    return [rows[start:stop] for start, stop in pairwise(cuts)]
