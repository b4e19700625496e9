"""What a swarm costs an island: ``python -m benchmarks.island --json FILE [--quick]``.

Two islands, 3.4 M parameters each, one thread each. First beside two bare torch loops of the same
model, in turn: tokens a second, the time in which an island had nothing to do left out. A second
pair of bare loops has the memory settings that Atoll gives its ranks, so that what is won by
those can be told from what the swarm costs. Then on links of
50 Mbit with H = 10 inner steps a round, beside torchft's DiLoCo, in turn: how much of the time
goes into inner steps. Utilisation is for both

    inner steps x their median seconds / elapsed

where the median is that of the steps that no sync interrupts.

Daemons and trainers share the machine's cores here. What they do not owe to each other is told in
processor time: `trainer_cpu_ratio` is that of a step of the tuned bare loop over that of an
island's trainer with all that it does for the rounds, and `daemon_core_share` what a daemon takes
of one core. With as many islands as cores no trainer can be faster than 1 less that share. So both
are measured once more for an island whose trainer has a core of its own, as where a GPU computes
or a core is free: the other trainer and both daemons share the other core (`…_own_core`). At 50
Mbit both are measured with two bits an element as well, where four do not fit into two steps of
overlap (`…_int2`). Needs Linux, root, `ip`, `tc`, and the `bench` extra.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.netns import Network, require
from benchmarks.output import machine, write
from benchmarks.processes import cpu, ended, pin, ranks
from benchmarks.systems.island_model import MANIFEST
from bootstrap.manifest import Manifest
from bootstrap.validation import to_toml
from node.interrupts import clean_up_at_any_end
from node.island.rank_process import rank_environment
from node.trainer.corpus import collect

Fact = dict[str, Any]
MBIT = 50
START_S = 120.0  # for processes to come up
PORT = 4390
WARM_ROUNDS = 2  # not counted: connections are opened, speeds measured


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    seconds: float
    turns: int


FULL, QUICK = Scale(45, 5), Scale(12, 2)  # the latter in under ten minutes on two cores


class Islands:
    """Two ``node start`` processes that train one model."""

    def __init__(
        self,
        root: Path,
        net: Network | None,
        seconds: float,
        *,
        apart: bool = False,
        codec: str = "int4",
        manifest: Manifest = MANIFEST,
        options: Sequence[str] = ("--threads", "1", "--device", "cpu"),
        start_s: float = START_S,
    ) -> None:
        self.root, self.net, self.seconds, self.options = root, net, seconds, options
        self.start_s = start_s
        self.apart = apart  # the first trainer has a core of its own
        self.processes: list[subprocess.Popen[Any]] = []
        self.run = root / "run.toml"
        rounds = manifest.rounds.model_copy(update={"codec": codec})
        self.run.write_text(to_toml(manifest.model_copy(update={"rounds": rounds})))

    def measure(self) -> list[Fact]:
        """Train with both for ``seconds``; what each did after the first rounds."""
        with ended(self.processes):
            return self._measure()

    def _measure(self) -> list[Fact]:
        first = self._start(0, ["--run", str(self.run)])
        peer = self._join_address(0)
        second = self._start(1, ["--peers", peer])
        self._together()
        trainers = [ranks(process.pid)[0] for process in (first, second)]
        if self.apart:
            pin(trainers[0], 0)
            for pid in (first.pid, second.pid, trainers[1]):
                pin(pid, 1)
            self._wait(lambda: len(self._both()) > 2 * WARM_ROUNDS)
        watched = [first.pid, second.pid, *trainers]
        before, rounds = [cpu(pid) for pid in watched], len(self._both())
        began, since = [len(self._events(rank, "step")) for rank in (0, 1)], time.monotonic()
        time.sleep(self.seconds)
        after, rounds = [cpu(pid) for pid in watched], len(self._both()) - rounds
        steps = [len(self._events(rank, "step")) - began[rank] for rank in (0, 1)]
        watched_s = time.monotonic() - since
        for process in (first, second):
            process.terminate()
        for process in (first, second):
            process.wait(START_S)
        facts = [self._fact(rank) for rank in (0, 1)]
        used = [now - then for then, now in zip(before, after, strict=True)]
        for rank, fact in enumerate(facts):
            fact["daemon_cpu_s_a_round"] = used[rank] / max(1, rounds)
            fact["daemon_core_share"] = used[rank] / watched_s
            fact["cpu_s_a_step"] = used[2 + rank] / max(1, steps[rank])
        return facts

    def _start(self, rank: int, arguments: Sequence[str]) -> subprocess.Popen[Any]:
        where = f"{self.net.address(self.net.names[rank])}:{PORT}" if self.net else "127.0.0.1:0"
        words = ["-m", "node", "start", "--dir", str(self.root / str(rank)), "--listen", where]
        words += ["--api", "127.0.0.1:0", "--checkpoint-every", "0", *self.options, *arguments]
        log = (self.root / f"{rank}.log").open("ab")
        options: Fact = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        options["start_new_session"] = True  # a group, with its trainer
        with log:
            if self.net is not None:
                process = self.net.python(self.net.names[rank], *words, **options)
            else:
                process = subprocess.Popen([sys.executable, *words], **options)
        self.processes.append(process)
        return process

    def _events(self, rank: int, kind: str) -> list[Fact]:
        path = self.root / str(rank) / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = []
        for line in lines:
            if line.endswith("}"):  # the last one may be half written
                event = json.loads(line)
                if event["kind"] == kind:
                    found.append(event)
        return found

    def _join_address(self, rank: int) -> str:
        started = self._wait(lambda: self._events(rank, "started"))
        return str(started[0]["join_address"])

    def _both(self) -> list[Fact]:
        return [e for e in self._events(1, "round") if e["members"] == 2]

    def _together(self) -> None:
        self._wait(lambda: len(self._both()) > WARM_ROUNDS)

    def _wait(self, condition: Any) -> Any:
        end = time.monotonic() + self.start_s
        while not (value := condition()):
            if time.monotonic() > end:
                logs = [path.read_text()[-2000:] for path in sorted(self.root.glob("*.log"))]
                raise TimeoutError("the islands do not train: " + "\n".join(logs))
            time.sleep(0.1)
        return value

    def _fact(self, rank: int) -> Fact:
        """From the end of the warm rounds to the end of the last round of both."""
        since = self._both()[2 * WARM_ROUNDS if self.apart else WARM_ROUNDS]["time"]
        until = self._both()[-1]["time"]
        rounds = [e for e in self._events(rank, "round") if since < e["time"] <= until]
        steps = [e for e in self._events(rank, "step") if since < e["time"] <= until]
        return {
            "steps": [e["seconds"] for e in steps],
            "elapsed": until - since,
            "tokens": sum(e["tokens"] for e in steps),
            "waited": sum(e["wait_s"] for e in rounds),
            "rounds": len(rounds),
            "merged_both": sum(e["members"] == 2 for e in rounds),
            "sync_s": statistics.median(e["sync_s"] for e in rounds),
            "sent_bytes": sum(e["sent_bytes"] for e in rounds),
        }


def bare(text: Path, seconds: float, *, tuned: bool = False, apart: bool = False) -> list[Fact]:
    """Two bare loops at once; ``tuned``: with the environment of a rank, ``apart``: pinned."""
    words = [sys.executable, "-m", "benchmarks.systems.bare", str(seconds), str(text)]
    env = rank_environment(1) if tuned else None
    loops: list[subprocess.Popen[str]] = []
    with ended(loops):
        for core in range(2):
            loops.append(piped(words, env))
            if apart:
                pin(loops[-1].pid, core)
        return results(loops)


def piped(words: list[str], env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """A process that tells :func:`results` what it found."""
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdout=pipe, text=True, env=env, start_new_session=True)


def torchft(text: Path, root: Path, net: Network, seconds: float) -> list[Fact]:
    """Two islands of torchft."""
    processes = []
    for rank, name in enumerate(net.names):
        given = {
            "rank": rank,
            "count": 2,
            "address": net.address(name),
            "meeting": str(root / "lighthouse"),
            "text": str(text),
            "seconds": seconds,
        }
        words = ["-m", "benchmarks.systems.torchft_diloco", json.dumps(given)]
        processes.append(net.python(name, *words, stdout=subprocess.PIPE, text=True))
    return results(processes)


def utilisation(fact: Fact) -> float:
    """Inner steps times their median seconds, over elapsed; see the top of this file."""
    return len(fact["steps"]) * statistics.median(fact["steps"]) / float(fact["elapsed"])


def speed(fact: Fact) -> float:
    """Tokens a second, waiting left out."""
    return float(fact["tokens"] / (fact["elapsed"] - fact.get("waited", 0.0)))


def _cpu_a_step(fact: Fact) -> float:
    return float(fact["cpu_s_a_step"])


def _core_share(fact: Fact) -> float:
    return float(fact["daemon_core_share"])


def figures(runs: dict[str, list[list[Fact]]]) -> Fact:
    """The keys of the result."""

    def median(name: str, of: Any) -> float:
        return statistics.median(of(fact) for turn in runs[name] for fact in turn)

    def first(name: str, of: Any) -> float:
        return statistics.median(of(turn[0]) for turn in runs[name])

    return {
        "island_overhead_ratio": median("island", speed) / median("bare", speed),
        "island_overhead_ratio_tuned": median("island", speed) / median("bare tuned", speed),
        "trainer_cpu_ratio": median("bare tuned", _cpu_a_step) / median("island", _cpu_a_step),
        "daemon_core_share": median("island", _core_share),
        "daemon_core_share_50mbit": median("island 50 Mbit", _core_share),
        "island_overhead_ratio_own_core": first("island apart", speed) / first("bare apart", speed),
        "utilization_50mbit": median("island 50 Mbit", utilisation),
        "utilization_50mbit_int2": median("island 50 Mbit, int2", utilisation),
        "utilization_50mbit_own_core": first("island 50 Mbit apart", utilisation),
        "utilization_50mbit_own_core_int2": first("island 50 Mbit apart, int2", utilisation),
        "torchft_utilization_50mbit": median("torchft 50 Mbit", utilisation),
    }


def main() -> None:
    """Run everything and write what was found."""
    clean_up_at_any_end()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the results go")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter turns")
    parser.add_argument("--turns", type=int, help="so many instead")
    parser.add_argument("--seconds", type=float, help="of each system in a turn, instead")
    given = parser.parse_args()
    require()
    scale = QUICK if given.quick else FULL
    scale = Scale(given.seconds or scale.seconds, given.turns or scale.turns)
    runs: dict[str, list[list[Fact]]] = {
        "bare": [],
        "bare tuned": [],
        "island": [],
        "bare apart": [],
        "island apart": [],
        "torchft 50 Mbit": [],
        "island 50 Mbit": [],
        "island 50 Mbit, int2": [],
        "island 50 Mbit apart": [],
        "island 50 Mbit apart, int2": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        text.write_bytes(collect(MANIFEST.data).path.read_bytes())
        for turn in range(scale.turns):
            root = Path(folder) / str(turn)
            for name in ("loopback", "loopback apart"):
                (root / name).mkdir(parents=True)
            runs["bare"].append(bare(text, scale.seconds))
            runs["bare tuned"].append(bare(text, scale.seconds, tuned=True))
            runs["island"].append(Islands(root / "loopback", None, scale.seconds).measure())
            runs["bare apart"].append(bare(text, scale.seconds, apart=True))
            alone = Islands(root / "loopback apart", None, scale.seconds, apart=True)
            runs["island apart"].append(alone.measure())
            with Network(["one", "two"], mbit=MBIT) as net:
                runs["torchft 50 Mbit"].append(torchft(text, root, net, scale.seconds + 10))
            for codec, kept in (("int4", ""), ("int2", ", int2")):
                for apart in ("", " apart"):
                    with Network(["one", "two"], mbit=MBIT) as net:
                        place = root / (codec + apart)
                        place.mkdir()
                        two = Islands(place, net, scale.seconds, apart=bool(apart), codec=codec)
                        runs[f"island 50 Mbit{apart}{kept}"].append(two.measure())
            result = figures(runs)
            print(json.dumps(result), flush=True)
            plain = {
                "machine": machine(),
                "quick": given.quick,
                "seconds": scale.seconds,
                "runs": rounded(runs),
            }
            write(result | plain, given.json)


def results(processes: list[subprocess.Popen[str]]) -> list[Fact]:
    """What processes have told at their end."""
    found = []
    for process in processes:
        output, _ = process.communicate(timeout=10 * START_S)
        line = re.search(r"^\{.*\}$", output, re.MULTILINE)
        if line is None:
            raise RuntimeError(f"no result from {process.args}: {output[-2000:]}")
        found.append(json.loads(line[0]))
    return found


def rounded(runs: dict[str, list[list[Fact]]]) -> Any:
    """Steps to a tenth of a millisecond: the file is committed."""
    return json.loads(json.dumps(runs), parse_float=lambda text: round(float(text), 4))


if __name__ == "__main__":
    main()
