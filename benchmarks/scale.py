"""What a round costs each member, by how many there are: messages, bytes, processor time.

Whole members (announcements, rounds, exchanges, certificates) on the simulated network and a
virtual clock, in a grid, one machine doing the work of all. Counted is what crosses the simulated
wire from the first commit to the last, answers among it. ::

    python -m benchmarks.scale --json benchmarks/results/scale.json
    python -m benchmarks.scale --members 16 32 --json -         # a look, in seconds
    python -m benchmarks.scale --members --announcing 16 64 256 --json benchmarks/results/scale.json

The last one measures announcements alone (:mod:`benchmarks.announcing`), in minutes, and leaves the
other figures in the file as they are. Keys of a row of ``announcing``, all by node: bytes that it
sends and receives, and calls that it answers, in a second in which nothing happens; bytes for all
that a round changes, its sketch among it, and which share of the others have heard of it;
``kbit_s`` what both come to, sent, with rounds of a minute; after how many seconds the others take
one for silent that has died, and one whose packets do not arrive any more: the mean, and the last.

Keys of a row of ``rows``, all by member and round: ``news``, ``rounds``, ``pushes`` and their
``_bytes``: calls that say who is there, calls that decide a round, and bodies; ``cpu_s`` processor
seconds of this process, simulation included; ``virtual_s`` how long the round took by the virtual
clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from benchmarks import announcing
from benchmarks.output import write
from gossip.membership.members import Patience
from gossip.plans.grouping import Grouping
from protocols.identity import PeerId
from protocols.memory import virtual_time

# the swarm of whole members with toy parameters is that of the tests
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "kits"))
from simulated_swarm import simulated_swarm

PARTS = 16  # of 16,384 elements each, however many members there are
NEWS = ("announce", "gossip", "known")


async def measure(count: int, rounds: int) -> dict[str, Any]:
    """``rounds`` rounds of ``count`` members, after a first one."""
    calls: Counter[str] = Counter()
    sizes: Counter[str] = Counter()

    def tap(sender: PeerId, receiver: PeerId, name: str, data: bytes) -> bytes:
        kind = "news" if name in NEWS else "rounds" if name == "round" else "pushes"
        calls[kind] += 1
        sizes[kind] += len(data)
        return data

    clock = asyncio.get_running_loop().time
    async with simulated_swarm(
        count, size=PARTS * 16 * 1024, grouping=Grouping("grid", min(16, count - 1)),
        think=(4.0, 4.5), patience=Patience(heartbeat_s=4.0),
    ) as swarm:  # fmt: skip

        async def until(number: int) -> None:
            while min(member.replica.place.round for member in swarm.living()) < number:
                if clock() > 60.0 * (number + 1):
                    raise SystemExit("it does not end")
                await asyncio.sleep(0.02)

        await until(1)
        swarm.network.tamper = tap
        began, at = time.process_time(), clock()
        await until(1 + rounds)
        cpu, virtual = time.process_time() - began, clock() - at
        swarm.agree()
        certificates = swarm.living()[0].replica.certificates
        counted = [len(one.outcome.contributors) for one in certificates]
        size = len(certificates[-1].encode())
    row: dict[str, Any] = {"members": count, "contributors": counted, "certificate_bytes": size}
    for kind in ("news", "rounds", "pushes"):
        row[kind] = round(calls[kind] / count / rounds, 1)
        row[f"{kind}_bytes"] = round(sizes[kind] / count / rounds)
    row["cpu_s"] = round(cpu / count / rounds, 4)
    row["virtual_s"] = round(virtual / rounds, 2)
    return row


def main() -> None:
    """Parse arguments, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--members", type=int, nargs="*", default=[8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--announcing", type=int, nargs="+", default=[], help="numbers of nodes")
    parser.add_argument("--json", required=True, help="- for the terminal")
    options = parser.parse_args()
    path = Path(options.json)
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if options.members:
        result["rounds"] = options.rounds
        result["rows"] = _rows(options.members, lambda count: measure(count, options.rounds))
    if options.announcing:
        result["announcing"] = _rows(options.announcing, announcing.measure)
    write(result, options.json)


def _rows(
    counts: Sequence[int], measured: Callable[[int], Coroutine[Any, Any, dict[str, Any]]]
) -> list[dict[str, Any]]:
    rows = []
    for count in counts:
        rows.append(virtual_time.run(measured(count)))
        sys.stderr.write(f"{rows[-1]}\n")
    return rows


if __name__ == "__main__":
    main()
