"""What a leader decides from announcements."""

from __future__ import annotations

import bisect
import dataclasses

import pytest
from gossip_kit import PLACE, SHAPE, announce_of, leader, plan_of, result_of, results_of, roster_of
from planning_kit import RULES, Identities, fresh

from gossip.plans.certificate import certify, outcome_of
from gossip.plans.ladder import Ladder
from gossip.plans.planning import next_roster_of, owners_among
from gossip.plans.rules import FRIENDS, PATIENCE_S, STRANGERS, Rules
from gossip.plans.validity import (
    MAX_PATIENCE_S,
    MAX_TOKENS,
    PartKey,
    VerifiedResults,
    check_plan,
    key_of,
)
from gossip.rounds.agreement import Agreement
from protocols.bounds import MAX_ROSTER
from protocols.counts import pack_counts
from protocols.errors import LocalProtocolError, Malformed
from protocols.identity import PeerId
from protocols.messages import (
    MAX_PARTS,
    Announce,
    Certificate,
    Outcome,
    Part,
    PartResult,
    Plan,
    Promise,
)


def test_the_ready_contribute_and_all_live_members_merge(identities: Identities) -> None:
    members = identities(4)
    announces = [announce_of(peer) for peer in roster_of(members)]
    plan = fresh(members, announces, ready=announces[:2])
    assert [c.peer for c in plan.contributors] == list(roster_of(members))[:2]
    assert {part.owner for part in plan.parts} >= set(roster_of(members)[2:])  # have most to spare
    assert plan.leader == leader(members).peer_id
    assert plan.next_roster == roster_of(members)
    with pytest.raises(LocalProtocolError):
        fresh(members, announces, ready=[])


def test_whatever_is_announced_the_plan_stays_within_bounds(identities: Identities) -> None:
    members = identities(4)
    peers = roster_of(members)
    announces = [
        announce_of(peers[0], weight=-5.0, upload=-1.0, download=0.0),
        announce_of(peers[1], tokens=2**62, weight=1e300, upload=1e300, download=1e300),
        announce_of(peers[2], tokens=7, weight=1e9, upload=1e-300, download=1e-300),
        announce_of(peers[3], tokens=0, weight=0.0),
    ]
    plan = fresh(members, announces)
    weights = [contributor.weight for contributor in plan.contributors]
    assert weights == [0.0, float(MAX_TOKENS), 7.0, 0.0]


def test_slow_links_get_patience_but_not_for_ever(identities: Identities) -> None:
    members = identities(2)
    for speed, patience in ((1e9, PATIENCE_S), (1.0, MAX_PATIENCE_S)):
        announces = [announce_of(p, upload=speed, download=speed) for p in roster_of(members)]
        assert fresh(members, announces).patience_s == patience


def test_the_expected_time_is_that_of_the_slowest_link(identities: Identities) -> None:
    members = identities(2)
    announces = [announce_of(p, upload=1e5, download=1e5) for p in roster_of(members)]
    whole = RULES.encoded_bytes("int4", 0, SHAPE.size)
    # each sends half as slices and half as merged parts
    assert fresh(members, announces).expected_s == pytest.approx(whole / 1e5, rel=0.01)


def test_the_codec_of_a_fresh_plan_follows_from_links_round_and_history(
    identities: Identities,
) -> None:
    members = identities(2)
    peers = roster_of(members)
    rules = Rules(
        SHAPE.size, ("int8", "int4", "int2"), lambda name, a, b: (b - a) * int(name[-1]) // 8
    )

    def taken(
        speed: float, round_s: float, previous: str | None = None, exposed: float = 0.1
    ) -> str:
        announces = [announce_of(peer, upload=speed, download=speed) for peer in peers]
        changed = dataclasses.replace(rules, exposed=exposed)
        past = Ladder(previous)
        return fresh(members, announces, rules=changed, round_s=round_s, past=past).codec

    assert SHAPE.size == 65536  # int8 takes 1 s at 64 KiB/s, int4 half of it, int2 a quarter
    assert [taken(65536, round_s) for round_s in (11.0, 6.0, 3.0, 1.0)] == [
        "int8", "int4", "int2", "int2"
    ]  # fmt: skip
    assert taken(65536, 0.0) == "int8"  # no round was timed yet
    assert taken(65536, 0.0, "int2") == "int2"
    assert taken(65536, 0.0, "fp32") == "int8"
    assert taken(65536, 9.0, "int8") == "int8"  # it stays until it costs a fifth too much
    assert taken(65536, 8.0, "int8") == "int4"
    assert taken(65536, 11.0, "int4") == "int4"  # and rises where there is room
    assert taken(65536, 15.0, "int4") == "int8"


def test_the_codec_is_that_of_all_who_get_what_is_merged(identities: Identities) -> None:
    """Also where the others have not come to this place of the chain yet, for want of bytes."""
    members = identities(2)
    announces = [announce_of(p, upload=65536.0, download=65536.0) for p in roster_of(members)]
    rules = Rules(SHAPE.size, ("int8", "int4"), lambda name, a, b: (b - a) * int(name[-1]) // 8)
    past = Ladder("int8")
    assert fresh(members, announces[:1], rules=rules, round_s=2.0, past=past).codec == "int4"


def test_inner_steps_hide_an_exchange_as_far_as_the_fastest_takes_them(
    identities: Identities,
) -> None:
    members = identities(2)
    rules = Rules(
        SHAPE.size,
        ("int8", "int4", "int2"),
        lambda name, a, b: (b - a) * int(name[-1]) // 8,
        overlap_steps=lambda wanted: max(10.0, wanted),
    )

    def taken(round_s: float, fragments: int = 1, **said: float) -> str:
        announces = [
            announce_of(peer, upload=65536, download=65536, steps_per_second=speed, **said)
            for peer, speed in zip(roster_of(members), (5.0, 20.0), strict=True)
        ]
        shared = dataclasses.replace(rules, sharing=fragments)
        return fresh(members, announces, rules=shared, round_s=round_s, past=Ladder("int8")).codec

    assert taken(1.0) == "int4"  # int8 takes 1 s, int4 half of it, and that is hidden
    assert taken(2.0) == "int4"
    assert taken(8.0) == "int4"  # not more of a longer round
    assert taken(11.0) == "int8"  # of which 0.55 s may be waited
    assert taken(1.0, wanted_steps=20) == "int8"  # H that has grown hides as much
    assert taken(11.0, 2) == "int2"  # half of that for each fragment, and both may be on their way


@pytest.mark.parametrize("codec", ["int8", "fp32"])
def test_a_codec_that_the_run_does_not_allow_is_refused(identities: Identities, codec: str) -> None:
    members = identities(2)
    plan = plan_of(leader(members), members)
    wrong = dataclasses.replace(plan, codec=codec)
    with pytest.raises(Malformed, match="does not allow"):
        check_plan(wrong, PLACE, SHAPE, plan.roster, VerifiedResults())
    allowed = dataclasses.replace(SHAPE, codecs=("int4", codec))
    check_plan(wrong, PLACE, allowed, plan.roster, VerifiedResults())
    done = dataclasses.replace(
        wrong,
        parts=tuple(
            dataclasses.replace(part, result=result)
            for part, result in zip(plan.parts, results_of(plan, members), strict=True)
        ),
    )
    with pytest.raises(Malformed, match=r"another (codec|plan)|in another codec"):
        check_plan(done, PLACE, allowed, plan.roster, VerifiedResults())


def test_a_result_in_another_codec_than_its_round_has_is_refused(identities: Identities) -> None:
    """Also where its owner has signed it for this very plan."""
    members = identities(2)
    shape = dataclasses.replace(SHAPE, codecs=("int8", "int4"))
    plan = plan_of(leader(members), members, shape=shape)
    part = plan.parts[0]
    owner = next(i for i in members if i.peer_id == part.owner)

    def with_result(codec: str) -> Plan:
        result = result_of(owner, plan, part.start, part.stop, codec=codec)
        return dataclasses.replace(
            plan, parts=(dataclasses.replace(part, result=result), *plan.parts[1:])
        )

    check_plan(with_result("int8"), PLACE, shape, plan.roster, VerifiedResults())
    with pytest.raises(Malformed, match="in another codec"):
        check_plan(with_result("int4"), PLACE, shape, plan.roster, VerifiedResults())


def test_when_too_many_want_in_those_in_office_stay() -> None:
    office = [PeerId(f"o{i:03}") for i in range(200)]
    wanted = [*office[:150], *(PeerId(f"a{i:03}") for i in range(300))]
    found = next_roster_of(office, wanted)
    assert len(found) == MAX_ROSTER
    assert set(office[:150]) <= set(found)
    assert list(found) == sorted(found)
    assert next_roster_of(office, [office[1], office[0], office[0]]) == tuple(office[:2])


def test_the_messages_of_the_largest_round_fit(identities: Identities) -> None:
    """All of 256 members contribute, and each merges a part."""
    members = identities(MAX_ROSTER)
    shape = dataclasses.replace(SHAPE, size=MAX_ROSTER * 16384)
    roster = roster_of(members)
    by = leader(members)
    plan = plan_of(by, members, shape=shape)
    results = results_of(plan, members)
    done = dataclasses.replace(
        plan,
        parts=tuple(
            dataclasses.replace(part, result=result)
            for part, result in zip(plan.parts, results, strict=True)
        ),
    )
    assert Plan.decode(done.encode()) == done
    other = Agreement(leader(members, 1), PLACE, shape, roster)
    other.on_plan(by.peer_id, plan)
    events = [event for result in results for event in other.on_held(result)]
    assert len(events) == 1
    assert other.voted is not None
    promise = Promise(0, 1, 0, 0, other.voted[1], ())
    assert Promise.decode(promise.encode()) == promise
    promise = Promise(0, 1, 0, 0, None, tuple(results))
    assert Promise.decode(promise.encode()) == promise
    votes = dict.fromkeys(roster, b"s" * 64)
    certificate = certify(PLACE.run, (0, 0), roster, other.voted[1], votes)
    assert Certificate.decode(certificate.encode()) == certificate


@pytest.mark.parametrize("count", [3, 72, MAX_ROSTER])
def test_a_plan_has_no_more_parts_than_can_be_voted_on(count: int, identities: Identities) -> None:
    """Were it adopted, nobody could vote, and each later leader would have to repeat it."""
    members = identities(count)
    by, shape = leader(members), dataclasses.replace(SHAPE, size=MAX_PARTS * 16384)
    plan = plan_of(by, members, shape=shape)

    def cut(parts: int) -> Plan:
        ends = [*range(1024, 1024 * parts, 1024), shape.size]
        pieces = zip([0, *ends[:-1]], ends, strict=True)
        return dataclasses.replace(plan, parts=tuple(Part(*at, by.peer_id, None) for at in pieces))

    def accepted(parts: int) -> bool:
        try:
            check_plan(cut(parts), PLACE, shape, plan.roster, VerifiedResults())
        except Malformed:
            return False
        return True

    most = bisect.bisect_left(range(1, MAX_PARTS + 1), True, key=lambda n: not accepted(n))
    assert most == MAX_PARTS if count < 72 else count <= most < MAX_PARTS
    largest = cut(most)
    counts = pack_counts([1 + index % 2 for index in range(count)])  # none like its neighbour
    results = [
        PartResult(
            *(0, PLACE.round, part.start, part.stop, part.owner),
            *(largest.codec, b"d" * 32, counts, b"b" * 32, b"s" * 64),
        )
        for part in largest.parts
    ]
    outcome = outcome_of(largest, results, 2**60)
    assert Outcome.decode(outcome.encode()) == outcome
    assert Promise(0, 1, 0, 0, outcome, ()).encode()
    wider = dataclasses.replace(largest, next_roster=tuple(f"{n:052}" for n in range(MAX_ROSTER)))
    check_plan(wider, PLACE, shape, plan.roster, VerifiedResults())  # as a later leader may have it
    assert outcome_of(wider, results, 2**60).encode()


def test_what_cannot_be_hashed_is_not_voted_for(
    monkeypatch: pytest.MonkeyPatch, identities: Identities
) -> None:
    def too_large(outcome: Outcome) -> bytes:
        raise LocalProtocolError("an outcome of too many bytes")

    members = identities(1)
    plan = plan_of(members[0], members)
    agreement = Agreement(members[0], PLACE, SHAPE, plan.roster)
    agreement.on_plan(plan.leader, plan)
    monkeypatch.setattr("gossip.plans.certificate.outcome_hash", too_large)
    with pytest.raises(LocalProtocolError):
        agreement.on_held(results_of(plan, members)[0])
    assert agreement.voted is None


def test_keys_tell_apart_what_was_merged_for_whom(identities: Identities) -> None:
    members = identities(2)
    plan = plan_of(leader(members), members)
    fewer = dataclasses.replace(plan, contributors=plan.contributors[1:])
    keys: set[PartKey] = {
        key_of(result) for p in (plan, fewer) for result in results_of(p, members)
    }
    assert len(keys) == 4


@pytest.mark.parametrize("claim", [1e12, 1e-3])
def test_no_stranger_merges_most_or_makes_all_wait_by_what_it_claims(
    claim: float, identities: Identities
) -> None:
    members = identities(5)
    usual = [announce_of(member.peer_id) for member in members]
    liar = dataclasses.replace(usual[0], upload=claim, download=claim)
    large = dataclasses.replace(RULES, size=2**20, believed=STRANGERS)

    def planned(announces: list[Announce], rules: Rules) -> Plan:
        return fresh(members, announces, rules=rules)

    def owned(plan: Plan) -> int:
        return sum(part.stop - part.start for part in plan.parts if part.owner == liar.peer)

    honest, lied = planned(usual, large), planned([liar, *usual[1:]], large)
    assert owned(lied) <= owned(honest) + 1024
    assert lied.expected_s <= 40 * honest.expected_s
    trusted = planned([liar, *usual[1:]], dataclasses.replace(large, believed=FRIENDS))
    if claim > 1:
        assert owned(trusted) > 0.9 * large.size
    else:
        assert trusted.expected_s > 1000 * honest.expected_s


def test_who_was_left_out_owns_nothing_if_others_may(identities: Identities) -> None:
    members = identities(3)
    served = dataclasses.replace(RULES, servers=True)
    one, two, three = (announce_of(member) for member in members)
    server = dataclasses.replace(three, role="server")

    def owners(rules: Rules, *left_out: Announce) -> list[Announce]:
        unreliable = {announce.peer for announce in left_out}
        return list(owners_among([one, two, server], rules, unreliable))

    assert owners(RULES, two) == [one, server]
    assert owners(RULES, one, two, server) == [one, two, server]
    assert owners(served, one) == [server]
    assert owners(served, server) == [server]  # islands merge nothing where there are servers
