"""On the way into a run: what is compared with the peers' run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from identity_kit import identity

from bootstrap.dial_back import Reach
from bootstrap.manifest import Manifest
from bootstrap.seeds import Dialled, PeerCache, Reached, Unreached
from bootstrap.signed_manifest import SignedManifest
from node import clock
from node.commands.manifest import manifest_for
from node.config import resolve
from node.entry.differing import differences, listed
from node.entry.entrance import GONE_AFTER, Entrance
from node.entry.reaching import ASKED_AGAIN, TRIED_AGAIN, Reaching
from node.errors import operator_error
from node.monitor.event_log import EventLog
from node.monitor.events import Notice, Problem
from node.presets import PRESETS
from protocols.addresses import PeerAddress
from protocols.errors import IdentityMismatch, OperatorError, RemoteRefused, Unreachable, Why
from protocols.memory import virtual_time

OTHER = {"kind": "hf", "config": '{"model_type": "gpt2", "words": "%s"}' % ("x" * 300)}
SCRIPT = {"layout": "ab" * 32, "parameters": 8}


def entrance(config: Any) -> Entrance:
    """One that knows nobody, of a node that has these settings."""
    nothing: Any = None
    return Entrance(config, *[nothing] * 4, EventLog(), nothing, lambda peer: "", nothing)


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> SignedManifest:
    signed = SignedManifest.create(Manifest(), identity(1))

    async def fetched(*_: Any) -> SignedManifest:
        return signed

    monkeypatch.setattr("node.entry.entrance.fetch_manifest", fetched)
    return signed


@pytest.mark.parametrize("preset", ["", "small"])
def test_what_was_set_by_hand_is_named_first_of_what_differs(tmp_path: Path, preset: str) -> None:
    config: Any = resolve({"dir": str(tmp_path), "peers": ["a:1"]}, {})
    own = manifest_for(config, preset, ("rounds.inner_steps=7",))
    theirs = Manifest(
        seed=3,
        model=OTHER,
        data={"seq_len": 64, "batch_size": 3},
        inner={"lr": 0.7, "weight_decay": 0.5},
    )
    assert own is not None
    found = differences(own, theirs)
    told = listed(found, own).split("; ")
    assert told[0] == f"rounds.inner_steps 7 != {theirs.rounds.inner_steps}"
    assert told[-1] == f"and {len(found) - 8} more"
    assert len(told) == 9
    assert max(map(len, told)) <= 121


def test_of_long_values_both_sides_are_told_where_they_differ() -> None:
    """As of two models that have another number of layers."""
    text = '{"model_type": "gpt2", "note": "' + "x" * 200 + '", "n_layer": %d, "end": "%s"}'
    own, theirs = (
        Manifest(model={"kind": "hf", "config": text % (layers, "y" * 200)}) for layers in (12, 24)
    )
    (line,) = listed(differences(own, theirs), own).split("; ")
    assert line.startswith("model.config …")
    left, right = line.split(" != ")
    assert '"n_layer": 12,' in left
    assert '"n_layer": 24,' in right
    assert len(line) <= 121


@pytest.mark.parametrize("preset", ["", "small"])
def test_what_was_set_by_hand_may_be_as_some_other_preset_has_it(
    tmp_path: Path, preset: str
) -> None:
    config: Any = resolve({"dir": str(tmp_path), "peers": ["a:1"]}, {})
    others: Any = PRESETS["125m"]["rounds"]["inner_steps"]
    assert others != PRESETS["small"]["rounds"]["inner_steps"]
    own = manifest_for(config, preset, (f"rounds.inner_steps={others}",))
    theirs = Manifest(seed=3, model=OTHER, inner={"lr": 0.7}, rounds={"inner_steps": 9})
    assert own is not None
    assert listed(differences(own, theirs), own).startswith(f"rounds.inner_steps {others} != 9; ")


@pytest.mark.parametrize(
    ("flags", "own", "named"),
    [
        ({"run": "mine.toml"}, Manifest(seed=5), "leave out --run "),
        ({}, Manifest(seed=5), "leave out --preset, --mode and --set "),
        ({}, Manifest(script=SCRIPT), "leave out run=... of node.join "),
    ],
)
async def test_what_gave_a_node_another_run_is_what_is_to_be_left_out(
    tmp_path: Path, theirs: SignedManifest, flags: dict[str, str], own: Manifest, named: str
) -> None:
    config: Any = resolve({"dir": str(tmp_path), **flags}, {})
    greeting: Any = SimpleNamespace(
        peer=identity(2).peer_id, welcome=SimpleNamespace(run=theirs.run_id)
    )
    with pytest.raises(OperatorError) as caught:
        await entrance(config).take([greeting], own)
    assert caught.value.code == "E201"
    assert caught.value.fix.startswith(named)


async def test_peers_of_two_runs_are_told_of(tmp_path: Path, theirs: SignedManifest) -> None:
    """Else the one that was greeted first would decide which run it is."""
    other = bytes([theirs.run_id[0] ^ 1]) + theirs.run_id[1:]
    greetings: Any = [
        SimpleNamespace(peer=identity(number).peer_id, welcome=SimpleNamespace(run=run))
        for number, run in ((2, theirs.run_id), (3, b""), (4, other))
    ]
    with pytest.raises(OperatorError, match="the peers train different runs") as caught:
        await entrance(resolve({"dir": str(tmp_path)}, {})).take(greetings, None)
    assert caught.value.code == "E201"
    assert {run.hex()[:8] for run in (theirs.run_id, other)} <= set(caught.value.why.split(", "))


async def test_what_was_given_and_leads_to_nobody_or_somebody_else_is_told_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another one answers; else nobody would learn that a seed is there with another key."""
    mine, other = identity(2).peer_id, identity(3).peer_id
    gone, rekeyed = (PeerAddress("192.0.2.1", port, mine) for port in (1, 2))
    cached = PeerAddress("192.0.2.1", 3, mine)
    missed = [
        Unreached(gone, Unreachable("", Why.REFUSED)),
        Unreached(rekeyed, IdentityMismatch("", mine, other)),
    ]

    async def dialled(*_: Any) -> Dialled:
        return Dialled([Reached(cached, mine, 0.1)], missed)

    async def greeted(*_: Any, **__: Any) -> None:
        raise operator_error("E202")

    monkeypatch.setattr("node.entry.entrance.find_peers", dialled)
    monkeypatch.setattr("node.entry.entrance.dial_all", dialled)
    monkeypatch.setattr("node.entry.entrance.greet", greeted)
    entering = entrance(resolve({"dir": str(tmp_path), "peers": [str(gone), str(rekeyed)]}, {}))
    told: list[Any] = []
    entering.events.subscribe(
        lambda record: told.append(record.event) if record.event.kind == "problem" else None
    )
    await entering.visit_seeds(b"", lambda peer: True)
    assert [one.code for one in told] == ["E103"]  # a seed that is down may come back
    with pytest.raises(OperatorError, match="protocol versions differ"):
        await entering.greet_seeds(b"")
    assert [one.code for one in told] == ["E103", "E101"]
    assert gone.hostport in told[1].what


@pytest.mark.parametrize(
    ("given", "run", "asked"),
    [(True, b"", False), (True, b"of its own", True), (False, b"", True)],
    ids=["joins", "goes on", "goes on without a checkpoint"],
)
async def test_no_run_is_joined_that_only_peers_of_before_are_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: bool, run: bytes, asked: bool
) -> None:
    """Who names a peer means its run, and not the one that the directory was in before."""
    seed, before = (PeerAddress("192.0.2.1", port, identity(port).peer_id) for port in (1, 2))
    dials: list[str] = []

    class Nobody:
        async def dial(self, address: str, expected: Any) -> None:
            dials.append(address)
            raise Unreachable(address, Why.REFUSED)

    entering = entrance(resolve({"dir": str(tmp_path), "peers": [str(seed)] * given}, {}))
    entering.transport, entering.cache = Nobody(), PeerCache(tmp_path / "peers.json")  # type: ignore[assignment]
    entering.cache.remember([before])
    with pytest.raises(OperatorError, match=r"cannot reach|no peer answered"):
        await entering.greet_seeds(run)
    assert dials == [seed.hostport] * given + [before.hostport] * asked


def test_a_pause_of_less_than_a_second_is_not_told_as_none(tmp_path: Path) -> None:
    one = entrance(resolve({"dir": str(tmp_path), "wait_s": "0.01"}, {}))

    async def attempt() -> None:
        raise operator_error("E101", "cannot reach a:1")

    with pytest.raises(OperatorError, match="cannot reach"):
        virtual_time.run(one.patiently(attempt))
    told = [record.event for record in one.events.since(0)]
    assert [event.fix[:20] for event in told if isinstance(event, Problem)] == [
        "trying again in 1 s;"
    ]


class Seed:
    """What a seed answers to a creator who brings it a run, greeting by greeting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Any) -> None:
        self.answers = list(
            answers
        )  # the creator of the run that it has, None: no run; or an error
        self.made = SignedManifest.create(Manifest(), identity(1))
        monkeypatch.setattr("node.entry.entrance.fetch_manifest", self._manifest)

    async def greet(self, where: str, peer: Any, run: bytes) -> Any:
        answer = self.answers[0]
        passes = answer is None or isinstance(answer, Exception)
        if passes and len(self.answers) > 1:
            self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        there = self.made.run_id if answer else b""
        return SimpleNamespace(peer=peer, welcome=SimpleNamespace(run=there))

    async def _manifest(self, *_: Any) -> Any:
        if self.answers[0] == "soon":
            self.answers.pop(0)
            raise RemoteRefused("unknown", "not offered yet")
        return SignedManifest.create(Manifest(), self.answers[0])

    async def claimed(self, one: Entrance) -> list[Any]:
        one.transport = cast("Any", SimpleNamespace(peer_id=identity(1).peer_id))
        one._greet = self.greet  # type: ignore[method-assign]
        first: Any = SimpleNamespace(peer=identity(2).peer_id, welcome=SimpleNamespace(run=b""))
        return [one.welcome.run for one in await one.claim(self.made.run_id, [first])]


def test_a_run_begins_once_the_seed_has_it_from_its_creator(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else two islands could begin one each: the seed tells nobody of a run that it has not."""
    one = entrance(resolve({"dir": str(tmp_path)}, {}))
    seed = Seed(monkeypatch, None, None, None, "soon", identity(1))
    assert virtual_time.run(seed.claimed(one)) == [b""], "it takes part as one that begins"
    assert len(seed.answers) == 1, "it has been asked until it said whose run it has"


def test_a_greeting_that_is_lost_begins_no_run_beside_another_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nor do many, with an answer now and then: the seed is there."""
    one, lost = entrance(resolve({"dir": str(tmp_path)}, {})), operator_error("E101")
    answers = [None, *[lost] * (GONE_AFTER - 1), None, *[lost] * (GONE_AFTER - 1)]
    with pytest.raises(OperatorError, match="another run began"):
        virtual_time.run(Seed(monkeypatch, *answers, identity(3)).claimed(one))
    ours = Seed(monkeypatch, *answers, identity(1))
    assert virtual_time.run(ours.claimed(one)) == [b""]
    assert len(ours.answers) == 1


@pytest.mark.parametrize("answer", [identity(3), operator_error("E201")])
def test_another_s_run_is_joined_and_not_begun_beside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: Any
) -> None:
    """It may have the same settings, and so the same id."""
    one = entrance(resolve({"dir": str(tmp_path)}, {}))
    with pytest.raises(OperatorError, match="another run began") as caught:
        virtual_time.run(Seed(monkeypatch, None, answer).claimed(one))
    assert caught.value.code == "E502"


@pytest.mark.parametrize("answer", [None, operator_error("E101")])
def test_a_seed_that_takes_no_run_does_not_keep_it_from_beginning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: Any
) -> None:
    one = entrance(resolve({"dir": str(tmp_path)}, {}))
    assert virtual_time.run(Seed(monkeypatch, answer).claimed(one)) == [b""]
    told = [record.event for record in one.events.since(0)]
    assert [event.text.split()[1:] for event in told if isinstance(event, Notice)] == (
        []
        if answer
        else [["has", "not", "taken", "the", "run", "in", "30", "s:", "it", "begins", "without"]]
    )


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (Unreachable("x", Why.NO_ADDRESS), 1),
        (operator_error("E201"), 1),
        (operator_error("E205"), 1),
        (Unreachable("x", Why.REFUSED), 3),
        (operator_error("E501"), 3),
    ],
    ids=["no address", "another run", "another manifest", "refused", "no run yet"],
)
def test_a_seed_tries_again_only_what_may_go_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, tries: int
) -> None:
    one, asked = entrance(resolve({"dir": str(tmp_path)}, {})), 0

    async def greet(*_: Any, **__: Any) -> Any:
        nonlocal asked
        asked += 1
        raise error if asked < 3 else operator_error("E203")

    monkeypatch.setattr("node.entry.entrance.greet", greet)
    with pytest.raises(OperatorError):
        virtual_time.run(one.take_from(identity(2).peer_id, bytes(32)))
    assert asked == tries


class Elsewhere:
    """A node whose machine has another address by now, and what its peers say."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Reach) -> None:
        self.tried: list[Any] = []
        self.greeted: list[Any] = []
        self.seen: list[list[str]] = []
        self.silent: set[Any] = set()
        self.found = found
        self.relay: Any = None
        self.own = SimpleNamespace(record=SimpleNamespace(addresses=("10.0.0.1:4390",)))
        one: Any = entrance(resolve({"dir": str(tmp_path)}, {}))
        one.clocks = SimpleNamespace(add=lambda *given: None)
        node: Any = one.reaching
        self.reaching: Reaching = node
        node.whereabouts = SimpleNamespace(own=self.own)
        node.own_end = lambda peer: f"{'127.0.0.1' if peer == PLACES[1].peer else '10.0.0.9'}:7"
        node.place = SimpleNamespace(
            seen=self._seen,
            moved=True,
            port=4390,
            outside="",
            pass_by=lambda outside: None,
        )
        node.outbound = SimpleNamespace(needed=False, address="", enter=self._enter, describe=str)
        monkeypatch.setattr("node.entry.entrance.greet", self._greet)
        monkeypatch.setattr("node.entry.reaching.reach", self._reach)
        monkeypatch.setattr("node.entry.reaching.outside", self._outside)

    def _seen(self, where: Any) -> bool:
        self.seen.append(list(where))
        self.own.record.addresses = ("10.0.0.9:4390",)
        return True

    async def _enter(self, places: Any) -> Any:
        self.reaching.outbound.needed = True
        self.relay = places[0]
        self.found = Reach.YES
        return self.relay

    async def _greet(self, transport: Any, whereabouts: Any, peer: Any, **_: Any) -> Any:
        self.tried.append(peer)
        if peer in self.silent:
            raise Unreachable("", Why.TIMEOUT)
        self.greeted.append(peer)
        welcome = SimpleNamespace(observed="172.17.0.1:7")  # what it says, whatever is so
        return SimpleNamespace(peer=peer, welcome=welcome, offset=0.0, round_trip=0.1)

    async def _reach(self, transport: Any, peers: Any) -> Reach:
        return self.found

    async def _outside(self, transport: Any, seen: Any, port: int) -> str:
        return ""

    def told(self) -> list[str]:
        events = [record.event for record in self.reaching.events.since(0)]
        return [event.text for event in events if isinstance(event, Notice)]


PLACES = [PeerAddress("192.0.2.7", number, identity(number).peer_id) for number in (2, 3, 4, 5)]


async def test_a_node_that_has_moved_has_peers_call_it_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Elsewhere(tmp_path, monkeypatch, Reach.YES)
    scene.silent.add(PLACES[0].peer)
    await scene.reaching.look_again(PLACES[:3], b"")
    # each again once the new address is known, and before it is to dial back
    assert set(scene.greeted[:2]) == {PLACES[1].peer, PLACES[2].peer}
    assert scene.greeted[2:] == scene.greeted[:2]
    assert scene.seen == [["10.0.0.9:7"]], "who is on this machine says nothing of the network"
    assert scene.told() == ["this node's address is 10.0.0.9:4390 now (dial-back ok (direct))"]


async def test_whoever_of_its_peers_answers_is_asked_where_a_node_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first three it knows may have gone, and it would never be told elsewhere."""
    scene = Elsewhere(tmp_path, monkeypatch, Reach.YES)
    many = [PeerAddress("192.0.2.7", n, identity(n).peer_id) for n in range(10, 30)]
    scene.silent.update(one.peer for one in many[:5])
    await scene.reaching.look_again(many, b"")
    assert len(scene.greeted) == 2 * ASKED_AGAIN
    scene.silent.update(one.peer for one in many)
    scene.tried.clear()
    for _ in range(10):  # which are tried is drawn anew
        await scene.reaching.look_again(many, b"")
    assert len(scene.tried) == 10 * TRIED_AGAIN
    assert len(set(scene.tried)) > TRIED_AGAIN


async def test_a_node_that_has_moved_behind_a_router_takes_a_relay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Elsewhere(tmp_path, monkeypatch, Reach.NO)
    await scene.reaching.look_again(PLACES, b"")
    assert scene.relay == PLACES[0]
    assert "outbound only -> relay" in scene.told()[0]


async def test_a_node_without_a_network_waits_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Elsewhere(tmp_path, monkeypatch, Reach.UNKNOWN)
    scene.silent.update(one.peer for one in PLACES)
    await scene.reaching.look_again(PLACES, b"")
    assert scene.seen == []
    await scene.reaching.look_again([], b"")  # nobody is there: who comes has the new one
    assert scene.seen == [[]]


@pytest.mark.parametrize("by", [0.0, 7200.0, -7200.0])
async def test_a_greeting_across_which_the_clock_was_put_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: float
) -> None:
    steady = clock.SteadyClock()
    monkeypatch.setattr("node.clock.wall", steady)
    made, measured = entrance(resolve({"dir": str(tmp_path)}, {})), []
    made.clocks = cast("Any", SimpleNamespace(add=lambda *given: measured.append(given)))
    made.reaching = cast("Any", SimpleNamespace(greeted=lambda peer: None))

    async def greet(*_: Any, **__: Any) -> Any:
        steady.put(by)
        return SimpleNamespace(offset=-by / 2, round_trip=0.1 + by)

    monkeypatch.setattr("node.entry.entrance.greet", greet)
    await made._greet("there", identity(2).peer_id, b"")
    assert len(measured) == (by == 0.0)
