"""How layers are computed: made again in backward, compiled once for all of them, or refused."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bootstrap.manifest import Model
from node.trainer.computing import Computing, check_compiler
from node.trainer.model import Decoder, build
from protocols.errors import OperatorError

CONFIG = Model(d_model=16, n_layers=4, n_heads=2, n_kv_heads=1, d_ff=24, max_seq_len=16)
TOKENS = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))


def gradients(model: Decoder) -> dict[str, Tensor]:
    model.zero_grad()
    model(TOKENS).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def prepared(computing: Computing, config: Model = CONFIG) -> Decoder:
    model = build(config, 0)
    for block in model.layers.values():
        computing.prepare(block)
    return model


@pytest.mark.parametrize("how", ["full", "selective"])
def test_what_is_made_again_is_the_same(how: Any) -> None:
    wanted, found = gradients(build(CONFIG, 0)), gradients(prepared(Computing(recompute=how)))
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


@pytest.mark.filterwarnings("default")  # torch warns of itself while it compiles
@pytest.mark.parametrize("how", ["none", "full"])
def test_layers_of_a_kind_are_compiled_once(how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So compile time does not grow with depth. (Dynamo alone here: no C++ in the fast tests.)"""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    wanted, model = gradients(build(CONFIG, 0)), prepared(Computing(recompute=how, compile=True))
    found = gradients(model)
    assert counter.frame_count == 1
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name])
    gradients(model)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_without_a_compiler_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(config.cpp, "cxx", ("/no/such/compiler",))
    with pytest.raises(OperatorError, match=r"there is no C\+\+ compiler") as caught:
        check_compiler(torch.device("cpu"), tmp_path)
    assert caught.value.code == "E411"
    assert "--compile" in caught.value.fix
