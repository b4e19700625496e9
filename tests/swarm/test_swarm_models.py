"""Models and data of others in a real swarm: transformers, tokenizers, token folders, imports."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from data_kit import folder, serving, tokenizer_bytes
from hf_kit import GPT2, QWEN
from swarm_kit import Island, Islands, islands, node, settings, until

from node.checkpoints.outer_files import read_newest
from node.data.tokenizer import FileTokenizer
from node.trainer.layout import Layout
from node.trainer.model import build

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

ROUNDS = 4
TINY: dict[str, Any] = {
    "inner_steps": 8,
    "total_rounds": ROUNDS,
    "min_grace_s": 60,
    "inner__total_steps": 8 * ROUNDS,
    "data__seq_len": 32,
}


LONG = TINY | {"total_rounds": 2000, "inner__total_steps": 16_000}


def leave_together(made: Islands, first: Island, second: Island) -> None:
    """Wait until both have trained together, end them, and compare all states."""
    made.await_office(first, 2, 200)
    first.await_round(max(first.rounds()) + 3, 100)
    for island in (second, first):
        island.signal(signal.SIGINT)
        assert island.await_end(60) == 0, island.tail()
    ours, theirs = states(first, second)
    both = ours.keys() & theirs.keys()
    assert len(both) >= 3
    assert {r: ours[r] for r in both} == {r: theirs[r] for r in both}
    assert second.events("step")


def states(*all_islands: Any) -> list[dict[int, str]]:
    return [{r: e["state"] for r, e in island.rounds().items()} for island in all_islands]


@pytest.mark.parametrize("plain", [GPT2, QWEN], ids=["gpt2", "qwen2"])
def test_two_islands_train_a_model_of_transformers(tmp_path: Path, plain: dict[str, Any]):
    """One of them in two ranks; then it is exported, and another run starts from the export."""
    transformers = pytest.importorskip("transformers")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(plain | {"vocab_size": 600}))
    tokens = folder(tmp_path / "tokens", bpe=True)
    with islands(tmp_path) as made:
        first = made.new("--hf-config", str(config), "--data", str(tokens), *settings(**LONG))
        address = first.await_up()
        second = made.new("--peers", address, "--data", str(tokens), "--nproc", "2")
        leave_together(made, first, second)
        assert (second.dir / "tokenizer.json").read_bytes() == tokenizer_bytes()
        losses = first.losses()
        assert losses[max(losses)][0] < losses[1][0]
        done = node("export", str(tmp_path / "out"), "--from", str(first.dir))
        assert done.returncode == 0, done.stderr
        outer = read_newest(first.dir)[1]
        manifest = outer.signed.manifest
        assert (manifest.model.kind, manifest.model.vocab_size) == ("hf", 600)
        model = build(manifest.model, 0)
        Layout.of_module(model).load_from(outer.base, model)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        assert (tmp_path / "out" / "tokenizer.json").read_bytes() == tokenizer_bytes()
        ids = torch.arange(24).view(1, -1)
        with torch.no_grad():
            assert torch.equal(model(ids), loaded(ids).logits)
        again = made.new(
            "--init-from", str(tmp_path / "out"), "--data", str(tokens), *settings(**TINY)
        )
        again.await_round(0, 120)
        validated = [e["validation_loss"] for e in again.events("validation")]
        newest = int(max((first.dir / "checkpoints").glob("ckpt-*")).name[5:]) - 1
        last = next(e for e in first.events("round") if e["round"] == newest)["validation_loss"]
        assert validated[0] == pytest.approx(last, abs=1e-4)  # it begins where that one ended


def test_a_tokenizer_reaches_joiners_and_a_folder_on_the_web_feeds_them(tmp_path: Path):
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(tokenizer_bytes())
    folder(tmp_path / "www" / "tokens", bpe=True)
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"A line of its own, number {i}, and so on." for i in range(5000)))
    with serving(tmp_path / "www") as server, islands(tmp_path) as made:
        first = made.new(
            "--tokenizer", str(tokenizer), "--data", f"{server.url}/tokens",
            *settings(**LONG, model__attention="document", data__pool_windows=64),
        )  # fmt: skip
        address = first.await_up()
        second = made.new("--peers", address, "--data", str(text))
        leave_together(made, first, second)
        manifest = read_newest(first.dir)[1].signed.manifest
        assert manifest.data.tokenizer == FileTokenizer(tokenizer_bytes()).digest
        assert manifest.model.vocab_size == 600
        assert any((first.dir / "data-cache").iterdir())


def test_a_restart_reads_on_where_it_was(tmp_path: Path):
    """Documents apart, a token folder, pools: with a kill and without, the same bits."""
    tokens = folder(tmp_path / "tokens")
    words = (
        "--data", str(tokens),
        *settings(**TINY, seed=3, model__attention="document", data__pool_windows=64),
    )  # fmt: skip
    with islands(tmp_path) as made:
        reference, killed = made.new(*words), made.new(*words)
        killed.await_round(1, 120)
        until(lambda: killed.events("checkpoint"), 60, "a checkpoint")
        killed.signal(signal.SIGKILL)
        killed.await_end(30)
        killed.start("--resume")
        assert killed.await_end(120) == 0, killed.tail()
        assert reference.await_end(120) == 0, reference.tail()
        assert states(reference)[0] == states(killed)[0]
