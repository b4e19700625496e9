"""What was voted for can be applied, whatever plans have named since."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from blake3 import blake3
from exchange_kit import MEMBERS, run, until, world
from gossip_kit import PLACE, RUN, certificate_of
from simulated_swarm import lengths, simulated_swarm

from gossip.exchange.exchange import Exchange
from gossip.plans.certificate import outcome_of, sign_result
from protocols.bodies import BufferFeed
from protocols.identity import PeerId
from protocols.memory import virtual_time
from protocols.transport import Feed

pytestmark = pytest.mark.usefixtures("remembered_signatures")


def test_what_was_voted_for_stays_when_a_plan_names_another_outcome_of_its_owner() -> None:
    """The owner signs two results, and holds back the votes for the first until it is gone."""

    async def scene() -> None:
        async with world() as here:
            here.work()
            await until(here.whole)
            mine, owner, *_ = here.peers
            results = {result.start: result for result, _ in mine.exchange.parts.values()}
            first = next(r for r in results.values() if r.owner == owner.me)
            mine.voted_ += results.values()
            ordered = [results[part.start] for part in here.plan.parts]
            outcome = outcome_of(here.plan, ordered, PLACE.work)
            certificate = certificate_of(outcome, MEMBERS, here.plan.roster)
            before = mine.exchange.certified(certificate)
            assert before is not None

            data = bytearray(mine.wiring.codec.encoded_size(first.start, first.stop))
            mine.wiring.codec.encode(first.start, torch.ones(first.stop - first.start), data)
            changed = dataclasses.replace(first, digest=blake3(data).digest(), signature=b"")
            second = sign_result(owner.identity, RUN, changed)

            async def on_part(sender: PeerId, header: bytes) -> Feed:
                return BufferFeed(memoryview(data))

            owner.wiring.transport.on_pull("part", on_part)
            for ballot, named in ((4, second), (8, first)):
                parts = tuple(
                    dataclasses.replace(p, result=named if p.start == first.start else None)
                    for p in here.plan.parts
                )
                mine.exchange.work(dataclasses.replace(here.plan, ballot=ballot, parts=parts))
                await until(lambda named=named: mine.held_[-1] == named)  # type: ignore[misc]
                after = mine.exchange.certified(certificate)
                assert after is not None
                assert after.keys() == before.keys()
                assert all(torch.equal(after[key], before[key]) for key in before)
                assert await mine.exchange.merged.part(first) is not None
            assert not mine.lost_

    run(scene)


def test_who_has_not_all_that_it_voted_for_fetches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the node."""
    honest, forgetful = Exchange.certified, set[PeerId]()

    def certified(self: Exchange, certificate: Any) -> Any:
        if self.me in forgetful:
            forgetful.discard(self.me)
            del self.parts[next(iter(self.parts))]
        return honest(self, certificate)

    monkeypatch.setattr(Exchange, "certified", certified)

    async def main() -> None:
        async with simulated_swarm(4, think=(0.4, 0.45)) as swarm:
            await until(lambda: min(lengths(swarm.living())) >= 2, 10.0)
            forgetful.add(swarm.living()[0].peer)
            await until(lambda: not forgetful, 10.0)
            there = min(lengths(swarm.living()))
            await until(lambda: min(lengths(swarm.living())) >= there + 3, 30.0)
            swarm.agree()

    virtual_time.run(main())
