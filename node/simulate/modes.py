"""Modes by name: what runs when a scenario names one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from node.simulate import pairs, rounds, streams
from node.simulate.world import World

MODES: dict[str, Callable[[World], Awaitable[None]]] = {
    "diloco": rounds.certified,
    "streaming": streams.streaming,
    "eager": rounds.certified,
    "gossip": pairs.pairs,
    "push-sum": pairs.pairs,
    "async": rounds.certified,
    "server": rounds.certified,
    "fedavg": rounds.certified,
    "sparta": rounds.certified,
    "allreduce": rounds.certified,
    "powersgd": rounds.certified,
    "onebit-adam": rounds.certified,
    "btm": rounds.certified,
}
