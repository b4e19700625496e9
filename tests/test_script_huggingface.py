"""What the callback for Hugging Face's ``Trainer`` tells the island of its steps."""

from __future__ import annotations

import math
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")


class Steps:
    """An island that takes note."""

    def __init__(self) -> None:
        self.losses: list[float | None] = []

    def step(self, tokens: int, loss: float | None) -> bool:
        self.losses.append(loss)
        return True


def test_a_loss_that_was_logged_counts_once() -> None:
    """A NaN would else be one of every step until the next line of the log, and bring it back."""
    from node.script.huggingface import SwarmCallback

    callback: Any = SwarmCallback(tokens_per_step=8)
    callback.island = island = Steps()
    state, control = transformers.TrainerState(), transformers.TrainerControl()
    logged = {2: {"loss": math.inf}, 5: {"loss": 1.5}, 6: {"eval_loss": 9.0}}
    for step in range(1, 9):
        callback.on_step_end(None, state, control)  # the Trainer calls it before it logs the step
        if step in logged:
            state.log_history.append(logged[step])
            callback.on_log(None, state, control, logs=logged[step])
    assert island.losses == [None, None, math.inf, None, None, 1.5, None, None]
