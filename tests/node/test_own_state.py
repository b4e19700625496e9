"""The state of an island that gossips: begun with, kept in checkpoints, taken back."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from saving_kit import keeper_at

from bootstrap.manifest import Manifest
from bootstrap.signed_manifest import SignedManifest
from bootstrap.state import state_digest
from gossip.membership.standing import first_announcement, with_places
from gossip.pairs.account import NAME_BYTES, Account
from node.checkpoints.checkpoint import CheckpointError, CheckpointStore
from node.checkpoints.index import Facts
from node.checkpoints.outer_files import OuterFiles, write_outer
from node.checkpoints.restoring import own_standing, restore
from node.entry.arrival import Arrived
from node.entry.fetching import Fetcher
from node.entry.targets import Target
from node.monitor.events import Event, Notice, Problem
from node.replicas.own_state import OwnReplica
from node.trainer.shared import SharedVectors
from protocols.codecs import RangeCodec
from protocols.errors import OperatorError
from protocols.identity import Identity
from protocols.memory.virtual_time import inline
from protocols.messages import Announce
from protocols.tasks import offload_to

SIZE = 4000
ME, DONOR = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2))


class Events:
    """What was emitted."""

    def __init__(self) -> None:
        self.seen: list[Event] = []

    def emit(self, event: Event) -> None:
        self.seen.append(event)


@dataclass
class Own:
    """The state of an island in fragments."""

    manifest: Manifest
    vectors: SharedVectors
    replicas: list[OwnReplica]

    @property
    def base(self) -> torch.Tensor:
        return self.vectors.tensors()[0]

    @property
    def rounds(self) -> list[int]:
        return [replica.place.round for replica in self.replicas]

    async def settle(self, round_: int) -> None:
        """Stand at ``round_``, those behind fragment 0 a round further."""
        self.base.fill_(3.0)
        for n, replica in enumerate(self.replicas):
            at = round_ + (n > 0)
            await replica.settle(own_standing(self.manifest.run_id, ME.peer_id, at, n))


@pytest.fixture(params=[1, 2])
def own(request: pytest.FixtureRequest) -> Iterator[Own]:
    manifest = Manifest.model_validate(
        {"mode": "push-sum", "model": {"n_layers": 2}, "rounds": {"fragments": request.param}}
    )
    vectors = SharedVectors.create(SIZE)
    cuts = [SIZE * n // request.param for n in range(request.param + 1)]
    replicas = [
        OwnReplica(
            manifest,
            ME.peer_id,
            vectors,
            RangeCodec("fp32", stop - start - 100),
            inline,
            fragment=n,
            cut=slice(start, stop),
        )
        for n, (start, stop) in enumerate(itertools.pairwise(cuts))
    ]
    yield Own(manifest, vectors, replicas)
    vectors.close()


class Elsewhere:
    """One other island, at a round of its own; an arrival that downloads its state."""

    def __init__(self, own: Own, round_: int, *, gone: bool = False) -> None:
        self.own, self.round, self.gone = own, round_, gone

    async def look(self) -> list[Announce]:
        run, places = self.own.manifest.run_id, []
        for n, replica in enumerate(self.own.replicas):
            base = torch.full((replica.size,), 7.0)
            place = own_standing(run, ME.peer_id, self.round, n).place
            places.append(replace(place, state=state_digest([base])[0]))
        return [
            with_places(first_announcement(DONOR.peer_id, places[0], version="0"), places),
        ]

    async def fetch(self, vectors: list[torch.Tensor], progress: Any, fragment: int = 0) -> Arrived:
        if self.gone:
            raise OperatorError("E502", "the swarm's state could not be fetched", "gone", "wait")
        vectors[0].fill_(7.0)
        state = own_standing(self.own.manifest.run_id, ME.peer_id, self.round, fragment)
        return Arrived(state, Target(self.round, b"", b"", 0, (DONOR.peer_id,)), {})


def fetcher(own: Own, other: Elsewhere, events: Events) -> tuple[Fetcher, Any]:
    node = SimpleNamespace(events=events, offload=inline)
    run = SimpleNamespace(manifest=own.manifest, peers=[DONOR.peer_id])
    made = Fetcher(node, run, own.replicas, own.base, lambda announce: None)  # type: ignore[arg-type]
    made.downloaded = True
    made._arrival = lambda ask: other  # type: ignore[assignment, return-value, method-assign]

    @asynccontextmanager
    async def still() -> Any:
        yield

    swarm = SimpleNamespace(
        membership=SimpleNamespace(alive=lambda now: []), now=lambda: 0.0, still=still
    )
    return made, swarm


async def test_a_checkpoint_is_copied_beside_the_event_loop(own: Own) -> None:
    made, _ = fetcher(own, Elsewhere(own, 9), Events())
    before, value = own.base.clone(), torch.full_like(own.base, 8.0)
    names = own.replicas[0].vectors
    states = tuple(
        own_standing(own.manifest.run_id, ME.peer_id, 3, n) for n in range(len(own.replicas))
    )
    restored: Any = SimpleNamespace(
        base=value,
        vectors=dict.fromkeys(names, value),
        states=states,
        residual=None,
        weights=(1.0,) * len(states),
    )
    seen: list[bool] = []

    async def offload(work: Any) -> Any:
        seen.append(torch.equal(own.base, before))
        return work()

    made.node.offload = offload
    await made._restore(restored)
    assert seen[0], "copied before anything was offloaded"
    assert torch.equal(own.base, value)
    assert [replica.place.round for replica in own.replicas] == [3] * len(states)


async def test_a_newcomer_begins_with_what_the_others_have_by_then(own: Own) -> None:
    await own.settle(4)
    events, other = Events(), Elsewhere(own, 9)
    made, swarm = fetcher(own, other, events)
    refresh = made.refresher(swarm)
    assert refresh is not None
    await refresh()
    assert own.base.unique().tolist() == [7.0]
    for replica in own.replicas:
        # the trainer has nothing of its own on top yet
        assert replica.sent.unique().tolist() == [3.0]
        assert replica.place.round == 9
        assert replica.place.state == state_digest(replica.state)[0]
    assert "round 9, not 4" in next(e.text for e in events.seen if isinstance(e, Notice))


@pytest.mark.parametrize("gone", [False, True])
async def test_what_was_fetched_is_kept_where_nothing_better_can_be_had(
    own: Own, *, gone: bool
) -> None:
    await own.settle(4)
    events, before = Events(), own.rounds
    made, swarm = fetcher(own, Elsewhere(own, 9 if gone else 4, gone=gone), events)
    await made._refresh(swarm)
    assert own.base.unique().tolist() == [3.0]
    assert own.rounds == before
    assert [type(e) for e in events.seen] == ([Problem] if gone else [])


def test_who_made_the_run_or_resumes_has_nothing_to_fetch(own: Own) -> None:
    made, swarm = fetcher(own, Elsewhere(own, 9), Events())
    made.downloaded = False
    assert made.refresher(swarm) is None


async def test_weights_and_rounds_of_all_fragments_are_kept_in_checkpoints(
    own: Own, tmp_path: Path
) -> None:
    await own.settle(5)
    weights, rounds = [], own.rounds
    for n, replica in enumerate(own.replicas):
        weights.append(1.125 + n)
        replica.here = partial(float, weights[n])
        assert replica.weight == weights[n]
    signed = SignedManifest.create(own.manifest, ME)
    store, events = CheckpointStore(tmp_path), Events()
    with store.draft() as draft:
        write_outer(draft, OuterFiles(own.base, {}, signed, None, tuple(weights), tuple(rounds)))
        store.commit(draft, Facts(run=signed.run_id.hex(), round=5, step=0, tokens=0))
    restored = restore(store, events)  # type: ignore[arg-type]
    assert restored is not None
    made, _ = fetcher(own, Elsewhere(own, 9), events)
    await own.settle(0)
    for replica in own.replicas:
        replica.blend.weight = 1.0
    await made.get(restored)
    assert [replica.blend.weight for replica in own.replicas] == weights
    assert own.rounds == rounds


@pytest.mark.parametrize(
    ("weights", "rounds"), [((), ()), ((1.0,) * 3, (5,) * 3), ((-1.0,) * 2, (5,) * 2)]
)
async def test_a_checkpoint_that_says_something_else_is_refused(
    own: Own, tmp_path: Path, weights: tuple[float, ...], rounds: tuple[int, ...]
) -> None:
    signed = SignedManifest.create(own.manifest, ME)
    store = CheckpointStore(tmp_path)
    with store.draft() as draft:
        write_outer(draft, OuterFiles(own.base, {}, signed, None, weights, rounds))
        store.commit(draft, Facts(run=signed.run_id.hex(), round=5, step=0, tokens=0))
    with pytest.raises(CheckpointError, match=r"fragments|weights"):
        restore(store, Events())  # type: ignore[arg-type]


async def test_a_checkpoint_has_the_weight_of_one_moment(own: Own, tmp_path: Path) -> None:
    """Also while a share that has come is being mixed in, which takes nothing from its account."""
    await own.settle(5)
    replica, account = own.replicas[0], Account(1.0)
    begun, mixed = threading.Event(), threading.Event()

    def mix() -> None:
        begun.set()
        mixed.wait(10)
        replica.blend.weight += 0.5

    replica.here = lambda: account.balance.own
    await account.change(lambda b: b.take(ME.peer_id, b"\0" * NAME_BYTES, 0.5))
    with ThreadPoolExecutor(2) as pool:
        keeper = keeper_at(tmp_path, [])
        keeper.replicas = own.replicas
        keeper.lineages = lambda: [cast(Any, None)] * len(own.replicas)
        keeper.offload = replica.offload = offload_to(pool)
        taking = asyncio.create_task(replica._alone(mix))
        while not begun.is_set():  # noqa: ASYNC110 - of a thread
            await asyncio.sleep(0.001)
        found = (await keeper._outer()).files
        mixed.set()
        await taking
    assert found.weights == (1.5, *[1.0] * (len(own.replicas) - 1))
    assert found.rounds == tuple(own.rounds)


async def test_shares_that_fail_together_all_come_back(own: Own) -> None:
    replica = own.replicas[0]
    at_once, most = 0, 0

    async def offload(work: Callable[[], Any]) -> Any:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, work)
        finally:
            at_once -= 1

    with ThreadPoolExecutor(2) as pool:
        replica.offload = offload
        replica.sent.normal_(generator=torch.Generator().manual_seed(1))
        await replica.start()
        before = replica.blend.fast.clone()
        letter, weight = await replica.encode(2, "fp32")
        await asyncio.gather(*[replica.take_back(letter, weight) for _ in range(2)])
    assert most == 1  # each reads what the other writes
    assert replica.blend.weight == pytest.approx(1.0)
    assert torch.allclose(replica.blend.fast, before, atol=1e-5)
