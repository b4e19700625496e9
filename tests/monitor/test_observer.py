"""Watching a swarm from outside: what an observer sees, and that nobody sees it."""

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from bootstrap.handshake import Gate, admission, anyone, greet, shared_token
from bootstrap.manifest import Manifest
from bootstrap.signed_manifest import SignedManifest
from bootstrap.state import BlobServer
from node.monitor.observer import BACK_LOOKS, Observer
from protocols.addresses import parse_address
from protocols.envelope import seal
from protocols.errors import OperatorError, Unreachable, Why
from protocols.http.transport import HttpTransport
from protocols.identity import Identity
from protocols.messages import Announce, Known
from protocols.whereabouts import Whereabouts


async def first_picture(observer):
    stream = observer.pictures()
    try:
        return await anext(stream)
    finally:
        await stream.aclose()


class Swarm:
    """One node that answers for several islands, as far as an observer can ask."""

    def __init__(self, invitation="", signed=None):
        self.identity = Identity.generate()
        self.transport = HttpTransport(self.identity, listen="127.0.0.1:0")
        self.islands = [self.identity, Identity.generate(), Identity.generate()]
        self.signed = signed or SignedManifest.create(Manifest(), self.identity)
        self.run = self.signed.run_id
        self.invitation = invitation
        self.said = {}
        self.asked = []
        self._sequence = 0
        for n in range(len(self.islands)):
            self.say(n, round=3, state=b"s" * 32, work=3000, loss=3.0 + n)
        self.gate = Gate(
            self.transport,
            Whereabouts(self.transport, self.identity, self.transport.book),
            software="0.1.0",
            run=lambda: self.run,
            admits=shared_token(invitation) if invitation else anyone,
            announces=lambda: list(self.said.values()),
        )
        self.transport.on_call("known", self._known)
        self.transport.on_call("announce", self._announce)
        BlobServer(self.transport, self.run, manifest=self.signed.data, blobs=[])

    def say(self, number, *, proof=None, **values):
        one = self.islands[number]
        self._sequence += 1
        given = {
            "peer": one.peer_id, "role": "island", "status": "active", "incarnation": 1,
            "addresses": (), "version": "0.1.0", "region": "", "head": b"h" * 32,
            "admission": proof
            if proof is not None
            else admission(self.invitation, self.run, one.peer_id),
        }  # fmt: skip
        self.said[one.peer_id] = seal(
            one, Announce(**(given | values)), purpose="announce", run=self.run,
            expires=time.time() + 60, sequence=self._sequence,
        )  # fmt: skip

    async def _known(self, peer, body):
        self.asked.append("known")
        return Known(tuple(self.said.values())).encode()

    async def _announce(self, peer, body):
        self.asked.append("announce")
        return b""

    @property
    def address(self):
        return f"127.0.0.1:{self.transport.listening[1]}/{self.identity.peer_id}"

    async def __aenter__(self):
        await self.transport.start()
        return self

    async def __aexit__(self, *_):
        await self.transport.aclose()


def sketches(round_, count):
    rng = np.random.default_rng(round_)
    centre = rng.normal(size=251)
    return [(centre + rng.normal(size=251) * 0.1).astype("<f4").tobytes() for _ in range(count)]


async def test_an_observer_sees_rounds_and_is_no_peer_of_anybody():
    async with Swarm() as swarm:
        observer = Observer([parse_address(swarm.address)], interval_s=0.0)
        stream = observer.pictures()
        first = await anext(stream)
        assert {peer["peer"] for peer in first["state"]["peers"]} == {
            one.peer_id for one in swarm.islands
        }
        assert first["state"]["node"]["role"] == "observer"
        assert first["history"]["rounds"] == 0
        apart = sketches(3, 3)
        for n in range(3):
            swarm.say(
                n, round=4, state=b"t" * 32, work=4000, loss=2.0 + n, validation_loss=2.5,
                sketch_round=3, sketch=apart[n],
            )  # fmt: skip
        async with asyncio.timeout(30):
            while (picture := await anext(stream))["history"]["rounds"] == 0:
                pass
        row = {name: values[-1] for name, values in picture["history"]["columns"].items()}
        assert (row["round"], row["live"], row["agreeing"], row["tokens"]) == (3, 3, 3, 1000)
        assert row["loss"] == pytest.approx(3.0)
        assert row["validation_loss"] == 2.5
        assert row["consensus"] == pytest.approx(0.1 * (2 / 3) ** 0.5, rel=0.3)
        assert {peer["agrees"] for peer in picture["state"]["peers"]} == {True}
        await stream.aclose()
    # it has no port, and said nothing of itself that could be taken for a trainer
    assert observer.transport.listening is None
    assert set(swarm.asked) == {"known"}


async def test_an_observer_does_not_notice_that_somebody_sets_the_clock(monkeypatch):
    async with Swarm() as swarm:
        observer = Observer([parse_address(swarm.address)], interval_s=0.0)
        stream = observer.pictures()
        await anext(stream)
        two_hours_on = SimpleNamespace(time=lambda: time.time() + 7200, monotonic=time.monotonic)
        monkeypatch.setattr("node.monitor.observer.time", two_hours_on)
        swarm.say(2, round=7, state=b"s" * 32, work=7000)
        peers = (await anext(stream))["state"]["peers"]
        assert max(peer["round"] for peer in peers) == 7
        await stream.aclose()


async def test_an_observer_sees_a_split():
    async with Swarm() as swarm:
        observer = Observer([parse_address(swarm.address)], interval_s=0.0)
        stream = observer.pictures()
        await anext(stream)
        swarm.say(2, round=3, state=b"x" * 32, work=2000)
        async with asyncio.timeout(30):
            while not (alarms := (await anext(stream))["state"]["alarms"]):
                pass
        assert alarms[0]["kind"] == "split"
        await stream.aclose()


async def test_an_observer_counts_those_who_agree_when_it_looks(monkeypatch):
    """Half of them were through as it told of the round."""
    async with Swarm() as swarm:
        observer = Observer([parse_address(swarm.address)], interval_s=0.0)
        stream = observer.pictures()
        await anext(stream)
        told = []
        for n in range(3):
            swarm.say(n, round=4, state=b"t" * 32, work=4000, loss=2.0)
            async with asyncio.timeout(30):
                while True:
                    state = (await anext(stream))["state"]
                    if [peer["round"] for peer in state["peers"]].count(4) > n:
                        break
            told.append((state["consensus"] or {}).get("agreeing"))
        assert told == [None, 2, 3]
        await stream.aclose()
    an_hour_on = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + 3600)
    monkeypatch.setattr("node.monitor.observer.time", an_hour_on)
    state = observer.state.brief()
    assert "active" not in {peer["status"] for peer in state["peers"]}
    assert state["consensus"]["agreeing"] == 0, "the dead agree with nobody"


async def test_a_server_is_none_of_the_islands_that_an_observer_counts():
    async with Swarm() as swarm:
        swarm.say(2, role="server", round=3, state=b"s" * 32, work=3000)
        observer = Observer([parse_address(swarm.address)], interval_s=0.0)
        stream = observer.pictures()
        await anext(stream)
        for n, role in enumerate(("island", "island", "server")):
            swarm.say(n, role=role, round=4, state=b"t" * 32, work=4000)
        async with asyncio.timeout(30):
            while (picture := await anext(stream))["history"]["rounds"] == 0:
                pass
        row = {name: values[-1] for name, values in picture["history"]["columns"].items()}
        assert (row["members"], row["live"], row["agreeing"]) == (2, 2, 2)
        assert picture["state"]["consensus"]["agreeing"] == 2
        await stream.aclose()


async def test_an_observer_needs_the_invitation_and_asks_for_proof_of_it():
    async with Swarm("open sesame") as swarm:
        swarm.say(2, round=3, state=b"s" * 32, work=3000, proof=b"forged")
        with pytest.raises(OperatorError) as error:
            await first_picture(Observer([parse_address(swarm.address)], interval_s=0.0))
        assert error.value.code == "E203"
        observer = Observer([parse_address(swarm.address)], "open sesame", interval_s=0.0)
        picture = await first_picture(observer)
        assert len(picture["state"]["peers"]) == 2


async def test_nobody_to_observe_is_told():
    async with Swarm() as swarm:
        address = swarm.address
    with pytest.raises(OperatorError) as error:
        await first_picture(Observer([parse_address(address)]))
    assert error.value.code == "E101"


async def test_a_peer_that_leaves_after_the_dial_cannot_be_reached(monkeypatch):
    async def gone(transport, whereabouts, peer, **_):
        raise Unreachable(peer, Why.RESET)

    monkeypatch.setattr("node.monitor.observer.greet", gone)
    async with Swarm() as swarm:
        address = parse_address(swarm.address)
        with pytest.raises(OperatorError) as error:
            await first_picture(Observer([address]))
    assert (error.value.code, error.value.what) == ("E101", f"cannot reach {address.hostport}")


async def test_one_island_that_lies_spoils_no_figure_of_the_others():
    async with Swarm() as swarm:
        huge = {"round": 2**62, "work": 2**62, "loss": 1.7e308, "validation_loss": 1.7e308}
        swarm.say(2, state=b"x" * 32, **huge)
        observer = Observer([parse_address(swarm.address)], interval_s=0.0)
        stream = observer.pictures()
        await anext(stream)
        apart, lie = sketches(3, 2), np.full(251, -3e38, dtype="<f4").tobytes()
        swarm.say(2, state=b"x" * 32, sketch_round=3, sketch=lie, **huge)
        for n in range(2):
            swarm.say(
                n, round=4, state=b"t" * 32, work=4000, loss=2.0 + n, validation_loss=2.5,
                sketch_round=3, sketch=apart[n],
            )  # fmt: skip
        async with asyncio.timeout(30):
            while (picture := await anext(stream))["history"]["rounds"] == 0:
                pass
        row = {name: values[-1] for name, values in picture["history"]["columns"].items()}
        assert (row["round"], row["agreeing"], row["tokens"], row["loss"]) == (3, 2, 1000, 2.5)
        assert row["consensus"] == pytest.approx(0.1 * 0.5**0.5, rel=0.3)
        distance = {peer["peer"]: peer["distance"] for peer in picture["state"]["peers"]}
        assert [distance[one.peer_id] < 1 for one in swarm.islands] == [True, True, False]
        assert picture["state"]["alarms"] == []
        agree = {peer["peer"]: peer["agrees"] for peer in picture["state"]["peers"]}
        assert [agree[one.peer_id] for one in swarm.islands] == [True, True, None]
        await stream.aclose()


async def test_figures_that_nobody_can_have_are_shown_nowhere():
    async with Swarm() as swarm:
        names = ("tokens_per_second", "upload", "download", "round_trip", "loss", "validation_loss")
        told = dict.fromkeys(names, 1.7e308)
        swarm.say(2, round=3, state=b"s" * 32, work=3000, **told)
        picture = await first_picture(Observer([parse_address(swarm.address)], interval_s=0.0))
        by_id = {peer["peer"]: peer for peer in picture["state"]["peers"]}
        liar = by_id[swarm.islands[2].peer_id]
        shown = ("tokens_per_second", "upload", "download", "own_rtt_s", "loss", "validation_loss")
        assert [liar[name] for name in shown] == [0, 0, 0, None, None, None]


async def test_losses_that_no_sum_can_hold_end_nothing():
    async with Swarm() as swarm:
        observer = Observer([parse_address(swarm.address)], interval_s=0.0)
        stream = observer.pictures()
        await anext(stream)
        for n in range(3):
            swarm.say(
                n, round=4, state=b"t" * 32, work=4000, loss=1.7e308, validation_loss=-1.7e308
            )
        async with asyncio.timeout(30):
            while (picture := await anext(stream))["history"]["rounds"] == 0:
                pass
        assert picture["history"]["columns"]["loss"] == [None]
        await stream.aclose()


async def test_one_peer_whose_clock_is_wrong_hides_no_island(monkeypatch):
    """What it says is in time for the others is not for who believes that clock."""

    async def greeted(transport, whereabouts, peer, **more):
        found = await greet(transport, whereabouts, peer, **more)
        return replace(found, offset=3600.0) if peer == liar.identity.peer_id else found

    monkeypatch.setattr("node.monitor.observer.greet", greeted)
    liar = Swarm()
    async with liar, Swarm(signed=liar.signed) as second, Swarm(signed=liar.signed) as third:
        second.said = third.said = liar.said
        peers = [parse_address(one.address) for one in (liar, second, third)]
        picture = await first_picture(Observer(peers, interval_s=0.0))
        assert len(picture["state"]["peers"]) == 3


def test_a_swarm_that_has_gone_back_is_followed_there():
    """As when all its islands were started again from an earlier checkpoint."""
    observer = Observer([])

    def look(number, status="active"):
        there = [
            SimpleNamespace(
                peer=f"p{n}", round=number, state=b"s", status=status, role="island",
                loss=2.0, validation_loss=2.0, work=1000 * number,
            )
            for n in range(4)
        ]  # fmt: skip
        observer.membership.members_alive = lambda now: there
        observer._note()

    for number in range(95, 101):
        look(number)
    look(99)  # as the only one that was there leaves
    look(100)
    look(0, "joining")
    observer.membership.members_alive = lambda now: []
    for _ in range(2 * BACK_LOOKS):
        observer._note()
    assert observer.state.round == 100
    for number in range(60, 80):
        look(number)
    assert observer.state.round == 79
    rounds = observer.history.columns()["columns"]["round"]
    assert rounds[-1] == 78
    assert max(rounds) == 78
