"""An hour of trouble: islands of one run are killed, frozen, interrupted, replaced and pestered.

    python -m benchmarks.soak --minutes 60 --json benchmarks/results/soak.json
    python -m benchmarks.soak --minutes 5 --json -              # a look
    python -m benchmarks.plot_soak benchmarks/results/soak.json docs/images/soak.png

``node start`` processes on this machine train the tiny preset in short rounds. The first island is
left alone, and watched: its memory, files, threads and disk. One of the others after the other
gets into trouble, of a kind that is drawn by lot (seeded), and has to merge again before the next
one's turn. What ends though nobody had ended it is started again, as by a service manager, which
is a trouble of its own kind. What there is of the result is written where something breaks it off,
too; its keys are explained in :mod:`benchmarks.soak_result`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from benchmarks.output import write
from benchmarks.processes import ranks, weight
from benchmarks.soak_result import result
from node.interrupts import clean_up_at_any_end
from node.status import fetch
from protocols.errors import OperatorError

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "kits"))
from swarm_kit import Island, Islands, islands, settings

RUN = {"inner_steps": 20, "eval_every": 10, "total_rounds": 1_000_000}
KINDS = frozenset({"started", "round", "problem", "stopped"})  # events that are kept
SAMPLE_S, POLL_S = 10.0, 0.25
DOWN_S = 3.0  # that a killed island stays away
FROZEN_S = 12.0
QUIET_S = (3.0, 10.0)  # between two troubles
BACK_S = 120.0
PESTERS = 20  # connections of one who says nothing, or nonsense


class Watched(Island):
    """An island whose log is read to its end, however often it is rotated meanwhile."""

    def __init__(self, name: str, root: Path, threads: int = 1) -> None:
        super().__init__(name, root, threads)
        self._file: BinaryIO | None = None
        self._rest = b""

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        while self._more():
            pass
        return [event for event in self._seen if not kind or event["kind"] == kind]

    def _more(self) -> bool:
        """Read what there is of one file; True where another has taken its place."""
        path = self.dir / "events.jsonl"
        if self._file is None:
            if not path.exists():
                return False
            self._file = path.open("rb")
        with contextlib.suppress(FileNotFoundError):  # between two renames
            rotated = path.stat().st_ino != os.fstat(self._file.fileno()).st_ino
            self._rest += self._file.read()
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):  # cut short by a kill
                    if (event := json.loads(line))["kind"] in KINDS:
                        self._seen.append(event)
            if rotated:
                self._file.close()
                self._file, self._rest = None, b""
            return rotated
        return False


@dataclass(frozen=True)
class Trouble:
    """What happens to an island, or to two; the round ``under_way`` may merge work from before."""

    kind: str
    began: float  # seconds from the start
    under_way: int


@dataclass
class Soak:
    """The course of events."""

    swarm: Islands
    minutes: float
    islands: int
    lots: random.Random
    first: Island = field(init=False)
    broke_off: str = ""
    samples: list[dict[str, Any]] = field(default_factory=list)
    course: list[dict[str, Any]] = field(default_factory=list)
    not_back: list[str] = field(default_factory=list)
    uncalled: list[dict[str, Any]] = field(default_factory=list)
    ends: set[tuple[str, int]] = field(default_factory=set)  # lives whose end was called for
    # started again where nobody had called for an end, and when
    again: list[tuple[Trouble, Island, float]] = field(default_factory=list)

    def run(self) -> None:
        """Play it."""
        self.began = time.monotonic()
        try:
            self.first = self._new(*settings(**RUN))
            address = self.first.await_up()
            for _ in range(self.islands - 1):
                self._new("--peers", address)
            self.swarm.await_office(self.first, self.islands)
            self._trouble()
        except BaseException as error:  # Ctrl-C as well: what there is tells why it is no more
            self.broke_off = repr(error)
            raise

    def _new(self, *arguments: str) -> Island:
        island = Watched(f"island-{len(self.swarm.all) + 1}", self.swarm.root)
        self.swarm.all.append(island)
        island.start(*arguments)
        return island

    def _trouble(self) -> None:
        kinds = {
            "killed": self._killed,
            "two killed": self._two_killed,
            "trainer killed": self._trainer_killed,
            "frozen": self._frozen,
            "trainer frozen": self._trainer_frozen,
            "interrupted": self._interrupted,
            "replaced": self._replaced,
            "pestered": self._pestered,
        }
        end = self.began + 60 * self.minutes
        lot: list[str] = []
        while time.monotonic() < end:
            if self.again:
                self._await_back(*self.again.pop())
                continue
            lot = lot or self.lots.sample(sorted(kinds), len(kinds))
            trouble = self._begin(lot.pop())
            for island, since in kinds[trouble.kind]():
                self._await_back(trouble, island, since)
            self._pass(self.lots.uniform(*QUIET_S))

    # --- troubles: each gives who has to come back, and since when -------------------------------

    def _killed(self) -> list[tuple[Island, float]]:
        victim = self._victim()
        self._kill(victim)
        self._pass(DOWN_S)
        return [self._come_back(victim)]

    def _two_killed(self) -> list[tuple[Island, float]]:
        pair = self.lots.sample(self._others(), 2)
        for island in pair:
            self._kill(island)
        self._pass(DOWN_S)
        return [self._come_back(island) for island in pair]

    def _trainer_killed(self) -> list[tuple[Island, float]]:
        victim = self._victim()
        os.kill(_ranks(victim)[0], signal.SIGKILL)
        return [(victim, time.time())]

    def _frozen(self) -> list[tuple[Island, float]]:
        victim = self._victim()
        victim.signal(signal.SIGSTOP)
        self._pass(FROZEN_S)
        victim.signal(signal.SIGCONT)
        return [(victim, time.time())]

    def _trainer_frozen(self) -> list[tuple[Island, float]]:
        victim = self._victim()
        rank = _ranks(victim)[0]
        os.kill(rank, signal.SIGSTOP)
        self._pass(FROZEN_S)
        os.kill(rank, signal.SIGCONT)
        return [(victim, time.time())]

    def _interrupted(self) -> list[tuple[Island, float]]:
        victim = self._victim()
        self._stop(victim)
        return [self._come_back(victim)]

    def _replaced(self) -> list[tuple[Island, float]]:
        victim = self._victim()
        self._stop(victim)
        new = self._new("--peers", self.swarm.addresses(without=victim))
        return [(new, time.time())]

    def _pestered(self) -> list[tuple[Island, float]]:
        victim = self._victim()
        host, _, port = victim.await_up().partition("/")[0].rpartition(":")
        with contextlib.ExitStack() as stack:
            for number in range(PESTERS):
                pest = stack.enter_context(socket.create_connection((host, int(port)), 5.0))
                if number % 2:
                    with contextlib.suppress(OSError):  # it has hung up
                        pest.sendall(self.lots.randbytes(4096))
            self._pass(2.0)
        return [(victim, time.time())]

    # --- what they have in common ----------------------------------------------------------------

    def _others(self) -> list[Island]:
        return [i for i in self.swarm.all if i is not self.first and _ranks(i)]

    def _victim(self) -> Island:
        return self.lots.choice(self._others())

    def _kill(self, island: Island) -> None:
        self.ends.add(_life(island))
        island.kill()

    def _come_back(self, island: Island) -> tuple[Island, float]:
        self.swarm.come_back(island)
        return island, time.time()

    def _stop(self, island: Island) -> None:
        island.signal(signal.SIGINT)
        if not island.wait(60.0) or island.failed:
            self._uncalled(island)
        self._kill(island)

    def _begin(self, kind: str) -> Trouble:
        self._say(kind)
        return Trouble(kind, self._gone, self.first.last_round() + 1)

    def _await_back(self, trouble: Trouble, island: Island, since: float) -> None:
        """Until the first island has merged work of this one again."""
        end = time.monotonic() + BACK_S
        while (merged := self._merged(trouble, island, since)) is None and time.monotonic() < end:
            self._pass(POLL_S)
        self.course.append(
            {"began": trouble.began, "ended": self._gone, "kind": trouble.kind}
            | {"island": island.name, "back_s": merged}
        )
        if merged is None:
            self.not_back.append(f"{trouble.kind}: {island.name}")
            self._kill(island)
            self._come_back(island)

    def _merged(self, trouble: Trouble, island: Island, since: float) -> float | None:
        """Seconds to the first round with work of it again; None: there was none yet."""
        peer = _peer(island)
        for event in self.first.events("round"):
            later = event["time"] > since and event["round"] > trouble.under_way
            if later and event["islands"].get(peer, {}).get("tokens"):
                return round(float(event["time"] - since), 2)
        return None

    @property
    def _gone(self) -> float:
        """Seconds since the start."""
        return round(time.monotonic() - self.began, 1)

    def _pass(self, seconds: float) -> None:
        """Wait, and look at everybody meanwhile."""
        end = time.monotonic() + seconds
        while True:
            self._look()
            if (left := end - time.monotonic()) <= 0:
                return
            time.sleep(min(POLL_S, left))

    def _look(self) -> None:
        for island in self.swarm.all:
            island.events()  # before its log is rotated twice
            if not island.running and _life(island) not in self.ends:
                self._uncalled(island)
                trouble = self._begin("ended uncalled")
                self.again.append((trouble, *self._come_back(island)))
        gone = self._gone
        if not self.samples or gone - self.samples[-1]["s"] >= SAMPLE_S:
            self.samples.append(self._sample(gone))

    def _uncalled(self, island: Island) -> None:
        status = island.process.returncode if island.process else None
        self.uncalled.append({"name": island.name, "status": status, "tail": island.tail()})

    def _sample(self, gone: float) -> dict[str, Any]:
        with contextlib.suppress(OperatorError):  # not up yet
            fetch(self.first.dir)  # as somebody who watches would
        daemon = self.first.process.pid if self.first.process else 0
        rank = next(iter(_ranks(self.first)), 0)
        return {
            "s": gone,
            "rounds": self.first.last_round() + 1,
            "running": sum(i.running for i in self.swarm.all),
            "daemon": weight(daemon),
            "trainer": weight(rank),
            "disk_mib": round(_disk(self.first.dir), 2),
        }

    def _say(self, kind: str) -> None:
        minutes = self._gone / 60
        left = self.minutes - minutes
        line = f"{minutes:5.1f} min, {left:.0f} to go, round {self.first.last_round()}: {kind}"
        print(line, file=sys.stderr, flush=True)


def _life(island: Island) -> tuple[str, int]:
    return island.name, island.starts


def _peer(island: Island) -> str:
    started = island.events("started")
    return str(started[-1]["peer"]) if started else ""


def _ranks(island: Island) -> list[int]:
    """The processes of its trainer."""
    if island.process is None or not island.running:
        return []
    return ranks(island.process.pid)


def _disk(directory: Path) -> float:
    """MiB of all files in a directory."""
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a draft, say
            total += path.lstat().st_size
    return total / 2**20


def main() -> None:
    """Play it and write what was found."""
    clean_up_at_any_end()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", required=True, help="where the results go; -: standard output")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--islands", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0, help="of the order of troubles")
    parser.add_argument("--dir", type=Path, help="where the islands' directories stay")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="atoll-soak-") as folder,
        islands(given.dir or Path(folder)) as swarm,
    ):
        soak = Soak(swarm, given.minutes, given.islands, random.Random(given.seed))
        try:
            soak.run()
        finally:
            if soak.course:
                write(result(soak), given.json)


if __name__ == "__main__":
    main()
