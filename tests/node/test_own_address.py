"""Where others can reach a node, as far as it can tell by its own addresses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node.config import NodeConfig, resolve
from node.entry.own_address import INTERNET, OwnPlace, addresses

LAN, VPN, OUTSIDE = "192.168.1.20", "100.101.1.2", "198.51.100.9"
EVERY = ("0.0.0.0", 4390)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with an address in a LAN and another in a VPN, of either family."""

    def towards(place: str) -> str:
        own = (LAN, VPN, "127.0.0.1", "fd7a::2")
        return place if place in own else LAN

    monkeypatch.setattr("node.entry.own_address.address_towards", towards)


def config(tmp_path: Path, **flags: Any) -> NodeConfig:
    return resolve({"dir": str(tmp_path), **flags}, {})


@pytest.mark.parametrize(
    ("seen", "where"),
    [
        ([], [LAN]),
        ([f"{LAN}:50000"], [LAN]),
        ([f"{VPN}:50000"], [VPN, LAN]),  # others of the LAN may have no VPN
        ([f"{VPN}:50000", f"{VPN}:50001", f"{LAN}:50002"], [VPN, LAN]),
        ([f"::ffff:{VPN}:50000"], [VPN, LAN]),
        (["127.0.0.1:50000"], ["127.0.0.1", LAN]),
        ([f"{OUTSIDE}:50000"], [LAN]),  # not this machine's
        (["", "nonsense", "[::1", "a.b:c"], [LAN]),
        (["[fd7a::2]:50000"], [LAN]),  # it listens on IPv4 alone
    ],
)
def test_a_node_is_dialled_at_its_own_end_of_the_way_to_peers(
    tmp_path: Path, seen: list[str], where: list[str]
) -> None:
    assert addresses(config(tmp_path), EVERY, seen) == [f"{host}:4390" for host in where]


def test_over_ipv6_too_where_it_listens_there(tmp_path: Path) -> None:
    found = addresses(config(tmp_path), ("::", 4390), ["[fd7a::2]:50000"])
    assert found == ["[fd7a::2]:4390", f"{LAN}:4390"]


def test_what_the_operator_has_said_is_all(tmp_path: Path) -> None:
    given = config(tmp_path, public_addr="203.0.113.7:4390")
    assert addresses(given, EVERY, [f"{VPN}:1"]) == ["203.0.113.7:4390"]
    assert addresses(config(tmp_path), (LAN, 4390), [f"{VPN}:1"]) == [f"{LAN}:4390"]
    assert addresses(config(tmp_path), None, [f"{VPN}:1"]) == []


def test_a_machine_with_ipv6_alone_notices_its_new_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peers have seen it at the old one only."""
    has = ["2001:db8:1::5"]

    def towards(place: str) -> str:
        if ":" not in place or not has:
            raise OSError("Network is unreachable")
        return has[0]

    monkeypatch.setattr("node.entry.own_address.address_towards", towards)
    monkeypatch.setattr("node.entry.own_address.ipv4_interfaces", list)
    place, _, said = placed(tmp_path, ("::", 4390))
    assert said == [["[2001:db8:1::5]:4390"]], "and not loopback beside it"
    place.seen(["[2001:db8:1::5]:50000"])
    has.clear()  # the cable is out
    assert place.addresses() == ["127.0.0.1:4390"]
    assert not place.moved
    has[:] = ["2001:db8:2::5"]
    assert place.moved
    assert place.seen([])
    assert said[-1] == ["[2001:db8:2::5]:4390"]


def placed(tmp_path: Path, bound: tuple[str, int] = EVERY) -> tuple[OwnPlace, Any, list[list[str]]]:
    """A node's place, what it has of a relay, and what was published."""
    said: list[list[str]] = []
    transport = SimpleNamespace(listening=bound, relays=SimpleNamespace(), peer_id="12D3KooWx")
    outbound = SimpleNamespace(needed=False, trying=False, relay=None, address="")
    whereabouts = SimpleNamespace(publish=lambda where, relay: said.append(list(where)))
    parts: list[Any] = [transport, outbound, whereabouts]
    place = OwnPlace(config(tmp_path), *parts)
    place.publish()
    return place, outbound, said


def test_peers_are_told_when_it_is_called_elsewhere_and_only_then(tmp_path: Path) -> None:
    place, outbound, said = placed(tmp_path)
    assert not place.seen([f"{OUTSIDE}:1"])
    assert place.seen([f"{VPN}:1"])
    assert not place.seen([f"{VPN}:2"])
    assert said == [[f"{LAN}:4390"], [f"{VPN}:4390", f"{LAN}:4390"]]
    assert place.join_address() == f"{VPN}:4390/12D3KooWx"
    outbound.needed = True  # from now on it is called at its relay, whatever it has
    assert not place.seen([f"{INTERNET}:1"])


def test_a_machine_that_has_another_address_is_called_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose lease has ended, or that was carried to another network."""
    has = [LAN, VPN]

    def towards(place: str) -> str:
        return place if place in (*has, "127.0.0.1") else has[0]

    monkeypatch.setattr("node.entry.own_address.address_towards", towards)
    place, outbound, said = placed(tmp_path)
    place.seen([f"{VPN}:1"])
    assert not place.moved
    has[:] = ["127.0.0.1"]  # the cable is out
    assert not place.moved
    has[:] = ["10.0.0.9"]
    assert place.moved
    assert place.seen([])
    assert said[-1] == ["10.0.0.9:4390"]
    assert not place.moved
    place.mapped = lambda: "9.9.9.9:4391"
    assert place.moved
    assert place.seen(["10.0.0.9:1"])
    assert said[-1] == ["9.9.9.9:4391", "10.0.0.9:4390"]
    outbound.needed = True
    has[:] = [LAN]
    assert not place.moved, "its relay keeps its place"


def test_where_a_translator_lets_peers_in_goes_before_its_own_address(tmp_path: Path) -> None:
    place, outbound, said = placed(tmp_path)
    place.pass_by(f"{OUTSIDE}:4390")
    assert said[1:] == [[f"{OUTSIDE}:4390", f"{LAN}:4390"]]
    assert place.join_address() == f"{OUTSIDE}:4390/12D3KooWx"
    place.pass_by(f"{OUTSIDE}:4390")
    assert len(said) == 2
    place.pass_by("")
    assert said[2:] == [[f"{LAN}:4390"]]
    place.pass_by(f"{VPN}:4390")  # one of its own, and no translator
    assert place.outside == ""
    outbound.needed = True
    place.pass_by(f"{OUTSIDE}:4390")
    assert len(said) == 3, "its relay keeps its place"
    outbound.needed = False
    assert place.addresses() == [f"{OUTSIDE}:4390", f"{LAN}:4390"]
