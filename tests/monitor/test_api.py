"""The local API over real sockets: read-only, guarded, bounded; metrics."""

import json

import pytest
import yaml
from aiohttp.test_utils import TestClient, TestServer
from api_kit import KEY, Kit

from node.monitor.answers import encoded
from node.monitor.api import MAX_EVENTS, make_app
from node.monitor.event_log import KEPT_ROUNDS
from node.monitor.events import (
    CheckpointSaved,
    DataAwaited,
    DataCame,
    JoinProgress,
    Notice,
    PeerRefused,
    Problem,
    Rejected,
    RoundDone,
    RoundFailed,
    Step,
    Stopping,
)
from node.monitor.history import History
from node.monitor.metrics import OTHER
from node.monitor.so_far import TOLD_ISLANDS
from node.monitor.state import STALL_S
from node.monitor.views import KnownLinks, LinkView, PeerView, Traffic
from node.status import MAX_STATE_BYTES
from node.templates import render
from protocols.bounds import MAX_FRAGMENTS, MAX_PEERS


def alerts():
    return yaml.safe_load(render("prometheus"))["groups"][0]["rules"]


@pytest.fixture
async def client(kit):
    async with TestClient(TestServer(make_app(kit.state, kit.log, History()))) as client:
        yield client


async def test_state_of_a_fresh_node(client):
    answer = await client.get("/api/v1/state")
    assert answer.status == 200
    state = await answer.json()
    assert state["schema"] == 1
    assert state["status"] == "starting"
    assert state["training"]["step"] is None
    assert state["consensus"] is None
    assert state["checkpoint"] is None
    assert state["node"]["uptime_s"] == 100
    assert answer.headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in answer.headers


async def test_state_follows_the_events(client, kit):
    kit.live()
    kit.log.emit(JoinProgress(step=1, name="dial", text="ok"))
    kit.log.emit(Rejected(peer="x", reason="signature"))
    kit.log.emit(PeerRefused(peer="x", code="E203"))
    kit.log.emit(RoundFailed(round=5, reason="no majority"))
    kit.log.emit(CheckpointSaved(round=4, path="/c"))
    kit.log.emit(Problem(code="E402", what="w", why="y", fix="f"))
    state = await (await client.get("/api/v1/state")).json()
    assert state["rounds"]["committed"] == 4
    assert state["rounds"]["outcomes"] == {"committed": 1, "failed": 1}
    assert state["training"]["step"]["loss"] == 2.5
    assert state["training"]["steps"] == [[40, 2.5]]
    assert state["training"]["validation_loss"] == 2.45
    assert state["consensus"]["contraction"] == pytest.approx(0.2)
    [whole] = state["fragments"]
    assert (whole["fragment"], whole["fragments"], whole["agreeing"]) == (0, 1, 3)
    assert state["network"]["rounds"]["compression"] == 8
    assert state["network"]["by_kind"]["gradients"] == {"sent": 5, "received": 6}
    assert state["trust"] == {
        "rejected": {"signature": 1},
        "refused": {"E203": 1},
        "strangers": {},
    }
    assert [peer["name"] for peer in state["peers"]] == ["alps", ""]
    assert state["join"][0]["name"] == "dial"
    assert state["checkpoint"]["round"] == 4
    assert state["problems"][0]["code"] == "E402"
    assert state["health"] == {"healthy": True, "reasons": []}


async def test_a_snapshot_is_bounded(kit):
    kit.state.providers.peers = lambda: [PeerView(peer=str(i)) for i in range(2 * MAX_PEERS)]
    for number in range(5000):
        kit.log.emit(Step(step=number, round=0, loss=float("nan")))
        kit.log.emit(RoundDone(round=number, fragment=number % 100))
        kit.log.emit(Problem(code="E402", what="w" * 5000, why="", fix=""))
    snapshot = kit.state.snapshot()
    assert len(snapshot["peers"]) == MAX_PEERS
    assert len(snapshot["fragments"]) == MAX_FRAGMENTS
    assert len(json.dumps(snapshot, allow_nan=False)) < 1_000_000


def test_the_state_of_hundreds_of_islands_is_one_that_node_status_takes(kit):
    names = ("loss", "ready_s", "tokens", "scale", "distance", "apart")
    islands = {f"12D3KooW{n:044}": dict.fromkeys(names, 0.12345) for n in range(512)}
    for number in range(KEPT_ROUNDS):
        kit.log.emit(RoundDone(round=number, islands=islands))
    state = kit.state.snapshot()
    assert len(encoded(state)) < MAX_STATE_BYTES / 4
    told = [len(done["islands"]) for done in state["rounds"]["last"]]
    assert told == [0] * (KEPT_ROUNDS - TOLD_ISLANDS) + [512] * TOLD_ISLANDS


def test_a_link_that_was_told_of_just_now_was_not_measured_here(kit):
    ages = (0.0, 0.004, 0.4, 9.0)
    kit.state.providers.all_links = lambda: KnownLinks(
        [LinkView("b", "c", 5e6, 0.01, age) for age in ages]
    )
    assert [link[4] for link in kit.state.links()["links"]] == [0, 1, 1, 9]


async def test_events_since(client, kit):
    for number in range(MAX_EVENTS + 20):
        kit.log.emit(Notice(text=str(number)))
    first = await (await client.get("/api/v1/events")).json()
    assert len(first["events"]) == MAX_EVENTS
    rest = await (await client.get(f"/api/v1/events?since={first['next']}")).json()
    assert [event["text"] for event in rest["events"]] == [
        str(MAX_EVENTS + number) for number in range(20)
    ]
    assert rest["instance"] == kit.log.instance
    none = await (await client.get(f"/api/v1/events?since={rest['next']}")).json()
    assert none["events"] == []
    assert none["next"] == rest["next"]
    few = await (await client.get("/api/v1/events?limit=3")).json()
    assert len(few["events"]) == 3


@pytest.mark.parametrize(
    "query", ["since=x", "since=-1", "limit=1.5", "since=" + "9" * 30, "since=²"]
)
async def test_bad_queries(client, query):
    answer = await client.get(f"/api/v1/events?{query}")
    assert answer.status == 400
    assert "whole numbers" in (await answer.json())["error"]


async def test_health(client, kit):
    async def health():
        answer = await client.get("/healthz")
        return answer.status, (await answer.json())["reasons"]

    assert await health() == (503, ["it is starting"])
    kit.live()
    assert await health() == (200, [])
    kit.now += STALL_S + 1
    status_code, reasons = await health()
    assert status_code == 503
    assert "no inner step" in reasons[0]
    kit.log.emit(Step(step=41, round=4, loss=1.0, seconds=60.0))
    assert (await health())[0] == 200
    kit.log.emit(DataAwaited(step=42, since=kit.now, ranks=(1,)))
    kit.now += 60 * 21
    assert (await health())[1] == ["no inner step for 1260 s, it waits for its data"]
    assert kit.state.snapshot()["training"]["awaits"]["ranks"] == [1]
    kit.log.emit(DataCame(step=42, seconds=1260.0))
    assert (await health())[1] == ["no inner step for 1260 s"]
    kit.log.emit(Step(step=42, round=4, loss=1.0, seconds=60.0))
    kit.now += 60 * 19  # slow, and known to be
    assert (await health())[0] == 200
    kit.state.providers.unhealthy.append(lambda: "the relay is gone")
    assert await health() == (503, ["the relay is gone"])
    kit.state.providers.unhealthy.clear()
    kit.log.emit(Stopping(reason="Ctrl-C"))
    assert await health() == (503, ["it is leaving"])


async def test_a_fatal_problem_is_not_healthy(kit):
    kit.live()
    kit.log.emit(Problem(code="E405", what="trainer died", why="", fix="", fatal=True))
    assert kit.state.unhealthy() == ["E405: trainer died"]


def test_a_seed_needs_no_inner_steps():
    kit = Kit(role="seed")
    kit.state.status = "active"
    kit.now += 10_000
    assert kit.state.unhealthy() == []


async def test_metrics(client, kit):
    kit.live()
    kit.log.emit(Rejected(peer="x", reason="stale"))
    kit.state.providers.accepted, kit.state.providers.stalled = lambda: 3, lambda: 2
    answer = await client.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    text = await answer.text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert "# HELP swarm_tokens_per_second Of this node while computing" in text
    assert lines
    assert all(line.startswith("swarm_") for line in lines)
    for expected in (
        'swarm_rounds_total{outcome="committed"} 1.0',
        "swarm_loss_nats 2.5",
        'swarm_sent_bytes_total{kind="gradients"} 5.0',
        f'swarm_sent_bytes_total{{kind="{OTHER}"}} 7.0',
        f'swarm_round_phase_seconds_total{{phase="{OTHER}"}} 1.0',
        'swarm_peers{role="island",status="active"} 1.0',
        f'swarm_peers{{role="island",status="{OTHER}"}} 1.0',
        'swarm_rejected_total{reason="stale"} 1.0',
        "swarm_consensus_distance_ratio 0.5",
        "swarm_healthy 1.0",
        "swarm_accepted_connections_total 3.0",
        "swarm_stalled_messages_total 2.0",
    ):
        assert expected in lines


async def test_figures_of_a_round_are_of_the_whole_model_and_the_validation_loss_stays(client, kit):
    kit.log.emit(
        RoundDone(round=3, fragments=2, members=5, agreeing=4, validation_loss=2.5, consensus=0.04)
    )
    kit.log.emit(RoundDone(round=3, fragment=1, fragments=2, members=2, agreeing=1))
    text = await (await client.get("/metrics")).text()
    for expected in (
        "swarm_validation_loss_nats 2.5",
        "swarm_round_members 5.0",
        "swarm_agreeing_peers 4.0",
        "swarm_consensus_distance_ratio 0.04",
    ):
        assert expected in text.splitlines()
    kit.log.emit(RoundDone(round=4, fragments=2, members=5))  # which nobody evaluated
    assert "swarm_validation_loss_nats 2.5" in await (await client.get("/metrics")).text()


async def test_a_loss_that_nobody_told_is_none_that_is_no_number(client, kit):
    """A script may tell it every few hundred steps, or never."""

    async def read():
        return (await (await client.get("/metrics")).text()).splitlines()

    for number in range(20):
        kit.log.emit(Step(step=number, round=0, loss=None))
    lines = await read()
    assert "swarm_lost_inner_steps 0.0" in lines
    assert not [line for line in lines if line.startswith("swarm_loss_nats")]
    for number in range(20, 24):
        kit.log.emit(Step(step=number, round=0, loss=None, finite=False))
    assert "swarm_lost_inner_steps 4.0" in await read()
    [rule] = [rule for rule in alerts() if rule["alert"] == "AtollLossNotFinite"]
    assert rule["expr"] == "swarm_lost_inner_steps > 2"


async def test_the_number_of_series_does_not_grow_with_what_peers_say(client, kit):
    kit.live()

    async def count():
        return len((await (await client.get("/metrics")).text()).splitlines())

    before = await count()
    kit.state.providers.traffic = lambda: {f"kind{i}": Traffic(1, 1) for i in range(100)}
    kit.state.providers.peers = lambda: [
        PeerView(peer=str(i), status=f"s{i}", region=f"r{i}") for i in range(100)
    ]
    for number in range(100):
        kit.log.emit(RoundDone(round=number, phases={f"phase{number}": 1.0}))
        kit.log.emit(PeerRefused(peer="x", code=f"E{number}"))
    assert await count() <= before + 2


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("path", ["/api/v1/state", "/metrics", "/nothing"])
async def test_read_only(client, method, path):
    answer = await client.request(method, path, data=b"x")
    assert answer.status == 405
    assert answer.headers["Allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:4391", "127.0.0.1.evil.example", "localhost.evil", ""]
)
async def test_other_host_names_are_refused(client, host):
    answer = await client.get("/api/v1/state", headers={"Host": host})
    assert answer.status in (400, 403)
    assert "alps" not in await answer.text()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:1", "[::1]:4391", "192.0.2.1:80"])
async def test_own_hosts_are_served(client, host):
    assert (await client.get("/api/v1/state", headers={"Host": host})).status == 200


async def test_unknown_paths(client):
    answer = await client.get("/api/v1/../../etc/passwd")
    assert answer.status == 404
    assert (await answer.json())["error"] == "Not Found"


async def test_the_key(kit):
    async with TestClient(TestServer(make_app(kit.state, kit.log, History(), key=KEY))) as client:
        assert (await client.get("/api/v1/state")).status == 401
        assert (await client.get("/metrics", headers={"Authorization": "Bearer x"})).status == 401
        right = {"Authorization": f"Bearer {KEY}"}
        assert (await client.get("/api/v1/state", headers=right)).status == 200
        assert (await client.get("/healthz")).status == 503


async def test_why_it_is_not_healthy_is_told_to_those_with_the_key(kit):
    kit.state.status = "active"
    kit.log.emit(Problem(code="E402", what="no space in /home/me", why="", fix="", fatal=True))
    async with TestClient(TestServer(make_app(kit.state, kit.log, History(), key=KEY))) as client:
        for headers in ({}, {"Authorization": "Bearer x"}):
            answer = await client.get("/healthz", headers=headers)
            assert (answer.status, await answer.json()) == (503, {"healthy": False})
        answer = await client.get("/healthz", headers={"Authorization": f"Bearer {KEY}"})
        assert answer.status == 503
        assert (await answer.json())["reasons"] == ["E402: no space in /home/me"]
