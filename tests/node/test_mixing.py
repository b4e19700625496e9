"""The merge rule: which one a manifest means, what it makes of announced norms, what all check."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from codec_kit import round_trip
from gossip_kit import PLACE, SHAPE, leader, plan_of, roster_of
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from bootstrap.manifest import Manifest
from bootstrap.manifest_rounds import Merge
from diloco import merge, robust
from gossip.exchange.slicing import shares
from gossip.plans.certificate import outcome_of
from gossip.plans.mix import MAX_NORM, MAX_SCALE, MEAN, Mix
from gossip.plans.validity import VerifiedResults, check_outcome, check_plan
from node.replicas.mixing import BY_TRUST, RULES, mix_of
from node.replicas.replica import OuterReplica
from node.replicas.residual import Residual
from node.trainer.shared import SharedVectors
from protocols.codecs import CHUNK, NAMES, RangeCodec, codec
from protocols.errors import Malformed
from protocols.identity import Identity
from protocols.memory.virtual_time import inline
from protocols.messages import Contributor

MEMBERS = [Identity.from_seed(bytes([number]) * 32) for number in range(1, 5)]
PEERS = sorted(member.peer_id for member in MEMBERS)
CLIP = Mix(clip=merge.clip_factors)
CLIPPED = dataclasses.replace(SHAPE, mix=CLIP)


def contributors(*norms: float, weight: float = 100.0) -> list[Contributor]:
    return [
        Contributor(peer, weight, 100, True, norm) for peer, norm in zip(PEERS, norms, strict=True)
    ]


# --- what a manifest means ------------------------------------------------------------------------


def test_every_rule_has_its_functions() -> None:
    rules = Merge.model_fields["rule"].annotation.__args__  # type: ignore[union-attr]
    assert set(rules) == {*RULES, "auto"}
    assert set(Merge.model_fields["trust"].annotation.__args__) == set(BY_TRUST)  # type: ignore[union-attr]


def test_what_trust_stands_for() -> None:
    assert mix_of(Manifest().merge) == CLIP
    assert mix_of(Merge(trust="open")).weigh is robust.open_rule
    assert mix_of(Merge(trust="open", rule="mean")) == MEAN
    assert mix_of(Merge(rule="centered-clip")).weigh is robust.centered_clip
    assert mix_of(Merge(rule="trimmed")).column is robust.trimmed_mean


@pytest.mark.parametrize("name", RULES)
def test_no_rule_has_two_functions(name: str) -> None:
    mix = RULES[name]()
    assert sum(part is not None for part in (mix.clip, mix.weigh, mix.column)) <= 1


def test_another_rule_is_another_run() -> None:
    changed = Manifest().model_copy(update={"merge": Merge(trust="open")})
    assert changed.run_id != Manifest().run_id
    with pytest.raises(ValidationError):
        Merge(rule="krum")  # type: ignore[arg-type]


# --- scales by announced norms --------------------------------------------------------------------


def test_who_is_longer_than_the_median_is_scaled_to_it() -> None:
    scaled = CLIP.scaled(contributors(1.0, 2.0, 3.0, 100.0))
    assert [c.scale for c in scaled] == [1.0, 1.0, 2.5 / 3.0, 0.025]


def test_who_brings_no_weight_has_no_say_in_what_is_too_long() -> None:
    given = contributors(1.0, 2.0, 3.0, 100.0)
    given[3] = dataclasses.replace(given[3], weight=0.0)
    assert [c.scale for c in CLIP.scaled(given)] == [1.0, 1.0, 2.0 / 3.0, 1.0]


def test_a_leader_that_favours_somebody_is_refused() -> None:
    scaled = CLIP.scaled(contributors(1.0, 2.0, 3.0, 100.0))
    roster = roster_of(MEMBERS)
    by = leader(MEMBERS)
    check_plan(plan_of(by, MEMBERS, contributors=scaled), PLACE, CLIPPED, roster, VerifiedResults())
    for lie in (
        (*scaled[:3], dataclasses.replace(scaled[3], scale=1.0)),
        (*scaled[:3], dataclasses.replace(scaled[3], norm=1.0)),
        (dataclasses.replace(scaled[0], scale=0.0), *scaled[1:]),
    ):
        plan = plan_of(by, MEMBERS, contributors=lie)
        with pytest.raises(Malformed, match="do not follow"):
            check_plan(plan, PLACE, CLIPPED, roster, VerifiedResults())
        with pytest.raises(Malformed, match="do not follow"):
            check_outcome(outcome_of(plan, [], PLACE.work), PLACE, CLIPPED, roster)


def test_under_the_mean_nobody_is_scaled() -> None:
    plan = plan_of(
        leader(MEMBERS), MEMBERS, contributors=CLIP.scaled(contributors(1.0, 1.0, 1.0, 5.0))
    )
    with pytest.raises(Malformed, match="do not follow"):
        check_plan(plan, PLACE, SHAPE, roster_of(MEMBERS), VerifiedResults())


@pytest.mark.parametrize(
    "changes", [{"norm": -1.0}, {"norm": MAX_NORM * 2}, {"scale": -0.1}, {"scale": MAX_SCALE * 2}]
)
def test_numbers_beyond_all_bounds(changes: dict[str, float]) -> None:
    given_ = contributors(1.0, 1.0, 1.0, 1.0)
    given_[1] = dataclasses.replace(given_[1], **changes)
    plan = plan_of(leader(MEMBERS), MEMBERS, contributors=tuple(given_))
    with pytest.raises(Malformed, match="beyond all bounds"):
        check_plan(plan, PLACE, SHAPE, roster_of(MEMBERS), VerifiedResults())


def test_who_is_left_out_has_no_share() -> None:
    out = dataclasses.replace(contributors(1.0, 1.0, 1.0, 1.0)[2], scale=0.0)
    found = shares([*contributors(1.0, 1.0, 1.0, 1.0)[:2], out])
    assert found == {PEERS[0]: 0.5, PEERS[1]: 0.5}


async def test_the_norm_that_is_announced_is_that_of_what_is_sent() -> None:
    size = CHUNK + 77

    vectors = SharedVectors.create(size)
    replica = OuterReplica(
        Manifest(),
        PEERS[0],
        vectors,
        RangeCodec("int4", size),
        inline,
        (PEERS[0],),
    )
    random = torch.Generator().manual_seed(0)
    for residual in (None, Residual(size, 0.9)):
        replica.residual = residual
        replica.base.copy_(torch.randn(size, generator=random) * 1e-6)
        replica.sent.copy_(torch.randn(size, generator=random) * 1e-6)
        if residual is not None:
            residual.values.fill_(1e-5)
        sent = replica.delta(0, size, torch.empty(size)).double().norm().item()
        assert replica.norm() == pytest.approx(sent, rel=1e-5)
    replica.sent[size - 1] = float("nan")
    assert not math.isfinite(replica.norm())
    del replica.base, replica.sent
    vectors.close()


# --- what a codec may add to a norm ---------------------------------------------------------------


def test_limits() -> None:
    one = contributors(1.0, 1.0, 1.0, 10.0)[3]
    assert CLIP.limit(one, "int4") == pytest.approx(13.0)
    assert Mix(weigh=robust.centered_clip).limit(one, "fp32") == pytest.approx(10.01)
    assert MEAN.limit(one, "int4") is None
    assert Mix(column=robust.trimmed_mean).limit(one, "int4") is None


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 5000),
    scale=st.sampled_from([1e-9, 1e-3, 1.0, 1e4]),
    spikes=st.one_of(st.floats(0.5, 30.0), st.just(127 / 7.5)),
)
def test_no_codec_makes_an_honest_slice_longer_than_its_limit(
    name: str, seed: int, size: int, scale: float, spikes: float
) -> None:
    """Also where all but one of a block lie just above half a step, or seven and a half."""
    random = torch.Generator().manual_seed(seed)
    for values in (
        torch.randn(size, generator=random) * scale,
        *(
            torch.where(torch.arange(size) % every == 0, spikes, 1.001) * scale
            for every in (64, 256)
        ),
    ):
        values = values.clamp(-6e4, 6e4)  # more fp16 does not carry
        decoded = round_trip(name, values)
        assert decoded.double().norm() <= codec(name).longer * values.double().norm()
