"""Scripts that join a swarm, as their users run them: real processes, and what goes wrong."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node_process import NodeProcess, nodes, wait_until
from places import ROOT
from safetensors.torch import load_file

from benchmarks.netns import Network, available

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]

EXAMPLES = ROOT / "docs" / "examples"
PYTHONPATH = {"PYTHONPATH": str(ROOT)}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., NodeProcess]]:
    """Makes nodes by name; all are ended."""
    with nodes(tmp_path) as made:
        yield lambda name, **environment: made(name, **PYTHONPATH, **environment)


def committed(node: NodeProcess, members: int) -> list[dict[str, Any]]:
    """Its rounds with so many contributors."""
    return [e for e in node.events("round") if e["members"] == members]


def check_together(one: NodeProcess, other: NodeProcess) -> None:
    """Work of both was merged, and whatever round both have applied left them equal."""
    assert committed(other, 2), other.text()
    theirs = one.rounds()
    common = {round_: state for round_, state in other.rounds().items() if round_ in theirs}
    assert len(common) >= 3
    assert all(theirs[round_] == state for round_, state in common.items())


def patient(tmp_path: Path, example: str = "own_script") -> Path:
    """The example, which makes a run whose rounds wait for all islands.

    A busy machine computes for one and then for the other: rounds would go without the slower one.
    """
    text, given = (EXAMPLES / f"{example}.py").read_text(), "peers=sys.argv[1:]"
    assert given in text
    script = tmp_path / f"patient_{example}.py"
    script.write_text(text.replace(given, f'{given}, run={{"rounds": {{"min_grace_s": 60}}}}'))
    return script


def readme_example() -> str:
    """The README's block of Python."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    return next(block for block in blocks if "node.join" in block)


def test_the_readme_shows_the_example() -> None:
    code = (EXAMPLES / "own_script.py").read_text()
    assert readme_example() in code


@pytest.mark.parametrize(
    "example", ["own_script", "lora", "accelerate_loop", "huggingface_trainer", "lightning_module"]
)
def test_two_scripts_train_one_model(
    make: Callable[..., NodeProcess], tmp_path: Path, example: str
) -> None:
    first = make("first").start_script(patient(tmp_path, example))
    where = first.address()
    script = EXAMPLES / f"{example}.py"
    second = make("second", ATOLL_ROUNDS="8").start_script(script, where)
    assert second.finish() == 0, second.text()
    check_together(first, second)
    assert first.running
    assert not second.left_over()
    if example == "lora":
        saved = load_file(tmp_path / "adapters.safetensors")
        assert saved.keys() == {"2.a", "2.b", "4.a", "4.b"}
        assert all(tensor.any() for tensor in saved.values())  # "b" began with zeros


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_several_ranks_are_one_island(
    make: Callable[..., NodeProcess], tmp_path: Path, kind: str
) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    first = make("first").start_script(patient(tmp_path))
    where = first.address()
    second = make("second", ATOLL_ROUNDS="6").start_script(
        EXAMPLES / "several_ranks.py", kind, where, runner=torchrun
    )
    assert second.finish() == 0, second.text()
    check_together(first, second)


@pytest.mark.skipif(not available(), reason="namespaces need Linux, root, ip and tc")
@pytest.mark.timeout(900)
def test_ranks_on_two_hosts_that_share_no_disk_are_one_island(tmp_path: Path) -> None:
    """torchrun --nnodes 2, each host in a namespace; host 1 has another disk at the same path."""
    state = tmp_path / "host0"
    state.mkdir()
    with Network(("other", "host0", "host1")) as net, nodes(tmp_path) as make:
        listening = {"PYTHONPATH": str(ROOT), "ATOLL_LISTEN": f"{net.address('other')}:0"}
        first = make("other", prefix=(*net.command("other", ()),), **listening)
        where = first.start_script(patient(tmp_path)).address()
        hidden = ("sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(state))
        settings = {
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": "eth0",
            "ATOLL_DIR": str(state),
            "ATOLL_LISTEN": f"{net.address('host0')}:0",
            "ATOLL_ROUNDS": "8",
            "ATOLL_CHECKPOINT_EVERY": "1",
        }
        hosts = [
            make(name, prefix=(*net.command(name, words),), **settings)
            for name, words in (("host0", ()), ("host1", hidden))
        ]

        def life(port: int, **more: str) -> None:
            for number, host in enumerate(hosts):
                host.environment |= more
                words = ("--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "2")
                words += ("--master-addr", net.address("host0"), "--master-port", str(port))
                runner = ("-m", "torch.distributed.run", *words)
                host.start_script(EXAMPLES / "several_ranks.py", "fsdp", where, runner=runner)
            assert hosts[0].finish() == 0, hosts[0].text()
            assert hosts[1].wait() == 0, hosts[1].text()

        life(29_401)
        check_together(first, hosts[0])
        steps = max(event["step"] for event in hosts[0].events("step"))
        assert hosts[0].events("checkpoint")
        assert not any(state.glob("checkpoints/*/trainer/*rank1*"))
        life(29_402, ATOLL_RESUME="true", ATOLL_ROUNDS="3")
        assert max(event["step"] for event in hosts[0].events("step")) > steps
        assert not any(host.left_over() for host in hosts)


def test_a_script_that_is_killed_comes_back_where_it_was(
    make: Callable[..., NodeProcess], tmp_path: Path
) -> None:
    script = EXAMPLES / "own_script.py"
    first = make("first").start_script(patient(tmp_path))
    where = first.address()
    second = make("second", ATOLL_CHECKPOINT_EVERY="1").start_script(script, where)
    wait_until(lambda: len(committed(second, 2)) >= 2, "two rounds of two")
    wait_until(lambda: second.events("checkpoint"), "a checkpoint")
    second.send(signal.SIGKILL)
    second.wait()
    wait_until(lambda: not second.left_over(), "the node of a script that is gone to leave")
    assert any(e["kind"] == "stopping" for e in second.events())
    told = [e["text"] for e in second.events("notice")]
    assert any(text.startswith("ended: the training script") for text in told), second.text()
    wait_until(lambda: first.events("peer_left"), "the other one to hear of it")
    assert first.events("peer_left")[0]["reason"] == "said farewell"
    before = len(first.events("round"))
    wait_until(lambda: len(first.events("round")) > before + 1, "the other one to go on")
    steps = max(e["step"] for e in second.events("step"))
    newest = max(second.dir.glob("checkpoints/ckpt-*"))
    assert list(newest.glob("*/*.safetensors")), "the last one has what is left of the trainer"
    # those that it repeats count as well, and the other one does not wait for who has left
    second.environment |= {"ATOLL_RESUME": "true", "ATOLL_ROUNDS": "14"}
    restarted = time.time()
    second.start_script(script, where)
    assert second.finish() == 0, second.text()
    again = [e for e in committed(second, 2) if e["time"] > restarted]
    assert again, second.text()
    assert max(e["step"] for e in second.events("step")) > steps // 2
    assert not [e for e in second.events("notice") if "begins anew" in e["text"]], second.text()


def test_who_comes_back_with_another_optimizer_is_told_what_it_has_lost(
    make: Callable[..., NodeProcess], tmp_path: Path
) -> None:
    text = (EXAMPLES / "own_script.py").read_text()
    adam = "torch.optim.AdamW(model.parameters(), lr=1e-3)"
    assert adam in text
    changed = tmp_path / "changed.py"
    changed.write_text(text.replace(adam, "torch.optim.RMSprop(model.parameters(), lr=1e-4)"))
    node = make("node", ATOLL_CHECKPOINT_EVERY="1", ATOLL_ROUNDS="2")
    assert node.start_script(EXAMPLES / "own_script.py").wait() == 0, node.text()
    node.environment |= {"ATOLL_RESUME": "true"}
    assert node.start_script(changed).wait() == 0, node.text()
    told = [e["text"] for e in node.events("notice") if "optimizer" in e["text"]]
    assert len(told) == 1
    assert "begins anew" in told[0]
    assert "5 parameters were trained by AdamW, now by RMSprop" in told[0]


def test_ctrl_c_leaves_the_swarm_in_order(make: Callable[..., NodeProcess]) -> None:
    first = make("first", ATOLL_CHECKPOINT_EVERY="1").start_script(EXAMPLES / "accelerate_loop.py")
    first.address()
    wait_until(lambda: first.events("round"), "a round")
    os.kill(first.pid, signal.SIGINT)
    assert first.wait(60) != 0  # KeyboardInterrupt, as Python does it
    assert "KeyboardInterrupt" in first.text()
    assert not first.left_over()
    (stopping,) = first.events("stopping")
    assert first.events("checkpoint")[-1]["time"] > stopping["time"], first.text()


ENDS = """
import sys, threading, torch, node

def train():
    for batch in workers:
        model(batch).square().mean().backward()
        optimizer.step()
        island.step(tokens=8)

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
workers = torch.utils.data.DataLoader(torch.ones(64, 8), batch_size=8, num_workers=2)
island = node.join(model, optimizer, resume="again" in sys.argv)
print("AT", island.steps, len(optimizer.state), flush=True)
if "in a thread" in sys.argv:
    threading.Thread(target=train).start()
else:
    train()
if "interrupted" in sys.argv:
    raise KeyboardInterrupt
"""


@pytest.mark.parametrize("how", ["interrupted", "ends", "in a thread"])
def test_who_does_not_call_leave_leaves_when_python_ends(
    make: Callable[..., NodeProcess], tmp_path: Path, how: str
) -> None:
    """With all it has learnt; and not when the workers of its data loader end."""
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    node = make("node").start_script(script, how)
    assert (node.wait() == 0) is (how != "interrupted"), node.text()
    assert not node.left_over()
    assert len(node.events("checkpoint")) == len(node.events("stopping")) == 1, node.text()
    assert node.start_script(script, "again").wait() == 0, node.text()
    assert "AT 8 2" in node.text()


def test_another_model_is_refused_with_a_reason(
    make: Callable[..., NodeProcess], tmp_path: Path
) -> None:
    first = make("first").start_script(EXAMPLES / "own_script.py")
    where = first.address()
    other = tmp_path / "other.py"
    other.write_text((EXAMPLES / "own_script.py").read_text().replace("64", "48"))
    second = make("second").start_script(other, where)
    assert second.wait() != 0
    assert "another model than this script" in second.text()
    third = make("third").start("start", "--peers", where)
    assert third.wait() != 0
    assert "train with scripts of their own" in third.text()
    assert first.running


ADAPTS = """
import sys, torch, node
from protocols.errors import OperatorError

revision, compares, *peers = sys.argv[1:]
base, adapter = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
torch.nn.init.constant_(base.weight, float(revision))
torch.nn.init.zeros_(base.bias)
base.requires_grad_(requires_grad=False)
model = torch.nn.ModuleDict({"base": base, "adapter": adapter})
optimizer = torch.optim.SGD(adapter.parameters(), lr=0.01)
run = None if peers else {"rounds": {"inner_steps": 5}}
with node.join(model, optimizer, peers=peers, run=run, compare_frozen=compares == "yes") as island:
    going = True
    while going:
        (base(torch.ones(2, 8)) + adapter(torch.ones(2, 8))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        going = island.step(tokens=8)
"""


def test_another_base_under_the_same_adapter_is_refused(
    make: Callable[..., NodeProcess], tmp_path: Path
) -> None:
    """Also where it comes back; and not where its script says that it may differ."""
    script = tmp_path / "adapts.py"
    script.write_text(ADAPTS)
    saving = {"ATOLL_CHECKPOINT_EVERY": "1"}
    first = make("first", **saving).start_script(script, "1", "yes")
    where = first.address()
    other = make("other").start_script(script, "2", "yes", where)
    assert other.wait() != 0
    assert "E201" in other.text()
    assert "the first that differs is base.weight (float32)" in other.text()
    rounds = {"ATOLL_ROUNDS": "100"}  # some may go by while it downloads
    for name, revision, compares in (("same", "1", "yes"), ("differs", "2", "no")):
        node = make(name, **rounds, **saving).start_script(script, revision, compares, where)
        assert node.finish() == 0, node.text()
        assert node.events("round"), node.text()
    node.environment |= {"ATOLL_RESUME": "true"}
    assert node.start_script(script, "2", "yes", where).wait() != 0
    assert "the first that differs is base.weight" in node.text()
    assert first.running


LEAVES_AT_ONCE = """
import sys, torch, node

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters())
resume = "again" in sys.argv
with node.join(model, optimizer, resume=resume) as island:
    print("AT", island.steps, flush=True)
    island.step(tokens=8)
"""


def test_who_leaves_at_once_has_a_checkpoint(
    make: Callable[..., NodeProcess], tmp_path: Path
) -> None:
    """The node trains for seconds before it has found its way into the run's DHT."""
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES_AT_ONCE)
    node = make("node").start_script(script)
    assert node.wait() == 0, node.text()
    assert node.events("checkpoint"), node.text()
    assert node.start_script(script, "again").wait() == 0, node.text()
    assert "AT 1" in node.text()
