"""One island alone, as a real process: stopped, killed, resumed, asked, exported."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from swarm_kit import Island, islands, node, settings, until

from node.checkpoints.outer_files import read_newest
from node.interrupts import ECHO_S
from node.trainer.layout import Layout
from node.trainer.model import build
from node.trainer.settings import SETTINGS_FILE

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

H, ROUNDS = 20, 12
# what an island alone learns depends on no clock, as long as its trainer waits for each merge
RUN = settings(
    inner_steps=H, total_rounds=ROUNDS, min_grace_s=60, inner__total_steps=H * ROUNDS, seed=7
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Island:
    """A run that nothing happened to."""
    with islands(tmp_path_factory.mktemp("reference")) as made:
        island = made.new(*RUN)
        assert island.await_end(120) == 0, island.tail()
    assert island.losses().keys() >= set(range(1, H * ROUNDS + 1))
    assert all(len(seen) == 1 for seen in island.losses().values())
    assert island.rounds().keys() == set(range(ROUNDS))
    return island


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda s: s.name)
def test_a_restart_changes_no_loss(reference: Island, tmp_path: Path, number: signal.Signals):
    with islands(tmp_path) as made:
        island = made.new(*RUN)
        island.await_round(4, 90)
        # in the middle of a round, and well after the newest checkpoint
        steps = len(island.events("step"))
        until(lambda: len(island.events("step")) >= steps + H // 2, 30, "half a round more")
        island.signal(number)
        status = island.await_end(30)
        assert status == (0 if number == signal.SIGINT else -signal.SIGKILL), island.tail()
        checkpoint = island.events("checkpoint")[-1]
        stopped_at = max(island.losses())
        assert stopped_at < H * ROUNDS
        island.start("--resume")
        assert island.await_end(120) == 0, island.tail()
    again = island.since_start("step")
    # a checkpoint is made a step or two into its round; a kill costs what was done since
    assert H * checkpoint["round"] < again[0]["step"] <= stopped_at + 1
    if number == signal.SIGKILL:
        assert again[0]["step"] <= stopped_at
    assert [e["step"] for e in again] == list(
        range(again[0]["step"], again[0]["step"] + len(again))
    )
    seen, expected = island.losses(), reference.losses()
    for step in range(1, H * ROUNDS + 1):  # it trains on until it is told that the run is over
        assert set(seen[step]) == set(expected[step]), f"step {step}"
    assert {r: e["state"] for r, e in island.rounds().items()} == {
        r: e["state"] for r, e in reference.rounds().items()
    }


@pytest.mark.parametrize("mode", ["diloco", "btm"])
def test_a_run_that_is_over_says_so_again_and_starts_no_rank(tmp_path: Path, mode: str):
    with islands(tmp_path) as made:
        island = made.new("--mode", mode, *settings(inner_steps=4, total_rounds=1))
        assert island.await_end(120) == 0, island.tail()
        launched = island.dir / "logs" / SETTINGS_FILE
        launched.unlink()
        island.start("--resume")
        assert island.await_end(60) == 0, island.tail()
    (again,) = island.since_start("stopping")
    assert again["reason"] == "the run is over after 1 round"
    assert not launched.exists()


def test_a_terminal_that_is_closed_is_no_kill(tmp_path: Path):
    with islands(tmp_path) as made:
        island = made.new(*RUN)
        island.await_round(1, 90)
        for _ in range(2):  # of the kernel, and of the shell
            island.signal(signal.SIGHUP)
        assert island.await_end(60) == 0, island.tail()
        assert island.events("checkpoint")


def test_ctrl_c_once_saves_and_leaves(tmp_path: Path):
    with islands(tmp_path) as made:
        island = made.new(*RUN)
        island.await_round(1, 90)
        island.signal(signal.SIGINT)
        assert island.await_end(20) == 0, island.tail()
        assert island.processes() == []
        kinds = [event["kind"] for event in island.events()]
        assert kinds.index("stopping") < len(kinds) - 1 - kinds[::-1].index("checkpoint")
        done = max(island.rounds()) + 1
        assert read_newest(island.dir)[1].signed.manifest.seed == 7
        assert island.events("checkpoint")[-1]["round"] == done


def test_ctrl_c_twice_ends_at_once(tmp_path: Path):
    with islands(tmp_path) as made:
        island = made.new("--nproc", "2", *RUN)
        until(lambda: island.events("checkpoint"), 90, "a checkpoint")
        assert len(island.processes()) == 3
        for rank in set(island.processes()) - {island.process.pid}:
            os.kill(rank, signal.SIGSTOP)  # else it may have left before it counts as a second one
        island.signal(signal.SIGINT)
        until(lambda: island.events("stopping"), 5, "the first is heeded")
        no_echo = time.monotonic() + ECHO_S
        until(lambda: time.monotonic() > no_echo, 5, "another one is no echo of it")
        island.signal(signal.SIGINT)
        assert island.await_end(3) == 130, island.tail()
        until(lambda: not island.processes(), 5, "no rank outlives the daemon")
        assert island.api("status").returncode != 0
        done = max(island.rounds())
        island.start("--resume")  # nothing was left behind that is in the way
        island.await_round(done, 90)


def test_without_a_checkpoint_there_is_nothing_to_resume(tmp_path: Path):
    with islands(tmp_path) as made:
        island = made.new("--resume")
        assert island.await_end(60) == 1
        assert "E404: there is no checkpoint to resume from" in island.tail()


def test_status_health_and_metrics(tmp_path: Path):
    with islands(tmp_path) as made:
        island = made.new(*RUN)
        island.await_round(1, 90)
        answer = island.api("status", "--json")
        assert answer.returncode == 0, answer.stderr
        state = json.loads(answer.stdout)
        assert state["run"]["label"] == island.events("started")[-1]["run"]
        assert state["rounds"]["committed"] >= 1
        assert state["status"] == "active"
        assert state["run"]["label"] in island.api("status").stdout
        api = island.events("started")[-1]["api"]
        with urllib.request.urlopen(f"http://{api}/healthz", timeout=5) as healthy:
            assert healthy.status == 200
        with urllib.request.urlopen(f"http://{api}/metrics", timeout=5) as metrics:
            text = metrics.read().decode()
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#")
        assert float(values["swarm_round"]) >= 1
        island.signal(signal.SIGINT)
        assert island.await_end(20) == 0
        assert island.api("status").returncode != 0


def test_the_export_of_a_run_gives_its_logits(
    reference: Island, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "model"
    answer = node("export", str(folder), "--from", str(reference.dir), "--to", "hf")
    assert answer.returncode == 0, answer.stderr
    outer = read_newest(reference.dir)[1]
    config = outer.signed.manifest.model
    ours = build(config, 0)
    views = Layout.of_config(config).views(outer.base)
    ours.load_state_dict(views, strict=False)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    text = torch.tensor([list(b"def merge(parts): return a")])
    with torch.no_grad():
        expected, got = ours(text), theirs(text).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.5, "this model has learnt nothing"
