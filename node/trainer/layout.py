"""The flat layout: the order in which a model's parameters stand in one fp32 vector.

Trainer, daemon and peers all speak of "the parameters" as one vector of ``size`` elements. All
tensors with two or more dims come first, then those with one (norms, biases), each group in the
order of the model's definition; a shared (tied) tensor stands once, under its first name. So a
codec can treat ``[0, dense)`` coarsely and ``[dense, size)`` finely.

Where the model is merged in fragments, these stand one behind the other, each laid out like this:
a fragment is one range of the vector. Layers are dealt out in turn (:mod:`diloco.fragments`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from blake3 import blake3
from torch import Tensor, nn

from bootstrap.manifest import Manifest, Model
from diloco.fragments import assign
from node.trainer.model import build, initial_value, skeleton


class Outline(Protocol):
    """What a node without a model's code has to know of its flat layout."""

    @property
    def size(self) -> int:
        """Number of elements, N."""
        ...

    @property
    def dense(self) -> int:
        """Elements that belong to tensors of two or more dims; they come first."""
        ...

    @property
    def digest(self) -> str:
        """BLAKE3 (hex) of names and shapes in order."""
        ...

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Where each fragment lies."""
        ...


@dataclass(frozen=True, slots=True)
class Cut:
    """One fragment: elements ``[start, stop)`` of the vector, the first ``dense`` in matrices."""

    start: int
    stop: int
    dense: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Unnamed:
    """The outline of a model that only a script knows (:mod:`node.script`)."""

    size: int
    dense: int
    digest: str

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """A script's model is merged as a whole."""
        return (Cut(0, self.size, self.dense),)


def outline(manifest: Manifest) -> Outline:
    """The outline of a run's model."""
    script = manifest.script
    if script.layout:
        return Unnamed(script.parameters, script.dense, script.layout)
    return Layout.of_manifest(manifest)


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter's place: elements ``[offset, offset + size)`` of the vector."""

    name: str
    shape: torch.Size
    offset: int
    size: int
    fragment: int = 0


@dataclass(frozen=True)
class Layout:
    """The places of all parameters, in order. Equal layouts have equal digests."""

    entries: tuple[Entry, ...]

    @classmethod
    def of_shapes(cls, shapes: Iterable[tuple[str, torch.Size]], fragments: int = 1) -> Layout:
        """Lay out ``(name, shape)`` pairs given in definition order, in ``fragments``.

        Raises ValueError for more fragments than layers.
        """
        named = list(shapes)
        sizes = [math.prod(shape) for _, shape in named]
        layers = [layer_of(name) for name, _ in named]
        where = assign(layers, sizes, fragments) if fragments > 1 else [0] * len(named)
        # sorted() is stable, so definition order holds within each group
        order = sorted(range(len(named)), key=lambda at: (where[at], len(named[at][1]) < 2))
        entries, offset = [], 0
        for at in order:
            name, shape = named[at]
            entries.append(Entry(name, torch.Size(shape), offset, sizes[at], where[at]))
            offset += sizes[at]
        return cls(tuple(entries))

    @classmethod
    def of_module(cls, module: nn.Module, fragments: int = 1) -> Layout:
        """The layout of a module on any device (``meta`` included); tied tensors count once.

        A DTensor parameter counts with its whole shape.
        """
        return cls.of_shapes(((name, p.shape) for name, p in module.named_parameters()), fragments)

    @classmethod
    def of_config(cls, config: Model, fragments: int = 1) -> Layout:
        """The layout of the model that ``config`` describes, without allocating its parameters."""
        with torch.device("meta"):
            return cls.of_module(skeleton(config), fragments)

    @classmethod
    def of_manifest(cls, manifest: Manifest) -> Layout:
        """The layout of a run's model."""
        return cls.of_config(manifest.model, manifest.rounds.fragments)

    @cached_property
    def size(self) -> int:
        """Number of elements, N."""
        return sum(entry.size for entry in self.entries)

    @cached_property
    def dense(self) -> int:
        """Elements that belong to tensors of two or more dims; they come first in each fragment."""
        return sum(entry.size for entry in self.entries if len(entry.shape) >= 2)

    @cached_property
    def digest(self) -> str:
        """BLAKE3 (hex) of names and shapes in order."""
        lines = (f"{e.name} {'x'.join(map(str, e.shape))}\n" for e in self.entries)
        return blake3("".join(lines).encode()).hexdigest()

    @cached_property
    def cuts(self) -> tuple[Cut, ...]:
        """Where each fragment lies."""
        cuts, start = [], 0
        for fragment in range(1 + max((entry.fragment for entry in self.entries), default=0)):
            mine = [entry for entry in self.entries if entry.fragment == fragment]
            size = sum(entry.size for entry in mine)
            dense = sum(entry.size for entry in mine if len(entry.shape) >= 2)
            cuts.append(Cut(start, start + size, dense))
            start += size
        return tuple(cuts)

    def names(self, fragment: int) -> frozenset[str]:
        """The parameters of one fragment."""
        return frozenset(entry.name for entry in self.entries if entry.fragment == fragment)

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Views [shape] into ``vector`` [N] by name, in layout order; writing to one writes there.

        Raises ValueError when the vector has another size.
        """
        if vector.shape != (self.size,):
            raise ValueError(f"vector of shape {tuple(vector.shape)}, layout of {self.size}")
        return {e.name: vector[e.offset : e.offset + e.size].view(e.shape) for e in self.entries}

    @torch.no_grad()
    def flatten_into(self, parameters: nn.Module | Mapping[str, Tensor], out: Tensor) -> Tensor:
        """Copy parameters (any device or dtype, not sharded) into ``out`` [N]; returns ``out``.

        Raises ValueError when a name is missing or a shape differs.
        """
        named = _named(parameters)
        for name, view in self.views(out).items():
            view.copy_(_matching(named, name, view))
        return out

    @torch.no_grad()
    def load_from(self, vector: Tensor, parameters: nn.Module | Mapping[str, Tensor]) -> None:
        """Copy ``vector`` [N] into parameters, the inverse of :meth:`flatten_into`."""
        named = _named(parameters)
        for name, view in self.views(vector).items():
            _matching(named, name, view).copy_(view)


def _named(parameters: nn.Module | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if isinstance(parameters, nn.Module):
        return dict(parameters.named_parameters())
    return parameters


def _matching(named: Mapping[str, Tensor], name: str, view: Tensor) -> Tensor:
    tensor = named.get(name)
    if tensor is None:
        raise ValueError(f"parameter {name} is missing")
    if tensor.shape != view.shape:
        raise ValueError(f"parameter {name} is {tuple(tensor.shape)}, not {tuple(view.shape)}")
    return tensor


# a parameter of a layer: ours and most families of transformers say ``layers``, GPT-2 and its like
# ``h``, BERT's ``layer``, MPT and RWKV ``blocks``
IN_LAYER = re.compile(r"\b(?:layers|layer|h|blocks)\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """The number of the layer that a parameter is in, None for one outside of the layers."""
    found = IN_LAYER.search(name)
    return int(found[1]) if found else None


def initial_vector(
    config: Model,
    seed: int,
    out: Tensor,
    fragments: int = 1,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Tensor:
    """Write the seeded initial parameters of ``config`` into ``out`` [N] fp32, without a model.

    ``progress`` is told of the elements that are done and of all.
    Only for our own models: other libraries make values with their models.
    """
    if config.kind == "hf":
        return Layout.of_config(config, fragments).flatten_into(build(config, seed), out)
    done = 0
    for name, view in Layout.of_config(config, fragments).views(out).items():
        view.copy_(initial_value(config, name, view.shape, seed))
        done += view.numel()
        progress(done, len(out))
    return out
