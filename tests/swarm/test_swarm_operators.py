"""Every command of the README and of the pages for operators, in order, against a real swarm."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_process import nodes, wait_until
from places import ROOT

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

OPERATORS = sorted((ROOT / "docs" / "operators").glob("*.md"))
PAGES = [*OPERATORS, ROOT / "README.md", ROOT / "docs" / "own.md", ROOT / "docs" / "monitoring.md"]
# what pip would fetch is not this test's business, what make runs is every change's, there is no
# other machine to log in to, and this one's kernel is left as it is
NOT_RUN = {
    "git pull": ["git", "--version"],
    ".venv/bin/pip install -e . -c constraints.txt": [sys.executable, "-m", "pip", "--version"],
    "make demo": ["make", "--version"],
    "make test": ["make", "--version"],
    "ssh -L 4391:127.0.0.1:4391 HOST": ["true"],
    "modprobe tcp_bbr": ["true"],
    'sysctl -w net.ipv4.tcp_allowed_congestion_control="reno cubic bbr"': ["true"],
}
COMMAND = re.compile(r"^(node|git|\.venv/bin/pip|make|ssh|modprobe|sysctl) [^…]+$")
STAYS = ("start", "bootstrap")  # until it is stopped


def commands(page: Path) -> list[str]:
    """The lines of the page's fenced blocks that are typed."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    plain = [block for language, block in blocks if not language]
    lines = [line for block in plain for line in block.splitlines() if line.strip()]
    if page in OPERATORS:
        assert all(map(COMMAND.match, lines)), lines
    return [line for line in lines if COMMAND.match(line)]


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A seed and an island; the address for newcomers."""
    with nodes(tmp_path_factory.mktemp("swarm")) as make:
        seed = make("seed").start("bootstrap")
        address = seed.address()
        first = make("first").start(
            "start", "--peers", address, "--set", "rounds.total_rounds=5000",
            "--set", "rounds.inner_steps=20", "--checkpoint-every", "0",
        )  # fmt: skip
        first.wait_round(1)
        yield address


class Terminal:
    """A user's shell: a home of its own, and one node that may run in it."""

    def __init__(self, home: Path, address: str) -> None:
        self.home, self.address = home, address
        self.made_run = False
        self.node: subprocess.Popen[bytes] | None = None
        self.out = home / "out"
        home.mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
        self.environment = {
            **kept, "HOME": str(home), "OMP_NUM_THREADS": "1", "ATOLL_DEVICE": "cpu",
            "ATOLL_THREADS": "1", "ATOLL_LISTEN": "127.0.0.1:0", "ATOLL_API": "127.0.0.1:0",
            "XDG_STATE_HOME": str(home / "state"), "XDG_CACHE_HOME": str(home / "cache"),
        }  # fmt: skip

    def run(self, line: str) -> None:
        """Type one line; what stays is waited for until it is up, all else must succeed."""
        words = shlex.split(line.replace("HOST:PORT/ID", self.address))
        if words[0] == "node":
            words = [sys.executable, "-m", *words]
        words = [word.replace("~", str(self.home), 1) for word in words]
        stays = words[3:4] and words[3] in STAYS and "template" not in words
        if stays:
            self.leave()
            if self.made_run and "--peers" in words:  # the page's next machine
                shutil.rmtree(self.home / ".atoll" / "checkpoints", ignore_errors=True)
            self.made_run = "--peers" not in words
            with self.out.open("wb") as out:
                self.node = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                    env=self.environment, cwd=self.home,
                )  # fmt: skip
            wait_until(self.up, f"{line} to be up")
            return
        words, target = (words[:-2], words[-1]) if words[-2] == ">" else (words, "printed")
        with (self.home / target).open("wb") as out:
            done = subprocess.run(
                NOT_RUN.get(line, words), check=False, stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.PIPE, env=self.environment, cwd=self.home, timeout=100,
            )  # fmt: skip
        told = (self.home / target).read_text() + done.stderr.decode()
        assert done.returncode == 0, f"{line}\n{told}"
        if " stop" in line:
            assert self.node is not None
            assert self.node.wait(30) in (0, 130)
            self.node = None

    def up(self) -> bool:
        """The node trains, or waits for a run."""
        assert self.node is not None
        text = self.out.read_text(errors="replace")
        assert self.node.poll() is None, text
        begun = re.search(r"^round \d+ ", text, re.MULTILINE)
        return bool(begun) or "waiting for the first island" in text

    def leave(self) -> None:
        """Ctrl-C, where a node runs."""
        if self.node is not None:
            self.node.terminate()
            self.node.wait(60)
            self.node = None


@contextlib.contextmanager
def terminal(home: Path, address: str) -> Iterator[Terminal]:
    made = Terminal(home, address)
    try:
        yield made
    finally:
        if made.node is not None:
            made.node.kill()
            made.node.wait()


def bring_text(page: Path, home: Path) -> None:
    """The run file that the page shows, and some text."""
    [run] = re.findall(r"^```toml\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    (home / "run.toml").write_text(run)
    (home / "text").mkdir()
    words = "".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
    (home / "text" / "all.txt").write_text(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_works(page: Path, swarm: str, tmp_path: Path) -> None:
    lines = commands(page)
    assert lines
    with terminal(tmp_path / "home", swarm) as user:
        if page.stem in ("recover", "upgrade"):  # there has been a node, and it made a checkpoint
            user.run("node start --peers HOST:PORT/ID --checkpoint-every 1")
        if page.stem == "own":
            bring_text(page, user.home)
        for line in lines:
            if line.startswith("node export"):
                user.leave()
            user.run(line)


def test_a_swarm_does_not_count_who_only_looks(swarm: str, tmp_path: Path) -> None:
    """An observer comes and goes: nobody lists it, and there are no more islands than before."""
    with terminal(tmp_path / "home", swarm) as user, nodes(tmp_path) as make:
        second = make("second").start("start", "--peers", swarm)
        second.wait_for(lambda: len(second.rounds()) > 1, "two rounds")
        before = {peer["peer"] for peer in second.state()["peers"]}
        most = max(event["live"] for event in second.events("round"))
        rounds = len(second.events("round"))
        for _ in range(3):
            user.run("node monitor --peers HOST:PORT/ID --once > picture.json")
        second.wait_for(lambda: len(second.rounds()) > rounds + 1, "two more rounds")
        state = second.state()
        assert {peer["peer"] for peer in state["peers"]} <= before
        assert max(event["live"] for event in second.events("round")[rounds:]) <= most
        whole = json.loads((user.home / "picture.json").read_text())
        # links between others, as they tell them, and rounds of the time before it looked
        told = whole["links"]
        ends = [{told["peers"][link[0]], told["peers"][link[1]]} for link in told["links"]]
        assert any(pair <= before and len(pair) == 2 for pair in ends)
        assert len(whole["history"]["columns"]["round"]) > 1
        picture = whole["state"]
        assert picture["node"]["peer"] not in before
        assert picture["run"]["id"] == state["run"]["id"]
        active = {p["peer"]: p["role"] for p in picture["peers"] if p["status"] == "active"}
        assert set(active.values()) == {"island", "seed"}
        assert set(active) <= before
        assert second.events("started")[0]["peer"] in active
