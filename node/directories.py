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
from typing import TYPE_CHECKING, Any

from node.errors import operator_error
from node.monitor.wording import clean, duration
from node.statedir import HOST, MANIFEST, Holder, StateDir
from protocols.errors import OperatorError, RemoteProtocolError
from protocols.files import DRAFT, replacing, user_home

if TYPE_CHECKING:
    from bootstrap.manifest import Manifest

MAX_NOTES = 256
MAX_INDEX_BYTES = 1024 * 1024
_POLL_S = 0.1


def notes() -> Path:
    """Where the directories are noted. Raises OSError where this user has no home."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if os.path.isabs(base) else user_home() / ".local/state") / "atoll" / "nodes"


def note(directory: Path) -> None:
    """Remember that nodes run in ``directory``; without effect where that cannot be written."""
    path = os.fsencode(directory)
    name = hashlib.sha256(path).hexdigest()[:16]
    with contextlib.suppress(OSError):
        notes().mkdir(parents=True, exist_ok=True)
        with replacing(notes() / name) as file:  # others read it at any moment
            file.write(path)
        for old in sorted(notes().iterdir(), key=lambda path: path.stat().st_mtime)[:-MAX_NOTES]:
            old.unlink()


def noted() -> list[Path]:
    """The directories noted that are still there; the notes of others are removed."""
    found = []
    with contextlib.suppress(OSError):
        for path in sorted(notes().iterdir()):
            if path.name.startswith(DRAFT):
                continue
            with contextlib.suppress(OSError):  # one that cannot be read hides no other
                directory = Path(os.fsdecode(path.read_bytes()))
                if (directory / "daemon.lock").exists():
                    found.append(directory)
                else:
                    path.unlink()
    return found


@dataclass(frozen=True, slots=True)
class NodeDirectory:
    """One state directory. What nobody could tell is empty or None."""

    dir: str
    status: str  # of the node that runs there; "stopped" where none does
    pid: int | None
    run: str  # label; the first digits of the run id where the checkpoint does not tell it
    round: int | None  # rounds committed, or in the newest checkpoint
    role: str  # also "host 1", of an island: trainer ranks and no node of its own
    api: str  # HOST:PORT
    uptime_s: float | None


def look(directory: Path) -> NodeDirectory:
    """How things stand in one directory."""
    home = StateDir(directory)
    holder = home.held_by()
    if holder is None:
        newest = newest_checkpoint(home.checkpoints)
        facts = _facts(newest) if newest else {}
        manifest = kept_manifest(newest) if newest else None
        run = manifest.label if manifest else str(facts.get("run", ""))[:8]
        return NodeDirectory(str(directory), "stopped", None, run, facts.get("round"), "", "", None)
    pid = holder.pid
    if holder.host:
        role = f"host {holder.host}"  # it has no API
        return NodeDirectory(str(directory), "running", pid, "", None, role, "", None)
    from node.status import fetch

    found = home.find_api()
    address = found.address if found else ""
    try:
        state = fetch(directory)
        return NodeDirectory(
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
    return NodeDirectory(str(directory), status, pid, "", None, "", address, None)


def newest_checkpoint(folder: Path) -> Path | None:
    """That which was made last in a folder of them, whole or not; None where there is none."""

    def made(checkpoint: Path) -> tuple[float, Path]:
        created = _facts(checkpoint).get("created")
        return float(created) if isinstance(created, int | float) else 0.0, checkpoint

    found = (index.parent for index in folder.glob("ckpt-*/checkpoint.json"))
    return max(found, key=made, default=None)


def kept_manifest(checkpoint: Path) -> Manifest | None:
    """The manifest in a checkpoint, itself verified (the rest is not: that may take minutes).

    None where it cannot be read.
    """
    from bootstrap.signed_manifest import SignedManifest

    try:
        run = bytes.fromhex(str(_facts(checkpoint)["run"]))
        return SignedManifest.open((checkpoint / MANIFEST).read_bytes(), run).manifest
    except (OSError, ValueError, KeyError, RemoteProtocolError):
        return None


def _facts(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says it is of; empty where that cannot be read."""
    index = checkpoint / "checkpoint.json"
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if index.stat().st_size <= MAX_INDEX_BYTES:
            facts = json.loads(index.read_bytes())
            return facts if isinstance(facts, dict) else {}
    return {}


def all_directories(usual: Path) -> list[NodeDirectory]:
    """All that are known, those with a node that runs first; ``usual`` if it was ever used."""
    known = dict.fromkeys([*noted(), *([usual] if (usual / "daemon.lock").exists() else [])])
    return sorted(map(look, known), key=lambda directory: (directory.pid is None, directory.dir))


def of_use(directory: NodeDirectory) -> bool:
    """Whether a node runs there, or could go on there: no failed start, no demo that is over."""
    a_demo = any(part.startswith("atoll-demo-") for part in Path(directory.dir).parts)
    return directory.pid is not None or (directory.round is not None and not a_demo)


def as_text(directories: Sequence[NodeDirectory], *, everything: bool = True) -> str:
    """A line a directory; without ``everything`` those :func:`of_use`, and how many others."""
    if not directories:
        return "no node has run on this machine as this user"
    shown = [directory for directory in directories if everything or of_use(directory)]
    left = len(directories) - len(shown)
    lines = [_table(shown)] if shown else []
    if left:
        lines.append(f"{left} without a checkpoint, or of a demo that is over: node runs --all")
    return "\n".join(lines)


def _table(directories: Sequence[NodeDirectory]) -> str:
    rows = [("STATUS", "PID", "RUN", "ROUND", "ROLE", "UP", "API", "DIRECTORY")]
    rows += [
        (
            directory.status,
            str(directory.pid or "-"),
            directory.run or "-",
            "-" if directory.round is None else str(directory.round),
            directory.role or "-",
            "-" if directory.uptime_s is None else duration(directory.uptime_s),
            directory.api or "-",
            directory.dir,
        )
        for directory in directories
    ]
    shown = [[clean(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in shown) for column in range(len(shown[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in shown
    )


def as_document(directories: Sequence[NodeDirectory]) -> str:
    """JSON: a list of them."""
    return json.dumps([asdict(directory) for directory in directories], indent=2)


def stop(
    directory: Path, *, timeout_s: float, now: bool, tell: Callable[[str], None] = lambda text: None
) -> int:
    """Have the node in ``directory`` leave, and wait until it has; the pid it had.

    As Ctrl-C does: once, it makes a checkpoint and says farewell; with ``now``, as after a second
    one, it ends at once. Where no node runs but one other host of an island, in a folder of its
    own, that leaves. Raises OperatorError E106 where none runs, E107 where it does not end in time
    or cannot be asked from here.
    """
    home = StateDir(directory)
    found = home.held_by()
    if found is None:
        home, found = _only_host(directory)
    if not found.here:
        raise operator_error(
            "E107",
            f"{found} cannot be asked to stop from here",
            why="its number is none of this machine, or that of a process that is no node",
            fix="run `node stop` where it runs, or stop its container",
        )
    pid = found.pid
    who = f"host {found.host} of an island, " if found.host else ""
    tell(f"{who}process {pid}: asked to " + ("end at once" if now else "leave"))
    began = time.monotonic()
    _signal(pid, signal.SIGTERM)
    if now:
        _signal(pid, signal.SIGINT)  # the same once more would be an echo of the first
    while home.holder() == pid:
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


def hosts_in(directory: Path) -> list[tuple[StateDir, Holder]]:
    """Hosts of an island, none of them host 0, that run in folders of ``directory``.

    The disk may be shared with other machines: beside those of this one theirs do not count.
    """
    homes = map(StateDir, sorted(directory.glob(f"{HOST}*")))
    held = [(home, found) for home in homes if (found := home.held_by()) is not None]
    running = [each for each in held if each[1].host]  # a node's folder may have such a name
    return [each for each in running if each[1].here] or running


def _only_host(directory: Path) -> tuple[StateDir, Holder]:
    """That one of :func:`hosts_in`; raises E106 for none or several."""
    running = hosts_in(directory)
    if len(running) == 1:
        return running[0]
    what = f"no node runs with the state directory {directory}"
    if not running:
        raise operator_error("E106", what)
    folders = ", ".join(str(home.root) for home, _ in running)
    raise operator_error(
        "E106",
        what,
        why=f"hosts of an island do, none of which is host 0, in {folders}",
        fix="stop host 0, with which they end, or name the folder of one with --dir",
    )


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has ended in this moment
    except PermissionError as error:
        raise operator_error(
            "E107",
            f"process {pid} cannot be asked to stop",
            why="it belongs to another user",
            fix=f"run this as its user, or: sudo kill {pid}",
        ) from error
