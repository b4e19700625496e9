"""Several ranks that train one island's model: sharding, and whole vectors in and out of shards.

The model file knows nothing of this. With one rank nothing is sharded and no process group
exists; with more, parameters and optimizer moments are DTensors (``fully_shard``, ZeRO 3), and
everything below works from a DTensor's own mesh and placements.

Rank 0 alone sees the daemon. What all ranks must do alike at a step boundary is broadcast by it.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=10)


@dataclass(frozen=True)
class Ranks:
    """This process's place among the island's ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None  # None for a single rank

    @classmethod
    def alone(cls, device: torch.device) -> Ranks:
        """A single rank, without a process group."""
        return cls(0, 1, device, None)

    @classmethod
    def join(cls, rank: int, size: int, device: torch.device, rendezvous: Path) -> Ranks:
        """Meet the other ranks of this host through a file that did not exist before.

        A file needs no port, so there is none to race for.
        """
        if size == 1:
            return cls.alone(device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=size,
            timeout=COLLECTIVE_TIMEOUT,
        )
        return cls(rank, size, device, init_device_mesh(device.type, (size,)))

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which talks to the daemon."""
        return self.rank == 0

    def broadcast(self, data: bytes) -> bytes:
        """Rank 0's bytes, on every rank."""
        if self.mesh is None:
            return data
        length = torch.tensor([len(data)])
        dist.broadcast(length, src=0)
        if self.leads:
            body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        else:
            body = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(body, src=0)
        return body.numpy().tobytes()

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a scalar over the ranks, on every rank."""
        if self.mesh is not None:
            dist.all_reduce(value)
            value /= self.size
        return value

    def all_true(self, value: bool) -> bool:
        """Whether ``value`` holds on every rank."""
        if self.mesh is None:
            return value
        flag = torch.tensor([int(value)])
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)

    def leave(self) -> None:
        """Take the process group down."""
        if self.mesh is not None:
            dist.destroy_process_group()


def shard(model: nn.Module, blocks: list[nn.Module], ranks: Ranks, dtype: torch.dtype) -> None:
    """Shard a model over the ranks in place: one group a block, one for the rest.

    Parameters stay fp32 in their shards; they travel and compute as ``dtype``, and gradients are
    reduced in fp32.
    """
    if ranks.mesh is None:
        model.to(ranks.device)
        return
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for module in (*blocks, model):
        # Resharded after forward, the root too: an evaluation has no backward that would do it,
        # and a copy left unsharded would hide what is written to the shards afterwards.
        fully_shard(module, mesh=ranks.mesh, mp_policy=policy, reshard_after_forward=True)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, by reference."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather(tensor: Tensor) -> Tensor:
    """The whole of a tensor on every rank; every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def scatter(whole: Tensor | None, like: Tensor) -> Tensor:
    """This rank's part of rank 0's ``whole``, cut and placed as ``like`` is.

    ``whole`` may be on another device and is only read on rank 0; every rank must call it.
    """
    if not isinstance(like, DTensor):
        assert whole is not None
        return whole.to(like.device)
    device = like.to_local().device
    if whole is None or dist.get_rank() != 0:
        whole = torch.empty(like.shape, dtype=like.dtype, device=device)
    placed = distribute_tensor(whole.to(device), like.device_mesh, like.placements, src_data_rank=0)
    return placed.to_local()
