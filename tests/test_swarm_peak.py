"""How much memory rounds take in real processes: at most two and a half times the fp32 vector."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from swarm_kit import Record

from node.bench.settings import VECTORS

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells peaks"),
]

MEMBERS = 4
SIZE = 20_000_000  # elements: what a process takes for itself is to count for little
ROUNDS = 4
CODECS = ("fp32", "fp16", "int8", "int4", "int1", "top12")  # one of each kind


@pytest.mark.parametrize("codec", CODECS)
def test_rounds_take_no_more_than_two_and_a_half_vectors(
    codec: str, tmp_path: Path, record_property: Record
) -> None:
    words = ["--members", str(MEMBERS), "--size", str(SIZE), "--codec", codec]
    running: list[subprocess.Popen[str]] = []
    peers, peaks = "", []
    try:
        for _ in range(MEMBERS):
            process = subprocess.Popen(
                [
                    sys.executable, "-m", "node", "bench", *words, "--rounds", str(ROUNDS),
                    "--json", "--listen", "127.0.0.1:0", *(("--peers", peers) if peers else ()),
                ],
                stdout=subprocess.PIPE, text=True, cwd=tmp_path,
            )  # fmt: skip
            running.append(process)
            if not peers:
                assert process.stdout is not None
                opened = json.loads(process.stdout.readline())
                peers = f"{opened['address']}/{opened['peer']}"
        for process in running:
            out, _ = process.communicate(timeout=240)
            lines = [json.loads(line) for line in out.splitlines()]
            rounds = [line for line in lines if line["event"] == "round"]
            assert len(rounds) == ROUNDS
            peaks.append(max(one["peak_bytes"] for one in rounds) / (4 * SIZE))
    finally:
        for process in running:
            process.kill()
    record_property("peaks", peaks)
    assert max(peaks) <= VECTORS
