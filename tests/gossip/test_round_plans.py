"""What a plan takes over from those before it, and from votes for what is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from gossip_kit import RUN, result_of
from round_kit import SIZE, Peer, World, agree, under_way

from gossip.plans.certificate import basis_of, outcome_of, sign_result
from gossip.plans.planning import Remains
from gossip.plans.validity import key_of
from gossip.rounds.round import Round
from gossip.rounds.trial import Trial
from protocols.identity import PeerId
from protocols.messages import Outcome, Part, PartResult, Prepare, Promise

pytestmark = pytest.mark.usefixtures("remembered_signatures")


def test_a_plan_after_one_that_failed_has_as_long_again_as_was_spent() -> None:
    world = World(4, seed=1)
    _, others = under_way(world)
    current, now = others[0].round, world.now
    assert current is not None
    plan = current.agreement.plan
    assert plan is not None
    remains = Remains((0, 1), current.roster, None, {})
    at_once = current.leadership.compose(remains, now, plan.patience_s)
    later = current.leadership.compose(remains, now + 8.0, plan.patience_s)
    assert at_once is not None
    assert later is not None
    assert at_once.patience_s == plan.patience_s
    assert later.expected_s >= 8.0
    assert later.patience_s >= 2.0
    assert later.patience_s > plan.patience_s
    assert others[1].round is not None
    assert others[1].round.leadership.bounded(later, now + 8.0) == later
    hasty = others[1].round.leadership.bounded(later, now)  # to whom it has not lasted so long
    assert hasty.expected_s < later.expected_s


def test_whom_a_new_leader_doubts_owns_nothing_in_its_plan_though_it_is_not_certain_yet() -> None:
    world = World(4, seed=1)
    leader, others = under_way(world)
    current, now = others[0].round, world.now
    assert current is not None
    dark = leader.identity.peer_id
    current.on_fault(dark, now)
    assert current.company.gone == set()
    remains = Remains((0, 1), current.roster, None, {})
    plan = current.leadership.compose(remains, now, 1.0)
    assert plan is not None
    assert dark not in {part.owner for part in plan.parts}
    assert {c.peer for c in plan.contributors if not c.active} == {dark}


def test_who_has_restarted_and_abstains_owns_nothing_in_a_plan() -> None:
    """It would go by none, and its part be waited for in vain, plan after plan."""
    world = World(4, seed=1)
    leader, others = under_way(world)
    current, now = others[0].round, world.now
    assert current is not None
    peer = leader.identity.peer_id
    said = others[0].membership.announcement(peer)
    assert said is not None
    others[0].membership.on_announce(replace(said, status="joining"), b"", 10_000, now)
    remains = Remains((0, 1), current.roster, None, {})
    plan = current.leadership.compose(remains, now, 1.0)
    assert plan is not None
    assert peer not in {part.owner for part in plan.parts}
    assert peer in plan.roster


def test_who_is_untried_owns_nothing_in_a_plan_after_one_that_failed() -> None:
    """It may be a name that does nothing, and the next plan would wait for the next name."""
    world = World(4, seed=1)
    leader, others = under_way(world)
    current, now = others[0].round, world.now
    assert current is not None
    untried = {peer.identity.peer_id for peer in others[1:]}
    current.on_fault(leader.identity.peer_id, now)
    remains = Remains((0, 1), current.roster, None, {})
    for trial, owning in ((None, {current.me, *untried}), (Trial(), {current.me})):
        if trial is not None:
            trial._since.update(dict.fromkeys(untried, 0))
        current.company.trial = trial
        plan = current.leadership.compose(remains, now, 1.0)
        assert plan is not None
        assert {part.owner for part in plan.parts} == owning


def test_merged_parts_that_only_a_member_at_fault_has_are_merged_anew() -> None:
    world = World(4, seed=1)
    leader, others = under_way(world)
    current, now = others[0].round, world.now
    assert current is not None
    assert current.agreement.plan is not None
    slow, other = leader.identity.peer_id, others[1].identity.peer_id
    plan = current.agreement.plan
    part = next(part for part in plan.parts if part.owner == slow)
    result = result_of(leader.identity, plan, part.start, part.stop)
    remains = Remains((0, 1), current.roster, None, {key_of(result): result})
    current.on_fault(slow, now)
    current.leadership.note_held(slow, Promise(0, 1, 0, 0, None, (result,)))

    def owner() -> str:
        renewed = current.leadership.compose(remains, now, 1.0)
        assert renewed is not None
        return next(p.owner for p in renewed.parts if p.start == part.start)

    assert owner() != slow
    current.leadership.note_held(other, Promise(0, 1, 0, 0, None, (result,)))
    assert owner() == slow  # somebody else has it as well


class Pretending(World):
    """``liar`` tells whoever asks for its promise that it has voted for what it alone has signed,
    and that is something else each time."""

    liar: Peer | None = None
    lies = 0

    def deliver(self, source: Peer, to: PeerId, action: Callable[[Peer], None]) -> None:
        if source is self.liar:  # it is the first to answer
            self.after(0.001, lambda: action(self.peers[to]) if self.peers[to].alive else None)
        else:
            super().deliver(source, to, action)

    def control(self, source: Peer, target: Peer, asked: Round, message: object) -> None:
        if source is not self.liar or not isinstance(message, Prepare):  # it never leads
            super().control(source, target, asked, message)

    def reply(self, peer: Peer, source: Peer, asked: Round, answer: object) -> None:
        if source is self.liar and isinstance(answer, Promise):
            self.lies += 1
            answer = replace(answer, voted_epoch=0, voted_ballot=0, voted=self.made_up(), held=())
        super().reply(peer, source, asked, answer)

    def made_up(self) -> Outcome:
        assert self.liar is not None
        assert self.liar.round is not None
        plan = self.liar.round.agreement.plan
        assert plan is not None
        me, contributors = self.liar.identity.peer_id, plan.contributors[:1]
        part = PartResult(
            0, plan.round, 0, SIZE, me, plan.codec, bytes([self.lies]) * 32, b"",
            basis_of(plan.codec, contributors), b"",
        )  # fmt: skip
        whole = replace(plan, contributors=contributors, parts=(Part(0, SIZE, me, None),))
        return outcome_of(
            whole, [sign_result(self.liar.identity, RUN, part)], self.place(self.liar).work
        )


@pytest.mark.parametrize("others", [3, 4])
def test_who_tells_of_a_vote_for_what_nobody_has_is_believed_once(others: int) -> None:
    """A leader has to repeat such a vote, and the next one, and so on, as long as it is told."""
    world = Pretending(others + 2, seed=1)
    leader, rest = under_way(world)
    world.liar = rest[0]
    at = len(leader.chain)
    world.kill(leader)
    world.run(world.now + 20.0)
    agree(world)
    assert world.lies
    assert min(len(peer.chain) for peer in rest) > at + 3


def test_a_vote_for_what_is_lost_counts_where_the_others_are_no_majority() -> None:
    """It may be true: then nobody decides without it."""
    world = World(4, seed=1)
    leader, others = under_way(world)
    current, now = others[0].round, world.now
    assert current is not None
    plan = current.agreement.plan
    assert plan is not None
    results = [
        result_of(world.peers[part.owner].identity, plan, part.start, part.stop)
        for part in plan.parts
    ]
    voted = outcome_of(plan, results, current.place.work)
    owner = next(part.owner for part in plan.parts if part.owner != current.me)
    tellers = [peer.identity.peer_id for peer in (leader, *others[1:])]
    disregards = current.leadership.disregards
    assert not disregards(tellers[0], voted, now)
    current.on_lost(next(result for result in results if result.owner == owner), now)
    promised, current.agreement.promised = current.agreement.promised, (1, 0)
    assert not disregards(tellers[0], voted, now)  # in a later epoch everybody has to promise
    current.agreement.promised = promised
    assert [disregards(teller, voted, now) for teller in tellers[:2]] == [True, False]
    for result in results:  # it was found after all
        current.agreement.held[key_of(result)] = result
    assert not disregards(tellers[2], voted, now)
