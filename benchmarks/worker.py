"""The child's side of :mod:`benchmarks.fleet`: one member of one system, told when to average.

A worker says where the others find it, then that all have met, and takes a turn whenever it is
told to. Everything is a line of JSON on its standard output; a line on its standard input is a
turn, and its end is the worker's.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

SIZE = 25_000_000  # fp32 elements where nothing else is asked for


def options() -> dict[str, Any]:
    """What the fleet asks for: rank, count, address, rendezvous, size, and the system's own."""
    found: dict[str, Any] = json.loads(sys.argv[1])
    return found


def say(event: str, **facts: Any) -> None:
    """Tell the fleet something."""
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


def use_gloo_on(address: str) -> None:
    """Let gloo use the interface that has this address."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if address.startswith("127.") else "eth0"


def fill(vector: torch.Tensor, rank: int, turn: int) -> None:
    """Put the values in that a member brings to a turn: the same in each run, others elsewhere."""
    vector.normal_(generator=torch.Generator().manual_seed(1009 * rank + turn))


def wait_for_turn() -> None:
    """Return when it is this worker's turn; end the process when there will be none.

    It says before that it waits: whatever it prepares must not take the time of another's turn.
    """
    say("waiting")
    if not sys.stdin.readline():
        os._exit(0)
