"""Documents that are tokenized together: as many bytes as memory allows, not only as many texts."""

import json

import numpy as np
import pytest
from live_kit import run

from node.data import batches as module
from node.data.batches import BATCH_DOCUMENTS, batches
from node.data.stream_parts import Parts
from node.data.stream_recipe import read_recipe, recipe_for
from node.data.tokenizer import ByteTokenizer


class Watched(ByteTokenizer):
    """One that has seen so many bytes in one call."""

    digest = "watched"
    calls: list[int]

    def __init__(self):
        self.calls = []

    def encode(self, documents):
        self.calls.append(sum(map(len, documents)))
        return super().encode(documents)


def test_a_batch_ends_with_the_text_that_fills_it(monkeypatch):
    monkeypatch.setattr(module, "BATCH_BYTES", 10)
    given = [b"x" * size for size in (4, 5, 1, 25, 0, 10, 3)]
    found = list(batches(given, len))
    assert [[len(text) for text in batch] for batch in found] == [[4, 5, 1], [25], [0, 10], [3]]
    found = list(batches([b""] * (BATCH_DOCUMENTS + 1), len))
    assert [len(batch) for batch in found] == [BATCH_DOCUMENTS, 1]


@pytest.mark.usefixtures("stream_home")
def test_long_documents_of_a_stream_are_tokenized_a_few_at_a_time(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    texts = [f"{n} " * (300 + n % 7) for n in range(300)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    place = f"datasets:json?files={tmp_path}/a.jsonl"
    longest = max(map(len, texts))
    found = []
    for most in (10**9, 4000):
        monkeypatch.setattr(module, "BATCH_BYTES", most)
        head, coder = Watched(), Watched()
        recipe = read_recipe(recipe_for(run(), head, place, lambda done, total: None))
        recipe = recipe.model_copy(update={"part_bytes": 20_000, "tokenizer": "bytes"})
        parts = Parts(recipe, np.dtype(np.uint8), tmp_path / str(most))
        monkeypatch.setattr(parts, "_coder", coder)
        found.append((recipe, parts.get(0, 0).tolist()))
        for calls in (head.calls, coder.calls):
            assert sum(calls) > 4000 + longest
            assert max(calls) < most + longest
    assert found[0] == found[1]
