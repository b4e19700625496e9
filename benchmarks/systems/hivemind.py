"""hivemind's DecentralizedAverager over its own DHT and libp2p daemon."""

from __future__ import annotations

import ctypes
import multiprocessing
import time
from contextlib import suppress
from typing import Any

import hivemind
import torch
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.partition import AllreduceException
from hivemind.compression import Float16Compression, NoCompression

from benchmarks.worker import SIZE, fill, options, say, wait_for_turn

COMPRESSION = {"fp32": NoCompression, "fp16": Float16Compression}
TIMEOUT_S = 35.0
ATTEMPTS = 3  # at times it finds no group; together within a turn (benchmarks.fleet.TURN_S)


class Timed(hivemind.DecentralizedAverager):
    """The averager, with a note of when its group was found."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self.found = multiprocessing.Value(ctypes.c_double, 0.0)
        super().__init__(*arguments, **settings)

    async def _run_allreduce_inplace_(
        self, tensors: Any, group_info: GroupInfo, group_id: bytes | None = None, **settings: Any
    ) -> None:
        self.found.value = time.monotonic()
        await super()._run_allreduce_inplace_(tensors, group_info, group_id, **settings)


def average(averager: Timed) -> tuple[Any, int]:
    """Who averaged, and how many attempts had found no group before."""
    for failed in range(ATTEMPTS):
        with suppress(AllreduceException):
            return averager.step(timeout=TIMEOUT_S), failed
    raise RuntimeError(f"no group in {ATTEMPTS} attempts")


def main() -> None:
    """Average in place each turn, until killed."""
    given = options()
    host = f"/ip4/{given['address']}/tcp/0"
    peers = given["rendezvous"].split() or None
    dht = hivemind.DHT(initial_peers=peers, host_maddrs=[host], start=True)
    if given["rank"] == 0:
        say("opened", rendezvous=" ".join(map(str, dht.get_visible_maddrs())))
    averager = Timed(
        [torch.empty(given.get("size", SIZE))],
        dht,
        prefix="bench",
        target_group_size=given["count"],
        min_group_size=given["count"],
        min_matchmaking_time=2.0,
        request_timeout=1.0,
        compression=COMPRESSION[given["codec"]](),
        start=True,
    )
    say("met")
    turn = 0
    while True:
        with averager.get_tensors() as (vector,):
            fill(vector, given["rank"], turn)
        wait_for_turn()
        asked = time.monotonic()
        group, failed = average(averager)
        end = time.monotonic()
        whole = group is not None and len(group) == given["count"]
        say("took", asked=asked, start=averager.found.value, end=end, whole=whole, failed=failed)
        turn += 1


if __name__ == "__main__":
    main()
