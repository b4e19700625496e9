"""A token folder that was begun, and inputs that are others by then: mended, added, changed."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from data_kit import TEXTS, json_lines

from node.data import batches
from node.data import prepare as preparing
from node.data.begun import Place
from node.data.documents import find_inputs
from node.data.folder import INDEX, PARTIAL
from node.data.prepare import prepare
from node.data.tokenizer import ByteTokenizer, Ids
from protocols.errors import OperatorError

SHARD_TOKENS = 40_000
BROKEN = '{"text": "cut o'


@pytest.fixture(autouse=True)
def _of_few(monkeypatch):
    """What is read together with a bad record is lost with it."""
    monkeypatch.setattr(batches, "BATCH_DOCUMENTS", 3)


class Counting(ByteTokenizer):
    """Counts the documents that it encodes."""

    def __init__(self) -> None:
        self.encoded = 0

    def encode(self, documents: Sequence[bytes]) -> list[Ids]:
        self.encoded += len(documents)
        return super().encode(documents)


def made(inputs: Sequence[Path], out: Path, tokenizer: ByteTokenizer | None = None) -> list[str]:
    """What is told of it."""
    told: list[str] = []
    places = [str(path) for path in inputs]
    coder = tokenizer or ByteTokenizer()
    prepare(places, out, coder, shard_tokens=SHARD_TOKENS, tell=told.append)
    return told


def refused(inputs: Sequence[Path], out: Path, code: str = "E603") -> str:
    before = contents(out) if code == "E603" else {}
    with pytest.raises(OperatorError) as caught:
        made(inputs, out)
    assert caught.value.code == code
    if before:
        assert contents(out) == before
    return f"{caught.value.what}: {caught.value.why}"


def code_of(inputs: Sequence[Path], out: Path) -> str:
    """Of the error that it ends with, if it does."""
    try:
        made(inputs, out)
    except OperatorError as error:
        return error.code
    return ""


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def same_as_at_once(inputs: Sequence[Path], out: Path) -> bool:
    whole = out.with_name(f"{out.name}-whole")
    made(inputs, whole)
    return contents(out) == contents(whole)


def lines(texts: Sequence[str]) -> list[str]:
    return [json.dumps({"text": text}) for text in texts]


def write(path: Path, records: Sequence[str]) -> Path:
    data = "".join(f"{record}\n" for record in records).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["b.jsonl", "b.jsonl.gz"])
def test_a_record_that_was_mended_costs_no_more_than_the_file_that_was_begun(tmp_path, name):
    good = lines(TEXTS)
    first, last = json_lines(tmp_path / "a.jsonl", TEXTS[:40]), tmp_path / "c.txt"
    bad = write(tmp_path / name, [*good[40:-5], BROKEN, *good[-5:]])
    last.write_text("\n\n".join(TEXTS[:9]))
    inputs, out = [first, bad, last], tmp_path / "out"
    assert "no JSON" in refused(inputs, out, "E601")
    files = json.loads((out / PARTIAL).read_text())["shards"]
    assert len(files) > 5
    write(bad, good[40:])
    last.write_text("\n\n".join(TEXTS[:12]))
    inputs.append(json_lines(tmp_path / "d.jsonl", TEXTS[7:19]))
    rest, whole = Counting(), Counting()
    assert made(inputs, out, rest) == [f"{bad} changed: compares it with what was read of it"]
    assert not made(inputs, tmp_path / "whole", whole)
    assert contents(out) == contents(tmp_path / "whole")
    assert whole.encoded - rest.encoded > len(TEXTS) // 2


def test_whatever_is_mended_behind_a_fault_the_bytes_are_those_of_one_call(tmp_path):
    """And what is changed before it goes on or is refused, but gives no other bytes."""
    chance, went_on, refusals = random.Random(7), 0, 0
    texts = [text for text in TEXTS if len(text) < 6000]
    for number in range(12):
        place = tmp_path / f"{number}"
        place.mkdir()
        parts = [lines(chance.sample(texts, 40)) for _ in range(3)]
        names = [place / f"{part}.jsonl" for part in range(3)]
        faulty, at = chance.randrange(3), chance.randrange(40)
        for part, name in enumerate(names):
            write(name, parts[part] if part != faulty else [*parts[part][:at], BROKEN])
        refused(names, place / "out", "E601")
        changed = chance.randrange(3)
        there = chance.randrange(41)
        for part, name in enumerate(names):
            records = list(parts[part])
            if part == changed:
                more = lines(chance.sample(texts, chance.randrange(3)))
                records[there : there + chance.randrange(3)] = more
            if part in (faulty, changed):
                write(name, records)
        names += [json_lines(place / "3.jsonl", texts[:7])] * chance.randrange(2)
        begun = (place / "out" / PARTIAL).read_bytes()
        if code := code_of(names, place / "out"):
            assert (code, (place / "out" / PARTIAL).read_bytes()) == ("E603", begun)
            refusals += 1
        else:
            assert same_as_at_once(names, place / "out")
            went_on += 1
    assert went_on
    assert refusals


def begun(tmp_path: Path) -> tuple[list[Path], Path]:
    """Inputs and the folder that a fault in the last of them has left."""
    good = lines(TEXTS)
    first = json_lines(tmp_path / "a.jsonl", TEXTS[:40])
    bad = write(tmp_path / "b.jsonl", [*good[40:-5], BROKEN])
    refused([first, bad], tmp_path / "out", "E601")
    return [first, bad], tmp_path / "out"


def test_what_was_read_has_to_be_as_it_was(tmp_path):
    inputs, out = begun(tmp_path)
    first, bad = inputs
    good = lines(TEXTS)
    write(bad, [good[0], *good[41:]])
    assert f"{bad} changed in what was read" in refused(inputs, out)
    write(bad, good[40:45])  # less than was read
    assert f"{bad} changed in what was read" in refused(inputs, out)
    write(bad, good[40:])
    times = first.stat().st_mtime_ns
    os.utime(first, ns=(times, times + 1))
    assert "all of its first 1 input" in refused(inputs, out)
    assert "all of its first 1 input" in refused([tmp_path / "out.jsonl", bad][1:], out)
    os.utime(first, ns=(times, times))
    assert "with more inputs" in refused([first], out)
    assert f"datasets:{bad} changed in what" in refused([first, Path(f"datasets:{bad}")], out)
    made(inputs, out)
    assert same_as_at_once(inputs, out)


def test_what_did_not_fit_into_the_last_file_has_to_be_as_it_was(tmp_path):
    """A shorter text would stand in that file."""
    good = lines(["a" * 30_000, "b" * 30_000, "c" * 30_000])
    source, out = write(tmp_path / "a.jsonl", [*good, BROKEN]), tmp_path / "out"
    refused([source], out, "E601")
    assert json.loads((out / PARTIAL).read_text())["records"] == 2
    write(source, [*good[:2], *lines(["d" * 9])])
    assert "changed in what was read" in refused([source], out)
    write(source, [*good, *lines(["d" * 9])])
    made([source], out)
    assert same_as_at_once([source], out)


def test_nothing_is_added_to_a_last_file_that_was_closed(tmp_path, monkeypatch):
    source, out = json_lines(tmp_path / "a.jsonl"), tmp_path / "out"
    more = json_lines(tmp_path / "b.jsonl", TEXTS[:9])
    replace = preparing._replace

    def interrupted(path: Path, data: bytes) -> None:
        if path.name == INDEX:
            raise KeyboardInterrupt
        replace(path, data)

    with monkeypatch.context() as patched:
        patched.setattr(preparing, "_replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made([source], out)
    assert "with fewer inputs" in refused([source, more], out)
    made([source], out)
    assert same_as_at_once([source], out)


@pytest.mark.parametrize("loss", ["all", "some"])
@pytest.mark.parametrize("end", [".bin", ".ends"])
@pytest.mark.parametrize("name", ["held-out", "train-00001"])
def test_what_was_noted_has_to_be_there(tmp_path, name, end, loss):
    """What was held out would be zeros, and with hashes that fit."""
    inputs, out = begun(tmp_path)
    write(inputs[1], lines(TEXTS)[40:])
    spoilt = out / (name + end)
    before = spoilt.read_bytes()
    noted = Place.model_validate_json((out / PARTIAL).read_bytes())
    bytes_of = {".bin": noted.held_out_tokens, ".ends": 8 * noted.held_out_documents}
    size = bytes_of[end] if name == "held-out" else len(before)
    assert size >= 8
    if loss == "all":
        spoilt.unlink()
        assert f"{spoilt.name} is missing" in refused(inputs, out)
    else:
        spoilt.write_bytes(before[: size - 8])
        said = f"{spoilt.name} has {size - 8:,} bytes instead of {size:,}"
        assert said in refused(inputs, out)
    spoilt.write_bytes(before[:size])
    made(inputs, out)
    assert same_as_at_once(inputs, out)


def test_a_text_that_is_named_and_empty_is_left_out_as_in_a_folder(tmp_path):
    text, empty = tmp_path / "a.txt", tmp_path / "empty.txt"
    text.write_text("Text. " * 9)
    empty.write_text("\n")
    told: list[str] = []
    (found,) = find_inputs([str(empty), str(text)], told.append)
    assert found.name == str(text)
    assert told == [f"leaves out {empty} (it is empty)"]
    with pytest.raises(OperatorError, match="nothing to read"):
        find_inputs([str(empty)])


def test_a_text_that_is_named_and_none_is_refused_before_the_work(tmp_path):
    (tmp_path / "b.txt").write_bytes("caf\xe9".encode("latin-1"))
    inputs, out = [json_lines(tmp_path / "a.jsonl"), tmp_path / "b.txt"], tmp_path / "out"
    assert "not UTF-8" in refused(inputs, out, "E601")
    assert not out.exists()


def test_who_has_a_bad_record_is_told_what_to_do(command, tmp_path):
    good, source, out = lines(TEXTS), tmp_path / "a.jsonl", tmp_path / "out"
    given = ("data", "prepare", source, "--out", out, "--shard-tokens", SHARD_TOKENS)
    write(source, [BROKEN, *good])
    assert "mend that input" not in command(*given)[2]  # it may be another field, or another file
    write(source, [*good, BROKEN])
    assert "mend that input, then give the same command again: it goes on" in command(*given)[2]
    mistyped = ("data", "prepare", tmp_path / "aa.jsonl", *given[3:])
    assert "fix: give files or folders" in command(*mistyped)[2]
    write(source, good)
    assert command(*given)[0] == 0
    assert same_as_at_once([source], out)
