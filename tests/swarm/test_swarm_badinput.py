"""What goes wrong while real nodes run: damage, strangers, full disks, and Ctrl-C at any moment."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from node_process import NodeProcess, nodes, wait_until

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

Make = Callable[..., NodeProcess]
RUN = ("--set", "rounds.total_rounds=1000", "--set", "rounds.inner_steps=20")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with nodes(tmp_path) as make:
        yield make


def checkpoints(node: NodeProcess) -> list[Path]:
    return sorted((node.dir / "checkpoints").glob("ckpt-*"))


# --- damaged checkpoints ----------------------------------------------------------------------


def test_a_damaged_checkpoint_is_passed_over(make: Make) -> None:
    node = make("node")
    node.start("start", *RUN, "--checkpoint-every", 2, "--keep-checkpoints", 3, "--rounds", 6)
    assert node.wait() == 0
    older, newer, newest = checkpoints(node)
    (cut,) = (newest / "trainer").glob("*.safetensors")
    os.truncate(cut, cut.stat().st_size // 2)
    flipped = newer / "outer.safetensors"
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 16
    flipped.write_bytes(data)

    node.start("start", "--resume", "--rounds", 2)
    assert node.wait() == 0
    problems = node.events("problem")
    assert [problem["code"] for problem in problems] == ["E404", "E404"]
    assert f"{cut.name} has {cut.stat().st_size} bytes" in problems[0]["why"]
    assert "outer.safetensors has another hash" in problems[1]["why"]
    for damaged, next_one in ((newest, newer), (newer, older)):
        assert f"checkpoint {damaged.name} cannot be used" in node.text()
        assert f"{next_one.name} is tried" in node.text()
    # it went on behind the one that was whole
    began = int(older.name.removeprefix("ckpt-"))
    resumed = [event["round"] for event in node.events("round")][6:]
    assert resumed == [began, began + 1]

    for path in checkpoints(node):
        (path / "checkpoint.json").unlink()
    node.start("start", "--resume")
    assert node.wait() == 1
    assert "error E404" in node.text()
    assert "Traceback" not in node.text()


# --- a full disk ------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(at: Path, kilobytes: int) -> Iterator[None]:
    """A file system of its own at a directory; only root can have one."""
    at.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(at)], check=True
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def test_no_room_for_checkpoints_is_told_at_the_start(tmp_path: Path, make: Make) -> None:
    with small_disk(tmp_path / "node", 3000):
        node = make("node").start("start", *RUN)
        assert node.wait() == 1
        # two that are kept, the best, and one that is being written
        assert re.search(r"error E402: .*\n  why: 4 checkpoints of \d+ MiB need", node.text())
        assert "Traceback" not in node.text()
        assert not node.events("round")


@pytest.mark.parametrize("kilobytes", [4, 12, 16, 24, 64])
def test_a_disk_that_is_full_from_the_beginning(tmp_path: Path, make: Make, kilobytes: int) -> None:
    """Wherever the first byte is that does not fit: lock, key, log or evaluation shard."""
    with small_disk(tmp_path / "node", kilobytes):
        node = make("node").start("start", *RUN)
        assert node.wait() == 1
        assert "error E402" in node.text()
        assert "Traceback" not in node.text()


def fill(node: NodeProcess) -> Path:
    """Leave no room on its disk, at a moment when no checkpoint is being written.

    What an unfinished one has taken would be given back later, and the next one might fit there.
    """
    ballast, folder = node.dir / "ballast", node.dir / "checkpoints"
    for _ in range(20):
        newest = checkpoints(node)[-1:]
        node.wait_for(
            lambda: checkpoints(node)[-1:] > newest and not list(folder.glob(".*")),  # noqa: B023
            "the next checkpoint",
        )
        before = checkpoints(node)
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(65_536))
        if checkpoints(node) == before and not list(folder.glob(".*")):
            return ballast
        ballast.unlink()
    raise AssertionError("a checkpoint was being written whenever the disk was filled")


def test_a_disk_that_fills_up_stops_no_training(tmp_path: Path, make: Make) -> None:
    with small_disk(tmp_path / "node", 16_000):
        node = make("node").start("start", *RUN, "--checkpoint-every", 10)
        # the log is on that disk too: what happens is seen through the API and the console
        skipped = re.compile(r"^checkpoint of round \d+ skipped: no room for a checkpoint", re.M)

        def told() -> int:
            return len(skipped.findall(node.text()))

        ballast = fill(node)
        before = told()
        node.wait_for(lambda: told() > before, "one that does not fit")
        kept = [path.name for path in checkpoints(node)]
        begun = node.state()["rounds"]["committed"]
        node.wait_for(lambda: node.state()["rounds"]["committed"] > begun + 25, "training on")
        assert told() == before + 1
        assert "was skipped: no room for a checkpoint" in node.text()  # a critical alarm
        assert [path.name for path in checkpoints(node)] == kept
        assert not list((node.dir / "checkpoints").glob(".draft-*"))
        ballast.unlink()
        node.wait_for(lambda: checkpoints(node)[-1].name > kept[-1], "a checkpoint again")
        node.send(signal.SIGINT)
        assert node.wait() == 0
        assert "Traceback" not in node.text()
        node.start("start", "--resume", "--rounds", 1)
        assert node.wait() == 0


# --- strangers --------------------------------------------------------------------------------


def pour(address: str, data: bytes) -> None:
    """Connect, send, and read until the other end closes or has nothing to say."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 5) as link:
        link.settimeout(1)
        link.sendall(data)
        while link.recv(4096):
            pass


def test_garbage_on_both_ports_disturbs_nobody(make: Make) -> None:
    first = make("first").start("start", *RUN)
    second = make("second").start("start", "--peers", first.address())
    second.wait_round(1)
    peers = first.address().partition("/")[0]
    api = json.loads((first.dir / "api.json").read_text())["address"]
    before = max(first.rounds())
    noise = [
        os.urandom(2000),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01" + os.urandom(500),  # as TLS begins
        b"POST /api/v1/state HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999\r\n\r\n",
        b"GET /" + b"a" * 100_000,
        b"",
    ]
    for _ in range(3):
        for data in noise:
            pour(peers, data)
            pour(api, data)
    assert first.metric('swarm_strangers_total{reason="garbage"}') >= 3
    assert first.metric("swarm_accepted_connections_total") >= 1  # those of the other node
    first.wait_round(before + 5)
    second.wait_round(before + 5)
    rounds = [e for node in (first, second) for e in node.events("round") if e["round"] > before]
    assert {event["outcome"] for event in rounds} == {"committed"}
    for node in (first, second):
        assert not node.events("peer_suspected")
        assert not node.events("problem")
        assert "Traceback" not in node.text()
    shared = set(first.rounds()) & set(second.rounds())
    assert all(first.rounds()[number] == second.rounds()[number] for number in shared)


def test_who_is_turned_away_is_counted(make: Make) -> None:
    first = make("first").start("start", *RUN, "--invitation", "only friends")
    address = first.address()
    for given in ((), ("--invitation", "wrong")):
        stranger = make(f"stranger{len(given)}").start("start", "--peers", address, *given)
        assert stranger.wait() == 1
        assert "error E203" in stranger.text()
        assert "only friends" not in stranger.text()
    assert first.metric('swarm_refused_peers_total{code="E203"}') == 2
    friend = make("friend").start("start", "--peers", address, "--invitation", "only friends")
    friend.wait_round(max(first.rounds(), default=0) + 1)


# --- a peer that stands still ------------------------------------------------------------------


@pytest.mark.parametrize("role", ["island", "observer"])
def test_a_newcomer_outlasts_a_seed_that_stands_still(make: Make, role: str) -> None:
    """Its only seed is stopped while it comes in, for longer than any single wait."""
    seed = make("seed").start("bootstrap")
    first = make("first").start("start", *RUN, "--peers", seed.address())
    first.wait_round(1)
    newcomer = make("newcomer").start("start", "--peers", seed.address(), "--role", role)
    newcomer.wait_for(lambda: newcomer.events("join"), "its first step")
    seed.send(signal.SIGSTOP)
    stopped = time.monotonic()
    wait_until(lambda: time.monotonic() > stopped + 20, "20 s")
    seed.send(signal.SIGCONT)
    newcomer.address()
    newcomer.wait_round(max(first.rounds()) + 1)
    assert not first.events("problem")


# --- wrong numbers ----------------------------------------------------------------------------


def shared_vectors(daemon: int) -> Path:
    """The memory that a daemon shares with its trainer, as the kernel shows it."""
    for link in Path(f"/proc/{daemon}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd:" in os.readlink(link):
                return link
    raise AssertionError("no shared memory")


def test_a_nan_in_the_memory_of_one_island_reaches_no_other(make: Make) -> None:
    """A fault of the machine: NaN appears in what an island is about to contribute."""
    first = make("first").start("start", *RUN)
    second = make("second").start("start", "--peers", first.address())
    second.wait_round(1)
    with shared_vectors(second.pid).open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        page = 4096  # of flags; then base and sent, of which the latter is contributed
        sent = page + (len(memory) - page) // 2
        end = time.monotonic() + 60
        while not refusals(first, second):
            assert time.monotonic() < end, first.text() + second.text()
            memory[sent + 4000 : sent + 4004] = struct.pack("<f", float("nan"))
            time.sleep(0.002)
    before = max(first.rounds())
    first.wait_round(before + 4)
    losses = [e["validation_loss"] for e in first.events("round") if e["round"] > before]
    assert all(loss is not None and loss == loss and loss < 7 for loss in losses)
    second.wait_round(before + 4)
    shared = {n for n in set(first.rounds()) & set(second.rounds()) if n > before + 1}
    assert shared
    assert all(first.rounds()[number] == second.rounds()[number] for number in shared)


def refusals(*several: NodeProcess) -> list[dict[str, object]]:
    return [e for node in several for e in node.events("rejected") if e["reason"] == "non-finite"]


def test_a_run_that_diverges_says_so_and_does_not_end(make: Make) -> None:
    wild = ("inner.lr=10", "inner.clip_norm=1e30", "inner.warmup_steps=0", "outer.lr=10")
    settings = [word for change in wild for word in ("--set", change)]
    node = make("node").start("start", *RUN, *settings)
    node.wait_for(lambda: refusals(node), "numbers that are none")
    assert node.metric('swarm_rejected_total{reason="non-finite"}') >= 1
    assert node.running
    node.send(signal.SIGINT)
    assert node.wait() == 0
    assert "Traceback" not in node.text()


# --- ports ------------------------------------------------------------------------------------


def test_the_usual_ports_are_given_up_where_they_are_taken(make: Make) -> None:
    several = [make(f"seed{number}").start("bootstrap", ports=False) for number in range(2)]
    addresses = [node.address() for node in several]
    ports = {address.partition("/")[0].rpartition(":")[2] for address in addresses}
    assert len(ports) == 2
    assert (
        len({json.loads((node.dir / "api.json").read_text())["address"] for node in several}) == 2
    )


# --- Ctrl-C -----------------------------------------------------------------------------------


def begun(node: NodeProcess) -> object:
    return (node.dir / "daemon.lock").exists()


PHASES: dict[str, tuple[tuple[str, ...], Callable[[NodeProcess], object]]] = {
    "the interpreter starts": ((), lambda node: True),
    "modules are imported": ((), lambda node: modules_are_imported(node.pid)),
    "the directory is locked": ((), begun),
    "seeds are dialled": (
        ("--peers", "127.0.0.1:1"),
        lambda node: node.events("problem"),
    ),
    "text is read": ((), lambda node: list((node.dir.parent / "cache").rglob(".draft-*"))),
    "the trainer starts": (RUN, lambda node: node.left_over()),
    "the node is up": (RUN, lambda node: node.events("started")),
    "it trains": (RUN, lambda node: node.events("step")),
}


def modules_are_imported(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "pydantic" in Path(f"/proc/{pid}/maps").read_text()
    return False


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_at_any_moment(make: Make, tmp_path: Path, phase: str, times: int) -> None:
    arguments, reached = PHASES[phase]
    own_cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")} if phase == "text is read" else {}
    node = make("node", **own_cache).start("start", *arguments)
    wait_until(lambda: reached(node) or not node.running, phase)
    assert node.running, node.text()
    for _ in range(times):
        node.send(signal.SIGINT)
        time.sleep(0.3)
    status = node.wait(40)
    allowed = {0, 130}
    if phase == "the interpreter starts":  # nothing of ours has run yet
        allowed |= {1, -signal.SIGINT}
    else:
        assert "Traceback" not in node.text(), node.text()
    if times == 2:  # the second one may come when all is done and the interpreter winds down
        allowed |= {-signal.SIGINT}
    assert status in allowed, node.text()
    wait_until(lambda: not node.left_over(), "its processes to end", 10)
    assert not (node.dir / "api.json").exists()
    assert not list(tmp_path.rglob(".draft-*"))
    assert not list(node.dir.glob("logs/crash-*"))
