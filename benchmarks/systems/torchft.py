"""torchft's Manager over gloo: a quorum, an all-reduce in place, and a commit each turn.

All time-outs are its defaults. The lighthouse lives in the first worker.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from benchmarks.worker import SIZE, fill, options, say, use_gloo_on, wait_for_turn


def main() -> None:
    """Take a step each turn, until killed."""
    given = options()
    address, count = given["address"], given["count"]
    use_gloo_on(address)
    lighthouse_address = given["rendezvous"]
    if given["rank"] == 0:
        # the last turn of the survivors has fewer replicas
        lighthouse = LighthouseServer(bind=f"{address}:0", min_replicas=given.get("least", count))
        lighthouse_address = f"http://{address}:{lighthouse.address().rpartition(':')[2]}"
        say("opened", rendezvous=lighthouse_address)
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    vector = torch.empty(given.get("size", SIZE))

    def load(state: Any) -> None:
        vector.copy_(state["vector"])

    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"vector": vector},
        min_replica_size=given.get("least", count),
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        hostname=address,
        lighthouse_addr=lighthouse_address,
        replica_id=f"worker_{given['rank']}",
        init_sync=False,  # all begin alike
    )
    say("met")
    turn = 0
    while True:
        fill(vector, given["rank"], turn)
        wait_for_turn()
        asked = time.monotonic()
        manager.start_quorum()
        manager.wait_quorum()
        start = time.monotonic()
        say("stage", stage="sending", round=turn)
        manager.allreduce(vector).wait()
        committed = manager.should_commit()
        end = time.monotonic()
        whole = committed and manager.num_participants() == count
        say("took", asked=asked, start=start, end=end, whole=whole)
        turn += 1


if __name__ == "__main__":
    main()
