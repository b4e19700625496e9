"""The sans-IO part of gossip: whom an island meets, how long it waits, which letters it takes."""

from __future__ import annotations

import pytest

from gossip.membership.members import Membership
from gossip.pairs.meeting import Drop, Finish, Habits, Key, Post, Stamp, Take
from gossip.pairs.pairing import order, successors
from gossip.pairs.wandering import MOST_MORE, Wandering
from protocols.identity import Identity, PeerId
from protocols.messages import Announce

PEERS = [Identity.from_seed(bytes([n] * 32)).peer_id for n in range(1, 6)]
ME = PEERS[0]
SEED = b"s" * 32


def member(count: int, *, round_: int = 3, eta: float = 0.0, one_way: bool = False) -> Wandering:
    """An island among ``count`` that all stand at one round; the others are ready in ``eta`` s."""
    membership = Membership(ME)
    for sequence, peer in enumerate(PEERS[1:count]):
        announce(membership, peer, round_, eta, sequence)
    return Wandering(ME, Habits(SEED, one_way=one_way), membership)


def announce(
    membership: Membership, peer: PeerId, round_: int, eta: float, sequence: int, now: float = 0.0
) -> None:
    said = Announce(
        peer, "island", "active", 1, (), "0", "", round_, b"", b"", 0, eta=eta, ready=not eta
    )
    membership.on_announce(said, b"", sequence, now)


def letter(
    sender: PeerId, round_: int = 3, *, answers: tuple[int, int] | None = None, number: int = 0
) -> Stamp:
    return Stamp(sender, round_, 0, answers, number)


def test_two_exchange_and_finish():
    core = member(2)
    assert core.begin(3, 1, 0.0) == [Post(PEERS[1], 3, 0, answers=None, awaited=True)]
    assert core.on_posted(PEERS[1], 0.1) == []  # it is ready: its letter is on its way
    (take,) = core.on_letter(letter(PEERS[1]), 0.2)
    assert isinstance(take, Take)
    assert [(t.stamp.sender, t.mine) for t in take.letters] == [(PEERS[1], (3, 0))]
    assert core.on_taken(0.3) == [Finish(3)]
    assert core.met[0].outcome == "mixed"
    assert core.needed == set()


def test_nobody_is_waited_for_who_will_not_be_ready_in_time():
    core = member(2, eta=30.0)
    core.begin(3, 1, 0.0)
    assert core.on_posted(PEERS[1], 0.05) == [Finish(3)]
    assert core.met[0].outcome == "open"
    assert core.needed == {(3, 0)}  # its answer may come later


def test_patience_ends():
    core = member(2)
    core.begin(3, 1, 0.0)
    core.on_posted(PEERS[1], 0.05)
    assert core.tick(core.patience.answer_s - 0.01) == []
    assert core.tick(core.patience.answer_s) == [Finish(3)]


def test_what_moves_is_waited_for():
    core = member(2)
    core.patience.training(-60.0)
    core.begin(3, 1, 0.0)
    assert core.wake_at(30.0) > 31.0
    core.on_posted(PEERS[1], 0.05)
    core.on_coming(PEERS[1], 0.05)
    assert core.tick(60.0) == []
    assert core.wake_at(60.0) > 61.0  # there is nothing to look for before
    assert core.on_broken(PEERS[1], 60.0) == [Finish(3)]


def test_what_hardly_moves_is_waited_for_two_usual_rounds():
    core = member(2)
    for round_, now in ((3, 0.0), (4, 100.0), (5, 200.0)):
        announce(core.membership, PEERS[1], round_, 0.0, round_, now)
        core.begin(round_, 1, now)
        if round_ < 5:
            core.on_letter(letter(PEERS[1], round_), now)
            core.on_posted(PEERS[1], now)
            core.on_taken(now)
            core.on_finished()
    core.on_posted(PEERS[1], 200.1)
    core.on_coming(PEERS[1], 200.1)
    assert core.patience.longest_s == 200.0
    assert core.tick(399.0) == []
    assert core.tick(401.0) == [Finish(5)]
    core.on_finished()
    announce(core.membership, PEERS[1], 6, 0.0, 6, 410.0)
    core.on_letter(letter(PEERS[1], 5, answers=(5, 0)), 410.0)  # late, and not in vain
    (take,) = core.begin(6, 1, 410.0)  # and no opening: it was too slow just now
    assert isinstance(take, Take)
    assert take.letters[0].mine == (5, 0)
    core.on_taken(410.0)
    core.on_finished()
    announce(core.membership, PEERS[1], 7, 0.0, 7, 500.0)
    assert core.begin(7, 1, 500.0) == [Post(PEERS[1], 7, 0, None, True)]


def test_in_the_first_exchange_what_hardly_moves_is_waited_for_as_long_as_two_times_inner_steps():
    for trained, longest in ((None, 60.0), (-10.0, 60.0), (-100.0, 200.0)):
        core = member(2)
        if trained is not None:
            core.patience.training(trained)
            core.patience.training(-1.0)  # and still is
        core.begin(3, 1, 0.0)
        core.on_posted(PEERS[1], 0.1)
        core.on_coming(PEERS[1], 0.1)
        assert core.patience.longest_s == longest
        assert core.tick(longest - 1.0) == []
        assert core.tick(longest + 1.0) == [Finish(3)]


def test_who_has_answered_is_not_too_slow_since_its_next_letter_is_on_its_way():
    core = member(2)
    core.begin(3, 1, 0.0)
    assert core.on_letter(letter(PEERS[1]), 0.1) == []  # this island's own is on its way still
    core.on_coming(PEERS[1], 0.2)
    (take,) = core.on_posted(PEERS[1], 0.3)
    assert isinstance(take, Take)
    core.on_taken(0.3)
    core.on_finished()
    core.on_broken(PEERS[1], 0.4)
    announce(core.membership, PEERS[1], 4, 0.0, 4, 1.0)
    assert core.begin(4, 1, 1.0) == [Post(PEERS[1], 4, 0, None, True)]


def test_a_late_answer_is_compared_with_the_letter_that_it_answers():
    core = member(2, eta=30.0)
    core.begin(3, 1, 0.0)
    core.on_posted(PEERS[1], 0.05)
    core.on_finished()
    assert core.on_letter(letter(PEERS[1], answers=(3, 0)), 1.0) == []
    found = core.begin(4, 1, 2.0)
    assert not [one for one in found if isinstance(one, Post)]  # it owed us an answer until now
    (take,) = [one for one in found if isinstance(one, Take)]
    assert take.letters[0].mine == (3, 0)


@pytest.mark.parametrize("later", [1, 4, 5])
def test_answers_count_for_so_many_rounds_of_ones_own_however_far_they_are_apart(later: int):
    """Of an island seven times slower than the median: its partner has moved by its answer."""
    core, found, first = member(3, eta=30.0), [], ""
    for turn in range(later + 1):
        now = 10.0 * turn
        for sequence, peer in enumerate(PEERS[1:3]):
            announce(core.membership, peer, 3 + 7 * turn, 30.0, 10 * turn + sequence, now)
        if turn == later:
            assert core.on_letter(letter(first, answers=(3, 0)), now) == []
        found = core.begin(core.round + 1 if turn else 3, 1, now)
        posts = [one for one in found if isinstance(one, Post)]
        if turn == 0:
            first = posts[0].to
        for post in posts:
            found += core.on_posted(post.to, now + 1)
        core.on_finished()
    assert core.round == 2 + 7 * later
    takes = [one for one in found if isinstance(one, Take)]
    assert [t.mine for take in takes for t in take.letters] == ([(3, 0)] if later < 5 else [])


@pytest.mark.parametrize("opening_first", [False, True])
def test_an_answer_counts_though_its_sender_opens_another_exchange(opening_first: bool):
    """It has moved by half of the way, so this island does; and then its opening is answered."""
    core = member(3, eta=30.0)
    (post,) = core.begin(3, 1, 0.0)
    assert isinstance(post, Post)
    core.on_posted(post.to, 0.05)
    core.on_finished()
    came = [letter(post.to, answers=(3, 0)), letter(post.to, 4, number=1)]
    for stamp in reversed(came) if opening_first else came:
        assert core.on_letter(stamp, 1.0) == []
    answer, take = core.begin(4, 1, 2.0)
    assert answer == Post(post.to, 4, 0, answers=(4, 0), awaited=False)
    assert isinstance(take, Take)
    assert [(t.stamp, t.mine) for t in take.letters] == [(came[0], (3, 0)), (came[1], (4, 0))]


def test_an_opening_is_answered_instead_of_opening_another():
    core = member(3, eta=30.0)
    core.on_letter(letter(PEERS[2]), 0.0)
    post, take = core.begin(3, 1, 1.0)
    assert post == Post(PEERS[2], 3, 0, answers=(3, 0), awaited=False)
    assert isinstance(take, Take)
    assert take.letters[0].mine == (3, 0)
    assert core.met[0].outcome == "answered"


def test_all_openings_are_answered_two_at_a_time():
    core = member(5, eta=30.0)
    for number, peer in enumerate(PEERS[1:4]):
        core.on_letter(letter(peer, number=number), 0.0)
    found = core.begin(3, 1, 1.0)
    taken = []
    while not isinstance(found[-1], Finish):
        *posts, take = found
        assert isinstance(take, Take)
        assert [p.exchange for p in posts if isinstance(p, Post)] == [core.exchange] * len(posts)
        taken.append(len(take.letters))
        assert all(t.mine == (3, core.exchange) for t in take.letters)
        found = core.on_taken(1.0)
    assert taken == [2, 1]
    assert [met.outcome for met in core.met] == ["answered", "answered"]


def test_late_answers_are_all_taken_and_leave_openings_to_the_next_exchange():
    """Who answers has moved, so each counts; an opening is answered where there is room for it."""
    core = member(5, eta=30.0)
    opened = {}
    for round_ in range(3, 6):
        for sequence, peer in enumerate(PEERS[1:]):
            announce(core.membership, peer, round_, 30.0, 10 * round_ + sequence, float(round_))
        (post,) = core.begin(round_, 1, float(round_))
        assert isinstance(post, Post)
        opened[post.to] = (round_, 0)
        core.on_posted(post.to, float(round_))
        core.on_finished()
    assert len(opened) == 3
    for number, (peer, key) in enumerate(opened.items()):
        core.on_letter(letter(peer, 6, answers=key, number=number), 6.0)
    (other,) = set(PEERS[1:]) - opened.keys()
    core.on_letter(letter(other, 6, number=3), 6.0)
    (take,) = core.begin(6, 1, 6.0)
    assert isinstance(take, Take)
    assert {t.stamp.sender: t.mine for t in take.letters} == opened
    post, take = core.on_taken(6.0)
    assert post == Post(other, 6, 1, answers=(6, 0), awaited=False)
    assert isinstance(take, Take)
    assert [t.stamp.sender for t in take.letters] == [other]


def test_openings_that_keep_coming_are_answered_in_the_next_round_at_last():
    """One peer that sends them faster than they are mixed in keeps no round from ending."""
    core = member(2)
    core.on_letter(letter(PEERS[1]), 0.0)
    instructions, taken = core.begin(3, 1, 0.0), 0
    while Finish(3) not in instructions:
        assert isinstance(instructions[-1], Take)
        taken += 1
        core.on_letter(letter(PEERS[1], number=taken), 0.0)  # while that is mixed in
        instructions = core.on_taken(0.0)
        assert taken < 100
    assert taken == 1 + MOST_MORE
    core.on_finished()
    post, take = core.begin(4, 1, 1.0)
    assert isinstance(take, Take)
    assert take.letters[0].stamp.number == taken
    assert post == Post(PEERS[1], 4, 0, (3, 0), False)


def test_answers_to_forgotten_letters_and_old_openings_are_dropped():
    core = member(3, round_=9, eta=30.0)
    core.on_letter(letter(PEERS[1], 9, answers=(2, 0)), 0.0)  # that one is forgotten
    core.on_letter(letter(PEERS[2], 4, number=1), 0.0)  # its sender is five rounds further
    found = [*core.begin(9, 1, 1.0), *core.on_posted(PEERS[1], 1.1), *core.on_posted(PEERS[2], 1.1)]
    (drop,) = [one for one in found if isinstance(one, Drop)]
    assert {stamp.sender for stamp in drop.letters} == set(PEERS[1:3])
    assert not [one for one in found if isinstance(one, Take)]


def test_who_loses_its_partner_turns_to_another():
    core = member(5)
    (first,) = core.begin(3, 1, 0.0)
    assert isinstance(first, Post)
    (second,) = core.on_failed(first.to, 0.1)
    assert isinstance(second, Post)
    assert second.to != first.to
    assert core.needed == {(3, 0)}


def test_who_loses_its_partner_whose_letter_was_dropped_turns_to_another():
    """It has nothing of it to go on with, as if no letter had come."""
    core = member(5)
    (first,) = core.begin(3, 1, 0.0)
    assert isinstance(first, Post)
    came = letter(first.to)
    assert core.on_letter(came, 0.05) == []  # this island's own is on its way still
    core.on_dropped(came)
    (second,) = core.on_failed(first.to, 0.1)
    assert isinstance(second, Post)
    assert second.to != first.to


def test_an_opening_that_came_after_all_is_met_by_its_answer():
    """Its transfer stood still for too long: the other has it, and has moved."""
    core = member(2)
    core.begin(3, 1, 0.0)
    assert core.on_failed(PEERS[1], 0.5) == [Finish(3)]
    core.on_finished()
    assert core.needed == {(3, 0)}
    core.begin(4, 1, 1.0)
    core.on_posted(PEERS[1], 1.05)
    (take,) = core.on_letter(letter(PEERS[1], answers=(3, 0)), 1.06)
    assert isinstance(take, Take)
    assert [one.mine for one in take.letters] == [(3, 0)]
    assert core.needed == {(4, 0)}  # which may be answered as well
    core.on_taken(1.1)
    core.on_finished()
    core.on_letter(letter(PEERS[1], answers=(3, 0), number=1), 1.2)
    found = core.begin(5, 1, 2.0)
    assert not [one for one in found if isinstance(one, Take)]  # once


@pytest.mark.parametrize(
    "keys",
    [
        [(3, 0), (4, 0)],
        [(4, 0), (3, 0)],
        [(2, 0), (3, 0), (4, 0)],
        [(3, 0), (2, 0), (4, 0)],
        [(4, 0), (3, 0), (2, 0)],  # and the letter that is forgotten by now is answered last
    ],
)
def test_of_answers_to_two_letters_none_makes_way_for_the_other(keys: list[Key]):
    """Their sender stood still, and has moved by both since; three are not asked for."""
    core = member(2, eta=30.0)
    core.begin(3, 1, 0.0)
    core.on_failed(PEERS[1], 5.0)
    core.on_finished()
    announce(core.membership, PEERS[1], 3, 30.0, 1, 59.0)
    core.begin(4, 1, 60.0)
    core.on_posted(PEERS[1], 60.05)
    core.tick(70.0)
    core.on_finished()
    assert core.needed == {(3, 0), (4, 0)}
    for number, key in enumerate(keys):
        core.on_letter(letter(PEERS[1], answers=key, number=number), 71.0)
    count = [key for key in keys if key in core.needed]
    assert [stamp.answers for stamp in core._held[PEERS[1]]] == count
    again = [letter(PEERS[1], answers=key, number=9) for key in count]
    for stamp in again:
        core.on_letter(stamp, 72.0)
    (take,) = core.begin(5, 1, 120.0)
    assert isinstance(take, Take)
    assert [(t.stamp, t.mine) for t in take.letters] == list(zip(again, count, strict=True))
    assert core.needed == set()


def test_one_alone_goes_on():
    core = member(1)
    assert core.begin(0, 1, 0.0) == [Finish(0)]
    assert core.met[0].outcome == "alone"


def test_who_is_behind_counts_on_from_the_median():
    core = member(4, round_=12)
    core.begin(3, 1, 0.0)
    assert core.round == 11  # what the others, who train for 12, have just done


def test_of_two_who_is_behind_counts_on_from_the_other():
    """Its own round is no reason to stay: the other one would end the run, and leave it alone."""
    core = member(2, round_=80)
    core.begin(20, 1, 0.0)
    assert core.round == 79
    ahead = member(2, round_=20)
    ahead.begin(80, 1, 0.0)
    assert ahead.round == 80
    alone = member(1)
    alone.begin(20, 1, 0.0)
    assert alone.round == 20


@pytest.mark.parametrize(("rounds", "counts"), [([80, 80, 20], 79), ([80, 20, 20], 20)])
def test_who_is_behind_with_others_counts_on_from_most_of_them(rounds: list[int], counts: int):
    """Where half of all are as far behind; but two of three others say it, not one."""
    core = member(1)
    for sequence, (peer, round_) in enumerate(zip(PEERS[1:], rounds, strict=False)):
        announce(core.membership, peer, round_, 0.0, sequence)
    core.begin(20, 1, 0.0)
    assert core.round == counts


def test_several_exchanges_follow_each_other():
    core = member(4)
    (post,) = core.begin(3, 2, 0.0)
    assert isinstance(post, Post)
    core.on_posted(post.to, 0.0)
    core.on_letter(letter(post.to), 0.1)
    (again,) = core.on_taken(0.2)
    assert isinstance(again, Post)
    assert again.exchange == 1


def test_shares_go_to_successors_and_everything_that_came_is_taken():
    core = member(4, one_way=True)
    core.on_letter(letter(PEERS[1], 0), 0.0)
    core.on_letter(letter(PEERS[1], 1, number=1), 0.0)
    posts = core.begin(3, 2, 0.0)
    to = [post.to for post in posts if isinstance(post, Post)]
    assert to == successors(PEERS[1:4], ME, 3, SEED, 2)
    core.on_posted(to[0], 0.1)
    (take,) = core.on_failed(to[1], 0.2)
    assert isinstance(take, Take)
    assert len(take.letters) == 2
    assert core.on_taken(0.3) == [Finish(3)]


def test_who_may_have_a_share_gets_no_other_until_that_is_known():
    core = member(4, one_way=True)
    core.owed.add(PEERS[1])
    to = [post.to for post in core.begin(3, 3, 0.0) if isinstance(post, Post)]
    assert sorted(to) == sorted(PEERS[2:4])


def test_in_a_ring_everybody_hears_from_as_many():
    heard = [to for me in PEERS for to in successors(PEERS, me, 7, SEED, 2)]
    assert all(heard.count(peer) == 2 for peer in PEERS)
    assert successors([ME], ME, 7, SEED, 2) == []
    assert len(order(PEERS, 7, SEED)) == 5


def test_only_what_moves_counts_as_the_time_of_an_exchange():
    core = member(2)
    core.begin(3, 1, 0.0)
    core.on_posted(PEERS[1], 0.5)
    core.on_coming(PEERS[1], 0.7)  # 0.2 s in which the partner was not ready yet
    (take,) = core.on_letter(letter(PEERS[1]), 1.0)
    assert isinstance(take, Take)
    assert core.met[0].moving_s == pytest.approx(0.8)
    assert core.met[0].seconds == pytest.approx(1.0)


def test_the_time_of_a_letter_to_somebody_who_is_gone_is_not_known():
    core = member(3)
    (post,) = core.begin(3, 1, 0.0)
    (again,) = core.on_failed(post.to, 4.0)
    core.on_posted(again.to, 4.1)
    core.on_letter(letter(again.to), 4.2)
    assert core.met[0].moving_s is None


def test_who_is_ready_later_in_the_same_round_does_not_count_one_more():
    core = member(5, round_=4)  # the others train for round 4 already
    core.begin(3, 1, 0.0)
    assert core.round == 3
