"""The ``[island]`` section of a node's settings: how its ranks train together.

Islands differ in this, so none of it stands in the manifest. Every key is a flag as well, and may
stand at the top of the file too.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from node.setting_values import HostPort
from node.trainer.dims import ParallelDims, choose

if TYPE_CHECKING:
    from bootstrap.manifest import Data, Model

AXES = {  # of --layout: the name that a person writes, and the key that it stands for
    "ddp": "dp_replicate",
    "fsdp": "dp_shard",
    "ep": "ep",
    "cp": "cp",
    "tp": "tp",
    "pp": "pp",
}


def _sizes(text: str) -> dict[str, int]:
    """``fsdp=2,tp=2`` by key; raises ValueError that names the faulty part."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        key = AXES.get(name)
        if key is None or not equals or not size.isascii() or not size.isdigit() or not int(size):
            raise ValueError(
                f"{part.strip()!r} is no part of a layout: write auto, single, or a list as in "
                f"fsdp=2,tp=2, of {', '.join(AXES)}"
            )
        if key in sizes:
            raise ValueError(f"{name} stands twice in the layout")
        sizes[key] = int(size)
    return sizes


def _axis(description: str) -> Any:
    return Field(default=0, ge=0, le=4096, description=description)


def check_nnodes(text: str) -> str:
    """A number of hosts or MIN:MAX as it is; raises ValueError for anything else."""
    found = re.fullmatch(r"([0-9]{1,4})(?::([0-9]{1,4}))?", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2] or found[1]) <= 1024:
        raise ValueError("must be a number of hosts, as in 2, or MIN:MAX, as in 1:4, or auto")
    return text


class IslandSettings(BaseModel):
    """Ranks, devices, and the layout of the model over them."""

    nproc: int = Field(
        default=0, ge=0, le=1024, description="Trainer ranks a host; 0: one a GPU, or one on CPU."
    )
    nnodes: str = Field(
        default="1",
        max_length=20,
        description="Hosts of this island: a number, MIN:MAX, or auto (torchrun's, Slurm's or "
        "Kubernetes' environment).",
    )
    node_rank: int | None = Field(
        default=None,
        ge=0,
        le=1023,
        description="Which of its hosts this is; host 0 runs the node, the others only train.",
    )
    rdzv_endpoint: HostPort = Field(
        default="", description="HOST:PORT of host 0, where the island's hosts meet."
    )
    rdzv_id: str = Field(
        default="",
        max_length=256,
        description="A secret, the same on all hosts of an island; who does not know it is turned "
        "away.",
    )
    hosts_wait_s: float = Field(
        default=600.0, ge=1, description="Seconds to wait for hosts that are missing or lost."
    )
    threads: int = Field(
        default=0,
        ge=0,
        le=4096,
        description="CPU threads a rank; 0: OMP_NUM_THREADS, or cores divided by ranks.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where the trainer runs; auto: CUDA if it works."
    )
    micro_batch: int = Field(
        default=0,
        ge=0,
        le=65_536,
        description="Sequences at a time on one rank; 0: as many as memory allows.",
    )
    layout: str = Field(
        default="",
        max_length=200,
        description="How ranks share the model: auto, or as in fsdp=2,tp=2; by default fsdp.",
    )
    dp_replicate: int = _axis("Whole copies of the model (ddp in a layout); 0: one.")
    dp_shard: int = _axis("Ranks that share a copy (fsdp in a layout); 0: what is left over.")
    tp: int = _axis("Ranks that share every matrix, and sequences between them; 0: one.")
    pp: int = _axis("Pipeline stages; 0: one.")
    cp: int = _axis("Ranks that share one sequence; 0: one.")
    ep: int = _axis("Ranks that share the experts, out of --dp-shard; 0: one.")
    zero: int = Field(
        default=3,
        ge=1,
        le=3,
        description="What --dp-shard shards: 1 moments, 2 and gradients, 3 and parameters.",
    )
    schedule: Literal["gpipe", "1f1b", "interleaved", "zbv"] = Field(
        default="1f1b", description="Order of micro-batches with --pp."
    )
    attention: Literal["ulysses", "ring"] = Field(
        default="ulysses", description="How attention crosses ranks with --cp."
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto",
        description="Of the computation; auto: bf16 on GPUs from Ampere on. Weights are fp32.",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        default="none", description="Activations that are made again in backward, for memory."
    )
    offload: bool = Field(
        default=False, description="Keep parameters and moments in the host's memory."
    )
    moments: Literal["warm-up", "donor"] = Field(
        default="warm-up",
        description="What a newcomer's optimizer begins with: moments of its own, with a learning "
        "rate that warms up, or those of another island, where one has them.",
    )
    compile: bool = Field(default=False, description="Compile the layers with torch.compile.")

    @field_validator("layout")
    @classmethod
    def _layout_parses(cls, text: str) -> str:
        if text not in ("", "auto", "single"):
            _sizes(text)
        return text

    @field_validator("nnodes")
    @classmethod
    def _nnodes_parses(cls, text: str) -> str:
        return text if text == "auto" else check_nnodes(text)

    @model_validator(mode="after")
    def _said_once(self) -> IslandSettings:
        if not self.layout:
            return self
        given = [name for name, key in AXES.items() if getattr(self, key)]
        if given:
            raise ValueError(f"--layout {self.layout} leaves no room for --{AXES[given[0]]}")
        return self

    @property
    def axes(self) -> dict[str, int]:
        """The axes that were given a size, by key."""
        if self.layout in ("auto", "single"):
            return {}
        if self.layout:
            return _sizes(self.layout)
        return {key: getattr(self, key) for key in AXES.values() if getattr(self, key)}

    @property
    def open_ended(self) -> bool:
        """Whether a model is shared by as many ranks as there are."""
        return "dp_shard" not in self.axes and self.layout in ("", "auto")

    def ranks_wanted(self, devices: int, hosts: int = 1) -> int:
        """How many ranks a host is to start, with so many devices to be used (0: CPU).

        Raises ValueError where ``nproc`` and the layout contradict each other, or do not share
        out evenly over ``hosts``.
        """
        axes = dict(self.axes)
        axes.pop("ep", None)
        product = 1
        for size in axes.values():
            product *= size
        ranks = self.nproc * hosts or max(devices * hosts, product, hosts)
        if ranks % product or (ranks != product and axes and not self.open_ended):
            raise ValueError(
                f"a layout of {product} ranks ({self._shown(axes)}) does not fill {ranks} ranks "
                f"({f'--nproc {self.nproc}' if self.nproc else 'one a GPU'}"
                f"{f' on each of {hosts} hosts' if hosts > 1 else ''})"
            )
        if ranks % hosts:
            raise ValueError(f"{ranks} ranks do not share out over {hosts} hosts: give --nproc")
        if self.layout == "single":
            if hosts > 1:
                raise ValueError(f"--layout single needs one host, not {hosts}")
            return 1
        return ranks // hosts

    def dims(
        self, ranks: int, hosts: int, memory: int, parameters: int, model: Model, data: Data
    ) -> tuple[ParallelDims, str]:
        """The layout over ``ranks``, checked against the run; and why, if it was chosen (auto).

        ``memory``: bytes of one device. Raises ValueError that names the flag.
        """
        extra = {"zero": self.zero, "schedule": self.schedule, "attention": self.attention}
        why = ""
        if self.layout == "auto":
            dims, why = choose(ranks, hosts, parameters, memory, model, data, offload=self.offload)
            if dims.attention == "ring":  # since there are too few heads for the other
                del extra["attention"]
            dims = dims.model_copy(update=extra)
        else:
            axes = dict(self.axes)
            others = 1
            for key, size in axes.items():
                others *= size if key not in ("dp_shard", "ep") else 1
            axes.setdefault("dp_shard", max(1, ranks // others))
            dims = ParallelDims.model_validate(axes | extra)
        dims.check(model, data)
        split = {"compile": self.compile, "recompute": self.recompute != "none"}
        split["offload"] = self.offload  # which is FSDP's, whatever it shards
        for flag, given in split.items():
            if given and dims.pp > 1 and dims.schedule == "zbv":
                raise ValueError(
                    f"--{flag} does not go with --schedule zbv: its backward is split; use "
                    "--schedule interleaved"
                )
        return dims, why

    def refit(
        self,
        full: ParallelDims,
        ranks: int,
        hosts: int,
        memory: int,
        parameters: int,
        model: Model,
        data: Data,
    ) -> ParallelDims:
        """The layout for other ranks than ``full`` was made for, on so many hosts.

        More come where a host has more than host 0: they are taken where no number of shards was
        given. Of fewer, what was chosen (auto) is chosen again. Else only data ranks go: what
        shares matrices, sequences and layers stays, and of the copies' shards as many as fit. The
        batch stays: each rank takes more of its rows. Raises ValueError where nothing fits.
        """
        if ranks >= full.size:
            for count in range(ranks, full.size, -1) if self.open_ended else ():
                with suppress(ValueError):  # as where that is more than the rows of a step
                    return self.dims(count, hosts, memory, parameters, model, data)[0]
            return full
        if self.layout == "auto":
            return self.dims(ranks, hosts, memory, parameters, model, data)[0]
        inner = full.cp * full.tp * full.pp
        why = f"{full} needs {inner} ranks, and {ranks} are left"
        for count in range(ranks // inner, 0, -1):
            shard = max(n for n in range(1, full.dp_shard + 1) if count % n == 0)
            smaller = full.model_copy(
                update={
                    "dp_shard": shard,
                    "dp_replicate": count // shard,
                    "ep": math.gcd(full.ep, shard),
                }
            )
            try:
                smaller.check(model, data)
            except ValueError as error:
                why = str(error)
                continue
            return smaller
        raise ValueError(why)

    @staticmethod
    def _shown(axes: dict[str, int]) -> str:
        names = {key: name for name, key in AXES.items()}
        return ",".join(f"{names[key]}={size}" for key, size in axes.items()) or "single"
