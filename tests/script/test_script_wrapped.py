"""Models that a script has wrapped for several ranks, and what ``node.join`` makes of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks_kit import process_group, started
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from trainer_kit import Script, apply, begin

from node.entry.own_address import outward_address
from node.hosts.interface import interface_of
from node.script.joining import join
from node.script.parameters import named_parameters
from node.script.progress import ScriptProgress
from node.script.session import Joined
from node.trainer import parallel
from node.trainer.layout import Layout
from node.trainer.leader import Leader
from node.trainer.optimizer_state import counted_beside, new_moments
from node.trainer.parallel import Ranks
from node.trainer.rank import rank_lost
from node.trainer.shared import SharedVectors
from node.trainer.weights import Weights
from protocols.errors import OperatorError

X = torch.ones(2, 4)


def sharded(model: nn.Module) -> Any:
    """By FSDP2 on the CPU: by itself it takes a GPU where there is one."""
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    with process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1):
        yield


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("evaluates", [False, True])
def test_what_a_script_has_gathered_does_not_hide_a_merge(evaluates: bool) -> None:
    """FSDP2 keeps gathered parameters after a forward pass that no backward follows."""
    model = sharded(nn.Linear(4, 3))

    @torch.no_grad()
    def out() -> Tensor:
        return model(X)  # type: ignore[no-any-return]

    layout = Layout.of_module(model)
    vectors = SharedVectors.create(layout.size)
    base, sent = vectors.tensors()
    script = Script(lambda report: [])
    script.commands = [begin(target_steps=50)]
    leader = Leader(script, vectors, 0.0, lambda: script.now)  # type: ignore[arg-type]
    progress = ScriptProgress(
        lambda: float(out().sum()),
        named_parameters(model),
        torch.optim.SGD(model.parameters()),
        layout,
        Ranks.alone(torch.device("cpu")),
        leader,
        0,
    )
    progress.sharded = [model]
    joined = Joined(progress, None)
    base.fill_(1.0)
    out()
    joined.begin()
    assert torch.equal(out(), torch.full((2, 3), 5.0))
    sent.fill_(0.0)  # θ is 1 now: what was learnt since the snapshot
    base.fill_(2.0)
    script.commands.append(apply(1, target_steps=50, evaluate=evaluates))
    joined.step(tokens=8)
    assert torch.equal(out(), torch.full((2, 3), 15.0))


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore")  # of one rank there
def test_the_first_fsdp_is_refused() -> None:
    """Its flat pieces differ between ranks, and would be overwritten with those of rank 0."""
    model = FullyShardedDataParallel(
        nn.Linear(4, 3), use_orig_params=True, device_id=torch.device("cpu")
    )
    with pytest.raises(OperatorError, match="FullyShardedDataParallel") as caught:
        named_parameters(model)
    assert caught.value.code == "E204"


@pytest.mark.usefixtures("group")
def test_parameters_are_shards_also_after_a_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, nn.Parameter]] = []
    model = sharded(nn.Linear(4, 3))
    with torch.no_grad():
        model(X)

    def take(model: nn.Module) -> dict[str, nn.Parameter]:
        seen.append(named_parameters(model))
        raise StopIteration

    monkeypatch.setattr("node.script.joining.named_parameters", take)
    with pytest.raises(StopIteration):
        join(model, torch.optim.SGD(model.parameters()))
    assert all(isinstance(parameter, DTensor) for parameter in seen[0].values())


def test_a_model_may_call_a_part_of_its_own_module() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.submodule = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
            self.weight = nn.Parameter(torch.ones(3))

    assert list(named_parameters(Head())) == [
        "weight", "module.weight", "module.bias", "submodule.weight",
    ]  # fmt: skip


def _joins(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    model = nn.Linear(4, 3 + rank)  # a stage of a pipeline, say
    with pytest.raises(OperatorError, match="different parameters") as caught:
        join(model, torch.optim.SGD(model.parameters()))
    assert caught.value.code == "E204"
    dist.barrier()  # gloo ends a process whose peer has gone before
    dist.destroy_process_group()


def _takes(rank: int, store: str) -> None:
    # gloo for tensors of a GPU alone: to those of the CPU it is as NCCL is
    dist.init_process_group("cuda:gloo", init_method=store, rank=rank, world_size=2)
    model = nn.Linear(4, 3)
    layout = Layout.of_module(model)
    weights = Weights.of(named_parameters(model), layout, Ranks.met(torch.device("cpu")))
    whole = torch.full((3, 4), 2.0) if rank == 0 else None
    weights.set("weight", whole)
    assert torch.equal(model.weight, torch.full((3, 4), 2.0))
    assert weights.ranks.all_true(True)  # gloo ends a process whose peer has gone before
    dist.destroy_process_group()


def test_parameters_on_the_cpu_are_set_though_the_scripts_group_is_of_gpus(
    tmp_path: Path,
) -> None:
    """As FSDP2's CPU offload has them beside ``init_process_group("nccl")``."""
    started(_takes, (f"file://{tmp_path}/store",), 2)


def _finds_its_way(rank: int, store: str, master: str, leads_to: str) -> None:
    os.environ["MASTER_ADDR"] = master
    ask = socket.getaddrinfo
    socket.getaddrinfo = lambda host, *words, **more: ask(  # as /etc/hosts of Debian has it
        "127.0.1.1" if host == "node0" else host, *words, **more
    )
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        os.environ.pop(name, None)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    ranks = Ranks.met(torch.device("cpu"))
    assert [os.environ.get(name) for name in names] == [leads_to, None]
    assert ranks.all_true(True)  # gloo ends a process whose peer has gone before
    dist.destroy_process_group()


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are looked up on Linux")
def test_how_nccl_goes_stays_the_scripts_affair(tmp_path: Path) -> None:
    """It may use several interfaces, where gloo beside it needs one."""
    store = f"file://{tmp_path}/store"
    started(_finds_its_way, (store, "127.0.0.1", "lo"), 2)


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are looked up on Linux")
def test_a_host_whose_own_name_leads_to_loopback_is_reached_from_others(tmp_path: Path) -> None:
    outward = interface_of(outward_address())
    if outward == "lo":
        pytest.skip("this machine has no interface but loopback")
    store = f"file://{tmp_path}/store"
    started(_finds_its_way, (store, "node0", outward), 2)


def _defaults(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    torch.set_default_dtype(torch.float64)
    model = nn.Linear(4, 3)
    torch.set_default_device("meta")  # a GPU's place is taken by it
    ranks = Ranks.met(torch.device("cpu"))
    weights = Weights.of(named_parameters(model), Layout.of_module(model), ranks)
    whole = torch.full((3, 4), 2.0, dtype=torch.float32, device="cpu") if rank == 0 else None
    weights.set("weight", whole)
    assert model.weight.tolist() == [[2.0] * 4] * 3
    assert ranks.broadcast(b"word" if rank == 0 else b"") == b"word"
    assert ranks.unanimous(True)
    assert ranks.all_true(True)  # gloo ends a process whose peer has gone before
    dist.destroy_process_group()


def test_ranks_agree_whatever_type_and_device_the_script_has_made_its_default(
    tmp_path: Path,
) -> None:
    started(_defaults, (f"file://{tmp_path}/store",), 2)


def test_counts_of_steps_do_not_take_the_scripts_default_type() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        kept = new_moments(torch.zeros(2), {"exp_avg": None}, 1001, beside=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert float(kept["step"]) == 1001.0


@pytest.mark.parametrize(("options", "place"), [({}, "cpu"), ({"capturable": True}, "meta")])
def test_counts_of_steps_are_where_the_optimizer_reads_them(
    options: dict[str, bool], place: str
) -> None:
    """On a GPU, whose place ``meta`` takes, each of them would be waited for in every step."""
    parameter = nn.Parameter(torch.zeros(2, device="meta"))
    counted = counted_beside(torch.optim.AdamW([parameter], **options))  # type: ignore[arg-type]
    kept = new_moments(parameter, {"exp_avg": None}, 3, beside=parameter in counted)
    assert (kept["step"].device.type, kept["exp_avg"].device.type) == (place, "meta")


def test_each_parameter_gets_its_part_on_its_own_device() -> None:
    """A model over several GPUs of one process, or with an embedding that is left on the CPU."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    ranks = Ranks.alone(torch.device("cpu"))
    weights = Weights.of(named_parameters(model), Layout.of_module(model), ranks)
    for name in weights.names:
        (part,) = weights.local(name)
        there = weights.scatter(name, torch.zeros(part.shape))
        assert there is not None
        assert there.device == part.device


def test_ranks_with_other_parameters_are_refused_on_all_of_them(tmp_path: Path) -> None:
    started(_joins, (f"file://{tmp_path}/store",), 2)


def _fails_alone(rank: int, store: str, place: str) -> None:
    """Rank 0, before it has a node: the other is told each time, and neither waits for ever."""
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(OperatorError, match="joins as seed") as caught:
        join(model, optimizer, dir=place, role="seed")
    assert caught.value.code == "E204"
    run: Any = 7
    with pytest.raises(TypeError if rank == 0 else OperatorError) as defect:
        join(model, optimizer, dir=place, run=run)
    assert rank == 0 or getattr(defect.value, "code", "") == "E999"
    if rank == 0:
        SharedVectors.create = _no_memory  # type: ignore[method-assign]
    with pytest.raises(OperatorError, match="no shared memory") as caught:
        join(model, optimizer, dir=place)
    assert caught.value.code == "E401"
    Ranks.met(torch.device("cpu")).all_true(True)  # gloo ends a process whose peer has gone before
    dist.destroy_process_group()


def _no_memory(size: int) -> SharedVectors:
    raise OperatorError("E401", "no shared memory", "w", "f")


def test_what_rank_0_fails_at_before_it_has_a_node_is_told_to_the_others(tmp_path: Path) -> None:
    arguments = (f"file://{tmp_path}/store", f"{tmp_path}/state")
    started(_fails_alone, arguments, 2)


def _agrees(rank: int, store: str, done: str) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=3)
    ranks = Ranks.met(torch.device("cpu"))
    assert ranks.unanimous(True)
    for ill in range(3):
        assert not ranks.unanimous(rank != ill)
    assert ranks.unanimous(True)
    parallel.TOLD_S = 0.2
    if rank == 1:  # the others are elsewhere, and this one does not wait for them
        assert not ranks.unanimous(False)
        Path(done).touch()
    else:
        end = time.monotonic() + 60
        while not Path(done).exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        with pytest.raises(RuntimeError) as caught:
            ranks.unanimous(True)
        assert rank_lost(caught.value) == "E405"
    dist.destroy_process_group()


def test_who_is_not_well_tells_the_others_and_does_not_wait_for_ever(tmp_path: Path) -> None:
    arguments = (f"file://{tmp_path}/store", f"{tmp_path}/done")
    started(_agrees, arguments, 3)


ENDS = """
import atexit, sys
from pathlib import Path
import torch
import torch.distributed as dist
from node.trainer.parallel import Ranks

@atexit.register
def count():
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    print("LEFT", sum(name.startswith("pt_gloo_runloop") for name in names))

store, rank, tidy = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "tidy"
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
ranks = Ranks.met(torch.device("cpu"))
ranks.background()
ranks.broadcast(b"word" * 50)
if tidy:
    dist.destroy_process_group()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
@pytest.mark.parametrize(("how", "left"), [("tidy", 0), ("untidy", 2)])
def test_no_thread_of_ours_is_left_when_python_goes_down(
    tmp_path: Path, how: str, left: int
) -> None:
    """One that has yet to let go of a tensor then ends the script with SIGABRT.

    A script that does not take its own group down keeps the two threads of that.
    """
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ENDS, f"file://{tmp_path}/store", str(rank), how],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert said == [f"LEFT {left}\n"] * 2
    assert [rank.returncode for rank in ranks] == [0, 0]
