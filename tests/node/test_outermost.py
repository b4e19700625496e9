"""The last resort of the command: a defect is told and logged, never shown as a traceback."""

import errno
import io
import json
import os
import socket
import subprocess
import sys
import tempfile

import pytest

from node import daemon as node_daemon
from node.script import daemon
from node.trainer.channel import Ended
from node.trainer.framing import Unframer
from node.trainer.shared import SharedVectors
from protocols.errors import OperatorError

pytestmark = pytest.mark.usefixtures("own_directory")


def _raising(error):
    def raise_it(config, manifest):
        raise error

    sys.modules["node.daemon"].run = raise_it


def test_what_is_done_with_an_error_that_nobody_catches_is_left_to_the_process(command):
    before = sys.excepthook
    assert command("version")[0] == 0
    assert sys.excepthook is before


def test_a_defect_is_e999_with_a_log(command, runtime, tmp_path):
    _raising(ZeroDivisionError("oops"))
    status, _, err = command("start", "--dir", tmp_path / "other")
    assert status == 70
    assert err.startswith("error E999")
    assert "Traceback" not in err
    [log] = (tmp_path / "other" / "logs").iterdir()
    assert str(log) in err
    assert "ZeroDivisionError: oops" in log.read_text()
    assert "Traceback" in log.read_text()


def test_a_library_that_is_not_there_is_no_defect(command, runtime):
    _raising(ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn"))
    status, _, err = command("start")
    assert status == 1
    assert err.startswith("error E605: the library torch is not installed")
    _raising(ModuleNotFoundError("No module named 'node.lost'", name="node.lost"))
    assert command("start")[2].startswith("error E999")


@pytest.mark.parametrize("named", ["option", "variable", "usual"])
def test_a_log_goes_to_the_directory_that_a_settings_file_names(
    command, runtime, tmp_path, monkeypatch, named
):
    home = tmp_path / "home"
    file = home / ".atoll" / "node.toml" if named == "usual" else tmp_path / "my.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'dir = "{tmp_path / "other"}"\n')
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("ATOLL_DIR")
    if named == "variable":
        monkeypatch.setenv("ATOLL_CONFIG", str(file))
    _raising(ZeroDivisionError("oops"))
    _, _, err = command("start", *(("--config", file) if named == "option" else ()))
    [log] = (tmp_path / "other" / "logs").iterdir()
    assert str(log) in err
    file.write_text("dir = [")
    status, _, err = command("start", "--config", file)
    assert (status, err[:10]) == (2, "error E204")


def test_a_log_goes_elsewhere_where_the_directory_is_broken(
    command, runtime, tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    _raising(ZeroDivisionError("oops"))
    _, _, err = command("start", f"--dir={tmp_path / 'file'}")
    [log] = (tmp_path / "temporary").iterdir()
    assert str(log) in err


def test_a_disk_without_room_for_temporary_files_is_no_defect(
    command, runtime, tmp_path, monkeypatch
):
    """torch and others look for such a folder as they are imported, and by no name of its own."""

    def none_found():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._get_default_tempdir", none_found)
    try:
        tempfile.gettempdir()
    except OSError as error:
        _raising(error)
    status, _, err = command("start", "--dir", tmp_path / "other")
    assert status == 1
    assert err.startswith("error E402: no temporary directory can be written to\n")
    assert "['/tmp']" in err
    assert "free space, or set TMPDIR" in err
    # a defect has its log in the state directory, and is told without one
    (tmp_path / "file").write_text("")
    _raising(ZeroDivisionError("oops"))
    status, _, err = command("start", "--dir", tmp_path / "file")
    assert status == 70
    assert "no log could be written" in err


def test_what_the_disk_refuses_in_the_state_directory_is_no_defect(command, runtime, tmp_path):
    file = tmp_path / "state" / "evaluation.bin"
    file.mkdir(parents=True)
    try:
        file.write_bytes(b"")
    except OSError as error:
        _raising(ExceptionGroup("tasks", [error]))
    status, _, err = command("start", "--dir", file.parent)
    assert status == 1
    assert err.startswith(f"error E105: cannot use {file}\n  why: Is a directory\n  fix: ")
    assert command("start", "--dir", tmp_path / "other")[0] == 70  # some other file is a defect's


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["version", "config show", "--help"])
def test_output_that_nobody_takes_is_told_of_as_that(words, unbuffered):
    shell = f'"$0" -m node {words} >/dev/full; echo $? >&2'
    environ = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    full = subprocess.run(
        ["sh", "-c", shell, sys.executable], capture_output=True, text=True, env=environ, check=True
    )
    assert full.stderr.splitlines()[0] == "error E402: standard output cannot be written"
    assert "--keep-checkpoints" not in full.stderr
    assert full.stderr.splitlines()[-1] == "1"
    shell = f'{{ "$0" -m node {words}; echo $? >&2; }} | true'
    gone = subprocess.run(
        ["sh", "-c", shell, sys.executable], capture_output=True, text=True, env=environ, check=True
    )
    assert gone.stderr == "0\n"


def test_a_connection_that_broke_is_no_reader_that_went_away(command, runtime):
    _raising(BrokenPipeError(errno.EPIPE, "Broken pipe"))
    assert command("start")[0] == 1


# the process would end here, and its sockets with it
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("inside", "code"), [(True, "E105"), (False, "E999")])
def test_a_script_is_told_of_its_own_state_directory(tmp_path, monkeypatch, capfd, inside, code):
    where = tmp_path / "own" if inside else tmp_path
    order = {
        "config": {"dir": str(tmp_path / "own")},
        "manifest": "",
        "size": 3,
        "layout": "",
        "frozen": {},
    }

    def run(*given):
        raise OSError(errno.EIO, "Input/output error", str(where / "events.jsonl"))

    monkeypatch.setattr(node_daemon, "run", run)
    monkeypatch.setattr(daemon, "die_with", lambda *given: True)
    monkeypatch.setattr(daemon, "clean_up_first", lambda: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(order)))
    ours, theirs = socket.socketpair()
    made = SharedVectors.create(3)
    vectors = os.dup(made.descriptor)
    made.close()
    with ours:
        assert daemon.main([str(theirs.detach()), str(vectors), "0"])
        (raw,) = Unframer().feed(ours.recv(65536))
    told = Ended.decode(raw)
    assert told.code == code
    assert f"error {code}" in capfd.readouterr().err
    assert inside or list((tmp_path / "own" / "logs").glob("crash-*"))


def test_ctrl_c_is_130(command, runtime):
    _raising(KeyboardInterrupt())
    status, _, err = command("start")
    assert status == 130
    assert "Traceback" not in err


def test_errors_of_a_task_group_are_told_once_each(command, runtime):
    one = OperatorError("E501", "no peers", "w", "f", exit_code=5)
    same = OperatorError("E501", "no peers", "w", "f")
    other = OperatorError("E405", "trainer died", "w", "f")
    _raising(ExceptionGroup("tasks", [one, ExceptionGroup("inner", [same, other])]))
    status, _, err = command("start")
    assert status == 5
    assert err.count("error E501") == 1
    assert err.count("error E405") == 1


def test_a_defect_beside_an_operators_error_tells_both(command, runtime):
    _raising(ExceptionGroup("tasks", [OperatorError("E501", "a", "b", "c"), ValueError("x")]))
    status, _, err = command("start")
    assert status == 70
    assert err.index("error E501") < err.index("error E999")
