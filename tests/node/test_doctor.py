"""The doctor: what it finds on this machine, each by its real cause."""

import contextlib
import itertools
import json
import shutil
import socket
import subprocess
from types import SimpleNamespace
from typing import get_args

import pytest
from address_kit import named
from checkpoint_kit import make
from cli_kit import process
from doctor_kit import config, program

from bootstrap.manifest import Manifest, Model
from bootstrap.manifest_rounds import CodecChoice, Outer, OuterRule, Rounds
from bootstrap.signed_manifest import SignedManifest
from node import outermost
from node.checkpoints.checkpoint import CheckpointStore, DiskFullError
from node.checkpoints.index import Facts
from node.checkpoints.saving import floats_saved
from node.doctor import machine
from node.monitor.views import MachineView
from node.presets import PRESETS, preset
from protocols.identity import Identity

pytestmark = pytest.mark.usefixtures("own_directory")


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
        program(tmp_path / "bin" / "nvidia-smi", f"#!/bin/sh\necho '{line}'\n".encode())
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
        ("[N/A]", "12.8", "auto", "ok", "driver [N/A]"),
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


@pytest.fixture
def amd(tmp_path, monkeypatch):
    """``amd(gpus, hip)``: the kernel's driver and a torch that say so, and no nvidia-smi."""

    def pretend(gpus, hip=""):
        for number in range(gpus + 1):  # the first is the processor
            (tmp_path / "nodes" / str(number)).mkdir(parents=True)
            simds = f"cpu_cores_count 8\nsimd_count {304 if number else 0}\n"
            (tmp_path / "nodes" / str(number) / "properties").write_text(simds)
        (tmp_path / "kfd").touch()
        monkeypatch.setenv("PATH", "")
        monkeypatch.setattr(machine, "KFD", tmp_path / "kfd")
        monkeypatch.setattr(machine, "KFD_NODES", tmp_path / "nodes")
        monkeypatch.setattr(machine, "torch_cuda", lambda: ("2.13.0+rocm7.1", ""))
        monkeypatch.setattr(machine, "torch_rocm", lambda: hip)

    return pretend


@pytest.mark.parametrize(
    ("gpus", "hip", "device", "status", "says"),
    [
        (1, "7.1.2", "auto", "warn", "1 AMD GPU; torch 2.13.0+rocm7.1 for ROCm (HIP 7.1.2)"),
        (8, "7.1.2", "cuda", "warn", "8 AMD GPUs; torch"),
        (8, "7.1.2", "cpu", "ok", "8 AMD GPUs; not used"),
        (1, "", "cuda", "fail", "built without ROCm"),
        (1, "", "auto", "ok", "not tested with it: the processor trains"),
        (0, "7.1.2", "cuda", "fail", "no NVIDIA GPU"),
        (0, "", "auto", "ok", "the processor trains"),
    ],
)
def test_amd_and_rocm(amd, gpus, hip, device, status, says):
    amd(gpus, hip)
    found = machine.gpu(device)
    assert (found.status, says in found.found) == (status, True), found
    assert ("not tested" in found.why) == (status == "warn")


@pytest.mark.parametrize("hip", ["", "7.1.2"])
def test_where_an_amd_gpu_trains_less_memory_is_needed_beside_it(tmp_path, amd, hip):
    amd(1, hip)
    manifest = Manifest()
    vectors = 8 - 4 * bool(hip)
    needed = vectors * 4 * machine.parameters(manifest.model)
    given = config(tmp_path, checkpoint_every=0, device="auto")
    assert f"{machine._mib(needed)} needed" in machine.memory(given, manifest).found


def test_what_a_checkpoint_holds_is_counted_without_torch():
    for optimizer, codec in itertools.product(get_args(OuterRule), get_args(CodecChoice)):
        changes = {"outer": Outer(optimizer=optimizer), "rounds": Rounds(codec=codec)}
        manifest = Manifest().model_copy(update=changes)
        assert machine.floats_saved(manifest) == floats_saved(manifest), (optimizer, codec)


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("codec", ["int4", "int2"])
def test_the_disk_must_hold_what_a_start_asks_for(tmp_path, monkeypatch, codec, copies):
    """As :meth:`CheckpointStore.preflight`: two, the best, one that is written and one copied."""
    from node.trainer.layout import Layout

    store = CheckpointStore(tmp_path / "state" / "checkpoints", keep=2)
    manifest = Manifest(rounds=Rounds(codec=codec))
    size, there = 4 * floats_saved(manifest) * Layout.of_config(manifest.model).size, 0
    for held in range(3):
        if held:  # their sizes differ by a few bytes, as the times in them do
            size = sum(f.stat().st_size for f in make(store, held).path.rglob("*") if f.is_file())
            there += size
        needed = (4 + copies) * size - there
        copied = {"checkpoint_copy": str(tmp_path / "copies")} if copies else {}
        for free, status in ((needed, "ok"), (needed - 1, "fail")):
            usage = SimpleNamespace(free=free)
            monkeypatch.setattr(shutil, "disk_usage", lambda place, now=usage: now)
            assert machine.disk(config(tmp_path, **copied), manifest).status == status
            with contextlib.nullcontext() if status == "ok" else pytest.raises(DiskFullError):
                store.preflight(size, copies=copies, evaluated=True)


def test_what_the_disk_holds_of_other_starts_makes_room_too(tmp_path, monkeypatch):
    """One kept of before a start, and what was fetched to begin with: the next ones replace it."""
    store = CheckpointStore(tmp_path / "state" / "checkpoints", keep=2)
    make(store, 9).path.rename(store.directory / "before-ckpt-00000009")
    newest = make(store, 3).path
    size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
    (store.directory / ".fetched-state-0").write_bytes(bytes(4096))
    for free, status in ((4 * size - store.held(), "ok"), (4 * size - store.held() - 1, "fail")):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda place, now=usage: now)
        assert machine.disk(config(tmp_path), Manifest()).status == status
        with contextlib.nullcontext() if status == "ok" else pytest.raises(DiskFullError):
            store.preflight(size, evaluated=True)


def test_a_disk_that_cannot_hold_the_checkpoints(tmp_path):
    huge = Manifest(model=Model(d_model=65_536, n_heads=1024, n_kv_heads=2, n_layers=1024))
    found = machine.disk(config(tmp_path), huge)
    assert (found.status, found.why[:4]) == ("fail", "E402")
    assert machine.disk(config(tmp_path), Manifest()).status == "ok"
    assert machine.memory(config(tmp_path), huge).status == "warn"
    assert machine.disk(config(tmp_path, checkpoint_every=0), huge).status == "ok"


def test_a_model_of_transformers_is_counted_by_that_library(tmp_path, monkeypatch):
    """And not by what a manifest has for our own model, which is there as well."""
    from hf_kit import GPT2

    from node.trainer.hf import model_of
    from node.trainer.layout import Layout

    manifest = Manifest(name="theirs", model=model_of(GPT2), data={"seq_len": 64})
    count = Layout.of_config(manifest.model).size
    assert count != machine.parameters(manifest.model)
    asked = []

    def run(command, **options):
        asked.append(command)
        return real(command, **options)

    real = machine.subprocess.run
    monkeypatch.setattr(machine.subprocess, "run", run)
    machine._counted.cache_clear()
    memory = machine.memory(config(tmp_path), manifest).found
    assert f"{machine._mib(11 * 4 * count)} needed by run" in memory
    checkpoints = 4 * 5 * 4 * count
    assert f"run {manifest.label}: {machine._mib(checkpoints)}" in (
        machine.disk(config(tmp_path), manifest).found
    )
    assert len(asked) == 1


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("every", [0, 10])
def test_a_checkpoint_s_copies_are_counted_with_what_training_holds(
    tmp_path, monkeypatch, every, gpu
):
    manifest = Manifest()
    count = machine.parameters(manifest.model)
    monkeypatch.setattr(machine, "torch_cuda", lambda: ("2.13", "12.8"))
    monkeypatch.setattr(machine, "_nvidia", lambda: ("1 x GPU", "570") if gpu else ("", ""))
    given = config(tmp_path, checkpoint_every=every, device="auto")
    vectors = 8 - 4 * gpu + 3 * bool(every)
    found = machine.memory(given, manifest).found
    assert f"{machine._mib(vectors * 4 * count)} needed by run" in found
    beside = machine.memory(config(tmp_path, checkpoint_every=every, device="cpu"), manifest)
    assert f"{machine._mib((8 + 3 * bool(every)) * 4 * count)} needed by run" in beside.found


def test_a_start_tells_of_memory_that_a_checkpoint_will_lack(tmp_path, monkeypatch):
    manifest, given = Manifest(), config(tmp_path)
    needed = 11 * 4 * 2**28
    for left, told in ((None, False), (needed, False), (needed - 1, True)):
        view = MachineView(memory_available=left)
        monkeypatch.setattr(machine, "Machine", lambda place, view=view: lambda: view)
        text = machine.lacking(given, manifest, 2**28, gpu=False)
        assert bool(text) == told
    assert "11,264 MiB of memory are needed" in text


@pytest.mark.parametrize("end", [OSError(), subprocess.TimeoutExpired("python", 1)])
def test_what_a_model_needs_that_cannot_be_built_here_is_not_known(tmp_path, monkeypatch, end):
    def run(*given, **options):
        raise end

    monkeypatch.setattr(machine.subprocess, "run", run)
    machine._counted.cache_clear()
    manifest = Manifest(model=Model(kind="hf", config="{}"))
    for check in (machine.memory, machine.disk):
        found = check(config(tmp_path), manifest)
        assert f"what run {manifest.label} needs is not known" in found.found
        assert found.status == "ok"
    machine._counted.cache_clear()


def test_what_is_needed_is_what_the_run_of_the_directory_needs(tmp_path, capsys):
    state = tmp_path / "state"
    large = Manifest(name="large", model=Model(d_model=4096, n_heads=32, n_layers=16))
    signed = SignedManifest.create(large, Identity.generate())
    store = CheckpointStore(state / "checkpoints")
    with store.draft() as draft:
        (draft / "manifest.envelope").write_bytes(signed.data)
        store.commit(draft, Facts(run=signed.run_id.hex(), round=1, step=10, tokens=0))
    arguments = ["doctor", "--no-network", "--dir", str(state), "--api", "127.0.0.1:0"]
    outermost.run([*arguments, "--listen", "127.0.0.1:0"])
    assert f"needed by run {large.label}" in capsys.readouterr().out


def test_where_the_run_is_not_known_the_doctor_says_so(tmp_path, capsys):
    arguments = ["doctor", "--no-network", "--dir", str(tmp_path), "--api", "127.0.0.1:0"]
    outermost.run([*arguments, "--listen", "127.0.0.1:0", "--peers", "127.0.0.1:1"])
    out = capsys.readouterr().out
    assert out.count("what the run needs is not known") == 2
    assert "needed by run" not in out


def test_a_state_directory_that_cannot_be(tmp_path):
    (tmp_path / "state").write_text("a file")
    found = machine.disk(config(tmp_path), Manifest())
    assert (found.status, found.why[:4]) == ("fail", "E105")


@pytest.mark.parametrize(
    ("answer", "status", "says"),
    [
        (0, "ok", "kept in time"),
        (5, "warn", "nothing keeps this clock in time"),
        (-1, "ok", "does not tell"),  # seccomp, gVisor
    ],
)
def test_a_clock_that_the_system_tells_nothing_of_is_not_said_to_be_kept_in_time(
    monkeypatch, answer, status, says
):
    libc = SimpleNamespace(adjtimex=lambda buffer: answer)
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: libc)
    found = machine.clock()
    assert (found.status, says in found.found) == (status, True)


@pytest.mark.parametrize(
    ("system", "allowed", "status"),
    [("linux", True, "ok"), ("linux", False, "warn"), ("darwin", False, "ok")],
)
def test_where_bbr_is_not_allowed_it_says_how_to_allow_it(monkeypatch, system, allowed, status):
    monkeypatch.setattr(machine.sys, "platform", system)
    monkeypatch.setattr(machine, "prefer_bbr", lambda sock: allowed)
    found = machine.losses()
    assert found.status == status
    assert ("sysctl -w" in found.fix) is (status == "warn")


def test_a_port_in_use_is_told_with_its_process(tmp_path):
    import os

    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        found = machine.ports(config(tmp_path, listen=where, api="127.0.0.1:0"))
    assert [one.status for one in found] == ["fail", "ok"]
    assert "E303" in found[0].found
    assert f"process {os.getpid()}" in found[0].why


def test_listeners_that_want_one_port_are_told_of_each_other(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    one, every = f"127.0.0.1:{port}", f"0.0.0.0:{port}"
    found = machine.ports(config(tmp_path, listen=every, api=one, dashboard=one))
    assert [one.status for one in found] == ["ok", "fail", "fail"]
    for each, option in zip(found[1:], ("--api", "--dashboard"), strict=True):
        assert each.why == "this node itself listens there, with --listen"
        assert f"give each its own: {option} 127.0.0.1:" in each.fix
    found = machine.ports(config(tmp_path, listen=one, api="127.0.0.1:0"))
    assert [one.status for one in found] == ["ok", "ok"], "none was left open"


def test_a_name_that_is_loopback_here_is_listened_to_on_all_addresses(tmp_path, monkeypatch):
    named(monkeypatch, "gpu1", "127.0.1.1")
    found = machine.ports(config(tmp_path, listen="gpu1:0", api="gpu1:0", api_key="k" * 32))
    assert [one.status for one in found] == ["ok", "ok"]
    assert "gpu1 is loopback here, so a node listens on all addresses" in found[0].found
    assert found[1].found == "gpu1:0 is free", "who has not asked for it shows the API to nobody"


def test_the_port_that_nobody_asked_for_may_be_another(tmp_path, monkeypatch):
    from node.config import NodeConfig

    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setattr(NodeConfig, "is_default", lambda self, key: True)
        found = machine.ports(config(tmp_path, listen=where, api="127.0.0.1:0"))
    assert found[0].status == "warn"


# --- the command --------------------------------------------------------------------------------


def test_without_network_it_brings_no_torch(tmp_path):
    arguments = ("doctor", "--no-network", "--listen", "127.0.0.1:0", "--api", "127.0.0.1:0")
    done, heavy = process(*arguments, "--json")
    told = json.loads(done.stdout)
    assert done.returncode == (0 if told["ok"] else 1)
    assert {check["name"] for check in told["checks"]} >= {
        "python", "packages", "command", "imports", "gpu", "memory", "disk", "clock",
        "losses",
    }  # fmt: skip
    assert all(c["why"] and c["fix"] for c in told["checks"] if c["status"] != "ok")
    assert "torch" not in heavy
    assert "hivemind" not in heavy


def test_the_exit_status_tells(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        arguments = ["doctor", "--no-network", "--api", "127.0.0.1:0", "--listen", where]
        assert outermost.run(arguments) == 1
    out = capsys.readouterr().out
    assert "fail  port listen" in out
    assert "  fix: " in out
    assert out.splitlines()[-1].startswith("1 failed")
