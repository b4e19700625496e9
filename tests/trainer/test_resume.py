"""The trainer's share of a checkpoint: copied at once, written beside training, read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainer_kit import tiny_manifest

from node.trainer import resume
from node.trainer.cross_entropy import mean_loss
from node.trainer.layout import Layout
from node.trainer.model import build
from node.trainer.optim import make_optimizer
from node.trainer.optimizer_state import kinds, optimizer_steps
from node.trainer.parallel import Ranks
from node.trainer.resume import load, save
from node.trainer.shard_writer import ShardWriter
from node.trainer.trainer_state import FOLDER, FragmentState, StepTotals, TrainerState
from node.trainer.weights import Weights
from protocols.errors import OperatorError

CPU = torch.device("cpu")
STANDING = TrainerState(
    fragments=(FragmentState(round=3),), round_step=2, step=5, tokens=99, position=7,
    rewarm_from=None, optimizer_steps=5,
)  # fmt: skip


class One:
    """A tiny model and its optimizer in this process."""

    def __init__(self, seed: int = 0, steps: int = 0, **inner: object) -> None:
        manifest = tiny_manifest()
        manifest = manifest.model_copy(update={"inner": manifest.inner.model_copy(update=inner)})
        self.model = build(manifest.model, seed)
        self.optimizer = make_optimizer(self.model, manifest.inner)
        layout = Layout.of_module(self.model)
        self.weights = Weights.of(dict(self.model.named_parameters()), layout, Ranks.alone(CPU))
        for step in range(steps):
            self.step(step)

    def step(self, number: int) -> float:
        tokens = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(number))
        loss = mean_loss(self.model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name] = parameter.detach().clone()
            for key, value in self.optimizer.state[parameter].items():
                found[f"{key}/{name}"] = value.clone()
        return found


def saved(one: One) -> TrainerState:
    """What comes back of ``STANDING``."""
    return STANDING.model_copy(update={"kinds": kinds(one.optimizer, one.weights)})


@pytest.mark.parametrize("one_disk", [True, False])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_what_comes_back_is_what_was_there_when_it_was_copied(
    tmp_path: Path, optimizer: str, one_disk: bool
):
    one = One(steps=5, optimizer=optimizer)
    expected = one.tensors()
    writing = save(tmp_path, one.weights, one.optimizer, STANDING, one_disk=one_disk)
    following = [one.step(n) for n in range(5, 8)]  # while it is written
    assert writing.finish() is None
    assert writing.done
    other = One(seed=9, steps=1, optimizer=optimizer)
    assert load(tmp_path, other.weights, other.optimizer, one_disk=not one_disk)[0] == saved(one)
    found = other.tensors()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert [other.step(n) for n in range(5, 8)] == following  # to the last bit


@pytest.mark.parametrize("one_disk", [True, False])
def test_it_does_not_depend_on_where_a_script_makes_its_tensors(tmp_path: Path, one_disk: bool):
    """As where it has set a GPU as its default device, from which no file is written."""
    one, other = One(steps=5), One(seed=9, steps=1)
    with torch.device("meta"):
        writing = save(tmp_path, one.weights, one.optimizer, STANDING, one_disk=one_disk)
        assert writing.finish() is None
        load(tmp_path, other.weights, other.optimizer, one_disk=one_disk)
    expected, found = one.tensors(), other.tensors()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_nothing_in_it_is_pickled(tmp_path: Path):
    one = One(steps=1)
    save(tmp_path, one.weights, one.optimizer, STANDING).finish()
    names = sorted(file.name for file in (tmp_path / FOLDER).iterdir())
    assert names == ["shard-00001-model-00001-of-00001.safetensors", "trainer.json"]


def test_training_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The disk stands still until training has gone on."""
    import threading

    went_on, stood = threading.Event(), threading.Event()
    write = ShardWriter.write_data

    def slow(*arguments):
        stood.set()
        assert went_on.wait(60)
        return write(*arguments)

    monkeypatch.setattr(ShardWriter, "write_data", slow)
    one = One(steps=5)
    expected = one.tensors()
    writing = save(tmp_path, one.weights, one.optimizer, STANDING)
    assert stood.wait(60)
    one.step(5)
    assert not writing.done
    went_on.set()
    assert writing.finish() is None
    other = One()
    load(tmp_path, other.weights, other.optimizer)
    found = other.tensors()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("one_disk", [True, False])
def test_a_full_disk_is_told_with_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_disk: bool
):
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ShardWriter, "write_data", full)
    one = One(steps=1)
    failure = save(tmp_path, one.weights, one.optimizer, STANDING, one_disk=one_disk).finish()
    assert failure is not None
    assert failure.errno == 28


@pytest.mark.parametrize("damage", ["cut", "gone", "standing", "places", "another model"])
def test_damage_is_told(tmp_path: Path, damage: str):
    one = One(steps=1)
    save(tmp_path, one.weights, one.optimizer, STANDING).finish()
    (file,) = (tmp_path / FOLDER).glob("*.safetensors")
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "gone":
        file.unlink()
    elif damage == "standing":
        (tmp_path / FOLDER / "trainer.json").write_text("{}")
    else:
        from safetensors.torch import save_file

        # "places" says where parts belong, but not of this one
        metadata = {"DCP_SHARDING_INFO": "{}"} if damage == "places" else None
        save_file({"parameter/x": torch.zeros(3)}, file, metadata)
    with pytest.raises(OperatorError, match="cannot resume") as caught:
        load(tmp_path, one.weights, one.optimizer)
    assert caught.value.code == "E404"


@pytest.mark.parametrize("one_disk", [True, False])
def test_a_file_that_is_damaged_once_it_was_looked_at_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_disk: bool
) -> None:
    """By torch with a BaseException of its own; the moments read by then are dropped."""
    one = One(steps=1)
    save(tmp_path, one.weights, one.optimizer, STANDING).finish()
    read = resume.HuggingFaceStorageReader.read_data

    def cut(*given: Any) -> Any:
        (file,) = (tmp_path / FOLDER).glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-100])
        return read(*given)

    monkeypatch.setattr(resume.HuggingFaceStorageReader, "read_data", cut)
    with pytest.raises(OperatorError, match="cannot resume") as caught:
        load(tmp_path, one.weights, one.optimizer, one_disk=one_disk)
    assert caught.value.code == "E404"
    assert "SafetensorError" in caught.value.why
    assert not one.optimizer.state


def test_an_interrupt_while_it_is_read_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    one = One(steps=1)
    save(tmp_path, one.weights, one.optimizer, STANDING).finish()
    monkeypatch.setattr(resume.HuggingFaceStorageReader, "read_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(tmp_path, one.weights, one.optimizer)


def test_moments_that_were_there_have_to_be_there(tmp_path: Path):
    one = One(steps=1)
    del one.optimizer.state[one.model.norm.weight]
    save(tmp_path, one.weights, one.optimizer, STANDING).finish()
    assert load(tmp_path, one.weights, one.optimizer)[0].without == ("norm.weight",)
    (tmp_path / FOLDER / "trainer.json").write_text(STANDING.model_dump_json())
    with pytest.raises(OperatorError, match="cannot resume") as caught:
        load(tmp_path, one.weights, one.optimizer)
    assert "moments of norm.weight are missing" in caught.value.why


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "muon": lambda p: torch.optim.Muon([one for one in p if one.ndim == 2]),
    "rmsprop": torch.optim.RMSprop,
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "nadam": torch.optim.NAdam,  # beside moments it has numbers
    "asgd": torch.optim.ASGD,
    "adamax": torch.optim.Adamax,
    "rprop": torch.optim.Rprop,
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adafactor": torch.optim.Adafactor,  # rows and columns are not kept: matrices begin anew
    "wide": lambda p: Wide(p, {}),
}


class Wide(torch.optim.Optimizer):
    """Keeps fp32 beside parameters of fewer bits, and counts with numbers of Python."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state |= {"step": 0, "decay": 1.0, "even": True, "none": None}
                state["mean"] = torch.zeros_like(parameter, dtype=torch.float32)
            assert type(state["step"]) is int
            state["step"] += 1
            state["even"] = not state["even"]
            state["decay"] *= 0.9
            state["mean"].lerp_(parameter.grad.float(), 0.3)
            parameter -= state["mean"] * state["decay"] * (1 + state["even"]) / state["step"]


@pytest.mark.parametrize("one_disk", [True, False])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_script_may_have_any_optimizer_and_parameters_without_a_gradient(
    tmp_path: Path, kind: str, one_disk: bool
):
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 2)])
    if kind == "wide":
        model.bfloat16()
    dtype = model[0].weight.dtype
    optimizer = OPTIMIZERS[kind](list(model.parameters()))

    def step() -> None:
        optimizer.zero_grad()
        model[1](model[0](torch.ones(2, 4, dtype=dtype))).square().mean().backward()
        optimizer.step()

    def taken() -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    step()
    step()
    weights = Weights.of(dict(model.named_parameters()), Layout.of_module(model), Ranks.alone(CPU))
    standing = STANDING.model_copy(update={"optimizer_steps": optimizer_steps(optimizer)})
    assert bool(standing.optimizer_steps) is (kind != "plain sgd")
    assert save(tmp_path, weights, optimizer, standing, one_disk=one_disk).finish() is None
    step()
    expected = taken()
    optimizer.state.clear()
    _, lost = load(tmp_path, weights, optimizer, one_disk=one_disk)
    whole = kind != "adafactor"
    words = "checkpoints cannot hold col_var, row_var, of 2 parameters"
    assert lost == ("" if whole else words)
    if kind == "adafactor":
        assert optimizer.state.keys() == {model[0].bias, model[1].bias}
    step()
    assert torch.equal(taken(), expected) or not whole


def test_a_number_that_is_not_finite_does_not_make_a_checkpoint_unreadable(tmp_path: Path):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.NAdam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.state[model.bias]["mu_product"].fill_(float("nan"))
    kept = float(optimizer.state[model.weight]["mu_product"])
    weights = Weights.of(dict(model.named_parameters()), Layout.of_module(model), Ranks.alone(CPU))
    save(tmp_path, weights, optimizer, STANDING).finish()
    optimizer.state.clear()
    load(tmp_path, weights, optimizer)
    products = [float(optimizer.state[p]["mu_product"]) for p in (model.weight, model.bias)]
    assert products == [kept, 0.0]


def test_what_an_earlier_version_counted_beside_steps_and_tokens_is_passed_over(tmp_path: Path):
    one = One(steps=5)
    save(tmp_path, one.weights, one.optimizer, STANDING).finish()
    state = tmp_path / FOLDER / "trainer.json"
    standing = json.loads(state.read_text())
    earlier = {"steps": 4, "tokens": 64, "finite_steps": 3, "loss_sum": 7.5, "seconds": 2.25}
    standing["fragments"][0] |= {"carried": earlier, "unsent": {**earlier, "steps": 5}}
    state.write_text(json.dumps(standing))
    (fragment,) = load(tmp_path, one.weights, one.optimizer)[0].fragments
    assert (fragment.carried, fragment.unsent) == (StepTotals(4, 64), StepTotals(5, 64))


@pytest.mark.parametrize("dtype", ["nonsense", "Tensor", "uint8"])
def test_a_number_of_no_type_is_damage(tmp_path: Path, dtype: str):
    one = One(steps=1)
    save(tmp_path, one.weights, one.optimizer, STANDING).finish()
    state = tmp_path / FOLDER / "trainer.json"
    standing = json.loads(state.read_text())
    standing["numbers"] = {"norm.weight": {"eta": {"value": 300, "dtype": dtype}}}
    state.write_text(json.dumps(standing))
    with pytest.raises(OperatorError, match="cannot resume"):
        load(tmp_path, one.weights, one.optimizer)


CHANGES: dict[str, tuple[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer], str]] = {
    "muon to adamw": ("muon", torch.optim.AdamW, "were trained by Muon, now by AdamW"),
    "adamw to rmsprop": ("adamw", torch.optim.RMSprop, "by AdamW, now by RMSprop"),
    "adamw to amsgrad": (
        "adamw",
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        "by AdamW, now by AdamW amsgrad",
    ),
    "fewer parameters": ("adamw", lambda p: torch.optim.AdamW(p[:-1]), "now by no optimizer"),
}


@pytest.mark.parametrize("one_disk", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_moments_of_another_optimizer_are_left_out_and_told(
    tmp_path: Path, change: str, one_disk: bool
):
    """They would be mixed with its own, or its first step would fail for want of its own."""
    before, make, words = CHANGES[change]
    one = One(steps=5, optimizer=before)
    save(tmp_path, one.weights, one.optimizer, STANDING, one_disk=one_disk).finish()
    other = One(seed=9)
    parameters = list(other.model.parameters())
    other.optimizer = make(parameters)
    _, left_out = load(tmp_path, other.weights, other.optimizer, one_disk=one_disk)
    assert words in left_out
    trained = {p for group in other.optimizer.param_groups for p in group["params"]}
    fits = change == "fewer parameters"
    assert other.optimizer.state.keys() == (trained if fits else set())
    other.step(5)
    steps = {float(state["step"]) for state in other.optimizer.state.values()}
    assert steps == {6.0 if fits else 1.0}
    names = dict(one.model.named_parameters())
    for name, parameter in other.model.named_parameters():
        if not trained & {parameter}:  # but all parameters are the checkpoint's
            assert torch.equal(parameter, names[name])


def test_other_numbers_of_the_same_optimizer_keep_its_moments(tmp_path: Path):
    """Schedules change betas on the way, so that they say nothing of what is kept."""
    one = One(steps=5)
    save(tmp_path, one.weights, one.optimizer, STANDING).finish()
    other = One(seed=9)
    other.optimizer = torch.optim.AdamW(other.model.parameters(), lr=0.5, betas=(0.8, 0.99))
    assert load(tmp_path, other.weights, other.optimizer)[1] == ""
    assert len(other.optimizer.state) == len(one.optimizer.state)
    assert other.optimizer.param_groups[0]["betas"] == (0.8, 0.99)


def test_a_checkpoint_that_names_no_optimizer_is_read_as_before(tmp_path: Path):
    one = One(steps=5)
    save(tmp_path, one.weights, one.optimizer, STANDING).finish()
    (tmp_path / FOLDER / "trainer.json").write_text(STANDING.model_dump_json())
    other = One(seed=9)
    assert load(tmp_path, other.weights, other.optimizer) == (STANDING, "")
    assert len(other.optimizer.state) == len(one.optimizer.state)
