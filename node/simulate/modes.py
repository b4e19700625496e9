"""Modes by name: what runs when a scenario names one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from node.simulate import each_step, pairs, rounds, streams
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
    "allreduce": each_step.allreduce,
    "powersgd": each_step.powersgd,
    "onebit-adam": each_step.onebit_adam,
    "btm": rounds.certified,
}
