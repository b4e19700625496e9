"""The figures that :mod:`benchmarks.allreduce` is run for, from its raw times.

On loopback ours goes by Unix sockets, as it does between processes of one machine, and what it is
compared with by TCP. The keys that end in ``_tcp`` are of ours by TCP as well.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from protocols.codecs import RangeCodec

Pieces = dict[str, Any]


class NotMeasured(Exception):
    """A system has no times in a piece."""


@dataclass(frozen=True)
class Key:
    """One figure."""

    text: str
    target: float
    least: bool  # the target is a minimum, not a maximum
    piece: str  # that it comes from
    value: Callable[[Pieces], float]

    def met(self, value: float) -> bool:
        """Whether the target is reached."""
        return value >= self.target if self.least else value <= self.target


def turns_of(pieces: Pieces, piece: str, entry: str) -> list[dict[str, Any]]:
    """All turns of a system in a piece. Raises :class:`NotMeasured`."""
    turns: list[dict[str, Any]] = pieces.get(piece, {"runs": {}})["runs"].get(entry, [])
    if not turns:
        raise NotMeasured(f"{entry} in piece {piece}")
    return turns


def seconds(pieces: Pieces, piece: str, entry: str) -> float:
    """The median time of a system in a piece; a run that left a member out counts as endless."""
    runs = turns_of(pieces, piece, entry)
    return statistics.median(run["seconds"] if run["whole"] else math.inf for run in runs)


def faster(piece: str, theirs: str, ours: str) -> Callable[[Pieces], float]:
    """How many times as fast we are."""
    return lambda pieces: seconds(pieces, piece, theirs) / seconds(pieces, piece, ours)


def efficiency(piece: str, mbit: float, codec: str, of: str = "") -> Callable[[Pieces], float]:
    """The time in which a butterfly's bytes would pass the link, over the time it took.

    The bytes are those that the codec makes, though slow links carry fewer (see :func:`use`).
    ``of`` is another system that moved as many bytes; without, our own with TLS.
    """

    def value(pieces: Pieces) -> float:
        entry = of or f"atoll {codec} tls"
        count = len(turns_of(pieces, piece, entry)[0]["workers"])
        size = pieces[piece]["size"]
        encoded = RangeCodec(codec, size).encoded_size(0, size)
        least = 2 * (count - 1) / count * encoded * 8 / (mbit * 1e6)
        return least / seconds(pieces, piece, entry)

    return value


def use(piece: str, mbit: float, codec: str) -> Callable[[Pieces], float]:
    """The time in which the bodies would pass that were sent, packed, over the time it took."""

    def value(pieces: Pieces) -> float:
        runs = turns_of(pieces, piece, f"atoll {codec} tls")
        sent = statistics.median(max(worker["sent"] for worker in run["workers"]) for run in runs)
        return float(sent * 8 / (mbit * 1e6) / seconds(pieces, piece, f"atoll {codec} tls"))

    return value


def matchmaking_ms(pieces: Pieces) -> float:
    """Median over rounds."""
    rounds = turns_of(pieces, "matchmaking", "atoll int4 tls")
    return float(1000 * statistics.median(run["matchmaking"] for run in rounds))


def matchmaking_p99_ms(pieces: Pieces) -> float:
    """99 of 100 rounds take at most this long."""
    rounds = turns_of(pieces, "matchmaking", "atoll int4 tls")
    waits = sorted(run["matchmaking"] for run in rounds)
    return float(1000 * waits[min(len(waits) - 1, int(0.99 * len(waits)))])


def stalls(pieces: Pieces, entry: str) -> list[float]:
    """How much longer than usual a turn took in which a link went dark, for each of these."""
    return [float(run["stall"]) for run in turns_of(pieces, "dark", entry)]


def peak_memory_ratio(pieces: Pieces) -> float:
    """The worst of all rounds and members that exchanged fp32 with TLS."""
    rounds = turns_of(pieces, "fp32", "atoll fp32 tls")
    most = max(worker["peak"] for run in rounds for worker in run["workers"])
    return float(most / (4 * pieces["fp32"]["size"]))


KEYS: dict[str, Key] = {
    "vs_hivemind_fp32": Key(
        "hivemind's time over ours, fp32 on loopback, ours without TLS",
        8,
        True,
        "fp32",
        faster("fp32", "hivemind fp32", "atoll fp32"),
    ),
    "vs_hivemind_fp16": Key(
        "hivemind's time over ours, fp16 on loopback, ours without TLS",
        8,
        True,
        "fp16",
        faster("fp16", "hivemind fp16", "atoll fp16"),
    ),
    "vs_hivemind_fp32_tls": Key(
        "hivemind's time over ours, fp32 on loopback, ours with mutual TLS",
        4,
        True,
        "fp32",
        faster("fp32", "hivemind fp32", "atoll fp32 tls"),
    ),
    "vs_hivemind_wan_int4": Key(
        "hivemind's time in fp16 over ours in int4 with mutual TLS, links of 100 Mbit/s",
        4,
        True,
        "link100",
        faster("link100", "hivemind fp16", "atoll int4 tls"),
    ),
    "vs_hivemind_wan_fp32": Key(
        "hivemind's time over ours with mutual TLS, both in fp32, links of 100 Mbit/s",
        math.inf,
        True,
        "link100-fp32",
        faster("link100-fp32", "hivemind fp32", "atoll fp32 tls"),
    ),
    "vs_gloo_fp32": Key(
        "our time over gloo's, fp32 on loopback, without TLS",
        1.25,
        False,
        "fp32",
        faster("fp32", "atoll fp32", "gloo"),
    ),
    **{
        f"vs_hivemind_{codec}_tcp": Key(
            f"hivemind's time over ours, {codec} on loopback, ours without TLS and by TCP as well",
            8,
            True,
            codec,
            faster(codec, f"hivemind {codec}", f"atoll {codec} tcp"),
        )
        for codec in ("fp32", "fp16")
    },
    "vs_gloo_fp32_tcp": Key(
        "our time over gloo's, fp32 on loopback, without TLS, ours by TCP as well",
        1.25,
        False,
        "fp32",
        faster("fp32", "atoll fp32 tcp", "gloo"),
    ),
    **{
        f"vs_hivemind_fp32_{piece}": Key(
            f"hivemind's time over ours among {piece}, fp32 on loopback, ours without TLS",
            8,
            True,
            piece,
            faster(piece, "hivemind fp32", "atoll fp32"),
        )
        for piece in ("two", "eight")
    },
    **{
        f"vs_gloo_fp32_{piece}": Key(
            f"our time over gloo's among {piece}, fp32 on loopback, without TLS",
            1.25,
            False,
            piece,
            faster(piece, "atoll fp32", "gloo"),
        )
        for piece in ("two", "eight", "sixteen")
    },
    "vs_gloo_int8": Key(
        "our time in int8 over gloo's in fp32, on loopback, without TLS",
        1,
        False,
        "int8",
        faster("int8", "atoll int8", "gloo"),
    ),
    "vs_torchft_sync": Key(
        "torchft's time over ours, fp32 on loopback, ours without TLS",
        math.inf,
        True,
        "torchft",
        faster("torchft", "torchft", "atoll fp32"),
    ),
    "vs_torchft_sync_tcp": Key(
        "the same, ours by TCP as well",
        math.inf,
        True,
        "torchft",
        faster("torchft", "torchft", "atoll fp32 tcp"),
    ),
    "link_efficiency_20mbit": Key(
        "least possible time over ours, int4, mutual TLS",
        0.94,
        True,
        "link20",
        efficiency("link20", 20, "int4"),
    ),
    "link_efficiency_100mbit": Key(
        "least possible time over ours, int4, mutual TLS",
        0.94,
        True,
        "link100",
        efficiency("link100", 100, "int4"),
    ),
    "link_efficiency_500mbit": Key(
        "least possible time over ours, fp32, mutual TLS",
        0.94,
        True,
        "link500",
        efficiency("link500", 500, "fp32"),
    ),
    "link_efficiency_100mbit_limited": Key(
        "least possible time over ours, int4, mutual TLS, with an upload limit just below the link",
        0.94,
        True,
        "link100-limited",
        efficiency("link100-limited", 100, "int4", "atoll int4 tls limited"),
    ),
    "link_efficiency_100mbit_fp32": Key(
        "least possible time over ours, fp32, mutual TLS: eight times the bytes, one start and end",
        0.94,
        True,
        "link100-fp32",
        efficiency("link100-fp32", 100, "fp32"),
    ),
    "link_efficiency_500mbit_two": Key(
        "the same over 500 Mbit/s, with two members",
        0.94,
        True,
        "link500-two",
        efficiency("link500-two", 500, "fp32"),
    ),
    **{
        f"link_use_{name}": Key(
            f"of the time of a link of {name}, what the bodies need as they were sent, packed",
            math.inf,
            True,
            piece,
            use(piece, mbit, codec),
        )
        for name, piece, mbit, codec in (
            ("20mbit", "link20", 20, "int4"),
            ("100mbit", "link100", 100, "int4"),
            ("100mbit_fp32", "link100-fp32", 100, "fp32"),
            ("500mbit", "link500", 500, "fp32"),
        )
    },
    **{
        f"gloo_link_efficiency_{name}": Key(
            f"the same for gloo, as many bytes, no encryption, {name}",
            math.inf,
            True,
            piece,
            efficiency(piece, mbit, codec, "gloo"),
        )
        for name, piece, mbit, codec in (
            ("20mbit", "link20", 20, "int4"),
            ("100mbit", "link100", 100, "int4"),
            ("100mbit_fp32", "link100-fp32", 100, "fp32"),
            ("500mbit", "link500", 500, "fp32"),
            ("500mbit_two", "link500-two", 500, "fp32"),
        )
    },
    "matchmaking_ms": Key(
        "from the last ready member to the first byte, median",
        50,
        False,
        "matchmaking",
        matchmaking_ms,
    ),
    "matchmaking_p99_ms": Key(
        "the same, 99th percentile", 200, False, "matchmaking", matchmaking_p99_ms
    ),
    "dark_link_stall_s": Key(
        "a round of the survivors of a link that goes dark takes so much longer, median",
        3,
        False,
        "dark",
        lambda pieces: statistics.median(stalls(pieces, "atoll fp32 tls")),
    ),
    "dark_link_stall_worst_s": Key(
        "the longest of these",
        3,
        False,
        "dark",
        lambda pieces: max(stalls(pieces, "atoll fp32 tls")),
    ),
    "torchft_dark_link_stall_s": Key(
        "the median for torchft, by turns with ours",
        math.inf,
        False,
        "dark",
        lambda pieces: statistics.median(stalls(pieces, "torchft")),
    ),
    "torchft_dark_link_stall_worst_s": Key(
        "the longest of these",
        math.inf,
        False,
        "dark",
        lambda pieces: max(stalls(pieces, "torchft")),
    ),
    "peak_memory_ratio": Key(
        "most memory of a member over the vector's, fp32, mutual TLS",
        2.5,
        False,
        "fp32",
        peak_memory_ratio,
    ),
}


def figures(pieces: Pieces) -> dict[str, float | None]:
    """All keys for which there are results; None where rounds were not whole."""
    found = {}
    for name, key in KEYS.items():
        with suppress(NotMeasured):
            found[name] = key.value(pieces)
    return {
        name: round(value, 4) if math.isfinite(value) else None for name, value in found.items()
    }


def shown(found: dict[str, float | None]) -> str:
    """A table for people."""
    lines = []
    for name, value in found.items():
        key = KEYS[name]
        verdict = ""
        if key.target != math.inf:
            missed = "" if value is not None and key.met(value) else ": MISSED"
            verdict = f"({'at least' if key.least else 'at most'} {key.target:g}{missed})"
        figure = f"{math.nan if value is None else value:9.3f}"
        lines.append(f"{name:32} {figure}  {verdict:24}  {key.text}")
    return "\n".join(lines)
