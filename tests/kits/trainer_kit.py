"""A tiny run, and a trainer driven without processes: commands from a script, time from a fake."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bootstrap.manifest import Data, Inner, Manifest, Model
from bootstrap.manifest_rounds import Rounds
from node.modes import by_outer_steps
from node.trainer.channel import Apply, Begin, Command, Report, Snapshot, StepDone, Stop
from node.trainer.layout import Layout, initial_vector
from node.trainer.leader import Leader
from node.trainer.loop import Trainer
from node.trainer.parallel import Ranks
from node.trainer.settings import TrainerSettings
from node.trainer.shared import SharedVectors

TARGET = 4  # inner steps a round


def tiny_manifest(**rounds: Any) -> Manifest:
    return Manifest(
        model=Model(
            d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, d_ff=32, max_seq_len=16, vocab_size=256
        ),
        data=Data(seq_len=16, batch_size=4),
        inner=Inner(warmup_steps=2, total_steps=100),
        rounds=Rounds(inner_steps=40, **rounds),
    )


def tiny_settings(directory: Path, manifest: Manifest | None = None, **changes: Any) -> Any:
    directory.mkdir(parents=True, exist_ok=True)
    text = bytes(random.Random(0).choices(b"abcdefgh ", k=8000))
    (directory / "tokens").write_bytes(text[1000:])
    (directory / "shard").write_bytes(text[: 17 * 8])
    values = {
        "manifest": manifest or tiny_manifest(),
        "tokens": directory / "tokens",
        "evaluation": directory / "shard",
        "wait_s": 30.0,
        **changes,
    }
    return TrainerSettings(**values)


def tiny_vectors(manifest: Manifest) -> SharedVectors:
    vectors = SharedVectors.create(Layout.of_manifest(manifest).size)
    fragments = manifest.rounds.fragments
    initial_vector(manifest.model, manifest.seed, vectors.tensors()[0], fragments)
    return vectors


def begin(**changes: Any) -> Begin:
    values: dict[str, Any] = {
        "round": 0,
        "target_steps": TARGET,
        "slot": 0,
        "slots": 1,
        "step": 0,
        "tokens": 0,
        "resume": "",
        "rewarm": False,
        "evaluate": False,
    }
    return Begin(**values | changes)


def apply(round: int, **changes: Any) -> Apply:
    values: dict[str, Any] = {
        "round": round,
        "target_steps": TARGET,
        "slot": 0,
        "slots": 1,
        "contributed": True,
        "reset": False,
        "evaluate": False,
    }
    return Apply(**values | changes)


def merge(vectors: SharedVectors) -> None:
    """A committed round of one island, as the daemon does it: base moves most of the way."""
    base, sent = vectors.tensors()
    base += 0.7 * (sent - base)


class Script:
    """The channel's other end: answers reports with commands. Waiting advances a fake clock."""

    def __init__(self, answer: Callable[[Report], list[Command]]) -> None:
        self.answer = answer
        self.commands: list[Command] = []
        self.reports: list[Report] = []
        self.now = 0.0
        self.waited = 0.0
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def send(self, report: Report) -> None:
        self.reports.append(report)
        self.commands += self.answer(report)

    def receive(self, timeout: float) -> Command | None:
        if self.commands:
            return self.commands.pop(0)
        self.now += timeout
        self.waited += timeout
        return None

    def of(self, kind: type[Any]) -> list[Any]:
        return [report for report in self.reports if isinstance(report, kind)]

    @property
    def losses(self) -> list[float | None]:
        return [report.loss for report in self.of(StepDone)]


class Bench:
    """One trainer with one rank in this process. ``answer`` plays the daemon."""

    def __init__(
        self,
        directory: Path,
        answer: Callable[[Bench, Report], list[Command]],
        **changes: Any,
    ) -> None:
        device = torch.device(changes.get("device", "cpu"))
        torch.set_num_threads(1)
        self.settings = tiny_settings(directory, **changes)
        self.vectors = tiny_vectors(self.settings.manifest)
        self.script = Script(lambda report: answer(self, report))
        leader = Leader(
            self.script,  # type: ignore[arg-type]
            self.vectors,
            self.settings.wait_s,
            lambda: self.script.now,
            bounded=by_outer_steps(self.settings.manifest),
        )
        self.trainer = Trainer(self.settings, Ranks.alone(device), leader)

    def run(self, *commands: Command) -> Script:
        self.script.commands += commands
        self.trainer.run()
        return self.script

    @property
    def theta(self) -> torch.Tensor:
        out = torch.empty(self.vectors.size)
        return self.trainer.layout.flatten_into(self.trainer.engine.parts[0], out)


def committing(rounds: int) -> Callable[[Bench, Report], list[Command]]:
    """A daemon whose rounds all commit at once, and which stops after so many."""

    def answer(bench: Bench, report: Report) -> list[Command]:
        if not isinstance(report, Snapshot):
            return []
        assert bench.vectors.try_claim()
        merge(bench.vectors)
        last = report.round + 1 == rounds
        return [apply(report.round + 1), *([Stop()] if last else [])]

    return answer
