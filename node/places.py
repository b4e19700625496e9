"""Which state directories there are on this machine, who runs in them, and how to stop one.

Every daemon notes its directory in ``$XDG_STATE_HOME/atoll/nodes`` (by default below
``~/.local/state``), one small file each, so that ``node runs`` finds those that are not the usual
one. The notes may be lost without harm.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from node.errors import operator_error
from node.monitor.wording import clean, duration
from node.statedir import StateDir
from protocols.errors import OperatorError

MAX_NOTES = 256
MAX_INDEX_BYTES = 1024 * 1024
_POLL_S = 0.1


def notes() -> Path:
    """Where the directories are noted."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local/state") / "atoll" / "nodes"


def note(directory: Path) -> None:
    """Remember that nodes run in ``directory``; without effect where that cannot be written."""
    path = os.fsencode(directory)
    name = hashlib.sha256(path).hexdigest()[:16]
    with contextlib.suppress(OSError):
        notes().mkdir(parents=True, exist_ok=True)
        (notes() / name).write_bytes(path)
        for old in sorted(notes().iterdir(), key=lambda path: path.stat().st_mtime)[:-MAX_NOTES]:
            old.unlink()


def noted() -> list[Path]:
    """The directories noted that are still there; the notes of others are removed."""
    found = []
    with contextlib.suppress(OSError):
        for path in sorted(notes().iterdir()):
            with contextlib.suppress(OSError):  # one that cannot be read hides no other
                directory = Path(os.fsdecode(path.read_bytes()))
                if (directory / "daemon.lock").exists():
                    found.append(directory)
                else:
                    path.unlink()
    return found


@dataclass(frozen=True, slots=True)
class Place:
    """One state directory. What nobody could tell is empty or None."""

    dir: str
    status: str  # of the node that runs there; "stopped" where none does
    pid: int | None
    run: str  # label, or the first digits of the run id of a node that is stopped
    round: int | None  # rounds committed, or in the newest checkpoint
    role: str
    api: str  # HOST:PORT
    uptime_s: float | None


def look(directory: Path) -> Place:
    """How things stand in one directory."""
    home = StateDir(directory)
    pid = home.holder()
    if pid is None:
        facts = _newest_checkpoint(home.checkpoints)
        run = str(facts.get("run", ""))[:8]
        return Place(str(directory), "stopped", None, run, facts.get("round"), "", "", None)
    from node.status import fetch

    found = home.find_api()
    address = found.address if found else ""
    try:
        state = fetch(directory)
        return Place(
            str(directory),
            str(state["status"]),
            pid,
            str(state["run"]["label"]) if state["run"] else "",
            int(state["rounds"]["committed"]),
            str(state["node"]["role"]),
            address,
            float(state["node"]["uptime_s"]),
        )
    except OperatorError:  # it is just starting, or hangs
        status = "no answer"
    except (KeyError, TypeError, ValueError):
        status = "other version"
    return Place(str(directory), status, pid, "", None, "", address, None)


def _newest_checkpoint(folder: Path) -> dict[str, Any]:
    """What the newest checkpoint says it is of; empty where there is none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        newest = max(folder.glob("ckpt-*/checkpoint.json"))
        if newest.stat().st_size <= MAX_INDEX_BYTES:
            facts = json.loads(newest.read_bytes())
            return facts if isinstance(facts, dict) else {}
    return {}


def all_places(usual: Path) -> list[Place]:
    """All that are known, those with a node that runs first; ``usual`` if it was ever used."""
    known = dict.fromkeys([*noted(), *([usual] if (usual / "daemon.lock").exists() else [])])
    return sorted(map(look, known), key=lambda place: (place.pid is None, place.dir))


def as_text(places: Sequence[Place]) -> str:
    """A line a directory."""
    if not places:
        return "no node has run on this machine as this user"
    rows = [("STATUS", "PID", "RUN", "ROUND", "ROLE", "UP", "API", "DIRECTORY")]
    rows += [
        (
            place.status,
            str(place.pid or "-"),
            place.run or "-",
            "-" if place.round is None else str(place.round),
            place.role or "-",
            "-" if place.uptime_s is None else duration(place.uptime_s),
            place.api or "-",
            place.dir,
        )
        for place in places
    ]
    shown = [[clean(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in shown) for column in range(len(shown[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in shown
    )


def as_document(places: Sequence[Place]) -> str:
    """JSON: a list of them."""
    return json.dumps([asdict(place) for place in places], indent=2)


def stop(
    directory: Path, *, timeout_s: float, now: bool, tell: Callable[[str], None] = lambda text: None
) -> int:
    """Have the node in ``directory`` leave, and wait until it has; the pid it had.

    As Ctrl-C does: once, it makes a checkpoint and says farewell; with ``now`` it ends at once.
    Raises OperatorError E106 where none runs, E107 where it does not end in time.
    """
    home = StateDir(directory)
    pid = home.holder()
    if pid is None:
        raise operator_error("E106", f"no node runs with the state directory {directory}")
    tell(f"process {pid}: asked to " + ("end at once" if now else "leave"))
    began = time.monotonic()
    asked = 0
    while home.holder() == pid:
        if asked < (2 if now else 1):
            _signal(pid)
            asked += 1
        if time.monotonic() - began > timeout_s:
            raise operator_error(
                "E107",
                f"process {pid} is still there after {timeout_s:.0f} s",
                fix=f"kill -9 {pid} (its newest checkpoint is whole)"
                if now
                else "give it longer with --timeout, or end it at once with --now",
            )
        time.sleep(_POLL_S)
    return pid


def _signal(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return  # it has ended in this moment
    except PermissionError as error:
        raise operator_error(
            "E107",
            f"process {pid} cannot be asked to stop",
            why="it belongs to another user",
            fix=f"run this as its user, or: sudo kill {pid}",
        ) from error
