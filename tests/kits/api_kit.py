"""A node's state with a clock in hand, and its API."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from node.monitor.api import ApiServer, make_app
from node.monitor.event_log import EventLog
from node.monitor.events import (
    RoundDone,
    Step,
)
from node.monitor.history import History
from node.monitor.state import NodeState
from node.monitor.views import LinkView, NodeView, PeerView, RunView, Traffic

KEY = "k" * 20
PEER = "12D3KooWabcdefgh"


class Kit:
    """A node's state with a clock in hand."""

    def __init__(self, role="island"):
        self.now = 1000.0
        self.log = EventLog(clock=lambda: self.now)
        self.state = NodeState(
            NodeView(
                peer=PEER,
                role=role,
                name="alps",
                device="cpu",
                join_address=f"a:1/{PEER}",
                started=900.0,
            ),
            log=self.log,
            run=RunView(id="8c41", label="tiny-docs-8c41", total_rounds=100, manifest={"seed": 0}),
            clock=lambda: self.now,
        )

    def live(self):
        self.state.status, self.state.round = "active", 4
        self.log.emit(
            Step(step=40, round=3, loss=2.5, grad_norm=0.9, tokens=2048, tokens_per_second=14021.0)
        )
        self.log.emit(
            RoundDone(
                round=4,
                members=2,
                live=3,
                loss=2.4,
                validation_loss=2.45,
                sent_bytes=1000,
                received_bytes=900,
                raw_bytes=8000,
                codec="int4",
                consensus=0.5,
                consensus_after=0.1,
                agreeing=3,
                eta_s=120.0,
                phases={"exchange": 0.5, "brew": 1.0},
            )
        )
        self.state.providers.peers = lambda: [
            PeerView(peer=PEER, name="alps", status="active", link="self", round=4, loss=2.4),
            PeerView(peer="12D3KooWzzzzzzzz", status="odd\x1b", rtt_s=0.02, link="direct"),
        ]
        self.state.providers.traffic = lambda: {"gradients": Traffic(5, 6), "gossip": Traffic(7, 8)}
        self.state.providers.links = lambda: [LinkView(PEER, "x", 1e6)]
        return self


@asynccontextmanager
async def listening(kit: Kit, key: str = "") -> AsyncIterator[ApiServer]:
    """The API of it."""
    app = make_app(kit.state, kit.log, History(), key=key)
    server = ApiServer(app, "127.0.0.1:0", may_move=False)
    await server.start()
    try:
        yield server
    finally:
        await server.aclose()
