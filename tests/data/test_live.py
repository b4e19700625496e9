"""Training from a stream: who reads what, without reading twice, and from where one goes on."""

import itertools
import threading
from unittest.mock import ANY

import numpy as np
import pytest
from live_kit import (
    BATCH,
    ISLANDS,
    NUMBERED,
    STEPS,
    begun_at,
    pieces,
    release,
    run,
    stream,
    windows,
)

from node.data.documents import Input, read
from node.data.live import StreamData
from node.data.stream_parts import Parts, deal
from node.data.stream_recipe import read_recipe, recipe_for
from node.data.streamed import DataSet, Mark, Reader
from node.data.tokenizer import ByteTokenizer
from node.hosts.tokens import fingerprint
from node.setting_values import place
from node.trainer.corpus import is_held_out

pytest.importorskip("datasets")
pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.usefixtures("stream_home")


@pytest.mark.parametrize("texts", ["json", "parquet", "folder"], indirect=True)
def test_no_text_is_read_by_two_islands_or_in_two_rounds(texts, tmp_path):
    data = [stream(run(), texts[1], tmp_path / str(island)) for island in range(ISLANDS)]
    seen = []
    for round in range(4):
        for slot in range(ISLANDS):
            rows = windows(data[slot], round, slot, ISLANDS)
            assert len(set(rows)) == len(rows) == STEPS * BATCH
            seen.append(pieces(rows))
    for one, other in itertools.combinations(seen, 2):
        assert not one & other
    held_out = {t.split()[0].encode() for t in texts[0] if is_held_out(t.encode())}
    assert held_out
    assert not held_out & set().union(*seen)


@pytest.mark.parametrize("texts", ["json", "parquet", "folder"], indirect=True)
def test_another_machine_reads_the_same_at_the_same_place_whatever_it_read_before(texts, tmp_path):
    first = stream(run(), texts[1], tmp_path / "a")
    through = [windows(first, round, 1, ISLANDS) for round in range(6)]
    late = stream(run(), texts[1], tmp_path / "b")
    assert windows(late, 5, 1, ISLANDS) == through[5]
    assert windows(late, 2, 1, ISLANDS) == through[2]  # back, after a checkpoint was loaded
    assert windows(late, 3, 2, 3) != through[3]


def test_a_stream_that_was_dealt_out_by_rounds_stays_so(texts, tmp_path):
    kept = recipe_for(run(), ByteTokenizer(), texts[1], lambda done, total: None)
    assert not StreamData(read_recipe(kept), NUMBERED, tmp_path).numbered


@pytest.mark.parametrize("texts", ["json", "parquet", "folder"], indirect=True)
def test_a_restart_goes_on_from_its_mark_without_reading_all_again(texts, tmp_path, monkeypatch):
    before = stream(run(), texts[1], tmp_path / "a")
    kept = [windows(before, round, 0, ISLANDS) for round in range(6)]
    for thread in threading.enumerate():
        if thread.name == "stream-ahead":  # or it makes a part once more, behind our back
            thread.join(30)
    with (before.parts._directory / "marks").open("a") as marks:
        marks.write('{"round": 9, "ma')  # a kill
    for part in before.parts._directory.glob("part-*"):
        part.unlink()
    begun = begun_at(monkeypatch)
    release(before.parts)
    again = Parts(before.parts._recipe, np.dtype(np.uint8), tmp_path / "a")
    tokens = again.get(5, 0)
    assert [mark.examples > 60 and mark.state is not None for mark in begun] == [True]
    everything = bytes(tokens.tolist())
    assert all(row in everything for row in kept[5])


@pytest.mark.parametrize("texts", ["json", "parquet", "folder"], indirect=True)
def test_a_mark_of_another_version_of_the_library_is_passed_over_by_its_count(texts):
    source = DataSet.parse(texts[1])
    reader = Reader(source)
    for _ in range(170):
        next(reader)
    mark = reader.mark
    assert mark.state is not None
    assert mark.examples == 170
    following = list(itertools.islice(reader, 300))  # over the end: it begins again
    assert (reader.passes, reader.examples) == (1, 170 + 300 - 450)
    assert following == [t.encode() for t in (texts[0] * 2)[170:470]]
    for other in (mark, mark.model_copy(update={"library": "0.1", "state": {"x": 1}})):
        again = Reader(source, other)
        assert list(itertools.islice(again, 300)) == following
        assert (again.passes, again.examples) == (reader.passes, reader.examples)


@pytest.mark.parametrize("texts", ["json", "parquet"], indirect=True)
def test_each_example_that_is_passed_over_is_a_sign_and_what_follows_has_a_state(texts):
    source, signs, mark = DataSet.parse(texts[1]), [], Mark(examples=170)
    reader = Reader(source, mark, lambda: signs.append(reader.mark))
    assert reader.mark == mark
    first, following = next(reader), reader.mark
    assert first == texts[0][170].encode()
    assert signs == [mark] * 170 + [mark.model_copy(update={"state": ANY, "library": ANY})]
    assert following.state is not None
    assert next(Reader(source, following)) == next(reader) == texts[0][171].encode()


def test_documents_are_apart_where_the_run_says_so(texts, tmp_path):
    manifest = run()
    model = manifest.model.model_copy(update={"attention": "document"})
    data = stream(manifest.model_copy(update={"model": model}), texts[1], tmp_path)
    inputs, targets = data.batch(0, 0, 1, 0)
    assert (targets[inputs == 0] == -100).all()
    assert (inputs == 0).any()


def test_texts_are_dealt_evenly():
    texts = (bytes([65 + n % 20]) * (1 + n * 7 % 50) + str(n).encode() for n in itertools.count())
    filled = [0] * 4
    for part, text in deal(texts, 4, 500):
        filled[part] += len(text) + 1
    assert min(filled) >= 500
    assert max(filled) - min(filled) < 60


def test_names_are_read_and_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.parquet").touch()
    assert place("datasets:set") == f"datasets:{tmp_path}/set@train"
    told = place("datasets:parquet@test?files=set/*.parquet&field=content&revision=abc")
    assert told == (
        f"datasets:parquet@test?field=content&revision=abc&files={tmp_path}/set/*.parquet"
    )
    assert place(told) == told
    found = DataSet.parse("datasets:org/name?config=20231101.en")
    assert (found.name, found.split, found.config) == ("org/name", "train", "20231101.en")
    assert place("https://host/tokens") == "https://host/tokens"


def test_a_format_is_one_where_a_folder_has_its_name(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.log").write_text("a line\n")
    assert next(Reader(DataSet.parse("datasets:text?files=text/*.log"))) == b"a line"
    for name in ("./text", "~/text", "."):
        with monkeypatch.context() as patched:
            patched.setenv("HOME", str(tmp_path))
            found = DataSet.parse(f"datasets:{name}?files=text/*.log")
        assert found.name == str(tmp_path / ("" if name == "." else "text"))


def test_hosts_of_an_island_compare_what_they_stream(texts, tmp_path):
    paths = [
        recipe_for(run(seed=seed), ByteTokenizer(), texts[1], lambda done, total: None)
        for seed in (0, 1)
    ]
    other = recipe_for(run(), ByteTokenizer(), f"{texts[1]}&field=text", lambda done, total: None)
    assert fingerprint(paths[0], 256) == fingerprint(paths[1], 256) != fingerprint(other, 256)


def test_a_stream_is_prepared_like_any_input(texts):
    source = Input(texts[1], 0)
    assert [d.text.decode() for d in read(source, "text")] == texts[0]
    assert [d.text.decode() for d in read(source, "text", skip=440)] == texts[0][440:]


def test_a_plus_sign_in_a_path_is_one(tmp_path):
    (folder := tmp_path / "c++ & more").mkdir()
    (folder / "a.jsonl").write_text('{"text": "a"}\n')
    place = f"datasets:json?files={tmp_path}/c++%20%26%20more/a.jsonl&field=text"
    source = DataSet.parse(place)
    assert (source.files, source.field) == ((f"{folder}/a.jsonl",), "text")
    assert DataSet.parse(str(source)) == source
    assert next(Reader(source)) == b"a"
