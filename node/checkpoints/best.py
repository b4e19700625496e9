"""Which checkpoint is the best: by the validation loss of the outer parameters that are in it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from node.checkpoints.index import Facts, Index

T = TypeVar("T")


def by_loss(found: Iterable[tuple[T, Index | None]]) -> list[T]:
    """Those whose outer parameters were evaluated, the lowest loss first.

    ``found``: the newest first, each with what it says of itself. Only those of the newest one's
    run count: a folder may have another one's, which is no better.
    """
    said = [(one, index) for one, index in found if index is not None]
    run = said[0][1].run if said else ""
    known = [(index.validation, one) for one, index in said if index.run == run]
    losses = [(loss, one) for loss, one in known if loss is not None]
    return [one for _, one in sorted(losses, key=lambda each: each[0])]


def as_good(facts: Facts, said: Index | None) -> bool:
    """Whether what is made now has as low a validation loss as the best so far."""
    if said is None or said.validation is None:
        return True
    return facts.validation is not None and facts.validation <= said.validation


def seems_whole(checkpoint: Path, index: Index | None) -> bool:
    """Whether all files that it names are there with their lengths; their bytes are not read."""
    if index is None:
        return False
    try:
        return all(
            (checkpoint / name).stat().st_size == file.bytes for name, file in index.files.items()
        )
    except OSError:
        return False
