"""The trainer's share of a checkpoint: θ, the optimizer's moments, and where the island stands.

Every rank writes the shards that it holds into the folder ``trainer`` of a checkpoint, as
safetensors with their places in the header (torch.distributed.checkpoint), so that an island may
come back with another number of ranks and another layout: see :func:`load`. It is written from a
copy while training goes on. Where ranks are on several hosts, which need not share a disk, rank 0
gathers the tensors and writes, or reads, all of them; the files are those of one rank. The learning
rate and the windows to read follow from counters; there is no other state, and nothing is pickled.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, MutableMapping, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_now

from node.trainer.afresh import begin_afresh
from node.trainer.optimizer_state import (
    beside_moments,
    changed,
    counted_beside,
    kinds,
    moment_of,
    moments,
    new_moments,
    unkept,
)
from node.trainer.shard_writer import ShardWriter
from node.trainer.trainer_state import FOLDER, MOMENTS, STATE, TrainerState
from node.trainer.weights import Pick, Weights, itself, local
from protocols.errors import OperatorError

# said for every checkpoint of a single rank, in a thread where no narrower filter reaches
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)

PARAMETER = "parameter/"  # prefixes of the tensors' names
WIDE = (torch.float64, torch.int32, torch.int64)  # types with values that fp32 has not
T = TypeVar("T")


class Writing:
    """A checkpoint on its way to the disk, while training goes on; of one rank."""

    def __init__(self, future: Future[object], file: Path | None, state: TrainerState) -> None:
        """``file``: where rank 0 writes ``state`` at the end."""
        self._future, self._file, self._state = future, file, state

    @property
    def done(self) -> bool:
        """Whether all ranks have written, or failed to."""
        return self._future.done()

    def finish(self) -> OSError | None:
        """Wait for the end; what went wrong on any rank's disk, if something did."""
        try:
            self._future.result()
        except CheckpointException as error:
            return _cause(error)
        try:
            if self._file is not None:
                self._file.write_text(self._state.model_dump_json(indent=1), encoding="utf-8")
        except OSError as error:
            return error
        return None


@torch.no_grad()
def save(
    directory: Path,
    weights: Weights,
    optimizer: torch.optim.Optimizer,
    state: TrainerState,
    *,
    one_disk: bool = True,
) -> Writing:
    """Copy tensors and state, and begin to write them; every rank must call it.

    Returns when the copies are made: what happens to the tensors from then on does not matter.
    Each rank writes what it holds, by torch.distributed.checkpoint; or rank 0 everything, where
    not all see ``one_disk``. Raises OSError.
    """
    folder, failure = directory / FOLDER, None
    try:
        if one_disk or weights.ranks.leads:
            folder.mkdir(exist_ok=True)
    except OSError as error:
        failure = error
    if not weights.ranks.all_true(failure is None):  # else the others would wait for this one
        raise failure or OSError(f"not every rank can write to {directory}")
    file = folder / STATE if weights.ranks.leads else None
    states = optimizer.state  # several optimizers make it anew whenever it is asked for
    state = state.model_copy(update={"unkept": unkept(weights, states)})
    if state.optimizer_steps:
        update = beside_moments(weights, optimizer, states, state.optimizer_steps)
        state = state.model_copy(update=update)
    if not one_disk:
        return Writing(_write_whole(directory, weights, states, state), file, state)
    tensors: dict[str, Tensor] = {}
    for name, parts in weights.parts.items():
        tensors[PARAMETER + name] = parts[0].detach()
        if state.optimizer_steps:
            kept = moments(parts[0], states)
            tensors |= {f"{m}/{name}": states[parts[0]][m] for m in kept}
    with torch.device("cpu"):  # else copies are made on the default device, a script's GPU
        future = async_save(
            tensors,
            storage_writer=ShardWriter(directory),
            process_group=weights.ranks.background(),
            no_dist=weights.ranks.size == 1,
        )
    return Writing(cast("Future[object]", future), file, state)


def _write_whole(
    directory: Path, weights: Weights, states: Mapping[Tensor, Any], state: TrainerState
) -> Future[object]:
    """Gather all tensors on rank 0 and begin to write them there; every rank must call it."""
    mine: dict[str, tuple[str, ...]] = {}
    for name, parts in weights.parts.items() if state.optimizer_steps else ():
        mine[name] = moments(parts[0], states)
    kept = {name: found for part in weights.everywhere(mine) for name, found in part.items()}
    whole: dict[str, Tensor] = {}
    for name in weights.names:
        picks: dict[str, Pick] = {PARAMETER + name: itself}
        picks |= {f"{m}/{name}": moment_of(states, m) for m in kept.get(name, ())}
        for key, pick in picks.items():
            tensor = weights.gather(name, pick)
            if weights.ranks.leads:
                assert tensor is not None
                whole[key] = tensor.to("cpu", copy=True)
    if not weights.ranks.leads:
        done: Future[object] = Future()
        done.set_result(None)
        return done
    writer = ShardWriter(directory)
    pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    future = pool.submit(save_now, whole, storage_writer=writer, no_dist=True)
    pool.shutdown(wait=False)
    return cast("Future[object]", future)


@torch.no_grad()
def load(
    directory: Path,
    weights: Weights,
    optimizer: torch.optim.Optimizer,
    *,
    one_disk: bool = True,
    earlier: bool = False,
) -> tuple[TrainerState, str]:
    """Read what :func:`save` wrote into parameters and optimizer; every rank must call it.

    ``earlier``: the moments alone, also those of :data:`MOMENTS`; parameters stay as they are.
    Moments of another kind of optimizer than the parameter has now are left out; beside the
    state it returns which these are, in words for people, empty where all fit.

    It may have been written by another number of ranks in another layout: each rank reads the
    elements that it holds now, or rank 0 all of them where not all see ``one_disk``. Raises E404
    when files are missing, damaged, or of another model.
    """
    folder = directory / FOLDER
    if earlier and not folder.exists():
        folder = directory / MOMENTS
    state, types = _look_into(folder, weights)
    now, there = kinds(optimizer, weights), _by_parameter(types)
    # where a version did not say: what Muon trained, which has a first moment alone
    alone = (name for name, kept in there.items() if kept.keys() == {"exp_avg"})
    was = state.kinds or {name: "Muon muon" for name in alone if now.get(name) == "Muon"}
    fitting = {
        name: {moment: getattr(torch, dtype) for moment, dtype in kept.items()}
        for name, kept in there.items()
        if state.optimizer_steps and was.get(name, now.get(name)) == now.get(name)
    }
    places = _Places(weights, optimizer.state, fitting, moments_only=earlier)
    places.make(state, counted_beside(optimizer))
    if one_disk:
        problem = _read(places.of_this_rank(), folder, weights.ranks.background())
    else:
        problem = places.read_whole(folder)
    if problem:
        begin_afresh(optimizer)  # some of it may have been read
        raise _unreadable(directory, problem)
    if one_disk:
        places.fill_twins()
    return state, "; ".join(filter(None, (changed(was, now), state.unkept)))


def _look_into(folder: Path, weights: Weights) -> tuple[TrainerState, dict[str, str]]:
    """What is in a folder, and the types of the tensors in it; every rank must call it.

    Rank 0 looks. Raises E404 on all of them where the files do not fit.
    """
    problem, raw = "", b""
    found: dict[str, tuple[torch.Size, torch.dtype]] = {}
    if weights.ranks.leads:
        try:
            raw = (folder / STATE).read_bytes()
            found = _contents(folder)
            _check(TrainerState.model_validate_json(raw), found, weights)
        except (OSError, ValueError) as error:  # pydantic's are ValueErrors
            problem = str(error) or type(error).__name__
    types = {key: str(dtype).removeprefix("torch.") for key, (_, dtype) in found.items()}
    told = json.dumps([problem, raw.decode(errors="replace"), types])
    problem, text, types = json.loads(weights.ranks.broadcast(told.encode()))
    if problem:
        raise _unreadable(folder.parent, problem)
    return TrainerState.model_validate_json(text), types


@dataclass(frozen=True)
class _Places:
    """Where a checkpoint is read into: parameters, and their moments in an optimizer."""

    weights: Weights
    states: MutableMapping[Tensor, Any]  # the optimizer's
    fitting: Mapping[str, Mapping[str, torch.dtype]]  # moments to be read, by parameter: their type
    moments_only: bool

    def make(self, state: TrainerState, beside: Set[Tensor]) -> None:
        """Give the optimizer all that ``state`` has of these moments, zeros where they come.

        ``beside``: see :func:`~node.trainer.optimizer_state.counted_beside`.
        """
        for name, parts in self.weights.parts.items():
            kept = self.fitting.get(name, {})
            steps = state.fewer.get(name, state.optimizer_steps)
            numbers = state.numbers.get(name, {})
            for parameter in parts if kept else ():
                made = new_moments(parameter, kept, steps, beside=parameter in beside)
                made |= {key: number.restored(parameter) for key, number in numbers.items()}
                self.states[parameter] = made

    def of_this_rank(self) -> dict[str, Tensor]:
        """The elements that this rank holds, by their names in the files."""
        tensors: dict[str, Tensor] = {}
        for name, parts in self.weights.parts.items():
            if not self.moments_only:
                tensors[PARAMETER + name] = parts[0].detach()
            kept = self.fitting.get(name, ())
            tensors |= {f"{m}/{name}": self.states[parts[0]][m] for m in kept}
        return tensors

    def fill_twins(self) -> None:
        """Tied parameters that are two tensors here: one of them was read."""
        for name, parts in self.weights.parts.items():
            for twin in parts[1:]:
                local(twin).copy_(local(parts[0]))  # no change if parameters were not read
                for moment in self.fitting.get(name, ()):
                    local(self.states[twin][moment]).copy_(local(self.states[parts[0]][moment]))

    def read_whole(self, folder: Path) -> str:
        """Read tensor by tensor on rank 0 into the parts of all; every rank must call it.

        What went wrong there is returned on all of them.
        """
        ranks = self.weights.ranks
        for name, shape in self.weights.shapes.items():
            picks: dict[str, Pick] = {} if self.moments_only else {PARAMETER + name: itself}
            kept = self.fitting.get(name, {})
            picks |= {f"{m}/{name}": moment_of(self.states, m) for m in kept}
            types = {f"{m}/{name}": dtype for m, dtype in kept.items() if dtype in WIDE}
            whole, problem = dict.fromkeys(picks, torch.empty(0)), ""
            if ranks.leads:
                whole = {
                    key: torch.empty(shape, dtype=types.get(key, torch.float32), device="cpu")
                    for key in picks
                }
                problem = _read(whole, folder, None)
            if not ranks.all_true(not problem):
                return ranks.broadcast(problem.encode(errors="replace")).decode()
            for key, pick in picks.items():
                read = whole[key] if ranks.leads else None
                self.weights.set(name, read, pick, types.get(key, torch.float32))
        return ""


class _Reader(HuggingFaceStorageReader):
    """Tells what is wrong with files by OSErrors, which ranks can send each other.

    Some errors of safetensors cannot be pickled, and the others would wait for them.
    """

    def read_metadata(self) -> Metadata:
        """What the files' headers say."""
        with _as_os_errors():
            return super().read_metadata()

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Read what is planned."""
        with _as_os_errors():
            return super().read_data(plan, planner)


@contextmanager
def _as_os_errors() -> Iterator[None]:
    try:
        yield
    except (SafetensorError, LookupError, TypeError) as error:  # also of places in a header
        raise OSError(f"{type(error).__name__}: {error}") from None


def _read(tensors: dict[str, Tensor], folder: Path, group: dist.ProcessGroup | None) -> str:
    """Read tensors from the files of a folder, in place; what went wrong, or nothing.

    All ranks of ``group`` must call it, and are told the same; without one it is this rank's own.
    """
    reader = _Reader(str(folder))
    try:
        with torch.device("cpu"):  # as in `save`
            load_sharded(tensors, storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:  # a BaseException
        for cause, _ in error.failures.values():
            if not isinstance(cause, Exception):  # an interrupt, which torch has caught as well
                raise cause from None
        return str(_cause(error))
    return ""


def _cause(error: CheckpointException) -> OSError:
    """What went wrong on some rank, the disk's own words first."""
    causes = [cause for cause, _ in error.failures.values()]
    found = next((cause for cause in causes if isinstance(cause, OSError)), None)
    return found or OSError(f"{type(causes[0]).__name__}: {causes[0]}")


def _unreadable(directory: Path, why: str) -> OperatorError:
    """E404: this checkpoint cannot be gone on from."""
    return OperatorError("E404", f"cannot resume from {directory}", why, "start without --resume")


def _contents(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and type of the tensors in all files of a folder; pieces must make a whole."""
    metadata = _Reader(str(folder)).read_metadata()
    found = {}
    for name, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        if sum(chunk.sizes.numel() for chunk in stored.chunks) < stored.size.numel():
            raise ValueError(f"{name} lacks a part: every rank must write to the same disk")
        found[name] = stored.size, stored.properties.dtype
    return found


def _check(
    state: TrainerState, found: Mapping[str, tuple[torch.Size, torch.dtype]], weights: Weights
) -> None:
    there = _by_parameter(found)
    for name, shape in weights.shapes.items():
        kept = there.get(name, ())
        if state.optimizer_steps and not kept and name not in state.without:
            raise ValueError(f"the optimizer's moments of {name} are missing")
        for key in (PARAMETER + name, *(f"{moment}/{name}" for moment in kept)):
            if key not in found or found[key][0] != shape:
                raise ValueError(f"{key} is missing or has another shape")


def _by_parameter(there: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """The moments in a checkpoint, by parameter and name."""
    found: dict[str, dict[str, T]] = {}
    for key, value in there.items():
        moment, _, name = key.partition("/")
        if not key.startswith(PARAMETER):
            found.setdefault(name, {})[moment] = value
    return found
