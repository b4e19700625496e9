"""A large swarm that is not there: the state and history of a node among many others."""

from __future__ import annotations

import math
import random

from node.monitor.event_log import EventLog
from node.monitor.events import CheckpointSaved, PeerJoined, RoundDone, Step
from node.monitor.history import History
from node.monitor.history_columns import PHASES
from node.monitor.state import NodeState
from node.monitor.views import (
    MAX_LINKS,
    GpuView,
    KnownLinks,
    LinkView,
    MachineView,
    NodeView,
    PeerView,
    RunView,
    Traffic,
)

GB = 2**30
REGIONS = ("eu-north", "eu-west", "us-east", "us-west", "ap-south", "sa-east")


class Imagined:
    """``islands`` islands and ``rounds`` rounds, as one of them would have seen it."""

    def __init__(self, islands: int, rounds: int, *, seed: int = 0, history: History | None = None):
        self.random = random.Random(seed)
        self.now = 1_790_000_000.0 - 60.0 * rounds
        self.log = EventLog(clock=lambda: self.now)
        self.ids = [f"12D3KooW{self.random.getrandbits(220):044x}" for _ in range(islands)]
        self.total = max(1, 2 * rounds)
        self.round = 0
        self.merged = [0] * islands
        self.history = history or History()
        self.history.begin("8c41")
        self.log.subscribe(self.history)
        node = NodeView(
            peer=self.ids[0],
            name="isle-00",
            version="0.1.0",
            device="cuda",
            listen="0.0.0.0:4390",
            public_addr="203.0.113.7:4390",
            join_address=f"203.0.113.7:4390/{self.ids[0]}",
            started=self.now,
        )
        run = RunView(id="8c41", label="deep-sea-8c41", total_rounds=self.total, manifest={})
        self.state = NodeState(node, log=self.log, run=run, clock=lambda: self.now)
        self.state.status = "active"
        self.state.parameters = 1_300_000_000
        self.history.run = "8c41"
        providers = self.state.providers
        providers.peers = self.peers
        providers.links = self.links
        providers.all_links = self.all_links
        providers.traffic = lambda: {
            "gradients": Traffic(self.round * 9 * 10**6, self.round * 8 * 10**6),
            "state": Traffic(3 * 10**9, 0),
            "control": Traffic(self.round * 90_000, self.round * 88_000),
            "dht": Traffic(4_100_000, 3_900_000),
        }
        providers.machine = lambda: MachineView(
            cores=64,
            load=12.5,
            memory_total=512 * GB,
            memory_available=301 * GB,
            memory_used=61 * GB,
            disk_total=4000 * GB,
            disk_free=2710 * GB,
            gpus=tuple(
                GpuView(
                    index=index,
                    name="NVIDIA H100 80GB HBM3",
                    utilisation=0.9 + 0.01 * index,
                    memory_used=61 * GB,
                    memory_total=80 * GB,
                    temperature_c=58.0 + index,
                    power_w=640.0,
                )
                for index in range(8)
            ),
        )
        self.log.emit(PeerJoined(peer=self.ids[-1], name=f"isle-{islands - 1:02d}"))
        for _ in range(rounds):
            self.step()
        self.log.emit(CheckpointSaved(round=self.round - 1, path="/c", bytes=10**9, seconds=4.2))

    def loss(self) -> float:
        """A curve like those of real runs."""
        return 2.1 + 3.4 * math.exp(-self.round / (0.07 * self.total)) + 0.4 / (1 + self.round)

    def step(self) -> None:
        """One more round, a minute later."""
        self.now += 60.0
        noise, loss = self.random.gauss, self.loss()
        self.log.emit(
            Step(
                step=50 * (self.round + 1),
                round=self.round,
                loss=loss,
                grad_norm=0.8,
                lr=3e-4,
                tokens=65_536,
                tokens_per_second=41_000.0,
                seconds=1.6,
                data_s=0.02,
                micro_batch=16,
            )
        )
        late = self.ids[self.round % len(self.ids)]
        islands = {}
        for index, peer in enumerate(self.ids):
            tokens = 0 if peer == late and self.round % 7 == 0 else 3_276_800 - 9_000 * index
            self.merged[index] += tokens
            islands[peer] = {
                "loss": round(loss + noise(0, 0.03), 5),
                "ready_s": round(abs(noise(0, 0.8)) * (4 if peer == late else 1), 5),
                "tokens": tokens,
                "distance": round(abs(noise(0.05, 0.008)), 5),
                "apart": round(abs(noise(0.07, 0.008)), 5),
                "scale": 0.42 if index == 3 else 1.0,
            }
        self.state.round = self.round
        self.log.emit(
            RoundDone(
                round=self.round,
                outcome="degraded" if self.round % 7 == 0 else "committed",
                total_rounds=self.total,
                members=len(self.ids) - (self.round % 7 == 0),
                live=len(self.ids),
                loss=loss + noise(0, 0.02),
                validation_loss=loss + 0.05 if self.round % 4 == 0 else None,
                tokens=sum(int(item["tokens"]) for item in islands.values()),
                sync_s=4.0,
                wait_s=3.1,
                utilisation=0.94 + noise(0, 0.01),
                sent_bytes=9 * 10**6,
                received_bytes=8 * 10**6,
                raw_bytes=64 * 10**6,
                consensus=abs(noise(0.05, 0.004)),
                consensus_after=0.0,
                agreeing=len(self.ids),
                state="ab" * 32,
                eta_s=60.0 * (self.total - self.round),
                dropped={late: "its work did not arrive"} if self.round % 7 == 0 else {},
                phases=dict(
                    zip(
                        PHASES,
                        (56.0, *(abs(noise(m, 0.3 * m)) for m in (1.4, 0.3, 2.1, 0.2, 0.3))),
                        strict=True,
                    )
                ),
                islands=islands,
            )
        )
        self.round += 1

    def peers(self) -> list[PeerView]:
        """Everybody, this node first; one is silent, one joins."""
        views = []
        for index, peer in enumerate(self.ids):
            status = {7: "joining", 11: "suspect"}.get(index, "active")
            views.append(
                PeerView(
                    peer=peer,
                    name=f"isle-{index:02d}",
                    status=status,
                    region=REGIONS[index % len(REGIONS)],
                    version="0.1.0" if index % 9 else "0.1.1",
                    round=self.round - (status != "active"),
                    loss=self.loss() + 0.01 * (index % 5),
                    tokens_per_second=40_000.0 + 311 * index,
                    total_tokens=self.merged[index],
                    link="direct" if index else "self",
                    address="public IPv4" if index % 3 else "public IPv6",
                    rtt_s=0.012 + 0.003 * index if index else None,
                    own_rtt_s=0.02 + 0.01 * index,
                    upload=2e7 + 1e6 * index,
                    download=3e7 + 2e6 * index,
                    agrees=True if status == "active" else None,
                    distance=0.05,
                    clock_offset_s=0.01 * (index % 7) if index else None,
                    silent_s=30.0 if status == "suspect" else 0.4,
                )
            )
        return views

    def links(self) -> list[LinkView]:
        """From and to this node."""
        me, others = self.ids[0], self.ids[1:]
        return [
            *(LinkView(me, peer, 1e6 * 1.11**i) for i, peer in enumerate(others)),
            *(LinkView(peer, me, 2e6 * 1.1**i) for i, peer in enumerate(others)),
        ]

    def all_links(self) -> KnownLinks:
        """Of everybody: this node's own, and all others as one end told them."""
        others = [
            LinkView(one, two, 1e6 * (1 + (7 * i + 3 * j) % 40), 0.004 * (1 + (i + j) % 30), 9.0)
            for i, one in enumerate(self.ids)
            for j, two in enumerate(self.ids)
            if i and j and i != j and (i + j) % 11
        ]
        mine = [LinkView(v.source, v.target, v.bytes_per_second, 0.02) for v in self.links()]
        known = mine + others
        return KnownLinks(known[:MAX_LINKS], max(0, len(known) - MAX_LINKS))
