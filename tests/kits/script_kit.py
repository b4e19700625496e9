"""A script that takes part by ``node.join``, with a daemon that is played: no processes."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from trainer_kit import Script, apply, begin, merge

from node.script.parameters import named_parameters
from node.script.progress import ScriptProgress
from node.script.session import Joined
from node.trainer.channel import Command, Leaving, Report, Snapshot, Stop, Stopped, Terms
from node.trainer.framing import Unframer, frame
from node.trainer.layout import Layout
from node.trainer.leader import Leader
from node.trainer.parallel import Ranks
from node.trainer.shared import SharedVectors
from protocols.wire import decode_any

TARGET = 3


class Played:
    """A script with a model, linear by default, and the daemon that ``answer`` plays."""

    def __init__(
        self,
        answer: Callable[[Played, Report], list[Command]],
        evaluator: Callable[[], float] | None = None,
        overlap: int = 0,
        wait_s: float = 30.0,
        away: float = 1.0,
        trained: int = 0,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        model: Callable[[int, int], Any] = nn.Linear,
        **beginning: Any,
    ) -> None:
        """``trained``: steps that the optimizer has taken before the script joins."""
        # torch.manual_seed writes a stack trace down for each kind of GPU, which takes milliseconds
        torch.default_generator.manual_seed(0)
        self.device = torch.device(device)
        self.model = model(4, 3).to(self.device, dtype)
        self.ones = torch.ones(2, 4, device=self.device, dtype=dtype)  # all that it learns from
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        for _ in range(trained):
            self.inner_step()
        parameters = named_parameters(self.model)
        self.layout = Layout.of_module(self.model)
        self.vectors = SharedVectors.create(self.layout.size)
        self.base, self.sent = self.vectors.tensors()
        self.layout.flatten_into(parameters, self.base)
        self.base += away  # the swarm stands elsewhere than this script's model
        self.script = Script(lambda report: answer(self, report))
        self.script.commands = [
            Terms(overlap, wait_s),
            begin(target_steps=TARGET, slot=2, slots=5, **beginning),
        ]
        leader = Leader(self.script, self.vectors, 0.0, lambda: self.script.now)  # type: ignore[arg-type]
        progress = ScriptProgress(
            evaluator,
            parameters,
            self.optimizer,
            self.layout,
            Ranks.alone(self.device),
            leader,
            0,
        )
        progress.model = self.model
        self.joined = Joined(progress, None)
        self.joined.begin()

    @property
    def theta(self) -> Tensor:
        return self.layout.flatten_into(self.model, torch.empty(self.layout.size))

    def inner_step(self) -> Tensor:
        loss = self.model(self.ones).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def train(self, steps: int = 1) -> bool:
        going = True
        for _ in range(steps):
            going = self.joined.step(tokens=8, loss=self.inner_step())
        return going


def silent(played: Played, report: Report) -> list[Command]:
    return []


def committing(played: Played, report: Report) -> list[Command]:
    """A swarm of this island alone: each snapshot is merged at once."""
    if not isinstance(report, Snapshot):
        return []
    assert played.vectors.try_claim()
    merge(played.vectors)
    return [apply(report.round + 1, target_steps=TARGET)]


class Parting:
    """The node of an island that a script has joined with: it lets go who leaves."""

    def __init__(self) -> None:
        self.ours, self._end = socket.socketpair()  # the script's end first
        self.heard: list[Report] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        unframer = Unframer()
        while data := self._end.recv(1 << 16):
            for body in unframer.feed(data):
                with suppress(ValueError):  # what it does not listen to
                    self.heard.append(decode_any(body, Leaving, Stopped))
                    if isinstance(self.heard[-1], Leaving):
                        self._end.sendall(frame(Stop()))

    def ended(self, seconds: float = 30.0) -> bool:
        """Whether the script has closed the channel, or does so yet."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def close(self) -> None:
        with suppress(OSError):  # the script has, or this end
            self.ours.shutdown(socket.SHUT_RDWR)
        self.ours.close()
        self.ended()
        self._end.close()


class Interrupted:
    """Ctrl-C, or another signal, at the first call of something."""

    def __init__(self, then: Callable[..., Any], number: int = signal.SIGINT) -> None:
        self.then, self.number, self.calls = then, number, 0

    def __call__(self, *given: Any) -> Any:
        self.calls += 1
        if self.calls == 1:
            signal.raise_signal(self.number)
        return self.then(*given)
