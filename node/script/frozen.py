"""What is frozen in a script's model, read into a fingerprint.

A tensor's sum is Σ v[i, j, …] · k₀(i) · k₁(j) · … modulo 2⁶⁴ with odd
pseudo-random keys k, where v is the element as a whole number: each rank sums up what it holds on
the device where that is, and the sums of all shards are the sum of the whole, whatever way it is
sharded. (It tells revisions apart, and keeps nobody from lying.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from blake3 import blake3
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bootstrap.manifest import MARK, MOST_MARKS
from node.errors import operator_error
from node.script.fingerprint import Fingerprint
from node.script.parameters import bare_names
from node.trainer.parallel import HOST, Ranks

DimIndices = range | Tensor  # of elements along one dim of the whole tensor

MODULUS = 2**64
TILE, TILE_OF_GPU = 2**17, 2**22  # elements of eight bytes at a time; the first fit a cache


@dataclass(frozen=True)
class Part:
    """What one rank has of one tensor."""

    kind: str  # of its elements, which are compared with those of the same kind alone
    shape: tuple[int, ...]  # of the whole
    dtype: str
    mesh: int  # the lowest rank among those that hold one copy together
    total: int | None  # modulo 2⁶⁴
    unread: str = ""  # why it has no total


def fingerprint_of(model: nn.Module, ranks: Ranks) -> Fingerprint:
    """Of the model as it is, on every rank; every rank must call it.

    Raises OperatorError E204, on all of them, where what is frozen cannot be read.
    """
    found = dict(comparable(model))
    known = frozenset(ranks.broadcast("\n".join(found).encode()).decode().split("\n"))
    mine = {
        name: read(tensor, ranks.rank)
        for name, tensor in found.items()
        # where each rank has a whole copy, rank 0's counts
        if ranks.leads or isinstance(tensor, DTensor) or name not in known
    }
    parts = [mine] * ranks.size
    if ranks.size > 1:
        dist.all_gather_object(parts, mine, group=ranks.control)
    return combined(parts)


def comparable(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters that require no gradient, and buffers that are weights, by name.

    Those are persistent ones of whole numbers with two dims or more, as quantized weights are
    (GPTQ, AWQ). Running statistics, codebooks, caches and counters are each island's own.
    """
    kept = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
        and not is_lazy(buffer)
        and buffer.ndim >= 2
        and not (buffer.is_floating_point() or buffer.is_complex())
    }
    parameters = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    for name, tensor in bare_names(model, parameters | buffers).items():
        yield from _inside(name, tensor)


def _inside(name: str, tensor: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors that one of a class of its own is made of (codes and scales); else itself."""
    if isinstance(tensor, DTensor) or not is_traceable_wrapper_subclass(tensor):
        yield name, tensor
        return
    for inner in tensor.__tensor_flatten__()[0]:
        yield from _inside(f"{name}.{inner}", getattr(tensor, inner))


def combined(parts: Sequence[dict[str, Part]]) -> Fingerprint:
    """What the ranks have, by rank, as one. Raises OperatorError E204 for what was not read."""
    first: dict[str, Part] = {}
    totals: dict[str, int] = {}
    for mine in parts:
        for name, part in mine.items():
            if part.total is None:
                raise operator_error(
                    "E204",
                    f"the frozen parameter {name} cannot be compared with the swarm's",
                    why=part.unread,
                    fix="load what is frozen before node.join; or give it compare_frozen=False, "
                    "and make sure yourself that all islands have the same",
                )
            if first.setdefault(name, part).mesh == part.mesh:
                totals[name] = (totals.get(name, 0) + part.total) % MODULUS
    lines = [
        f"{name} {part.kind} {'x'.join(map(str, part.shape))} {totals[name]:016x}\n"
        for name, part in first.items()
    ]
    whole = blake3("".join(lines).encode()).hexdigest()
    if len(lines) > MOST_MARKS:
        return Fingerprint(whole)
    marks = "".join(blake3(line.encode()).hexdigest()[:MARK] for line in lines)
    return Fingerprint(whole, marks, [f"{name} ({p.dtype})" for name, p in first.items()])


@torch.no_grad()
def read(tensor: Tensor, rank: int) -> Part:
    """What this rank has of one tensor."""
    if is_lazy(tensor):
        return Part("", (), "", rank, None, "lazy modules get their shape with the first batch")
    kind, numbers = _kind(tensor.dtype)
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    mesh, total, unread = rank, None, ""
    try:
        if isinstance(tensor, DTensor):
            mesh = int(tensor.device_mesh.mesh.min())
            total = _total_of_shard(tensor, numbers)
        else:
            plain = tensor.as_subclass(Tensor)  # a class of its own may cut itself in its own way
            total = _total(plain, [range(size) for size in shape], shape, numbers)
    except RuntimeError as error:  # torch's, of whatever has no elements that can be read
        unread = f"its elements ({dtype} on {tensor.device.type}) are not to be had: {error}"[:500]
    return Part(kind, shape, dtype, mesh, total, unread)


def _total_of_shard(tensor: DTensor, numbers: Callable[[Tensor], Tensor]) -> int:
    """The sum over this rank's shard; 0 if it is a replica of another rank's."""
    mesh, placements, shape = tensor.device_mesh, tensor.placements, tuple(tensor.shape)
    place = mesh.get_coordinate()
    part: Any = tensor.to_local()
    if any(placement.is_partial() for placement in placements):
        raise RuntimeError("each rank has a summand of it, and none has the sum")
    if is_traceable_wrapper_subclass(part):
        raise RuntimeError(f"shards of {type(part).__name__} do not tell which elements they are")
    if place is None or any(
        at for at, placement in zip(place, placements, strict=True) if placement.is_replicate()
    ):
        return 0
    return _total(part, [_dim_indices(tensor, dim) for dim in range(tensor.ndim)], shape, numbers)


def _dim_indices(tensor: DTensor, dim: int) -> DimIndices:
    """Which of the whole tensor's rows, columns, … this rank has: cuts indices like the tensor."""
    along = torch.arange(tensor.shape[dim], device=HOST).view(*[1] * dim, -1)
    cut = [one if getattr(one, "dim", None) == dim else Replicate() for one in tensor.placements]
    mine = distribute_tensor(along, tensor.device_mesh, cut, src_data_rank=None).to_local()
    mine = mine.flatten()
    if mine.numel() and int(mine[-1] - mine[0]) == mine.numel() - 1:  # in order, with no gap
        return range(int(mine[0]), int(mine[-1]) + 1)
    return mine


def _total(
    part: Tensor,
    indices: Sequence[DimIndices],
    shape: Sequence[int],
    numbers: Callable[[Tensor], Tensor],
) -> int:
    """The sum over a part of a tensor [shape] that has these indices of each dim."""
    if not part.numel():
        return 0
    dims = [dim for dim, size in enumerate(shape) if size > 1]
    part = part[tuple(slice(None) if dim in dims else 0 for dim in range(len(shape)))]
    if not dims:
        return int(numbers(part)) % MODULUS
    longest = max(dims, key=lambda dim: part.shape[dims.index(dim)])
    tile = TILE if part.device.type == "cpu" else TILE_OF_GPU
    cut = dims.index(longest)
    length = part.shape[cut]
    rows = max(1, tile * length // part.numel())
    keys = {dim: _keys(dim, indices[dim], part.device) for dim in dims if dim != longest}
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for start in range(0, length, rows):
        stop = min(start + rows, length)
        keys[longest] = _keys(longest, indices[longest][start:stop], part.device)
        found = numbers(part.narrow(cut, start, stop - start))
        for dim in reversed(dims):
            found = (found * keys[dim]).sum(-1)
        total += found
    return int(total) % MODULUS


def _keys(dim: int, indices: DimIndices, device: torch.device) -> Tensor:
    """Odd pseudo-random numbers of indices in one dim; products of int64 wrap around everywhere."""
    if isinstance(indices, range):
        indices = torch.arange(indices.start, indices.stop, device=device)
    mixed = indices.to(device) + (dim + 1) * 2**44
    mixed *= -0x61C8864680B583EB
    mixed ^= (mixed >> 32) & 0xFFFFFFFF  # a shift of numbers without a sign
    mixed *= -0x40A7B892E31B1A47
    return mixed.bitwise_or_(1)


def _kind(dtype: torch.dtype) -> tuple[str, Callable[[Tensor], Tensor]]:
    """What elements of this type are compared with, and how they become numbers of 64 bits.

    Values of up to 32 bits are compared as such, whatever type holds them: where bf16 was read into
    fp32 it is the same base, where fp32 was rounded to bf16 another.
    """
    if dtype == torch.bfloat16:
        return "real", lambda part: part.view(torch.int16).to(torch.int64) << 16
    if dtype == torch.float32:
        return "real", lambda part: part.view(torch.int32).to(torch.int64)
    if dtype == torch.float16 or str(dtype).startswith("torch.float8"):
        return "real", _widened
    if dtype in (torch.float64, torch.complex64):
        return str(dtype), lambda part: part.view(torch.int64)
    if not (dtype.is_floating_point or dtype.is_complex):
        return "whole", lambda part: part.to(torch.int64)
    return str(dtype), lambda part: part.view(torch.uint8).to(torch.int64)


def _widened(part: Tensor) -> Tensor:
    """Bits of the fp32 with the same value, of fp16 or fp8.

    Which fp32 a NaN becomes goes by the processor, and all may become one; but codes of four bits
    that are kept as fp16 look like NaN now and then. Of those the bits count as they are.
    """
    wide = part.to(torch.float32)
    own = part.view(torch.int16 if part.itemsize == 2 else torch.uint8).to(torch.int64)
    return torch.where(wide.isnan(), own + 2**40, wide.view(torch.int32).to(torch.int64))
