"""``node demo``: a whole swarm on this machine, with everything that can happen to one.

Islands are real ``node start`` processes over real sockets. They train the tiny preset; half-way
a newcomer joins, one island is killed with SIGKILL and comes back with ``--resume``, one leaves
with Ctrl-C. What happened is read from the islands' own event logs. Where rounds take longer than
they should, as on a machine that others use too, fewer are made.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from node.demo.summary import Summary, as_text, summary_of, went_well
from node.errors import operator_error
from node.interrupts import held_back
from node.monitor.processors import usable_cores

START_S = 15.0  # until the first island trains, and for the end of the last one
CALIBRATION_STEPS = 30
OVERHEAD = 1.5  # of a round over its inner steps: evaluation, merging, waiting for the others
READY_TIMEOUT_S = 120.0
END_TIMEOUT_S = 60.0
POLL_S = 0.2
MIN_ROUNDS = 8  # for all that is to happen to one after the other
TOO_LONG = 1.2  # times the seconds that were asked for: told before it begins
STUCK, STUCK_S = 3, 180.0  # times as long as it should take, and that at least: it is given up


class IslandProcess:
    """One island of the demonstration."""

    program: tuple[str, ...] = ("-m", "node")

    def __init__(self, name: str, root: Path, threads: int) -> None:
        self.name, self.dir, self.threads = name, root / name, threads
        self.dir.mkdir(parents=True)
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def start(self, *arguments: str) -> None:
        """Run ``node start`` for this island."""
        command = [
            *(sys.executable, *self.program, "start"),
            *("--dir", str(self.dir), "--listen", "127.0.0.1:0", "--api", "127.0.0.1:0"),
            *("--name", self.name, "--threads", str(self.threads), "--device", "cpu"),
            *("--checkpoint-every", "2", *arguments),
        ]
        self.starts += 1
        with held_back(), (self.dir / "console.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": str(self.threads)},
            )

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        """This island's own log so far, oldest first."""
        path = self.dir / "events.jsonl"
        if not path.exists():
            return []
        found = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):  # the last line may be half written
                event = json.loads(line)
                if not kind or event.get("kind") == kind:
                    found.append(event)
        return found

    def last_round(self) -> int:
        """The newest round it has applied, -1 before the first."""
        rounds = self.events("round")
        return int(rounds[-1]["round"]) if rounds else -1

    def join_address(self) -> str:
        """``HOST:PORT/ID`` from its start-up block; empty until it is up."""
        started = self.events("started")
        return str(started[-1]["join_address"]) if len(started) >= self.starts else ""

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the daemon alone; it looks after its ranks."""
        if self.process is not None and self.running:
            self.process.send_signal(number)

    def wait(self, timeout: float) -> bool:
        """Whether it has ended within ``timeout`` seconds."""
        if self.process is None:
            return True
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def tail(self) -> str:
        """The end of what it printed."""
        text = (self.dir / "console.log").read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-15:])


class DemoIsland(IslandProcess):
    """One that ends with this process, however that ends; it is this thread's."""

    program = ("-m", "node.demo.island", str(os.getpid()))


class Demo:
    """The script of the demonstration."""

    def __init__(
        self, seconds: float, islands: int, seed: int, root: Path, began: float, quiet: bool
    ) -> None:
        """``seconds`` count from ``began`` (monotonic)."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        from bootstrap.manifest import Manifest

        self.seconds, self.count, self.seed, self.root = seconds, islands, seed, root
        self.began = began
        cores = usable_cores()
        self.threads = max(1, cores // (islands + 1))
        self.inner_steps = Manifest().rounds.inner_steps
        round_s = OVERHEAD * step_seconds() * max(1.0, islands / cores) * self.inner_steps
        besides_s = time.monotonic() - began + START_S
        least = max(MIN_ROUNDS, ceil(2 * START_S / round_s))  # who comes half-way starts, too
        self.rounds = max(least, int((seconds - besides_s) / round_s))
        self.takes_s = besides_s + self.rounds * round_s  # unless something else slows it down
        self.islands: list[IslandProcess] = []
        self.joined = self.killed = self.left = False
        self.cut = False  # ended before its last round, as the time was over
        console = Console(stderr=True, quiet=quiet)
        self.print = console.print
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TextColumn("round {task.completed}/{task.total}  {task.fields[loss]}"),
            TimeRemainingColumn(),
            console=console,
            disable=quiet,
        )

    def run(self) -> Summary:
        """Play it; raises OperatorError E405 when an island dies that was not killed."""
        try:
            with self.progress:
                self.bar = self.progress.add_task("starting", total=self.rounds, loss="")
                self._start_first()
                self._train()
                self._finish()
        finally:
            with held_back():  # another Ctrl-C would leave some of them running
                for island in self.islands:
                    island.signal(signal.SIGKILL)
            for island in self.islands:
                island.wait(5.0)
        return summary_of(self, time.monotonic() - self.began)

    def _new(self, *arguments: str) -> IslandProcess:
        island = DemoIsland(f"island-{len(self.islands) + 1}", self.root, self.threads)
        self.islands.append(island)
        island.start(*arguments)
        return island

    def _start_first(self) -> None:
        changes = {
            "name": "demo",
            "seed": self.seed,
            "data.seed": self.seed,
            "rounds.total_rounds": self.rounds,
            "inner.total_steps": self.rounds * self.inner_steps,
        }
        settings = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
        first = self._new(*settings)
        self._until(lambda: bool(first.join_address()), READY_TIMEOUT_S, "the first island starts")
        self.address = first.join_address()
        self.print(f"watch them at http://{first.events('started')[-1]['api']}/")
        for _ in range(self.count - 1):
            self._new("--peers", self.address)
        if self.takes_s > TOO_LONG * self.seconds:
            self.print(
                f"{self.rounds} rounds, the least there are, take about {self.takes_s:.0f} s here"
            )
        self.print(f"{self.count} islands; another machine would join with:")
        self.print(f"  node start --peers {self.address}", soft_wrap=True)

    def _train(self) -> None:
        first = self.islands[0]
        victim = self.islands[1] if self.count > 1 else None
        leaver = self.leaver()
        restart_at: float | None = None
        began = time.monotonic()
        limit = max(STUCK * max(self.seconds, self.takes_s), STUCK_S)
        while first.last_round() < self.rounds - 1:
            done = first.last_round() + 1
            self._show(first, done)
            come = max(done / self.rounds, self._time_gone())  # 1: to the end
            if come >= 1 and self._all_seen(victim, leaver):
                self.print(f"the time is over: ends after {done} of {self.rounds} rounds")
                self.cut = True
                return
            if victim and not self.killed and come >= 1 / 3 and victim.last_round() >= 0:
                self.print(f"round {done}: {victim.name} is killed (SIGKILL)")
                victim.signal(signal.SIGKILL)
                victim.wait(5.0)
                self.killed, restart_at = True, time.monotonic() + 3.0
            if victim and restart_at is not None and time.monotonic() > restart_at:
                self.print(f"round {done}: {victim.name} comes back with --resume")
                victim.start("--resume", "--peers", self.address)
                restart_at = None
            if not self.joined and come >= 1 / 2:
                self.joined = True
                newcomer = self._new("--peers", self.address)
                self.print(f"round {done}: {newcomer.name} joins")
            if leaver and not self.left and come >= 2 / 3 and leaver.last_round() >= 0:
                self.print(f"round {done}: {leaver.name} leaves (Ctrl-C)")
                leaver.signal(signal.SIGINT)
                self.left = True
            self._check_alive(leaver)
            if (taken := time.monotonic() - began) > limit:
                raise operator_error(
                    "E405",
                    "the demo makes no progress",
                    why=f"round {done} of {self.rounds} after {taken:.0f} s",
                    fix=f"look into {self.root}",
                )
            time.sleep(POLL_S)

    def _time_gone(self) -> float:
        """The share of the time that is over."""
        return (time.monotonic() - self.began) / max(self.seconds, self.takes_s)

    def _all_seen(self, victim: IslandProcess | None, leaver: IslandProcess | None) -> bool:
        """Whether all that is to happen has, and who came then has taken part."""
        back = victim is None or (self.killed and self._takes_part(victim))
        left = leaver is None or self.left
        return back and left and self.joined and self._takes_part(self.islands[-1])

    def _takes_part(self, island: IslandProcess) -> bool:
        """Whether it has applied a round since its last start."""
        kinds = [event.get("kind") for event in island.events()]
        started = [place for place, kind in enumerate(kinds) if kind == "started"]
        return len(started) == island.starts and "round" in kinds[started[-1] :]

    def _check_alive(self, leaver: IslandProcess | None) -> None:
        for island in self.islands:
            expected = island.running or (island is leaver and self.left)
            killed = island.process is not None and island.process.returncode == -signal.SIGKILL
            if not expected and not killed:
                if island.process is not None and island.process.returncode == 0:
                    continue  # it has come to the end of the run
                raise operator_error(
                    "E405",
                    f"{island.name} died",
                    why=island.tail(),
                    fix=f"look into {island.dir}",
                )

    def _finish(self) -> None:
        """All who live end by themselves after the last round, else as they are told to."""
        first = self.islands[0]
        if self.cut:
            for island in self.islands:
                if not (island is self.leaver() and self.left):  # a second one would end it at once
                    island.signal(signal.SIGINT)
        self._show(first, first.last_round() + 1)
        end = time.monotonic() + END_TIMEOUT_S
        for island in self.islands:
            if not island.wait(max(0.1, end - time.monotonic())):
                self.print(f"{island.name} does not end by itself")

    def _show(self, first: IslandProcess, done: int) -> None:
        rounds = first.events("round")
        losses = [r["validation_loss"] for r in rounds if r.get("validation_loss")]
        loss = f"validation loss {losses[-1]:.3f}" if losses else ""
        self.progress.update(self.bar, completed=done, description="training", loss=loss)

    def _until(self, condition: Any, timeout: float, what: str) -> None:
        end = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > end or not all(island.running for island in self.islands):
                tail = self.islands[-1].tail()
                raise operator_error("E405", f"{what}: it did not", why=tail, fix=str(self.root))
            time.sleep(POLL_S)

    def leaver(self) -> IslandProcess | None:
        """The island that is to leave before the end."""
        return self.islands[2] if self.count > 2 else None


def step_seconds() -> float:
    """How long an inner step of the tiny model takes on one core of this machine."""
    import torch

    from bootstrap.manifest import Manifest
    from node.trainer.cross_entropy import mean_loss
    from node.trainer.model import build
    from node.trainer.optim import make_optimizer

    manifest = Manifest()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = build(manifest.model, 0)
    optimizer = make_optimizer(model, manifest.inner)
    tokens = torch.randint(0, 256, (manifest.data.batch_size, manifest.data.seq_len + 1))
    times = []
    for _ in range(CALIBRATION_STEPS):
        began = time.perf_counter()
        torch.autograd.backward(mean_loss(model(tokens[:, :-1]), tokens[:, 1:]))
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
    torch.set_num_threads(threads)
    return median(times)


def main(*, seconds: float, islands: int, seed: int, as_json: bool) -> None:
    """Run the demonstration and print what came of it; raises typer.Exit 1 if not all went well."""
    import typer

    from bootstrap.manifest import Manifest
    from node.trainer.corpus import collect

    began = time.monotonic()
    collect(Manifest().data)  # once for all islands; a few seconds the first time
    with _directory() as root:
        summary = Demo(seconds, islands, seed, root, began, quiet=as_json).run()
        typer.echo(json.dumps(asdict(summary), indent=2) if as_json else as_text(summary))
        if not went_well(summary):
            typer.echo(f"what the islands did and said is kept in {root}", err=True)
            raise typer.Exit(1)


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    """A directory for the islands; kept when the demonstration fails, since it explains why."""
    import shutil

    root = Path(tempfile.mkdtemp(prefix="atoll-demo-"))
    try:
        yield root
    except KeyboardInterrupt:  # which explains itself
        shutil.rmtree(root, ignore_errors=True)
        raise
    shutil.rmtree(root, ignore_errors=True)
