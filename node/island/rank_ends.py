"""Why a trainer's ranks are down: one cause is told, of all that ended one after the other.

A rank that dies makes the collective calls of the others fail, so several end within a moment. Exit
statuses, what rank 0 said last, the kernel's count of processes that it killed for memory, and
which ranks still run, name the one that went first and the error that people see.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from node.errors import TABLE, operator_error
from node.hosts.remote import HOST_LOST, RemoteRank
from node.island.rank_process import RankProcess, oom_kills
from node.monitor.wording import duration
from node.trainer.channel import Failed
from node.trainer.settings import (
    EXIT_CRASHED,
    EXIT_OUT_OF_MEMORY,
    EXIT_RANK_LOST,
    EXIT_REFUSED,
    EXIT_STUCK,
)
from protocols.errors import OperatorError

SETTLE_S = 1.0  # a rank that lost another one ends first now and then: wait for the real cause

REFUSAL = re.compile(r"^error (E\d{3}): ", re.MULTILINE)  # as OperatorError.text has it

Rank = RankProcess | RemoteRank


@dataclass(frozen=True)
class TrainerDied:
    """All ranks are down although nobody asked. ``rank`` is the one that went first."""

    rank: int
    exit_code: int | None  # None: ended by a signal
    signal: str  # "SIGKILL", "signal 35", or empty
    code: str  # E401 memory, E406 stuck, E408 host lost, or what a rank said, E405 otherwise
    text: str  # one line
    log: Path  # that rank's output,
    log_tail: str  # and its end
    error: OperatorError | None = None  # what a rank refused with, or where none was the cause
    # a host was lost, or fails, that the island can do without; or the node, or its host 0, stood
    # still
    spared: bool = False


async def settle(exits: Sequence[asyncio.Task[int]]) -> list[tuple[int, int]]:
    """Ranks that ended by themselves, as (rank, status), the likeliest cause first.

    A rank whose collective failed since another one died may well end before that one.
    """
    deadline = asyncio.get_running_loop().time() + SETTLE_S
    while True:
        ended = [(i, task.result()) for i, task in enumerate(exits) if task.done()]
        ended.sort(key=lambda item: (_blame(item[1]), item[0]))
        running = [task for task in exits if not task.done()]
        left = deadline - asyncio.get_running_loop().time()
        if not running or left <= 0 or (ended and _blame(ended[0][1]) < _blame(EXIT_STUCK)):
            return ended
        await asyncio.wait(running, timeout=left, return_when=asyncio.FIRST_COMPLETED)


def obituary(
    ranks: Sequence[Rank],
    ended: list[tuple[int, int]],
    failed: Failed | None,
    kills: int,
    collective_s: float,
    stood_s: float = 0.0,
) -> TrainerDied:
    """What became of ranks that :func:`settle` has found ``ended``.

    ``failed`` is rank 0's last word, ``kills`` what :func:`oom_kills` said when they were started.
    Of the ``collective_s`` that a call may take this whole node stood still for ``stood_s``.
    """
    number, status = ended[0] if ended else (0, 0)
    rank = ranks[number]
    error: OperatorError | None = None
    said = failed.text if number == 0 and failed is not None else rank.tail()
    who = f"rank {number}{rank.where}" if len(ranks) > 1 else "trainer"
    name = _signal_name(-status) if status < 0 else ""
    local_kill = isinstance(rank, RankProcess) and name == "SIGKILL"
    out_of_memory = status == EXIT_OUT_OF_MEMORY or (local_kill and oom_kills() > kills)
    if status == HOST_LOST and isinstance(rank, RemoteRank):
        error = operator_error("E408", f"{rank.host.shown} of this island is lost", why=rank.tail())
        code, text = error.code, error.what
    elif status == EXIT_STUCK and stood_s:
        error = _stood_still(stood_s, collective_s)
        code, text = error.code, error.what
    elif status == EXIT_STUCK:
        code, text = "E406", _silence(ranks, ended, collective_s)
    elif (status == EXIT_REFUSED or not ended) and (error := _refusal(said, who, rank.log)):
        code, text = error.code, str(error)
    elif number == 0 and failed is not None and not out_of_memory:
        code, text = failed.code or "E405", failed.text
    elif out_of_memory:
        code, text = "E401", f"rank {number}{rank.where} ran out of memory"
    else:
        how = f"was ended by {name}" if name else "crashed"
        code, text = "E405", f"rank {number}{rank.where} {how}"
    return TrainerDied(
        rank=number,
        exit_code=None if status < 0 else status,
        signal=name,
        code=code,
        text=text,
        log=rank.log,
        log_tail=rank.tail(),
        error=error,
        spared=status == EXIT_STUCK and stood_s > 0,
    )


def silent(rank: Rank, seconds: float) -> TrainerDied:
    """What is told of rank 0 where it hangs (:mod:`node.island.silence`)."""
    text = f"rank {rank.number}{rank.where} runs, and has done nothing for {seconds:.0f} s"
    return TrainerDied(rank.number, None, "", "E406", text, rank.log, rank.tail())


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most of those of real time have no name
        return f"signal {number}"


def _refusal(words: str, who: str, log: Path) -> OperatorError | None:
    """The error whose three lines come last in what a rank has said; None where there is none."""
    known = [found for found in REFUSAL.finditer(words) if found[1] in TABLE]
    if not known:
        return None
    what, _, rest = words[known[-1].end() :].partition("\n  why: ")
    why, _, rest = rest.partition("\n  fix: ")
    fix, *_ = rest.split("\n")  # what a library says at the exit may follow
    return operator_error(
        known[-1][1], f"{who}: {what}", why=why, fix=f"{fix}; see {log}" if fix else f"see {log}"
    )


def _silence(ranks: Sequence[Rank], ended: list[tuple[int, int]], collective_s: float) -> str:
    """Which ranks were not in the collective call that did not end."""
    waited = {rank for rank, _ in ended}  # NCCL's watchdog takes its time from its word to the end
    waited |= {n for n, r in enumerate(ranks) if isinstance(r, RankProcess) and r.gave_up()}
    silent = [f"{n}{rank.where}" for n, rank in enumerate(ranks) if n not in waited]
    limit = f"a collective call did not end within {collective_s:g} s"
    if not silent:
        return f"{limit}, and no rank is left that was not in it"
    return f"{limit}: rank {', '.join(silent)} runs, and takes no part in it"


def _stood_still(seconds: float, collective_s: float) -> OperatorError:
    return operator_error(
        "E406",
        f"a collective call did not end within {collective_s:g} s, as this node stood still for "
        f"{duration(seconds)}",
        why="it was suspended, frozen or stopped, and its ranks with it: no rank is to blame",
        fix="nothing has to be done: all ranks start again from the last merge; to interrupt a "
        "node for long without a loss, node stop, and node start --resume",
    )


def _blame(status: int) -> int:
    """How likely an exit status is the cause rather than the effect of another rank's end."""
    if status < 0 or status == HOST_LOST:
        return 0
    order = (EXIT_OUT_OF_MEMORY, EXIT_REFUSED, EXIT_CRASHED, EXIT_STUCK, EXIT_RANK_LOST)
    return 1 + (order.index(status) if status in order else len(order))
