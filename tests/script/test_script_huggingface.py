"""What the callback for Hugging Face's ``Trainer`` tells the island of its steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from protocols.errors import OperatorError

transformers = pytest.importorskip("transformers")


class Steps:
    """An island that takes note."""

    position = 0

    def __init__(self) -> None:
        self.losses: list[float | None] = []

        self.left: list[type[BaseException] | None] = []

    def step(self, tokens: int, loss: float | None) -> bool:
        self.losses.append(loss)
        return True

    def leave(self) -> None:
        self.left.append(None)

    def __exit__(self, kind: type[BaseException] | None, *given: object) -> None:
        self.left.append(kind)


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


def test_an_exception_that_the_trainer_tells_nobody_of_leaves_the_swarm() -> None:
    from node.script.huggingface import SwarmCallback

    def train() -> None:
        raise ZeroDivisionError

    swarm = SwarmCallback(tokens_per_step=8)
    swarm.island = island = Steps()
    with pytest.raises(ZeroDivisionError), swarm:
        train()
    assert island.left == [ZeroDivisionError]


def test_training_that_begins_again_leaves_what_an_exception_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from node.script.huggingface import SwarmCallback

    first, second = islands = [Steps(), Steps()]
    joining = iter(islands)
    resumes: list[bool] = []

    def join(*_: object, resume: bool = False) -> Steps:
        resumes.append(resume)
        return next(joining)

    monkeypatch.setattr("node.script.huggingface.join", join)
    state, control = transformers.TrainerState(), transformers.TrainerControl()
    swarm = SwarmCallback(tokens_per_step=8)
    arguments = transformers.TrainingArguments(report_to=[], use_cpu=True)
    for _ in islands:
        swarm.on_train_begin(arguments, state, control, model=None, optimizer=None)
    assert (first.left, second.left) == ([None], [])
    assert swarm.island is second
    assert resumes == [False, True]  # the first one's checkpoint is there


@pytest.mark.parametrize("last", ["on_epoch_end", "on_save", "on_log"])
def test_the_swarm_is_left_before_an_older_model_is_loaded(last: str) -> None:
    """``load_best_model_at_end`` does so after these and before ``on_train_end``."""
    from node.script.huggingface import SwarmCallback

    callback: Any = SwarmCallback(tokens_per_step=8)
    callback.island = island = Steps()
    state, control = transformers.TrainerState(), transformers.TrainerControl()
    for event in ("on_save", "on_epoch_end"):
        getattr(callback, event)(None, state, control)
    callback.on_log(None, state, control, logs={"loss": 1.0})
    assert not island.left
    control.should_training_stop = True
    getattr(callback, last)(None, state, control, logs={"train_loss": 1.0})
    assert island.left == [None]


def test_somebody_has_to_count_the_tokens_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every step would be of none: the island would train, and nothing of it be merged."""
    from node.script.huggingface import SwarmCallback

    def arguments(**given: Any) -> Any:
        return transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, **given)

    monkeypatch.setattr("node.script.huggingface.join", lambda *_, **__: Steps())
    state, control = transformers.TrainerState(), transformers.TrainerControl()
    swarm = SwarmCallback(peers=["127.0.0.1:1"])
    with pytest.raises(OperatorError, match="nobody counts the tokens") as caught:
        swarm.on_train_begin(arguments(), state, control, model=None, optimizer=None)
    assert caught.value.code == "E204"
    counting = arguments(include_num_input_tokens_seen=True)
    swarm.on_train_begin(counting, state, control, model=None, optimizer=None)
    assert swarm.island is not None
