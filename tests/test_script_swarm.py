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

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

ROOT = Path(__file__).parent.parent
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


def readme_example() -> str:
    """The README's block of Python."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    return next(block for block in blocks if "node.join" in block)


def test_the_readme_shows_the_example() -> None:
    code = (EXAMPLES / "own_script.py").read_text()
    assert readme_example() in code


@pytest.mark.parametrize(
    "example", ["own_script", "accelerate_loop", "huggingface_trainer", "lightning_module"]
)
def test_two_scripts_train_one_model(make: Callable[..., NodeProcess], example: str) -> None:
    script = EXAMPLES / f"{example}.py"
    first = make("first").start_script(script)
    where = first.address()
    second = make("second", ATOLL_ROUNDS="8").start_script(script, where)
    assert second.wait(200) == 0, second.text()
    check_together(first, second)
    assert first.running
    assert not second.left_over()


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_several_ranks_are_one_island(make: Callable[..., NodeProcess], kind: str) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    first = make("first").start_script(EXAMPLES / "own_script.py")
    where = first.address()
    second = make("second", ATOLL_ROUNDS="6").start_script(
        EXAMPLES / "several_ranks.py", kind, where, runner=torchrun
    )
    assert second.wait(200) == 0, second.text()
    check_together(first, second)


def test_a_script_that_is_killed_comes_back_where_it_was(make: Callable[..., NodeProcess]) -> None:
    script = EXAMPLES / "own_script.py"
    first = make("first").start_script(script)
    where = first.address()
    second = make("second", ATOLL_CHECKPOINT_EVERY="1").start_script(script, where)
    wait_until(lambda: len(committed(second, 2)) >= 2, "two rounds of two")
    wait_until(lambda: second.events("checkpoint"), "a checkpoint")
    second.send(signal.SIGKILL)
    second.wait()
    wait_until(lambda: not second.left_over(), "the node of a script that is gone to leave")
    assert any(e["kind"] == "stopping" for e in second.events())
    before = len(first.events("round"))
    wait_until(lambda: len(first.events("round")) > before + 1, "the other one to go on")
    steps = max(e["step"] for e in second.events("step"))
    second.environment |= {"ATOLL_RESUME": "true", "ATOLL_ROUNDS": "6"}
    restarted = time.time()
    second.start_script(script, where)
    assert second.wait(200) == 0, second.text()
    again = [e for e in committed(second, 2) if e["time"] > restarted]
    assert again, second.text()
    assert max(e["step"] for e in second.events("step")) > steps // 2


def test_ctrl_c_leaves_the_swarm_in_order(make: Callable[..., NodeProcess]) -> None:
    first = make("first", ATOLL_CHECKPOINT_EVERY="1").start_script(EXAMPLES / "accelerate_loop.py")
    first.address()
    wait_until(lambda: first.events("round"), "a round")
    os.kill(first.pid, signal.SIGINT)
    assert first.wait(60) != 0  # KeyboardInterrupt, as Python does it
    assert "KeyboardInterrupt" in first.text()
    assert not first.left_over()
    assert first.events("stopping")


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
