"""Owners that merge something else than they were sent, and those who look after it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from exchange_kit import until
from simulated_swarm import Member, SimulatedSwarm, expelled, lengths, simulated_swarm
from weighing_kit import MIX

from gossip.chain.auditor import SUSPENDED, UNANSWERED, Auditor, _Weighed
from gossip.chain.chain import Chain
from gossip.exchange.exchange import Exchange
from gossip.exchange.kept_slices import WeighedMerge
from protocols.codecs import NAMES
from protocols.errors import RemoteRefused
from protocols.identity import Identity, PeerId
from protocols.memory import virtual_time
from protocols.messages import Certificate, EvidenceRequest, Plan
from protocols.stats import Meter
from protocols.transport import Feed

pytestmark = pytest.mark.usefixtures("remembered_signatures")


@pytest.fixture(autouse=True)
def _all_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody looks at something in each round, however small the model is."""
    monkeypatch.setattr("gossip.chain.auditor.SHARE", 1000.0)


@contextmanager
def lying(
    monkeypatch: pytest.MonkeyPatch, name: str, lie: Callable[..., Any]
) -> Iterator[set[PeerId]]:
    """What a merge's method gives at members that are put into this set."""
    liars: set[PeerId] = set()
    honest = getattr(WeighedMerge, name)

    def method(self: WeighedMerge, *args: Any) -> Any:
        found = honest(self, *args)
        return lie(self, found) if self._me in liars else found

    with monkeypatch.context() as patched:
        patched.setattr(WeighedMerge, name, method)
        yield liars


def negative(merge: WeighedMerge, total: torch.Tensor) -> torch.Tensor:
    return total.mul_(-1.0)


def slightly_more(merge: WeighedMerge, total: torch.Tensor) -> torch.Tensor:
    return total.mul_(1.05)


def one_alone(merge: WeighedMerge, total: torch.Tensor) -> torch.Tensor:
    """What one of them has sent."""
    return total.copy_(merge._values(merge.merged)[1][0])


@pytest.mark.parametrize("lie", [negative, slightly_more, one_alone])
@pytest.mark.parametrize("codec", ["int4", "fp32"])
def test_who_merges_something_else_is_expelled_by_all(
    monkeypatch: pytest.MonkeyPatch, lie: Callable[..., Any], codec: str
) -> None:
    # by what it measured of short bodies one member may come to own everything, and another nothing
    monkeypatch.setattr(Meter, "read", lambda meter: None)

    async def main() -> None:
        with lying(monkeypatch, "_sum_of_all", lie) as liars:
            async with simulated_swarm(5, mix=MIX, codec=codec, think=(0.4, 0.45)) as swarm:
                await until(lambda: min(lengths(swarm.living())) >= 2, 10.0)
                liar, *others = swarm.living()
                liars.add(liar.peer)
                await until(lambda: all(expelled(m) == {liar.peer} for m in others), 120.0)
                before = min(lengths(others))
                await until(lambda: min(lengths(others)) >= before + 3, 30.0)
                for certificate in others[0].replica.certificates[-1:]:
                    assert all(part.owner != liar.peer for part in certificate.outcome.parts)
                    assert liar.peer not in certificate.outcome.next_roster

    virtual_time.run(main())


def test_who_makes_products_up_is_expelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a contributor would look further away than it is."""

    def half(merge: WeighedMerge, nothing: None) -> None:
        _, products = merge._products[-1]
        products[-1] *= 0.5
        products[:, -1] *= 0.5

    # by links so slow that each of them merges a part; by fast ones it is often one alone
    settings: dict[str, Any] = {"mix": MIX, "think": (0.4, 0.45), "uploads": [2e5] * 5}

    async def main() -> None:
        with lying(monkeypatch, "_multiply", half) as liars:
            async with simulated_swarm(5, **settings) as swarm:
                await until(lambda: min(lengths(swarm.living())) >= 2, 10.0)
                liar, *others = swarm.living()
                liars.add(liar.peer)
                await until(lambda: all(expelled(m) == {liar.peer} for m in others), 120.0)

    virtual_time.run(main())


def test_who_lies_again_after_it_was_forgotten_is_expelled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whom nobody has heard of for long is forgotten, and may come back under the same key."""

    async def main() -> None:
        with lying(monkeypatch, "_sum_of_all", negative) as liars:
            # large enough for each to own a part
            async with simulated_swarm(5, size=200_000, mix=MIX, think=(0.4, 0.45)) as swarm:
                liar, *others = swarm.living()
                liars.add(liar.peer)
                for _ in range(2):
                    await until(lambda: liar.peer in others[0].replica.roster, 30.0)
                    await until(lambda: all(expelled(m) == {liar.peer} for m in others), 120.0)
                    await until(lambda: liar.peer not in others[0].replica.roster, 30.0)
                    for member in others:
                        del member.swarm.membership.islands[liar.peer]
                        member.rejected.clear()

    virtual_time.run(main())


@pytest.mark.timeout(300)  # takes 23 s of a core that nobody else uses
def test_who_shows_nothing_merges_nothing_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, mute = Auditor.show, set[PeerId]()

    async def show(self: Auditor, sender: PeerId, request: EvidenceRequest) -> Feed:
        if self.wiring.identity.peer_id in mute:
            raise RemoteRefused("gone", "I would rather not")
        return await shown(self, sender, request)

    monkeypatch.setattr(Auditor, "show", show)

    def owners(member: Member) -> set[PeerId]:
        return {part.owner for part in member.replica.certificates[-1].outcome.parts}

    async def main() -> None:
        async with simulated_swarm(4, mix=MIX, think=(0.4, 0.45)) as swarm:
            await until(lambda: min(lengths(swarm.living())) >= 2, 10.0)
            silent, *others = swarm.living()
            mute.add(silent.peer)

            def suspended() -> bool:
                round_ = min(lengths(others))
                return all(
                    silent.peer in m.swarm.chains[0].auditor.suspended(round_) for m in others
                )

            await until(suspended, 300.0)
            await until(lambda: silent.peer not in owners(others[0]), 10.0)
            assert not any(expelled(member) for member in others)
            mute.clear()
            before = min(lengths(others))
            await until(lambda: min(lengths(others)) > before + SUSPENDED, 60.0)
            assert not any(
                m.swarm.chains[0].auditor.suspended(min(lengths(others))) for m in others
            )

    virtual_time.run(main())


async def weighed(swarm: SimulatedSwarm) -> tuple[Member, _Weighed]:
    """A member after some rounds, and what it has noted of the newest one."""
    await until(lambda: min(lengths(swarm.living())) >= 3, 10.0)
    member = swarm.living()[0]
    return member, list(member.swarm.chains[0].auditor._rounds.values())[-1]


@pytest.mark.parametrize("made_up", [False, True])
def test_who_has_stated_products_is_asked_for_them_whoever_has_merged(made_up: bool) -> None:
    """A leader could sign any for a part that somebody else merges, honestly, by what follows."""

    async def main() -> None:
        async with simulated_swarm(4, mix=MIX, think=(0.4, 0.45)) as swarm:
            member, found = await weighed(swarm)
            auditor = member.swarm.chains[0].auditor
            outcome = found.certificate.outcome
            key, gram = next((k, g) for k, g in found.grams.items() if g.owner != member.peer)
            merger = next(peer for peer in found.certificate.roster if peer != gram.owner)
            if made_up:
                gram = dataclasses.replace(gram, tree=bytes(32))
            elsewhere = tuple(
                dataclasses.replace(r, owner=merger) if (r.start, r.stop) == key else r
                for r in outcome.parts
            )
            changed = dataclasses.replace(
                found,
                grams={key: gram},
                certificate=dataclasses.replace(
                    found.certificate, outcome=dataclasses.replace(outcome, parts=elsewhere)
                ),
            )
            case = auditor._drawn(changed, 10**9)
            assert case is not None
            assert case.owner == gram.owner
            await auditor._look_at(changed, case)
            assert auditor.suspended(outcome.round) == ({gram.owner} if made_up else set())
            assert not expelled(member)

    virtual_time.run(main())


@contextmanager
def not_told(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[PeerId, int]]:
    """Members that weigh a part and hear of no plan that says so: in this round, 0 for the next."""
    unheard: dict[PeerId, int] = {}
    work = Exchange.work

    def but_not(self: Exchange, plan: Plan) -> None:
        if unheard.get(self.me) == 0 and self.me in {gram.owner for gram in plan.grams}:
            unheard[self.me] = plan.round
        if not plan.grams or unheard.get(self.me) != plan.round:
            work(self, plan)

    with monkeypatch.context() as patched:
        patched.setattr(Exchange, "work", but_not)
        yield unheard


def test_whose_part_was_handed_over_shows_what_it_weighed_though_it_replays_the_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It owns no part of what was certified, and answers for the products alone."""
    replayed, shown = list[int](), list[int]()

    async def main() -> None:
        with not_told(monkeypatch) as unheard:
            async with simulated_swarm(4, mix=MIX, think=(0.4, 0.45)) as swarm:
                await until(lambda: min(lengths(swarm.living())) >= 3, 30.0)
                outcome = swarm.living()[0].replica.certificates[-1].outcome
                owner = swarm.members[outcome.parts[0].owner]
                auditor = owner.swarm.chains[0].auditor
                ended, show = auditor.ended, auditor.show

                def over(certificate: Certificate, *args: Any, **how: Any) -> None:
                    replayed.extend([certificate.outcome.round] if how["replayed"] else [])
                    ended(certificate, *args, **how)

                async def seen(sender: PeerId, request: EvidenceRequest) -> Feed:
                    feed = await show(sender, request)
                    shown.append(request.round)
                    return feed

                auditor.ended, auditor.show = over, seen  # type: ignore[method-assign]
                unheard[owner.peer] = 0
                await until(lambda: 0 < unheard[owner.peer] < min(lengths([owner])) - 2, 120.0)
                outcome = owner.replica.certificates[unheard[owner.peer]].outcome
                assert owner.peer not in {part.owner for part in outcome.parts}
                assert replayed == [outcome.round]
                assert outcome.round in shown
                for member in swarm.living():
                    assert not member.swarm.chains[0].auditor._suspended
                    assert not expelled(member)

    virtual_time.run(main())


@pytest.mark.parametrize("code", ["gone", "behind"])
def test_whose_part_was_handed_over_may_have_lost_what_it_weighed(code: str) -> None:
    """That it says so is like no answer: it takes some in a row."""

    async def main() -> None:
        async with simulated_swarm(4, mix=MIX, think=(0.4, 0.45)) as swarm:
            member, found = await weighed(swarm)
            auditor = member.swarm.chains[0].auditor
            owners = {part.owner for part in found.certificate.outcome.parts}
            where = next(key for key, gram in found.grams.items() if gram.owner != member.peer)
            case = auditor._case(found, *where, 0)
            assert case is not None
            assert case.owner in owners

            async def lost(*_: object) -> str:
                raise RemoteRefused(code, "nothing is here of it")

            auditor._judged = lost  # type: ignore[assignment, method-assign]
            handed_over = dataclasses.replace(case, merged=None)
            for _ in range(UNANSWERED):
                assert not auditor._suspended
                await auditor._look_at(found, handed_over)
            assert auditor._suspended.keys() == {case.owner}
            auditor._suspended.clear()
            await auditor._look_at(found, case)
            assert auditor._suspended.keys() == {case.owner}, "it has merged the part as well"

    virtual_time.run(main())


def test_nothing_is_kept_of_who_left_office_or_was_suspended_long_ago() -> None:
    gone, back = Identity.from_seed(b"g" * 32).peer_id, Identity.from_seed(b"b" * 32).peer_id

    async def main() -> None:
        async with simulated_swarm(3, mix=MIX, think=(0.4, 0.45)) as swarm:
            auditor = swarm.living()[0].swarm.chains[0].auditor
            auditor._unanswered[gone] = 1
            auditor._suspended |= {gone: 1, back: 1000}
            await until(lambda: min(lengths(swarm.living())) >= 4, 10.0)
            assert gone not in auditor._unanswered
            assert auditor._suspended.keys() == {back}, "leaving office does not make up for it"

    virtual_time.run(main())


def test_who_ends_a_round_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked by those who were quicker, and has nothing to show before it is there."""
    applied, slow = Chain._advance, set[PeerId]()

    async def advance(self: Chain, *args: Any) -> None:
        if self.me in slow:
            await asyncio.sleep(2.0)
        await applied(self, *args)

    monkeypatch.setattr(Chain, "_advance", advance)

    async def main() -> None:
        async with simulated_swarm(4, mix=MIX, think=(3.0, 3.1)) as swarm:
            await until(lambda: min(lengths(swarm.living())) >= 2, 60.0)
            looked = looks(swarm)
            slow.add(swarm.living()[0].peer)
            await until(lambda: min(lengths(swarm.living())) >= 8, 120.0)
            assert sum(looked) > 10
            for member in swarm.living():
                assert not member.swarm.chains[0].auditor._suspended

    virtual_time.run(main())


@pytest.mark.parametrize("codec", NAMES)
def test_nobody_who_is_honest_is_suspected(codec: str) -> None:
    async def main() -> None:
        async with simulated_swarm(4, mix=MIX, codec=codec, think=(0.05, 0.06)) as swarm:
            looked = looks(swarm)
            await until(lambda: min(lengths(swarm.living())) >= 12, 60.0)
            swarm.agree()
            assert sum(looked) > 20, "nobody has looked at anything"
            for member in swarm.living():
                assert not expelled(member)
                assert not member.swarm.chains[0].auditor._suspended

    virtual_time.run(main())


def looks(swarm: SimulatedSwarm) -> list[int]:
    """How often each of those who are there looks at something, as it goes on."""
    found = [0] * len(swarm.living())
    for number, member in enumerate(swarm.living()):
        auditor = member.swarm.chains[0].auditor
        judged = auditor._judged

        async def counted(*args: Any, number: int = number, judged: Any = judged) -> str:
            found[number] += 1
            return str(await judged(*args))

        auditor._judged = counted  # type: ignore[assignment, method-assign]
    return found
