"""The log on a terminal or in a pipe: who does not read it holds nothing up, and is told."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from node.monitor import printing
from node.monitor.console import AT_ONCE_S, Console
from node.monitor.event_log import EventLog
from node.monitor.events import Notice

WAIT_S = 120.0


class Pipe:
    """A pipe whose end nobody reads until the test does."""

    def __init__(self, stack: ExitStack) -> None:
        self.read_end, write_end = os.pipe()
        self.out = stack.enter_context(os.fdopen(write_end, "w"))
        stack.callback(self.close)

    def fill(self) -> int:
        """Write as much to it as it takes; the bytes."""
        os.set_blocking(self.out.fileno(), False)
        filled = 0
        try:
            while True:
                filled += os.write(self.out.fileno(), b"." * 1024)
        except BlockingIOError:
            os.set_blocking(self.out.fileno(), True)
        return filled

    def close(self) -> None:
        """Read no more, ever."""
        if self.read_end >= 0:
            os.close(self.read_end)
        self.read_end = -1

    def text(self, until: str) -> str:
        """What is read until then."""
        found = b""
        while until.encode() not in found:
            more = os.read(self.read_end, 2**16)
            assert more
            found += more
        return found.decode()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    with ExitStack() as stack:
        yield Pipe(stack)


def in_time(work: Callable[[], object]) -> None:
    """Do it, and fail where it comes to no end."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def say(log: EventLog, count: int) -> None:
    for number in range(count):
        log.emit(Notice(text=f"line {number} " + "x" * 100))


@pytest.mark.parametrize("as_json", [False, True])
def test_a_pipe_that_is_not_read_costs_lines_and_says_how_many(
    pipe: Pipe, as_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(printing, "MAX_WAITING", 20_000)
    log, console = EventLog(), Console(pipe.out, as_json=as_json)
    log.subscribe(console)
    in_time(lambda: say(log, 2000))
    log.emit(Notice(text="ended: said last"))
    lines = pipe.text("said last").splitlines()
    gaps = [_left_out(line) for line in lines if "lines are missing here" in line]
    assert gaps
    assert len(lines) - len(gaps) + sum(gaps) == 2001
    assert "line 1999 " in lines[-2]
    if as_json:  # what tells of lines stands for the last one of them
        numbers = [json.loads(line)["seq"] for line in lines]
        assert numbers == sorted(set(numbers))
    console.finish(WAIT_S)


def _left_out(line: str) -> int:
    text = line.partition(" lines are missing")[0].rpartition('"')[2]
    return int(text.replace(",", ""))


def test_a_pipe_that_does_not_block_loses_nothing(pipe: Pipe) -> None:
    """As stdout is where another process that shares it has made it so."""
    os.set_blocking(pipe.out.fileno(), False)
    log, console = EventLog(), Console(pipe.out)
    log.subscribe(console)
    say(log, 2000)
    log.emit(Notice(text="said last"))
    lines = pipe.text("said last").splitlines()
    assert len(lines) == 2001
    console.finish(WAIT_S)


def test_the_end_waits_for_a_reader_but_not_for_ever(pipe: Pipe) -> None:
    log, console = EventLog(), Console(pipe.out)
    log.subscribe(console)
    say(log, 2000)
    in_time(lambda: console.finish(AT_ONCE_S))
    log.emit(Notice(text="too late"))
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(pipe.text("line 1999")), daemon=True)
    reader.start()
    console.finish(WAIT_S)
    reader.join(WAIT_S)
    assert len(found[0].splitlines()) == 2000


def test_a_reader_that_is_gone_ends_the_log_and_nothing_else(pipe: Pipe) -> None:
    log, console = EventLog(), Console(pipe.out)
    log.subscribe(console)
    pipe.close()
    say(log, 10)
    in_time(lambda: console.finish(WAIT_S))
    assert len(log.recent) == 10


def test_a_full_disk_costs_the_lines_of_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write, room, refused = tmp_path / "out", os.write, [5], threading.Semaphore(0)
    with path.open("w") as out:

        def to_disk(descriptor: int, text: memoryview) -> int:
            if descriptor != out.fileno():
                return write(descriptor, text)
            if not room[0]:
                refused.release()
                raise OSError(errno.ENOSPC, "full")
            written = write(descriptor, text[: room[0]])
            room[0] -= written
            return written

        monkeypatch.setattr("node.monitor.printing.os.write", to_disk)
        console, log = Console(out), EventLog()
        log.subscribe(console)
        for text in ("1234567", "8"):
            log.emit(Notice(text=text))
            assert refused.acquire(timeout=WAIT_S)
        room[0] = 1000
        log.emit(Notice(text="9"))
        console.finish(WAIT_S)
    torn, gap, last = path.read_text().splitlines()
    assert (torn, last) == ("12345", "9")
    assert gap.startswith("2 lines are missing here")


def test_what_is_in_memory_takes_each_line_at_once() -> None:
    log, out = EventLog(), io.StringIO()
    log.subscribe(Console(out))
    log.emit(Notice(text="here"))
    assert out.getvalue() == "here\n"


def test_a_node_whose_output_nobody_reads_ends_as_others_do(tmp_path: Path, pipe: Pipe) -> None:
    filled = pipe.fill()
    words = ["bootstrap", "--listen", "127.0.0.1:0", "--api", "127.0.0.1:0", "--seconds", "0.01"]
    node = subprocess.Popen(
        [sys.executable, "-m", "node", *words, "--dir", str(tmp_path / "n")],
        stdout=pipe.out,
        stderr=subprocess.PIPE,
    )
    try:
        _, problems = node.communicate(timeout=WAIT_S)
    finally:
        node.kill()
    assert (node.returncode, problems) == (0, b"")
    assert "ended: 0.01 s" in (tmp_path / "n" / "events.jsonl").read_text()
    assert len(os.read(pipe.read_end, 2 * filled)) == filled
