"""Sinks: what is written where, and that a slow or broken one harms nobody."""

import asyncio
import json
import math
import os
import sys
import threading
from dataclasses import replace

import pytest

from node.config import resolve
from node.monitor import sinks
from node.monitor.event_log import EventLog
from node.monitor.events import Notice, Record, RoundDone, Step
from node.monitor.sinks import Sinks, open_sink, split, told
from protocols.errors import OperatorError


async def play(opened, failed=lambda name, error: None):
    """Two steps and a round through the sinks; then all are closed."""
    log = EventLog(clock=lambda: 5.0)
    made = Sinks(opened, failed)
    log.subscribe(made)
    for number in (1, 2):
        log.emit(Step(step=number, round=0, loss=3.0 - number, lr=0.1, tokens_per_second=10.0))
    log.emit(Notice(text="nothing to plot"))
    log.emit(RoundDone(round=0, validation_loss=2.5, members=3, phases={"compute": 1.5}))
    await made.aclose()
    return made


@pytest.mark.parametrize(
    ("text", "says"),
    [("csv:x", "KIND of jsonl"), ("jsonl", "does not say where"), ("", "KIND"), ("jsonl:", "NAME")],
)
def test_what_is_no_sink_is_refused(text, says):
    with pytest.raises(ValueError, match=says):
        split(text)


def test_sinks_are_a_setting(tmp_path):
    given = resolve({"sink": ["jsonl:a b", "wandb:x"], "dir": str(tmp_path)}, {})
    assert given.sink == ("jsonl:a b", "wandb:x")
    variable = {"ATOLL_SINK": "jsonl:a tensorboard:b", "ATOLL_DIR": str(tmp_path)}
    assert resolve({}, variable).sink == ("jsonl:a", "tensorboard:b")
    with pytest.raises(OperatorError, match="KIND:WHERE") as error:
        resolve({"sink": ["csv:x"], "dir": str(tmp_path)}, {})
    assert error.value.code == "E204"


async def test_a_pipe_that_nobody_reads_yet_does_not_hold_up_the_start(tmp_path):
    os.mkfifo(path := tmp_path / "pipe")
    opening = asyncio.to_thread(open_sink, f"jsonl:{path}")
    made = Sinks({"j": await asyncio.wait_for(opening, 60)}, lambda name, error: None)
    made(Record(1, 5.0, Step(step=1, round=0, loss=2.0)))
    lines = await asyncio.to_thread(path.open)
    await made.aclose()
    with lines:
        assert [json.loads(line)["step"] for line in lines] == [1]


async def test_jsonl(tmp_path):
    path = tmp_path / "deep" / "x.jsonl"
    await play({"j": open_sink(f"jsonl:{path}")})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == {
        "time": 5.0, "step": 1, "train/loss": 2.0, "train/lr": 0.1, "train/tokens_per_second": 10.0,
    }  # fmt: skip
    assert lines[2]["round"] == 0
    assert lines[2]["round/validation_loss"] == 2.5
    assert lines[2]["phase/compute_s"] == 1.5
    assert "round/loss" not in lines[2]
    await play({"j": open_sink(f"jsonl:{path}")})
    assert len(path.read_text().splitlines()) == 6


async def test_what_is_not_finite_is_null_in_jsonl(tmp_path):
    """Strict readers of JSON refuse NaN and Infinity, and with them the whole line."""

    def refuse(word):
        raise ValueError(word)

    path, log = tmp_path / "x.jsonl", EventLog()
    made = Sinks({"j": open_sink(f"jsonl:{path}")}, lambda name, error: None)
    log.subscribe(made)
    log.emit(Step(step=1, round=0, loss=2.0, grad_norm=math.nan, lr=math.inf))
    log.emit(RoundDone(round=0, consensus=-math.inf, phases={"compute": math.nan}))
    await made.aclose()
    step, done = (json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines())
    assert step["train/loss"] == 2.0
    assert step["train/grad_norm"] is step["train/lr"] is None
    assert done["round/consensus"] is done["phase/compute_s"] is None


async def test_a_round_in_fragments_is_one_with_the_bytes_of_all(tmp_path):
    path = tmp_path / "x.jsonl"
    made = Sinks({"j": open_sink(f"jsonl:{path}")}, lambda name, error: None)
    log = EventLog()
    log.subscribe(made)
    for number in range(2):
        for fragment in (1, 2, 0):
            loss = None if fragment else 2.0
            done = RoundDone(round=number, fragment=fragment, fragments=3, validation_loss=loss)
            log.emit(replace(done, sent_bytes=10 ** (fragment + 1)))
    await made.aclose()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1]
    assert [line["round/sent_bytes"] for line in lines] == [1110, 1110]
    assert [line["round/validation_loss"] for line in lines] == [2.0, 2.0]


def test_a_file_that_cannot_be_written_is_told_at_once(tmp_path):
    with pytest.raises(OperatorError) as error:
        open_sink(f"jsonl:{tmp_path}")
    assert error.value.code == "E204"


def test_a_folder_that_cannot_be_written_is_told_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OperatorError) as error:
        open_sink(f"tensorboard:{tmp_path / 'file'}")
    assert error.value.code == "E204"


async def test_a_full_disk_is_told_of_by_tensorboard_as_by_others(tmp_path, monkeypatch, capfd):
    def full(*_):
        raise OSError(28, "No space left on device")

    log, sink = EventLog(), open_sink(f"tensorboard:{tmp_path}")
    monkeypatch.setattr("tensorboardX.record_writer.RecordWriter.write", full)
    await play({"t": sink}, told(log))
    sink.close()
    await asyncio.sleep(0)
    [record] = log.recent
    assert record.event.text.startswith("--sink t is left out: OSError")
    assert "Traceback" not in capfd.readouterr().err


async def test_tensorboard_reads_what_was_written(tmp_path):
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    await play({"t": open_sink(f"tensorboard:{tmp_path}")})
    [file] = tmp_path.iterdir()
    data, found = file.read_bytes(), {}
    while data:  # TFRecord: length, its checksum, the record, its checksum
        length = int.from_bytes(data[:8], "little")
        assert masked_crc32c(data[:8]) == int.from_bytes(data[8:12], "little")
        event = Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]
        for value in event.summary.value:
            found[value.tag, event.step] = (value.simple_value, event.wall_time)
    assert found["train/loss", 1] == (2.0, 5.0)
    assert found["train/loss", 2] == (1.0, 5.0)
    assert found["round/validation_loss", 0] == (2.5, 5.0)


async def test_wandb_is_called_as_it_wants(monkeypatch):
    """Against a stand-in: the library itself is no test dependency."""
    called = []

    class Run:
        def define_metric(self, name, **more):
            called.append(("define", name, more))

        def log(self, values):
            called.append(("log", values))

        def finish(self):
            called.append(("finish",))

    class Wandb:
        Settings = dict

        @staticmethod
        def init(**arguments):
            called.append(("init", arguments["project"]))
            return Run()

    monkeypatch.setitem(sys.modules, "wandb", Wandb)
    await play({"w": open_sink("wandb:mine")})
    assert called[0] == ("init", "mine")
    assert ("define", "train/*", {"step_metric": "step"}) in called
    logged = [entry[1] for entry in called if entry[0] == "log"]
    assert [next(iter(values)) for values in logged] == ["step", "step", "round"]
    assert called[-1] == ("finish",)


def test_what_wandb_will_not_begin_is_no_defect(monkeypatch):
    class Wandb:
        Settings = dict

        @staticmethod
        def init(**_):
            raise RuntimeError("api_key not configured (no-tty)")

    monkeypatch.setitem(sys.modules, "wandb", Wandb)
    with pytest.raises(OperatorError, match="no-tty") as error:
        open_sink("wandb:mine")
    assert error.value.code == "E204"


@pytest.mark.parametrize(("kind", "module"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_missing_library_names_its_extra(kind, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"{module}.event_file_writer", raising=False)
    with pytest.raises(OperatorError) as error:
        open_sink(f"{kind}:x")
    assert error.value.code == "E605"
    assert f"'.[{kind}]'" in error.value.fix


class Broken:
    """Fails at its second figure."""

    def __init__(self):
        self.count = 0

    def write(self, *_):
        self.count += 1
        if self.count == 2:
            raise OSError(28, "No space left on device")

    def close(self):
        raise AssertionError("it was left out")


async def test_a_sink_that_fails_is_told_of_once_and_left_out(tmp_path):
    broken, log = Broken(), EventLog()
    path = tmp_path / "x.jsonl"
    await play({"bad": broken, "good": open_sink(f"jsonl:{path}")}, told(log))
    await asyncio.sleep(0)  # what the thread told is said in the loop
    assert broken.count == 2
    assert len(path.read_text().splitlines()) == 3
    [record] = log.recent
    assert record.event.text.startswith("--sink bad is left out: OSError")


async def test_a_sink_that_hangs_costs_figures_and_no_time(monkeypatch):
    monkeypatch.setattr(sinks, "MAX_WAITING", 2)
    monkeypatch.setattr(sinks, "CLOSE_S", 0.05)
    release = threading.Event()

    class Hangs:
        def write(self, *_):
            release.wait(30)

        def close(self):
            pass

    made = Sinks({"h": Hangs()}, lambda name, error: None)
    log = EventLog()
    log.subscribe(made)
    for number in range(20):
        log.emit(Step(step=number, round=0, loss=1.0))
    assert made.dropped >= 17
    async with asyncio.timeout(5):
        await made.aclose()
    release.set()


async def test_a_sink_that_hangs_costs_the_others_nothing(tmp_path, monkeypatch):
    """As a file on a server that is gone: the other is written, closed, and it is told of."""
    monkeypatch.setattr(sinks, "MAX_WAITING", 2)
    monkeypatch.setattr(sinks, "CLOSE_S", 0.5)
    release, closed = threading.Event(), threading.Event()

    class Hangs:
        def write(self, *_):
            release.wait(30)

        def close(self):
            pass

    class Counts:
        steps = ()

        def write(self, axis, at, when, figures):
            self.steps = (*self.steps, at)

        def close(self):
            closed.set()

    log, counts = EventLog(), Counts()
    made = Sinks({"nfs": Hangs(), "good": counts}, told(log))
    log.subscribe(made)
    for number in range(20):
        log.emit(Step(step=number, round=0, loss=1.0))
        async with asyncio.timeout(5):
            while len(counts.steps) <= number:  # noqa: ASYNC110 - what another thread counts
                await asyncio.sleep(0.001)
    await made.aclose()
    release.set()
    assert counts.steps == tuple(range(20))
    assert closed.wait(10)
    notices = [r.event.text for r in log.recent if isinstance(r.event, Notice)]
    assert notices == ["--sink nfs is too slow: it loses figures, with 2 waiting"]
