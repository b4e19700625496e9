"""Parameters of a member that learns nothing: for tests of rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import copy, deepcopy

import torch
from blake3 import blake3

from gossip.catchup.lineage import Lineage
from gossip.place import Place
from gossip.plans.certificate import genesis, outcome_hash
from protocols.codecs import RangeCodec
from protocols.identity import PeerId
from protocols.messages import Certificate

RUN = b"r" * 32


class ToyReplica:
    """Parameters of one fragment that take the merged mean as it is: θ ← θ − D."""

    def __init__(
        self,
        me: PeerId,
        roster: tuple[PeerId, ...],
        size: int,
        codec: RangeCodec,
        fragment: int = 0,
    ) -> None:
        self.me, self.codec, self.fragment = me, codec, fragment
        self.theta = torch.zeros(size)
        self.sent = torch.zeros(size)
        self._place = Place(RUN, fragment, 0, genesis(RUN), self.digest(), 0)
        self._roster = roster
        self.history: list[tuple[bytes, bytes]] = []  # head and state after each round
        self.counted = 0
        self.certificates: list[Certificate] = []
        self.means: list[torch.Tensor] = []  # by each of these
        self.common = torch.zeros(size)  # what all would learn, beside what differs
        self.poison: Callable[[torch.Tensor], torch.Tensor] = lambda delta: delta
        self.certificate: Certificate | None = None  # the newest, as in a checkpoint
        self.lineage: Lineage | None = None
        self.begins = 0  # the round that the history begins with

    def digest(self) -> bytes:
        return blake3(self.theta.view(torch.uint8).numpy()).digest()

    def saved(self, lineage: Lineage) -> ToyReplica:
        """A copy that the rounds to come leave as it is; ``lineage`` leads to where it stands."""
        made = copy(self)
        made.theta, made.sent = self.theta.clone(), self.sent.clone()
        made.history, made.certificates = list(self.history), list(self.certificates)
        made.means, made.lineage = list(self.means), deepcopy(lineage)
        return made

    @property
    def place(self) -> Place:
        return self._place

    @property
    def roster(self) -> tuple[PeerId, ...]:
        return self._roster

    def late_s(self) -> float:
        """There is no trainer to be late."""
        return 0.0

    def train(self, seed: int) -> None:
        """Local progress that differs between members and rounds."""
        generator = torch.Generator().manual_seed(seed)
        own = torch.randn(len(self.theta), generator=generator)
        self.sent = self.theta - self.poison(self.common + own)

    def norm(self) -> float:
        """Of the pseudo-gradient."""
        return (self.theta - self.sent).double().norm().item()

    def delta(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        return self.theta[start:stop] - self.sent[start:stop]

    async def apply(
        self, certificate: Certificate, parts: dict[tuple[int, int], torch.Tensor]
    ) -> None:
        outcome = certificate.outcome
        assert (outcome.fragment, outcome.round) == (self.fragment, self._place.round)
        assert outcome.previous == self._place.previous
        mine = [i for i, c in enumerate(outcome.contributors) if c.peer == self.me]
        theta, merged = self.theta.clone(), torch.zeros(len(self.theta))
        for result in outcome.parts:
            if result.digest:
                mean = torch.empty(result.stop - result.start)
                data = parts[result.start, result.stop]
                assert blake3(data.numpy()).digest() == result.digest
                self.codec.named(outcome.codec).decode(result.start, data, mean)
                theta[result.start : result.stop] -= mean
                merged[result.start : result.stop] = mean
        await asyncio.sleep(0.01)  # a kill here leaves the old state, as a checkpoint would
        self.theta = theta
        self.counted += any(i.contributor in mine for r in outcome.parts for i in r.included)
        head = outcome_hash(outcome)
        self._place = Place(
            RUN, self.fragment, outcome.round + 1, head, self.digest(), outcome.work
        )
        self._roster = outcome.next_roster
        self.history.append((head, self._place.state))
        self.certificate = certificate
        self.certificates.append(certificate)
        self.means.append(merged)
