"""Token folders: made of text, JSON lines and parquet, resumed, read here and over HTTP."""

import contextlib
import errno
import gzip
import hashlib
import io
import itertools
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from data_kit import TEXTS, folder, json_lines, serving, tokenizer_bytes

from node.data import documents
from node.data.folder import HELD_OUT, INDEX, ends
from node.data.opened import Opened
from node.data.partial_file import PART
from node.data.prepare import PARTIAL, prepare
from node.data.remote import Folder, FolderTokens
from node.data.shard_cache import ShardCache
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
    assert (caught.value.code, "atoll[datasets]" in caught.value.fix) == ("E605", True)


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
    note.write_text(json.dumps(begun | {"job": hashlib.sha256(job.encode()).hexdigest()}))
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


# -- over HTTP


@pytest.fixture
def served(tmp_path):
    made = folder(tmp_path / "www" / "data")
    with serving(tmp_path / "www") as server:
        yield server, f"{server.url}/data", made


def test_files_come_over_http_once_and_the_same(served, tmp_path):
    server, url, made = served
    here, there = Folder(str(made)), Folder(url, tmp_path / "cache")
    assert there.index == here.index
    for _ in range(2):
        for shard in there.index.shards:
            assert np.array_equal(there.tokens(shard), here.tokens(shard))
    assert sorted(name for name in server.asked if name.startswith("train")) == sorted(
        shard.name for shard in there.index.shards
    )
    again = Folder(url, tmp_path / "cache")  # another rank: from the cache
    again.tokens(again.index.shards[0])
    assert again._cache.fetched == 0


def test_long_files_come_from_a_server_that_has_no_ranges(tmp_path):
    source = json_lines(tmp_path / "long.jsonl", [TEXTS[0] * n for n in range(1, 40)])
    prepare([str(source)], tmp_path / "www" / "long", BYTES)
    with serving(tmp_path / "www") as server:
        there = Folder(f"{server.url}/long", tmp_path / "cache")
        (shard,) = there.index.shards
        assert shard.tokens > 10 * 2**20  # fsspec asks for less at once
        assert np.array_equal(
            there.tokens(shard), Folder(str(tmp_path / "www" / "long")).tokens(shard)
        )
        assert server.asked.count(shard.name) == 1


def test_the_cache_keeps_its_bound_and_what_was_used_last(served, tmp_path):
    _, url, _ = served
    largest = max(s.tokens for s in Folder(url).index.shards)
    there = Folder(url, tmp_path / "cache", 2 * largest)
    first, *others = there.index.shards
    there.tokens(first)
    for shard in others:
        there.tokens(shard)
        there.tokens(first)  # used again and again
        files = [f for f in (tmp_path / "cache").iterdir() if f.name[0] != "."]
        assert sum(f.stat().st_size for f in files) <= 2 * largest
    assert there._cache.fetched == len(there.index.shards)
    with pytest.raises(OperatorError, match="too small"):
        Folder(url, tmp_path / "small", 100).tokens(first)


def test_what_is_mapped_counts_and_is_in_use(served, tmp_path, monkeypatch):
    """A file that was thrown out takes its room on the disk for as long as it is mapped."""
    monkeypatch.setattr("node.data.remote.NOTED_S", 0.0)
    _, url, _ = served
    largest = max(s.tokens for s in Folder(url).index.shards)
    there = Folder(url, tmp_path / "cache", 2 * largest)
    tokens = FolderTokens(there)
    starts = itertools.accumulate((s.tokens for s in there.index.shards[:-1]), initial=0)
    for start in starts:
        tokens.window(start, 10)
        tokens.window(0, 10)
    assert len(there.index.shards) > 3
    assert there._cache.fetched == len(there.index.shards), "what is read again and again stays"
    kept = {f.name for f in (tmp_path / "cache").iterdir() if f.name[0] != "."}
    assert {there.index.shards[number].sha256 for number in tokens._open} == kept


def test_many_fetch_at_once_into_a_cache_with_room_for_few(tmp_path):
    """Files are thrown out and drafts end while others look for room."""
    bodies = {hashlib.sha256(bytes([n]) * 1000).hexdigest(): bytes([n]) * 1000 for n in range(8)}

    class Place:
        place = "memory"

        @contextlib.contextmanager
        def opening(self, name, start=0, version=""):
            yield Opened(io.BytesIO(bodies[name]))

    def fetch(seed: int) -> int:
        mine = ShardCache(tmp_path, 4000)  # a process of its own
        for name in random.Random(seed).choices(list(bodies), k=150):
            assert mine.get(Place(), name, name, 1000).name == name
            held = [f.name for f in tmp_path.iterdir() if len(f.name) == 64]
            assert len(held) <= 4
        return mine.fetched

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(fetch, range(4)))
    assert not [f for f in tmp_path.iterdir() if f.name.startswith(PART)]


def test_a_wrong_hash_is_fetched_again_and_refused_at_last(served, tmp_path):
    server, url, made = served
    there = Folder(url, tmp_path / "cache")
    shard = there.index.shards[0]
    server.spoil[shard.name] = 2
    assert np.array_equal(there.tokens(shard), Folder(str(made)).tokens(shard))
    assert server.asked.count(shard.name) == 3
    server.spoil[there.index.shards[1].name] = 99
    with pytest.raises(OperatorError, match="another hash") as caught:
        there.tokens(there.index.shards[1])
    assert caught.value.code == "E603"
    assert [f.name for f in (tmp_path / "cache").iterdir() if f.name[0] != "."] == [shard.sha256]


@pytest.mark.parametrize("status", [503, 0])
def test_a_server_that_is_away_is_asked_again(served, tmp_path, monkeypatch, status):
    monkeypatch.setattr("node.data.patience.FIRST_PAUSE_S", 0.001)
    server, url, made = served
    there = Folder(url, tmp_path / "cache")
    server.away, server.status = 5, status
    shard = there.index.shards[0]
    assert np.array_equal(there.tokens(shard), Folder(str(made)).tokens(shard))
    assert server.away == 0


def test_a_server_that_stays_away_is_told_of_and_an_answer_is_an_answer(
    served, tmp_path, monkeypatch
):
    server, url, _ = served
    there = Folder(url, tmp_path / "cache")
    server.away, server.status = 99, 403
    with pytest.raises(OperatorError, match="403"):
        there.tokens(there.index.shards[0])
    assert server.away == 98  # asked once only
    server.status = 503
    monkeypatch.setattr("node.data.patience.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("node.data.patience.PATIENCE_S", 0.1)
    with pytest.raises(OperatorError, match="503") as caught:
        there.tokens(there.index.shards[0])
    assert caught.value.code == "E603"
    assert 0 < server.away < 96


def test_where_the_disk_is_full_cached_files_make_way(served, tmp_path, monkeypatch):
    _, url, made = served
    there = Folder(url, tmp_path / "cache")
    first, second, third = there.index.shards[:3]
    for shard in (first, second):
        there.tokens(shard)
    real, full = ShardCache._make_room, [True]

    def make_room(cache, part):
        real(cache, part)
        if full:
            full.clear()
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ShardCache, "_make_room", make_room)
    assert np.array_equal(there.tokens(third), Folder(str(made)).tokens(third))
    kept = {f.name for f in (tmp_path / "cache").iterdir() if f.name[0] != "."}
    assert kept == {second.sha256, third.sha256}


def test_what_makes_way_on_a_full_disk_is_not_mapped(served, tmp_path, monkeypatch):
    _, url, made = served
    there = Folder(url, tmp_path / "cache")
    tokens, first = FolderTokens(there), there.index.shards[0]
    tokens.window(0, 10)
    real = ShardCache._make_room

    def make_room(cache, part):
        if tokens._open or (tmp_path / "cache" / first.sha256).exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        real(cache, part)

    monkeypatch.setattr(ShardCache, "_make_room", make_room)
    here = FolderTokens(Folder(str(made)))
    assert np.array_equal(tokens.window(first.tokens, 10), here.window(first.tokens, 10))


def test_a_cache_that_cannot_be_written_is_told_and_one_that_takes_no_notes_is_used(
    served, tmp_path, monkeypatch
):
    _, url, made = served
    (tmp_path / "file").touch()
    there = Folder(url, tmp_path / "file")
    with pytest.raises(OperatorError, match="File exists") as caught:
        there.tokens(there.index.shards[0])
    assert caught.value.code == "E402"

    def refused(*args, **options):
        raise PermissionError(errno.EPERM, "Operation not permitted")  # as for others' files

    tokens = FolderTokens(Folder(url, tmp_path / "cache"))
    tokens.window(0, 5)
    monkeypatch.setattr(os, "utime", refused)
    for start in (0, 5):
        tokens._noted.clear()
        here = FolderTokens(Folder(str(made)))
        assert np.array_equal(tokens.window(start, 5), here.window(start, 5))
        tokens = FolderTokens(Folder(url, tmp_path / "cache"))


def test_a_cached_file_that_was_damaged_is_fetched_again(served, tmp_path):
    _, url, made = served
    shard = Folder(url, tmp_path / "cache").index.shards[0]
    Folder(url, tmp_path / "cache").tokens(shard)
    cached = tmp_path / "cache" / shard.sha256
    cached.write_bytes(b"\1" + cached.read_bytes()[1:])
    there = Folder(url, tmp_path / "cache")
    assert np.array_equal(there.tokens(shard), Folder(str(made)).tokens(shard))
    assert there._cache.fetched == 1


def test_what_is_no_folder_is_refused(served, tmp_path):
    server, url, made = served
    for place in (f"{server.url}/nothing", str(tmp_path / "nothing"), "nosuch://x/y"):
        with pytest.raises(OperatorError) as caught:
            Folder(place, tmp_path / "cache")
        assert caught.value.code in ("E603", "E605")
    (tmp_path / "file").touch()
    with pytest.raises(OperatorError) as caught:
        Folder(str(tmp_path / "file"))
    assert (caught.value.code, caught.value.why) == ("E603", "Not a directory")
    index = json.loads((made / INDEX).read_text())
    index["shards"][0]["name"] = "../../secret"
    (made / INDEX).write_text(json.dumps(index))
    with pytest.raises(OperatorError, match="no token folder"):
        Folder(url, tmp_path / "cache")


def test_a_file_of_another_size_is_refused(tmp_path):
    made = folder(tmp_path / "out")
    there = Folder(str(made))
    with (made / there.index.shards[0].name).open("ab") as file:
        file.write(b"x")
    with pytest.raises(OperatorError, match="instead of"):
        there.tokens(there.index.shards[0])
