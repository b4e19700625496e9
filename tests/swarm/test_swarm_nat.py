"""Behind a real address translator (netfilter in namespaces): the doctor, and training."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machine_kit import SETTINGS, Machine, assert_same_bits, await_merged, await_up
from nat_kit import INSIDE, put_behind

from benchmarks.netns import Network, available

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        not available() or not shutil.which("nft"),
        reason="namespaces need Linux, root, ip, tc and nft",
    ),
]
SEEDS = ("one", "two", "three")


@pytest.fixture
def network() -> Iterator[Network]:
    with Network([*SEEDS, "router", "inside"]) as made:
        yield made


def doctor(network: Network, name: str, directory: Path, peers: str) -> dict[str, dict[str, Any]]:
    """``node doctor --json`` in a namespace: the findings by name, of equal names the last."""
    words = ["-m", "node", "doctor", "--json", "--dir", str(directory), "--peers", peers]
    command = network.command(name, [sys.executable, *words])
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr
    found = {one["name"]: one for one in json.loads(done.stdout)["checks"]}
    found["exit"] = {"status": done.returncode}
    return found


@pytest.mark.parametrize("kind", ["full cone", "restricted", "symmetric"])
def test_the_doctor_tells_kinds_of_translators_apart(
    network: Network, tmp_path: Path, kind: str
) -> None:
    put_behind(network, "inside", "router", kind)
    seeds = [Machine(network, name, tmp_path).start("bootstrap") for name in SEEDS]
    for seed in seeds:
        await_up(seed)
    outer = network.address("router")
    found = doctor(network, "inside", tmp_path / "state", ",".join(s.where for s in seeds))
    assert (
        f"NAT with one outer address: peers see {outer}, this machine is {INSIDE}"
        in (found["nat"]["found"])
    )
    reach, mapping = found["reach"], found["mapping"]
    if kind == "full cone":
        assert "endpoint-independent" in mapping["found"]
        assert "full cone" in found["filtering"]["found"]
        assert reach["found"].startswith(f"peers reach this node at {outer}:4390")
        assert reach["fix"] == f"start it with --public-addr {outer}:4390"
    elif kind == "restricted":
        assert "endpoint-independent" in mapping["found"]
        assert "keeps ports" in mapping["found"]
        assert "restricted" in found["filtering"]["found"]
        assert reach["found"].startswith("outbound only: will use relay")
    else:
        assert (mapping["status"], mapping["found"][:18]) == ("warn", "endpoint-dependent")
        assert "filtering" not in found, "where every peer sees another port there is none to try"
        assert reach["found"].startswith("outbound only: will use relay")
    assert reach["status"] == "warn"
    assert found["nat"]["status"] == ("ok" if kind == "full cone" else "warn")


@pytest.mark.parametrize("kind", ["restricted", "symmetric"])
def test_a_node_behind_a_translator_joins_and_trains(
    network: Network, tmp_path: Path, kind: str
) -> None:
    """Outbound only, through a relay where somebody has to call it; with work of its in rounds."""
    put_behind(network, "inside", "router", kind)
    open_, inside = (Machine(network, name, tmp_path) for name in ("one", "inside"))
    open_.start("start", *SETTINGS)
    await_up(open_)
    inside.start("start", "--peers", open_.where)
    await_merged(open_, inside)
    assert f"outbound only -> relay {open_.where}/{open_.peer}, dial-back ok" in inside.text
    assert json.loads(inside.api("/api/v1/state"))["node"]["reachability"].startswith(
        "outbound only, relay"
    )
    assert_same_bits(open_, inside)
    for machine in (inside, open_):
        machine.stop(signal.SIGTERM)
