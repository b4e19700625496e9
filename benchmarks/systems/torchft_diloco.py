"""torchft's DiLoCo over gloo: ``python -m benchmarks.systems.torchft_diloco JSON``.

One process an island, H inner steps between two syncs of the whole model, no quantisation (its
kernels need a GPU), its syncs delayed by as many steps as Atoll's overlap. The lighthouse lives in
the first one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

from benchmarks.systems.island_model import MANIFEST, batches, gradients, new_model, report, until
from node.trainer.rank import set_up_arithmetic


def main() -> None:
    """Train for so many seconds with the others."""
    set_up_arithmetic(1)
    given = json.loads(sys.argv[1])
    address, meeting = given["address"], Path(given["meeting"])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if address.startswith("127.") else "eth0"
    if given["rank"] == 0:
        lighthouse = LighthouseServer(bind=f"{address}:0", min_replicas=given["count"])
        port = lighthouse.address().rpartition(":")[2]
        partial = meeting.with_suffix(".partial")
        partial.write_text(f"http://{address}:{port}")
        partial.rename(meeting)
    while not meeting.exists():
        time.sleep(0.05)
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    model, inner = new_model()
    outer = torch.optim.SGD(
        model.parameters(), lr=MANIFEST.outer.lr, momentum=MANIFEST.outer.momentum, nesterov=True
    )

    def load(state: Any) -> None:
        model.load_state_dict(state["model"])

    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict()},
        min_replica_size=given["count"],
        use_async_quorum=False,  # DiLoCo asks for that
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        hostname=address,
        lighthouse_addr=meeting.read_text(),
        replica_id=f"island_{given['rank']}",
        init_sync=False,  # all begin alike
    )
    data = batches(Path(given["text"]))
    steps: list[float] = []
    how = {
        "sync_every": MANIFEST.rounds.inner_steps,
        "fragment_sync_delay": MANIFEST.rounds.overlap_steps,
        "use_bucketization": True,
    }
    with DiLoCo(manager, [model], inner, outer, **how):
        start = 0.0
        for _ in until(given["seconds"]):
            if len(steps) == 2 * MANIFEST.rounds.inner_steps:  # the first syncs open connections
                start, warm = time.monotonic(), len(steps)
            began = time.monotonic()
            gradients(model, *next(data))
            inner.step()  # every H-th also syncs
            inner.zero_grad()
            steps.append(time.monotonic() - began)
        report(steps[warm:], time.monotonic() - start)
    os._exit(0)  # its threads do not end by themselves


if __name__ == "__main__":
    main()
