"""Documents in batches, each of which is tokenized in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

BATCH_DOCUMENTS = 256
BATCH_BYTES = 4 * 1024 * 1024  # a tokenizer takes many times as much while it is at it

T = TypeVar("T")


def batches(documents: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """All of them in order, ``size`` bytes each; a batch has one at least, however long it is."""
    batch: list[T] = []
    held = 0
    for document in documents:
        batch.append(document)
        held += size(document)
        if len(batch) >= BATCH_DOCUMENTS or held >= BATCH_BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch
