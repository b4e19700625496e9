"""The state of an island that gossips: begun with, kept in checkpoints, taken back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bootstrap.manifest import Manifest
from bootstrap.signed_manifest import SignedManifest
from bootstrap.state import state_digest
from gossip.standing import first_announcement
from node.arrival import Arrived, Target
from node.checkpoint import CheckpointStore, Facts
from node.fetching import Fetcher
from node.monitor.events import Event, Notice, Problem
from node.outer_files import OuterFiles, write_outer
from node.own_state import OwnReplica
from node.saving import own_standing, restore
from node.trainer.shared import SharedVectors
from protocols.codecs import RangeCodec
from protocols.errors import OperatorError
from protocols.identity import Identity
from protocols.messages import Announce
from protocols.virtual_time import inline

SIZE = 4000
ME, DONOR = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2))
MANIFEST = Manifest.model_validate({"mode": "push-sum", "model": {"n_layers": 2}})


class Events:
    """What was emitted."""

    def __init__(self) -> None:
        self.seen: list[Event] = []

    def emit(self, event: Event) -> None:
        self.seen.append(event)


@pytest.fixture
def replica() -> Iterator[OwnReplica]:
    vectors = SharedVectors.create(SIZE)
    own = OwnReplica(MANIFEST, ME.peer_id, vectors, RangeCodec("fp32", SIZE - 100), inline)
    yield own
    vectors.close()


class Elsewhere:
    """One other island, at a round of its own; an arrival that downloads its state."""

    def __init__(self, round_: int, *, gone: bool = False) -> None:
        self.round, self.gone = round_, gone
        self.base = torch.full((SIZE,), 7.0)

    async def look(self) -> list[Announce]:
        place = own_standing(MANIFEST.run_id, ME.peer_id, self.round).place
        return [
            first_announcement(
                DONOR.peer_id, replace(place, state=state_digest([self.base])[0]), version="0"
            )
        ]

    async def fetch(self, vectors: list[torch.Tensor], progress: Any) -> Arrived:
        if self.gone:
            raise OperatorError("E502", "the swarm's state could not be fetched", "gone", "wait")
        vectors[0].copy_(self.base)
        state = own_standing(MANIFEST.run_id, ME.peer_id, self.round)
        return Arrived(state, Target(self.round, b"", b"", 0, (DONOR.peer_id,)), {})


def fetcher(replica: OwnReplica, other: Elsewhere, events: Events) -> tuple[Fetcher, Any]:
    node = SimpleNamespace(events=events, offload=inline)
    run = SimpleNamespace(manifest=MANIFEST, peers=[DONOR.peer_id])
    made = Fetcher(node, run, [replica], replica.base, lambda announce: None)  # type: ignore[arg-type]
    made._downloaded = True
    made._arrival = lambda ask: other  # type: ignore[assignment, return-value, method-assign]

    @asynccontextmanager
    async def still() -> Any:
        yield

    swarm = SimpleNamespace(
        membership=SimpleNamespace(alive=lambda now: []), now=lambda: 0.0, still=still
    )
    return made, swarm


async def test_a_newcomer_begins_with_what_the_others_have_by_then(replica: OwnReplica) -> None:
    replica.base.fill_(3.0)
    await replica.settle(own_standing(MANIFEST.run_id, ME.peer_id, 4))
    events, other = Events(), Elsewhere(9)
    made, swarm = fetcher(replica, other, events)
    refresh = made.refresher(swarm)
    assert refresh is not None
    await refresh()
    assert replica.base.unique().tolist() == [7.0]
    assert replica.sent.unique().tolist() == [3.0]  # the trainer has nothing of its own on top yet
    assert replica.place.round == 9
    assert replica.place.state == state_digest(replica.state)[0]
    assert "round 9, not 4" in next(e.text for e in events.seen if isinstance(e, Notice))


@pytest.mark.parametrize("other", [Elsewhere(4), Elsewhere(9, gone=True)])
async def test_what_was_fetched_is_kept_where_nothing_better_can_be_had(
    replica: OwnReplica, other: Elsewhere
) -> None:
    replica.base.fill_(3.0)
    await replica.settle(own_standing(MANIFEST.run_id, ME.peer_id, 4))
    events = Events()
    made, swarm = fetcher(replica, other, events)
    await made._refresh(swarm)
    assert replica.base.unique().tolist() == [3.0]
    assert replica.place.round == 4
    assert [type(e) for e in events.seen] == ([Problem] if other.gone else [])


def test_who_made_the_run_or_resumes_has_nothing_to_fetch(replica: OwnReplica) -> None:
    made, swarm = fetcher(replica, Elsewhere(9), Events())
    made._downloaded = False
    assert made.refresher(swarm) is None


async def test_push_sums_weight_is_kept_in_checkpoints(replica: OwnReplica, tmp_path: Path) -> None:
    replica.blend.weight, replica.waiting = 0.625, lambda: 0.5
    assert replica.weight == 1.125
    signed = SignedManifest.create(MANIFEST, ME)
    store, events = CheckpointStore(tmp_path), Events()
    with store.draft() as draft:
        write_outer(draft, OuterFiles(replica.base, replica.vectors, signed, None, replica.weight))
        store.commit(draft, Facts(run=signed.run_id.hex(), round=5, step=0, tokens=0))
    restored = restore(store, events)  # type: ignore[arg-type]
    assert restored is not None
    made, _ = fetcher(replica, Elsewhere(9), events)
    replica.blend.weight = 1.0
    await made.get(restored)
    assert replica.blend.weight == 1.125
    assert replica.place.round == 5
