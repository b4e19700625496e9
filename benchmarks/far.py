"""Averaging one vector over ways that have a distance, lose packets, or are narrow on one side.

    python -m benchmarks.far --json FILE          ten minutes on two cores

Four members, 10 M fp32 elements: Atoll in int4 with mutual TLS, and gloo with as many bytes in the
clear. They take turns, and medians count. :data:`WAYS` says what each way is, and
:mod:`benchmarks.farnet` makes it. ``--only WAY`` measures single ones; what the file has
of others stays until they are measured. hivemind's averager is not among them: over the first of
these it had not ended a turn after two minutes.

Connections are on cubic, as Linux comes. gloo stays on it; Atoll may take BBR where packets are
lost (:func:`protocols.lanes.socket.prefer_bbr`), which needs root, as here, or
``tcp_allowed_congestion_control``. So on the lossy ways the two differ in that as well.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.allreduce import COUNT, Entry, Scale, atoll, gloo_as, turns
from benchmarks.farnet import Way, available, everywhere
from benchmarks.keys import seconds
from benchmarks.output import kept, machine, write
from node.interrupts import clean_up_at_any_end
from protocols.codecs import RangeCodec

SIZE = 10_000_000  # elements
WITHIN = 400.0  # seconds for one turn: gloo crawls where packets are lost
WAYS: dict[str, tuple[str, Way]] = {
    "continent": ("round trip 80 ms", Way(50, 50, delay=20)),
    "lossy": ("round trip 80 ms, 0.05 % lost", Way(50, 50, delay=20, loss=0.00025)),
    "ocean": ("round trip 150 ms, 0.1 % lost", Way(50, 50, delay=37.5, loss=0.0005)),
    "antipodes": ("round trip 200 ms", Way(50, 50, delay=50)),
    "home": ("10 up, 50 down, round trip 40 ms", Way(10, 50, delay=10)),
}


def least(way: Way, codec: str = "int4") -> float:
    """Seconds that a butterfly's bytes take on the narrower side of a way, without headers."""
    encoded = RangeCodec(codec, SIZE).encoded_size(0, SIZE)
    return 2 * (COUNT - 1) / COUNT * encoded * 8 / (min(way.up, way.down) * 1e6)


def measure(way: Way, count: int) -> dict[str, Any]:
    """``count`` turns of each system over this way."""
    scale = Scale(SIZE, count)
    entries: list[Entry] = [atoll("int4", tls=True), gloo_as("int4", scale)]
    runs = turns(entries, COUNT, scale, lambda names: everywhere(names, way), WITHIN)
    return {"machine": machine(), "runs": runs}


def shown(found: dict[str, Any]) -> str:
    """A table for people, in Markdown."""
    lines = ["| each link, 50 Mbit/s unless said | Atoll | gloo | link used |"]
    lines.append("|---|---|---|---|")
    for name, (text, way) in WAYS.items():
        if name not in found:
            continue
        pieces = {name: found[name]}
        ours, gloo = (seconds(pieces, name, system) for system in ("atoll int4 tls", "gloo"))
        lines.append(f"| {text} | {ours:.1f} s | {gloo:.1f} s | {least(way) / ours:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure what is asked for and write what is known then."""
    clean_up_at_any_end()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the results go")
    parser.add_argument("--only", nargs="+", choices=WAYS, help="ways to measure", metavar="WAY")
    parser.add_argument("--turns", type=int, default=5, help="turns that count (default: 5)")
    given = parser.parse_args()
    if not available():
        sys.exit("links with a distance need Linux, root, the commands ip, tc and cc, and a tap")
    found = kept(given.json)
    for name in given.only or WAYS:
        text, way = WAYS[name]
        print(f"{name}: {text}", flush=True)
        found[name] = measure(way, given.turns)
        write(found, given.json)
    print(shown(found))


if __name__ == "__main__":
    main()
