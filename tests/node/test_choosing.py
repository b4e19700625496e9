"""Knobs that follow from measurements: what is chosen, who decides, and what is told of it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from conductor_kit import quiet_swarm
from gossip_kit import EVERYBODY, PLACE, announce_of

from bootstrap.manifest import Manifest
from bootstrap.manifest_rounds import Rounds
from gossip.membership.members import Membership
from node.island.choosing import Chooser
from node.island.pace import Pace
from node.island.targets import Targets
from node.modes import clients_of
from node.monitor.console import render
from node.monitor.event_log import EventLog
from node.monitor.events import KnobSet, Notice
from node.monitor.state import NodeState
from node.monitor.views import NodeView
from node.run_rules import hidden_steps
from protocols.messages import Announce


def chooser(steps_per_second: float = 10.0, own: int = 0, mode: str = "", **rounds: Any) -> Chooser:
    tables = {"model": {"n_layers": 4}, "rounds": rounds, **({"mode": mode} if mode else {})}
    manifest = Manifest.model_validate(tables)
    return Chooser(manifest, Pace(steps_per_second=steps_per_second), EventLog(), own)


def other(number: int = 1, **changes: Any) -> Announce:
    return announce_of(EVERYBODY[number].peer_id, **changes)


def told(of: Chooser) -> list[KnobSet]:
    return [r.event for r in of.events.recent if isinstance(r.event, KnobSet)]


def test_what_is_fixed_stays() -> None:
    one = chooser(inner_steps=40, dynamic_steps=False)
    one.timed(10.0)
    assert one.steps([other(steps_per_second=40.0)]) == 40
    assert told(one) == []


def test_the_slower_take_fewer_steps_and_say_why() -> None:
    one = chooser(inner_steps=40)
    assert one.steps([other(steps_per_second=40.0)]) == 10
    (event,) = told(one)
    assert (event.name, event.value, event.before) == ("own_inner_steps", 10, None)
    assert event.inputs == {"inner_steps": 40.0, "steps_per_second": 10.0, "fastest": 40.0}
    one.steps([other(steps_per_second=41.0)])
    assert len(told(one)) == 1, "a choice that is about the same is not told again"
    one.steps([other(steps_per_second=10.0)])
    assert (told(one)[-1].value, told(one)[-1].before) == (40, 10)


def test_nothing_is_told_of_a_speed_before_a_step_was_timed() -> None:
    one = chooser(inner_steps=40, steps_per_second=0.0)
    assert one.steps([other(steps_per_second=40.0)]) == 40
    assert told(one) == []


def test_an_island_alone_is_told_nothing_of_the_fastest() -> None:
    one = chooser(inner_steps=40)
    assert one.steps([]) == 40
    assert told(one) == []
    assert one.steps([other(steps_per_second=40.0)]) == 10
    assert one.steps([]) == 40  # the other one has left
    assert [event.value for event in told(one)] == [10, 40]


def test_the_operator_has_the_last_word() -> None:
    one = chooser(own=7, inner_steps=40)
    assert one.steps([other(steps_per_second=40.0)]) == 7
    assert "--inner-steps" in told(one)[0].why


def test_steps_grow_until_waiting_is_a_twentieth_and_no_further_than_allowed() -> None:
    one = chooser(inner_steps=20, most_steps=200)
    assert one.steps([]) == 20
    assert "no exchange" in told(one)[0].why
    one.timed(0.5)  # 5 steps' worth: 95 steps beside it
    assert one.steps([]) == 95
    share = 0.5 / (0.5 + 95 / 10)
    assert share == pytest.approx(0.05, abs=1e-3)
    slow = chooser(inner_steps=20, most_steps=200)
    slow.timed(30.0)
    assert slow.steps([]) == 200
    assert "coarser codec" in next(event for event in told(slow) if event.name == "inner_steps").why


def test_each_fragment_of_a_round_is_waited_for() -> None:
    one = chooser(inner_steps=20, most_steps=400, fragments=4, tau=2)
    one.timed(0.5)  # 3 steps' worth beyond τ, four times a round
    assert one.steps([]) == 228
    share = 4 * 0.3 / (4 * 0.3 + 228 / 10)
    assert share == pytest.approx(0.05, abs=1e-3)


def test_in_eager_a_transfer_has_the_time_of_all_steps_however_many_these_become() -> None:
    one = chooser(mode="eager", inner_steps=20, most_steps=200)
    assert (one.steps([]), one.tau()) == (20, 20)
    one.timed(6.0)  # 60 steps' worth: with 57 a twentieth of it is waited for
    assert (one.steps([]), one.tau()) == (57, 57)
    assert hidden_steps(one.manifest.rounds, one.wanted) == 57  # as whoever chooses codecs has it
    quicker = [other(steps_per_second=40.0, wanted_steps=150)]
    assert (one.steps(quicker), one.tau()) == (50, 200)  # in the same time
    slow = chooser(mode="eager", inner_steps=20, most_steps=200)
    slow.timed(30.0)
    assert (slow.steps([]), slow.tau()) == (200, 200)
    assert told(slow)[-1].why == "285 steps would be needed: a coarser codec would help"
    fixed = chooser(mode="eager", inner_steps=20, most_steps=200, overlap_steps=5)
    fixed.timed(0.6)  # a step's worth beyond the five that the run asks for
    assert (fixed.steps([]), fixed.tau()) == (20, 5)


def test_all_islands_take_the_most_that_anybody_asks_for() -> None:
    one = chooser(inner_steps=20, most_steps=200)
    one.timed(0.2)
    asked = [other(steps_per_second=10.0, wanted_steps=150), other(2, steps_per_second=10.0)]
    assert one.steps(asked) == 150
    assert one.wanted == 38
    assert one.steps([dataclasses.replace(a, wanted_steps=10**9) for a in asked]) == 200


def test_tau_follows_from_the_transfer() -> None:
    one = chooser(inner_steps=40, fragments=2)
    assert one.tau() == 1
    one.transfer.add(0.35)
    assert one.tau() == 4
    assert told(one)[-1].name == "tau"
    assert chooser(inner_steps=40, fragments=2, tau=3).tau() == 3


def test_fragments_are_hidden_for_tau_or_until_the_next_ones_turn() -> None:
    def hidden(wanted: int, **rounds: int) -> float:
        given = {"inner_steps": 40, "most_steps": 400} | rounds
        return hidden_steps(Rounds.model_validate(given), wanted)

    assert hidden(0, fragments=2) == hidden(0, fragments=4) == 10
    assert hidden(0, fragments=2, tau=3) == 3
    assert hidden(0, inner_steps=10, fragments=4) == 2
    assert hidden(0, overlap_steps=5) == hidden(200, overlap_steps=5) == 5


def test_choices_are_lines_and_stand_in_the_state() -> None:
    one = chooser(inner_steps=40)
    state = NodeState(NodeView(peer="me"), log=one.events)
    one.steps([other(steps_per_second=40.0)])
    line = render(told(one)[0])
    assert line.startswith("own_inner_steps is 10: slower")
    assert "fastest 40" in line
    knob = state.brief()["knobs"]["own_inner_steps"]
    assert (knob["value"], knob["inputs"]["fastest"]) == (10, 40.0)


def test_who_began_late_ends_with_the_others() -> None:
    one = chooser(steps_per_second=10.0)
    assert one.together(20, 1000, [30.0]) == 320
    assert one.together(20, 1000, [12.0, 30.0]) == 140  # with the first of them
    assert one.together(20, 1000, [97.0]) is None  # about the same end
    assert one.together(20, 1000, [500.0]) is None  # it is the others who end with it
    assert one.together(20, 1000, []) is None
    assert one.together(0, 1000, [0.0]) == 1


def test_among_strangers_an_island_ends_with_the_median_of_all() -> None:
    one = chooser(steps_per_second=10.0)
    one.manifest = Manifest.model_validate({"merge": {"trust": "open"}})
    assert one.together(20, 1000, [12.0]) == 140  # of two there is no majority
    assert one.together(20, 1000, [12.0, 30.0]) == 320
    assert one.together(20, 1000, [12.0, 500.0]) is None
    assert one.together(20, 1000, [12.0, 30.0, 40.0, 500.0]) == 420


@pytest.mark.parametrize("claim", [1e4, 1e18, 1.7e308])
def test_one_that_claims_to_be_fast_does_not_stop_the_others(claim: float) -> None:
    one = chooser(inner_steps=80)
    assert one.steps([other(1, steps_per_second=claim)]) == 10
    honest = [other(number, steps_per_second=10.0) for number in (1, 2)]
    assert one.steps([*honest, other(3, steps_per_second=claim)]) == 10
    # what two say is believed
    pair = [other(number, steps_per_second=400.0) for number in (3, 4)]
    assert one.steps([*honest, *pair, other(4, steps_per_second=claim)]) == 2


@pytest.mark.parametrize("claim", [1e18, 1.7e308])
def test_no_claim_is_beyond_the_arithmetic(claim: float) -> None:
    one = chooser(inner_steps=20, most_steps=200)
    one.timed(5.0)
    assert one.steps([other(steps_per_second=claim, wanted_steps=2**62)]) >= 1
    assert one.wanted <= 200
    assert one.together(5, 100, [claim]) is None
    assert one.together(5, 100, [claim, 2.0]) == 25


def in_pairs(steps_per_second: float = 10.0, own: int = 0, **rounds: Any) -> Chooser:
    given = {"inner_steps": 20, "most_steps": 400, "dynamic_steps": False} | rounds
    manifest = Manifest.model_validate({"mode": "gossip", "rounds": given})
    return Chooser(manifest, Pace(steps_per_second=steps_per_second), EventLog(), own)


def test_in_pairs_steps_follow_from_ones_own_exchanges() -> None:
    one = in_pairs()
    assert one.steps([]) == 20
    assert "no exchange" in told(one)[0].why
    for _ in range(3):
        one.timed(0.5)
    assert one.steps([]) == one.wanted == 95
    event = told(one)[-1]
    assert (event.name, event.before, event.why) == (
        "inner_steps",
        20,
        "waiting takes 5% of a round",
    )
    assert event.inputs["beyond_overlap_s"] == 0.5
    for _ in range(8):
        one.timed(0.01)
    assert one.steps([]) == 20, "the link is wide again"


def test_in_pairs_what_inner_steps_hide_is_not_waited_for() -> None:
    one = in_pairs(overlap_steps=3)
    one.timed(0.5)  # 3 of its 5 steps' worth is hidden
    assert one.steps([]) == 38


def test_in_pairs_each_fragment_is_waited_for() -> None:
    given = {"inner_steps": 20, "most_steps": 400, "fragments": 4, "tau": 2}
    one = Chooser(
        Manifest.model_validate({"mode": "gossip", "model": {"n_layers": 4}, "rounds": given}),
        Pace(steps_per_second=10.0),
        EventLog(),
    )
    one.timed(0.5)
    assert one.steps([]) == 228


def test_in_pairs_nobody_counts_rounds_faster_than_the_median_or_answers_too_late() -> None:
    def asking(*wanted: int) -> list[Announce]:
        return [
            other(number, steps_per_second=10.0, wanted_steps=n)
            for number, n in enumerate(wanted, 1)
        ]

    fast = in_pairs()
    fast.timed(0.0)
    assert fast.steps(asking(90, 100)) == 90
    assert "the median" in told(fast)[-1].why
    assert fast.wanted == 20, "it says what it asks for itself"
    narrow = in_pairs()  # 285 steps
    narrow.timed(1.5)
    assert narrow.steps(asking(80, 90)) == 180, "twice the median: max_staleness is 4"
    assert "too late" in told(narrow)[-1].why
    assert narrow.steps(asking(250, 260)) == 260, "about as many: as the others"
    strict = in_pairs(max_staleness=1)
    strict.timed(1.5)
    assert strict.steps(asking(80, 90)) == 90
    assert narrow.steps(asking(2**62, 2**62)) == 400


def test_in_pairs_a_partner_with_a_narrow_link_does_not_set_one_apart() -> None:
    """It was met in two of eight rounds: the mean is asked for, by all, and taken by all."""
    one = in_pairs()
    for seconds in (0.02, 0.02, 0.02, 2.0, 0.02, 0.02, 2.0, 0.02):
        one.timed(seconds)
    asked = [other(number, steps_per_second=10.0, wanted_steps=40) for number in (1, 2)]
    assert one.steps(asked) == 40
    assert one.wanted == 98


def test_in_pairs_the_slower_take_fewer_of_the_steps_that_links_ask_for() -> None:
    one = in_pairs(dynamic_steps=True)
    one.timed(0.5)
    # 0.5 s are 20 steps of the fastest's, which asks for 380 of its own: 95 of this one's
    assert one.steps([other(steps_per_second=40.0)]) == 95
    assert one.wanted == 380
    fixed = in_pairs(own=7)
    fixed.timed(0.5)
    assert fixed.steps([]) == 7


MOST = 44 * 31  # steps in so many rounds, and those that overlap their exchange
LIE = 10**9


@pytest.mark.parametrize(
    ("mine", "said", "position", "at_will"),
    [
        (0, (), 0, 0),
        (880, (), 0, 0),
        (0, (0, 0), 0, 0),  # newcomers too
        (0, (900,), 900, 900),
        (0, (900, 950, 880), 900, 900),
        (0, (0, 900, 0), 900, 900),
        (0, (10, 900), 900, 10),  # half of them are slow
        (0, (LIE, 900, 910), 910, 910),
        (880, (LIE, 900, 910), 910, 910),
        (0, (LIE, LIE), MOST, MOST),
        (0, (LIE, 900), MOST, 900),  # one of two others lies
        (880, (LIE, 900), MOST, 900),
        (880, (1, 900), 900, 880),
        (880, (LIE,), MOST, MOST),
        (100, (900,), 900, 900),  # a slow one ends with the other
        (100, (100, 900), 900, 100),
        (100, (100, 900, 900), 900, 900),
    ],
)
def test_the_schedule_stands_where_most_others_do(
    mine: int, said: tuple[int, ...], position: int, at_will: int
) -> None:
    """Where their count bounds too little more have to agree: as rounds are arrivals, or longer."""
    alive = [other(n, position=one, role="island") for n, one in enumerate(said, 1)]
    alive.append(other(4, position=77, role="server"))
    swarm: Any = SimpleNamespace(
        membership=SimpleNamespace(members_alive=lambda now: alive), now=lambda: 0.0
    )
    replica: Any = SimpleNamespace(place=SimpleNamespace(round=30))
    me = EVERYBODY[0].peer_id
    for expected, knobs in (
        (position, {"inner_steps": 40}),
        (at_will, {"inner_steps": 40, "mode": "async"}),
        (at_will, {"inner_steps": 20, "most_steps": 40}),
    ):
        choosing = chooser(overlap_steps=4, **knobs)
        choosing.pace.position = mine
        targets = Targets(choosing.manifest, me, [replica], choosing)
        assert targets.position(swarm) == expected
        assert targets.position(quiet_swarm()) == 0


@pytest.mark.parametrize(
    ("islands", "scripts", "mode", "told"),
    [
        (2, False, "diloco", 0),
        (3, False, "diloco", 1),
        (3, True, "diloco", 0),
        (3, False, "async", 0),  # batches are numbered
    ],
)
def test_more_islands_than_a_round_has_windows_for_are_told_once(
    islands: int, scripts: bool, mode: str, told: int
) -> None:
    script = {"layout": "00" * 32, "parameters": 4, "dense": 4} if scripts else {}
    run = {"mode": mode, "data": {"islands": 2}, "script": script, "rounds": {"inner_steps": 40}}
    choosing = Chooser(Manifest.model_validate(run), Pace(), EventLog())
    roster = tuple(one.peer_id for one in EVERYBODY[:islands])
    replica: Any = SimpleNamespace(roster=roster, place=PLACE)
    targets = Targets(choosing.manifest, roster[0], [replica], choosing)
    assert [targets.next(quiet_swarm()), targets.next(quiet_swarm())] == [40, 40]
    texts = [r.event.text for r in choosing.events.recent if isinstance(r.event, Notice)]
    assert len(texts) == told
    assert all(text.startswith("3 islands read what a round has for 2") for text in texts)


@pytest.mark.parametrize("serves", [0, 1, 2])
def test_servers_in_office_have_no_part_of_a_rounds_windows(serves: int) -> None:
    roster = tuple(one.peer_id for one in EVERYBODY[:3])
    membership = Membership(roster[-1] if serves < 2 else roster[0])
    for number, peer in enumerate(roster[:2] if serves < 2 else roster[1:]):
        role = "server" if peer == roster[serves] else "island"
        membership.on_announce(announce_of(peer, role=role), b"", number, 0.0)
    swarm: Any = SimpleNamespace(membership=membership, now=lambda: 0.0, presence=Mock())
    run = {"data": {"islands": 2}, "rounds": {"inner_steps": 40}}
    choosing = Chooser(Manifest.model_validate(run), Pace(), EventLog())
    replica: Any = SimpleNamespace(roster=roster, place=PLACE)
    targets = Targets(choosing.manifest, membership.me, [replica], choosing)
    assert targets.slot(swarm) == ((1, 2) if serves < 2 else (0, 2))
    stranger = Targets(choosing.manifest, EVERYBODY[3].peer_id, [replica], choosing)
    assert stranger.slot(swarm) == (2, 3)
    assert targets.slot(quiet_swarm())[1] == 3  # nobody has said anything yet
    targets.next(swarm)
    assert not [r for r in choosing.events.recent if isinstance(r.event, Notice)]


def test_where_one_who_was_drawn_abstains_the_next_one_trains() -> None:
    """As rounds see it: else nobody would train whom they count on."""
    manifest = Manifest.model_validate({"mode": "fedavg"})
    choose = clients_of(manifest)
    assert choose is not None
    peers = [identity.peer_id for identity in EVERYBODY[:4]]
    drawn = choose(PLACE, peers)
    out = next(peer for peer in peers if peer in drawn)
    left = [peer for peer in peers if peer != out]
    (following,) = set(choose(PLACE, left)) - set(drawn)

    def trains(status: str) -> bool:
        alive = [announce_of(peer, status=status if peer == out else "active") for peer in peers]
        swarm: Any = SimpleNamespace(
            membership=SimpleNamespace(members_alive=lambda now: alive), now=lambda: 0.0
        )
        replica: Any = SimpleNamespace(place=PLACE, roster=peers)
        return Targets(manifest, following, [replica], chooser()).drawn(swarm)

    assert not trains("active")
    assert trains("joining")


def test_who_is_drawn_for_any_fragment_trains() -> None:
    """Each draws by its own rounds: whose turn has passed in the first one may be awaited yet."""
    manifest = Manifest.model_validate({"mode": "fedavg", "rounds": {"fragments": 2}})
    choose = clients_of(manifest)
    assert choose is not None
    peers = [identity.peer_id for identity in EVERYBODY[:4]]
    places = [
        dataclasses.replace(PLACE, fragment=fragment, round=7 - fragment) for fragment in range(2)
    ]
    drawn = [set(choose(place, peers)) for place in places]
    alive = [announce_of(peer) for peer in peers]
    swarm: Any = SimpleNamespace(
        membership=SimpleNamespace(members_alive=lambda now: alive), now=lambda: 0.0
    )
    replicas: Any = [SimpleNamespace(place=place, roster=peers) for place in places]
    trains = {p for p in peers if Targets(manifest, p, replicas, chooser()).drawn(swarm)}
    assert drawn[0] != drawn[1]
    assert trains == drawn[0] | drawn[1]
