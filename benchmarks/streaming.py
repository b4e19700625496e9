"""Do fragments keep trainers busy on a slow link? ``python -m benchmarks.streaming --json FILE``.

Two islands (``node start``, two processes each) train the same small model over an upload limit at
which a whole merge takes about a quarter of a round, so a third as long as its inner steps. Three
ways of merging run one after the other: the whole model with the trainer waiting for it, the whole
model while a quarter of the inner steps goes on, and in fragments that take turns. What is counted
is from the first round with both on: the share of the time that the first island's trainer spent in
inner steps, inner steps a second, and bytes sent. ``--rate`` sets the limit.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.output import write
from node.demo.run import IslandProcess
from node.interrupts import clean_up_at_any_end

INNER = 24
WAYS: dict[str, dict[str, object]] = {
    "whole": {},
    "whole, overlapped": {"rounds.overlap_steps": INNER // 4},
    "4 fragments": {"rounds.fragments": 4},
}
RUN: dict[str, object] = {
    "model.n_layers": 4,
    "data.batch_size": 4,
    "rounds.inner_steps": INNER,
    "rounds.total_rounds": 1000,
    "rounds.min_grace_s": 2.0,
    "rounds.eval_every": 0,
}
START_S = 90.0


def measure(way: dict[str, object], rate: str, seconds: float, root: Path) -> dict[str, Any]:
    """Run two islands for ``seconds`` after both have merged together; what the first one did."""
    words = [w for key, value in {**RUN, **way}.items() for w in ("--set", f"{key}={value}")]
    limit = ("--max-upload", rate, "--checkpoint-every", "0")
    first, second = (IslandProcess(name, root, 1) for name in ("first", "second"))
    try:
        first.start(*words, *limit)
        address = _until(lambda: first.events("started"))[0]["join_address"]
        second.start("--peers", address, *limit)
        together = _until(lambda: [e for e in first.events("round") if e["members"] == 2])
        begin = together[-1]["time"]
        time.sleep(max(0.0, begin + seconds - time.time()))
        events = [e for e in first.events() if begin < e["time"] <= begin + seconds]
    finally:
        for island in (first, second):
            if island.process is not None and island.process.poll() is None:
                os.killpg(island.process.pid, signal.SIGKILL)
                island.process.wait()
    steps = [e for e in events if e["kind"] == "step"]
    rounds = [e for e in events if e["kind"] == "round"]
    return {
        "utilisation": round(sum(e["seconds"] for e in steps) / seconds, 3),
        "steps_per_second": round(len(steps) / seconds, 2),
        "step_s": round(sum(e["seconds"] for e in steps) / max(1, len(steps)), 4),
        "merges": len(rounds),
        "merged_by_both": sum(e["members"] == 2 for e in rounds),
        "sent_bytes_per_step": round(sum(e["sent_bytes"] for e in rounds) / max(1, len(steps))),
    }


def _until(found: Any) -> Any:
    """The first true value; raises TimeoutError."""
    end = time.monotonic() + START_S
    while not (value := found()):
        if time.monotonic() > end:
            raise TimeoutError("the islands do not come together")
        time.sleep(0.1)
    return value


def main() -> None:
    """Measure every way and write the figures."""
    clean_up_at_any_end()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rate", default="1500kbit", help="upload limit of each island")
    parser.add_argument("--seconds", type=float, default=20.0, help="counted, for each way")
    options = parser.parse_args()
    result: dict[str, Any] = {"rate": options.rate, "seconds": options.seconds, "ways": {}}
    for name, way in WAYS.items():
        with tempfile.TemporaryDirectory() as root:
            result["ways"][name] = measure(way, options.rate, options.seconds, Path(root))
        write(result, options.json)


if __name__ == "__main__":
    main()
