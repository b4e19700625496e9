"""What the daemon tells its ranks at their start: one JSON file, read by every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WrapValidator

from bootstrap.manifest import Manifest
from bootstrap.manifest_form import READING
from node.trainer.dims import ParallelDims

SETTINGS_FILE = "trainer-settings.json"

# Exit statuses of a rank, so that a rank without a channel can say why it ended as well.
EXIT_STOPPED = 0
EXIT_CRASHED = 1
EXIT_OUT_OF_MEMORY = 77
EXIT_REFUSED = 78  # settings or files it cannot work with; the log says which
EXIT_RANK_LOST = 79  # a collective failed since another rank is gone: look there for the cause
EXIT_ORPHANED = 80  # the daemon is gone
EXIT_STUCK = 81  # a collective call did not end in time: a rank that still runs is not in it


def _under_way(given: Any, validate: object) -> Manifest:
    """The run as it is: pydantic would hold it to the rules for a new one again."""
    del validate
    if isinstance(given, Manifest):
        return given
    return Manifest.model_validate(given, context=READING)


class TrainerSettings(BaseModel):
    """One island's training, apart from what changes with the rounds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    manifest: Annotated[Manifest, WrapValidator(_under_way)]
    # a raw token file, or a token folder here or at a URL: see node.trainer.data.open_tokens
    tokens: Annotated[str, BeforeValidator(str)]
    cache: Path | None = None  # of files that come from a URL
    cache_bytes: int = Field(20 * 10**9, ge=1)
    evaluation: Path | None = None  # token file of the shared validation shard
    device: Literal["cpu", "cuda"] = "cpu"
    ranks: int = Field(1, ge=1, le=1024)  # one a GPU
    hosts: int = Field(1, ge=1, le=1024)  # that the ranks are on
    dims: ParallelDims | None = None  # None: parameters and rows are sharded over all ranks
    threads: int = Field(1, ge=1)  # of torch and OpenMP, per rank
    wait_s: float = Field(1.0, ge=0)  # for a round's outcome, then inner steps go on
    micro_batch: int = Field(0, ge=0)  # sequences a rank takes at once; 0: all of its share
    bf16: bool | None = None  # None: where all ranks' GPUs have kernels for it
    recompute: Literal["none", "selective", "full"] = "none"  # activations, in backward
    offload: bool = False  # parameters and moments stay in the host's memory
    compile: bool = False
    collective_s: float = Field(600.0, gt=0)  # the longest that one collective call may take

    def write(self, folder: Path) -> Path:
        """Write them into ``folder`` for the ranks; returns the file."""
        file = folder / SETTINGS_FILE
        file.write_text(self.model_dump_json(indent=1), encoding="utf-8")
        return file

    @property
    def layout(self) -> ParallelDims:
        """How the model is laid out over the ranks."""
        return self.dims or ParallelDims(dp_shard=self.ranks)

    @property
    def at_once(self) -> int:
        """Sequences that a rank computes at once."""
        share = -(-self.manifest.data.batch_size // self.layout.data)
        limit = min(self.micro_batch or share, share)
        return share // self.layout.parts(share, limit) if self.layout.pp > 1 else limit

    @property
    def halved(self) -> int:
        """A micro-batch of half of what a rank takes at once now, in sequences."""
        return max(1, self.at_once // 2)
