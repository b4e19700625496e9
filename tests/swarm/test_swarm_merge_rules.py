"""Merge rules in whole members on the simulated network: attackers, faults, equal bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from robust_kit import cosine
from simulated_swarm import Member, SimulatedSwarm, simulated_swarm

from diloco import merge, robust
from gossip.plans.mix import MEAN, Mix
from protocols.identity import PeerId
from protocols.memory import virtual_time
from protocols.messages import Certificate

pytestmark = pytest.mark.usefixtures("remembered_signatures")

CLIP = Mix(clip=merge.clip_factors)
MEDIAN = Mix(column=robust.coordinate_median)
TRIMMED = Mix(column=robust.trimmed_mean)
GEOMETRIC = Mix(weigh=robust.geometric_median)
CENTERED = Mix(weigh=robust.centered_clip)
RULES = {
    "clip": CLIP,
    "median": MEDIAN,
    "trimmed": TRIMMED,
    "geometric-median": GEOMETRIC,
    "centered-clip": CENTERED,
}
Poison = Callable[[torch.Tensor], torch.Tensor]


def in_common(swarm: SimulatedSwarm) -> torch.Tensor:
    """Let all members learn something in common; the direction of what they ought to learn."""
    random = torch.Generator().manual_seed(11)
    common = torch.randn(swarm.size, generator=random)
    for member in swarm.members.values():
        member.replica.common = common
    return common


def poisoned(swarm: SimulatedSwarm, count: int, poison: Poison) -> list[Member]:
    liars = list(swarm.members.values())[:count]
    for liar in liars:
        liar.replica.poison = poison
    return liars


def scales(certificate: Certificate) -> dict[PeerId, float]:
    return {c.peer: c.scale for c in certificate.outcome.contributors}


async def full_round(swarm: SimulatedSwarm) -> tuple[torch.Tensor, Certificate]:
    """What the next round comes to in which all members are merged."""
    honest = swarm.living()[-1].replica
    seen = len(honest.certificates)
    while True:
        await swarm.committed(seen + 1)
        certificate = honest.certificates[seen]
        if len(certificate.outcome.contributors) == len(swarm.members):
            return honest.means[seen], certificate
        seen += 1


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("codec", ["int4", "fp32"])
def test_members_stay_equal_under_every_rule(name: str, codec: str) -> None:
    async def main() -> None:
        async with simulated_swarm(4, mix=RULES[name], codec=codec, think=(0.4, 0.5)) as swarm:
            await swarm.committed(4, 15.0)
            swarm.agree()
            for member in swarm.living():
                assert member.rejected == []
                assert member.replica.counted > 0
                assert all(c.epoch == 0 for c in member.replica.certificates)

    virtual_time.run(main())


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("factor", [-3.0, 1000.0, -1000.0])
def test_two_of_eight_attack(name: str, factor: float) -> None:
    async def main() -> None:
        async with simulated_swarm(8, mix=RULES[name], think=(0.4, 0.45)) as swarm:
            common = in_common(swarm)
            poisoned(swarm, 2, lambda delta: factor * delta)
            merged, _ = await full_round(swarm)
            swarm.agree()
            assert cosine(merged, common) > 0.8
            assert 0.4 < merged.norm() / common.norm() < 1.6

    virtual_time.run(main())


def test_the_mean_is_theirs() -> None:
    async def main() -> None:
        async with simulated_swarm(8, mix=MEAN, think=(0.4, 0.45)) as swarm:
            common = in_common(swarm)
            poisoned(swarm, 2, lambda delta: -1000 * delta)
            merged, _ = await full_round(swarm)
            assert cosine(merged, common) < 0

    virtual_time.run(main())


@pytest.mark.parametrize("name", ["clip", "geometric-median", "centered-clip"])
def test_the_certificate_shows_who_was_discounted(name: str) -> None:
    async def main() -> None:
        async with simulated_swarm(6, mix=RULES[name], think=(0.4, 0.45)) as swarm:
            in_common(swarm)
            (liar,) = poisoned(swarm, 1, lambda delta: -50 * delta)
            _, certificate = await full_round(swarm)
            found = scales(certificate)
            honest = [scale for peer, scale in found.items() if peer != liar.peer]
            assert found[liar.peer] < 0.1 * min(honest)

    virtual_time.run(main())


@pytest.mark.parametrize("mix", [CLIP, GEOMETRIC], ids=["clip", "geometric-median"])
def test_who_says_it_is_shorter_than_it_is(mix: Mix) -> None:
    """A slice is refused as soon as it is longer than the whole was said to be.

    What it puts into the part that it merges itself nobody can check.
    """

    async def main() -> None:
        async with simulated_swarm(5, mix=mix, think=(0.4, 0.45)) as swarm:
            common = in_common(swarm)
            (liar,) = poisoned(swarm, 1, lambda delta: -100 * delta)
            said = liar.replica.norm
            liar.replica.norm = lambda: said() / 100  # type: ignore[method-assign]
            merged, certificate = await full_round(swarm)
            swarm.agree()
            for part in certificate.outcome.parts:
                if part.owner == liar.peer:
                    common[part.start : part.stop] = merged[part.start : part.stop] = 0
            honest = [member for member in swarm.living() if member is not liar]
            assert any(
                peer == liar.peer and "longer" in why for m in honest for peer, why in m.rejected
            )
            assert cosine(merged, common) > 0.8
            assert merged.norm() / common.norm() < 1.6
            assert liar.swarm.status.status == "active"

    virtual_time.run(main())
