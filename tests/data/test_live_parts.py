"""The parts of a stream that an island keeps: who makes them, when, and what becomes of them."""

import itertools
import math
import threading

import numpy as np
import pytest
from data_kit import tokenizer_bytes
from live_kit import (
    BATCH,
    ISLANDS,
    NUMBERED,
    SEQ_LEN,
    STEPS,
    begun_at,
    pieces,
    release,
    run,
    stream,
    windows,
)

from node.data import stream_parts
from node.data.live import StreamData
from node.data.stream_parts import Parts
from node.data.stream_recipe import read_recipe
from node.data.streamed import DataSet, Mark
from node.data.supply import Given, make, tokens_for, usable
from node.data.tokenizer import FileTokenizer
from node.trainer.corpus import is_held_out

pytest.importorskip("datasets")
pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.usefixtures("stream_home")


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
    monkeypatch.setattr(stream_parts, "SIGN_S", 0.0)
    mine, other = (stream(run(), texts[1], tmp_path / "parts") for _ in range(2))
    seen = [other.headway]
    for round in range(2):
        mine.batch(round, 0, ISLANDS, 0)
        settled()
        seen.append(other.headway)
    assert seen[0] == 0
    assert len(set(seen)) == 3


class Watched:
    """A stream whose every example is told of before it is handed out."""

    def __init__(self, stream, told):
        self.stream, self.told = stream, told

    def __iter__(self):
        for example in self.stream:
            self.told()
            yield example

    def state_dict(self):
        return self.stream.state_dict()


def test_a_stream_that_passes_over_what_was_read_before_gives_signs(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(stream_parts, "SIGN_S", 0.0)
    data, opened, signs = stream(run(), texts[1], tmp_path / "parts"), DataSet.open, []

    def told():
        signs.append(data.headway != 0)
        (data.parts._directory / stream_parts.SIGN).unlink(missing_ok=True)

    data.parts._directory.mkdir(parents=True)
    data.parts._marks.note(7, Mark(examples=100))  # of another version of the library
    monkeypatch.setattr(DataSet, "open", lambda source: Watched(opened(source), told))
    data.parts.get(7, 0)
    assert signs[:101] == [False] + [True] * 100


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
    assert ranks[0].parts._lock.acquire(timeout=30)  # a part is there before it is counted
    assert ranks[0].parts.made + ranks[1].parts.made == 7
    kept = {file.stem for file in ranks[0].parts._directory.glob("part-*")}
    assert kept <= {f"part-{round}-0" for round in (4, 5, 6)}


def ask(parts, round, part=0):
    """In a thread of its own."""
    asking = threading.Thread(target=parts.get, args=(round, part), daemon=True)
    asking.start()
    return asking


def test_one_of_an_islands_ranks_reads_the_stream_whoever_asks_first(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(stream_parts, "LOOK_S", 0.01)
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


def test_a_part_that_is_there_waits_for_none_that_is_being_made(texts, tmp_path, monkeypatch):
    """Rank 0 makes the next round's part ahead, and the others are to train meanwhile."""
    monkeypatch.setattr(stream_parts, "LOOK_S", 0.01)
    monkeypatch.setattr(stream_parts, "IDLE_S", math.inf)
    begun, go_on, write = threading.Event(), threading.Event(), stream_parts.write

    def held_up(path, *given):
        if path.name == "part-2-0.bin":
            begun.set()
            assert go_on.wait(60)
        return write(path, *given)

    monkeypatch.setattr(stream_parts, "write", held_up)
    first, second, late = (stream(run(), texts[1], tmp_path).parts for _ in range(3))
    first.get(0, 0)  # from now on it makes them
    waiting = ask(second, 1)
    first.get(1, 0)
    making = ask(first, 2)
    try:
        assert begun.wait(30)
        asking = [waiting, ask(first, 1), ask(second, 0), ask(late, 1), ask(late, 0)]
        for thread in asking:
            thread.join(30)
            assert not thread.is_alive()
        assert making.is_alive()
    finally:
        go_on.set()
    making.join(30)
    assert [parts.made for parts in (first, second, late)] == [3, 0, 0]


def test_a_part_that_nobody_makes_is_made_by_who_waits_for_it(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(stream_parts, "IDLE_S", 0.05)
    first, second = (stream(run(), texts[1], tmp_path).parts for _ in range(2))
    first.get(3, 0)
    second.get(1, 0)  # as an island behind this one would, with the same folder
    assert (first.made, second.made) == (1, 1)


def test_an_island_with_another_slot_makes_other_parts(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(stream_parts, "LOOK_S", 0.01)
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


def test_parts_of_other_streams_go_once_nobody_trains_on_them_and_their_marks_stay(texts, tmp_path):
    cache = tmp_path / "parts"
    first, second, third = (
        stream(run().model_copy(update={"data": dealt}), texts[1], cache).parts
        for dealt in (run().data.model_copy(update={"islands": n}) for n in (3, 4, 5))
    )
    kept = first.get(2, 0).copy()
    second.get(0, 0)
    assert first._directory.joinpath("part-2-0.bin").exists(), "another island trains on it"
    release(first)
    third.get(0, 0)
    assert [path.name for path in cache.glob("*/part-*.bin")] == ["part-0-0.bin"] * 2
    assert not [*first._directory.glob("part-*")]
    again = Parts(first._recipe, np.dtype(np.uint8), cache)
    assert again._marks.nearest(2)[0] == 2
    assert np.array_equal(again.get(2, 0), kept)
