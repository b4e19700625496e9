"""Token folders: made of text, JSON lines and parquet, resumed, and read."""

import errno
import gzip
import hashlib
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
from data_kit import TEXTS, folder, json_lines, tokenizer_bytes

from node.data import documents
from node.data.folder import HELD_OUT, PARTIAL, ends
from node.data.prepare import prepare
from node.data.remote import Folder, FolderTokens
from node.data.tokenizer import ByteTokenizer, FileTokenizer
from node.trainer.corpus import is_held_out
from node.trainer.data import TrainingData
from node.trainer.sampler import Sampler
from protocols.errors import OperatorError

BYTES = ByteTokenizer()


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def documents_of(path: Path, tokenizer=BYTES, name: str = "") -> list[str]:
    """Texts, cut out of the tokens at the noted ends."""
    there = Folder(str(path))
    found = []
    for shard in [s for s in (*there.index.shards, there.index.held_out) if name in s.name]:
        tokens = there.tokens(shard)
        marks = np.frombuffer((path / ends(shard.name)).read_bytes(), "<u8")
        assert len(marks) == shard.documents
        for start, end in zip([0, *marks[:-1].tolist()], marks.tolist(), strict=True):
            assert tokens[end - 1] == tokenizer.document_end
            found.append(tokenizer.decode(tokens[start : end - 1].tolist()))
    return found


@pytest.mark.parametrize("bpe", [False, True])
def test_all_documents_are_there_and_the_held_out_apart(tmp_path, bpe):
    tokenizer = FileTokenizer(tokenizer_bytes()) if bpe else BYTES
    made = folder(tmp_path / "out", bpe=bpe)
    trained, held_out = (
        documents_of(made, tokenizer, "train"),
        documents_of(made, tokenizer, "held"),
    )
    assert trained == [text for text in TEXTS if not is_held_out(text.encode())]
    assert held_out == [text for text in TEXTS if is_held_out(text.encode())]
    index = Folder(str(made)).index
    assert len(index.shards) > 2
    assert (index.vocab_size, index.dtype) == ((600, "uint16") if bpe else (256, "uint8"))
    for shard in (*index.shards, index.held_out):
        assert hashlib.sha256((made / shard.name).read_bytes()).hexdigest() == shard.sha256
    assert (made / "tokenizer.json").exists() == bpe


def test_the_same_from_every_kind_of_file(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    lines = json_lines(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    table = pyarrow.table({"text": TEXTS, "id": list(range(len(TEXTS)))})
    parquet.write_table(table, tmp_path / "c.parquet", row_group_size=50)
    (tmp_path / "set").mkdir()
    json_lines(tmp_path / "set" / "train.jsonl")
    places = ["a.jsonl", "b.jsonl.gz", "c.parquet"]
    results = []
    for number, place in enumerate(places):
        out = tmp_path / f"out{number}"
        prepare([str(tmp_path / place)], out, BYTES, shard_tokens=100_000)
        results.append(contents(out))
    assert results[0] == results[1] == results[2]


def test_a_data_set_is_streamed(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "set").mkdir()
    json_lines(tmp_path / "set" / "train.jsonl", TEXTS[:40])
    source = documents.Input(f"datasets:{tmp_path / 'set'}", 0)
    texts = [d.text.decode() for d in documents.read(source, "text")]
    assert texts == TEXTS[:40]
    assert [d.text.decode() for d in documents.read(source, "text", skip=30)] == TEXTS[30:40]


def test_a_missing_library_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(OperatorError, match="datasets is not installed") as caught:
        list(documents.read(documents.Input("datasets:x", 0), "text"))
    assert (caught.value.code, ".[datasets]" in caught.value.fix) == ("E605", True)


@pytest.mark.parametrize("bpe", [False, True])
def test_it_goes_on_where_it_was_with_the_same_bytes(tmp_path, bpe):
    tokenizer = FileTokenizer(tokenizer_bytes()) if bpe else BYTES
    inputs = []
    for part in range(3):
        inputs.append(str(json_lines(tmp_path / f"{part}.jsonl", TEXTS[part::3])))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    prepare(inputs, whole, tokenizer, shard_tokens=40_000)
    chance = random.Random(1)
    breaks = 0

    def stop(progress):
        if chance.random() < 0.4:
            raise KeyboardInterrupt

    for _ in range(200):
        try:
            prepare(inputs, broken, tokenizer, shard_tokens=40_000, report=stop)
            break
        except KeyboardInterrupt:
            breaks += 1
            (broken / "train-99999.bin").touch()  # whatever a kill leaves behind
            with (broken / HELD_OUT).open("ab") as file:
                file.write(b"half")
    assert breaks
    assert contents(broken) == contents(whole)
    assert not (broken / PARTIAL).exists()


@pytest.mark.parametrize("bpe", [False, True])
def test_what_a_version_has_begun_that_did_not_note_the_document_end_is_finished(tmp_path, bpe):
    tokenizer = FileTokenizer(tokenizer_bytes()) if bpe else BYTES
    source = str(json_lines(tmp_path / "out.jsonl"))

    def stop(progress):
        if progress.tokens > 100_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([source], tmp_path / "out", tokenizer, shard_tokens=60_000, report=stop)
    note = tmp_path / "out" / PARTIAL
    begun = json.loads(note.read_text())
    assert begun["shards"]
    inputs = [[i.name, i.size, i.changed] for i in documents.find_inputs([source])]
    job = json.dumps([inputs, tokenizer.digest, "text", 60_000])
    for later in ("used_up", "input", "texts", "next"):
        del begun[later]
    note.write_text(json.dumps(begun | {"job": hashlib.sha256(job.encode()).hexdigest()}))

    def stop_at_once(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([source], tmp_path / "out", tokenizer, shard_tokens=60_000, report=stop_at_once)
    prepare([source], tmp_path / "out", tokenizer, shard_tokens=60_000)
    assert contents(tmp_path / "out") == contents(folder(tmp_path / "whole", bpe=bpe))


def test_what_is_in_the_way_is_refused(tmp_path):
    source = json_lines(tmp_path / "a.jsonl")
    made = folder(tmp_path / "out")
    with pytest.raises(OperatorError, match="not empty"):
        prepare([str(source)], made, BYTES)
    (tmp_path / "partial").mkdir()
    begun = {"job": "another", "shards": [Folder(str(made)).index.shards[0].model_dump()]}
    (tmp_path / "partial" / PARTIAL).write_text(json.dumps(begun))
    with pytest.raises(OperatorError, match="other data"):
        prepare([str(source)], tmp_path / "partial", BYTES)


def test_a_beginning_without_a_whole_file_is_no_obstacle(tmp_path):
    lines = [{"body": text, "text": "other"} for text in TEXTS]
    del lines[-1]["text"]
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(OperatorError, match="see --field"):
        prepare([str(source)], tmp_path / "out", BYTES, shard_tokens=60_000)
    prepare([str(source)], tmp_path / "out", BYTES, field="body", shard_tokens=60_000)
    assert contents(tmp_path / "out") == contents(folder(tmp_path / "other"))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"txt": "a"}', "no 'text'"),
        ("{", "no JSON"),
        ('{"text": 3}', "no text"),
        ("[1]", "list"),
        ('{"text": ' + "[" * 100_000, "brackets"),
    ],
)
def test_records_without_text_are_refused_with_their_number(tmp_path, line, why):
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "first"}\n' + line + "\n")
    with pytest.raises(OperatorError, match=why) as caught:
        prepare([str(source)], tmp_path / "out", BYTES)
    assert caught.value.code == "E601"
    assert "2" in caught.value.why


def test_compressed_lines_that_are_damaged_are_refused(tmp_path):
    whole = gzip.compress(json_lines(tmp_path / "a.jsonl").read_bytes(), mtime=0)
    source = tmp_path / "a.jsonl.gz"
    middle = len(whole) // 2
    cases = (whole[:middle], whole[:-1], b"x" + whole, whole[:middle] + whole[middle + 1 :])
    for number, damaged in enumerate(cases):
        source.write_bytes(damaged)
        with pytest.raises(OperatorError) as caught:
            prepare([str(source)], tmp_path / f"out-{number}", BYTES)
        assert caught.value.code == "E601"
        assert str(source) in caught.value.what


def test_windows_across_files(tmp_path):
    tokens = FolderTokens(Folder(str(folder(tmp_path / "out", shard_tokens=5_000))))
    joined = np.concatenate([tokens._folder.tokens(s) for s in tokens._folder.index.shards])
    assert len(tokens) == len(joined)
    chance = random.Random(0)
    for _ in range(200):
        start = chance.randrange(len(joined) - 12_000)
        length = chance.choice([1, 17, 12_000])
        assert np.array_equal(tokens.window(start, length), joined[start : start + length])
    x, y = TrainingData(tokens, Sampler(len(tokens), 32, 4, 0)).batch(0, 0, 1, 0)
    assert x[:, 1:].equal(y[:, :-1])
    with pytest.raises(ValueError, match="no tokens"):
        tokens.window(len(joined) - 3, 4)


def test_a_disk_that_was_full_from_the_start_is_no_reason_to_begin_elsewhere(tmp_path, monkeypatch):
    source, out = json_lines(tmp_path / "a.jsonl"), tmp_path / "out"
    sync, full = os.fsync, [True]

    def fsync(file: int) -> None:
        if full:
            full.clear()
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OperatorError, match="cannot write tokens") as caught:
        prepare([str(source)], out, BYTES)
    assert caught.value.code == "E402"
    assert "give the same command again" in caught.value.fix
    prepare([str(source)], out, BYTES)
    assert contents(out) == contents(folder(tmp_path / "other", shard_tokens=50_000_000))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / HELD_OUT).write_bytes(b"somebody's")
    with pytest.raises(OperatorError, match="is not empty"):
        prepare([str(source)], tmp_path / "full", BYTES)


def test_a_file_of_another_size_is_refused(tmp_path):
    made = folder(tmp_path / "out")
    there = Folder(str(made))
    with (made / there.index.shards[0].name).open("ab") as file:
        file.write(b"x")
    with pytest.raises(OperatorError, match="instead of"):
        there.tokens(there.index.shards[0])
