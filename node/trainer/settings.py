"""What the daemon tells its ranks at their start: one JSON file, read by every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from bootstrap.manifest import Manifest

# Exit statuses of a rank, so that a rank without a channel can say why it ended as well.
EXIT_STOPPED = 0
EXIT_CRASHED = 1
EXIT_OUT_OF_MEMORY = 77
EXIT_REFUSED = 78  # settings or files it cannot work with; the log says which
EXIT_RANK_LOST = 79  # a collective failed since another rank is gone: look there for the cause
EXIT_ORPHANED = 80  # the daemon is gone


class TrainerSettings(BaseModel):
    """One island's training, apart from what changes with the rounds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    manifest: Manifest
    tokens: Path  # raw token file, see node.trainer.data
    evaluation: Path | None = None  # token file of the shared validation shard
    device: Literal["cpu", "cuda"] = "cpu"
    ranks: int = Field(1, ge=1, le=1024)  # on this host, one a GPU
    threads: int = Field(1, ge=1)  # of torch and OpenMP, per rank
    wait_s: float = Field(1.0, ge=0)  # for a round's outcome, then inner steps go on
    micro_batch: int = Field(0, ge=0)  # sequences a rank takes at once; 0: all of its share
    bf16: bool | None = None  # None: where the device is a GPU
