"""The learning rate of a library's loop goes to where the swarm is in the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as torchs
from torch.utils.data import DataLoader, Dataset, IterableDataset

from node.script.schedule import Schedule

MOST = 40  # steps of the schedules here


class Island:
    """An island, ahead of whose own steps the swarm gets; it notes what it trained with."""

    def __init__(self, position: int = 0, jumps: dict[int, int] | None = None) -> None:
        self.position, self.jumps = position, jumps or {}
        self.steps = 0

    def step(self, tokens: int, loss: object) -> bool:
        self.steps += 1
        self.position += 1 + self.jumps.get(self.steps, 0)
        return True

    def leave(self) -> None: ...

    def __exit__(self, *given: object) -> None: ...


MAKES: dict[str, Callable[[torch.optim.Optimizer], torchs.LRScheduler]] = {
    "linear": lambda o: torchs.LambdaLR(o, lambda step: 1 - step / MOST),
    "one cycle": lambda o: torchs.OneCycleLR(o, 0.1, total_steps=MOST + 1),
    "one cycle after warm-up": lambda o: torchs.SequentialLR(
        o,
        [torchs.LinearLR(o, total_iters=10), torchs.OneCycleLR(o, 0.1, total_steps=MOST - 9)],
        [10],
    ),
    "cosine after warm-up": lambda o: torchs.SequentialLR(
        o,
        [torchs.LinearLR(o, total_iters=10), torchs.CosineAnnealingLR(o, MOST - 10)],
        [10],
    ),
}


def rates(
    make: Callable[..., torchs.LRScheduler], island: Island | None = None, length: float = MOST
) -> list[float]:
    """Of each step that is taken, followed or (without an island) as the scheduler alone goes."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = make(optimizer)
    schedule = island and Schedule(scheduler, length, island.position)
    taken: list[float] = []
    going = True
    while going and len(taken) < MOST:
        taken.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
        if island is not None and schedule is not None:
            island.step(0, None)
            going = schedule.follow(island.position)
    return taken


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", MAKES)
def test_an_island_that_comes_late_or_falls_behind_anneals_with_the_others(kind: str) -> None:
    alone = rates(MAKES[kind])
    assert rates(MAKES[kind], Island(12, {5: 7})) == pytest.approx(alone[12:17] + alone[24:])
    assert rates(MAKES[kind], Island(0)) == alone


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("length", [-1, 0, math.inf])
def test_a_loop_that_does_not_know_its_length_is_not_ended_by_that(length: float) -> None:
    """Lightning says -1 of a stream; its own loop ends it."""
    make, alone = MAKES["linear"], rates(MAKES["linear"])
    assert rates(make, Island(0), length) == alone
    behind = rates(make, Island(12, {5: 7}), length)
    assert behind[: MOST - 19] == pytest.approx(alone[12:17] + alone[24:])
    assert len(behind) == MOST


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("length", [-1, 0, math.inf])
@pytest.mark.parametrize("kind", ["one cycle", "one cycle after warm-up"])
def test_a_scheduler_with_an_end_of_its_own_is_not_stepped_beyond_it(
    kind: str, length: float
) -> None:
    make = MAKES[kind]
    alone = rates(make)
    assert rates(make, Island(12, {5: 30}), length) == pytest.approx(alone[12:17])
    assert rates(make, Island(500), length) == alone


@pytest.mark.filterwarnings("error")
def test_of_a_scheduler_of_ones_own_it_is_not_asked_how_long_it_is() -> None:
    """It may have such a field for what it does not know."""

    class Own:
        total_steps, last_epoch = None, 0

    assert Schedule(Own(), -1, 0).follow(1)


def test_what_cannot_be_moved_is_told_of_once_and_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    for scheduler in (
        torchs.ReduceLROnPlateau(optimizer),
        torchs.ChainedScheduler([torchs.ExponentialLR(optimizer, 0.9)]),
        object(),
    ):
        before = optimizer.param_groups[0]["lr"]
        caplog.clear()
        schedule = Schedule(scheduler, MOST, 12)
        assert schedule.follow(30)
        assert schedule.follow(MOST + 30)  # it has its own end
        assert optimizer.param_groups[0]["lr"] == before
        (told,) = caplog.messages
        assert type(scheduler).__name__ in told


def test_a_schedule_that_is_shorter_than_the_run_begins_at_its_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert rates(MAKES["linear"], Island(5000)) == rates(MAKES["linear"])
    (told,) = caplog.messages
    assert "5000 inner steps into the run" in told
    assert "max_steps" in told


class Windows(Dataset[dict[str, Tensor]]):
    """Numbered examples."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.read.append(index)
        return {"x": torch.tensor([float(index)])}


class Trained:
    """What a ``Trainer`` has done: the rates of each train(), and the examples in order."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        islands: Iterable[Island],
        **arguments: Any,
    ) -> None:
        transformers = pytest.importorskip("transformers")
        from node.script import huggingface

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.one = nn.Parameter(torch.ones(1))

            def forward(self, x: Tensor) -> dict[str, Tensor]:
                return {"loss": (self.one * x).mean()}

        coming = iter(islands)
        self.rates: list[list[float]] = []
        noted = self.rates

        def join(model: nn.Module, optimizer: Any, **_: Any) -> Island:
            noted.append([])
            return next(coming)

        class Noting(transformers.TrainerCallback):  # type: ignore[misc]  # as in huggingface.py
            def on_pre_optimizer_step(self, *_: Any, **given: Any) -> None:
                noted[-1].append(given["optimizer"].param_groups[0]["lr"])

        monkeypatch.setattr(huggingface, "join", join)
        given = {"max_steps": MOST, "save_strategy": "no", **arguments}
        self.windows = Windows()
        self.trainer = transformers.Trainer(
            Model(),
            transformers.TrainingArguments(
                str(tmp_path),
                learning_rate=0.1,
                per_device_train_batch_size=1,
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
                **given,
            ),
            train_dataset=self.windows,
            callbacks=[huggingface.SwarmCallback(tokens_per_step=1), Noting()],
        )

    def train(self, **given: Any) -> list[float]:
        """The rates of one more train()."""
        self.trainer.train(**given)
        return self.rates[-1]


LINEAR = [0.1 * (1 - step / MOST) for step in range(MOST)]


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_a_trainer_that_comes_late_ends_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_late = Trained(monkeypatch, tmp_path, [Island()])
    assert never_late.train() == pytest.approx(LINEAR)
    late = Trained(monkeypatch, tmp_path, [Island(25, {5: 3})])
    assert late.train() == pytest.approx(LINEAR[25:30] + LINEAR[33:])


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_that_resumes_goes_on_where_the_swarm_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own checkpoint has the schedule as it was moved: it must not be moved there again."""
    saving = {"save_strategy": "steps", "save_steps": 10, "save_total_limit": 1}
    first = Trained(monkeypatch, tmp_path, [Island(20)], **saving)
    assert len(first.train()) == 20
    (checkpoint,) = (path for path in tmp_path.glob("checkpoint-*") if path.name.endswith("20"))
    more = Trained(monkeypatch, tmp_path, [Island(40)], max_steps=60)
    assert more.train(resume_from_checkpoint=str(checkpoint))[0] == pytest.approx(0)
    assert len(more.rates[-1]) == 20  # 20 steps of its own, from position 40 to 60
    without = Trained(monkeypatch, tmp_path, [Island(30)])
    assert without.train() == pytest.approx(LINEAR[30:])


@pytest.mark.filterwarnings("ignore")
def test_a_train_that_is_called_again_begins_a_schedule_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(monkeypatch, tmp_path, [Island(), Island(MOST), Island(10)])
    for _ in range(3):
        assert trained.train() == pytest.approx(LINEAR)


@pytest.mark.filterwarnings("ignore")
def test_the_order_of_batches_follows_from_data_seed_and_a_shared_one_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read: list[list[int]] = []
    for given in ({}, {}, {"data_seed": 1}, {"data_seed": 2}, {"seed": 7}):
        caplog.clear()
        trained = Trained(monkeypatch, tmp_path, [Island()], max_steps=8, **given)
        trained.train()
        read.append(trained.windows.read[:8])
        assert ("data_seed" in caplog.text) == (not given)
    assert read[0] == read[1]
    assert len({tuple(order) for order in read}) == 4


def trainer(folder: Path, callback: Any, **length: int) -> Any:
    """Lightning's, which shows and keeps nothing."""
    from lightning import Trainer

    return Trainer(
        accelerator="cpu",
        callbacks=[callback],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **length,
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_lightning_that_comes_late_ends_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: str
) -> None:
    lightning = pytest.importorskip("lightning")
    from node.script.lightning import SwarmCallback

    taken: list[float] = []

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.ones(1))

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            taken.append(self.optimizers().param_groups[0]["lr"])
            return (self.one * batch["x"]).mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = MAKES["linear"](optimizer)
            each = {"scheduler": scheduler, "interval": interval}
            return {"optimizer": optimizer, "lr_scheduler": each}

    monkeypatch.setattr("node.script.lightning.join", lambda *_, **__: Island(25, {5: 3}))
    trainer(tmp_path, SwarmCallback(tokens_per_step=8), max_steps=MOST).fit(
        Module(), DataLoader(Windows())
    )
    if interval == "step":
        assert taken == pytest.approx(LINEAR[25:30] + LINEAR[33:])
    else:  # an epoch is of the island's own data: it cannot be told what the swarm's would be
        assert taken == [0.1] * MOST


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("late", [0, 25])
def test_lightning_reads_a_stream_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    """Without ``max_steps`` it does not know how many steps that are."""
    lightning = pytest.importorskip("lightning")
    from node.script.lightning import SwarmCallback

    taken: list[float] = []

    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter(torch.ones(10, 1))

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.ones(1))

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            taken.append(self.optimizers().param_groups[0]["lr"])
            return (self.one * batch).mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            each = {"scheduler": MAKES["linear"](optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": each}

    island = Island(late, {})
    monkeypatch.setattr("node.script.lightning.join", lambda *_, **__: island)
    trainer(tmp_path, SwarmCallback(tokens_per_step=8), max_epochs=2).fit(
        Module(), DataLoader(Stream())
    )
    assert island.steps == len(taken) == 20
    assert taken[: MOST - late] == pytest.approx(LINEAR[late : late + 20])
