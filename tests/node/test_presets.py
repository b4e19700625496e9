"""The presets: valid, of the size they claim, and open to dotted changes."""

from pathlib import Path
from pydoc_data import topics
from typing import get_args

import pytest
import torch
from pydantic import ValidationError

from bootstrap.manifest import Manifest
from bootstrap.manifest_rounds import MOST_COUNT, Mode
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


@pytest.mark.parametrize("name", PRESETS)
def test_the_schedule_ends_with_the_run(name):
    assert preset(name, {"inner.lr": "0.002"}).inner.total_steps == preset(name).inner.total_steps
    longer = preset(name, {"rounds.total_rounds": "2000"})
    steps = 2000 * longer.rounds.inner_steps
    assert longer.inner.total_steps == steps
    assert longer.inner.warmup_steps == preset(name).inner.warmup_steps
    halfway, end = (learning_rate(longer.inner, at) / longer.inner.lr for at in (steps // 2, steps))
    assert (halfway, end) == pytest.approx((0.55, longer.inner.min_lr_ratio), abs=0.03)
    own = preset(name, {"rounds.inner_steps": 80, "inner.total_steps": "77"})
    assert own.inner.total_steps == 77


def test_a_short_run_warms_up_no_longer_than_it_is():
    few = preset("125m", {"rounds.total_rounds": 2})
    assert (few.inner.total_steps, few.inner.warmup_steps) == (200, 200)
    assert preset("125m", {"rounds.total_rounds": 2, "inner.warmup_steps": 300}).inner == (
        few.inner.model_copy(update={"warmup_steps": 300})
    )
    endless = preset("tiny", {"rounds.total_rounds": MOST_COUNT})
    assert endless.inner.total_steps == MOST_COUNT


@pytest.mark.parametrize("mode", get_args(Mode))
def test_a_mode_alone_has_the_schedule_that_it_had(mode):
    assert preset("tiny", {"mode": mode}) == Manifest(mode=mode)
    if mode == "btm":  # branches meet once, by default before the schedule's end: nobody says why
        assert preset("tiny", {"mode": mode, "rounds.inner_steps": 9000}).inner.total_steps == 3000
        return
    longer = preset("tiny", {"mode": mode, "rounds.total_rounds": 6000})
    assert longer.inner.total_steps == longer.rounds.inner_steps * 6000


@pytest.mark.parametrize(
    "changes",
    [{"inner.lrr": 1}, {"colour": "red"}, {"inner.lr": -1}, {"name.x": 1}, {"a.b.c": 1}],
)
def test_wrong_changes_are_refused(changes):
    for name in ("tiny", "small"):
        with pytest.raises(ValidationError):
            preset(name, changes)


@pytest.mark.parametrize(
    ("key", "text", "found"),
    [
        ("rounds.codecs", '["int8", "int2"]', ("int8", "int2")),
        ("rounds.codecs", "['int4']", ("int4",)),
        ("inner.betas", "[0.8, 0.99]", (0.8, 0.99)),
    ],
)
def test_lists_are_given_as_in_a_file(key, text, found):
    table, name = key.split(".")
    assert getattr(getattr(preset("small", {key: text}), table), name) == found
    assert preset("small", {key: found}) == preset("small", {key: text})


@pytest.mark.parametrize(
    "text",
    ["int4,int2", "int4", "", "[int4]", "[", '["int4"]\nlist2 = 1', "[" * 900, "[1," * 900],
)
def test_what_is_no_list_is_refused_with_the_form_that_one_has(text):
    with pytest.raises(ValueError, match=r"rounds\.codecs is a list") as caught:
        preset("tiny", {"rounds.codecs": text})
    told = str(caught.value)
    assert told.endswith("""--set 'rounds.codecs=["int4", "int2"]'""")
    assert len(told) < 250
    with pytest.raises(ValidationError):
        preset("tiny", {"rounds.codecs": '["int5"]'})


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
