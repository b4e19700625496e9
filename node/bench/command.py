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
from node.errors import operator_error
from protocols.codecs import RangeCodec
from protocols.identity import PeerId


def main(settings: Settings, *, as_json: bool = False) -> int:
    """Take the rounds and report them on standard output; the process's exit status.

    As JSON there is one object a line: ``opened``, then ``round`` and ``said``, then ``end``.
    Raises OperatorError E501 where none of the rounds had all members, which measures nothing.
    """
    report = Json(sys.stdout) if as_json else Text(sys.stdout, settings)
    whole = 0

    def took(taken: Taken) -> None:
        nonlocal whole
        whole += is_whole(taken, settings)
        report.took(taken)

    member = Member(settings, opened=report.opened, took=took, said=report.said)
    spare_what_stays()
    asyncio.run(member.run())
    report.end()
    if not whole:
        raise operator_error(
            "E501",
            f"none of {settings.rounds} rounds had all {settings.members} members",
            why="members left, or were too late for each of them",
            fix="see what the others say, and start all again",
        )
    return 0


def is_whole(taken: Taken, settings: Settings) -> bool:
    """Whether a round measures what all members can do together: with fewer it is another task."""
    return taken.seconds is not None and taken.contributors == settings.members


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
        self._rounds = 0
        self._seconds: list[float] = []  # of those with all members

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
        self._rounds += 1
        at, seconds = taken.moments, taken.seconds
        if seconds is None:
            self._line(f"round {taken.round}: missed, caught up")
            return
        if is_whole(taken, self._settings):
            self._seconds.append(seconds)
        waited = at[Stage.PLANNED] - at[Stage.READY]
        self._line(
            f"round {taken.round}: {seconds:.3f} s, waited {waited:.3f} s for "
            f"the plan; sent {taken.sent / 1e6:.1f} MB and received {taken.received / 1e6:.1f} MB "
            f"at {taken.sent * 8e-6 / seconds:.0f} and {taken.received * 8e-6 / seconds:.0f} "
            f"Mbit/s; {taken.contributors} peers, {taken.merged:.0%} merged; memory "
            f"{taken.peak_bytes / (4 * self._settings.size):.2f} x the vector; {taken.digest[:12]}"
        )

    def said(self, text: str) -> None:
        self._line(f"  {text}")

    def end(self) -> None:
        if self._seconds:
            found = len(self._seconds)
            which = "rounds"
            if found < self._rounds:
                which = (
                    f"of {self._rounds} rounds, those with all {self._settings.members} members,"
                )
            self._line(
                f"median of {found} {which} {statistics.median(self._seconds):.3f} s, "
                f"fastest {min(self._seconds):.3f} s"
            )
