"""Process entry of one rank: ``python -m node.trainer.rank``, started by :mod:`node.island.island`.

A rank never outlives the daemon: the kernel kills it when its parent dies (Linux), and rank 0
sees the end of its channel everywhere.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from node.trainer.channel import ChannelClosedError, Failed
from node.trainer.settings import (
    EXIT_CRASHED,
    EXIT_ORPHANED,
    EXIT_OUT_OF_MEMORY,
    EXIT_RANK_LOST,
    EXIT_REFUSED,
    EXIT_STOPPED,
    EXIT_STUCK,
    TrainerSettings,
)
from node.trainer.shared import SharedVectors
from node.trainer.unhurried import Unhurried
from protocols.errors import OperatorError

if TYPE_CHECKING:
    import torch

    from node.trainer.parallel import Ranks

PR_SET_PDEATHSIG = 1  # prctl(2)
OUT_OF_MEMORY = (
    "out of memory",  # torch, CUDA, and NCCL of a call of CUDA's that has failed
    "can't allocate memory",  # torch on the CPU
    "_status_alloc_failed",  # cuBLAS, cuDNN, cuSOLVER, …
    "failed to cuda calloc",  # NCCL of memory for itself
)


def main(argv: list[str] | None = None) -> int:
    """Run one rank to its end; returns the exit status."""
    parser = argparse.ArgumentParser(prog="node.trainer.rank")
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--place", type=int, required=True, help="among the ranks of this host")
    parser.add_argument("--store", required=True, help="file://PATH, or HOST:PORT of rank 0")
    parser.add_argument("--store-socket", type=int, help="descriptor that listens there, rank 0")
    parser.add_argument("--channel", type=int, help="descriptor of the socket, rank 0 only")
    parser.add_argument("--vectors", type=int, help="descriptor of the shared file, rank 0 only")
    arguments = parser.parse_args(argv)
    if not die_with(arguments.parent):
        return EXIT_ORPHANED
    settings = TrainerSettings.model_validate_json(arguments.settings.read_bytes())
    channel = None
    if arguments.channel is not None:
        channel = Unhurried(socket.socket(fileno=arguments.channel))
    try:
        device = pick_device(settings.device, arguments.place)
        ranks = meet(settings, arguments.rank, device, arguments.store, arguments.store_socket)
        train(settings, ranks, channel, arguments.vectors)
        if channel is not None:
            channel.finish()
        return EXIT_STOPPED
    except ChannelClosedError as error:
        log(f"{error}\n")
        return EXIT_ORPHANED
    except Exception as error:  # noqa: BLE001 - the process ends here, logged
        log(traceback.format_exc())
        status, code, text = explain(error, settings)
        if channel is None and status == EXIT_REFUSED:
            log(f"{text}\n")  # whence the daemon takes it (node.island.rank_ends)
        elif channel is not None:
            try:
                channel.send(Failed(code, text[:2000]))
                channel.finish()
            except ChannelClosedError:
                return EXIT_ORPHANED
        return status


def meet(
    settings: TrainerSettings, rank: int, device: torch.device, store: str, listening: int | None
) -> Ranks:
    """Come together with the other ranks."""
    from node.trainer.parallel import Ranks

    set_up_arithmetic(settings.threads)
    wait_s, alone = settings.collective_s, not settings.offload
    return Ranks.join(rank, settings.layout, device, store, wait_s, listening, alone=alone)


def set_up_arithmetic(threads: int) -> None:
    """How this thread, and those that it starts, compute on the CPU.

    Numbers below 2^-126 count as zero: as attention sharpens, ever more of its weights and their
    gradients become so small, and a step with such numbers takes a third longer and more on x86.
    The daemon keeps them, since all nodes have to compute the same bits there.
    """
    import torch

    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)


def train(
    settings: TrainerSettings, ranks: Ranks, channel: Unhurried | None, vectors: int | None
) -> None:
    """Build this rank's part of the model and follow the daemon until it says stop.

    ``vectors``: descriptor of the shared vectors, on rank 0.
    """
    from node.collector import spare_what_stays
    from node.modes import by_outer_steps
    from node.trainer.layout import Layout
    from node.trainer.leader import Leader
    from node.trainer.loop import Trainer

    leader = None
    if channel is not None and vectors is not None:
        size = Layout.of_manifest(settings.manifest).size
        shared = SharedVectors(vectors, size)
        shared.lock_pages(ranks.device)
        bounded = by_outer_steps(settings.manifest)
        leader = Leader(channel, shared, settings.wait_s, bounded=bounded)
    trainer = Trainer(settings, ranks, leader)
    spare_what_stays()
    trainer.run()
    ranks.leave()


def pick_device(device: str, place: int) -> torch.device:
    """The device of a host's rank; raises E403 when CUDA was asked for and does not work."""
    import torch

    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available() or torch.cuda.device_count() <= place:
        raise OperatorError(
            "E403",
            f"no CUDA device for rank {place} of this host",
            f"torch {torch.__version__} built for CUDA {torch.version.cuda} "
            f"sees {torch.cuda.device_count()} devices",
            "check the driver with nvidia-smi, or start with --device cpu",
        )
    return torch.device("cuda", place)


def explain(error: Exception, settings: TrainerSettings) -> tuple[int, str, str]:
    """Exit status, error code and text of what ended this rank."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OperatorError):
        return EXIT_REFUSED, error.code, error.text()
    if out_of_memory(error):
        return EXIT_OUT_OF_MEMORY, "E401", text
    lost = rank_lost(error) if settings.ranks > 1 else ""
    if lost == "E406":
        return EXIT_STUCK, lost, text
    if lost:  # the daemon sees which one has ended, and how
        return EXIT_RANK_LOST, "", text
    return EXIT_CRASHED, "", text


def out_of_memory(error: Exception) -> bool:
    """Whether the host's or the device's memory has run out, whoever asked for it.

    torch's own allocators have a class for it, or a text on the CPU; CUDA itself
    (AcceleratorError), its libraries and NCCL (DistBackendError) raise RuntimeErrors that are known
    by their words alone.
    """
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in OUT_OF_MEMORY)


def rank_lost(error: Exception) -> str:
    """E406 where a collective call took too long, E405 where another rank has gone; else empty.

    What NCCL and the store raise has a class; gloo's is a plain RuntimeError, known by its words
    alone, as is how long was waited. Anything else is this rank's own, whatever it says. A rank
    to which gloo finds no connection is gone, or is not where this one looks: it is not stuck.
    """
    from torch.distributed import DistError

    text = str(error).lower()
    if type(error) is not RuntimeError and not isinstance(error, DistError):
        return ""
    if out_of_memory(error):
        return ""
    unmet = any(words in text for words in ("timed out connecting", "refused"))
    if not unmet and any(word in text for word in ("timed out", "timeout")):
        return "E406"
    lost = ("gloo", "closed by peer", "connection reset", "timed out connecting", "refused")
    return "E405" if isinstance(error, DistError) or any(word in text for word in lost) else ""


def log(text: str) -> None:
    """Write to this rank's log, unless its disk is full: the exit status is still to be told."""
    with suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> bool:
    """Ask the kernel for this signal when the parent dies; false if it has died already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
    return os.getppid() == parent


def _exit(status: int) -> None:
    """End at once after a failure: taking a broken process group down in order may hang."""
    if status == EXIT_STOPPED:
        sys.exit()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the log's disk is full
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    _exit(main())
