"""Every merge rule with every codec: one of five lies, and all others agree on what it is worth."""

from __future__ import annotations

import pytest
import torch
from simulated_swarm import Member, SimulatedSwarm, simulated_swarm
from toy_replica import ToyReplica

from bootstrap.manifest_rounds import COARSE, Merge
from gossip.membership.members import Patience
from node.replicas.mixing import mix_of
from node.replicas.residual import Residual
from protocols.codecs import NAMES, Chunk, RangeCodec
from protocols.memory import virtual_time
from protocols.messages import Certificate

RULES = ["clip", "median", "trimmed", "geometric-median", "centered-clip"]
SIZE = 40_000
LIE = -30.0
DECAY = 0.9


class FeedbackReplica(ToyReplica):
    """A toy that sends later what a coarse codec has lost of its contributions, as a node does."""

    residual: Residual

    def progress(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(self.theta[start:stop] - self.sent[start:stop])

    def delta(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        return self.residual.add_to(self.progress(start, stop, out), start)

    def norm(self) -> float:
        return self.delta(0, SIZE, torch.empty(SIZE)).double().norm().item()

    def note_lost(
        self, codec: RangeCodec, chunk: Chunk, mean: torch.Tensor, data: torch.Tensor, share: float
    ) -> None:
        self.residual.note_lost(codec, chunk, mean, data, share)

    async def apply(
        self, certificate: Certificate, parts: dict[tuple[int, int], torch.Tensor]
    ) -> None:
        outcome = certificate.outcome
        self.residual.settle(outcome, self.me, self.codec.named(outcome.codec), self.progress)
        await super().apply(certificate, parts)


def with_feedback(swarm: SimulatedSwarm) -> None:
    """Before anything has happened: all replicas keep what is lost."""
    for member in swarm.members.values():
        member.replica.__class__ = FeedbackReplica
        member.replica.residual = Residual(SIZE, DECAY)  # type: ignore[attr-defined]


def lies(replica: ToyReplica) -> None:
    replica.poison = lambda delta: LIE * delta


async def rounds(swarm: SimulatedSwarm, count: int) -> list[Member]:
    await swarm.committed(count)
    swarm.agree()
    return swarm.living()


@pytest.mark.parametrize("codec", NAMES)
@pytest.mark.parametrize("rule", RULES)
def test_a_liar_is_discounted_and_all_get_the_same_bits(rule: str, codec: str) -> None:
    async def main() -> None:
        count = 2 if codec in COARSE else 1
        common = torch.randn(SIZE, generator=torch.Generator().manual_seed(7))
        async with simulated_swarm(
            5, size=SIZE, codec=codec, mix=mix_of(Merge(trust="open", rule=rule)),
            think=(0.3, 0.32), patience=Patience(heartbeat_s=5.0),
        ) as swarm:  # fmt: skip
            liar = next(iter(swarm.members.values()))
            for member in swarm.members.values():
                member.replica.common = 3.0 * common
            lies(liar.replica)
            if codec in COARSE:
                with_feedback(swarm)
            members = await rounds(swarm, count)
            for certificate, merged in zip(
                members[1].replica.certificates, members[1].replica.means, strict=False
            ):
                outcome = certificate.outcome
                scales = {c.peer: c.scale for c in outcome.contributors}
                assert outcome.codec == codec
                assert len(scales) == 5
                assert torch.nn.functional.cosine_similarity(merged, common, dim=0) > 0.2
                if rule not in ("median", "trimmed"):  # which judge element by element
                    honest = [scale for peer, scale in scales.items() if peer != liar.peer]
                    assert scales[liar.peer] < 0.2 * min(honest)
            for member in members:
                assert not member.rejected
                if codec in COARSE:
                    kept = member.replica.residual.values  # type: ignore[attr-defined]
                    sent = member.replica.norm()
                    assert 0.0 < kept.norm().item() < 3.0 * sent

    virtual_time.run(main())
