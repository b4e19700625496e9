"""What the monitor is told of a round: its phases, how far apart islands were, kinds of address."""

from __future__ import annotations

import os
import re
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from p2p_kit import dht_pb2, double, two_hosts

from gossip.membership.spread import Spread
from gossip.pairs.rounded import Rounded
from node import monitor
from node.entry.lookout import Lookout
from node.island.pace import Pace
from node.monitor.event_log import EventLog
from node.monitor.events import RoundDone
from node.monitor.machine import KEPT_S, Machine
from node.monitor.metrics import registry
from node.monitor.state import NodeState
from node.monitor.views import NodeView
from node.reports.pairs import GossipReports
from node.reports.peers import PeerReports, kind_of, link_of
from node.reports.rounds import Reporter, _phases, dropped_of
from node.trainer.channel import Applied
from protocols.bounds import ENDLESS_ROUNDS
from protocols.errors import (
    BadSignature,
    Contradiction,
    Crowded,
    Late,
    Malformed,
    NonFinite,
    Reason,
    RemoteProtocolError,
    Stale,
    TransferStalled,
)
from protocols.identity import PeerId
from protocols.messages import Certificate, Contributor
from protocols.rate_limit import RateLimit


def phases(ready: dict[str, float], snapshot: float, now: float, **moments: float) -> Any:
    at = {"planned": 12.0, "merging": 15.0, "committed": 16.0} | moments
    return _phases(SimpleNamespace(**at), ready, snapshot, now)  # type: ignore[arg-type]


def test_phases_of_a_round_this_node_waited_in() -> None:
    found = phases({"me": 10.0, "other": 11.5}, 10.0, 16.5)
    assert found == {"ready": 1.5, "match": 0.5, "exchange": 3.0, "certify": 1.0, "apply": 0.5}


def test_phases_when_this_node_was_the_last() -> None:
    found = phases({"me": 11.0, "other": 10.0}, 11.0, 17.0)
    assert (found["ready"], found["match"]) == (0.0, 1.0)


def test_whoever_was_ready_after_the_plan_was_not_waited_for() -> None:
    assert phases({"me": 10.0, "late": 14.0}, 10.0, 16.0)["ready"] == 0.0


def test_a_round_without_this_island_has_only_its_end() -> None:
    found = phases({}, 16.0, 18.0, planned=16.0, merging=16.0)
    assert found == {"ready": 0.0, "match": 0.0, "exchange": 0.0, "certify": 0.0, "apply": 2.0}


def test_phases_add_up_and_none_is_negative() -> None:
    for moments in ({"merging": 11.0}, {"planned": 17.0}, {"planned": 3.0, "merging": 4.0}):
        found = phases({"me": 10.0}, 10.0, 18.0, **moments)
        assert min(found.values()) >= 0
        assert sum(found.values()) == pytest.approx(8.0)


def test_whose_work_is_missing_is_told_and_a_roll_call_misses_nobody_s() -> None:
    parts = (SimpleNamespace(included=(SimpleNamespace(contributor=0),)),)
    here, away = (Contributor(PeerId(name), 1.0, 9, True) for name in ("here", "away"))
    merged: Any = SimpleNamespace(parts=parts, contributors=(here, away))
    assert list(dropped_of(merged)) == ["away"]
    leader = Contributor(PeerId("leader"), 0.0, 0, False)
    roll: Any = SimpleNamespace(parts=(SimpleNamespace(included=()),), contributors=(leader,))
    assert dropped_of(roll) == {}


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("127.0.0.1:4390", "loopback"),
        ("[::1]:4390", "loopback"),
        ("10.1.2.3:1", "private IPv4"),
        ("8.8.8.8:1", "public IPv4"),
        ("[2001:4860:4860::8888]:1", "public IPv6"),
        ("[fd00::1]:1", "private IPv6"),
        ("node.example:4390", "name"),
        ("relay/192.0.2.7:4390/12D3KooW", "relay"),
    ],
)
def test_kinds_of_address(address: str, kind: str) -> None:
    assert kind_of([address, "other:1"]) == kind
    assert kind_of([]) == ""
    assert link_of([address]) == ("relay" if kind == "relay" else "direct")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Malformed, "malformed"),
        (BadSignature, "signature"),
        (Contradiction, "contradiction"),
        (Stale, "stale"),
        (Late, "late"),
        (Crowded, "crowded"),
        (NonFinite, "non-finite"),
        (RemoteProtocolError, "other"),
    ],
)
def test_a_rejection_is_counted_by_the_class_of_the_error_and_not_by_its_words(
    kind: type[RemoteProtocolError], reason: str
) -> None:
    told: list[Any] = []
    events, swarm = SimpleNamespace(emit=told.append), SimpleNamespace(me=PeerId("12D3KooX"))
    reports: Any = SimpleNamespace(events=events, swarm=swarm, written=RateLimit())
    words = "signature, stale, late, finite: one of too many identities"
    PeerReports.on_rejected(reports, PeerId("12D3KooW"), kind(words))
    assert [(one.reason, one.detail) for one in told] == [(reason, words)]


@pytest.mark.parametrize(
    ("others", "counted"),
    [
        ([], [11, 12, 13, 14]),
        ([("active", 13), ("joining", 99)], [13, 14]),
        ([("active", 13), ("active", 13), ("active", 10**9)], [13, 14]),
    ],
)
def test_rounds_that_the_others_had_before_this_node_came_are_none_of_those_to_make(
    others: list[tuple[str, int]], counted: list[int]
) -> None:
    """It has resumed from a checkpoint of round 11 and repeats what it missed (``--rounds``)."""
    announced = [SimpleNamespace(status=status, round=round_) for status, round_ in others]
    reports: Any = MagicMock(rounds_committed=0, _came_at=0)
    reports.swarm.membership.members_alive.return_value = announced
    Reporter.come(reports)
    found = []
    for round_ in range(11, 15):
        before = reports.rounds_committed
        outcome = SimpleNamespace(fragment=0, round=round_)
        Reporter.on_committed(reports, MagicMock(spec=Certificate, outcome=outcome), None)
        found += [round_] * (reports.rounds_committed - before)
    assert found == counted


@pytest.mark.parametrize("alone", [True, False])
def test_what_a_round_sent_is_counted_and_not_what_the_model_has(alone: bool) -> None:
    told: list[Any] = []
    timing = SimpleNamespace(planned_at=0.0, held_at=0.0)
    chain = MagicMock(timing=timing, round_s=1.0)
    chain.replica.place.state = b""
    manifest = SimpleNamespace(rounds=SimpleNamespace(total_rounds=10))
    state: dict[str, Any] = {name: {} for name in ("_pending", "_last", "_ready", "_merged")}
    reports: Any = MagicMock(
        **state,
        rounds_committed=0,
        _came_at=0,
        _last_round=None,
        _last_codec="",
        _mine=1,
        conductor=None,
        manifest=manifest,
        now=lambda: 1.0,
        events=SimpleNamespace(emit=told.append),
    )
    reports.swarm.chains = [chain]
    there = [SimpleNamespace(role=role) for role in ("island", "island", "server")]
    reports.swarm.membership.members_alive.return_value = there
    reports._spread.return_value.to_mean = {}
    outcome = SimpleNamespace(fragment=0, round=1, parts=(), contributors=(), codec="int4")
    exchange: Any = MagicMock(bytes_sent=850, bytes_received=0, elements_sent=1600)
    certificate = MagicMock(spec=Certificate, outcome=outcome)
    Reporter.on_committed(reports, certificate, None if alone else exchange)
    assert Reporter._done(reports, 0, None)
    assert (told[0].raw_bytes, told[0].sent_bytes) == ((0, 0) if alone else (6400, 850))
    assert told[0].live == 3, "this island and two others: a server does not train"


def test_who_agrees_is_counted_when_somebody_looks() -> None:
    """A seed is through with a round before it has heard of any other that is."""
    log, place = EventLog(), SimpleNamespace(previous=b"h", state=b"s", round=5)
    chain = MagicMock(fragment=0)
    chain.replica.place = place
    chain.following.approach.narrow = None
    swarm: Any = MagicMock(me=PeerId("seed"), chains=[chain])
    said = {"role": "island", "head": b"h", "state": b"s"}
    there = [SimpleNamespace(**said | {"head": b"g", "state": b"r"}) for _ in range(3)]
    chain.membership.members_alive.side_effect = lambda now: there
    state = NodeState(NodeView(peer="seed", role="seed"), log=log)
    reports = Reporter(MagicMock(), swarm, None, log, state, MagicMock())
    state.providers.peers = tuple
    log.emit(RoundDone(round=4, members=3, live=3, agreeing=reports.agreeing()))

    def told() -> list[float | None]:
        shown = state.brief()
        gauge = registry(state).get_sample_value("swarm_agreeing_peers")
        return [shown["consensus"]["agreeing"], shown["fragments"][0]["agreeing"], gauge]

    assert told() == [0, 0, 0]
    there[:] = [SimpleNamespace(**said) for _ in range(3)]
    assert told() == [3, 3, 3]
    there[2] = SimpleNamespace(**said | {"state": b"x"})
    assert told() == [2, 2, 2]
    there[2] = SimpleNamespace(**said | {"role": "server"})
    assert told() == [2, 2, 2], "a server has the state, and is no island"
    there.clear()
    assert told() == [0, 0, 0], "the dead agree with nobody"
    reports.conductor = MagicMock()
    assert told() == [1, 1, 1], "but this island, if it is one, does with itself"


def test_rounds_are_repeated_until_the_others_are_come_up_to() -> None:
    """And a node that takes part in none, as a seed, has those that come one by one as they are."""
    reports: Any = SimpleNamespace(swarm=MagicMock(), _behind=set())

    def repeated(round_: int, *heads: int) -> bool:
        announced = [SimpleNamespace(status="active", round=head) for head in heads]
        reports.swarm.membership.members_alive.return_value = announced
        return Reporter._repeated(reports, 0, round_)

    assert [repeated(round_, 9, 9, 10**9) for round_ in range(5, 10)] == [True] * 4 + [False]
    assert not repeated(10, 11, 11, 10**9)
    assert not repeated(11, 11, 11), "before the others say that they have it"
    assert not repeated(12)
    assert repeated(13, 20)


def test_a_flood_of_what_is_refused_is_counted_and_not_written_down() -> None:
    """Under however many names: older events would make room for it."""
    told: list[Any] = []
    now = [0.0]
    reports: Any = SimpleNamespace(
        events=SimpleNamespace(emit=told.append),
        state=SimpleNamespace(rejected=Counter()),
        swarm=SimpleNamespace(me=PeerId("12D3KooX")),
        written=RateLimit(2.0, 10.0, clock=lambda: now[0]),
    )
    for number in range(1000):
        PeerReports.on_rejected(reports, PeerId(f"12D3Koo{number}"), Malformed("garbage"))
    assert len(told) == 10
    assert reports.state.rejected == {Reason.MALFORMED: 990}  # the events count themselves
    now[0] = 1.0
    PeerReports.on_rejected(reports, PeerId("12D3KooY"), Stale("late"))
    assert len(told) == 11


def test_a_node_whose_promises_its_disk_refuses_says_so_once() -> None:
    """It has no part in rounds, and a lone one ends none: nobody else would tell its operator."""
    told: list[Any] = []
    events, me = SimpleNamespace(emit=told.append), PeerId("12D3KooX")
    reports: Any = SimpleNamespace(
        events=events, swarm=SimpleNamespace(me=me), mute=False, written=RateLimit()
    )
    for _ in range(2):
        PeerReports.on_rejected(reports, me, RemoteProtocolError("cannot be kept: Is a directory"))
    problems = [(one.code, one.why) for one in told if one.kind == "problem"]
    assert problems == [("E105", "cannot be kept: Is a directory")]


def test_what_a_peer_passes_on_is_not_taken_for_a_fault_of_this_node_s_disk() -> None:
    told: list[Any] = []
    events, me, seed = SimpleNamespace(emit=told.append), PeerId("12D3KooX"), PeerId("12D3KooY")
    swarm = SimpleNamespace(me=me, presence=SimpleNamespace(learn=refuse))
    reports: Any = SimpleNamespace(events=events, swarm=swarm, mute=False, written=RateLimit())
    rejected = partial(PeerReports.on_rejected, reports)
    node: Any = SimpleNamespace(identity=SimpleNamespace(peer_id=me))
    unused: Any = None
    Lookout(node, unused, reports.swarm, unused, rejected).learn(b"an announcement", seed)
    assert [(one.kind, one.peer) for one in told] == [("rejected", seed)]


async def test_what_the_dht_sends_is_counted_as_such() -> None:
    a, b = two_hosts()
    await b.p2p.add_protobuf_handler("ping", double, dht_pb2.PingRequest)
    await a.p2p.call_protobuf_handler(
        b.peer_id, "ping", dht_pb2.PingRequest(), dht_pb2.PingResponse
    )
    for host in (a, b):
        reports: Any = SimpleNamespace(transport=host.transport)
        ((kind, traffic),) = PeerReports.traffic(reports).items()
        assert kind == "dht"
        assert min(traffic.sent, traffic.received) > 0


def refuse(envelope: bytes) -> None:
    raise BadSignature("not signed by its peer")


def test_every_class_of_error_has_a_reason_of_its_own_and_every_reason_a_class() -> None:
    kinds: list[type[RemoteProtocolError]] = [RemoteProtocolError]
    kinds += RemoteProtocolError.__subclasses__()
    assert sorted(kind.reason for kind in kinds) == sorted(Reason)


def test_every_reason_has_words_on_the_dashboard() -> None:
    panels = (Path(monitor.__file__).parent / "web" / "panels.js").read_text()
    table = re.search(r"const REASONS = \{(.*?)\};", panels, re.DOTALL)
    assert table is not None
    assert re.findall(r'^  "?([\w-]+)"?:', table[1], re.MULTILINE) == list(Reason)


def test_an_error_with_what_was_done_in_front_keeps_its_reason() -> None:
    stale = RemoteProtocolError.of("took nothing", Stale("another run"))
    assert (stale.reason, str(stale)) == (Reason.STALE, "took nothing: another run")
    assert RemoteProtocolError.of("is silent", TransferStalled("1 s")).reason is Reason.LATE


def test_the_machine_is_read_now_and_then(tmp_path: Any) -> None:
    now = [0.0]
    machine = Machine(tmp_path, clock=lambda: now[0])
    first = machine()
    assert first.memory_total
    assert first.memory_used
    assert first.memory_used < first.memory_total
    assert first.disk_free
    assert first.disk_total
    assert machine() is first
    now[0] = KEPT_S
    assert machine() is not first


def test_memory_that_daemon_and_ranks_share_counts_once(tmp_path: Any) -> None:
    """The vectors of the model are in both, and of processes that end meanwhile nothing is told."""
    me, page = os.getpid(), os.sysconf("SC_PAGE_SIZE")
    # in pages: size, resident, and of these the shared ones
    for process, told in ((me, "9000 700 600"), (2, "9000 1650 650"), (3, "9000 1100 50")):
        (tmp_path / str(process) / "task" / str(process)).mkdir(parents=True)
        (tmp_path / str(process) / "statm").write_text(f"{told} 1 0 500 0\n")
    (tmp_path / str(me) / "task" / str(me) / "children").write_text("2 3 4 ")
    (tmp_path / "4").mkdir()
    view = Machine(tmp_path, proc=tmp_path)()
    assert view.memory_used == (100 + 1000 + 1050 + 650) * page


def test_a_machine_that_tells_nothing(tmp_path: Any) -> None:
    view = Machine(tmp_path / "gone", proc=tmp_path)()
    assert (view.memory_total, view.memory_used, view.disk_free) == (None, None, None)


def test_a_round_in_pairs_after_a_resume_counts_what_was_trained_since() -> None:
    """And not all that the checkpoint says of this island: history adds rounds up."""
    told: list[Any] = []
    pace = Pace(tokens=900_000)
    swarm = MagicMock(me=PeerId("me"), chains=[MagicMock(neighbours=1, fragment=0)])
    swarm.membership.members_alive.return_value = []
    swarm.chains[0].status.state = b""
    manifest: Any = SimpleNamespace(rounds=SimpleNamespace(total_rounds=ENDLESS_ROUNDS))
    conductor: Any = SimpleNamespace(pace=pace)
    events: Any = SimpleNamespace(emit=told.append)
    reports = GossipReports(manifest, swarm, conductor, events, MagicMock(), MagicMock())

    def applied(round_: int, fragment: int | None) -> bool:
        return reports.on_applied(Applied(round_, 0, pace.tokens, None, fragment))

    assert not applied(70, None)  # the checkpoint's own count
    for trained in (512, 256):
        pace.tokens += trained
        reports._pending[0] = Rounded(0, 70, 0.0, 0.0, (), Spread(), None, 1, 0.0, 0.0)
        assert applied(71, 0)
    assert [one.tokens for one in told] == [512, 256]
    pace.tokens = 900_100  # a trainer that was started again has lost what no round had yet
    assert not applied(72, None)
    pace.tokens += 512
    reports._pending[0] = Rounded(0, 72, 0.0, 0.0, (), Spread(), None, 1, 0.0, 0.0)
    assert applied(73, 0)
    assert told[-1].tokens == 512
