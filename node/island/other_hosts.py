"""What the end of the ranks is where the island has other hosts: it may go on without one."""

from __future__ import annotations

from dataclasses import replace

from node.errors import operator_error
from node.hosts.crew import Crew
from node.hosts.remote import Host, RemoteRank
from node.island.rank_ends import Rank, TrainerDied
from node.monitor.wording import duration
from node.trainer.settings import EXIT_RANK_LOST, EXIT_REFUSED


def among_hosts(crew: Crew, died: TrainerDied, first: Rank, stood_s: float) -> TrainerDied:
    """``first`` is the rank that ended first; this host stood still for ``stood_s`` before."""
    if died.code == "E408":
        return _lost(died, enough=crew.enough, stood_s=stood_s)
    if not isinstance(first, RemoteRank) or not _its_hosts(died):
        return died
    alone = crew.failed(first.host, refused=died.exit_code == EXIT_REFUSED)
    return _left_out(died, first.host) if alone else died


def _lost(died: TrainerDied, *, enough: bool, stood_s: float) -> TrainerDied:
    """A host is lost (E408), and ``enough`` others are there; or this one stood still before.

    By that host 0 was given up: the other host is back in a moment.
    """
    error = died.error
    if stood_s and error is not None:
        why = f"{error.why}; this host stood still for {duration(stood_s)}"
        error = operator_error("E408", error.what, why=why)
    return replace(died, error=error, spared=enough or stood_s > 0)


def _its_hosts(died: TrainerDied) -> bool:
    """Whether the host of the rank that went first may be why, and would be so again.

    Less memory may do (E401), and who has waited for others (E406), or lost them, is no cause.
    """
    return died.code not in ("E401", "E406") and died.exit_code != EXIT_RANK_LOST


def _left_out(died: TrainerDied, host: Host) -> TrainerDied:
    """The island goes on without a host whose ranks fail: that is as good as lost (E408)."""
    why, fix = ": ".join((died.text, *died.log_tail.splitlines()[-1:])), f"see {died.log}"
    if died.error is not None:
        why, fix = str(died.error), died.error.fix
    until = "it is started again" if died.exit_code == EXIT_REFUSED else "a round is merged"
    what = f"{host.shown} is left out until {until}, as its ranks cannot go on"
    error = operator_error("E408", what, why=why, fix=fix)
    return replace(died, code=error.code, text=error.what, error=error, spared=True)
