"""Islands that train from a stream as real processes: killed and resumed, and two of them."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest
from swarm_kit import digests, islands, settings, until

from node.checkpoints.checkpoint import CheckpointStore

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]
pytest.importorskip("datasets")

ROUNDS, H = 8, 10
RUN = settings(
    inner_steps=H,
    total_rounds=ROUNDS,
    min_grace_s=60,
    inner__total_steps=H * ROUNDS,
    data__islands=2,
    data__seq_len=64,
    data__batch_size=4,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> str:
    """90 texts in three files, some 30 kB; so the run goes over its end."""
    folder = tmp_path_factory.mktemp("texts")
    chance = random.Random(0)
    for number in range(3):
        lines = []
        for _ in range(30):
            words = ["".join(chance.choices("abcde", k=4)) for _ in range(chance.randint(2, 140))]
            lines.append(json.dumps({"body": " ".join(words)}) + "\n")
        (folder / f"{number}.jsonl").write_text("".join(lines))
    return f"datasets:json?field=body&files={folder}/*.jsonl"


def test_a_killed_island_goes_on_where_it_was_in_the_stream(tmp_path: Path, place: str):
    with islands(tmp_path) as made:
        reference = made.new("--data", place, *RUN)
        victim = made.new("--data", place, *RUN)
        victim.await_round(3, 90)
        steps = len(victim.events("step"))
        until(lambda: len(victim.events("step")) >= steps + H // 2, 30, "half a round more")
        victim.signal(signal.SIGKILL)
        victim.await_end(30)
        victim.start("--resume")  # what it streams is remembered
        assert victim.await_end(150) == reference.await_end(150) == 0, victim.tail()
    assert {r: e["state"] for r, e in victim.rounds().items()} == {
        r: e["state"] for r, e in reference.rounds().items()
    }
    marks = next((victim.dir / "data-cache").glob("stream-*/marks")).read_text().split("\n")
    found = [json.loads(line) for line in marks if line]
    assert max(mark["mark"]["passes"] for mark in found) >= 1
    assert len(list((victim.dir / "data-cache").glob("stream-*/part-*.bin"))) <= 3


def test_two_islands_read_two_parts_of_the_same_stream(tmp_path: Path, place: str):
    with islands(tmp_path) as made:
        first = made.new("--data", place, "--nproc", "2", *RUN)
        second = made.new("--peers", first.await_up(), "--data", place)
        for island in (first, second):
            assert island.await_end(150) == 0, island.tail()
    assert all(len(states) == 1 for states in digests([first, second]).values())
    parts = {
        path.name.split("-")[2]
        for island in (first, second)
        for path in (island.dir / "data-cache").glob("stream-*/part-*.bin")
    }
    assert parts == {"0.bin", "1.bin"}


def test_where_a_round_is_one_arrival_an_island_reads_parts_by_number(tmp_path: Path, place: str):
    """Also one of two ranks, and one that is killed and resumed, which goes on in its own parts."""
    changes = ("--set", "rounds.total_rounds=5000", "--set", "rounds.min_grace_s=0")
    with islands(tmp_path) as made:
        first = made.new("--mode", "async", "--data", place, "--nproc", "2", *RUN, *changes)
        peer = first.await_up()
        second = made.new("--peers", peer, "--data", place, "--checkpoint-every", "2")
        folder = second.dir / "checkpoints"
        until(lambda: len(list(folder.glob("ckpt-*"))) > 1, 90, "checkpoints")
        second.signal(signal.SIGKILL)
        second.await_end(30)
        saved = CheckpointStore(folder).latest().checkpoint
        assert saved is not None
        left = json.loads((saved.path / "trainer" / "trainer.json").read_text())["batches"]
        assert len(left) >= 2
        second.start("--resume", "--peers", peer)
        until(lambda: len(second.since_start("round")) > 12, 120, "rounds after it has resumed")
    assert all(len(states) == 1 for states in digests([first, second]).values())
    made_parts = [
        int(path.name.split("-")[1])
        for path in (second.dir / "data-cache").glob("stream-*/part-*-0.bin")
    ]
    # of three batches each: it was given none from before what it had when it was saved
    assert min(made_parts) >= left[0] // 3
