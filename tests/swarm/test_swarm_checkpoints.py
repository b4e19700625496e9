"""Checkpoints of real nodes: killed while they are written, copied elsewhere, read in shards."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from swarm_kit import Island, islands, settings, until

from node.checkpoints.checkpoint import CheckpointStore

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

RUN = settings(
    inner_steps=6, total_rounds=12, min_grace_s=60, inner__total_steps=72, codec="int2", seed=5
)


def finished(island: Island) -> dict[int, str]:
    assert island.await_end(150) == 0, island.tail()
    return {r: e["state"] for r, e in island.rounds().items()}


def test_kills_in_the_middle_of_saving_change_nothing(tmp_path: Path):
    """SIGKILL while a draft is being written; each time it goes on from a whole checkpoint."""
    with islands(tmp_path) as made:
        reference, victim = made.new(*RUN), made.new(*RUN)
        folder = victim.dir / "checkpoints"
        killed = 0
        for _ in range(4):
            until(
                lambda: any(folder.glob(".draft-*/trainer/*")) or not victim.running,
                90,
                "a draft with the trainer's files",
            )
            if not victim.running:
                break
            victim.kill()
            killed += 1
            whole = CheckpointStore(folder).latest()
            assert not whole.damaged
            victim.start(*(("--resume",) if whole.checkpoint else RUN))
        assert killed
        assert finished(victim) == finished(reference)


def test_a_lost_disk_is_made_good_by_the_copy(tmp_path: Path):
    copy = f"file://{tmp_path / 'copy'}"
    with islands(tmp_path) as made:
        reference = made.new(*RUN)
        lost = made.new("--checkpoint-copy", copy, "--checkpoint-every", "1", *RUN)
        lost.await_round(4, 120)
        lost.signal(signal.SIGKILL)
        lost.await_end(30)
        assert any((tmp_path / "copy").glob("ckpt-*/checkpoint.json"))
        shutil.rmtree(lost.dir / "checkpoints")
        (lost.dir / "evaluation.bin").unlink()
        lost.start("--resume", "--checkpoint-copy", copy)
        assert finished(lost) == finished(reference)


def test_ranks_come_and_go_between_lives(tmp_path: Path):
    """One rank, then four, then two: each life reads what the one before wrote in its shards."""
    with islands(tmp_path) as made:
        island = made.new("--rounds", "2", *RUN)
        assert island.await_end(120) == 0, island.tail()
        for ranks in ("4", "2"):
            island.start("--resume", "--nproc", ranks, "--rounds", "2")
            assert island.await_end(150) == 0, island.tail()
            newest = CheckpointStore(island.dir / "checkpoints").latest().checkpoint
            assert newest is not None
            assert len(list(newest.path.glob("trainer/*.safetensors"))) == int(ranks)
        assert set(island.rounds()) >= set(range(6))
        losses = island.losses()
        assert losses[max(losses)][-1] < losses[1][0]


def test_the_loss_of_the_newest_stays_known_where_no_round_follows(tmp_path: Path):
    """Resumed and ended within the next round: the same parameters are in it, evaluated before."""

    def newest(island: Island) -> tuple[int, int, float | None]:
        found = CheckpointStore(island.dir / "checkpoints", owns=False).latest().checkpoint
        assert found is not None
        return found.facts.round, found.facts.step, found.facts.validation

    with islands(tmp_path) as made:
        island = made.new("--rounds", "2", *settings(inner_steps=6, eval_every=1))
        assert island.await_end(120) == 0, island.tail()
        round_, step, loss = newest(island)
        assert loss is not None
        island.start("--resume", "--inner-steps", "20000")
        until(lambda: island.since_start("step"), 90, "an inner step", island.tail)
        island.signal(signal.SIGINT)
        island.await_end(90)
        again = newest(island)
        assert again[0] == round_
        assert again[1] > step
        assert again[2] == loss
