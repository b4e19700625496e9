"""Model FLOPs utilisation: what counts, and where there is none."""

from __future__ import annotations

import pytest
import torch

from bootstrap.manifest import Data, Manifest, Model
from node.trainer.layout import Layout
from node.trainer.parallel import Ranks
from node.trainer.speed import Speed, flops_a_token, peak_flops

DENSE = Model(d_model=64, n_layers=4, n_heads=8, n_kv_heads=4, d_ff=176)


def test_matrices_count_six_times_and_attention_by_the_length() -> None:
    matrices = Layout.of_config(DENSE).dense
    by_hand = 256 * 64 + 4 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 176)
    assert matrices == by_hand
    assert flops_a_token(DENSE, matrices, 128) == 6 * by_hand + 12 * 4 * 64 * 128
    apart = DENSE.model_copy(update={"tied_embeddings": False})
    assert flops_a_token(apart, Layout.of_config(apart).dense, 128) == 6 * by_hand + 393_216


def test_of_experts_those_count_that_a_token_goes_through() -> None:
    few = DENSE.model_copy(update={"experts": 4, "top_k": 2})
    many = DENSE.model_copy(update={"experts": 16, "top_k": 2})
    work = [flops_a_token(m, Layout.of_config(m).dense, 128) for m in (few, many)]
    assert work[0] is not None
    assert work[1] is not None
    assert work[1] - work[0] == 6 * 4 * 12 * 64  # the router's rows alone


def test_the_share_is_of_all_ranks_and_none_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    manifest = Manifest(model=DENSE, data=Data(seq_len=128))
    speed = Speed.of(manifest, Layout.of_config(DENSE).dense, Ranks.alone(cpu))
    assert speed.mfu(1000, 1.0) is None
    assert Speed(1e9, 4e12).mfu(2000, 1.0) == 0.5
    assert Speed(1e9, 4e12).mfu(2000, 0.0) is None
    names = {
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA A100 80GB PCIe": 312e12,
        "NVIDIA H200 NVL": None,  # another device than the H200
        "NVIDIA GB200": None,
        "NVIDIA L40": None,
        "Unheard of": None,
    }
    for name, peak in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda", 0)) == peak
