"""Invitations: who shows one is let in, and nobody learns it from what is shown."""

from __future__ import annotations

import hmac
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from gossip_kit import PLACE
from greeting_kit import OTHER, RUN, Host, refused, two_hosts
from identity_kit import identity

from bootstrap.handshake import admission, shared_token
from gossip.membership.standing import first_announcement
from protocols.envelope import seal
from protocols.errors import RemoteRefused
from protocols.identity import Identity, PeerId


@pytest.fixture
def hosts() -> tuple[Host, Host]:
    return two_hosts()


async def test_what_proves_an_invitation_holds_between_two_alone(hosts: tuple[Host, Host]) -> None:
    newcomer, seed = hosts
    shown: list[str] = []

    def note(caller: PeerId, greeted: PeerId, proof: str) -> bool:
        shown.append(proof)
        return True

    seed.gate(admits=note)
    await newcomer.greet(seed, invitation="s3cret")
    admits, other = shared_token("s3cret"), identity(3).peer_id
    assert admits(newcomer.peer, seed.peer, shown[0])
    assert not admits(newcomer.peer, other, shown[0])
    assert not admits(other, seed.peer, shown[0])


async def test_missing_and_wrong_invitations_read_the_same(hosts: tuple[Host, Host]) -> None:
    newcomer, seed = hosts
    gate = seed.gate(admits=shared_token("s3cret-ü"))
    texts = {
        (await refused("E203", newcomer, seed, invitation=invitation)).text()
        for invitation in ("", "wrong", "s3cret", "s3cret-ü ")
    }
    assert len(texts) == 1
    # nor does an outsider learn which run it is
    assert (await refused("E203", newcomer, seed, run=OTHER)).text() in texts
    assert not gate.admitted(newcomer.peer)
    await newcomer.greet(seed, invitation="s3cret-ü")
    assert gate.admitted(newcomer.peer)


async def test_whoever_is_greeted_cannot_greet_with_the_invitation(
    hosts: tuple[Host, Host],
) -> None:
    """An address may lead to anybody: what a newcomer shows there is of no use elsewhere."""
    newcomer, seed = hosts
    impostor = Host(newcomer.transport.network, 3)
    heard: list[bytes] = []

    async def listen(peer: str, body: bytes) -> bytes:
        heard.append(body)
        raise RemoteRefused("invitation", "not valid")

    impostor.transport.on_call("hello", listen)
    await refused("E203", newcomer, impostor, invitation="s3cret")
    assert b"s3cret" not in heard[0]
    gate = seed.gate(admits=shared_token("s3cret"))
    with pytest.raises(RemoteRefused, match="invitation"):
        await impostor.transport.call(seed.peer, "hello", heard[0], timeout=5)
    assert not gate.admitted(impostor.peer)


def announcement(host: Host, invitation: str = "") -> bytes:
    proof = admission(invitation, RUN, host.peer)
    said = first_announcement(host.peer, PLACE, version="0.1.0", admission=proof)
    return seal(host.identity, said, purpose="announce", run=RUN, expires=60.0, sequence=1)


async def test_an_invitation_to_a_run_without_one_is_told_of(hosts: tuple[Host, Host]) -> None:
    """Its members prove nothing, so this node would train beside them and hear none of them."""
    newcomer, seed = hosts
    told = [b"no announcement", announcement(seed)]
    seed.gate(announces=lambda: told)
    error = await refused("E203", newcomer, seed, invitation="s3cret")
    assert "the run has none" in error.what
    assert "leave out --invitation" in error.fix
    await newcomer.greet(seed)
    told.append(announcement(newcomer, "s3cret"))  # one who knows it: the seed alone was given none
    await newcomer.greet(seed, invitation="s3cret")
    told.clear()  # nothing is known of anybody yet
    await newcomer.greet(seed, invitation="s3cret")


def test_an_admission_holds_for_one_peer_in_one_run() -> None:
    one, two = (Identity.from_seed(bytes([n]) * 32).peer_id for n in (1, 2))
    proof = admission("secret", b"r" * 32, one)
    assert len(proof) == 32
    assert proof == admission("secret", b"r" * 32, one)
    assert proof != admission("secret", b"r" * 32, two)
    assert proof != admission("secret", b"s" * 32, one)
    assert proof != admission("other", b"r" * 32, one)
    assert admission("", b"r" * 32, one) == b""


async def test_a_guess_at_an_invitation_costs_what_stretching_it_does(
    hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members pay once; whoever is shown a proof pays for each guess."""
    stretched: list[bytes] = []

    def counted(**costs: Any) -> Any:
        def derive(secret: bytes) -> bytes:
            stretched.append(secret)
            return Scrypt(**costs).derive(secret)

        return SimpleNamespace(derive=derive)

    monkeypatch.setattr("bootstrap.handshake.Scrypt", counted)
    newcomer, seed = hosts
    shown: list[str] = []
    real = shared_token("a secret of this test")

    def admits(caller: PeerId, greeted: PeerId, proof: str) -> bool:
        shown.append(proof)
        return real(caller, greeted, proof)

    seed.gate(admits=admits)
    for _ in range(3):
        await newcomer.greet(seed, invitation="a secret of this test")
        admission("a secret of this test", RUN, newcomer.peer)
    assert stretched == [b"a secret of this test"]
    between = f"atoll greeting\x00{newcomer.peer}\x00{seed.peer}".encode()
    unstretched = hmac.digest(b"a secret of this test", between, "sha256").hex()
    assert unstretched not in shown
    await refused("E203", newcomer, seed, invitation="a guess")
    assert stretched[1:] == [b"a guess"]
