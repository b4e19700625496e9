"""Modes by name: what runs when a scenario names one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from node.simulate import each_step, owners, pairs, streams, swarm
from node.simulate.world import World

MODES: dict[str, Callable[[World], Awaitable[None]]] = {
    "diloco": swarm.diloco,
    "streaming": streams.streaming,
    "eager": streams.eagerly,
    "gossip": pairs.pairs,
    "push-sum": pairs.pairs,
    "async": owners.asynchronously,
    "server": owners.server,
    "fedavg": owners.fedavg,
    "sparta": each_step.sparse_averaging,
    "allreduce": each_step.allreduce,
    "powersgd": each_step.powersgd,
    "onebit-adam": each_step.onebit_adam,
    "btm": each_step.branches,
}
