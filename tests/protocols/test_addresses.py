"""What an operator may type for a peer, what he is told otherwise, and the address book."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.address_book import AddressBook
from protocols.addresses import PeerAddress, parse_address, parse_peers, zoned
from protocols.errors import OperatorError
from protocols.identity import Identity, PeerId
from protocols.messages import PeerRecord

PEER = Identity.from_seed(bytes(32)).peer_id
OTHER = Identity.from_seed(bytes([1]) * 32).peer_id


@pytest.mark.parametrize(
    ("text", "host", "port", "peer", "shown"),
    [
        ("203.0.113.7:4390", "203.0.113.7", 4390, None, "203.0.113.7:4390"),
        (f"host:1/{PEER}", "host", 1, PEER, f"host:1/{PEER}"),
        ("  a.Example.ORG.:65535\n", "a.example.org", 65535, None, "a.example.org:65535"),
        ("[2001:DB8:0::1]:4390", "2001:db8::1", 4390, None, "[2001:db8::1]:4390"),
        (f"[::1]:4390/{PEER}", "::1", 4390, PEER, f"[::1]:4390/{PEER}"),
        ("my_service:80", "my_service", 80, None, "my_service:80"),
    ],
)
def test_good_addresses(text: str, host: str, port: int, peer: PeerId | None, shown: str) -> None:
    address = parse_address(text)
    assert address == PeerAddress(host, port, peer)
    assert str(address) == shown
    assert parse_address(shown) == address


@pytest.mark.parametrize(
    ("text", "why", "fix"),
    [
        ("", "empty", "HOST:PORT"),
        ("203.0.113.7", "port is missing", "203.0.113.7:4390"),
        ("203.0.113.7:", "port after the : is missing", "203.0.113.7:4390"),
        ("203.0.113.7:http", "'http' is not a number", "203.0.113.7:4390"),
        ("203.0.113.7:0", "port 0", "1 to 65535"),
        ("203.0.113.7:65536", "no port 65536", "1 to 65535"),
        ("203.0.113.7:9" + "9" * 200, "no port", "1 to 65535"),
        ("203.0.113.7:-1", "'-1' is not a number", ":4390"),
        ("203.0.113.7:٤", "not a number", ":4390"),
        ("203.0.113.777:4390", "not an IPv4 address", "numbers"),
        ("1.2.3:4390", "not an IPv4 address", "numbers"),
        ("2001:db8::1:4390", "needs brackets", "write [2001:db8::1]:4390"),
        ("2001:db8::1", "needs brackets", "write [2001:db8::1]:4390"),
        ("[2001:db8::1:4390", "] of the IPv6 address", ":4390"),
        ("[2001:db8::1]", "port is missing", "[2001:db8::1]:4390"),
        ("[2001:db8::xyz]:1", "not an IPv6 address", "numbers"),
        ("[example.org]:1", "not an IPv6 address", "numbers"),
        (":4390", "host before the :", "HOST:PORT"),
        ("exa mple.org:1", "space", "remove"),
        ("exa$mple.org:1", "not a host name", "letters"),
        ("-a.org:1", "not a host name", "letters"),
        ("a..org:1", "not a host name", "letters"),
        ("a" * 64 + ":1", "not a host name", "letters"),
        ("a." * 61 + "org:1", "longer than 120", "IP address"),
        ("x" * 600, "far too long", "HOST:PORT"),
        ("0.0.0.0:4390", "every address", "others see"),
        ("[::]:4390", "every address", "others see"),
        ("http://203.0.113.7:4390/", "http:// does not belong", "write 203.0.113.7:4390"),
        (f"tcp://a:1/{PEER}", "tcp:// does not belong", f"write a:1/{PEER}"),
        (f"/ip4/203.0.113.7/tcp/4390/p2p/{PEER}", "multiaddress", f"203.0.113.7:4390/{PEER}"),
        ("/ip6/2001:db8::1/tcp/4390", "multiaddress", "write [2001:db8::1]:4390"),
        ("/dns4/example.org/tcp/4390", "multiaddress", "write example.org:4390"),
        ("/ip4/1.2.3.4/udp/4390/quic", "TCP only", "write 1.2.3.4:4390"),
        ("/unix/socket", "multiaddress", "HOST:PORT"),
        ("a:1/", "nothing follows the /", "leave it out: a:1"),
        ("a:1/12D3KooWbad", "'12D3KooWbad' after the / is not a peer id", "leave it out: a:1"),
        (f"a:1/{PEER}/", "not a peer id", "leave it out"),
        (PEER, "peer id without an address", f"HOST:PORT/{PEER}"),
    ],
)
def test_bad_addresses_name_the_faulty_part(text: str, why: str, fix: str) -> None:
    with pytest.raises(OperatorError) as error:
        parse_address(text)
    assert error.value.code == "E102"
    assert why in error.value.why
    assert fix in error.value.fix


@given(st.text(max_size=100))
def test_any_text_is_an_address_or_an_explained_error(text: str) -> None:
    try:
        address = parse_address(text)
    except OperatorError:
        return
    assert parse_address(str(address)) == address
    assert len(address.hostport) <= 128


def test_a_link_local_address_is_told_with_its_interface() -> None:
    number, name = socket.if_nameindex()[0]
    assert zoned(("fe80::1", 4390, 0, number)) == f"fe80::1%{name}"
    assert zoned((f"fe80::1%{name}", 4390, 0, number)) == f"fe80::1%{name}"
    assert zoned(("2001:db8::1", 4390, 0, 0)) == "2001:db8::1"
    assert zoned(("192.0.2.1", 4390)) == "192.0.2.1"


def test_peers_come_repeated_separated_or_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "peers.txt"
    file.write_text(f"# seeds\nc:3, d:4\n\n[::1]:5/{PEER}  # home\na:1\n")
    peers = parse_peers(["a:1, b:2", f" @{file} ", "", "e:6"])
    assert [str(p) for p in peers] == ["a:1", "b:2", "c:3", "d:4", f"[::1]:5/{PEER}", "e:6"]
    assert parse_peers([]) == []


def test_a_bad_file_is_explained(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    large = tmp_path / "large"
    large.write_bytes(b"#" * (1024 * 1024 + 1))
    nested = tmp_path / "nested"
    nested.write_text(f"@{nested}")
    for path in (tmp_path / "none", tmp_path, binary, large, nested):
        with pytest.raises(OperatorError) as error:
            parse_peers([f"@{path}"])
        assert error.value.code == "E102"


# --- the book ---------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def record(*addresses: str, peer: PeerId = PEER, relay: str = "") -> PeerRecord:
    return PeerRecord(peer, addresses, relay)


def test_the_last_good_address_is_dialled_first_and_failed_ones_last() -> None:
    book = AddressBook(now=Clock())
    for address in ("a:1", "b:2", "c:3", "d:4"):
        book.add(PEER, address)
    assert book.addresses(PEER) == ["a:1", "b:2", "c:3", "d:4"]
    book.failed(PEER, "a:1")
    book.succeeded(PEER, "c:3")
    book.failed(PEER, "b:2")
    book.succeeded(PEER, "d:4")
    assert book.addresses(PEER) == ["d:4", "c:3", "a:1", "b:2"]
    book.failed(PEER, "d:4")
    assert book.addresses(PEER) == ["c:3", "a:1", "b:2", "d:4"]
    book.failed(PEER, "never heard of:1")
    assert book.addresses(OTHER) == []


def test_the_newest_record_wins() -> None:
    book = AddressBook(now=Clock())
    assert book.add_record(record("a:1", "b:2", relay=OTHER), 5)
    assert not book.add_record(record("old:1"), 5)
    assert not book.add_record(record("old:1"), 4)
    assert book.addresses(PEER) == ["a:1", "b:2"]
    book.succeeded(PEER, "b:2")
    assert book.add_record(record("c:3", "not an address", "0.0.0.0:1"), 6)
    # a:1 never worked and is gone; b:2 worked once and stays as the last resort
    assert book.addresses(PEER) == ["c:3", "b:2"]


def test_a_republished_record_does_not_demote_what_works() -> None:
    book = AddressBook(now=Clock())
    book.add_record(record("public:1"), 1)
    book.add(PEER, "lan:1")
    book.succeeded(PEER, "lan:1")
    book.add_record(record("public:1"), 2)
    assert book.addresses(PEER) == ["lan:1", "public:1"]


def test_what_a_third_peer_claims_comes_last() -> None:
    book = AddressBook(now=Clock(), max_per_peer=4)
    book.succeeded(PEER, "true:1")
    book.add_record(record("listed:1", "true:1"), 1)
    liars = [PeerId(f"liar {number}") for number in range(10)]
    for number, liar in enumerate(liars):
        book.add(PEER, f"false{number}:1", claimed_by=liar)
        book.add(PEER, "true:1", claimed_by=liar)
    book.failed(PEER, "true:1")  # it is being started again
    book.failed(PEER, "listed:1")
    for number, liar in enumerate(liars):
        book.add(PEER, f"false{number}:2", claimed_by=liar)
    assert book.addresses(PEER)[:2] == ["true:1", "listed:1"]
    assert len(book.addresses(PEER)) == 4
    book.add(PEER, "new:1")
    assert book.addresses(PEER)[:3] == ["new:1", "true:1", "listed:1"]


def test_a_third_peer_has_one_claim_which_others_may_confirm() -> None:
    book = AddressBook(now=Clock())
    for number in range(5):
        book.add(PEER, f"claim{number}:1", claimed_by=OTHER)
    assert book.addresses(PEER) == ["claim4:1"]
    book.add(PEER, "claim4:1")
    book.add(PEER, "claim5:1", claimed_by=OTHER)
    assert book.addresses(PEER) == ["claim4:1", "claim5:1"]
    book.succeeded(PEER, "claim5:1")
    book.add(PEER, "claim6:1", claimed_by=OTHER)
    assert book.addresses(PEER) == ["claim5:1", "claim4:1", "claim6:1"]


def test_what_a_third_peer_claims_stays_hearsay_until_the_peer_itself_says_so() -> None:
    book = AddressBook(now=Clock())
    assert book.is_hearsay(PEER, "claim:1")
    for address in ("claim:1", "claim:2"):
        book.add(PEER, address, claimed_by=OTHER)
        book.succeeded(PEER, address)
    assert book.is_hearsay(PEER, "claim:1")
    assert book.is_hearsay(PEER, "claim:2")
    book.add_record(record("listed:1", "claim:1"), 1)
    book.add(PEER, "claim:2")
    book.add(PEER, "claim:2", claimed_by=OTHER)
    assert not any(book.is_hearsay(PEER, address) for address in book.addresses(PEER))
    book.succeeded(PEER, "forgotten:1")
    assert book.is_hearsay(PEER, "forgotten:1")


def test_a_peer_has_a_bounded_number_of_addresses() -> None:
    book = AddressBook(now=Clock(), max_per_peer=3)
    book.succeeded(PEER, "good:1")
    for number in range(1, 100):
        book.add(PEER, f"hearsay{number}:1")
    assert len(book.addresses(PEER)) == 3
    assert book.addresses(PEER)[0] == "good:1"
    book.failed(PEER, book.addresses(PEER)[1])
    book.add(PEER, "new:1")
    assert "new:1" in book.addresses(PEER)
    assert len(book.addresses(PEER)) == 3


def test_strangers_do_not_flush_friends() -> None:
    book = AddressBook(now=Clock(), max_peers=10)
    book.succeeded(PEER, "friend:1")
    for number in range(50):
        stranger = Identity.from_seed(number.to_bytes(32, "big")).peer_id
        if stranger != PEER:
            book.add_record(record("evil:1", peer=stranger), 1)
    assert len(book.peers()) == 10
    assert book.addresses(PEER) == ["friend:1"]


async def test_the_resolver_runs_once_for_all_who_wait() -> None:
    asked: list[PeerId] = []
    gate = asyncio.Event()

    async def resolver(peer: PeerId) -> None:
        asked.append(peer)
        await gate.wait()
        book.add(peer, "found:1")

    book = AddressBook(resolver=resolver)
    tasks = [asyncio.ensure_future(book.resolve(PEER)) for _ in range(5)]
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(*tasks) == [True] * 5
    assert asked == [PEER]
    assert book.addresses(PEER) == ["found:1"]
    assert not await AddressBook().resolve(PEER)


async def test_after_a_cancelled_resolution_the_next_who_waits_asks() -> None:
    asked: list[PeerId] = []

    async def resolver(peer: PeerId) -> None:
        asked.append(peer)
        if len(asked) == 1:
            await asyncio.Event().wait()
        book.add(peer, "found:1")

    book = AddressBook(resolver=resolver)
    first = asyncio.ensure_future(book.resolve(PEER))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(book.resolve(PEER))
    await asyncio.sleep(0)
    first.cancel()
    assert await asyncio.wait_for(second, 5)
    assert book.addresses(PEER) == ["found:1"]
    assert asked == [PEER, PEER]
