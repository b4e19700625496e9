"""What a round costs each member, by how many there are: messages, bytes, processor time.

Whole members (announcements, rounds, exchanges, certificates) on the simulated network and a
virtual clock, in a grid, one machine doing the work of all. Counted is what crosses the simulated
wire from the first commit to the last, answers among it. ::

    python -m benchmarks.scale --json benchmarks/results/scale.json
    python -m benchmarks.scale --members 16 32 --json -         # a look, in seconds

Keys of a row, all by member and round: ``news``, ``rounds``, ``pushes`` and their ``_bytes``: calls
that say who is there, calls that decide a round, and bodies; ``cpu_s`` processor seconds of this
process, simulation included; ``virtual_s`` how long the round took by the virtual clock.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.output import write
from gossip.membership.members import Patience
from gossip.plans.grouping import Grouping
from protocols.identity import PeerId
from protocols.memory import virtual_time

# the swarm of whole members with toy parameters is that of the tests
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
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
    parser.add_argument("--members", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", required=True, help="- for the terminal")
    options = parser.parse_args()
    rows = []
    for count in options.members:
        rows.append(virtual_time.run(measure(count, options.rounds)))
        sys.stderr.write(f"{rows[-1]}\n")
    write({"rounds": options.rounds, "rows": rows}, options.json)


if __name__ == "__main__":
    main()
