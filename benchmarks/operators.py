"""What watching and asking cost: the dashboard in a browser, and commands until they answer.

    python -m benchmarks.operators --json benchmarks/results/operators.json

The dashboard is that of an imagined node among 64 islands with 10,000 rounds of history, in a
headless chromium on this machine: seconds until the page is drawn, bytes of its scripts, and what
a reader costs the node's process while a round a second comes in (that the rounds are imagined
there counts, driving the browser does not; by Linux's own accounts). Of a command, CPU seconds of
its process, all of it. Medians (of paints the first one, and the median of those after it), and
all samples beside them; a busy machine shows in wall times, and a slow one in
``reference_cpu_s``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.output import write
from node.interrupts import clean_up_at_any_end

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "kits"))  # the kits of the browser tests

COMMANDS = {
    "--help": ["--help"],
    "status": ["status"],
    "doctor --no-network": ["doctor", "--no-network"],
    "runs": ["runs"],
    "config show": ["config", "show"],
}
SIZES = "performance.getEntriesByType('resource').map(r => [r.name, r.decodedBodySize])"
LIMITS = {"first_paint_s": 1.0, "update_core": 0.01, "scripts_bytes": 150_000, "command_cpu_s": 0.5}


def command_cpu(words: list[str], home: str) -> float:
    """CPU seconds of one command; it may end with an error where nothing runs."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ATOLL_")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "node", *words],
        cwd=ROOT, env=kept | {"HOME": home}, capture_output=True, check=False, timeout=60,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def reference_cpu() -> float:
    """CPU seconds of ten million additions in Python: how fast this machine is now."""
    began, total = time.process_time(), 0
    for number in range(10_000_000):
        total += number
    return time.process_time() - began


def commands(repeats: int) -> dict[str, Any]:
    """CPU seconds of each command, after one run that compiles and warms the disk's cache."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as home:
        for name, words in COMMANDS.items():
            command_cpu(words, home)
            samples = [round(command_cpu(words, home), 3) for _ in range(repeats)]
            found[name] = {"cpu_s": median(samples), "samples": samples}
    return found


async def serve(islands: int, rounds: int) -> None:
    """The node with its imagined swarm, a process of its own: says its URL, ends with its input."""
    from dashboard_kit import Imagined

    from node.monitor.api import ApiServer, make_app

    swarm = Imagined(islands, rounds)
    server = ApiServer(make_app(swarm.state, swarm.log, swarm.history), "127.0.0.1:0")
    sys.stdout.write(f"http://{await server.start()}/\n")
    sys.stdout.flush()
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    try:
        while not ended.done():
            swarm.step()
            await asyncio.wait([ended], timeout=1.0)
    finally:
        await server.aclose()


def cpu_of(process: int) -> float:
    """Processor seconds of all threads of a process so far (Linux)."""
    tasks = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


async def dashboard(islands: int, rounds: int, repeats: int, seconds: float) -> dict[str, Any]:
    """First paint, size, and what a reader costs the node."""
    from browser_kit import CHROMIUM, browser

    if not CHROMIUM:
        return {"error": "no chromium on this machine"}
    words = ["-m", "benchmarks.operators", "--serve", str(islands), str(rounds)]
    filled = "document.documentElement.dataset.filled"
    node = await asyncio.create_subprocess_exec(
        sys.executable, *words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert node.stdin is not None
    assert node.stdout is not None
    paints: list[float] = []
    costs: list[float] = []
    sizes: list[Any] = []
    try:
        url = (await node.stdout.readline()).decode().strip()
        with tempfile.TemporaryDirectory() as profile:
            async with browser(Path(profile) / "profile") as page:
                await page.shape(1440, 900)
                for _ in range(repeats):
                    await page.go(url)
                    paints.append(int(await page.until(filled)) / 1000)
                    # of the first load: later ones take scripts from memory, counted as 0 bytes
                    sizes = sizes or await page.evaluate(SIZES)
                for _ in range(repeats):
                    began, busy = time.monotonic(), cpu_of(node.pid)
                    await asyncio.sleep(seconds)
                    costs.append((cpu_of(node.pid) - busy) / (time.monotonic() - began))
    finally:
        node.stdin.close()
        await node.wait()
    return {
        "islands": islands,
        "rounds": rounds,
        "first_paint_s": paints[0],  # nothing was in the browser's memory yet
        "later_paint_s": median(paints[1:] or paints),
        "paint_samples": paints,
        "update_core": round(median(costs), 5),
        "update_core_samples": [round(cost, 5) for cost in costs],
        "scripts_bytes": sum(size for name, size in sizes if name.endswith(".js")),
        "data_bytes": sum(size for name, size in sizes if "/api/" in name),
    }


def main() -> int:
    """Measure, print, write; exit status 1 where a limit is not kept."""
    clean_up_at_any_end()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each sample of updates")
    parser.add_argument("--no-browser", action="store_true")
    parser.add_argument("--serve", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        asyncio.run(serve(*given.serve))
        return 0
    result: dict[str, Any] = {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "reference_cpu_s": round(reference_cpu(), 3),
        "limits": LIMITS,
        "commands": commands(given.repeats),
    }
    slow = [n for n, f in result["commands"].items() if f["cpu_s"] > LIMITS["command_cpu_s"]]
    if not given.no_browser:
        page = asyncio.run(dashboard(64, 10_000, given.repeats, given.seconds))
        result["dashboard"] = page
        slow += [n for n in LIMITS if n in page and page[n] > LIMITS[n]]
    result["over_limit"] = slow
    if given.json:
        write(result, given.json)
    write(result, "-")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
