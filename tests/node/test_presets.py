"""The presets: valid, of the size they claim, and open to dotted changes."""

from pathlib import Path
from pydoc_data import topics

import pytest
import torch
from pydantic import ValidationError

from bootstrap.manifest import Manifest
from node.presets import PRESETS, preset
from node.schedule import learning_rate
from node.trainer.corpus import collect
from node.trainer.cross_entropy import mean_loss, summed_loss
from node.trainer.data import TrainingData, open_tokens
from node.trainer.evaluate import evaluate, shard_tokens
from node.trainer.layout import Layout
from node.trainer.model import build
from node.trainer.optim import clip_gradients, make_optimizer, set_learning_rate

SIZES = {
    "tiny": 1.1e5,
    "tiny-streaming": 2.0e5,
    "small": 9.5e6,
    "125m": 125e6,
    "350m": 331e6,
    "1b": 1e9,
    "3b": 2.82e9,
    "8b": 8e9,
    "70b": 70.55e9,
    "moe-tiny": 1.89e5,
    "moe-1b": 1.06e9,
    "moe-8x7b": 46.7e9,
}


@pytest.mark.parametrize("name", PRESETS)
def test_sizes(name):
    manifest = preset(name)
    assert Layout.of_config(manifest.model).size == pytest.approx(SIZES[name], rel=0.05)
    rounds = manifest.rounds
    assert manifest.inner.total_steps == pytest.approx(
        rounds.inner_steps * rounds.total_rounds, rel=0.1
    )


def test_tiny_is_the_default():
    assert preset("tiny") == Manifest()


def test_changes_are_dotted_and_leave_the_preset_alone():
    before = preset("small")
    changed = preset("small", {"inner.lr": "0.002", "name": "mine", "evaluation.sequences": 5})
    assert (changed.inner.lr, changed.name, changed.evaluation.sequences) == (0.002, "mine", 5)
    assert changed.inner.total_steps == before.inner.total_steps
    assert changed.model == before.model
    assert preset("small") == before


@pytest.mark.parametrize(
    "changes",
    [{"inner.lrr": 1}, {"colour": "red"}, {"inner.lr": -1}, {"name.x": 1}, {"a.b.c": 1}],
)
def test_wrong_changes_are_refused(changes):
    for name in ("tiny", "small"):
        with pytest.raises(ValidationError):
            preset(name, changes)


def test_an_unknown_preset_names_the_known():
    with pytest.raises(ValueError, match=r"tiny, tiny-streaming, small, .*8b, 70b, moe-tiny"):
        preset("huge")


def test_tiny_learns(tmp_path: Path):
    """All pure parts together, on a smaller corpus: 6.0 to about 2.6 in 80 inner steps."""
    torch.set_num_threads(1)
    file = tmp_path / "topics.txt"
    file.write_text("\n\n".join(sorted(set(topics.topics.values()))), encoding="utf-8")
    manifest = preset("tiny", {"data.recipe": "text", "data.path": str(file)})
    data, inner = manifest.data, manifest.inner
    corpus = collect(data, tmp_path / "cache")
    shard = corpus.make_shard(16, data.seq_len)
    tokens = open_tokens(corpus.training_file(shard, data.seq_len))
    training = TrainingData.of(manifest, tokens)
    model, windows = build(manifest.model, manifest.seed), shard_tokens(shard, data.seq_len)
    optimizer = make_optimizer(model, inner)

    def sums(some: torch.Tensor) -> torch.Tensor:
        return summed_loss(model(some[:, :-1]), some[:, 1:], by_sequence=True)

    assert 5.5 < evaluate(sums, windows) < 6.5
    for step in range(80):
        inputs, targets = training.batch(0, 0, 1, step)
        optimizer.zero_grad()
        mean_loss(model(inputs), targets).backward()
        assert clip_gradients(model.parameters(), inner.clip_norm).isfinite()
        set_learning_rate(optimizer, learning_rate(inner, step))
        optimizer.step()
    assert evaluate(sums, windows) < 3.0
