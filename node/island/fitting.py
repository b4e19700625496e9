"""How many sequences at once fitted into memory after more had not: for the node's next start.

Where there are several ranks each try that is too large costs a start of all of them, which takes
minutes with a large model. Layouts of an island whose hosts come and go have notes of their own.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from node.trainer.dims import ParallelDims
from node.trainer.settings import TrainerSettings
from protocols.files import READABLE, replacing

MAX_FILE = 16384
LAYOUTS = 8  # of which there are notes: an island whose hosts come and go has several


class _Facts(BaseModel):
    """What the memory of a step depends on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str  # hash of the manifest's section
    optimizer: str
    seq_len: int
    batch_size: int
    asked: int  # of the operator, sequences at a time; 0: a rank's share
    layout: ParallelDims
    device: str
    memory: int  # bytes of one device
    bf16: bool | None
    recompute: str
    offload: bool
    compile: bool
    torch: str

    @classmethod
    def of(cls, settings: TrainerSettings, asked: int, memory: int) -> _Facts:
        manifest = settings.manifest
        return cls(
            model=blake3(manifest.model.model_dump_json().encode()).hexdigest(),
            optimizer=manifest.inner.optimizer,
            seq_len=manifest.data.seq_len,
            batch_size=manifest.data.batch_size,
            asked=asked,
            layout=settings.layout,
            device=settings.device,
            memory=memory,
            bf16=settings.bf16,
            recompute=settings.recompute,
            offload=settings.offload,
            compile=settings.compile,
            torch=torch.__version__,
        )


class _Note(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    micro_batch: int = Field(ge=1)
    facts: _Facts


class _Notes(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    notes: tuple[_Note, ...] = Field(max_length=LAYOUTS)  # the newest is first


@dataclass
class Fitting:
    """The notes of it by layout, a file.

    ``asked``: the micro-batch that the operator has given, or 0; ``memory``: of one device, bytes.
    """

    path: Path
    asked: int
    memory: int
    _noted: int = field(default=0, init=False)

    def known(self, settings: TrainerSettings) -> int:
        """The micro-batch that an earlier start with the same settings came down to; 0: none."""
        facts, self._noted = _Facts.of(settings, self.asked, self.memory), 0
        for note in self._read():
            if note.facts == facts and note.micro_batch < self._most(settings):
                self._noted = note.micro_batch
        return self._noted

    @property
    def told(self) -> str:
        """For people, what was known."""
        text = f"{self._noted} sequences at a time: memory was short for more at an earlier start"
        return f"{text}; to try more remove {self.path}"

    def stepped(self, settings: TrainerSettings, micro_batch: int) -> None:
        """A step was taken with ``micro_batch`` sequences at once: note it if more did not fit."""
        if micro_batch == self._noted or micro_batch >= self._most(settings):
            return
        self._noted = micro_batch
        facts = _Facts.of(settings, self.asked, self.memory)
        others = [note for note in self._read() if note.facts.layout != facts.layout]
        notes = _Notes(notes=(_Note(micro_batch=micro_batch, facts=facts), *others[: LAYOUTS - 1]))
        written = replacing(self.path, mode=READABLE, durable=False)
        with suppress(OSError), written as file:  # a full disk: the next start has to find out anew
            file.write(notes.model_dump_json(indent=1).encode())

    def _read(self) -> tuple[_Note, ...]:
        with suppress(OSError, ValidationError), self.path.open("rb") as file:
            return _Notes.model_validate_json(file.read(MAX_FILE)).notes
        return ()

    def _most(self, settings: TrainerSettings) -> int:
        return self.asked or settings.manifest.data.batch_size
