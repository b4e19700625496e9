"""How much memory rounds take in real processes: at most two and a half times the fp32 vector."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_kit import benched
from swarm_kit import Record

from node.bench.settings import VECTORS

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells peaks"),
]

MEMBERS = 4
SIZE = 20_000_000  # elements: what a process takes for itself is to count for little
ROUNDS = 24  # a vector that a past round still holds shows now and then
CODECS = ("fp32", "fp16", "int8", "int4", "int1", "top12")  # one of each kind


@pytest.mark.parametrize("codec", CODECS)
def test_rounds_take_no_more_than_two_and_a_half_vectors(
    codec: str, tmp_path: Path, record_property: Record
) -> None:
    words = ["--size", str(SIZE), "--codec", codec, "--rounds", str(ROUNDS)]
    peaks = []
    for rounds in benched([words] * MEMBERS, tmp_path, within=240):
        assert len(rounds) == ROUNDS
        peaks.append(max(one["peak_bytes"] for one in rounds) / (4 * SIZE))
    record_property("peaks", peaks)
    assert max(peaks) <= VECTORS
