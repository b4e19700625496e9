"""A node as its user runs it: the real command in a process of its own, and what it leaves behind.

Output goes to files, since of a full pipe lines are left out. Every process that a node starts is
in its session; :meth:`NodeProcess.left_over` finds those that outlive it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PATIENCE_S = 90.0  # for anything to happen: the machine may be busy


def wait_until(condition: Callable[[], Any], what: str, timeout: float = PATIENCE_S) -> Any:
    """The first true value of ``condition``."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {timeout:.0f} s for {what}"
        time.sleep(0.05)
    return value


class NodeProcess:
    """``node COMMAND --dir DIR …`` on loopback, on ports of its own."""

    def __init__(
        self, directory: Path, *, prefix: tuple[str, ...] = (), **environment: str
    ) -> None:
        self.dir = directory
        self.out, self.err = directory.with_suffix(".out"), directory.with_suffix(".err")
        self.prefix = prefix
        self.environment = environment
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def start(self, command: str, *arguments: object, ports: bool = True) -> NodeProcess:
        """Run it; the next start appends to the same files."""
        words = [*self.prefix, sys.executable, "-m", "node", command, "--dir", str(self.dir)]
        if ports:
            words += ["--listen", "127.0.0.1:0", "--api", "127.0.0.1:0"]
        if command == "start":
            words += ["--threads", "1", "--device", "cpu"]
        return self._launch([*words, *map(str, arguments)], self.environment)

    def start_script(
        self, script: Path, *arguments: object, runner: tuple[str, ...] = ()
    ) -> NodeProcess:
        """Run a training script that calls ``node.join``; its settings come by environment."""
        settings = {
            "ATOLL_DIR": str(self.dir),
            "ATOLL_LISTEN": "127.0.0.1:0",
            "ATOLL_API": "127.0.0.1:0",
        }
        words = [*self.prefix, sys.executable, *runner, str(script), *map(str, arguments)]
        # what a script writes where it stands stays with the test's files
        return self._launch(words, {**settings, **self.environment}, cwd=self.out.parent)

    def _launch(
        self, words: list[str], environment: dict[str, str], *, cwd: Path | None = None
    ) -> NodeProcess:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("ATOLL_")}
        self.starts += 1
        with self.out.open("ab") as out, self.err.open("ab") as err:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**clean, "OMP_NUM_THREADS": "1", **environment},
                start_new_session=True,
                cwd=cwd,
            )
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Signal the daemon alone, as a terminal's Ctrl-C reaches it."""
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self, timeout: float = PATIENCE_S) -> int:
        """The exit status."""
        assert self.process is not None
        return self.process.wait(timeout)

    def finish(self) -> int:
        """The exit status of one that ends by itself: it may take as long as it gets on."""
        seen = -1
        while (events := len(self.events())) > seen:
            seen = events
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.wait()
        raise AssertionError(f"nothing new in {PATIENCE_S:.0f} s:\n{self.text()}")

    def kill(self) -> None:
        """End everything it has started."""
        for pid in [self.pid, *self.left_over()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait()

    def left_over(self) -> list[int]:
        """Processes other than the daemon that work in its directory and are no zombies."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                alive = (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
                ours = any(word.startswith(str(self.dir).encode()) for word in words)
                if ours and alive and int(entry.name) != self.pid:
                    found.append(int(entry.name))
        return found

    # --- what it says ------------------------------------------------------------------------

    def text(self) -> str:
        """Standard output and error so far."""
        return self.out.read_text(errors="replace") + self.err.read_text(errors="replace")

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        """Its event log so far, oldest first."""
        log = self.dir / "events.jsonl"
        found = []
        for line in log.read_text(errors="replace").splitlines() if log.exists() else ():
            with contextlib.suppress(ValueError):  # the last one may be half written
                event = json.loads(line)
                if not kind or event["kind"] == kind:
                    found.append(event)
        return found

    def rounds(self) -> dict[int, str]:
        """The digest of its state after each round it has applied."""
        return {event["round"]: event["state"] for event in self.events("round")}

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait for something while it runs."""

        def alive() -> Any:
            found = condition()
            assert found or self.running, f"it ended before {what}:\n{self.text()}"
            return found

        return wait_until(alive, f"{what} of {self.dir.name}:\n{self.text()}")

    def address(self) -> str:
        """``HOST:PORT/ID``, once it is up."""
        started = self.wait_for(
            lambda: self.events("started")[self.starts - 1 : self.starts], "being up"
        )
        return str(started[0]["join_address"])

    def wait_round(self, number: int) -> None:
        """Until it has applied this round."""
        self.wait_for(lambda: max(self.rounds(), default=-1) >= number, f"round {number}")

    # --- its API -----------------------------------------------------------------------------

    def api(self, path: str) -> str:
        """An answer of its API."""
        address = json.loads((self.dir / "api.json").read_text())["address"]
        with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as answer:
            return str(answer.read().decode())

    def state(self) -> dict[str, Any]:
        """``/api/v1/state``."""
        state: dict[str, Any] = json.loads(self.api("/api/v1/state"))
        return state

    def metric(self, name: str) -> float:
        """One sample, named with its labels."""
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.api("/metrics"), re.MULTILINE)
        assert found is not None, name
        return float(found[1])


@contextlib.contextmanager
def nodes(root: Path) -> Iterator[Callable[..., NodeProcess]]:
    """``make(name)``: nodes in directories of their own, all ended on the way out."""
    made: list[NodeProcess] = []

    def make(name: str, **options: Any) -> NodeProcess:
        node = NodeProcess(root / name, **options)
        made.append(node)
        return node

    try:
        yield make
    finally:
        for node in made:
            if node.process is not None:
                node.kill()
