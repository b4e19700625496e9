"""What happens to machines: a full disk, a clock that is set, a key that runs twice. Real nodes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from node_process import NodeProcess, wait_until
from swarm_kit import settings

from node.checkpoints.checkpoint import CheckpointStore

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

RUN = settings(inner_steps=10, total_rounds=5000, min_grace_s=10)
TMPFS_BYTES = 32 * 2**20
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)


@pytest.fixture
def nodes() -> Iterator[list[NodeProcess]]:
    """Those that a test starts; they are gone when it is over."""
    made: list[NodeProcess] = []
    yield made
    for node in made:
        if node.running:
            node.kill()


def begin(nodes: list[NodeProcess], node: NodeProcess, *words: str) -> str:
    """Start a node and wait until it is up; where others join it."""
    nodes.append(node)
    node.start("start", "--checkpoint-every", "1", *words)
    return address(node)


def address(node: NodeProcess) -> str:
    up = node.wait_for(lambda: len(node.events("started")) >= node.starts, "it is up")
    assert up
    return str(node.events("started")[-1]["join_address"])


def peer(node: NodeProcess) -> str:
    return str(node.events("started")[-1]["peer"])


def await_work(seen_by: NodeProcess, whose: str, count: int = 4) -> int:
    """Wait until work of ``whose`` was merged in so many more rounds; the last of them."""
    after = max(seen_by.rounds(), default=-1)

    def merged() -> list[int]:
        rounds = [
            event["round"]
            for event in seen_by.events("round")
            if event["round"] > after and event["islands"].get(whose, {}).get("tokens")
        ]
        return rounds if len(rounds) >= count else []

    return int(seen_by.wait_for(merged, f"{count} rounds with work of {whose[-8:]}")[-1])


def assert_same_bits(*nodes: NodeProcess) -> None:
    """In every round of which several tell they have the same state."""
    shared = 0
    states: dict[int, set[str]] = {}
    for node in nodes:
        for number, state in node.rounds().items():
            shared += number in states
            states.setdefault(number, set()).add(state)
    assert shared > 5
    assert {number for number, each in states.items() if len(each) > 1} == set()


# --- a full disk ---------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system of its own with little room."""
    directory = tmp_path / "full"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(directory)]
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("needs root, to mount a small disk")
    subprocess.run(mount, check=True)
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


def fill(directory: Path) -> Path:
    """Use up all there is, to the last byte, also what has become free since the last time."""
    file = directory / "filler"
    block = bytes(2**16)
    with file.open("ab", buffering=0) as all_of_it, suppress(OSError):
        while True:
            all_of_it.write(block)  # of the last one as much as has room
    return file


def test_the_disk_is_full_when_a_round_commits(
    nodes: list[NodeProcess], small_disk: Path, tmp_path: Path
) -> None:
    """Its rounds go on without checkpoints; killed and resumed, it has lost nothing but those."""
    other, full = NodeProcess(tmp_path / "other"), NodeProcess(small_disk)
    joined = begin(nodes, other, *RUN)
    begin(nodes, full, "--peers", joined)
    name = peer(full)
    await_work(other, name)
    full.wait_for(lambda: full.events("checkpoint"), "a checkpoint")

    filler = fill(small_disk)
    await_work(other, name)
    # a checkpoint that was whole already takes the room of an older one
    full.wait_for(
        lambda: fill(small_disk) and "E402" in full.text(), "it says that the disk is full"
    )
    await_work(other, name, 8)
    assert full.text().count("E402") <= 2  # not once a round
    store = CheckpointStore(small_disk / "checkpoints")
    assert store.latest().checkpoint is not None
    assert store.latest().damaged == ()

    filler.unlink()
    saved = store.paths()[0].name
    full.wait_for(lambda: store.paths()[0].name > saved, "checkpoints again")
    assert_same_bits(other, full)

    fill(small_disk)
    await_work(other, name)
    full.kill()
    filler = fill(small_disk)
    full.start("start", "--resume", "--peers", joined)
    assert full.wait() == 1
    assert "E402" in full.text()
    assert "Traceback" not in full.text()
    filler.unlink()
    full.start("start", "--resume", "--peers", joined)
    await_work(other, name)
    assert_same_bits(other, full)


# --- the wall clock ------------------------------------------------------------------------------


@pytest.mark.skipif(FAKETIME is None, reason="needs libfaketime")
def test_the_clock_of_a_node_is_set_while_it_runs(nodes: list[NodeProcess], tmp_path: Path) -> None:
    """By an hour forward, then to an hour before; others come and go meanwhile."""
    clock = tmp_path / "clock"
    clock.write_text("+0\n")
    steady = NodeProcess(tmp_path / "steady")
    stepped = NodeProcess(
        tmp_path / "stepped",
        LD_PRELOAD=str(FAKETIME),
        FAKETIME_TIMESTAMP_FILE=str(clock),
        FAKETIME_NO_CACHE="1",
        FAKETIME_DONT_FAKE_MONOTONIC="1",
    )
    joined = begin(nodes, steady, *RUN)
    begin(nodes, stepped, "--peers", joined)
    name = peer(stepped)
    await_work(steady, name)
    for number, offset in enumerate(("+3600", "-3600")):
        clock.write_text(f"{offset}\n")
        await_work(steady, name, 6)
        off = stepped.events("step")[-1]["time"] - steady.events("step")[-1]["time"]
        assert abs(off - float(offset)) < 600
        # connections are made anew, by one who has nobody else to ask about its clock as well
        for asked in (joined, address(stepped)):
            come = NodeProcess(tmp_path / f"come-{number}-{asked == joined}")
            begin(nodes, come, "--peers", asked)
            await_work(stepped, peer(come))
            come.send(signal.SIGTERM)
            assert come.wait() == 0
    assert not [e for e in steady.events("problem") if e["fatal"]]
    assert not [e for e in stepped.events("problem") if e["fatal"]]
    assert_same_bits(steady, stepped)
    stepped.send(signal.SIGTERM)
    assert stepped.wait() == 0


# --- one key, two nodes --------------------------------------------------------------------------


def test_a_key_that_is_started_twice(nodes: list[NodeProcess], tmp_path: Path) -> None:
    """The newer one goes on, the older one says why it ends, the swarm decides on."""
    seed, other = NodeProcess(tmp_path / "seed"), NodeProcess(tmp_path / "other")
    older, newer = NodeProcess(tmp_path / "older"), NodeProcess(tmp_path / "newer")
    joined = begin(nodes, seed, *RUN)
    begin(nodes, other, "--peers", joined)
    begin(nodes, older, "--peers", joined)
    name = peer(older)
    await_work(seed, name)
    newer.dir.mkdir()
    shutil.copy2(older.dir / "identity.pem", newer.dir / "identity.pem")
    begin(nodes, newer, "--peers", joined)
    assert peer(newer) == name
    assert older.wait() == 1
    assert "error E108: another node has started as" in older.text()
    assert "Traceback" not in older.text()
    await_work(newer, name)
    await_work(seed, name)
    assert not [e for e in seed.events("peer") if "expelled" in str(e)]
    assert_same_bits(seed, other, newer)
    with suppress(AssertionError):  # nothing of the older one is left
        wait_until(lambda: not older.left_over(), "its ranks are gone", 10)
    assert older.left_over() == []
