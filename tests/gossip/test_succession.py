"""Who is voted into the next roster: sans-IO, and with members that see each other differently."""

from __future__ import annotations

import dataclasses

import pytest
from round_kit import Peer, World, agree, under_way

from gossip.rounds.instructions import Broadcast, Instruction, Send
from gossip.rounds.round import Round
from gossip.rounds.succession import OTHERWISE, YIELDS, Succession
from gossip.rounds.trial import Trial
from protocols.identity import Identity, PeerId
from protocols.messages import Outcome, Plan, Promise

pytestmark = pytest.mark.usefixtures("remembered_signatures")

STRANGER = Identity.from_seed(b"s" * 32).peer_id
PATIENCE = 1.0


def scene(count: int = 5) -> tuple[World, Round, Peer, Peer]:
    """Somebody in a round that is under way, and two of the others."""
    world = World(count, seed=1)
    _, (one, other, third, *_) = under_way(world)
    assert one.round is not None
    return world, one.round, other, third


def bears(
    round_: Round, names: set[PeerId], now: float, *, epoch: int = 0, servers: int = 0
) -> bool:
    """Whether these are voted for."""
    plan = round_.agreement.plan
    assert plan is not None
    said = dataclasses.replace(plan, next_roster=tuple(sorted(names)), servers=servers)
    return round_.succession.bears(epoch, said, now, PATIENCE)


def say(world: World, round_: Round, peer: PeerId, status: str) -> None:
    """Somebody has announced another status."""
    island = round_.membership.islands[peer]
    island.announce = dataclasses.replace(island.announce, status=status)


def test_nobody_is_voted_out_who_is_there_and_decides() -> None:
    world, mine, other, third = scene()
    everybody, out = set(mine.roster), other.identity.peer_id
    assert bears(mine, everybody, world.now)
    assert not bears(mine, everybody - {out}, world.now)
    assert not bears(mine, everybody - {mine.me}, world.now)
    assert bears(mine, everybody - {out}, world.now, epoch=1), "the silent are not waited for there"
    say(world, mine, out, "joining")
    assert bears(mine, everybody - {out}, world.now), "it has restarted"
    say(world, mine, out, "leaving")
    assert bears(mine, everybody - {out}, world.now)
    mine.membership.on_unreachable(third.identity.peer_id, world.now)
    assert bears(mine, everybody - {out, third.identity.peer_id}, world.now)


def test_half_of_all_are_not_voted_out_at_once_unless_they_leave() -> None:
    world, mine, other, third = scene(4)
    out = {other.identity.peer_id, third.identity.peer_id}
    for peer in out:
        mine.membership.on_unreachable(peer, world.now)
    assert not bears(mine, set(mine.roster) - out, world.now)
    say(world, mine, other.identity.peer_id, "leaving")
    assert bears(mine, set(mine.roster) - out, world.now)


def test_nobody_is_voted_in_who_was_never_heard_of() -> None:
    world, mine, _, _ = scene()
    assert not bears(mine, {*mine.roster, STRANGER}, world.now)
    announce = dataclasses.replace(mine.company.myself(), peer=STRANGER)
    observer = dataclasses.replace(announce, role="observer")
    for sequence, said in enumerate([observer, announce]):
        mine.membership.on_announce(said, b"", sequence, world.now)
        assert bears(mine, {*mine.roster, STRANGER}, world.now) == (said is announce)


def test_servers_are_counted_by_what_those_who_are_there_say() -> None:
    world, mine, other, third = scene()
    everybody, server = set(mine.roster), other.identity.peer_id
    assert not bears(mine, everybody, world.now, servers=1)
    island = mine.membership.islands[server]
    island.announce = dataclasses.replace(island.announce, role="server")
    assert mine.company.servers(()) == 1
    assert bears(mine, everybody, world.now, servers=1)
    assert not bears(mine, everybody, world.now, servers=0)
    assert not bears(mine, everybody, world.now, servers=2)
    mine.membership.on_unreachable(third.identity.peer_id, world.now)
    assert bears(mine, everybody, world.now, servers=2), "a leader may not know what it was"
    mine.membership.on_unreachable(server, world.now)
    assert bears(mine, everybody, world.now, servers=0)
    assert not bears(mine, everybody, world.now, servers=3)


def test_of_many_a_leader_may_see_one_otherwise() -> None:
    world, mine, other, third = scene(OTHERWISE)
    left = set(mine.roster) - {other.identity.peer_id}
    assert bears(mine, left, world.now)
    assert not bears(mine, left - {third.identity.peer_id}, world.now)


def test_who_sees_it_otherwise_gives_in_after_a_while() -> None:
    world, mine, other, _ = scene()
    left = set(mine.roster) - {other.identity.peer_id}
    over = world.now + YIELDS * PATIENCE
    mine.membership.forgive(YIELDS * PATIENCE, over)
    assert not bears(mine, left, world.now)
    assert not bears(mine, left, over - 0.01)
    assert bears(mine, left, over)


def test_a_candidate_does_without_the_promise_that_would_bind_it_to_such_a_roster() -> None:
    world = World(4, seed=1)
    leader, others = under_way(world)
    one, other = others[0], others[1]
    current = one.round
    assert current is not None
    assert leader.round is not None
    voted = None
    while voted is None:
        world.run(world.now + 0.01)
        voted = leader.round.agreement.voted
    outcome = dataclasses.replace(voted[1], next_roster=(leader.identity.peer_id,))
    assert not current.finished
    prepare = current.proposer.prepare(0, current.roster)
    mine = current.agreement.on_prepare(current.me, prepare)
    assert isinstance(mine, Promise)
    current.proposer.on_promise(current.me, mine)
    bound = Promise(0, prepare.ballot, 0, 0, outcome, ())
    assert current.on_message(leader.identity.peer_id, bound, world.now) == []
    assert leader.identity.peer_id not in current.proposer.promises
    free = Promise(0, prepare.ballot, 0, 0, None, ())
    current.proposer.on_promise(other.identity.peer_id, free)
    assert current.proposer.promises.keys() == {current.me, other.identity.peer_id}


def candidate() -> tuple[World, Round, tuple[Peer, Peer, Peer], Outcome]:
    """One of four stands, another one has voted for what takes in too many among strangers."""
    world = World(4, seed=1)
    leader, (one, other, third) = under_way(world)
    mine, its = one.round, leader.round
    assert mine is not None
    assert its is not None
    while its.agreement.voted is None:
        world.run(world.now + 0.01)
    assert not mine.finished
    names = [Identity.from_seed(bytes([60 + n]) * 32).peer_id for n in range(4)]
    voted = dataclasses.replace(
        its.agreement.voted[1], next_roster=tuple(sorted([*mine.roster, *names]))
    )
    mine.company.trial = Trial()
    stand(mine)
    return world, mine, (leader, other, third), voted


def stand(mine: Round) -> None:
    """Ask for promises, mine first."""
    promise = mine.agreement.on_prepare(mine.me, mine.proposer.prepare(0, mine.roster))
    assert isinstance(promise, Promise)
    mine.proposer.on_promise(mine.me, promise)


def promise(world: World, mine: Round, by: Peer, voted: Outcome | None) -> list[Instruction]:
    """Somebody promises what a candidate has asked for last."""
    given = Promise(*mine.agreement.promised, 0, 0, voted, ())
    return mine.on_message(by.identity.peer_id, given, world.now)


def pass_by(world: World, mine: Round, seconds: float) -> list[Instruction]:
    """So much time passes, in which all are there and nothing comes; what is due then."""
    world.now += seconds
    mine.membership.forgive(seconds, world.now)
    return mine.tick(world.now)


def proposed(instructions: list[Instruction]) -> list[Plan]:
    """The plans among what is to be done."""
    said = [one.message for one in instructions if isinstance(one, (Broadcast, Send))]
    return [message for message in said if isinstance(message, Plan)]


def test_a_candidate_leads_by_such_a_promise_where_it_finds_no_majority_else() -> None:
    """Else nobody could: some restarted, take others for tried, and have voted."""
    world, mine, (voter, other, _), voted = candidate()
    patience = mine._patience()
    for _ in range(9):
        assert promise(world, mine, voter, voted) == []
        assert proposed(promise(world, mine, other, None)) == []
        assert proposed(pass_by(world, mine, patience * YIELDS / 10)) == []
    (plan,) = proposed(pass_by(world, mine, patience))
    assert plan.next_roster == voted.next_roster
    assert not mine.succession.withheld, "it has to, and so it votes for it"


def test_a_candidate_gives_the_others_time_first_however_long_it_has_stood() -> None:
    """Names that were never voted in get in by no claim of a vote while the others promise."""
    world, mine, (liar, other, third), voted = candidate()
    patience = mine._patience()
    for _ in range(3):  # they are slow, and lost on their way
        promise(world, mine, liar, voted)
        pass_by(world, mine, patience * YIELDS / 2)
        mine.proposer._outbid = True
        stand(mine)
    assert promise(world, mine, liar, voted) == []
    assert proposed(pass_by(world, mine, 0.9 * patience)) == []
    assert promise(world, mine, other, None) == []
    (plan,) = proposed(promise(world, mine, third, None))
    assert plan.next_roster != voted.next_roster
    stand(mine)
    assert promise(world, mine, liar, voted) == []
    assert proposed(pass_by(world, mine, 2 * patience)) == [], "it began anew with that plan"


@pytest.mark.parametrize("count", [3, 5])
def test_a_minority_that_sees_it_otherwise_holds_nobody_up(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Succession.bears

    def bears(succession: Succession, *what: object) -> bool:
        return succession.agreement.me != first and honest(succession, *what)  # type: ignore[arg-type]

    monkeypatch.setattr(Succession, "bears", bears)
    world = World(count, seed=count)
    first, *_ = world.peers
    world.run(30.0)
    agree(world)
    lengths = [len(peer.chain) for peer in world.peers.values()]
    assert min(lengths) >= 18
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("later", [False, True])
def test_a_plan_that_is_borne_at_once_or_later_ends_the_want_of_one(later: bool) -> None:
    """News of who is in it may come a moment after the plan."""
    world, mine, *_ = scene(4)
    succession, known = mine.succession, len(mine.membership.islands)
    names = [Identity.from_seed(bytes([60 + n]) * 32).peer_id for n in range(4)]
    mine.company.trial = Trial()
    assert not bears(mine, {*mine.roster, *names}, world.now)
    plan = mine.agreement.plan
    assert plan is not None
    one = dataclasses.replace(plan, next_roster=tuple(sorted({*mine.roster, *names[:3]})))
    mine.agreement.plan = one
    if later:
        assert not succession.judge(world.now, PATIENCE)
        succession.replanned()
        assert succession.has_no_choice(world.now + YIELDS * PATIENCE, PATIENCE)
    for sequence, peer in enumerate(names):
        said = dataclasses.replace(mine.company.myself(), peer=peer)
        mine.membership.on_announce(said, b"", sequence, world.now)
    assert len(mine.membership.islands) > known
    assert succession.judge(world.now, PATIENCE)
    if not later:
        succession.replanned()
    assert not succession.has_no_choice(world.now + YIELDS * PATIENCE, PATIENCE)


def test_among_strangers_no_more_are_voted_in_than_may_come_at_once() -> None:
    world, mine, *_ = scene(4)
    names = [Identity.from_seed(bytes([60 + n]) * 32).peer_id for n in range(4)]
    for sequence, peer in enumerate(names):
        said = dataclasses.replace(mine.company.myself(), peer=peer)
        mine.membership.on_announce(said, b"", sequence, world.now)
    assert bears(mine, {*mine.roster, *names}, world.now)
    mine.company.trial = Trial()
    assert bears(mine, {*mine.roster, *names[:3]}, world.now)
    for later in (0.0, 2 * YIELDS * PATIENCE):
        assert not bears(mine, {*mine.roster, *names}, world.now + later)
