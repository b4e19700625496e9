"""What the monitor is told of a round: its phases, how far apart islands were, kinds of address."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from node.monitor.machine import KEPT_S, Machine
from node.peer_reports import PeerReports, kind_of, link_of
from node.reporting import _phases
from protocols.identity import PeerId


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
    ("why", "reason"),
    [
        ("12D3KooW is one of too many identities from 203.0.113.7", "crowded"),
        ("12D3KooW is one of too many identities from finite.translated.example", "crowded"),
        ("its slice is late", "stale"),
        ("not finite", "non-finite"),
        ("not signed by its author", "signature"),
        ("a hole at the end", "malformed"),
    ],
)
def test_why_something_was_rejected(why: str, reason: str) -> None:
    told: list[Any] = []
    reports: Any = SimpleNamespace(events=SimpleNamespace(emit=told.append))
    PeerReports.on_rejected(reports, PeerId("12D3KooW"), why)
    assert [(one.reason, one.detail) for one in told] == [(reason, why)]


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


def test_a_machine_that_tells_nothing(tmp_path: Any) -> None:
    view = Machine(tmp_path / "gone", proc=tmp_path)()
    assert (view.memory_total, view.memory_used, view.disk_free) == (None, None, None)
