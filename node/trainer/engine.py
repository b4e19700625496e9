"""One inner step's gradient, whatever the layout: the same as one process would compute.

Each rank minimises the sum of its tokens' losses, times the number of ranks that gradients are
averaged over, divided by the number of tokens that count in the island's whole batch. So neither
micro-batches nor shares of unequal size change the result.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from bootstrap.manifest import Manifest
from node.data.cached_file import cache_folder
from node.trainer.computing import Computing, check_compiler, eagerly
from node.trainer.context import positions
from node.trainer.cross_entropy import summed_loss
from node.trainer.data import IGNORED
from node.trainer.data import targets as targets_of
from node.trainer.evaluate import EVALUATION_BATCH, evaluate
from node.trainer.foreign import cut_stage
from node.trainer.foreign_balance import balance_of, keep_busy
from node.trainer.foreign_causal import check_causal
from node.trainer.foreign_documents import check_documents
from node.trainer.foreign_experts import experts_of
from node.trainer.foreign_matrices import try_cut
from node.trainer.foreign_storage import build_unstored
from node.trainer.hf import ForeignDecoder, build_foreign, family
from node.trainer.layout import Layout
from node.trainer.model import Decoder, build, document_numbers
from node.trainer.model_moe import Experts, MixtureOfExperts
from node.trainer.parallel import Ranks, share
from node.trainer.parallelize import lay_out
from node.trainer.pipeline import Pipeline, check_schedule, cut, rank_of_stage
from node.trainer.weights import Weights, local

Batch = Callable[[range], tuple[Tensor, Tensor]]  # rows -> inputs and targets, int64 [rows, T]


class Engine:
    """The model of one rank, or its stages, and what is computed with it."""

    def __init__(self, manifest: Manifest, ranks: Ranks, computing: Computing) -> None:
        """Build this rank's part; parameters have no particular values with several ranks.

        Every rank must call it. Raises ValueError where layout and run do not fit, OperatorError
        E411 where nothing can be compiled, E606 where a model of transformers cannot be built, or
        cannot keep documents apart.
        """
        self.ranks, self.dims, self.computing = ranks, ranks.dims, computing
        self.batch, self.seq_len = manifest.data.batch_size, manifest.data.seq_len
        self.document_end: int | None = None  # where documents are apart: its token
        if manifest.model.attention == "document":
            self.document_end = manifest.model.document_end
        self.dims.check(manifest.model, manifest.data)
        check_schedule(self.dims, ranks.device)
        if computing.compile:
            check_compiler(ranks.device, cache_folder() / "compiled")
        # each is told whether the next sequences are of the batch, or only fill up
        self._tell_foreign: list[Callable[[bool], None]] = []
        self.parts: dict[int, Decoder] = {}
        for stage in range(self.dims.stages):
            if rank_of_stage(self.dims, stage) == ranks.at("pp"):
                self.parts[stage] = self._part(manifest, stage)
        self.models = nn.ModuleList(self.parts.values())
        self.experts = [module for model in self.parts.values() for module in _experts(model)]
        self.layout = Layout.of_manifest(manifest)
        self.weights = Weights(self._named(), self.layout, ranks)
        self.pipeline: Pipeline | None = None
        if self.dims.pp > 1:
            width = self.seq_len // self.dims.cp
            if manifest.model.kind != "hf":  # there every rank has whole sequences between matrices
                width //= self.dims.tp
            self.pipeline = Pipeline(self.parts, ranks, width)
            self.pipeline.dtype = computing.dtype
        self.tokens: Tensor | None = None  # positions of this rank's tokens; None: all
        if self.dims.cp > 1:
            self.tokens = positions(self.seq_len, ranks.at("cp"), self.dims.cp, self.dims.attention)

    def _part(self, manifest: Manifest, stage: int) -> Decoder:
        model: Decoder
        if manifest.model.kind == "hf":
            model = self._foreign(manifest)
            if self.document_end is not None:
                check_documents(model, self.seq_len)  # that none sees what is behind it, too
            balance = balance_of(model)  # over all layers, of which a stage has some
            if self.document_end is None:
                check_causal(model, self.seq_len)
            if self.dims.tp > 1:
                try_cut(model, self.dims.tp)
            if self.dims.stages > 1:
                cut_stage(model, stage, self.dims.stages)
            if balance is not None:
                kept = (balance, self.ranks, self.batch, self.seq_len)
                self._tell_foreign.append(keep_busy(model, *kept))
        elif self.ranks.size == 1:
            model = build(manifest.model, manifest.seed)
        else:
            with torch.device("meta"):
                model = cut(Decoder(manifest.model), stage, self.dims.stages)
        lay_out(model, self.ranks, self.computing, self.seq_len)
        if self.computing.dtype != torch.float32:
            # forward alone: under it backward would round what forward kept in fp32, and the step
            # of a pipeline has both
            lower = torch.autocast(self.ranks.device.type, self.computing.dtype)
            model.forward = lower(model.forward)  # type: ignore[method-assign]
        if stage < self.dims.stages - 1:  # what passes to the next stage has one type
            model.register_forward_hook(lambda _, __, out: out.to(self.computing.dtype))
        return model

    def _foreign(self, manifest: Manifest) -> ForeignDecoder:
        """A whole model of transformers; of several ranks none has storage for one."""
        if self.ranks.size == 1:
            return build_foreign(manifest.model, manifest.seed)
        model = build_unstored(manifest.model)
        if model is None:
            parameters = Layout.of_config(manifest.model).size
            sys.stderr.write(  # the log of a rank that is killed for memory, which is shown
                f"{family(manifest.model)} has buffers that are made of its values: each rank "
                f"builds it whole, in {4 * parameters / 1e9:.1f} GB of the host's memory\n"
            )
            model = build_foreign(manifest.model, manifest.seed)
        return model

    def _named(self) -> dict[str, list[Tensor]]:
        """This rank's parameters under the names of the flat layout."""
        found: dict[str, list[Tensor]] = {}
        places = {entry.name for entry in self.layout.entries}
        for model in self.parts.values():
            for name, parameter in model.named_parameters():
                known = name if name in places else model.tied  # a tied head, alone on its stage
                found.setdefault(known, []).append(parameter)
        return found

    # --- gradients ----------------------------------------------------------------------------

    def rows(self, micro_batch: int) -> list[range]:
        """This rank's rows of a batch, one range for each forward; an empty one is not read."""
        rows = share(self.batch, self.ranks.data_rank, self.dims.data, micro_batch)
        if self.pipeline is not None:
            rows = [range(rows[0].start, rows[-1].stop, rows[0].step)]
        return rows

    def gradients(self, batch: Batch, micro_batch: int) -> float:
        """Accumulate the whole batch's gradient; the island's mean loss, on every rank."""
        rows = self.rows(micro_batch)
        windows = [self._mine(*(batch(part) if part else self._nothing())) for part in rows]
        counted = self._counted([targets for _, targets, _ in windows])
        scale = self.dims.reduced / counted
        total = torch.zeros((), device=self.ranks.device)

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            value = summed_loss(logits, targets)
            total.add_(value.detach())
            return value * scale

        with self._logits_cut():
            for i, (inputs, targets, given) in enumerate(windows):
                self._balance(counts=len(rows[i]) > 0)
                if self.pipeline is not None:
                    parts = self.dims.parts(len(rows[0]), micro_batch)
                    self.pipeline.step(inputs, targets, parts, loss, **given)
                    continue
                if self.dims.zero == 1:
                    self._reduce(i + 1 == len(windows))
                logits = self.parts[0](inputs, **given)
                loss(logits, targets).backward()
        self._finish()
        return float(self.ranks.sum(total)) / (counted * self.dims.tp)

    def _nothing(self) -> tuple[Tensor, Tensor]:
        """A sequence that does not count, where other ranks have one more: calls are collective."""
        inputs = torch.zeros((1, self.seq_len), dtype=torch.int64)
        return inputs, torch.full_like(inputs, IGNORED)

    def _balance(self, *, counts: bool) -> None:
        """Set how much a sequence's balance loss weighs in the step."""
        # averaged over the data ranks, added up over tp, and over cp the mean of parts
        weight = self.dims.data / self.batch / self.dims.tp if counts else 0.0
        for module in self.models.modules():
            if isinstance(module, MixtureOfExperts):
                module.sequence_weight = weight
        for tell in self._tell_foreign:
            tell(counts)

    def _mine(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """This rank's columns, on its device, and what else a model in parts is given."""
        given: dict[str, Tensor] = {}
        if self.document_end is not None and (self.dims.cp > 1 or self.dims.pp > 1):
            documents = document_numbers(inputs, self.document_end)
            given["documents"] = documents.to(self.ranks.device)
        if self.tokens is not None:
            inputs, targets = inputs[:, self.tokens], targets[:, self.tokens]
        return inputs.to(self.ranks.device), targets.to(self.ranks.device), given

    def _counted(self, targets: list[Tensor]) -> int:
        """Targets that count in the island's batch."""
        if self.document_end is None:  # without asking the others, and without waiting for a device
            return self.batch * self.seq_len
        mine = sum((part != IGNORED).sum() for part in targets)
        whole = self.ranks.sum(torch.as_tensor(mine, dtype=torch.int64))
        return max(1, int(whole) // (self.dims.tp * self.dims.pp))

    def _reduce(self, now: bool) -> None:
        """Set whether backward reduces gradients; if not, whole ones are kept for the next one."""
        for model in self.parts.values():
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(now)

    def _logits_cut(self) -> AbstractContextManager[object]:
        return loss_parallel() if self.dims.tp > 1 else nullcontext()

    @torch.no_grad()
    def _finish(self) -> None:
        """Bring gradients into the form of their parameters."""
        for parameter in self.models.parameters():
            gradient = parameter.grad
            if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
                continue
            if gradient.placements != parameter.placements:
                parameter.grad = gradient.redistribute(placements=parameter.placements)
        if self.dims.ep > 1:  # averaged over fewer ranks than those whose tokens they got
            for parameter in (one for module in self.experts for one in module.parameters()):
                if parameter.grad is not None:
                    parameter.grad.div_(self.dims.ep)
        if self.pipeline is not None:
            self._add_tied(self.pipeline)
            self._reshard()

    def _add_tied(self, pipeline: Pipeline) -> None:
        """Add the gradients of an embedding and the head that is tied to it, on other stages."""
        tied = self._tied()
        if not tied:
            return
        first, last = (rank_of_stage(self.dims, stage) for stage in (0, pipeline.count - 1))
        if first == last:
            if len(tied) == 2:
                total = local(_grad(tied[0])) + local(_grad(tied[1]))
                for tensor in tied:
                    local(_grad(tensor)).copy_(total)
            return
        mine = local(_grad(tied[0])).contiguous()
        theirs = torch.empty_like(mine)
        peer = dist.get_global_rank(pipeline.group, last if 0 in self.parts else first)
        pair = ((dist.isend, mine), (dist.irecv, theirs))
        moves = [dist.P2POp(how, tensor, peer, pipeline.group) for how, tensor in pair]
        for move in dist.batch_isend_irecv(moves):
            move.wait()
        local(_grad(tied[0])).add_(theirs)  # the same sum on both sides: addition commutes

    def _reshard(self) -> None:
        """Drop gathered parameters, which would hide what is written to the shards."""
        for module in self.models.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def copies(self, parameter: nn.Parameter) -> int:
        """How many ranks have the same elements of a parameter as this one."""
        shards = 1
        if isinstance(parameter, DTensor):
            for axis, placement in enumerate(parameter.placements):
                shards *= 1 if placement.is_replicate() else parameter.device_mesh.size(axis)
        twice = self.dims.pp > 1 and any(parameter is tensor for tensor in self._tied())
        return self.ranks.size // self.dims.pp // shards * (2 if twice else 1)

    def _tied(self) -> list[Tensor]:
        """The embedding, the head that is tied to it, or both: those that are here."""
        name = next((model.tied for model in self.parts.values()), "")
        return list(self.weights.parts.get(name, ())) if name else []

    # --- evaluation ---------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, at_once: int = EVALUATION_BATCH) -> float:
        """Mean loss in nats a token on windows int64 [n, T + 1], which every rank has.

        A data rank computes its share of them, ``at_once`` at a time.
        """
        with eagerly() if self.computing.compile else nullcontext():
            loss = evaluate(self._sums, tokens, at_once * self.dims.data, self.document_end)
        self._reshard()
        return loss

    def _sums(self, windows: Tensor) -> Tensor:
        """Losses summed by sequence, float64 [B], of windows [B, T + 1], on every rank."""
        data, first = self.dims.data, self.ranks.data_rank
        mine = windows[first::data]
        own = len(mine)
        if own < math.ceil(len(windows) / data):  # one that does not count: calls are collective
            mine = torch.cat((mine, windows[:1]))
        inputs, targets, given = self._mine(mine[:, :-1], targets_of(mine, self.document_end))
        forward = self.pipeline.forward if self.pipeline else self.parts[0]
        logits = forward(inputs, **given)
        sums = torch.zeros(len(windows), dtype=torch.float64)
        if logits is not None:
            with self._logits_cut():  # whole ones would be the largest tensors of all
                losses = summed_loss(logits, targets, by_sequence=True)
            if self.ranks.at("tp") == 0:
                sums[first::data] += losses[:own].cpu()
        return self.ranks.sum(sums)


def _experts(model: Decoder) -> list[nn.Module]:
    """The modules of a model, or of a stage, that hold experts."""
    if isinstance(model, ForeignDecoder):
        return experts_of(model)
    return [module for module in model.modules() if isinstance(module, Experts)]


def _grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad
