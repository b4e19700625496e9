"""A new user's path, timed: from ``pip install`` on a second machine to its first merged round.

Two network namespaces are the machines. The second has an environment of its own, into which pip
installs the wheel that is built here; what Atoll depends on is there already, as it would be after
the download, which is not counted. Then one line is typed: the one that the first node printed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from node_process import wait_until
from places import ROOT

from benchmarks.netns import Network, available

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not available(), reason="namespaces need Linux, root, ip and tc"),
]

LIMIT_S = 120.0
STEPS = {
    "dial": r"ok \d+ ms, peer verified",
    "checks": r"protocol, config, clock [+-]\d+\.\d\d s, disk ok",
    "reach": r"dial-back ok \(direct\)",
    "discover": r"1 island",
    "sync": r"round \d+, \d+\.\d MB from 1 peer in \d+\.\d s, digest ok",
    "train": r"joins at round \d+",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this repository."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True,
    ).stdout  # fmt: skip
    for name in listed.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", str(folder), str(source)], check=True, timeout=200)
    [made] = folder.glob("atoll-*.whl")
    return made


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment with everything that Atoll depends on, and no Atoll."""
    made = tmp_path / "env"
    venv.create(made, with_pip=False)
    [packages] = (made / "lib").glob("python*/site-packages")
    dependencies = Path(torch.__file__).parent.parent  # without their .pth: no editable Atoll
    (packages / "dependencies.pth").write_text(f"{dependencies}\n")
    return made


@pytest.fixture
def machines() -> Iterator[Network]:
    with Network(["first", "second"], mbit=100) as network:
        yield network


def clean_environment(home: Path) -> dict[str, str]:
    """What a user's shell has, with a home of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    return {**kept, "HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}


def rounds_with(log: Path, peer: str) -> list[dict[str, Any]]:
    """Rounds in an event log in which work of ``peer`` was merged."""
    lines = log.read_text().splitlines() if log.exists() else []
    events = [json.loads(line) for line in lines if '"kind": "round"' in line and line[-1] == "}"]
    return [event for event in events if event["islands"].get(peer, {}).get("tokens")]


def test_from_pip_install_to_the_first_merged_round(
    wheel: Path,
    environment: Path,
    machines: Network,
    tmp_path: Path,
    record_property: Any,
) -> None:
    for home in ("home-1", "home-2"):
        (tmp_path / home).mkdir()
    with (tmp_path / "first.out").open("wb") as out:
        machines.python(
            "first", "-m", "node", "start", "--set", "rounds.total_rounds=5000",
            "--set", "rounds.inner_steps=30", stdout=out, stderr=subprocess.STDOUT,
            env=clean_environment(tmp_path / "home-1"), cwd=tmp_path,
        )  # fmt: skip
    first = tmp_path / "first.out"
    printed = wait_until(
        lambda: re.search(r"^ +(node start --peers \S+)$", first.read_text(), re.MULTILINE),
        "the line for others",
        200,  # it reads its training text first; what is timed comes after
    )
    assert machines.address("first") in printed[1]

    began = time.monotonic()
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python")]
    subprocess.run(
        [*pip, "--quiet", "install", "--no-deps", "--no-index", str(wheel)],
        check=True, timeout=LIMIT_S,
    )  # fmt: skip
    installed = time.monotonic()
    second, home = tmp_path / "second.out", tmp_path / "home-2"
    with second.open("wb") as out:
        node = machines.start(
            "second",
            [str(environment / "bin" / "node"), *printed[1].split()[1:]],
            stdout=out, stderr=subprocess.STDOUT, env=clean_environment(home), cwd=home,
        )  # fmt: skip
    log = home / ".atoll" / "events.jsonl"

    def me() -> str:
        found = re.search(r"identity (12D3\w+)", second.read_text())
        return found[1] if found else ""

    def contributed() -> Any:
        assert node.poll() is None, second.read_text()
        return me() and rounds_with(log, me())

    merged = wait_until(contributed, "its first merged round", LIMIT_S)
    took = time.monotonic() - began
    record_property("install_s", round(installed - began, 1))
    record_property("first_merged_round_s", round(took, 1))
    record_property("first_merged_round", merged[0]["round"])
    assert took < LIMIT_S

    text = second.read_text()
    for number, (name, said) in enumerate(STEPS.items(), start=1):
        assert re.search(rf"^ +\[{number}/6\] {name} +{said}$", text, re.MULTILINE), name
    assert re.search(r"round \d+ .*[12]/2 peers", text)
    assert "error" not in text
    # it ran what pip has installed, not the sources of this repository
    where = subprocess.run(
        [str(environment / "bin" / "python"), "-c", "import node; print(node.__file__)"],
        cwd=home, env=clean_environment(home), check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert str(environment) in where
    # both stand on the same state, bit for bit
    number = merged[0]["round"]
    other = tmp_path / "home-1" / ".atoll" / "events.jsonl"

    def there() -> set[str]:
        return {e["state"] for e in rounds_with(other, me()) if e["round"] == number}

    # it may report it a moment later
    found = wait_until(there, "the same round on the first machine", LIMIT_S)
    assert found == {merged[0]["state"]}
    node.terminate()
    assert node.wait(60) == 0
    print(f"installed in {installed - began:.1f} s, first merged round after {took:.1f} s")  # noqa: T201
