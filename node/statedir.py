"""What lies where in a node's state directory, and the lock that keeps it to one daemon.

::

    identity.pem     the node's key
    node.toml        settings, where the operator wrote some
    daemon.lock      held while a daemon runs, which it names
    api.json         where its API listens, while it runs
    events.jsonl     what happened (rotated)
    history.jsonl    the run so far, a line a round (see node.monitor.history)
    dashboard.key    what others need to see the dashboard, where it is shown to them
    incarnation      the highest number of a start, or of an address record
    peers.json       peers met before
    evaluation.bin   the run's evaluation text, and tokenizer.json, where it has one
    tokens.json      where this island's training tokens are, of which run, and what they were made
                     of (for this island's other hosts; empty: the run's recipe)
    micro-batch.json sequences at a time that memory was enough for, where more did not fit
    promised-0, …    the rounds that something was promised in, see gossip.chain.promises
    weight-0.json, … push-sum's weight of each fragment, see gossip.pairs.account
    checkpoints/     see node.checkpoints.checkpoint; until the first is made also what a newcomer
                     has of the state that it downloads (.fetched-…)
    data-cache/      files of training data that come from elsewhere
    logs/            trainer ranks, warnings of the daemon, and tracebacks of internal errors
    host-1, …        the same of this island's other hosts, as far as they have it
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path

from node.errors import operator_error
from protocols.errors import OperatorError, reason
from protocols.files import replacing

CHECKPOINTS = "checkpoints"  # the folder of them in a state directory
MANIFEST = "manifest.envelope"  # of a checkpoint: the run's, as its creator signed it
HOST = "host-"  # and its number: the folder of a host that is not host 0
RANKS = "ranks-"  # in logs/, how folders begin in which ranks meet while they run
_HOME = "~"  # left in a path where the user has none
_MAX_API_FILE = 4096
_KEY_BYTES = 16
# at a lock: others may only look at it, and who has just taken it has yet to write who it is
_TRIES, _TRY_S = 10, 0.01
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # what file systems say without them
_MAX_LOCK_FILE = 256
_MAX_DIGITS = 15  # of Unix milliseconds, for thirty thousand years
_MAX_LOG_FILE = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ApiFile:
    """Where a running daemon's API is."""

    address: str  # HOST:PORT
    pid: int
    key: str = ""


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a state directory."""

    pid: int
    here: bool  # else its number is of another container or machine, and of no use here
    host: int = 0  # of an island, where it is none that runs the daemon

    def __str__(self) -> str:
        return f"process {self.pid}" + ("" if self.here else " of another container or machine")


def unusable(root: Path, error: OSError, file: str = "") -> OperatorError:
    """E105 for a state directory in which something, or ``file``, cannot be made or opened."""
    why = "a file has that name" if isinstance(error, FileExistsError) else reason(error)
    return operator_error(
        "E105",
        f"cannot use the state directory {root}",
        why=f"{file}: {why}" if file else why,
        fix="give a directory this user may write with --dir (scripts: dir=)",
    )


def _unlockable(root: Path, error: OSError) -> OperatorError:
    """E105 for a state directory that cannot be kept for one process."""
    if error.errno not in _NO_LOCKS:
        return unusable(root, error)
    return operator_error(
        "E105",
        f"the state directory {root} cannot be locked",
        why=f"its file system has no locks for files (flock: {reason(error)}), as some network "
        "and cluster file systems: a second node could run in it unseen",
        fix="give a --dir (scripts: dir=) on a disk of this machine, or mount that file system "
        "with locks (NFS: without nolock, and with its lock service; Lustre: with flock)",
    )


class _Log(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """A full disk is told of where it matters; here it costs lines of a log."""


class StateDir:
    """Paths of one state directory; creates it with mode 0700."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.checkpoints = root / CHECKPOINTS
        self.logs = root / "logs"
        self.events = root / "events.jsonl"
        self.history = root / "history.jsonl"
        self.api_file = root / "api.json"
        self.key_file = root / "dashboard.key"
        self.micro_batch = root / "micro-batch.json"
        self._lock: int | None = None

    def make(self) -> None:
        """Create the directory and the folders in it that are always there; raises E105."""
        if _HOME in self.root.parts:
            raise operator_error(
                "E105",
                f"the state directory {self.root} is in nobody's home",
                why="this user has none: HOME is not set, and the system does not know the user",
                fix="give a directory with --dir (scripts: dir=), or set HOME",
            )
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            for directory in (self.checkpoints, self.logs):
                directory.mkdir(exist_ok=True)
        except OSError as error:
            raise unusable(self.root, error) from error

    def lock(self, host: int = 0) -> None:
        """Create the directory and keep it for this process; raises E105 if another has it.

        ``host``: the process's number where it only serves an island's host 0. What ranks of a
        daemon that was killed have left goes: they died with it.
        """
        self.make()
        try:
            descriptor = os.open(self.root / "daemon.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise unusable(self.root, error, "daemon.lock") from error
        try:
            taken = _taken(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            os.close(descriptor)
            raise _unlockable(self.root, error) from error
        if not taken:
            holder = _written(descriptor)
            os.close(descriptor)
            raise operator_error(
                "E105",
                f"the state directory {self.root} is in use",
                why=f"another node ({holder or 'process ?'}) runs in it",
            )
        for left in self.logs.glob(f"{RANKS}*"):
            shutil.rmtree(left, ignore_errors=True)
        os.ftruncate(descriptor, 0)
        lines = [f"{os.getpid()} {numbering()}".rstrip(), *([f"{HOST}{host}"] if host else [])]
        os.pwrite(descriptor, "".join(f"{line}\n" for line in lines).encode(), 0)
        self._lock = descriptor  # the lock ends with the process, however that ends

    def unlock(self) -> None:
        """Give the directory free; without effect where it is not held."""
        if self._lock is not None:
            with contextlib.suppress(OSError):  # a disk that has become read-only
                os.ftruncate(self._lock, 0)  # whoever holds it next is not this process
            os.close(self._lock)
            self._lock = None

    def check_there(self) -> None:
        """Raise E105 where the directory that is held has gone, and what was written with it."""
        if self._lock is None:
            return
        try:
            there = (self.root / "daemon.lock").stat()
        except (FileNotFoundError, NotADirectoryError):
            there = None
        except OSError:  # a disk that says nothing for a moment
            return
        if there is None or not os.path.samestat(there, os.fstat(self._lock)):
            raise operator_error(
                "E105",
                f"the state directory {self.root} went away while the node ran",
                why="it was removed, moved or unmounted; what was written since, the last "
                "checkpoint too, is lost or lies elsewhere",
                fix="put it back, or begin anew: a run that has other members can be joined again "
                "with --peers",
            )

    def holder(self) -> int | None:
        """The number of :meth:`held_by`."""
        found = self.held_by()
        return None if found is None else found.pid

    def held_by(self) -> Holder | None:
        """The process whose daemon runs here; None where none does, whatever files it left.

        A number that a killed daemon has left in the lock is not taken for that of the next one,
        which has the lock a moment before it has written its own.
        """
        try:
            descriptor = os.open(self.root / "daemon.lock", os.O_RDONLY)
        except OSError:
            return None
        try:
            for _ in range(_TRIES):
                if _taken(descriptor, fcntl.LOCK_SH, tries=1):
                    return None
                found = _written(descriptor)
                if found is not None and found.here:
                    return found
                time.sleep(_TRY_S)
            return found
        except OSError:  # without locks no daemon has started here
            return None
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def logging(self) -> Iterator[None]:
        """Warnings of this program and its libraries go to a file: the terminal is for people."""
        handler = _Log(self.logs / "daemon.log", maxBytes=_MAX_LOG_FILE, backupCount=1, delay=True)
        handler.setLevel(logging.WARNING)
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        root = logging.getLogger()
        root.addHandler(handler)
        try:
            yield
        finally:
            root.removeHandler(handler)
            handler.close()

    def publish_api(self, address: str, key: str = "") -> None:
        """Let ``node status`` find this process; readable by this user alone."""
        self._replace(self.api_file, json.dumps(asdict(ApiFile(address, os.getpid(), key))))

    def _replace(self, path: Path, text: str) -> None:
        """Write a file of this directory whole or not at all."""
        try:
            with replacing(path, durable=False) as file:
                file.write(text.encode())
        except OSError as error:
            error.filename = error.filename or str(path)  # a write names no file
            raise

    def dashboard_key(self) -> str:
        """The key of the dashboard's own listener, made when it is first asked for."""
        path = self.key_file
        with contextlib.suppress(OSError):
            if len(key := path.read_text(encoding="ascii", errors="replace").strip()) >= _KEY_BYTES:
                return key
        key = secrets.token_urlsafe(_KEY_BYTES)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(key + "\n")
        return key

    def incarnation(self, now: float) -> int:
        """The number of this start, or of an address record that is signed.

        Unix milliseconds ``now``, and more than any before: others believe the newest of a key, so
        one before which the clock was put back must not seem to be the older one.
        """
        path, before = self.root / "incarnation", 0
        with contextlib.suppress(OSError, ValueError):
            text = path.read_text(encoding="ascii").strip()
            before = int(text) if len(text) <= _MAX_DIGITS else 0
        number = max(int(now * 1000), before + 1)
        with contextlib.suppress(OSError):  # a full disk: the clock alone has to do
            self._replace(path, f"{number}\n")
        return number

    def withdraw_api(self) -> None:
        """Undo :meth:`publish_api`."""
        with contextlib.suppress(OSError):  # a disk that has become read-only: the lock counts
            self.api_file.unlink(missing_ok=True)

    def find_api(self) -> ApiFile | None:
        """The API of the daemon that runs here, as it published it."""
        try:
            with self.api_file.open("rb") as file:
                values = json.loads(file.read(_MAX_API_FILE))
            return ApiFile(str(values["address"]), int(values["pid"]), str(values.get("key", "")))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def crash_log(self, text: str) -> Path | None:
        """Keep a traceback: in ``logs/``, else in the temporary directory, else nowhere."""
        prefix = f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-"
        if _HOME not in self.root.parts:
            with contextlib.suppress(OSError):
                self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
                self.logs.mkdir(exist_ok=True)
        for directory in (self.logs, None):
            with contextlib.suppress(OSError):  # there may be no temporary directory either
                # a new file: others may write links to there
                descriptor, path = tempfile.mkstemp(".log", prefix, directory)
                with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
                    file.write(text)
                return Path(path)
        return None


def _taken(descriptor: int, how: int, tries: int = _TRIES) -> bool:
    """Lock a file, for a moment more where others only look at the lock; False: it is held."""
    for left in reversed(range(tries)):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            return True
        if left:
            time.sleep(_TRY_S)
    return False


def numbering() -> str:
    """Where the numbers of processes mean what they do for this one: boot and PID namespace.

    Empty where the system does not tell.
    """
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    return ""


def _written(descriptor: int) -> Holder | None:
    """The process that a lock file names; None where it names none."""
    text = os.pread(descriptor, _MAX_LOCK_FILE, 0).decode(errors="replace").strip()
    line, _, role = text.partition("\n")
    number, _, where = line.partition(" ")
    if not (number.isascii() and number.isdecimal()):
        return None
    pid, where = int(number), where.strip()
    host = re.fullmatch(f"{HOST}([0-9]{{1,9}})", role)
    here = where in ("", numbering()) and _exists(pid)
    return Holder(pid, here, int(host[1]) if host else 0)


def _exists(pid: int) -> bool:
    """Whether there is a process of that number."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        return True
    return True
