"""Streams that break off, stay away or cannot be read."""

import errno
import itertools
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
from live_kit import BATCH, STEPS, run, stream, windows

from node.data import patience, stream_parts
from node.data.stream_parts import Parts
from node.data.stream_recipe import read_recipe, recipe_for
from node.data.streamed import DataSet, Reader
from node.data.tokenizer import ByteTokenizer
from node.errors import operator_error
from node.trainer.corpus import is_held_out
from protocols.errors import OperatorError

pytest.importorskip("datasets")
pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.usefixtures("stream_home")


def test_a_data_set_that_is_held_out_as_a_whole_is_told_and_not_read_for_ever(tmp_path):
    held_out = next(text for text in map(str, itertools.count()) if is_held_out(text.encode()))
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": held_out}) + "\n")
    place = f"datasets:json?files={tmp_path}/one.jsonl"
    recipe = read_recipe(recipe_for(run(), ByteTokenizer(), place, lambda done, total: None))
    with pytest.raises(OperatorError, match="nothing to train on") as caught:
        Parts(recipe, np.dtype(np.uint8), tmp_path).get(0, 0)
    assert caught.value.code == "E601"


def test_a_data_set_that_is_less_than_a_stretch_is_told_of_once(texts, tmp_path, caplog):
    recipe = read_recipe(recipe_for(run(), ByteTokenizer(), texts[1], lambda done, total: None))
    kind, size = np.dtype(np.uint8), sum(len(text) + 1 for text in texts[0])
    for share, told in ((0.7, 0), (1.2, 1)):  # of the data set, a stretch: it begins anew in both
        dealt = recipe.model_copy(update={"parts": 1, "part_bytes": int(share * size)})
        parts = Parts(dealt, kind, tmp_path / str(share))
        for round in range(3):
            parts.get(round, 0)
        assert parts._marks.nearest(3)[1].passes >= 2
        assert caplog.text.count("less text than one stretch") == told


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
    assert (caught.value.code, ".[datasets]" in caught.value.fix) == ("E605", True)


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


class SlowLink:
    """Records take a minute each, and after every so many of them the link breaks off."""

    def __init__(self, monkeypatch, records):
        self.read, self.breaks, self.now = 0, 0, 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.wait)
        monkeypatch.setattr(patience, "time", clock)
        real = DataSet.open

        def opened(source):
            stream = real(source)
            whole = type(stream).__iter__

            def records_of(this):
                for record in whole(this):
                    self.read += 1
                    self.wait(60.0)
                    if self.read % records == 0:
                        self.breaks += 1
                        raise ConnectionError("broken off")
                    yield record

            stream.__class__ = type("Stream", (type(stream),), {"__iter__": records_of})
            return stream

        monkeypatch.setattr(DataSet, "open", opened)

    def wait(self, seconds):
        self.now += seconds


def test_breaks_of_a_stream_cost_no_patience_as_long_as_it_comes_further(
    texts, tmp_path, monkeypatch
):
    """A newcomer reads for hours to come to its own part."""
    kept = stream(run(), texts[1], tmp_path / "a").parts.get(6, 0)
    data = stream(run(), texts[1], tmp_path / "b")
    link = SlowLink(monkeypatch, records=40)  # more than a stretch has
    assert np.array_equal(data.parts.get(6, 0), kept)
    assert link.breaks > 2


def test_what_comes_of_a_stream_again_and_again_is_no_progress(texts, tmp_path, monkeypatch):
    data = stream(run(), texts[1], tmp_path)
    link = SlowLink(monkeypatch, records=10)  # fewer than a stretch has
    with pytest.raises(OperatorError, match="broken off") as caught:
        data.parts.get(0, 0)
    assert caught.value.code == "E601"
    assert link.breaks == 2


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


def test_where_nothing_can_be_kept_that_is_said_and_no_full_disk(texts, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    data = stream(run(), texts[1], tmp_path / "file" / "cache")
    with pytest.raises(OperatorError, match="Not a directory") as caught:
        data.parts.get(0, 0)
    assert caught.value.code == "E603"
    assert "may write there" in caught.value.fix
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    with pytest.raises(OperatorError, match="Not a directory") as caught:
        stream(run(), texts[1], tmp_path)
    assert caught.value.code == "E601"
    assert "XDG_CACHE_HOME" in caught.value.fix


def refusing(monkeypatch, number, times):
    """A disk that keeps no part, so many times."""
    write, left = stream_parts.write, iter(range(times))

    def refused(*given):
        if next(left, None) is not None:
            raise OSError(number, os.strerror(number))
        return write(*given)

    monkeypatch.setattr(stream_parts, "write", refused)


def test_what_this_machines_disk_refuses_is_told_at_once(texts, tmp_path, monkeypatch):
    data = stream(run(), texts[1], tmp_path / "parts")
    refusing(monkeypatch, errno.EIO, times=1)
    monkeypatch.setattr(patience.Patience, "wait", lambda self, error: pytest.fail("it waits"))
    with pytest.raises(OperatorError, match=os.strerror(errno.EIO)) as caught:
        data.parts.get(0, 0)
    assert caught.value.code == "E603"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_for_a_moment_ends_no_read(texts, tmp_path, monkeypatch, number):
    """What fills it may be a checkpoint, which is removed again where it does not fit."""
    kept = stream(run(), texts[1], tmp_path / "a").parts.get(1, 0)
    data = stream(run(), texts[1], tmp_path / "b")
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.001)
    refusing(monkeypatch, number, times=3)
    assert np.array_equal(data.parts.get(1, 0), kept)


def test_a_disk_that_stays_full_is_told_of(texts, tmp_path, monkeypatch, caplog):
    data = stream(run(), texts[1], tmp_path / "parts")
    slept = [0.0]
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(patience, "time", clock)
    refusing(monkeypatch, errno.ENOSPC, times=10**6)
    with pytest.raises(OperatorError, match="No space left") as caught:
        data.parts.get(0, 0)
    assert caught.value.code == "E402"
    assert patience.PATIENCE_S / 2 < sum(slept) <= patience.PATIENCE_S
    assert "No space left on device; again in 1 s" in caplog.text


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
