"""What operators get wrong about peers and runs, by the real command: told in words."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from badinput_kit import CREATOR, OTHER, RUN, SHARD, START, answering, island, peer
from http_kit import NOBODY

from bootstrap.handshake import Gate, shared_token
from bootstrap.signed_manifest import SignedManifest
from bootstrap.state import BlobServer
from protocols.errors import RemoteRefused
from protocols.http.transport import HttpTransport
from protocols.limits import Limits
from protocols.messages import PROTOCOL_VERSION
from protocols.whereabouts import Whereabouts

pytestmark = pytest.mark.usefixtures("own_directory")


# --- addresses --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("203.0.113.7", "port"),
        ("203.0.113.7:0", "port"),
        ("203.0.113.7:123456", "port"),
        ("http://203.0.113.7:4390", "203.0.113.7:4390"),
        (f"/ip4/203.0.113.7/tcp/4390/p2p/{OTHER.peer_id}", f"203.0.113.7:4390/{OTHER.peer_id}"),
        ("203.0.113.7:4390/12D3KooWnot-an-id", "12D3KooWnot-an-id"),
        ("exa mple:1", ""),
        ("@/nowhere/peers.txt", "/nowhere/peers.txt"),
    ],
)
def test_an_address_that_is_none(refused, address, said, tmp_path):
    text, _ = refused("E102", *START, "--peers", address)
    assert said in text
    assert not (tmp_path / "state").exists()  # nothing was begun


@pytest.mark.usefixtures("quick_resolver")
def test_a_name_that_does_not_resolve(refused):
    patience = ("--wait-s", "0.5")  # the first try takes no longer
    text, events = refused("E101", *START, *patience, "--peers", "no-such-host.invalid:4390")
    assert "cannot reach no-such-host.invalid:4390" in text
    assert "does not resolve" in text
    # the reason is told at once, and again at the end
    assert [e["code"] for e in events if e["kind"] == "problem"] == ["E101"]


def test_nobody_listens_there(refused):
    text, _ = refused("E101", *START, "--peers", NOBODY)
    assert "nothing listens there" in text
    assert "check that the node runs there" in text


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", b"SSH-2.0-OpenSSH_9.6\r\n"]
)
def test_something_else_answers(refused, answer):
    with answering(answer) as address:
        text, _ = refused("E101", *START, "--peers", address)
    assert "not Atoll" in text


def test_somebody_listens_and_says_nothing(refused, monkeypatch):
    monkeypatch.setattr("node.daemon.Limits", partial(Limits, connect=0.5))
    with socket.create_server(("127.0.0.1", 0)) as mute:  # the system takes connections for it
        text, _ = refused("E101", *START, "--peers", f"127.0.0.1:{mute.getsockname()[1]}")
    assert "no answer in time" in text


def test_no_common_version_of_tls(refused):
    with answering(bytes.fromhex("15030300020246")) as address:  # alert, fatal: protocol_version
        text, _ = refused("E101", *START, "--peers", address)
    assert "the TLS handshake failed" in text


def test_no_peer_of_several(refused):
    with answering(b"SSH-2.0-OpenSSH_9.6\r\n") as other:
        given = f"no-such-host.invalid:1,{NOBODY},{other}"
        text, _ = refused("E501", *START, "--peers", given)
    why = text.partition("why: ")[2].partition("fix:")[0]
    for address, reason in (
        ("no-such-host.invalid:1", "does not resolve"),
        (NOBODY, "nothing listens"),
        (other, "not Atoll"),
    ):
        assert re.search(rf"^ *{re.escape(address)}: .*{reason}", why, re.MULTILINE), text


# --- who answers ------------------------------------------------------------------------------

LONG = ("--wait-s", "60")  # what cannot get better is told without waiting


def quickly(call: Callable[[], Any]) -> Any:
    began = time.monotonic()
    result = call()
    assert time.monotonic() - began < 15
    return result


def test_another_identity(refused):
    _, prepare = island(RUN)
    with peer(prepare) as address:
        text, events = quickly(
            lambda: refused("E103", *START, *LONG, "--peers", f"{address}/{OTHER.peer_id}")
        )
    assert f"expected {OTHER.peer_id}, got {CREATOR.peer_id}" in text
    assert not [e for e in events if e["kind"] == "problem"]


def test_another_run(refused, tmp_path):
    _, prepare = island(RUN)
    mine = tmp_path / "run.toml"
    mine.write_text("[model]\nn_layers = 3\n[inner]\nlr = 0.25\n")
    with peer(prepare) as address:
        text, _ = quickly(lambda: refused("E201", *START, *LONG, "--peers", address, "--run", mine))
    assert "model.n_layers 3 != 2" in text
    assert "inner.lr 0.25 != 0.005" in text
    assert "evaluation.digest" not in text  # filled in by whoever creates the run


def test_another_version(refused):
    def prepare(transport: HttpTransport, whereabouts: Whereabouts) -> None:
        async def answer(peer: str, body: bytes) -> bytes:
            raise RemoteRefused("version", "protocol 7, atoll 9.0")

        transport.on_call("hello", answer)

    with peer(prepare) as address:
        text, _ = quickly(lambda: refused("E202", *START, *LONG, "--peers", address))
    assert f"this node: protocol {PROTOCOL_VERSION}, atoll " in text
    assert "protocol 7, atoll 9.0" in text


@pytest.mark.parametrize("given", [(), ("--invitation", "guessed")])
def test_no_valid_invitation(refused, given):
    _, prepare = island(RUN, admits=shared_token("the real one"))
    with peer(prepare) as address:
        text, _ = quickly(lambda: refused("E203", *START, *LONG, *given, "--peers", address))
    assert "guessed" not in text


def test_a_peer_cannot_write_into_the_terminal(refused):
    def prepare(transport: HttpTransport, whereabouts: Whereabouts) -> None:
        async def refuse(peer: str, header: bytes) -> Any:
            refusal = RemoteRefused("gone")
            refusal.detail = "\x1b]0;mine\x07\nerror E999: \x1b[31mforged"
            raise refusal

        Gate(transport, whereabouts, software="0.1.0", run=lambda: RUN.run_id)
        transport.on_pull("manifest", refuse)

    with peer(prepare) as address:
        text, _ = refused("E502", *START, "--peers", address)
    assert "gone: ?]0;mine??error E999: ?[31mforged" in text


def test_a_wrong_clock(refused):
    _, prepare = island(RUN, clock=lambda: time.time() + 60)
    with peer(prepare) as address:
        text, _ = quickly(lambda: refused("E301", *START, *LONG, "--peers", address))
    assert re.search(r"it is (59\.\d|60\.\d) s behind the median of 1 peers", text)
    assert "timedatectl" in text


@pytest.fixture
def quick_no(monkeypatch):
    """A peer that is asked to dial back says sooner that it cannot."""
    monkeypatch.setattr("bootstrap.dial_back.TIMEOUT_S", 0.5)


@pytest.mark.usefixtures("quick_no")
def test_nobody_can_dial_back(refused):
    _, prepare = island(RUN)
    with peer(prepare) as address:
        text, events = quickly(
            lambda: refused("E302", *START, *LONG, "--peers", address, "--public-addr", NOBODY)
        )
    assert NOBODY in text
    assert "--public-addr" in text
    assert [e["name"] for e in events if e["kind"] == "join"] == ["dial", "checks"]


@pytest.mark.usefixtures("quick_no")
def test_nobody_can_dial_back_is_said_before_there_is_a_run(refused):
    def seed(transport: HttpTransport, whereabouts: Whereabouts) -> None:
        Gate(transport, whereabouts, software="0.1.0", run=lambda: b"", observed=transport.observed)

    with peer(seed) as address:
        text, events = quickly(
            lambda: refused("E302", *START, *LONG, "--peers", address, "--public-addr", NOBODY)
        )
    assert NOBODY in text
    assert [e["name"] for e in events if e["kind"] == "join"] == ["dial"]


def test_a_manifest_that_is_not_the_runs(refused):
    """The peer says one run and serves the signed manifest of another."""
    signed, prepare = island(RUN)
    other = SignedManifest.create(RUN.model_copy(update={"seed": 77}), CREATOR)

    def lie(transport: HttpTransport, whereabouts: Whereabouts) -> None:
        prepare(transport, whereabouts)
        BlobServer(transport, signed.run_id, manifest=other.data, blobs=[SHARD])

    with peer(lie) as address:
        quickly(lambda: refused("E205", *START, *LONG, "--peers", address))


def test_a_shard_that_nobody_has(refused):
    _, prepare = island(RUN, blob=b"another")
    with peer(prepare) as address:
        refused("E502", *START, "--peers", address)


def test_while_no_peer_answers_it_tries_again_ever_more_seldom(refused):
    began = time.monotonic()
    text, events = refused("E101", *START, "--wait-s", "4", "--peers", NOBODY)
    assert 4 <= time.monotonic() - began < 15
    tries = [e for e in events if e["kind"] == "problem" and e["code"] == "E101"]
    pauses = [int(re.search(r"trying again in (\d+) s", e["fix"])[1]) for e in tries]
    assert len(pauses) >= 2
    assert pauses[0] == 1  # then up to twice as long each time, within what is left
    assert "nothing listens there" in text


def test_a_path_from_a_peer_is_never_read(refused, tmp_path):
    """The text of a run is each island's own: a creator's path means nothing here."""
    secret = tmp_path / "secret.txt"
    secret.write_text("A secret of this machine. " * 1000)
    data = RUN.data.model_copy(update={"recipe": "text", "path": str(secret)})
    _, prepare = island(RUN.model_copy(update={"data": data}))
    before = secret.stat().st_atime_ns
    with peer(prepare) as address:
        text, _ = refused("E601", *START, "--peers", address)
    assert "each island's own text" in text
    assert "--data" in text
    assert str(secret) not in text
    assert secret.stat().st_atime_ns == before
    assert not list((tmp_path / "cache").rglob("*.bin"))
