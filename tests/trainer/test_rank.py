"""How a trainer rank's process is set up, meets others, and what it makes of another one's end."""

import io
import os
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError, TCPStore
from torch.distributed.distributed_c10d import _get_default_store
from trainer_kit import tiny_settings

import node.trainer.rank
from node.trainer.channel import Failed
from node.trainer.dims import ParallelDims
from node.trainer.framing import Unframer
from node.trainer.parallel import HOST, Ranks
from node.trainer.rank import _exit, explain, main, rank_lost, set_up_arithmetic
from node.trainer.settings import EXIT_CRASHED, EXIT_OUT_OF_MEMORY, EXIT_RANK_LOST, EXIT_STUCK
from protocols.wire import decode_any

UNMET = (  # of gloo, whatever the limit
    "Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:152] "
    "timed out connecting: SO_ERROR: Connection refused, remote=[127.0.0.1]:35714$1"
)
FULL = Path("/dev/full")  # every write to it: no space left on device
TINY = 1e-39  # below 2^-126: fp32 has it with fewer digits only


def test_numbers_too_small_for_full_speed_count_as_zero_in_the_rank_alone() -> None:
    found = []

    def compute() -> None:  # in a thread, whose arithmetic ends with it
        set_up_arithmetic(torch.get_num_threads())
        found.append(torch.full((64,), TINY).mul(0.5).sum().item())

    rank = threading.Thread(target=compute)
    rank.start()
    rank.join()
    daemon = torch.full((64,), TINY).mul(0.5).sum().item()
    assert found == [0.0]
    assert 30e-39 < daemon < 34e-39


@pytest.mark.parametrize("name", ["plain", "#1", "a?b", "100%25", "two words"])
def test_ranks_meet_in_their_own_directory_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Else those of other islands, with another sign at the end, meet in the same place."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    place = tmp_path / name
    place.mkdir()
    ranks = Ranks.join(0, ParallelDims(), HOST, f"file://{place}/store", 7.0, alone=False)
    store: Any = _get_default_store()
    assert store.underlying_store.timeout == timedelta(seconds=7)
    assert [file.name for file in place.iterdir()] == ["store"]
    assert [folder.name for folder in tmp_path.iterdir()] == [name]
    ranks.leave()


def test_a_store_tells_a_rank_that_is_gone_from_one_that_does_not_answer() -> None:
    limit = timedelta(seconds=0.3)
    first = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    second = TCPStore("127.0.0.1", first.port, wait_for_workers=False, timeout=limit)
    with pytest.raises(DistStoreError) as late:
        second.wait(["what nobody sets"])
    assert rank_lost(late.value) == "E406"
    del first
    with pytest.raises(DistNetworkError) as gone:
        second.get("anything")
    assert rank_lost(gone.value) == "E405"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DistBackendError("NCCL error: remote process exited"), "E405"),
        (DistBackendError("Watchdog caught collective operation timeout: ALLREDUCE"), "E406"),
        (DistNetworkError("The client socket has failed to connect to any address"), "E405"),
        (DistNetworkError("The client socket has timed out after 1000ms"), "E406"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"), "E405"),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting"), "E406"),
        (RuntimeError(UNMET), "E405"),
        (RuntimeError("Wait timeout"), "E406"),  # of a store in a file
        (RuntimeError("shapes do not fit"), ""),
        (TimeoutError("the corpus is read over a network"), ""),
        (ConnectionResetError("connection reset by peer"), ""),
        (ValueError("no such backend: nccl"), ""),
    ],
)
def test_another_ranks_end_is_told_from_a_failure_of_ones_own(error: Exception, code: str) -> None:
    assert rank_lost(error) == code


NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3699, unhandled cuda "
    "error (run with NCCL_DEBUG=INFO for details), NCCL version 2.29.3\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (MemoryError(), EXIT_OUT_OF_MEMORY, "E401"),
        (torch.OutOfMemoryError("Tried to allocate 20.00 MiB"), EXIT_OUT_OF_MEMORY, "E401"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"),
            EXIT_OUT_OF_MEMORY,
            "E401",
        ),
        (
            torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaError"),
            EXIT_OUT_OF_MEMORY,
            "E401",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(h)`"),
            EXIT_OUT_OF_MEMORY,
            "E401",
        ),
        (DistBackendError(f"{NCCL}Cuda failure 2 'out of memory'"), EXIT_OUT_OF_MEMORY, "E401"),
        (DistBackendError(NCCL + "Failed to CUDA calloc async 4"), EXIT_OUT_OF_MEMORY, "E401"),
        (DistBackendError(f"{NCCL}Cuda failure 'unhandled'"), EXIT_RANK_LOST, ""),
        (DistBackendError("NCCL error: remote process exited"), EXIT_RANK_LOST, ""),
        (RuntimeError("Timed out waiting 600000ms for recv"), EXIT_STUCK, "E406"),
        (RuntimeError(UNMET), EXIT_RANK_LOST, ""),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), EXIT_CRASHED, ""),
        (ValueError("out of memory, says a file"), EXIT_CRASHED, ""),
    ],
)  # fmt: skip
def test_why_a_rank_ends_is_told_by_its_status(error: Exception, status: int, code: str) -> None:
    """The texts are those of torch 2.13 and NCCL 2.29."""
    settings: Any = SimpleNamespace(ranks=2)
    assert explain(error, settings)[:2] == (status, code)
    if status == EXIT_OUT_OF_MEMORY:
        assert rank_lost(error) == ""  # scripts ask this alone


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("leads", [True, False])
def test_a_rank_whose_log_has_no_room_tells_all_the_same_why_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leads: bool, full: bool
) -> None:
    def short(*given: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 20.00 MiB")

    ended: list[int] = []
    monkeypatch.setattr(node.trainer.rank, "die_with", lambda parent: True)
    monkeypatch.setattr(node.trainer.rank, "meet", short)
    monkeypatch.setattr(os, "_exit", ended.append)
    ours, theirs = socket.socketpair()
    inherited = SimpleNamespace(socket=lambda fileno: theirs)
    monkeypatch.setattr(node.trainer.rank, "socket", inherited)
    words = ["--settings", str(tiny_settings(tmp_path).write(tmp_path)), "--store", "nowhere"]
    words += ["--rank", "0", "--place", "0", "--parent", "1"]
    words += ["--channel", "0"] if leads else []
    log = FULL if full else tmp_path / "log"
    unbuffered = io.TextIOWrapper(log.open("wb", buffering=0), write_through=True)
    with ours, theirs, unbuffered as file, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", file)
        patched.setattr(sys, "stderr", file)
        _exit(main(words))
        if leads:
            (frame,) = Unframer().feed(ours.recv(4096))
            assert isinstance(failed := decode_any(frame, Failed), Failed)
            assert failed.code == "E401"
    assert ended == [EXIT_OUT_OF_MEMORY]
    if not full:
        assert "OutOfMemoryError: Tried to allocate" in log.read_text()
