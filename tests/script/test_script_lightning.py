"""What the callback for Lightning's ``Trainer`` tells the island, also of an exception."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from protocols.errors import OperatorError

pytest.importorskip("lightning")


class Island:
    """An island that takes note."""

    def __init__(self) -> None:
        self.left: list[type[BaseException] | None] = []
        self.losses: list[float] = []

    def step(self, tokens: int, loss: torch.Tensor) -> bool:
        self.losses.append(float(loss))
        return True

    def leave(self) -> None:
        self.left.append(None)

    def __exit__(self, kind: type[BaseException] | None, *given: object) -> None:
        self.left.append(kind)


def test_an_exception_leaves_the_swarm_as_with_does() -> None:
    """By itself: of several ranks the others may be anywhere, and would be waited for."""
    from node.script.lightning import SwarmCallback

    callback: Any = SwarmCallback(tokens_per_step=8)
    callback.island = island = Island()
    callback.on_exception(None, None, ZeroDivisionError())
    callback.on_exception(None, None, ZeroDivisionError())  # Lightning's own end fails, too
    assert island.left == [ZeroDivisionError]
    callback.island = island
    callback.on_train_end(None, None)
    assert island.left == [ZeroDivisionError, None]


@pytest.mark.parametrize("tokens", [0, -1])
def test_a_step_has_tokens(tokens: int) -> None:
    """Else the island would train, and nothing of it be merged."""
    from node.script.lightning import SwarmCallback

    with pytest.raises(OperatorError, match=f"tokens_per_step={tokens}") as caught:
        SwarmCallback(tokens_per_step=tokens)
    assert caught.value.code == "E204"


def test_a_module_may_have_several_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    from node.script import lightning

    class Trainer:
        optimizers: ClassVar = ["one", "other"]
        global_step = 0
        lr_scheduler_configs: ClassVar[list[Any]] = []

    given: list[Any] = []
    monkeypatch.setattr(lightning, "join", lambda _, *rest, **more: given.append((rest, more)))
    trainer: Any = Trainer()
    callback = lightning.SwarmCallback(tokens_per_step=8, name="a")
    callback.on_train_start(trainer, Any)
    assert given == [((["one", "other"],), {"name": "a"})]
    callback.on_train_start(trainer, Any)  # fit() again: its own checkpoint is there
    assert given[1][1] == {"name": "a", "resume": True}


@pytest.mark.filterwarnings("ignore")  # Lightning's own, of loaders and of what torch gives up
@pytest.mark.parametrize("accumulated", [1, 4])
def test_the_loss_is_that_of_the_module_where_gradients_are_accumulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulated: int
) -> None:
    """Lightning divides it for the gradient before any callback sees it."""
    import lightning

    from node.script.lightning import SwarmCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.tensor(3.0))

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.one + 0 * batch.sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    island = Island()
    monkeypatch.setattr("node.script.lightning.join", lambda *_, **__: island)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=2,
        accumulate_grad_batches=accumulated,
        callbacks=[SwarmCallback(tokens_per_step=8)],
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(torch.ones(16, 1)))  # type: ignore[arg-type]
    assert island.losses == [3.0, 3.0]
    assert island.left == [None]
