"""Averaging one vector, Atoll beside what people use instead: one command, a JSON file, a picture.

    python -m benchmarks.allreduce --json FILE            an hour on two cores
    python -m benchmarks.allreduce --json FILE --quick    keys of up to 4 members, in ten minutes

Systems that are compared run in one piece, all at once and taking turns, so that whatever else the
machine does hits them alike; medians count. ``--only PIECE`` runs single pieces, most of them
within three minutes; ``dark`` takes eight, nearly all of them torchft's. The others stay as the
file has them, or are taken from ``--merge FILE``. A piece in which a system fails is given up, and
the status is 1 in the end. What the keys mean stands in :data:`benchmarks.keys.KEYS`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.fleet import TURN_S, Fact, Fleet, Turn, WorkerFailed
from benchmarks.keys import KEYS, figures, shown
from benchmarks.netns import Network, require
from benchmarks.output import apart, kept, machine, write
from benchmarks.worker import SIZE
from node.interrupts import clean_up_at_any_end
from protocols.codecs import RangeCodec

COUNT = 4  # processes, where a piece does not say otherwise
UPLOAD = 0.945  # share of a link given as upload limit; headers take the rest
DARK_SIZE = 5_000_000
MATCHMAKING_SIZE = 100_000
LONG_TURNS = 5  # at most, where one of all systems takes forty seconds
USUAL = 3  # turns before a link goes dark; the first opens connections, the fastest counts


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    size: int  # elements
    turns: int
    long_size: int = 0  # elements where all are in fp32 over 100 Mbit/s
    matchmakings: int = 0
    dark: int = 0  # links that go dark, one after the other
    dark_torchft: int = 0  # of torchft, which takes a minute each time

    def size_of(self, piece: str) -> int:
        """Elements in a piece."""
        own = {
            "matchmaking": MATCHMAKING_SIZE,
            "dark": DARK_SIZE,
            "link100-fp32": self.long_size,
        }
        return own.get(piece, self.size)


FULL = Scale(SIZE, 9, SIZE, 150, 5, 5)
QUICK = Scale(SIZE * 2 // 5, 5, SIZE // 5, 40, 3, 1)

Entry = tuple[str, str, Fact]  # name in the results, system, options
Runs = dict[str, list[Fact]]
Links = Callable[[list[str]], Network]  # by the members' names


class Unequal(Exception):
    """Members have not come to the same."""


def atoll(codec: str, *, tls: bool, tcp: bool = False) -> Entry:
    """Ours; ``tcp``: on loopback as the others, else by Unix sockets."""
    name = f"atoll {codec}{' tls' if tls else ''}{' tcp' if tcp else ''}"
    return name, "atoll", {"codec": codec, "tls": tls, "tcp": tcp}


def in_the_clear(codec: str) -> list[Entry]:
    """Ours without TLS, by Unix sockets and by TCP."""
    return [atoll(codec, tls=False), atoll(codec, tls=False, tcp=True)]


def limited(codec: str, mbit: float) -> Entry:
    """Ours, told by its operator what the link carries besides headers."""
    options = {"codec": codec, "tls": True, "max_upload": UPLOAD * mbit * 1e6 / 8}
    return f"atoll {codec} tls limited", "atoll", options


def hivemind(codec: str) -> Entry:
    """hivemind's averager; its daemon always encrypts."""
    return f"hivemind {codec}", "hivemind", {"codec": codec}


def gloo_as(codec: str, scale: Scale) -> Entry:
    """gloo with as many bytes as our codec makes of the vector: how much of a link it uses."""
    encoded = RangeCodec(codec, scale.size).encoded_size(0, scale.size)
    return "gloo", "gloo", {"size": encoded // 4}


GLOO: Entry = ("gloo", "gloo", {})
TORCHFT: Entry = ("torchft", "torchft", {})


def shaped(mbit: float) -> Links:
    """Links of one speed, without a distance."""
    return lambda names: Network(names, mbit=mbit)


def turns(
    entries: list[Entry],
    count: int,
    scale: Scale,
    links: Links | None = None,
    within: float = TURN_S,
) -> Runs:
    """Let the systems average in turn, each on links of its own, or all on loopback.

    The first turn opens connections and is not counted.
    """
    runs: Runs = {name: [] for name, _, _ in entries}
    with ExitStack() as stack:
        fleets = []
        for name, system, options in entries:
            net = None
            if links is not None:
                net = stack.enter_context(links([f"{system}{i}" for i in range(count)]))
            options = {"size": scale.size} | options
            fleets.append((name, stack.enter_context(Fleet(system, count, options, net))))
        for _, fleet in fleets:
            fleet.meet()
        for turn in range(scale.turns + 1):
            for name, fleet in fleets:
                for _, other in fleets:
                    other.settle()  # its preparations would slow this one down
                taken = _fact(fleet.turn(within=within))
                without = "" if taken["whole"] else ", not all of it merged"
                print(f"  {name}: {taken['seconds']:.3f} s{without}", flush=True)
                if turn:
                    runs[name].append(taken)
    return runs


def long_turns(scale: Scale) -> Runs:
    """All in fp32 over 100 Mbit/s."""
    entries = [atoll("fp32", tls=True), GLOO, hivemind("fp32")]
    scale = replace(scale, size=scale.long_size, turns=min(scale.turns, LONG_TURNS))
    return turns(entries, COUNT, scale, shaped(100))


def matchmaking(scale: Scale) -> Runs:
    """Many small rounds: how long until the first byte leaves."""
    runs: Runs = {}
    for name, system, options in (atoll("int4", tls=True), hivemind("fp16")):
        count = scale.matchmakings if system == "atoll" else scale.turns
        with Fleet(system, COUNT, {"size": MATCHMAKING_SIZE} | options) as fleet:
            fleet.meet()
            fleet.turn()
            runs[name] = [_fact(fleet.turn()) for _ in range(count)]
    return runs


def dark(scale: Scale) -> Runs:
    """A link goes dark while slices are on their way, by turns with each system anew."""
    events = {"atoll fp32 tls": scale.dark, "torchft": scale.dark_torchft}
    # torchft would not go on with fewer than it is told are the least
    entries = (atoll("fp32", tls=True), ("torchft", "torchft", {"least": COUNT - 1}))
    runs: Runs = {name: [] for name, _, _ in entries}
    for event in range(max(events.values())):
        for name, system, options in entries:
            if event < events[name]:
                runs[name].append(_dark(name, system, options))
    return runs


def _dark(name: str, system: str, options: Fact) -> Fact:
    with (
        Network([f"{system}{i}" for i in range(COUNT)], mbit=100) as net,
        Fleet(system, COUNT, {"size": DARK_SIZE} | options, net) as fleet,
    ):
        fleet.meet()
        usual = min(_fact(fleet.turn())["seconds"] for _ in range(USUAL))
        fleet.settle()
        for worker in fleet.workers:
            worker.go()
        *others, victim = fleet.workers
        while victim.hear("stage", within=60)["stage"] != "sending":
            continue
        time.sleep(0.4 * usual)  # a good way into it
        net.darken(net.names[-1])
        held = Turn([worker.hear("took", within=100) for worker in others])
        fact = _fact(held) | {"usual": usual, "stall": held.seconds - usual}
        print(f"  {name}: held up for {fact['stall']:.2f} s", flush=True)
        return fact


def _fact(turn: Turn) -> Fact:
    """One turn as it stands in the results: what is compared, and what each worker said."""
    if len({fact.get("digest") for fact in turn.facts}) != 1:
        raise Unequal(f"not all have the same: {turn.facts}")
    keep = ("asked", "start", "first_byte", "end", "sent", "received", "peak", "cpu", "failed")
    return {
        "seconds": turn.seconds,
        "matchmaking": turn.matchmaking,
        "whole": all(fact.get("whole", True) for fact in turn.facts),  # false: some were left out
        "workers": [{key: f[key] for key in keep if f.get(key) is not None} for f in turn.facts],
    }


PIECES: dict[str, Callable[[Scale], Runs]] = {
    "fp32": lambda scale: turns(
        [GLOO, *in_the_clear("fp32"), atoll("fp32", tls=True), hivemind("fp32")], COUNT, scale
    ),
    "fp16": lambda scale: turns(
        [GLOO, *in_the_clear("fp16"), atoll("fp16", tls=True), hivemind("fp16")], COUNT, scale
    ),
    "int8": lambda scale: turns(
        [GLOO, atoll("int8", tls=False), atoll("int8", tls=True)], COUNT, scale
    ),
    "torchft": lambda scale: turns([*in_the_clear("fp32"), TORCHFT], COUNT, scale),
    "int4": lambda scale: turns(
        [GLOO, atoll("int4", tls=False), atoll("int4", tls=True)], COUNT, scale
    ),
    "link100": lambda scale: turns(
        [
            atoll("int4", tls=True),
            gloo_as("int4", scale),
            hivemind("fp16"),
        ],
        COUNT,
        scale,
        shaped(100),
    ),
    "link100-limited": lambda scale: turns(
        [atoll("int4", tls=True), limited("int4", 100)], COUNT, scale, shaped(100)
    ),
    "link20": lambda scale: turns(
        [atoll("int4", tls=True), gloo_as("int4", scale)], COUNT, scale, shaped(20)
    ),
    "link100-fp32": long_turns,
    "link500": lambda scale: turns([atoll("fp32", tls=True), GLOO], COUNT, scale, shaped(500)),
    "link500-two": lambda scale: turns([atoll("fp32", tls=True), GLOO], 2, scale, shaped(500)),
    "matchmaking": matchmaking,
    "dark": dark,
    "two": lambda scale: turns(
        [GLOO, atoll("fp32", tls=False), atoll("int4", tls=True), hivemind("fp32")], 2, scale
    ),
    "eight": lambda scale: turns(
        [GLOO, atoll("fp32", tls=False), atoll("int4", tls=True), hivemind("fp32")], 8, scale
    ),
    # without hivemind, of which sixteen members with the others would need 26 GB
    "sixteen": lambda scale: turns(
        [GLOO, atoll("fp32", tls=False), atoll("int4", tls=True)], 16, scale
    ),
}
WITH_TORCHFT = ("torchft", "dark")
# what --quick leaves out: no key comes from int4, and the others would not fit into ten minutes
NOT_QUICK = ("int4", "eight", "sixteen")


def lacking(pieces: list[str]) -> dict[str, str]:
    """Pieces that cannot be measured here, and why."""
    if find_spec("torchft") is not None:
        return {}
    why = 'torchft is not installed: pip install -e ".[bench]" (Linux on x86-64 only)'
    return {piece: why for piece in pieces if piece in WITH_TORCHFT}


def picture(result: dict[str, Any], where: Path) -> None:
    """Draw what is known, where matplotlib is there."""
    try:
        from benchmarks.plot_allreduce import draw
    except ImportError:
        print('no picture, matplotlib is not installed: pip install -e ".[bench]"')
        return
    draw(result, where)
    print(f"{where} is drawn")


def end(given_up: dict[str, str]) -> None:
    """End with status 1 where pieces were given up, and say which keys are not measured."""
    if not given_up:
        return
    print("NOT MEASURED, what the file has of it is of before:")
    for piece, why in given_up.items():
        keys = [name for name, key in KEYS.items() if key.piece == piece]
        first, *more = why.strip().splitlines()
        print(f"  {piece} ({', '.join(keys) or 'no key'}): {'; '.join([first, *more[-1:]])}")
    sys.exit(1)


def main() -> None:
    """Run the pieces that are asked for and write what is known then."""
    clean_up_at_any_end()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the results go")
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--only", nargs="+", choices=PIECES, help="pieces to run", metavar="PIECE")
    parser.add_argument("--merge", type=Path, help="results that the others are taken from")
    given = parser.parse_args()
    require()
    if given.merge and not given.merge.exists():
        parser.error(f"--merge: there is no {given.merge}")
    source = given.merge or given.json
    runs: dict[str, Any] = kept(source).get("runs", {})
    runs = {name: piece for name, piece in runs.items() if name in PIECES}  # others were once
    apart(source, runs, quick=given.quick)
    scale = QUICK if given.quick else FULL
    pieces = given.only or [p for p in PIECES if not (given.quick and p in NOT_QUICK)]
    given_up = lacking(pieces)
    for piece, why in given_up.items():
        print(f"{piece} is given up: {why}", flush=True)
    for piece in pieces:
        if piece in given_up:
            continue
        print(piece, flush=True)
        began = time.monotonic()
        try:
            found = PIECES[piece](scale)
        except (WorkerFailed, Unequal) as error:
            given_up[piece] = str(error)
            print(f"{piece} is given up: {error}", flush=True)
            continue
        runs[piece] = {
            "size": scale.size_of(piece),
            "machine": machine(),
            "took_s": round(time.monotonic() - began, 1),
            "runs": found,
        }
        if given.quick:
            runs[piece]["quick"] = True
        write(figures(runs) | {"runs": runs}, given.json)
    print(shown(figures(runs)))
    if runs:
        picture({"runs": runs}, given.json.with_suffix(".png"))
    end(given_up)


if __name__ == "__main__":
    main()
