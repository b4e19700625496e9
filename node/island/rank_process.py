"""One trainer rank as a child process: started with its log, signalled, and read at its end.

The daemon starts ranks so (:mod:`node.island.island`), and so do the other hosts of an island
(:mod:`node.hosts.helper`).
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import node
from node.errors import operator_error
from node.hosts.interface import GLOO, LOOPBACK, told
from node.trainer.settings import EXIT_STUCK
from protocols.errors import OperatorError, is_full

TAIL_BYTES = 4096
# what NCCL's watchdog says before it aborts a rank that waits for another one, and how far from the
# end of the log: traces of C++ follow (torch 2.13, ProcessGroupNCCL.cpp)
WATCHDOG = "Watchdog caught collective operation timeout"
WATCHDOG_BYTES = 16_384
# glibc keeps memory that a step gives back for the next one, instead of taking thousands of pages
# anew from the kernel in every step; up to 32 MiB a tensor, the most it allows. And huge pages.
KEPT_MEMORY = ":".join(
    f"glibc.malloc.{setting}"
    for setting in ("trim_threshold=1073741824", "mmap_threshold=33554432", "hugetlb=1")
)
# errors of a start that may pass: no memory, disk or file for another process for the moment
PASSING = (errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)
OOM_COUNTER = Path("/proc/vmstat")


@dataclass
class RankProcess:
    """A rank of this host."""

    number: int  # among all ranks of the island
    process: asyncio.subprocess.Process
    log: Path
    log_start: int  # bytes that were in the log before
    where: str = ""  # " on host 1", of another host's

    @classmethod
    async def spawn(
        cls,
        number: int,
        directory: Path,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        inherited: Sequence[int] = (),
    ) -> RankProcess:
        """Start ``python -m node.trainer.rank`` with a log in ``directory``."""
        log = directory / f"trainer-rank{number}.log"
        with log.open("ab") as file:
            start = file.tell()
            process = await asyncio.create_subprocess_exec(
                # -P: a folder called "node" where the operator stands must not be imported
                sys.executable,
                "-P",
                "-m",
                "node.trainer.rank",
                "--parent",
                str(os.getpid()),
                "--rank",
                str(number),
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                pass_fds=inherited,
                env=environment,
                start_new_session=True,
            )
        return cls(number, process, log, start)

    @property
    def running(self) -> bool:
        """Whether it has not ended, as far as is known here."""
        return self.process.returncode is None

    async def wait(self) -> int:
        """Its exit status, or the negative number of the signal that has ended it.

        EXIT_STUCK where NCCL's watchdog did, as it is where gloo gives a collective call up.
        """
        status = await self.process.wait()
        return EXIT_STUCK if status == -signal.SIGABRT and self.gave_up() else status

    def signal(self, number: signal.Signals) -> None:
        """Send to the rank's whole process group, if it is still there."""
        if self.running:
            try:
                os.killpg(self.process.pid, number)  # pid and group id are equal: own session
            except ProcessLookupError:
                return  # ended, and not yet reaped

    def gave_up(self) -> bool:
        """Whether NCCL's watchdog has given a collective call up, and ends this rank for it."""
        return WATCHDOG in self.tail(WATCHDOG_BYTES)

    def tail(self, length: int = TAIL_BYTES) -> str:
        """The end of what it has said in this life, ``length`` bytes at most.

        Nothing where the log has been moved or removed meanwhile.
        """
        with suppress(OSError), self.log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self.log_start, end - length))
            return file.read().decode(errors="replace").strip()
        return ""


def refusal(error: OSError, text: str) -> OperatorError | None:
    """What is told of a rank that does not start, ``text``, where its log would not say it."""
    if is_full(error):
        return operator_error("E402", why=text)
    if error.errno == errno.EMFILE:
        return operator_error(
            "E405",
            f"trainer: {text}",
            why="the daemon may have no more files open than its limit allows",
            fix="raise the limit of open files: ulimit -n where it is started, LimitNOFILE= of a "
            "systemd service, --ulimit nofile= of a container",
        )
    if error.errno == errno.ENFILE:
        return operator_error(
            "E405",
            f"trainer: {text}",
            why="all files are open that this machine allows",
            fix="stop what holds so many open, or raise the limit (sysctl fs.file-max)",
        )
    return None


def child_environment() -> dict[str, str]:
    """This process's environment for a child, which is to import the very packages of this one."""
    packages = str(Path(node.__file__).resolve().parent.parent)
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": f"{packages}{os.pathsep}{path}" if path else packages,
        "PYTHONUNBUFFERED": "1",  # so that its log says at once what happens
    }


def rank_environment(threads: int, address: str = "") -> dict[str, str]:
    """This process's environment as a rank needs it.

    ``address``: of this host, at which ranks of other hosts are met; empty where there are none.
    """
    return {
        **child_environment(),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", KEPT_MEMORY),
        # gloo would otherwise look this host's name up
        **(told(address, os.environ) if address else {GLOO: LOOPBACK}),
    }


def oom_kills() -> int:
    """Processes that the kernel has killed for memory since boot; 0 where it does not tell."""
    try:
        lines = OOM_COUNTER.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
