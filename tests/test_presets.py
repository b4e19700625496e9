"""The presets: valid, of the size they claim, and open to dotted changes."""

import pytest
from pydantic import ValidationError

from bootstrap.manifest import Manifest
from node.presets import PRESETS, preset
from node.trainer.layout import Layout

SIZES = {"tiny": 1.1e5, "small": 9.5e6, "125m": 125e6, "1b": 1e9, "8b": 8e9}


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
    with pytest.raises(ValueError, match="tiny, small, 125m, 1b, 8b"):
        preset("huge")
