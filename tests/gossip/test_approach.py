"""Replays or a download, whichever brings a node nearer; and when the others have to wait."""

from __future__ import annotations

import pytest

from gossip.catchup.approach import IN_VAIN, KEPT_OUT, WORTH, Approach
from protocols.bounds import MAX_PEERS
from protocols.identity import PeerId

PEER = PeerId("peer")


def approach(pace: float = 1.0) -> Approach:
    """A state of four rounds' bytes; the others' rounds take ``pace`` seconds."""
    made = Approach(round_bytes=100, state_bytes=400)
    for round_ in range(10):
        made.heard(PEER, round_, pace * round_)
    return made


def test_what_was_not_measured_follows_from_the_sizes() -> None:
    one, other = approach(), approach()
    one.replayed(2.0)
    other.downloaded(2.0)
    assert (one.replay_s, one.download_s) == (2.0, 8.0)
    assert (other.replay_s, other.download_s) == (0.5, 2.0)
    nothing = approach()
    assert (nothing.replay_s, nothing.download_s) == (0.0, 0.0)
    assert not nothing.is_far(10**6)


def test_a_download_is_taken_where_it_is_nearer() -> None:
    one = approach()
    one.replayed(1.0)
    one.downloaded(3.0)
    last = int(WORTH * 3.0)
    assert not one.is_far(last)
    assert one.is_far(last + 1)


def test_a_replay_that_took_long_once_is_tried_again_after_some_downloads() -> None:
    one = approach()
    one.replayed(4.0)
    downloads = 0
    while not downloads or one.is_far(1):
        one.downloaded(0.2)
        downloads += 1
        assert downloads < 20
    assert downloads > 5
    one.replayed(4.0)
    assert one.is_far(1)
    one.downloaded(100.0)
    assert one.replay_s < 4.0, "a slow download says nothing of replays"


def test_a_download_that_took_long_once_is_tried_again_after_some_replays() -> None:
    """As when hardly anybody could be reached. It may be what brings the node nearer at all."""
    one = approach()
    one.replayed(1.0)
    one.downloaded(25.0)
    replays = 0
    while not one.is_far(20):
        one.replayed(1.0)
        replays += 1
        assert replays < 20
    assert replays > 5
    one.downloaded(25.0)
    assert not one.is_far(20)
    one.replayed(100.0)
    assert one.download_s == 25.0, "a slow replay says nothing of downloads"


def test_a_download_over_a_link_that_carried_more_says_little_about_one_now() -> None:
    one = approach()
    one.downloaded(0.25)  # as the node came: 1,600 bytes a second
    one.replayed(11.0)
    assert one.is_far(1)
    one.link = lambda: 10.0
    assert one.download_s == 40.0
    assert not one.is_far(1)
    assert one.is_far(int(WORTH * 40.0 / 11.0) + 1)
    one.link = lambda: 1e6
    assert one.download_s == 0.25  # the link alone does not make it quicker


def test_where_no_state_can_be_had_all_is_replayed() -> None:
    one = Approach(round_bytes=100, state_bytes=0)
    one.replayed(10.0)
    assert not one.is_far(10**6)


@pytest.mark.parametrize("replay", [0.5, 5.0])
def test_it_asks_only_if_it_does_not_come_nearer(replay: float) -> None:
    one = approach()
    one.replayed(replay)
    asks = one.asks(3, 100.0)
    assert asks == (3 * replay if replay > 1.0 else 0.0)
    assert one.asking == (asks > 0)
    assert one.asks(0, 100.0) == 0.0
    assert not one.asking


def test_before_anything_is_known_it_does_not_ask() -> None:
    one = Approach(100, 400)
    one.replayed(5.0)
    assert one.asks(3, 0.0) == 0.0


def test_once_it_asks_it_does_so_until_it_is_there() -> None:
    """A wait for it makes the others' rounds longer: it must not take that for their pace."""
    one = approach()
    one.replayed(1.5)
    assert one.asks(2, 10.0) == 3.0
    for round_ in range(10, 40):
        one.heard(PEER, round_, 100.0 * round_)
    assert one.asks(1, 10.0) == 1.5
    assert one.asks(0, 10.0) == 0.0
    assert one.asks(1, 10.0) == 0.0


def test_after_three_downloads_without_coming_into_office_it_is_called_in_vain() -> None:
    one = approach()
    one.replayed(2.0)
    for download in range(IN_VAIN):
        assert one.narrow is None, download
        one.begins(20, 10.0 * download)
        one.asks(20, 10.0 * download)
        one.ends(10.0 * download + 8.0, arrived=download != 1)
    assert one.narrow == (one.replay_s, 1.0)
    one.stands(50, in_office=True)
    one.stands(51, in_office=True)
    assert one.narrow is None
    one.begins(20, 100.0)
    assert one.narrow is None, "it counts from when it was last in office"


def test_who_catches_up_by_itself_may_download_as_often_as_it_likes() -> None:
    one = approach()
    one.replayed(0.5)
    for _ in range(2 * IN_VAIN):
        one.begins(20, 0.0)
        one.asks(20, 0.0)
        one.ends(1.0, arrived=True)
    assert one.narrow is None


def test_what_is_left_of_a_download_and_of_the_rounds_meanwhile() -> None:
    one = approach()
    one.replayed(2.0)
    one.begins(20, 100.0)
    assert one.asks(20, 100.0) == one.download_s == 8.0
    one.came(0.5)
    assert one.asks(20, 103.0) == pytest.approx(3.0)  # as long again
    assert one.asks(22, 103.0) == pytest.approx(3.0 + 2 * 2.0)
    assert one.asks(60, 103.0) == pytest.approx(3.0 + 8.0)  # another download
    one.came(1.0)
    assert one.asks(20, 106.0) > 0.0
    one.ends(106.0, arrived=True)
    assert one.download_s == 6.0
    assert one.asks(0, 106.0) == 0.0


def test_what_is_left_gets_less_while_a_round_is_replayed() -> None:
    one = approach()
    one.replayed(4.0)
    assert one.asks(2, 20.0) == 8.0
    one.replays(20.0)
    assert (one.asks(2, 21.0), one.asks(2, 23.0)) == (7.0, 5.0)
    assert one.asks(2, 60.0) == 4.5  # it is not there yet
    one.replays(None)
    assert one.asks(1, 60.0) == 4.0


def test_who_got_nothing_by_a_download_replays_more() -> None:
    one = approach()
    one.downloaded(2.0)
    assert one.is_far(10)
    one.begins(10, 0.0)
    one.ends(3.0, arrived=False)
    assert one.replay_s == 0.5
    assert one.download_s == 6.0
    assert not one.is_far(10)


def test_a_liar_does_not_hide_the_pace_of_the_others() -> None:
    one = Approach(100, 400)
    one.heard(PeerId("liar"), 10**9, 0.0)
    for round_ in range(10):
        one.heard(PEER, round_, 0.1 * round_)
    one.replayed(1.0)
    assert one.asks(1, 1.0) == 1.0


def test_what_is_kept_of_the_others_is_bounded() -> None:
    one = Approach(100, 400)
    for number in range(3 * MAX_PEERS):
        one.heard(PeerId(str(number)), number, 0.0)
    assert len(one._heard) <= MAX_PEERS


def test_who_is_there_each_time_a_moment_too_late_asks_as_well() -> None:
    one = approach()
    one.replayed(0.5)  # quick enough, by itself
    for _ in range(KEPT_OUT):
        assert one.asks(1, 10.0) == 0.0
        one.arrived()
    assert one.asks(1, 10.0) == 0.5
    assert one.asks(0, 10.5) == 0.0
    one.stands(7, in_office=True)
    one.stands(8, in_office=True)
    assert one.asks(1, 11.0) == 0.0


def test_who_is_named_and_put_out_again_is_too_late_as_well() -> None:
    """It has to replay the round that named it: the others may have gone on by then."""
    one = approach()
    one.replayed(0.5)
    for number in range(KEPT_OUT):
        assert one.asks(1, 10.0) == 0.0
        one.arrived()
        one.stands(2 * number, in_office=True)
        one.stands(2 * number + 1, in_office=False)
    assert one.asks(1, 10.0) == 0.5


def test_what_was_here_before_says_nothing_of_how_long_a_download_takes() -> None:
    one = approach()
    one.asking = True
    one.begins(10, 100.0)
    one.had(0.5)
    one.came(0.625)
    assert one.asks(10, 110.0) == pytest.approx(30.0)
    one.ends(140.0, arrived=True)
    assert one.download_s == pytest.approx(80.0)
    one.begins(10, 200.0)
    one.had(1.0)
    assert one.asks(10, 201.0) < 1.0
    one.ends(202.0, arrived=True)
    assert one.download_s == pytest.approx(80.0)
