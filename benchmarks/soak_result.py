"""What an hour of trouble (:mod:`benchmarks.soak`) has found. The keys:

``rounds``, ``rounds_a_minute``  that the first island has applied
``broke_off``  what ended it before its time; empty: nothing did
``troubles``  by kind: how often, and seconds from the end of the trouble (its command to start
    again, SIGCONT; from the kill of a trainer, which its node starts again) until a round that was
    not under way before merged the island's work: median and most
``not_back``  troubles after which that took longer than two minutes
``different_states``  rounds after which two islands told of different outer states
``uncalled_ends``  of processes that nobody had ended: name, exit status, last words
``longest_without_round_s``  of the first island
``left_processes``  of islands that have ended
``growth``  by process of the first island: MiB of private memory, open files and threads at the
    end of the first tenth of the time and at its end, and MiB in 1,000 rounds between them (least
    squares over the last nine tenths)
``course``  each trouble: when it began and ended, seconds from the start, its kind, who
``samples``  all of it, every ten seconds
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from benchmarks.output import machine

if TYPE_CHECKING:
    from benchmarks.soak import Soak


def result(soak: Soak) -> dict[str, Any]:
    """All keys; see the top of this file."""
    rounds = soak.first.events("round")
    times = [event["time"] for event in rounds]
    states: dict[int, set[str]] = defaultdict(set)
    for island in soak.swarm.all:
        for event in island.events("round"):
            states[event["round"]].add(event["state"])
    back: dict[str, list[float]] = defaultdict(list)
    for trouble in soak.course:
        if trouble["back_s"] is not None:
            back[trouble["kind"]].append(trouble["back_s"])
    ended = [i for i in soak.swarm.all if not i.running]
    return {
        "machine": machine(),
        "minutes": soak.minutes,
        "broke_off": soak.broke_off,
        "islands": soak.islands,
        "rounds": len(rounds),
        "rounds_a_minute": round(60 * len(rounds) / (times[-1] - times[0]), 1),
        "troubles": {
            kind: {
                "count": len(found),
                "median_s": round(statistics.median(found), 2),
                "most_s": round(max(found), 2),
            }
            for kind, found in sorted(back.items())
        },
        "not_back": soak.not_back,
        "different_states": sorted(r for r, found in states.items() if len(found) > 1),
        "uncalled_ends": soak.uncalled,
        "longest_without_round_s": round(max(b - a for a, b in pairwise(times)), 2),
        "left_processes": sum(len(island.processes()) for island in ended),
        "growth": {kind: _growth(kind, soak.samples) for kind in ("daemon", "trainer")},
        "course": soak.course,
        "samples": soak.samples,
    }


def _growth(kind: str, samples: list[dict[str, Any]]) -> dict[str, Any]:
    begin = samples[-1]["s"] / 10
    later = [s for s in samples if s["s"] >= begin and s[kind]]
    if len({s["rounds"] for s in later}) < 2:
        return {}
    mib = [s[kind]["mib"] for s in later]
    slope = statistics.linear_regression([s["rounds"] for s in later], mib).slope
    return {
        "mib_in_1000_rounds": round(1000 * slope, 2),
        **{key: [later[0][kind][key], later[-1][kind][key]] for key in later[0][kind]},
    }
