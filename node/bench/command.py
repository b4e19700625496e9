"""What ``node bench`` prints: one line a round and member, and what the rounds came to."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from typing import Any, TextIO

from node.bench.member import Member, Taken
from node.bench.settings import Settings
from node.bench.watching import Stage
from node.collector import spare_what_stays
from protocols.codecs import RangeCodec
from protocols.identity import PeerId


def main(settings: Settings, *, as_json: bool = False) -> int:
    """Take the rounds and report them on standard output; the process's exit status.

    As JSON there is one object a line: ``opened``, then ``round`` and ``said``, then ``end``.
    """
    report = Json(sys.stdout) if as_json else Text(sys.stdout, settings)
    member = Member(settings, opened=report.opened, took=report.took, said=report.said)
    spare_what_stays()
    asyncio.run(member.run())
    report.end()
    return 0


class Json:
    """For programs."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def _line(self, event: str, **facts: Any) -> None:
        self._out.write(json.dumps({"event": event, **facts}) + "\n")
        self._out.flush()

    def opened(self, peer: PeerId, address: str) -> None:
        self._line("opened", peer=peer, address=address)

    def took(self, taken: Taken) -> None:
        moments = {stage.value: at for stage, at in taken.moments.items()}
        self._line("round", **(vars(taken) | {"moments": moments}))

    def said(self, text: str) -> None:
        self._line("said", text=text)

    def end(self) -> None:
        self._line("end")


class Text:
    """For people. Times of a round count from this member's own plan."""

    def __init__(self, out: TextIO, settings: Settings) -> None:
        self._out, self._settings = out, settings
        self._seconds: list[float] = []

    def _line(self, text: str) -> None:
        self._out.write(text + "\n")
        self._out.flush()

    def opened(self, peer: PeerId, address: str) -> None:
        settings = self._settings
        encoded = RangeCodec(settings.codec, settings.size).encoded_size(0, settings.size)
        self._line(
            f"{settings.size:,} elements, {encoded / 1e6:.1f} MB as {settings.codec}, "
            f"{settings.members} members, {'mutual TLS' if settings.tls else 'no encryption'}"
        )
        self._line(
            "waiting for the others; they start with: "
            f"node bench --peers {address}/{peer}{settings.alike}"
        )

    def took(self, taken: Taken) -> None:
        at = taken.moments
        planned, applied = at.get(Stage.PLANNED), at[Stage.APPLIED]
        if planned is None:
            self._line(f"round {taken.round}: missed, caught up")
            return
        seconds = applied - planned
        self._seconds.append(seconds)
        self._line(
            f"round {taken.round}: {seconds:.3f} s, waited {planned - at[Stage.READY]:.3f} s for "
            f"the plan; sent {taken.sent / 1e6:.1f} MB and received {taken.received / 1e6:.1f} MB "
            f"at {taken.sent * 8e-6 / seconds:.0f} and {taken.received * 8e-6 / seconds:.0f} "
            f"Mbit/s; {taken.contributors} peers, {taken.merged:.0%} merged; memory "
            f"{taken.peak_bytes / (4 * self._settings.size):.2f} x the vector; {taken.digest[:12]}"
        )

    def said(self, text: str) -> None:
        self._line(f"  {text}")

    def end(self) -> None:
        if self._seconds:
            self._line(
                f"median of {len(self._seconds)} rounds {statistics.median(self._seconds):.3f} s, "
                f"fastest {min(self._seconds):.3f} s"
            )
