"""Benchmarks leave no processes behind, whatever ends them."""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys

import pytest

STARTERS = (  # of processes
    *("allreduce", "far", "gpu", "island", "layouts", "mesh", "operators", "picture", "soak"),
    "streaming",
)
STUB = """
import contextlib, signal, sys
from benchmarks import allreduce

def piece(scale):
    with contextlib.ExitStack() as stack:
        stack.callback(print, "cleaned up", flush=True)
        print("began", flush=True)
        signal.sigtimedwait([signal.SIGUSR1], 60)

allreduce.require = lambda: None
allreduce.PIECES = {"stub": piece}
sys.argv = ["allreduce", "--json", "-"]
allreduce.main()
"""


class Called(Exception):
    """It was the first thing that was done."""


@pytest.mark.parametrize("name", STARTERS)
def test_whoever_starts_processes_cleans_up_at_any_end(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"benchmarks.{name}")

    def called() -> None:
        raise Called

    monkeypatch.setattr(module, "clean_up_at_any_end", called)
    with pytest.raises(Called):
        module.main()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_what_was_begun(number: signal.Signals) -> None:
    command = [sys.executable, "-c", STUB]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout)
            assert "began\n" in lines  # reads so far
            process.send_signal(number)
            assert next(lines) == "cleaned up\n"
            process.wait(30)
        finally:
            process.kill()
