"""gloo's all-reduce by torch.distributed: no encryption, all trusted, nobody may fail."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.worker import SIZE, fill, options, say, use_gloo_on, wait_for_turn


def main() -> None:
    """All-reduce in place each turn, until killed."""
    given = options()
    place = given["rendezvous"] or tempfile.mkdtemp(prefix="gloo-")
    if given["rank"] == 0:
        say("opened", rendezvous=place)
    use_gloo_on(given["address"])
    store = dist.FileStore(str(Path(place) / "store"), given["count"])
    dist.init_process_group("gloo", store=store, rank=given["rank"], world_size=given["count"])
    vector = torch.empty(given.get("size", SIZE))
    say("met")
    turn = 0
    while True:
        fill(vector, given["rank"], turn)
        wait_for_turn()
        asked = time.monotonic()
        dist.barrier()
        start = time.monotonic()
        dist.all_reduce(vector)
        say("took", asked=asked, start=start, end=time.monotonic())
        turn += 1


if __name__ == "__main__":
    main()
