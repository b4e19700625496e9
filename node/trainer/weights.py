"""The island's parameters, wherever they lie: whole tensors in and out of the ranks' parts.

Rank 0 alone has whole tensors; all other ranks take part by calling the same methods in the same
order, also for parameters of which they have nothing (those of another pipeline stage).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from node.trainer.layout import Layout
from node.trainer.parallel import Ranks

T = TypeVar("T")
Pick = Callable[[Tensor], Tensor]  # picks from a parameter: itself, its gradient, a moment


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, by reference."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_of(tensor: Tensor) -> Tensor:
    """The whole tensor, on every rank of its mesh; every one of these must call it.

    Shards that are not on their mesh's device (FSDP2's CPU offload) are gathered on that device:
    only there does the mesh's group work, which a script may have made of NCCL alone.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    there = tensor.to(tensor.device_mesh.device_type)
    assert isinstance(there, DTensor)
    return there.full_tensor()


def part_like(whole: Tensor, like: Tensor) -> Tensor:
    """The part of ``whole``, which every rank has, that ``like`` is the part of.

    On the device of ``like``, which with offload is not that of its mesh.
    """
    if not isinstance(like, DTensor):
        return whole.to(like.device)
    placed = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return placed.to_local().to(local(like).device)


def itself(parameter: Tensor) -> Tensor:
    """The parameter, apart from its graph."""
    return parameter.detach()


def gradient(parameter: Tensor) -> Tensor:
    """Its gradient; zeros where the batch gave it none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


class Weights:
    """Parameters by their names in the flat layout.

    ``parts`` are those of which this rank has something, each with the tensors that are to be
    equal (an embedding and a head that are tied, where they are two tensors).
    """

    def __init__(self, parts: Mapping[str, Sequence[Tensor]], layout: Layout, ranks: Ranks) -> None:
        self.parts, self.layout, self.ranks = parts, layout, ranks
        self.shapes = {entry.name: entry.shape for entry in layout.entries}
        self.owners = dict.fromkeys(self.shapes, 0)  # lowest rank that has a part
        for rank, names in reversed(list(enumerate(self.everywhere(list(parts))))):
            self.owners |= dict.fromkeys(names, rank)

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor], layout: Layout, ranks: Ranks) -> Weights:
        """Parameters of which every rank has its part."""
        return cls({name: (tensor,) for name, tensor in parameters.items()}, layout, ranks)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the layout's order."""
        return tuple(self.shapes)

    def everywhere(self, mine: T) -> list[T]:
        """A small value of every rank, by rank; just ours where all have the same parameters."""
        if self.ranks.dims.pp == 1:
            return [mine]
        found: list[T] = [mine] * self.ranks.size
        dist.all_gather_object(found, mine)
        return found

    def local(self, name: str) -> list[Tensor]:
        """This rank's parts, by reference; none where another stage has them."""
        return [local(tensor) for tensor in self.parts.get(name, ())]

    def gather(self, name: str, pick: Pick = itself) -> Tensor | None:
        """The whole tensor on rank 0, and perhaps on others; every rank must call it."""
        whole = None
        if name in self.parts:
            whole = whole_of(pick(self.parts[name][0]))
        owner = self.owners[name]
        if owner and self.ranks.rank == owner:
            assert whole is not None
            dist.send(whole.to(self.ranks.device, torch.float32).contiguous(), 0)
        elif owner and self.ranks.leads:
            whole = self._empty(name)
            dist.recv(whole, owner)
        return whole

    def scatter(
        self, name: str, whole: Tensor | None, dtype: torch.dtype = torch.float32
    ) -> Tensor | None:
        """This rank's part of rank 0's ``whole``, a new tensor of ``dtype`` or ``whole`` itself.

        It is on the device of this rank's parameter.

        ``whole`` may be on another device and is only read on rank 0; every rank must call it.
        """
        if self.ranks.size == 1:  # whose parameters may be on several devices
            assert whole is not None
            return whole.to(self.parts[name][0].device, dtype)
        if self.ranks.leads:
            assert whole is not None
            everyone = whole.to(self.ranks.device, dtype)
        else:
            everyone = self._empty(name, dtype)
        on_host = everyone.device.type == "cpu"
        dist.broadcast(everyone, src=0, group=self.ranks.control if on_host else None)
        return part_like(everyone, self.parts[name][0]) if name in self.parts else None

    def _empty(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """For what another rank sends; a script may have made any type the default one."""
        return torch.empty(self.shapes[name], dtype=dtype, device=self.ranks.device)

    def set(
        self,
        name: str,
        whole: Tensor | None,
        pick: Pick = itself,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Write rank 0's ``whole`` into the parts of all ranks; every rank must call it.

        It goes there as ``dtype``.
        """
        part = self.scatter(name, whole, dtype)
        for tensor in self.parts.get(name, ()):
            assert part is not None
            local(pick(tensor)).copy_(part)
