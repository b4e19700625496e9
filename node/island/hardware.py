"""What this machine trains on: its device, how many ranks, and how they share the model."""

from __future__ import annotations

import os
from typing import Any, Literal

import torch

from bootstrap.manifest import Manifest
from node.config import NodeConfig
from node.errors import operator_error
from node.island.cores import threads_of
from node.trainer.rank import pick_device
from protocols.errors import OperatorError

Hardware = tuple[Literal["cpu", "cuda"], int]  # kind of device, ranks of this host


def device_kind(config: NodeConfig) -> Literal["cpu", "cuda"]:
    """What to train on; whether it works shows later."""
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device


def leave_cores_to_ranks(config: NodeConfig) -> None:
    """Have this process compute with one thread a call where ranks train on the same cores.

    It works in pieces of some 100,000 elements. Split over threads each piece would wait until
    another core, which ranks keep busy, has a moment for its other half.
    """
    if config.role == "island" and device_kind(config) == "cpu":
        torch.set_num_threads(1)


def hardware(config: NodeConfig, hosts: int = 1) -> Hardware:
    """Device and number of ranks of each of an island's hosts.

    Raises E403 where the device is not there, E204 for nonsense.
    """
    device = device_kind(config)
    devices = max(1, torch.cuda.device_count()) if device == "cuda" else 0
    try:
        ranks = config.ranks_wanted(devices, hosts)
    except ValueError as error:
        raise _misfit(error) from error
    pick_device(device, ranks - 1)
    return device, ranks


def training(
    config: NodeConfig, manifest: Manifest, parameters: int, found: Hardware, hosts: int = 1
) -> tuple[dict[str, Any], str]:
    """Settings of the trainer that are this island's, and why the layout was chosen, if it was.

    Raises E204 where layout and run do not fit.
    """
    device, ranks = found
    memory = device_memory(device, ranks)
    try:
        dims, why = config.dims(
            ranks * hosts, hosts, memory, parameters, manifest.model, manifest.data
        )
    except ValueError as error:
        raise _misfit(error) from error
    return {
        "device": device,
        "ranks": dims.size,
        "hosts": hosts,
        "dims": dims,
        "threads": threads_of(config.threads, ranks),
        "micro_batch": config.micro_batch,
        "bf16": None if config.precision == "auto" else config.precision == "bf16",
        "recompute": config.recompute,
        "offload": config.offload,
        "compile": config.compile,
    }, why


def device_memory(device: str, ranks: int) -> int:
    """Bytes of memory for one rank: a GPU's, or its part of the host's."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


def _misfit(error: ValueError) -> OperatorError:
    return operator_error(
        "E204",
        "the layout does not fit",
        why=str(error),
        fix="correct the flag that is named, or give --layout auto",
    )
