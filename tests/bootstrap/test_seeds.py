"""First contact: every way a seed can fail, retries, and the peers of earlier runs."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from http_kit import NOBODY
from identity_kit import identity

from bootstrap.seeds import PeerCache, backoff, dial_all, explain, find_peers
from protocols.addresses import PeerAddress, parse_address
from protocols.errors import (
    IdentityMismatch,
    OperatorError,
    TransferStalled,
    Unreachable,
    Why,
)
from protocols.http.transport import HttpTransport
from protocols.identity import PeerId


class Phone:
    """A transport whose dials end as a table says; counts how many ring at once."""

    def __init__(self, answers: dict[str, PeerId | Exception | None]) -> None:
        self.answers = answers
        self.ringing = self.most = 0

    async def dial(self, address: str, expected: PeerId | None = None) -> PeerId:
        self.ringing += 1
        self.most = max(self.most, self.ringing)
        try:
            await asyncio.sleep(0)
            answer = self.answers[address]
            if answer is None:
                await asyncio.Event().wait()
            if isinstance(answer, Exception):
                raise answer
            assert isinstance(answer, str)
            return answer
        finally:
            self.ringing -= 1


def address(number: int, peer: PeerId | None = None) -> PeerAddress:
    return PeerAddress(f"192.0.2.{number}", 4390, peer)


async def test_all_seeds_are_dialled_at_once_up_to_a_bound() -> None:
    seeds = [address(n) for n in range(1, 31)]
    phone = Phone({seed.hostport: identity(1).peer_id for seed in seeds})
    dialled = await dial_all(phone, seeds, parallel=7)  # type: ignore[arg-type]
    assert [r.address for r in dialled.reached] == seeds
    assert phone.most == 7


async def test_each_seed_fails_for_its_own_reason() -> None:
    answers: dict[str, PeerId | Exception | None] = {
        "192.0.2.1:4390": Unreachable("x", Why.DNS, "NXDOMAIN"),
        "192.0.2.2:4390": Unreachable("x", Why.REFUSED),
        "192.0.2.3:4390": None,
        "192.0.2.4:4390": Unreachable("x", Why.NOT_ATOLL),
        "192.0.2.5:4390": Unreachable("x", Why.TLS),
        "192.0.2.6:4390": IdentityMismatch("x", "AAA", "BBB"),
    }
    with pytest.raises(OperatorError) as raised:
        await find_peers(
            Phone(answers),  # type: ignore[arg-type]
            [parse_address(text) for text in answers],
            timeout=0.05,
        )
    text = raised.value.text()
    assert raised.value.code == "E501"
    lines = [line.strip().removeprefix("why: ") for line in text.splitlines()[1:7]]
    assert lines == [
        "192.0.2.1:4390: the name does not resolve (NXDOMAIN)",
        "192.0.2.2:4390: nothing listens there (connection refused)",
        "192.0.2.3:4390: no answer in time (0.05 s)",
        "192.0.2.4:4390: something that is not Atoll answers there",
        "192.0.2.5:4390: the TLS handshake failed",
        "192.0.2.6:4390: expected AAA, got BBB",
    ]


async def test_one_seed_gets_its_own_error() -> None:
    for why in (Why.DNS, Why.REFUSED, Why.TIMEOUT, Why.NOT_ATOLL, Why.TLS, Why.SELF):
        phone = Phone({"192.0.2.1:4390": Unreachable("x", why)})
        with pytest.raises(OperatorError) as raised:
            await find_peers(phone, [address(1)])  # type: ignore[arg-type]
        assert raised.value.code == "E101"
        assert raised.value.why == why.value
    stalled = explain("a:1", TransferStalled("no progress for 5 s"))
    assert (stalled.code, stalled.why) == ("E101", "the connection stalled")
    phone = Phone({"192.0.2.1:4390": IdentityMismatch("x", "AAA", "")})
    with pytest.raises(OperatorError) as raised:
        await find_peers(phone, [address(1)])  # type: ignore[arg-type]
    assert raised.value.code == "E103"
    assert raised.value.why == "expected AAA, got no valid identity"


async def test_every_reason_has_a_fix_of_its_own() -> None:
    fixes = {explain("a:1", Unreachable("x", why)).fix for why in Why}
    assert len(fixes) == len(Why)


async def test_one_answer_is_enough_and_the_others_are_told() -> None:
    phone = Phone(
        {"192.0.2.1:4390": identity(1).peer_id, "192.0.2.2:4390": Unreachable("x", Why.REFUSED)}
    )
    dialled = await find_peers(phone, [address(1), address(2)])  # type: ignore[arg-type]
    assert [r.peer for r in dialled.reached] == [identity(1).peer_id]
    assert [m.address for m in dialled.missed] == [address(2)]


async def test_cached_peers_are_tried_when_no_seed_answers(tmp_path: Path) -> None:
    cache = PeerCache(tmp_path / "peers.json")
    friend = address(9, identity(9).peer_id)
    cache.remember([friend])
    phone = Phone(
        {"192.0.2.1:4390": Unreachable("x", Why.REFUSED), friend.hostport: identity(9).peer_id}
    )
    dialled = await find_peers(phone, [address(1)], cache)  # type: ignore[arg-type]
    assert [r.address for r in dialled.reached] == [friend]
    assert [m.address for m in dialled.missed] == [address(1)]
    phone.answers[friend.hostport] = Unreachable("x", Why.TIMEOUT)
    with pytest.raises(OperatorError) as raised:
        await find_peers(phone, [address(1)], cache)  # type: ignore[arg-type]
    assert raised.value.code == "E501"
    assert friend.hostport in raised.value.why


async def test_a_seed_met_before_is_not_dialled_again_from_memory(tmp_path: Path) -> None:
    cache = PeerCache(tmp_path / "peers.json")
    cache.remember([address(1)])
    phone = Phone({"192.0.2.1:4390": Unreachable("x", Why.REFUSED)})
    with pytest.raises(OperatorError) as raised:
        await find_peers(phone, [address(1)], cache)  # type: ignore[arg-type]
    assert raised.value.code == "E101"  # the reason of the only one there is


def test_the_cache_is_bounded_newest_first_and_survives_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state" / "peers.json"
    cache = PeerCache(path, limit=5)
    assert cache.load() == []
    for number in range(1, 9):
        cache.remember([address(number, identity(number).peer_id)])
    cache.remember([address(6, identity(6).peer_id)])
    assert [peer.host for peer in cache.load()] == [f"192.0.2.{n}" for n in (6, 8, 7, 5, 4)]
    assert [p.name for p in path.parent.iterdir()] == ["peers.json"]
    path.write_text('{"peers": ["192.0.2.1:4390", "/ip4/nonsense", 7, "192.0.2.2:4390"]}')
    assert [peer.host for peer in cache.load()] == ["192.0.2.1", "192.0.2.2"]
    for damage in ("", "[1, 2]", '{"peers": 7}', '{"peers": ["x', "[" * 10_000, "\x00" * 70_000):
        path.write_text(damage)
        assert cache.load() == []
    cache.remember([address(1)])
    assert cache.load() == [address(1)]


def test_a_failed_write_leaves_the_old_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PeerCache(tmp_path / "peers.json")
    cache.remember([address(1)])

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    cache.remember([address(2)])  # and the node goes on
    assert cache.load() == [address(1)]
    assert [p.name for p in tmp_path.iterdir()] == ["peers.json"]


def test_back_off_doubles_within_its_limits_and_follows_its_seed() -> None:
    waits = list(itertools.islice(backoff(random.Random(4)), 40))
    assert waits == list(itertools.islice(backoff(random.Random(4)), 40))
    assert waits != list(itertools.islice(backoff(random.Random(5)), 40))
    assert all(1.0 <= wait <= 60.0 for wait in waits)
    for n, wait in enumerate(waits):
        assert min(2.0**n, 60.0) / 2 <= wait <= min(2.0**n, 60.0)


@pytest.fixture
async def home() -> AsyncIterator[HttpTransport]:
    async with HttpTransport(identity(1), listen="127.0.0.1:0") as transport:
        yield transport


@pytest.mark.usefixtures("quick_resolver")
async def test_real_sockets_tell_the_reasons_apart(home: HttpTransport) -> None:
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(HttpTransport(identity(2), listen="127.0.0.1:0"))

        async def rude(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"220 mail.example ESMTP\r\n")
            await writer.drain()
            writer.close()

        smtp = await asyncio.start_server(rude, "127.0.0.1", 0)
        stack.push_async_callback(smtp.wait_closed)
        stack.callback(smtp.close)
        silent = socket.socket()
        stack.callback(silent.close)
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)

        assert other.listening is not None
        port = other.listening[1]
        seeds = [
            PeerAddress("127.0.0.1", port, identity(2).peer_id),
            PeerAddress("127.0.0.1", port, identity(3).peer_id),
            parse_address(NOBODY),
            PeerAddress("127.0.0.1", silent.getsockname()[1]),
            PeerAddress("127.0.0.1", smtp.sockets[0].getsockname()[1]),
            PeerAddress("no-such-host.invalid", 4390),
        ]
        dialled = await find_peers(home, seeds, timeout=2.0)
        assert [r.peer for r in dialled.reached] == [identity(2).peer_id]
        mismatch, *others = (m.error for m in dialled.missed)
        assert isinstance(mismatch, IdentityMismatch)
        assert mismatch.expected == identity(3).peer_id
        assert mismatch.got == identity(2).peer_id
        reasons = [e.why if isinstance(e, Unreachable) else e for e in others]
        assert reasons == [Why.REFUSED, Why.TIMEOUT, Why.NOT_ATOLL, Why.DNS]
