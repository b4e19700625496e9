"""Where the hosts of an island meet: flags, torchrun's, Slurm's and Kubernetes' environment."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainer_kit import tiny_settings

from benchmarks.netns import available
from bootstrap.manifest import Data, Model
from node.entry.own_address import INTERNET, outward_address
from node.hosts import meeting as module
from node.hosts.crew import Crew
from node.hosts.interface import interface_of, ipv4_interfaces, met_at, told, untold
from node.hosts.meeting import DEFAULT_PORT, hosts_of, meeting, refuse_hosts
from node.island.settings import IslandSettings
from node.trainer.dims import ParallelDims
from protocols.connections.listening import is_own_name
from protocols.errors import OperatorError

SLURM = {
    "SLURM_JOB_ID": "4217",
    "SLURM_NNODES": "3",
    "SLURM_NODEID": "2",
    "SLURM_JOB_NODELIST": "gpu[07-08],login1",
}
PET = {
    "PET_NNODES": "1:4",
    "PET_NODE_RANK": "1",
    "PET_RDZV_ENDPOINT": "head:1234",
    "PET_RDZV_ID": "job",
}


def of(environ: dict[str, str], **settings: Any) -> Any:
    return meeting(IslandSettings(**settings), environ)


def refused(environ: dict[str, str], **settings: Any) -> str:
    with pytest.raises(OperatorError) as caught:
        of(environ, **settings)
    assert caught.value.code == "E204"
    return caught.value.text()


def test_flags_alone() -> None:
    found = of({}, nnodes="1:2", node_rank=1, rdzv_endpoint="[::1]:99", rdzv_id="k", hosts_wait_s=5)
    assert (found.minimum, found.maximum, found.host) == (1, 2, 1)
    assert (found.address, found.port, found.key, found.wait_s) == ("::1", 99, "k", 5)


@pytest.mark.parametrize("environ", [{}, SLURM, PET])
def test_one_host_asks_no_environment(environ: dict[str, str]) -> None:
    """An island of one host in a job of many is its operator's will."""
    assert of(environ) is None
    assert of(environ, nnodes="1:1") is None


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        (SLURM | {"SLURM_NNODES": "2-4"}, "'2-4' hosts"),
        (PET | {"PET_NNODES": "0"}, "'0' hosts"),
        (PET | {"PET_NNODES": "3:2"}, "'3:2' hosts"),
        (PET | {"PET_NNODES": "99999999999"}, "'99999999999' hosts"),
        (PET | {"PET_NODE_RANK": "9" * 5000}, "--node-rank is missing"),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "70000"},
            "port 70000",
        ),
        (PET | {"PET_RDZV_ENDPOINT": "", "MASTER_ADDR": "head..site"}, "host 0 at 'head..site'"),
        (PET | {"PET_RDZV_ENDPOINT": "head..site:1234"}, "host 0 at 'head..site:1234'"),
    ],
)
def test_an_environment_that_cannot_be_is_named(environ: dict[str, str], reason: str) -> None:
    assert reason in refused(environ, nnodes="auto")


def test_torchruns_variables() -> None:
    found = of(PET, nnodes="auto")
    assert (found.minimum, found.maximum, found.host) == (1, 4, 1)
    assert (found.address, found.port, found.key) == ("head", 1234, "job")
    operator = {"NNODES": "2", "GROUP_RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "77"}
    found = of(operator, nnodes="auto", rdzv_id="k")
    assert (found.maximum, found.host, found.address, found.port) == (2, 0, "h", 77)
    assert "--rdzv-id is missing" in refused(operator, nnodes="auto")


def test_slurm() -> None:
    found = of(SLURM, nnodes="auto")
    assert (found.minimum, found.maximum, found.host) == (3, 3, 2)
    assert (found.address, found.port, found.key) == ("gpu07", DEFAULT_PORT + 217, "slurm-4217")


STEP = SLURM | {
    "SLURM_JOB_NODELIST": "gpu[05-08]",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


@pytest.mark.parametrize("nnodes", ["2", "4"])  # of the step, or of the job
def test_a_step_on_a_part_of_a_slurm_job_is_an_island_of_its_own(nnodes: str) -> None:
    found = of(STEP | {"SLURM_NNODES": nnodes}, nnodes="auto")
    assert (found.maximum, found.host, found.address) == (2, 1, "gpu07")
    assert (found.port, found.key) == (DEFAULT_PORT + 219, "slurm-4217.2")


def test_a_step_of_one_host_meets_others_of_the_job_where_flags_say_so() -> None:
    alone = STEP | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu08"}
    assert of(alone, nnodes="auto") is None
    found = of(alone, nnodes="4", node_rank=3)
    assert (found.host, found.address, found.key) == (3, "gpu05", "slurm-4217")


def test_flags_win_over_the_environment() -> None:
    found = of(SLURM | PET, nnodes="2:3", node_rank=0, rdzv_endpoint="me:5", rdzv_id="mine")
    assert (found.minimum, found.maximum, found.host) == (2, 3, 0)
    assert (found.address, found.port, found.key) == ("me", 5, "mine")


@pytest.mark.parametrize(
    ("address", "open_to_all"),
    [
        ("10.0.0.7", True),
        ("node0", True),  # which host 0 may know as loopback, and listens on all addresses then
        ("[2001:db8::1]", True),
        ("127.0.0.1", False),
        ("[::1]", False),
        ("localhost", False),
    ],
)
def test_who_reaches_host_0_needs_a_secret_to_be_one_of_its_hosts(
    address: str, open_to_all: bool
) -> None:
    flags = {"nnodes": "1:2", "node_rank": 0, "rdzv_endpoint": f"{address}:29400"}
    assert of({}, **flags, rdzv_id="secret").key == "secret"
    if open_to_all:
        assert "--rdzv-id is missing" in refused({}, **flags)
    else:
        assert of({}, **flags).key == ""


@pytest.mark.parametrize(
    ("variables", "name", "host", "address"),
    [
        ({"JOB_COMPLETION_INDEX": "2"}, "atoll-2.svc.ns.local", 2, "atoll-0.svc.ns.local"),
        ({}, "my-set-1.atoll", 1, "my-set-0.atoll"),
    ],
)
def test_kubernetes(
    variables: dict[str, str],
    name: str,
    host: int,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module.socket, "getfqdn", lambda: name)
    found = of({"KUBERNETES_SERVICE_HOST": "10.0.0.1", **variables}, nnodes="3")
    assert (found.host, found.address, found.port) == (host, address, DEFAULT_PORT)
    assert "nothing says how many" in refused({"KUBERNETES_SERVICE_HOST": "x"}, nnodes="auto")


@pytest.mark.parametrize(
    "alone", [{"node_rank": 0}, {"node_rank": 1}, {"rdzv_endpoint": "h:1"}, {"rdzv_id": "x"}]
)
def test_one_of_several_hosts_does_not_begin_alone(alone: dict[str, Any]) -> None:
    (name,) = alone
    flag = "--" + name.replace("_", "-")
    assert f"{flag} without --nnodes" in refused({}, **alone)
    if alone == {"node_rank": 1}:
        for environ, nnodes in (({}, "1"), ({"PET_NNODES": "1"}, "auto")):
            assert "--node-rank 1 is too large" in refused(environ, nnodes=nnodes, **alone)
    else:
        assert of({}, nnodes="1", **alone) is None
    with pytest.raises(OperatorError, match=f"{flag} with --role server"):
        refuse_hosts(IslandSettings(**alone), "server")


def test_only_islands_have_hosts() -> None:
    for nnodes in ("1", "auto"):
        refuse_hosts(IslandSettings(nnodes=nnodes), "seed")
    with pytest.raises(OperatorError, match="--nnodes with --role observer"):
        refuse_hosts(IslandSettings(nnodes="2"), "observer")


def test_what_is_missing_is_named() -> None:
    assert "--node-rank is missing" in refused({}, nnodes="2", rdzv_endpoint="h:1")
    assert "--rdzv-endpoint is missing" in refused({}, nnodes="2", node_rank=0)
    assert "--node-rank 2 is too large" in refused({}, nnodes="2", node_rank=2, rdzv_endpoint="h:1")
    assert "--nnodes auto" in refused({}, nnodes="auto")
    with pytest.raises(OperatorError) as caught:
        of({}, nnodes="2", node_rank=5, rdzv_endpoint="h:1")
    assert caught.value.why == "hosts are numbered from 0, so the last of 2 is 1"
    assert caught.value.fix == "give 0 to 1, or a larger --nnodes"
    for bad in ("0", "2:1", "x", "1:2:3", "-1", "1025"):
        with pytest.raises(ValueError, match="number of hosts"):
            IslandSettings(nnodes=bad)


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ("", []),
        ("one", ["one"]),
        ("a1,b2", ["a1", "b2"]),
        ("a[1-3,5]", ["a1", "a2", "a3", "a5"]),
        ("n[008-010]-ib,login", ["n008-ib", "n009-ib", "n010-ib", "login"]),
        ("r[1-2]n[3,4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
    ],
)
def test_slurms_list_of_hosts(listed: str, names: list[str]) -> None:
    assert hosts_of(listed) == names


@pytest.mark.parametrize("listed", ["a[1-", "a[x]", "a[1-99999]", "a[]", "a]1["])
def test_a_list_that_is_none(listed: str) -> None:
    with pytest.raises(OperatorError, match="SLURM_JOB_NODELIST"):
        hosts_of(listed)


@given(st.text(alphabet="ab[]-,019", max_size=20))
def test_no_list_does_worse_than_an_error(listed: str) -> None:
    with contextlib.suppress(OperatorError):
        assert all(hosts_of(listed))


# --- ranks and layouts over hosts -----------------------------------------------------------------

MODEL = Model(d_model=64, n_layers=4, n_heads=4, n_kv_heads=4, d_ff=128)
DATA = Data(seq_len=32, batch_size=8)


@pytest.mark.parametrize(
    ("settings", "devices", "hosts", "each"),
    [
        ({}, 0, 2, 1),
        ({"nproc": 2}, 0, 2, 2),
        ({"layout": "fsdp=4"}, 0, 2, 2),
        ({"nproc": 2, "layout": "fsdp=4"}, 0, 2, 2),
        ({"tp": 2}, 8, 3, 8),
    ],
)
def test_ranks_of_a_host(settings: dict[str, Any], devices: int, hosts: int, each: int) -> None:
    assert IslandSettings(**settings).ranks_wanted(devices, hosts) == each


def test_ranks_that_do_not_share_out() -> None:
    with pytest.raises(ValueError, match="do not share out over 2 hosts"):
        IslandSettings(layout="fsdp=3").ranks_wanted(0, 2)
    with pytest.raises(ValueError, match="on each of 2 hosts"):
        IslandSettings(nproc=3, layout="fsdp=4").ranks_wanted(0, 2)
    with pytest.raises(ValueError, match="one host"):
        IslandSettings(layout="single").ranks_wanted(0, 2)


@pytest.mark.parametrize(
    ("full", "ranks", "left"),
    [
        ("fsdp=4", 4, "fsdp=4"),
        ("fsdp=4", 3, "fsdp=3"),
        ("fsdp=4", 1, "single"),
        ("fsdp=4,tp=2", 6, "fsdp=3,tp=2"),
        ("fsdp=2,tp=2", 3, "tp=2"),
        ("ddp=2,fsdp=2", 2, "fsdp=2"),
        ("ddp=4", 3, "ddp=3"),
        ("pp=2,fsdp=2", 3, "pp=2"),
    ],
)
def test_a_smaller_mesh_keeps_what_ranks_share(full: str, ranks: int, left: str) -> None:
    settings = IslandSettings(layout=full)
    dims = ParallelDims.model_validate(settings.axes)
    assert str(settings.refit(dims, ranks, 1, 2**33, 10**5, MODEL, DATA)) == left


@pytest.mark.parametrize(
    ("given", "own", "ranks", "laid"),
    [
        ({}, 4, 6, "fsdp=6"),
        ({}, 4, 12, "fsdp=8"),  # a step has eight sequences
        ({"tp": 2}, 4, 6, "fsdp=3,tp=2"),
        ({"tp": 2}, 4, 7, "fsdp=3,tp=2"),
        ({"dp_replicate": 2}, 4, 6, "ddp=2,fsdp=3"),
        ({"layout": "auto"}, 2, 6, "ddp=6"),
        ({"layout": "auto"}, 4, 13, "ddp=6,tp=2"),
        ({"layout": "fsdp=4"}, 4, 6, "fsdp=4"),
        ({"dp_shard": 2, "tp": 2}, 4, 6, "fsdp=2,tp=2"),
        ({"layout": "ddp=4"}, 4, 6, "ddp=4"),
    ],
)
def test_more_ranks_than_host_0_would_have_are_taken_unless_it_said_how_many(
    given: dict[str, Any], own: int, ranks: int, laid: str
) -> None:
    settings = IslandSettings(**given)
    full, _ = settings.dims(own, 2, 2**33, 10**5, MODEL, DATA)
    assert str(settings.refit(full, ranks, 2, 2**33, 10**5, MODEL, DATA)) == laid


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranks_that_have_nothing_to_do_are_told_of_once(tmp_path: Path, device: str) -> None:
    said: list[str] = []
    hub: Any = SimpleNamespace(say=said.append)
    crew = Crew(hub, 4, lambda ranks, hosts: ParallelDims(dp_shard=min(ranks, 8)))
    settings = tiny_settings(tmp_path, ranks=8, dims=ParallelDims(dp_shard=8), device=device)

    def idle(has: int) -> list[str]:
        said.clear()
        host: Any = SimpleNamespace(ranks=has)
        fitted = crew.fit(settings, [host])
        assert sum(map(len, crew.shares(fitted.ranks, [host]))) == min(8, 4 + has)
        return [text for text in said if "nothing to do" in text]

    what = "GPUs" if device == "cuda" else "ranks"
    (text,) = idle(8)
    assert text.startswith(f"4 of this island's 12 {what} have nothing to do: its layout (fsdp=8)")
    assert idle(8) == []
    assert len(idle(6)) == 1
    assert idle(4) == idle(2) == []
    assert len(idle(6)) == 1


def test_too_few_ranks_for_what_they_share() -> None:
    settings = IslandSettings(layout="fsdp=2,tp=2")
    dims = ParallelDims(dp_shard=2, tp=2)
    with pytest.raises(ValueError, match="needs 2 ranks, and 1 are left"):
        settings.refit(dims, 1, 1, 2**33, 10**5, MODEL, DATA)


# --- interfaces -----------------------------------------------------------------------------------


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") == ""
    assert told("127.0.0.1", {"NCCL_SOCKET_IFNAME": "ib0"}) == {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "ib0",
    }
    assert told("127.0.0.1", {}) == {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",  # bare, it would stand for lo0 and lo1 too
    }
    assert told("192.0.2.77", {}) == {}


NAMES = """
from node.hosts.interface import interface_of
own = ("10.9.0.1", "10.9.0.2", "10.9.0.3", "fd00::2", "::ffff:10.9.0.2", "10.8.0.1", "10.8.0.2")
print(*(interface_of(address) or "-" for address in own))
"""


@pytest.mark.skipif(not available(), reason="namespaces need Linux, root, ip and tc")
def test_every_address_of_an_interface_has_its_name() -> None:
    """Also a second one, as of a cloud's alias, or one with a label. gloo takes labels for names.

    But not loopback's for one that others know, as a balancer's: there nobody reaches a rank.
    """
    commands = (
        "ip link set lo up",
        "ip link add eth0 type veth peer name other",
        *(f"ip addr add 10.9.0.{last}/24 dev eth0" for last in (1, 2)),
        "ip addr add 10.9.0.3/24 dev eth0 label eth0:x",
        *(f"ip -6 addr add fd00::{last}/64 dev eth0" for last in (1, 2)),
        "ip addr add 10.8.0.1/32 dev lo",
        "ip addr add 10.8.0.2/32 dev lo label lo:0",
        f"{sys.executable} -c '{NAMES}'",
    )
    command = ["unshare", "--net", "sh", "-ec", "\n".join(commands)]
    done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, timeout=60)
    assert done.stdout.split() == ["eth0", "eth0", "eth0:x", "eth0", "eth0", "-", "-"]


def test_where_no_interface_is_found_the_operator_is_told() -> None:
    assert untold("127.0.0.1", {}) == ""
    assert "set GLOO_SOCKET_IFNAME" in untold("192.0.2.77", {})
    assert untold("192.0.2.77", {"GLOO_SOCKET_IFNAME": "eth7"}) == ""


@pytest.mark.parametrize(
    ("own", "store", "met"),
    [
        ("127.0.0.1", "10.0.0.7:5", "10.0.0.7"),
        ("::1", "[fd00::7]:5", "fd00::7"),
        ("127.0.0.1", "127.0.0.1:5", "127.0.0.1"),
        ("10.0.0.8", "10.0.0.7:5", "10.0.0.8"),  # on a machine of its own
    ],
)
def test_where_the_ranks_of_another_host_are_met(own: str, store: str, met: str) -> None:
    assert met_at(own, store) == met


@pytest.mark.parametrize(
    ("found", "own"),
    [
        (["127.0.1.1"], True),  # as Debian's installer writes it down
        (["127.0.1.1", "::1"], True),
        (["127.0.1.1", "10.0.0.7"], False),
        (["10.0.0.7"], False),
    ],
)
def test_a_name_of_this_machine_alone(
    monkeypatch: pytest.MonkeyPatch, found: list[str], own: bool
) -> None:
    monkeypatch.setattr(
        "socket.getaddrinfo",
        lambda *_, **__: [(None, None, 0, "", (address, 0)) for address in found],
    )
    assert is_own_name("node0") is own
    assert not any(map(is_own_name, ("localhost", "localhost.localdomain", "127.0.0.1", "::1")))


def test_the_address_towards_a_name_is_that_towards_the_internet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def towards(host: str) -> str:
        asked.append(host)
        if host != INTERNET:
            raise OSError("no number")
        return "10.0.0.7"

    monkeypatch.setattr("node.entry.own_address.address_towards", towards)
    assert outward_address("seed.example") == "10.0.0.7"
    assert asked == ["seed.example", INTERNET]


def test_in_a_closed_network_it_is_that_of_any_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(host: str) -> str:
        raise OSError("unreachable")

    found = dict(ipv4_interfaces())
    assert str(found["lo"]) == "127.0.0.1"
    others = [str(own) for own in found.values() if not own.is_loopback]
    monkeypatch.setattr("node.entry.own_address.address_towards", nowhere)
    assert outward_address() == (others[0] if others else "127.0.0.1")
