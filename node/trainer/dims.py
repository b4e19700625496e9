"""How an island lays one model out over its ranks: the sizes of the mesh's axes, checked once.

The axes, from the slowest links to the fastest: ``pp`` (pipeline stages), ``dp_replicate`` (whole
copies of the model), ``dp_shard`` (ranks that share one copy, each with rows of its own), ``cp``
(ranks that share one sequence) and ``tp`` (ranks that share every matrix). ``ep`` (ranks that
share the experts) is no axis beside these: it divides ``dp_shard``.

"Axis" is of the mesh, "dim" of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from bootstrap.manifest import Data, Model

Schedule = Literal["gpipe", "1f1b", "interleaved", "zbv"]
Attention = Literal["ulysses", "ring"]
TWO_STAGES_A_RANK = ("interleaved", "zbv")

BYTES_A_PARAMETER = 16  # fp32: itself, its gradient, two moments
INSTEAD = "on GPUs --offload keeps weights and moments in the host's memory"
USABLE = 0.6  # of a device's memory for those; the rest is for activations and the allocator


class ParallelDims(BaseModel):
    """Sizes of the axes, and what goes with them. The product of the axes is :attr:`size`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dp_replicate: int = Field(1, ge=1)
    dp_shard: int = Field(1, ge=1)
    cp: int = Field(1, ge=1)
    tp: int = Field(1, ge=1)
    pp: int = Field(1, ge=1)
    ep: int = Field(1, ge=1)
    zero: int = Field(3, ge=1, le=3)
    schedule: Schedule = "1f1b"
    attention: Attention = "ulysses"  # with cp

    @property
    def size(self) -> int:
        """Ranks of the island."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data(self) -> int:
        """Parts that the rows of a batch are dealt out to."""
        return self.dp_replicate * self.dp_shard

    @property
    def reduced(self) -> int:
        """Ranks over which a gradient is averaged: those with other rows or other tokens."""
        return self.data * self.cp

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return self.pp * (2 if self.schedule in TWO_STAGES_A_RANK and self.pp > 1 else 1)

    @property
    def axes(self) -> dict[str, int]:
        """The mesh's axes in order, with ``dp_shard`` cut in what ``ep`` has and what is left."""
        return {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard // self.ep,
            "ep": self.ep,
            "cp": self.cp,
            "tp": self.tp,
        }

    def parts(self, rows: int, micro_batch: int) -> int:
        """Into how many equal micro-batches a pipeline cuts ``rows``, a multiple of its ranks.

        At least twice their number, so that most ranks have work most of the time, and more where
        one is to have at most ``micro_batch`` rows.
        """
        choices = [n for n in range(self.pp, rows + 1, self.pp) if rows % n == 0]
        fitting = [n for n in choices if n >= 2 * self.pp and rows // n <= micro_batch]
        return min(fitting) if fitting else max(choices)

    def __str__(self) -> str:
        """As ``--layout`` takes it: ``fsdp=2,tp=2``, or ``single``."""
        names = {
            "pp": self.pp,
            "ddp": self.dp_replicate,
            "fsdp": self.dp_shard,
            "ep": self.ep,
            "cp": self.cp,
            "tp": self.tp,
        }
        return ",".join(f"{name}={size}" for name, size in names.items() if size > 1) or "single"

    def check(self, model: Model, data: Data) -> None:
        """Raises ValueError that names the flag where the run's model or batch do not fit."""
        if model.kind == "hf":
            self._check_foreign(model, data)
        else:
            self._check_ours(model, data)
        self._check_stages(model)
        if self.data > data.batch_size:
            raise ValueError(
                f"--dp-replicate {self.dp_replicate} times --dp-shard {self.dp_shard} is more "
                f"than the {data.batch_size} sequences of an inner step: a rank needs one"
            )
        if self.pp > 1 and data.batch_size % (self.data * self.pp):
            raise ValueError(
                f"--pp {self.pp} times {self.data} data ranks does not divide the "
                f"{data.batch_size} sequences of an inner step into micro-batches"
            )

    def _check_foreign(self, model: Model, data: Data) -> None:
        if self.ep > 1:
            from node.trainer.foreign_experts import check_ep

            check_ep(model, self.ep)
            if self.tp > 1:
                raise ValueError(
                    f"--ep {self.ep} with --tp {self.tp}: experts of a model of transformers are "
                    "dealt out whole, beside --dp-shard, --dp-replicate, --cp and --pp"
                )
            _divides("--ep", self.ep, "--dp-shard", self.dp_shard)
        if self.cp > 1:
            from node.trainer.foreign_context import check_cp

            check_cp(model, data, self.cp, self.attention, self.tp)
        if self.pp > 1:
            from node.trainer.foreign import check_pp

            check_pp(model, f"--pp {self.pp}")
        if self.tp > 1:
            from node.trainer.foreign import check_tp

            check_tp(model, self.tp)

    def _check_ours(self, model: Model, data: Data) -> None:
        _divides("--tp", self.tp, "n_heads", model.n_heads)
        _divides("--tp", self.tp, "n_kv_heads", model.n_kv_heads)
        _divides("--tp", self.tp, "d_ff", model.d_ff)
        _divides("--tp", self.tp, "vocab_size", model.vocab_size)
        self._check_sequence(model, data)
        self._check_experts(model)

    def _check_stages(self, model: Model) -> None:
        if self.stages > model.n_layers:
            raise ValueError(
                f"--pp {self.pp} with --schedule {self.schedule} makes {self.stages} stages, "
                f"the model has {model.n_layers} layers"
            )
        if self.schedule == "zbv" and self.pp > 1 and self.reduced > 1:
            raise ValueError(
                f"--schedule zbv does not go with {self}: its backward is split, and FSDP's hooks "
                "miss the second half; use --schedule interleaved"
            )

    def _check_sequence(self, model: Model, data: Data) -> None:
        shares = self.tp * self.cp * (2 if self.attention == "ring" else 1)
        flag = "--cp" if self.cp > 1 else "--tp"
        if data.seq_len % (shares if self.cp > 1 else self.tp):
            raise ValueError(
                f"{flag} {self.cp if self.cp > 1 else self.tp} does not divide seq_len "
                f"{data.seq_len} into {shares} equal parts"
            )
        if self.cp > 1 and self.attention == "ulysses" and model.n_kv_heads % (self.tp * self.cp):
            raise ValueError(
                f"--cp {self.cp} with --attention ulysses does not divide n_kv_heads "
                f"{model.n_kv_heads // self.tp}; use --attention ring"
            )

    def _check_experts(self, model: Model) -> None:
        if self.ep == 1:
            return
        if not model.experts:
            raise ValueError(f"--ep {self.ep}: the run's model has no experts")
        _divides("--ep", self.ep, "experts", model.experts)
        _divides("--ep", self.ep, "--dp-shard", self.dp_shard)


def _divides(flag: str, size: int, name: str, whole: int) -> None:
    if whole % size:
        raise ValueError(f"{flag} {size} does not divide {name} {whole}")


def choose(
    ranks: int,
    hosts: int,
    parameters: int,
    memory: int,
    model: Model,
    data: Data,
    *,
    offload: bool = False,
) -> tuple[ParallelDims, str]:
    """A layout for ``ranks`` devices of ``memory`` bytes on ``hosts`` hosts, and why, in one line.

    Whole copies while they fit, for they talk least; else shards, within a host where that is
    enough. Where a step has fewer sequences than there are ranks, ranks share matrices (tp) or
    sequences (cp). Never layers (pp): a pipeline keeps busy only with a sequence for each rank, and
    then shards take as little room. With ``offload`` no parameters or moments lie on the
    devices, and shards take the least of the host's memory. Raises ValueError if nothing fits.
    """
    need, room = parameters * BYTES_A_PARAMETER, memory * USABLE
    facts = f"{_gib(need)} of weights and moments, {_gib(memory)} a device"
    if offload:
        facts += ", in the host's memory"
    if ranks == 1:
        small = "" if offload or need <= room else f", which is too much: {INSTEAD}"
        return ParallelDims(), f"single: one rank ({facts}{small})"
    tried: list[str] = []
    for data_ranks in (n for n in range(ranks, 0, -1) if ranks % n == 0):
        rest = ranks // data_ranks
        for inner in _within(rest):
            shard, fits = data_ranks, True
            if not offload:
                shard, fits = _shards(data_ranks, hosts, need / rest, room, model)
            dims = inner.model_copy(
                update={"dp_shard": shard, "dp_replicate": data_ranks // shard}
                | ({"ep": math.gcd(model.experts, shard)} if model.experts else {})
            )
            try:
                dims.check(model, data)
            except ValueError as error:
                tried.append(str(error))
                continue
            if not fits:
                tried.append(f"{dims} does not fit")
                continue
            why = "whole copies fit" if shard == 1 else "copies do not fit, shards do"
            if offload:
                why = "shards take the least of what is offloaded to"
            if rest > 1:
                why += f"; {data.batch_size} sequences a step keep {data_ranks} data ranks busy"
            return dims, f"{dims}: {why} ({facts})"
    instead = f"; {INSTEAD}" if tried[-1].endswith("does not fit") else ""
    raise ValueError(f"--layout auto finds none for {ranks} ranks: {tried[-1]} ({facts}){instead}")


def _within(ranks: int) -> Iterator[ParallelDims]:
    """Ways to share the work on the same rows, the best first; the caller checks which fit."""
    yield ParallelDims(tp=ranks)
    if ranks > 1:
        yield ParallelDims(cp=ranks)
        yield ParallelDims(cp=ranks, attention="ring")  # also of more ranks than key heads


def _shards(
    data_ranks: int, hosts: int, need: float, room: float, model: Model
) -> tuple[int, bool]:
    """Ranks that share a copy: one, those of a host, or all; and whether it fits then."""
    whole_hosts = data_ranks // hosts if data_ranks % hosts == 0 else data_ranks
    for shard in sorted({1, whole_hosts, data_ranks}):
        if need / shard <= room and not (model.experts and shard == 1 and data_ranks > 1):
            return shard, True
    return data_ranks, False


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
