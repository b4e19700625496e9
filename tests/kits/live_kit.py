"""Data sets to be streamed, and what islands read of them."""

import json
import random

import pytest

from bootstrap.manifest import Data, Evaluation, Manifest, Model, Rounds
from node.data import stream_parts
from node.data.live import StreamData
from node.data.stream_recipe import read_recipe, recipe_for
from node.data.streamed import Mark, Reader
from node.data.tokenizer import ByteTokenizer

pyarrow = pytest.importorskip("pyarrow")
SEQ_LEN, BATCH, STEPS, ISLANDS = 32, 2, 4, 3


def written(kind, tmp_path):
    """Texts of all lengths in three files, each text once; and the place of the data set.

    The files are JSON lines, or parquet with groups of 40 rows, named one by one or as a folder.
    """
    chance = random.Random(0)
    found = []
    for number in range(3):
        lines = []
        for line in range(150):
            word = f"{number}.{line} "
            lines.append({"text": word * chance.randint(1, 12), "id": line})
        found += [line["text"] for line in lines]
        if kind == "json":
            (tmp_path / f"part-{number}.jsonl").write_text(
                "".join(json.dumps(x) + "\n" for x in lines)
            )
        else:
            (tmp_path / "set").mkdir(exist_ok=True)
            place = tmp_path / "set" / f"train-{number:05}-of-00003.parquet"
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(lines), place, row_group_size=40)
    places = {
        "json": f"datasets:json?files={tmp_path}/part-*.jsonl",
        "parquet": f"datasets:parquet?files={tmp_path}/set/*.parquet",
        "folder": f"datasets:{tmp_path}/set",
    }
    return found, places[kind]


def run(**changes):
    return Manifest(
        model=Model(max_seq_len=SEQ_LEN),
        data=Data(seq_len=SEQ_LEN, batch_size=BATCH, islands=ISLANDS, **changes),
        rounds=Rounds(inner_steps=STEPS, overlap_steps=0),
        evaluation=Evaluation(sequences=2),
    )


def stream(manifest, where, cache, tokenizer=None):
    path = recipe_for(manifest, tokenizer or ByteTokenizer(), where, lambda done, total: None)
    return StreamData(read_recipe(path), manifest, cache)


def windows(data, round, slot, slots, steps=STEPS):
    """What an island trains on in a round, as bytes by row."""
    found = []
    for step in range(steps):
        inputs, targets = data.batch(round, slot, slots, step)
        assert inputs[:, 1:].equal(targets[:, :-1])
        found += [bytes(row.tolist()) for row in inputs]
    return found


def pieces(rows):
    """The whole words of windows: each is of one text."""
    return {word for row in rows for word in row.replace(b"\0", b" ").split()[1:-1]}


NUMBERED = Manifest.model_validate(
    {
        "mode": "async",
        "model": {"max_seq_len": SEQ_LEN},
        "data": {"seq_len": SEQ_LEN, "batch_size": BATCH, "islands": ISLANDS},
        "rounds": {"inner_steps": 8},
        "evaluation": {"sequences": 2},
    }
)


def begun_at(monkeypatch):
    """The list of marks from which readers begin from now on."""
    begun = []

    class Watched(Reader):
        def __init__(self, source, at=None, *more):
            begun.append(at or Mark())
            super().__init__(source, at, *more)

    monkeypatch.setattr(stream_parts, "Reader", Watched)
    return begun


def release(parts):
    """As when the process that makes parts has ended."""
    parts._give_up()
