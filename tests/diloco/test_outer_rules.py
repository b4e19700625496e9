"""Outer optimizers in real rounds: the same bits however the work is cut, and in every state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bootstrap.manifest import Manifest
from bootstrap.manifest_rounds import OF_GRADIENTS
from bootstrap.signed_manifest import SignedManifest
from bootstrap.state import state_digest
from diloco.optimizers import RULES, Rates, Rule, named
from gossip.plans.certificate import genesis
from node.checkpoints.checkpoint import CheckpointError, CheckpointStore
from node.checkpoints.index import Facts
from node.checkpoints.outer_files import OuterFiles, read_newest, write_outer
from node.replicas.replica import OuterReplica
from node.run_rules import kind_of
from node.trainer.layout import Layout
from node.trainer.shared import SharedVectors
from protocols.codecs import RangeCodec
from protocols.counts import pack_counts
from protocols.identity import Identity, PeerId
from protocols.memory.virtual_time import inline
from protocols.messages import Certificate, Contributor, Outcome, PartResult

N = 70_003
NAMES = sorted(RULES)
ME, OTHER = (Identity.from_seed(bytes([i]) * 32).peer_id for i in (1, 2))


def noise(seed: int, size: int = N) -> Tensor:
    """With zeros and subnormals among it."""
    found = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 1e-2
    found[::97] = 0
    found[::89] = 1e-40
    return found


def rates(rule: Rule, count: int) -> Rates:
    return Rates(rule.lr * 0.9, rule.momentum, count, share=0.5, weight=8.0 + count)


def walked(rule: Rule, chunk: int = N, device: str = "cpu") -> list[bytes]:
    """Where a rule gets to in five rounds, cut into chunks; all bits of its state."""
    params = noise(0).to(device)
    vectors = rule.init(params).vectors
    for count in range(1, 6):
        merged = noise(count).to(device)
        for start in range(0, N, chunk):
            here = slice(start, start + chunk)
            parts = {name: vectors[name][here] for name in rule.vectors}
            parts |= {name: vectors[name] for name in rule.numbers}
            rule.step(parts, merged[here], params[here], rates(rule, count))
        if rule.end is not None:
            rule.end(vectors, params, rates(rule, count))
    return [one.cpu().numpy().tobytes() for one in (params, *vectors.values())]


@pytest.mark.parametrize("name", NAMES)
def test_chunks_and_threads_do_not_change_a_bit(name: str) -> None:
    expected = walked(named(name))
    assert walked(named(name), 4099) == expected
    torch.set_num_threads(3)
    assert walked(named(name)) == expected
    assert walked(named(name), 65_536) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_gives_the_same_bits(name: str) -> None:
    assert walked(named(name), device="cuda") == walked(named(name))


_made: list[tuple[OuterReplica, SharedVectors]] = []


@pytest.fixture(autouse=True)
def _shared_memory() -> Iterator[None]:
    yield
    while _made:
        made, vectors = _made.pop()
        del made.base, made.sent
        vectors.close()


def replica(name: str, *, owners: str = "members", **outer: Any) -> OuterReplica:
    codec = "top12" if name == "sparseloco" else "fp32"
    mode = "allreduce" if name in OF_GRADIENTS else "diloco"
    rounds = {} if name in OF_GRADIENTS else {"codec": codec, "owners": owners}
    manifest = Manifest.model_validate(
        {"mode": mode, "outer": {"optimizer": name, **outer}, "rounds": rounds}
    )
    layout = Layout.of_manifest(manifest)
    # where gradients travel as factors, what is sent of a model depends on its matrices
    size = layout.size if named(name).factors else N
    vectors = SharedVectors.create(size)
    made = kind_of(manifest, layout)(
        manifest, ME, vectors, RangeCodec(codec, size), inline, (ME, OTHER)
    )
    _made.append((made, vectors))
    made.base.copy_(noise(7, size))
    return made


async def commit(made: OuterReplica, seed: int, contributors: int = 1, weight: float = 1.0) -> None:
    """A round that brings ``noise(seed)``, of one or both of the two in office."""
    place, size = made.place, made.size
    data = torch.empty(made.codec.encoded_size(0, size), dtype=torch.uint8)
    made.codec.encode(0, noise(seed, size), data)
    part = PartResult(
        0, place.round, 0, size, OTHER, made.codec.name, bytes(32),
        pack_counts([size] * contributors), bytes(32), b"",
    )  # fmt: skip
    outcome = Outcome(
        0, place.round, place.previous, place.state, made.codec.name,
        tuple(Contributor(peer, weight, 1, True) for peer in (OTHER, ME)[:contributors]),
        (part,), (ME, OTHER), place.work + 1,
    )  # fmt: skip
    run = made.manifest.run_id
    await made.apply(Certificate(run, 0, 0, (ME, OTHER), outcome, ()), {(0, size): data})


@pytest.mark.parametrize("name", NAMES)
async def test_who_downloads_a_state_goes_on_with_the_same_bits(name: str) -> None:
    """A joiner has all that the optimizer keeps, or its next step is another one."""
    first, joiner = replica(name), replica(name)
    await first.settle()
    for seed in range(3):
        await commit(first, seed)
    vectors = first.state
    for mine, theirs in zip(joiner.state, vectors, strict=True):
        mine.copy_(theirs)
    joiner._place = first.place  # as a download's certificate would put it
    for seed in range(3, 6):
        await commit(first, seed)
        await commit(joiner, seed)
        assert joiner.place == first.place
    assert first.place.previous != genesis(first.manifest.run_id)
    assert state_digest(first.state)[0] == first.place.state


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_holds_all_of_it(name: str, tmp_path: Path) -> None:
    made = replica(name)
    for number, vector in enumerate(made.vectors.values()):
        vector.copy_(noise(number, len(vector)))
    signed = SignedManifest.create(made.manifest, Identity.from_seed(bytes(32)))
    store = CheckpointStore(tmp_path)
    with store.draft() as draft:
        write_outer(draft, OuterFiles(made.base, made.vectors, signed))
        facts = Facts(run=signed.run_id.hex(), round=1, step=1, tokens=1)
        path = store.commit(draft, facts).path
    back = read_newest(path)[1]
    assert list(back.vectors) == list(made.vectors)
    for key, vector in made.vectors.items():
        assert back.vectors[key].equal(vector)


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    made = replica("adam")
    signed = SignedManifest.create(made.manifest, Identity.from_seed(bytes(32)))
    store = CheckpointStore(tmp_path)
    with store.draft() as draft:
        write_outer(draft, OuterFiles(made.base, {"m": made.base}, signed))
        facts = Facts(run=signed.run_id.hex(), round=1, step=1, tokens=1)
        path = store.commit(draft, facts).path
    with pytest.raises(CheckpointError):
        read_newest(path)


async def test_rounds_with_some_of_the_islands_are_parts_of_one_nesterov_step() -> None:
    """One of two, then the other: as far as both at once with their mean, momentum included."""
    apart, once = (replica("delayed-nesterov", warmup_rounds=0) for _ in range(2))
    await commit(apart, 1, contributors=2)
    await commit(once, 1, contributors=2)
    rate = apart._rates(_outcome(apart, 1))
    assert rate.share == 0.5
    assert apart._rates(_outcome(apart, 2)).share == 1.0
    assert apart.vectors["shares"].item() == 0.0
    await commit(apart, 2, contributors=1)
    assert apart.vectors["shares"].item() == 0.5
    before = apart.vectors["v"].clone()
    await commit(apart, 2, contributors=1)
    assert apart.vectors["shares"].item() == 0.0
    assert not apart.vectors["v"].equal(before)
    await commit(once, 2, contributors=2)
    assert torch.allclose(apart.vectors["v"], once.vectors["v"], rtol=1e-5, atol=1e-9)
    assert torch.allclose(apart.base, once.base, rtol=1e-5, atol=1e-8)


def test_an_arrival_is_one_of_as_many_islands_whoever_merges_it() -> None:
    """As the outcome counts them: of two in office, who owns parts says nothing of who trains."""
    one = replica("delayed-nesterov", owners="servers", warmup_rounds=0)
    outcome = _outcome(one, 1)  # of OTHER's work
    for owner in (ME, OTHER):
        parts = (replace(outcome.parts[0], owner=owner),)
        for servers, share in ((0, 0.5), (1, 1.0), (2, 1.0)):
            assert one._rates(replace(outcome, parts=parts, servers=servers)).share == share


async def test_a_newcomer_that_is_alone_in_its_round_counts_for_less() -> None:
    usual, ramped = (replica("delayed-nesterov", warmup_rounds=0) for _ in range(2))
    moved = []
    for one, weight in ((usual, 1.0), (ramped, 0.25)):
        await commit(one, 1)
        await commit(one, 1)  # with the momentum of both
        before = one.base.clone()
        await commit(one, 1, weight=weight)
        moved.append((one.base - before).norm().item())
    assert moved[1] == pytest.approx(moved[0] / 4, rel=1e-3)


async def test_the_outer_rates_warm_up_by_full_rounds_and_not_by_arrivals() -> None:
    one = replica("delayed-nesterov", warmup_rounds=10, lr=0.7, lr_start=1.0)
    for _ in range(6):  # one of two: three Nesterov steps
        await commit(one, 2, contributors=1)
    assert one.vectors["turns"].item() == 3
    assert one._rates(_outcome(one, 1)).lr == pytest.approx(1.0 - 0.3 * 3 / 10)


def _outcome(made: OuterReplica, contributors: int) -> Outcome:
    part = PartResult(
        0, 0, 0, N, OTHER, "fp32", bytes(32), pack_counts([N] * contributors), bytes(32), b""
    )
    who = tuple(Contributor(peer, 1.0, 1, True) for peer in (OTHER, ME)[:contributors])
    return Outcome(0, 0, b"", b"", "fp32", who, (part,), (ME, PeerId(OTHER)), 1)
