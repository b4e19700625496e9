"""The doctor: what it finds on this machine and between peers, each by its real cause."""

import json
import socket
import stat
import sys

import pytest
from test_cli import CPU_LIMIT_S, _own_directory, _process  # noqa: F401  (a fixture)

from bootstrap.handshake import Gate, shared_token
from bootstrap.manifest import Manifest, Model
from bootstrap.probe import BYTES_A_MINUTE, MAX_BYTES, ProbeServer, probe
from node import outermost
from node.config import resolve
from node.doctor import machine, nat, software
from node.doctor.network import network
from node.presets import PRESETS, preset
from protocols.errors import RemoteRefused
from protocols.http import HttpTransport
from protocols.identity import Identity
from protocols.memory_network import Link, MemoryNetwork
from protocols.virtual_time import run as run_virtually
from protocols.whereabouts import Whereabouts


def config(tmp_path, **flags):
    return resolve({"dir": str(tmp_path / "state"), "listen": "127.0.0.1:0"} | flags, {})


# --- software -----------------------------------------------------------------------------------


def test_without_network_it_answers_at_once_and_brings_no_torch(tmp_path):
    arguments = ("doctor", "--no-network", "--listen", "127.0.0.1:0", "--api", "127.0.0.1:0")
    done, seconds = _process(*arguments, "--json")
    told = json.loads(done.stdout)
    assert done.returncode == (0 if told["ok"] else 1)
    assert {check["name"] for check in told["checks"]} >= {
        "python", "packages", "command", "imports", "gpu", "memory", "disk", "clock",
    }  # fmt: skip
    assert all(c["why"] and c["fix"] for c in told["checks"] if c["status"] != "ok")
    assert seconds < CPU_LIMIT_S


@pytest.mark.parametrize(
    ("version", "bounds", "fits"),
    [
        ("2.13.0+cpu", "<2.14,>=2.11", True),
        ("2.14.0", "<2.14,>=2.11", False),
        ("2.9.1", "<2.14,>=2.11", False),
        ("1.1.12", "==1.1.12", True),
        ("1.1.13", "==1.1.12", False),
        ("44", ">=44", True),
        ("1.0.8.post1", ">=1.0.8", True),
        ("3.1", "~=3.0", True),
        ("4.0", "~=3.0", False),
        ("3.0", "", True),
    ],
)
def test_versions_against_bounds(version, bounds, fits):
    assert software.within(version, bounds) is fits


def test_packages_that_are_missing_or_too_old_are_named():
    found = software.judge_packages(["no-such-thing>=1", "pydantic>=99", 'x>1; extra == "test"'])
    assert found.status == "fail"
    assert "no-such-thing is missing" in found.found
    assert "is not >=99" in found.found
    assert "x" not in found.found.split(";")[0].split()


def _program(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


OURS = b"#!/somewhere/python\nfrom node.__main__ import main\n"


def test_node_js_before_ours(tmp_path, monkeypatch):
    _program(tmp_path / "first" / "node", b"\x7fELF and so on")
    _program(tmp_path / "env" / "atoll", OURS)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env" / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'first'}:{tmp_path / 'env'}")
    found = software.command()
    assert found.status == "warn"
    assert "Node.js" in found.why
    assert "`atoll start`" in found.fix
    monkeypatch.setenv("PATH", str(tmp_path / "first"))
    assert "python -m node start" in software.command().fix


def test_our_command_first_is_fine_and_another_environments_is_not(tmp_path, monkeypatch):
    _program(tmp_path / "env" / "node", OURS)
    monkeypatch.setenv("PATH", str(tmp_path / "env"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env" / "python"))
    assert software.command().status == "ok"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "other" / "python"))
    assert "another environment" in software.command().why


def test_a_module_of_the_same_name_before_ours(tmp_path):
    (tmp_path / "gossip").mkdir()
    (tmp_path / "gossip" / "__init__.py").write_text("")
    found = software.imports([str(tmp_path), *sys.path], tmp_path.parent)
    assert found.status == "fail"
    assert f"gossip is found in {tmp_path} first" in found.found


def test_a_module_of_the_same_name_in_the_working_folder(tmp_path):
    (tmp_path / "node.py").write_text("")
    found = software.imports(sys.path, tmp_path)
    assert (found.status, "node of its own" in found.found) == ("warn", True)
    assert software.imports(sys.path, tmp_path.parent).status == "ok"


def test_a_package_of_others_with_our_name(tmp_path, monkeypatch):
    info = tmp_path / "node-2.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: node\nVersion: 2.0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = software.imports()
    assert found.status == "fail"
    assert "the package node 2.0.0 of others" in found.found


# --- the machine --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_counted_without_torch(name):
    from node.trainer.layout import Layout

    for changes in ({}, {"model.tied_embeddings": "false"}):
        model = preset(name, changes).model
        assert machine.parameters(model) == Layout.of_config(model).size


@pytest.fixture
def nvidia(tmp_path, monkeypatch):
    """``nvidia(driver, cuda)``: an nvidia-smi and a torch that say so."""

    def pretend(driver, cuda, version="2.13.0"):
        line = f"NVIDIA H200, 143771 MiB, {driver}"
        _program(tmp_path / "bin" / "nvidia-smi", f"#!/bin/sh\necho '{line}'\n".encode())
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
        monkeypatch.setattr(machine, "torch_cuda", lambda: (version, cuda))

    return pretend


@pytest.mark.parametrize(
    ("driver", "cuda", "device", "status", "says"),
    [
        ("580.95.05", "12.8", "auto", "ok", "1 x NVIDIA H200 with 143771 MiB, driver 580.95.05"),
        ("570.86.10", "13.0", "auto", "fail", "torch 2.13.0 for CUDA 13.0"),
        ("470.82.01", "12.8", "cuda", "fail", "driver 470.82.01"),
        ("580.95.05", "", "auto", "warn", "built without CUDA"),
        ("470.82.01", "12.8", "cpu", "ok", "not used"),
    ],
)
def test_cuda_and_driver(nvidia, driver, cuda, device, status, says):
    nvidia(driver, cuda)
    found = machine.gpu(device)
    assert found.status == status
    assert says in found.found
    assert ("E403" in found.why) == (status == "fail")


def test_a_gpu_that_is_wanted_and_not_there(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert machine.gpu("cuda").status == "fail"
    assert machine.gpu("auto").status == "ok"


def test_what_torch_was_built_for_is_read_from_its_files():
    import torch

    assert software.torch_cuda() == (str(torch.__version__), torch.version.cuda or "")


def test_a_disk_that_cannot_hold_two_checkpoints(tmp_path):
    huge = Manifest(model=Model(d_model=65_536, n_heads=1024, n_kv_heads=2, n_layers=1024))
    found = machine.disk(config(tmp_path), huge)
    assert (found.status, found.why[:4]) == ("fail", "E402")
    assert machine.disk(config(tmp_path), Manifest()).status == "ok"
    assert machine.memory(config(tmp_path), huge).status == "warn"


def test_a_state_directory_that_cannot_be(tmp_path):
    (tmp_path / "state").write_text("a file")
    found = machine.disk(config(tmp_path), Manifest())
    assert (found.status, found.why[:4]) == ("fail", "E105")


def test_a_port_in_use_is_told_with_its_process(tmp_path):
    import os

    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        found = machine.local_ports(config(tmp_path, listen=where, api="127.0.0.1:0"))
    assert [one.status for one in found] == ["fail", "ok"]
    assert "E303" in found[0].found
    assert f"process {os.getpid()}" in found[0].why


def test_the_port_that_nobody_asked_for_may_be_another(tmp_path, monkeypatch):
    from node.config import NodeConfig

    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setattr(NodeConfig, "is_default", lambda self, key: True)
        found = machine.local_ports(config(tmp_path, listen=where, api="127.0.0.1:0"))
    assert found[0].status == "warn"


# --- peers --------------------------------------------------------------------------------------


@pytest.fixture
async def seed():
    """``await seed(…)``: a node as far as a doctor can see one; returns its join address."""
    opened = []

    async def start(admits=None, **options):
        transport = HttpTransport(Identity.generate(), listen="127.0.0.1:0")
        await transport.start()
        opened.append(transport)
        whereabouts = Whereabouts(transport, transport.identity, transport.book)
        whereabouts.publish([f"127.0.0.1:{transport.listening[1]}"])
        more = {"admits": admits} if admits else {}
        Gate(
            transport,
            whereabouts,
            software="0.1.0",
            run=lambda: b"r" * 32,
            observed=transport.observed,
            **more,
            **options,
        )
        ProbeServer(transport)
        return f"127.0.0.1:{transport.listening[1]}/{transport.peer_id}"

    yield start
    for transport in opened:
        await transport.aclose()


def by_name(findings):
    return {one.name: one for one in findings}


async def test_a_peer_in_order(tmp_path, seed):
    found = by_name(await network(config(tmp_path, peers=[await seed()])))
    assert {name: one.status for name, one in found.items()} == dict.fromkeys(
        ("peer", "run", "clock", "reach", "nat", "speed"), "ok"
    )
    assert "dialled back" in found["reach"].found
    assert "own address 127.0.0.1" in found["nat"].found
    assert "Mbit/s up" in found["speed"].found


async def test_a_peer_that_cannot_dial_back(tmp_path, seed):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
    found = by_name(await network(config(tmp_path, peers=[await seed()], public_addr=nobody)))
    assert found["reach"].status == "fail"
    assert "E302" in found["reach"].found
    assert "--public-addr" in found["reach"].found
    assert "refused" in found["reach"].why


async def test_a_node_that_nobody_can_dial_is_told_its_relay(tmp_path, seed, monkeypatch):
    async def nobody(transport, peer):
        return "no answer in time (5 s)"

    monkeypatch.setattr("node.doctor.network.unreachable", nobody)
    peer = await seed()
    found = by_name(await network(config(tmp_path, peers=[peer])))
    assert found["reach"].status == "warn"
    assert f"outbound only: will use relay {peer.partition('/')[0]}" in found["reach"].found
    assert "E302" in found["reach"].why
    only = by_name(await network(config(tmp_path, peers=[peer], require_reachable=True)))
    assert only["reach"].status == "fail"
    assert "--require-reachable" in only["reach"].found


async def test_peers_that_would_not_relay(tmp_path, seed, monkeypatch):
    async def nobody(transport, peer):
        return "no answer in time (5 s)"

    monkeypatch.setattr("node.doctor.network.unreachable", nobody)
    monkeypatch.setattr("protocols.relay_server.MAX_WAITING", 0)
    found = by_name(await network(config(tmp_path, peers=[await seed()])))
    assert found["reach"].status == "fail"
    assert "none of them would relay" in found["reach"].found


# --- NAT ------------------------------------------------------------------------------------------


async def test_two_peers_say_as_what_they_see_one_port(seed):
    peers = [(await seed()).partition("/")[0] for _ in range(2)]
    found = await nat.mapping(peers)
    assert found.seen == (f"127.0.0.1:{found.local_port}",) * 2
    assert nat.mapping_finding(found).status == "ok"
    assert "keeps ports" in nat.mapping_finding(found).found


async def test_a_peer_that_does_not_say_is_left_out(seed):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = f"127.0.0.1:{closed.getsockname()[1]}"
    found = await nat.mapping([gone, (await seed()).partition("/")[0]])
    assert len(found.seen) == 1
    assert "cannot be told" in nat.mapping_finding(found).found


@pytest.mark.parametrize(
    ("seen", "status", "told"),
    [
        (("203.0.113.1:7000", "203.0.113.1:7000"), "ok", "port 4000 becomes 7000"),
        (("203.0.113.1:4000", "203.0.113.1:4000"), "ok", "keeps ports"),
        (("203.0.113.1:7000", "203.0.113.1:7001"), "warn", "endpoint-dependent"),
        (("203.0.113.1:7000", "203.0.113.2:7000"), "warn", "endpoint-dependent"),
        (("203.0.113.1:7000",), "ok", "1 of the two peers"),
        ((), "ok", "0 of the two peers"),
    ],
)
def test_kinds_of_mapping(seen, status, told):
    found = nat.mapping_finding(nat.Mapping(4000, seen))
    assert found.status == status
    assert told in found.found


async def test_a_public_address_tried_from_inside(seed):
    where = (await seed()).partition("/")[0]
    assert (await nat.hairpin(where)).status == "ok"
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = f"127.0.0.1:{closed.getsockname()[1]}"
    found = await nat.hairpin(gone)
    assert (found.status, found.name) == ("warn", "hairpin")
    assert "--peers" in found.fix


async def test_behind_a_translator_the_mapping_is_a_finding(tmp_path, seed, monkeypatch):
    """Peers see another address: what kind of NAT that is, and its address from inside."""
    monkeypatch.setattr("node.doctor.network.outward_address", lambda towards: "10.9.9.9")
    peers = [await seed(), await seed()]
    found = by_name(await network(config(tmp_path, peers=peers)))
    assert "NAT with one outer address" in found["nat"].found
    assert found["mapping"].found.startswith("endpoint-independent")
    assert found["hairpin"].status == "ok"  # on loopback the outer address is this machine's


async def test_a_peer_that_is_not_there_beside_one_that_is(tmp_path, seed):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
    alone = await network(config(tmp_path, peers=[nobody]))
    assert [(one.status, one.found[:4]) for one in alone] == [("fail", "E101")]
    both = await network(config(tmp_path, peers=[nobody, await seed()]))
    assert [one.status for one in both if one.name == "peer"] == ["warn", "ok"]


async def test_a_clock_that_is_off(tmp_path, seed):
    import time

    found = by_name(
        await network(config(tmp_path, peers=[await seed(clock=lambda: time.time() + 60)]))
    )
    assert found["clock"].status == "fail"
    assert "behind the median of 1 peers" in found["clock"].why


async def test_an_invitation_that_is_wanted(tmp_path, seed):
    peer = await seed(admits=shared_token("open sesame"))
    found = by_name(await network(config(tmp_path, peers=[peer])))
    assert "E203" in found["greeting"].found
    found = by_name(await network(config(tmp_path, peers=[peer], invitation="open sesame")))
    assert found["reach"].status == "ok"


async def test_the_port_of_a_node_that_runs_is_left_alone(tmp_path, seed):
    from node.statedir import StateDir

    home = StateDir(tmp_path / "state")
    home.lock()
    try:
        found = by_name(await network(config(tmp_path, peers=[await seed()])))
        assert "not tested: process" in found["reach"].found
        assert [one.found for one in await machine.ports(config(tmp_path))] != []
        assert "has them" in (await machine.ports(config(tmp_path)))[0].found
    finally:
        home.unlock()
    assert home.holder() is None


async def test_without_peers_it_says_so(tmp_path):
    assert [one.status for one in await network(config(tmp_path))] == ["warn"]


@pytest.mark.parametrize(
    ("seen", "begins", "translated"),
    [
        ([], "cannot be told", False),
        ([("203.0.113.7:52011", "203.0.113.7")], "none", False),
        ([("[::ffff:203.0.113.7]:5", "203.0.113.7")], "none", False),
        (
            [("203.0.113.7:1", "192.168.1.4"), ("203.0.113.7:2", "192.168.1.4")],
            "NAT with one",
            True,
        ),
        ([("203.0.113.7:1", "10.0.0.4"), ("203.0.113.8:2", "10.0.0.4")], "NAT with several", True),
        ([("203.0.113.7:1", "100.66.0.4")], "carrier-grade", True),
    ],
)
def test_what_is_said_of_a_nat(seen, begins, translated):
    found = nat.describe(seen)
    text, does = found.text, found.translated
    assert text.startswith(begins)
    assert does is translated


# --- the probe ----------------------------------------------------------------------------------


async def _pull(transport, peer):
    """Have ``peer`` send the largest body it gives; its bytes."""
    header = MAX_BYTES.to_bytes(8, "little")
    count = 0
    async with transport.pull(peer, "probe", header, max_length=MAX_BYTES, timeout=5) as incoming:
        async for piece in incoming:
            count += len(piece)
    return count


def test_a_probe_measures_a_link_and_is_bounded():
    async def main():
        net = MemoryNetwork(seed=1, upload=2e6)
        one, other = (net.join(Identity.generate().peer_id) for _ in range(2))
        ProbeServer(other)
        speeds = await probe(one, other.peer_id)
        assert speeds.upload == pytest.approx(2e6, rel=0.25)
        assert speeds.download == pytest.approx(2e6, rel=0.25)
        fast = MemoryNetwork(seed=1, link=Link(latency=0.0))
        one, other = (fast.join(Identity.generate().peer_id) for _ in range(2))
        ProbeServer(other)
        for _ in range(BYTES_A_MINUTE // MAX_BYTES):
            assert await _pull(one, other.peer_id) == MAX_BYTES
        with pytest.raises(RemoteRefused) as refused:
            await _pull(one, other.peer_id)
        assert refused.value.code == "busy"

    run_virtually(main())


# --- the command --------------------------------------------------------------------------------


def test_the_exit_status_tells(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        arguments = ["doctor", "--no-network", "--api", "127.0.0.1:0", "--listen", where]
        assert outermost.run(arguments) == 1
    out = capsys.readouterr().out
    assert "fail  port listen" in out
    assert "  fix: " in out
    assert out.splitlines()[-1].startswith("1 failed")
