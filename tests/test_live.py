"""Training from a stream: who reads what, without reading twice, and from where one goes on."""

import itertools
import json
import random
import threading

import numpy as np
import pytest
from data_kit import tokenizer_bytes

from bootstrap.manifest import Data, Evaluation, Manifest, Model, Rounds
from node.data import live, patience
from node.data.documents import Input, read
from node.data.live import Parts, StreamData, deal, read_recipe, recipe_for
from node.data.streamed import DataSet, Mark, Reader
from node.data.supply import Given, make, tokens_for, usable
from node.data.tokenizer import ByteTokenizer, FileTokenizer
from node.errors import operator_error
from node.hosts.tokens import fingerprint
from node.setting_values import place
from node.trainer.corpus import is_held_out
from protocols.errors import OperatorError

pytest.importorskip("datasets")
pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")
SEQ_LEN, BATCH, STEPS, ISLANDS = 32, 2, 4, 3


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def texts(request, tmp_path):
    """Texts of all lengths in three files, each text once; and the place of the data set.

    The files are JSON lines, or by ``request.param`` parquet with groups of 40 rows, named one by
    one or as a folder.
    """
    kind = getattr(request, "param", "json")
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


NUMBERED = Manifest.model_validate(
    {
        "mode": "async",
        "model": {"max_seq_len": SEQ_LEN},
        "data": {"seq_len": SEQ_LEN, "batch_size": BATCH, "islands": ISLANDS},
        "rounds": {"inner_steps": 8},
        "evaluation": {"sequences": 2},
    }
)


def numbered(data, *stretches):
    """What an island trains on at the numbers that it was given, as bytes by row."""
    found = []
    for first, end in zip(stretches[::2], stretches[1::2], strict=True):
        for number in range(first, end):
            found += [bytes(row.tolist()) for row in data.batch(0, 0, 1, number)[0]]
    return found


def settled():
    """Until nothing is made ahead any more."""
    for thread in threading.enumerate():
        if thread.name == "stream-ahead":
            thread.join(30)
            assert not thread.is_alive()


@pytest.mark.parametrize("texts", ["json", "parquet"], indirect=True)
def test_of_numbered_batches_no_text_is_read_twice_and_only_own_parts_are_made(texts, tmp_path):
    """Stretches begin and end anywhere: a part that is cut is made by both."""
    given = [(0, 7, 16, 21), (7, 13), (13, 16, 21, 24)]
    islands = [stream(NUMBERED, texts[1], tmp_path / str(n)) for n in range(len(given))]
    rows = []
    for data, stretches in zip(islands, given, strict=True):
        data.expect(stretches)
        rows.append(numbered(data, *stretches))
    assert [len(set(one)) for one in rows] == [12 * BATCH, 6 * BATCH, 6 * BATCH]
    for one, other in itertools.combinations(rows, 2):
        assert not set(one) & set(other)
    settled()
    # of two batches each; the thread knows where a stretch ends
    assert [data.parts.made for data in islands] == [4 + 3, 4, 2 + 2]
    late = stream(NUMBERED, texts[1], tmp_path / "late")
    assert numbered(late, 20, 21, 7, 8) == [*rows[0][-BATCH:], *rows[1][:BATCH]]


def test_the_part_that_follows_is_made_as_soon_as_it_is_known(texts, tmp_path):
    data = stream(NUMBERED, texts[1], tmp_path)
    assert data.numbered
    data.expect((0, 2))
    numbered(data, 0, 1)
    settled()
    assert data.parts.made == 1
    data.expect((1, 2, 9, 12))
    settled()
    kept = {file.stem for file in data.parts._directory.glob("part-*.bin")}
    assert kept == {"part-0-0", "part-4-0"}, "the first is being read"
    numbered(data, 1, 2, 9, 10)
    settled()
    assert data.parts.made == 3
    assert data.parts.get(4, 0) is not None


def test_who_waits_for_a_part_sees_that_another_process_reads(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(live, "SIGN_S", 0.0)
    mine, other = (stream(run(), texts[1], tmp_path / "parts") for _ in range(2))
    seen = [other.headway]
    for round in range(2):
        mine.batch(round, 0, ISLANDS, 0)
        settled()
        seen.append(other.headway)
    assert seen[0] == 0
    assert len(set(seen)) == 3


def test_a_stream_that_was_dealt_out_by_rounds_stays_so(texts, tmp_path):
    kept = recipe_for(run(), ByteTokenizer(), texts[1], lambda done, total: None)
    assert not StreamData(read_recipe(kept), NUMBERED, tmp_path).numbered


def begun_at(monkeypatch):
    """The list of marks from which readers begin from now on."""
    begun = []

    class Watched(Reader):
        def __init__(self, source, at=None):
            begun.append(at or Mark())
            super().__init__(source, at)

    monkeypatch.setattr(live, "Reader", Watched)
    return begun


def release(parts):
    """As when the process that makes parts has ended."""
    parts._give_up()


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


def test_parts_have_enough_for_the_steps_of_a_round_with_a_tokenizer_too(texts, tmp_path):
    tokenizer = FileTokenizer(tokenizer_bytes())
    given = tmp_path / "tokenizer.json"
    given.write_bytes(tokenizer.data)
    supply = make(run(), texts[1], Given(given), tmp_path, lambda done, total: None)
    manifest = supply.manifest
    assert manifest.data.tokenizer == tokenizer.digest
    joined = tokens_for(manifest, supply.shard, supply.tokenizer, texts[1], lambda done, total: 0)
    assert joined == supply.tokens
    assert usable(joined)
    data = StreamData(read_recipe(joined), manifest, tmp_path / "parts")
    for round in range(3):
        for slot in range(ISLANDS):
            tokens = data.parts.get(round, slot)
            assert (len(tokens) - SEQ_LEN) // SEQ_LEN >= STEPS * BATCH
    assert len(supply.shard) == 2 * (SEQ_LEN + 1) * 2
    shard = np.frombuffer(supply.shard, "<u2").tolist()
    assert tokenizer.decode(shard[:8]).split()[0] in " ".join(
        t for t in texts[0] if is_held_out(t.encode())
    )


def test_more_islands_than_parts_take_turns(texts, tmp_path):
    data = stream(run(), texts[1], tmp_path)
    rows = [windows(data, 0, slot, 5, steps=2) for slot in range(5)]
    assert not set(rows[0]) & set(rows[3])
    assert pieces(rows[0]) & pieces(rows[3])
    assert len({row for some in rows for row in some}) == 5 * 2 * BATCH


def test_ranks_that_ask_at_once_make_a_part_once_and_few_are_kept(texts, tmp_path):
    ranks = [stream(run(), texts[1], tmp_path) for _ in range(2)]
    for round in range(6):
        first, second = (windows(rank, round, 0, ISLANDS) for rank in ranks)
        assert first == second
        ranks[0].parts.get(round + 1, 0)  # what the thread makes ahead
    assert ranks[0].parts.made + ranks[1].parts.made == 7
    kept = {file.stem for file in ranks[0].parts._directory.glob("part-*")}
    assert kept <= {f"part-{round}-0" for round in (4, 5, 6)}


def ask(parts, round, part=0):
    """In a thread of its own."""
    asking = threading.Thread(target=parts.get, args=(round, part), daemon=True)
    asking.start()
    return asking


def test_one_of_an_islands_ranks_reads_the_stream_whoever_asks_first(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(live, "LOOK_S", 0.01)
    begun = begun_at(monkeypatch)
    ranks = [stream(run(), texts[1], tmp_path).parts for _ in range(3)]
    begun.clear()  # a look at the beginning
    ranks[0].get(0, 0)
    for round in range(1, 5):
        asking = [ask(rank, round) for rank in ranks[1:]]
        ranks[0].get(round, 0)
        for thread in asking:
            thread.join(30)
            assert not thread.is_alive()
    assert (len(begun), [rank.made for rank in ranks]) == (1, [5, 0, 0])
    release(ranks[0])
    ranks[2].get(5, 0)
    ask(ranks[1], 5).join(30)
    assert [rank.made for rank in ranks] == [5, 0, 1]


def test_a_part_that_nobody_makes_is_made_by_who_waits_for_it(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(live, "IDLE_S", 0.05)
    first, second = (stream(run(), texts[1], tmp_path).parts for _ in range(2))
    first.get(3, 0)
    second.get(1, 0)  # as an island behind this one would, with the same folder
    assert (first.made, second.made) == (1, 1)


def test_an_island_with_another_slot_makes_other_parts(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(live, "LOOK_S", 0.01)
    first, second = (stream(run(), texts[1], tmp_path).parts for _ in range(2))
    first.get(0, 0)
    first.get(1, 2)
    second.get(1, 0)  # nobody makes those any more
    assert (first.made, second.made) == (2, 1)


@pytest.mark.parametrize("lost", ["bytes", "zeros", "note"])
def test_a_part_that_a_power_loss_has_spoilt_is_made_again(texts, tmp_path, lost):
    parts = stream(run(), texts[1], tmp_path).parts
    before = parts.get(1, 0).copy()
    (file,) = tmp_path.glob("**/part-1-0.bin")
    if lost == "bytes":
        file.write_bytes(b"")
    elif lost == "zeros":
        file.write_bytes(bytes(file.stat().st_size))
    else:
        file.with_suffix(".json").unlink()
    release(parts)
    again = Parts(parts._recipe, np.dtype(np.uint8), tmp_path)
    assert np.array_equal(again.get(1, 0), before)
    assert again.made == 1
    again.get(1, 0)
    assert again.made == 1


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


def test_a_data_set_that_is_held_out_as_a_whole_is_told_and_not_read_for_ever(tmp_path):
    held_out = next(text for text in map(str, itertools.count()) if is_held_out(text.encode()))
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": held_out}) + "\n")
    place = f"datasets:json?files={tmp_path}/one.jsonl"
    recipe = read_recipe(recipe_for(run(), ByteTokenizer(), place, lambda done, total: None))
    with pytest.raises(OperatorError, match="nothing to train on") as caught:
        Parts(recipe, np.dtype(np.uint8), tmp_path).get(0, 0)
    assert caught.value.code == "E601"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("datasets:json?files=/nowhere/*.jsonl", "cannot stream"),
        ("datasets:json?colour=red", "'colour' is not known"),
        ("datasets:?field=x", "it has no name"),
    ],
)
def test_what_cannot_be_streamed_is_told(name, why, tmp_path):
    with pytest.raises(OperatorError) as caught:
        recipe_for(run(), ByteTokenizer(), name, lambda done, total: None)
    assert caught.value.code == "E601"
    assert why in caught.value.text()


def test_a_missing_column_and_a_missing_text_are_told(texts, tmp_path):
    with pytest.raises(OperatorError, match="no 'body'") as caught:
        next(Reader(DataSet.parse(f"{texts[1]}&field=body")))
    assert "text, id" in caught.value.why
    assert "?field=" in caught.value.fix
    with pytest.raises(OperatorError, match="no text in 'id'"):
        next(Reader(DataSet.parse(f"{texts[1]}&field=id")))
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n' * 3)
    with pytest.raises(OperatorError, match="has no text"):
        next(Reader(DataSet.parse(f"datasets:json?files={tmp_path}/empty.jsonl")))


def test_the_missing_library_is_named_with_its_extra(texts, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(OperatorError, match="datasets is not installed") as caught:
        recipe_for(run(), ByteTokenizer(), texts[1], lambda done, total: None)
    assert (caught.value.code, "atoll[datasets]" in caught.value.fix) == ("E605", True)


class Broken:
    """A data set's stream that breaks off in the middle, ``times`` times."""

    def __init__(self, monkeypatch, error, times):
        self.left, self.opened = times, 0
        real = DataSet.open

        def opened(source):
            self.opened += 1
            stream = real(source)
            whole = type(stream).__iter__

            def records(this):
                for number, record in enumerate(whole(this)):
                    if number == 20 and self.left:
                        self.left -= 1
                        raise error
                    yield record

            stream.__class__ = type("Stream", (type(stream),), {"__iter__": records})
            return stream

        monkeypatch.setattr(DataSet, "open", opened)


@pytest.mark.parametrize(
    "error", [ConnectionError("Server Disconnected"), TimeoutError("no answer for 60 s")]
)
def test_a_stream_that_breaks_off_is_begun_again(texts, tmp_path, monkeypatch, error):
    kept = windows(stream(run(), texts[1], tmp_path / "a"), 0, 0, 1)
    data = stream(run(), texts[1], tmp_path / "b")
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.001)
    broken = Broken(monkeypatch, error, times=3)
    assert windows(data, 0, 0, 1) == kept
    assert broken.left == 0


def test_a_stream_that_stays_away_is_told_of(texts, tmp_path, monkeypatch):
    data = stream(run(), texts[1], tmp_path)
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(patience, "PATIENCE_S", 0.1)
    Broken(monkeypatch, ConnectionError("Server Disconnected"), times=10**6)
    with pytest.raises(OperatorError, match="Server Disconnected") as caught:
        data.parts.get(0, 0)
    assert caught.value.code == "E601"


def test_what_went_well_before_it_broke_off_takes_no_patience(monkeypatch):
    """A newcomer reads for minutes to come to its own part."""
    now = [0.0]
    monkeypatch.setattr(patience.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(patience.time, "sleep", lambda seconds: None)
    error = OperatorError("E601", "what", "why", "fix")
    error.__cause__ = ConnectionError("Server Disconnected")
    left = patience.Patience()
    now[0] = 10 * patience.PATIENCE_S
    assert left.wait(error)
    now[0] += patience.PATIENCE_S - 2 * patience.LAST_PAUSE_S
    assert left.wait(error)
    now[0] += 2 * patience.LAST_PAUSE_S
    assert not left.wait(error)


def test_what_will_not_pass_is_told_at_once(texts, tmp_path, monkeypatch):
    data = stream(run(), texts[1], tmp_path)
    broken = Broken(monkeypatch, FileNotFoundError("part-0.jsonl"), times=1)
    with pytest.raises(OperatorError, match=r"part-0\.jsonl"):
        data.parts.get(0, 0)
    assert broken.opened == 1


class Answer:
    def __init__(self, status):
        self.status_code = status


class HubError(OSError):
    """As ``huggingface_hub`` raises it."""

    def __init__(self, status):
        self.response = Answer(status) if status else None


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (HubError(503), True),
        (HubError(429), True),
        (HubError(404), False),
        (HubError(401), False),
        (HubError(None), True),
        (type("ReadTimeout", (Exception,), {"__module__": "httpx._exceptions"})(), True),
        (ValueError("no such column"), False),
        (None, False),
    ],
)
def test_what_may_be_there_in_a_moment(error, again):
    assert patience.passes(error) is again


def test_a_network_that_fails_once_is_met_again_by_the_read(texts, tmp_path, monkeypatch):
    data = stream(run(), texts[1], tmp_path)
    real, failures = data.parts.get, iter([True])

    def get(round, part):
        if round == 1 and next(failures, False):
            raise operator_error("E601")
        return real(round, part)

    monkeypatch.setattr(data.parts, "get", get)
    windows(data, 0, 0, 1)
    assert len(windows(data, 2, 0, 1)) == STEPS * BATCH


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
