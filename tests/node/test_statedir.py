"""What a node keeps from one start to the next."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from node.config import resolve
from node.statedir import Holder, StateDir
from protocols.errors import OperatorError


def test_a_later_start_has_a_larger_number_though_the_clock_was_put_back(tmp_path: Path) -> None:
    home = StateDir(tmp_path)
    first = home.incarnation(1_700_000_000.0)
    assert first == 1_700_000_000_000
    assert home.incarnation(1_600_000_000.0) == first + 1
    assert StateDir(tmp_path).incarnation(0.0) == first + 2
    assert home.incarnation(1_800_000_000.0) == 1_800_000_000_000


@pytest.mark.parametrize("spoilt", [b"", b"x", b"\xff\xfe", b"-7", b"9" * 400])
def test_a_number_that_is_none_does_no_harm(tmp_path: Path, spoilt: bytes) -> None:
    (tmp_path / "incarnation").write_bytes(spoilt)
    found = StateDir(tmp_path).incarnation(1_700_000_000.0)
    assert 1_700_000_000_000 <= found < 2**63
    assert StateDir(tmp_path).incarnation(1_700_000_000.0) == found + 1


def test_without_a_disk_the_clock_has_to_do(tmp_path: Path) -> None:
    home = StateDir(tmp_path / "nowhere")
    assert home.incarnation(5.0) == 5000
    assert home.incarnation(5.0) == 5000


def test_a_traceback_is_written_over_nothing_and_read_by_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the directory cannot be used it goes to a folder that everybody writes to."""
    (tmp_path / "file").write_text("")
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    monkeypatch.setattr("time.strftime", lambda form: "20261122-000000")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (shared / f"crash-20261122-000000-{os.getpid()}.log").symlink_to(victim)
    log = StateDir(tmp_path / "file" / "state").crash_log("what happened")
    assert log is not None
    assert log.parent == shared
    assert log.read_text() == "what happened"
    assert log.stat().st_mode & 0o777 == 0o600
    assert victim.read_text() == "precious"
    made = StateDir(tmp_path / "new")
    assert made.crash_log("x")
    assert made.root.stat().st_mode & 0o777 == 0o700


def test_the_api_of_a_directory_that_is_read_only_is_left(tmp_path, monkeypatch) -> None:
    home = StateDir(tmp_path)
    home.publish_api("127.0.0.1:1")

    def refused(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("pathlib.Path.unlink", refused)
    home.withdraw_api()  # a node that ends has no reason to fail


def test_a_file_in_the_place_of_the_directory_is_told(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a file")
    with pytest.raises(OperatorError) as caught:
        StateDir(tmp_path / "text.txt").lock()
    assert (caught.value.code, caught.value.why) == ("E105", "a file has that name")


def test_a_lock_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "daemon.lock").mkdir()
    with pytest.raises(OperatorError) as caught:
        StateDir(tmp_path).lock()
    assert (caught.value.code, caught.value.why) == ("E105", "daemon.lock: Is a directory")


def test_a_directory_in_nobody_s_home_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """~ stays where the system does not know the user: a folder of that name would be made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    home = StateDir(resolve({}, {}).dir)
    with pytest.raises(OperatorError) as caught:
        home.lock()
    assert caught.value.code == "E105"
    assert "set HOME" in caught.value.fix
    assert home.crash_log("of another defect") is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("put_back", [False, True])
def test_a_directory_that_went_away_is_told_of(tmp_path: Path, put_back: bool) -> None:
    home = StateDir(tmp_path / "state")
    home.check_there()  # it is not held
    home.lock()
    home.check_there()
    home.root.rename(tmp_path / "elsewhere")
    if put_back:
        StateDir(home.root).lock()  # another node's
    with pytest.raises(OperatorError, match="went away while the node ran") as caught:
        home.check_there()
    assert caught.value.code == "E105"
    home.unlock()


def test_a_full_disk_leaves_no_drafts_and_is_told_with_the_file(tmp_path, monkeypatch) -> None:
    home = StateDir(tmp_path)
    home.publish_api("127.0.0.1:1")

    def full(descriptor: int, mode: str) -> Any:
        os.close(descriptor)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(OSError, match=r"api\.json"):
        home.publish_api("127.0.0.1:2")
    assert home.incarnation(5.0) == 5000
    assert [path.name for path in tmp_path.iterdir()] == ["api.json"]


@pytest.fixture
def ended() -> int:
    """The number of a process that is no more."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_the_number_that_a_killed_node_left_is_not_that_of_the_next(
    tmp_path: Path, ended: int
) -> None:
    """Which has the lock a moment before it has written its own."""
    lock = tmp_path / "daemon.lock"
    lock.write_text(f"{ended}\n")
    with lock.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        timer = Timer(0.03, lambda: os.pwrite(file.fileno(), f"{os.getpid()}  \n".encode(), 0))
        timer.start()
        assert StateDir(tmp_path).holder() == os.getpid()
        timer.join()
    assert StateDir(tmp_path).holder() is None


def test_a_node_that_is_in_another_container_runs_all_the_same(tmp_path: Path, ended: int) -> None:
    lock = tmp_path / "daemon.lock"
    lock.write_text(f"{ended}\n")
    with lock.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert StateDir(tmp_path).holder() == ended


def test_who_leaves_takes_its_number_along(tmp_path: Path) -> None:
    home = StateDir(tmp_path)
    home.lock()
    assert home.holder() == os.getpid()
    home.unlock()
    assert (tmp_path / "daemon.lock").read_bytes() == b""
    assert home.holder() is None


def test_what_ranks_of_a_killed_node_have_left_goes_with_the_next_start(tmp_path: Path) -> None:
    home = StateDir(tmp_path)
    home.lock()
    met = home.logs / "ranks-x1y2"
    met.mkdir()
    (met / "store").write_bytes(b"where they met")
    (home.logs / "trainer-rank0.log").write_text("its end")
    with pytest.raises(OperatorError, match="in use"):
        StateDir(tmp_path).lock()
    assert (met / "store").exists()
    home.unlock()
    home.lock()
    assert [file.name for file in home.logs.iterdir()] == ["trainer-rank0.log"]
    home.unlock()


def test_who_only_looks_keeps_no_node_from_starting(tmp_path: Path) -> None:
    (tmp_path / "daemon.lock").touch()
    looking = os.open(tmp_path / "daemon.lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    timer = Timer(0.03, lambda: os.close(looking))
    timer.start()
    home = StateDir(tmp_path)
    home.lock()
    timer.join()
    home.unlock()


def test_a_lock_tells_where_its_number_means_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = StateDir(tmp_path)
    home.lock()
    assert home.held_by() == Holder(os.getpid(), here=True)
    monkeypatch.setattr("node.statedir.numbering", lambda: "boot/pid:[2]")
    assert home.held_by() == Holder(os.getpid(), here=False)
    with pytest.raises(OperatorError) as caught:
        StateDir(tmp_path).lock()
    assert f"process {os.getpid()} of another container or machine" in caught.value.why
    monkeypatch.setattr("node.statedir.numbering", str)  # a system that does not tell
    home.unlock()
    home.lock()
    assert (tmp_path / "daemon.lock").read_text() == f"{os.getpid()}\n"
    assert home.held_by() == Holder(os.getpid(), here=True)
    home.unlock()


def test_one_daemon_a_directory(tmp_path):
    first, second = StateDir(tmp_path / "s"), StateDir(tmp_path / "s")
    first.lock()
    with pytest.raises(OperatorError, match="in use") as caught:
        second.lock()
    assert caught.value.code == "E105"
    first.unlock()
    second.lock()
    second.unlock()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_without_locks_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refused(descriptor: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refused)
    home, opened = StateDir(tmp_path), set(os.listdir("/proc/self/fd"))
    with pytest.raises(OperatorError) as caught:
        home.lock()
    assert caught.value.code == "E105"
    assert os.strerror(number) in caught.value.why
    assert "--dir" in caught.value.fix
    assert ("on a disk of this machine" in caught.value.fix) == (number != errno.EIO)
    assert home.held_by() is None
    assert set(os.listdir("/proc/self/fd")) <= opened


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OperatorError) as caught:
        StateDir(tmp_path / "file" / "s").lock()
    assert caught.value.code == "E105"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"address": 1}', '{"address":"a:1","pid":"x"}', "[" * 4096]
)
def test_a_damaged_api_file_is_as_good_as_none(tmp_path, text):
    (tmp_path / "api.json").write_text(text)
    assert StateDir(tmp_path).find_api() is None
