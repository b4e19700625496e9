"""``node runs``, ``node stop`` and ``node status --watch``, with a stand-in for the daemon."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from identity_kit import identity

from bootstrap.manifest import Manifest
from bootstrap.signed_manifest import SignedManifest
from node import directories, outermost
from node.directories import NodeDirectory, all_directories, as_text, look, note, noted, stop
from node.statedir import StateDir
from protocols.errors import OperatorError

DAEMON = """
import signal, sys, time
from pathlib import Path
from node.statedir import StateDir
home = StateDir(Path(sys.argv[1])); home.lock()
left = int(sys.argv[2])
def on(*_):
    global left
    left -= 1
for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, on)
home.publish_api("127.0.0.1:1")
print("up", flush=True)
while left > 0: time.sleep(0.02)
"""


LEAVES_LONG = """
import asyncio, io, sys
from pathlib import Path
from node.config import NodeConfig
from node.daemon import Daemon
from node.monitor.console import Console
from node.monitor.event_log import EventLog
async def main():
    loop = asyncio.get_running_loop()
    daemon = Daemon(NodeConfig(dir=Path(sys.argv[1])), None)
    daemon.home.lock()
    daemon.stop_reason = loop.create_future()
    daemon._catch_signals(loop, EventLog(), Console(io.StringIO()))
    print("up", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def _own_notes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("ATOLL_DIR", str(tmp_path / "usual"))


def test_without_a_home_nothing_is_noted(tmp_path, monkeypatch):
    """As of a user that a container's system does not know."""

    def unknown():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pathlib.Path.home", unknown)
    StateDir(tmp_path / "here").lock()
    note(tmp_path / "here")
    assert noted() == [tmp_path / "here"]  # XDG_STATE_HOME does
    monkeypatch.delenv("XDG_STATE_HOME")
    note(tmp_path / "here")
    assert noted() == []


@pytest.fixture
def daemon():
    """``daemon(directory, signals)``: holds a state directory until it got that many signals."""
    started = []

    def start(directory, signals=1, program=DAEMON):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(directory), str(signals)],
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline() == "up\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_directories_are_noted_and_forgotten_when_gone(tmp_path, monkeypatch):
    for name in ("a", "b"):
        home = StateDir(tmp_path / name)
        home.lock()
        home.unlock()
        note(tmp_path / name)
    note(tmp_path / "never was")
    assert set(noted()) == {tmp_path / "a", tmp_path / "b"}
    assert len(list(directories.notes().iterdir())) == 2
    monkeypatch.setattr(directories, "MAX_NOTES", 1)
    note(tmp_path / "a")
    assert len(list(directories.notes().iterdir())) == 1


def test_a_note_that_cannot_be_written_harms_nobody(tmp_path, monkeypatch):
    (tmp_path / "user").write_text("a file")
    note(tmp_path)
    assert noted() == []


def test_what_is_told_of_a_directory(tmp_path, daemon):
    process = daemon(tmp_path / "runs")
    note(tmp_path / "runs")
    stopped = tmp_path / "usual"
    home = StateDir(stopped)
    home.lock()
    home.unlock()
    folder = home.checkpoints / "ckpt-00000007"
    folder.mkdir()
    (folder / "checkpoint.json").write_text(json.dumps({"run": "ab" * 32, "round": 7}))
    found = all_directories(stopped)
    assert found == [
        NodeDirectory(
            str(tmp_path / "runs"), "no answer", process.pid, "", None, "", "127.0.0.1:1", None
        ),
        NodeDirectory(str(stopped), "stopped", None, "abababab", 7, "", "", None),
    ]
    lines = as_text(found).splitlines()
    assert len(lines) == 3
    assert lines[1].split()[:3] == ["no", "answer", str(process.pid)]
    (folder / "checkpoint.json").write_text("{")
    assert look(stopped).round is None


def test_a_stopped_run_has_its_name_and_what_cannot_go_on_is_only_counted(tmp_path, capsys):
    signed = SignedManifest.create(Manifest(name="mine"), identity(1))
    for name in ("kept", "failed", "atoll-demo-x/island-1"):
        home = StateDir(tmp_path / name)
        home.lock()
        home.unlock()
        note(tmp_path / name)
        if name != "failed":
            folder = home.checkpoints / "ckpt-00000007"
            folder.mkdir()
            (folder / "manifest.envelope").write_bytes(signed.data)
            facts = {"run": signed.run_id.hex(), "round": 7}
            (folder / "checkpoint.json").write_text(json.dumps(facts))
    assert outermost.run(["runs"]) == 0
    _, kept, others = capsys.readouterr().out.splitlines()
    assert kept.split() == ["stopped", "-", signed.manifest.label, "7", *"---", f"{tmp_path}/kept"]
    assert others.startswith("2 ")
    assert outermost.run(["runs", "--all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_files_left_by_a_killed_daemon_are_no_daemon(tmp_path, daemon):
    process = daemon(tmp_path / "x")
    process.kill()
    process.wait()
    assert StateDir(tmp_path / "x").find_api().pid == process.pid
    assert look(tmp_path / "x").status == "stopped"
    with pytest.raises(OperatorError, match="no node runs") as error:
        stop(tmp_path / "x", timeout_s=1, now=False)
    assert error.value.code == "E106"


def test_stop_asks_once_and_waits(tmp_path, daemon):
    process = daemon(tmp_path / "x")
    assert stop(tmp_path / "x", timeout_s=20, now=False) == process.pid
    assert process.wait(5) == 0


def test_stop_now_asks_twice(tmp_path, daemon, capsys):
    process = daemon(tmp_path / "x", signals=2)
    with pytest.raises(OperatorError) as error:
        stop(tmp_path / "x", timeout_s=0.5, now=False)
    assert error.value.code == "E107"
    assert outermost.run(["stop", "--dir", str(tmp_path / "x"), "--now"]) == 0
    assert f"process {process.pid} has ended" in capsys.readouterr().out


def test_stop_now_ends_what_a_daemon_is_at(tmp_path, daemon):
    """To a daemon a signal that comes with its echo is one."""
    process = daemon(tmp_path / "x", program=LEAVES_LONG)
    assert stop(tmp_path / "x", timeout_s=10, now=True) == process.pid
    assert process.wait(5) == 130


def test_runs_on_a_fresh_machine(capsys):
    assert outermost.run(["runs"]) == 0
    assert "no node has run" in capsys.readouterr().out
    assert outermost.run(["runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_status_watch_goes_on_until_ctrl_c(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "node", "status", "--watch", "--every", "0.2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "ATOLL_DIR": str(tmp_path)},
    )
    lines = [process.stdout.readline() for _ in range(6)]
    assert sum("error E106" in line for line in lines) == 2
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert time.monotonic() - began < 10
    assert "Traceback" not in out + err


def test_one_note_that_cannot_be_read_hides_no_other(tmp_path):
    home = StateDir(tmp_path / "z")
    home.lock()
    home.unlock()
    note(tmp_path / "z")
    (directories.notes() / "00 no text").write_bytes(b"\xff\xfe\0")
    (directories.notes() / "00 a directory").mkdir()
    assert noted() == [tmp_path / "z"]
    assert noted() == [tmp_path / "z"]


def test_a_directory_whose_name_is_no_utf_8_is_found_again(tmp_path):
    home = StateDir(tmp_path / os.fsdecode(b"caf\xe9"))
    home.lock()
    home.unlock()
    note(home.root)
    assert noted() == [home.root]
    assert json.loads(directories.as_document([look(home.root)]))[0]["status"] == "stopped"
    assert "caf" in as_text([look(home.root)]).encode().decode()  # can be written to a terminal


def test_who_does_not_end_at_once_either_is_to_be_killed(tmp_path, daemon):
    process = daemon(tmp_path / "x", signals=3)
    with pytest.raises(OperatorError) as error:
        stop(tmp_path / "x", timeout_s=0.5, now=True)
    assert error.value.code == "E107"
    assert f"kill -9 {process.pid}" in error.value.fix
    assert "--now" not in error.value.fix


def test_of_a_node_of_another_version_little_is_told(tmp_path, daemon, monkeypatch):
    process = daemon(tmp_path / "x")
    monkeypatch.setattr("node.status.fetch", lambda directory: {"schema": 9, "status": "active"})
    found = look(tmp_path / "x")
    assert (found.status, found.pid, found.api) == ("other version", process.pid, "127.0.0.1:1")


def test_a_note_is_whole_or_not_there(tmp_path, monkeypatch):
    home = StateDir(tmp_path / "z")
    home.lock()
    home.unlock()
    note(home.root)
    seen = []
    replace = os.replace

    def between(draft, path):
        seen.append(noted())  # while it is written again
        replace(draft, path)

    monkeypatch.setattr(os, "replace", between)
    note(home.root)
    assert seen == [[home.root]]
    assert len(list(directories.notes().iterdir())) == 1


@pytest.mark.parametrize("elsewhere", ["another boot/pid:[1]", ""], ids=["named", "no such number"])
def test_a_process_of_another_container_is_not_asked_by_its_number(
    tmp_path, monkeypatch, elsewhere
):
    """In a container a node is process 1, and process 1 of the host is its init."""
    home = StateDir(tmp_path / "x")
    home.lock()
    pid = os.getpid()
    if not elsewhere:
        gone = subprocess.Popen(["true"])
        gone.wait()
        pid = gone.pid
    (tmp_path / "x" / "daemon.lock").write_text(f"{pid} {elsewhere}".strip() + "\n")
    asked = []
    monkeypatch.setattr(directories, "_signal", lambda *given: asked.append(given))
    began = time.monotonic()
    with pytest.raises(OperatorError, match="another container or machine") as error:
        stop(tmp_path / "x", timeout_s=20, now=False)
    assert error.value.code == "E107"
    assert str(pid) not in error.value.fix
    assert not asked
    assert time.monotonic() - began < 10
    assert look(tmp_path / "x").pid == pid  # a node runs there all the same
    home.unlock()


def held(directory, host):
    """By this process, which is a host beside host 0."""
    home = StateDir(directory)
    home.lock(host)
    return home


def test_hosts_of_an_island_in_one_directory_are_told_apart(tmp_path, monkeypatch):
    one, two = (held(tmp_path / f"host-{number}", number) for number in (1, 2))
    found = look(one.root)
    assert (found.status, found.pid, found.role) == ("running", os.getpid(), "host 1")
    asked = []

    def ends(*given):
        asked.append(given)
        two.unlock()

    monkeypatch.setattr(directories, "_signal", ends)
    with pytest.raises(OperatorError, match="no node runs") as error:
        stop(tmp_path, timeout_s=1, now=False)
    assert error.value.code == "E106"
    assert f"in {one.root}, {two.root}" in error.value.why
    assert "--dir" in error.value.fix
    assert not asked
    one.unlock()
    assert look(one.root).status == "stopped"
    said = []
    assert stop(tmp_path, timeout_s=1, now=False, tell=said.append) == os.getpid()
    assert asked == [(os.getpid(), signal.SIGTERM)]
    assert said == [f"host 2 of an island, process {os.getpid()}: asked to leave"]


def test_of_the_hosts_that_share_a_disk_the_one_of_this_machine_is_stopped(tmp_path, monkeypatch):
    here, there = (held(tmp_path / f"host-{number}", number) for number in (1, 2))
    (there.root / "daemon.lock").write_text("7 another boot/pid:[1]\nhost-2\n")
    monkeypatch.setattr(directories, "_signal", lambda *_: here.unlock())
    assert stop(tmp_path, timeout_s=1, now=False) == os.getpid()
    with pytest.raises(OperatorError, match="another container or machine") as error:
        stop(tmp_path, timeout_s=1, now=False)
    assert error.value.code == "E107"
    there.unlock()


def test_a_node_whose_directory_is_called_like_a_host_s_is_none(tmp_path, daemon):
    process = daemon(tmp_path / "host-1")
    assert look(tmp_path / "host-1").status == "no answer"
    with pytest.raises(OperatorError) as error:
        stop(tmp_path, timeout_s=1, now=False)
    assert error.value.code == "E106"
    assert process.poll() is None


def test_nor_is_one_that_has_yet_to_say_where_its_api_is(tmp_path):
    home = StateDir(tmp_path / "host-1")
    home.lock()
    assert look(home.root).status == "no answer"
    with pytest.raises(OperatorError) as error:
        stop(tmp_path, timeout_s=1, now=False)
    assert error.value.code == "E106"
    home.unlock()
