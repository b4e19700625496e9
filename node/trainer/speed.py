"""How much of a device's arithmetic training uses: model FLOPs utilisation (PaLM, 2204.02311).

What counts is what the model needs, 6 operations a parameter and token, and 12 T d_model a layer
and token for attention over T tokens; not what recomputation adds. The peaks are the makers'
figures for dense products in bf16 without sparsity, in 10^12 operations a second, and for a GPU
that is not listed, or on a CPU, there is no utilisation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from bootstrap.manifest import Manifest, Model
from node.trainer.parallel import Ranks

# By words of the name that CUDA gives the device. What makers print with sparsity is halved, and a
# device is listed only where a document of its maker has the figure.
PEAKS_TFLOPS = (
    # https://nvdam.widen.net/s/wwnsxrhm2w/blackwell-datasheet-3384703
    ("B200", 2250.0),
    # https://www.nvidia.com/en-us/data-center/h200/
    ("H200", 989.0),
    # https://www.nvidia.com/en-us/data-center/h100/: 1979 SXM, 1671 NVL, 1513 PCIe with sparsity
    ("H100", 989.0),
    ("H100 NVL", 835.0),
    ("H100 PCIe", 756.0),
    # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet.pdf
    ("A100", 312.0),
    ("A100 PCIe", 312.0),
    # https://www.nvidia.com/en-us/data-center/l40s/: 362.05, 733 with sparsity
    ("L40S", 362.0),
)
VARIANTS = {"nvl", "pcie"}  # other devices than those without the word


def peak_flops(device: torch.device) -> float | None:
    """Operations a second of a device in bf16; None where it is not known."""
    if device.type != "cuda":
        return None
    name = _words(torch.cuda.get_device_name(device))
    for known, peak in PEAKS_TFLOPS:
        words = _words(known)
        if words <= name and name & VARIANTS <= words:
            return peak * 1e12
    return None


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", name.lower()))


def flops_a_token(model: Model, matrices: int, seq_len: int) -> float | None:
    """Operations of forward and backward; ``matrices``: elements of all parameters of 2+ dims.

    Of a mixture of experts only those count that a token goes through. None for a model of
    transformers, whose attention is its own.
    """
    if model.kind == "hf":
        return None
    used = matrices
    if not model.tied_embeddings:
        used -= model.vocab_size * model.d_model  # looked up, not multiplied
    if model.experts:
        expert = 3 * model.d_model * model.d_ff
        used -= model.n_layers * expert * (model.experts - model.top_k)
    return 6.0 * used + 12.0 * model.n_layers * model.d_model * seq_len


@dataclass(frozen=True)
class Speed:
    """The peak of an island's devices, and the operations that a token takes."""

    flops_a_token: float | None
    peak: float | None  # of all ranks, operations a second

    @classmethod
    def of(cls, manifest: Manifest, matrices: int, ranks: Ranks) -> Speed:
        """For a run's model on these ranks, which all have the device of this one."""
        peak = peak_flops(ranks.device)
        return cls(
            flops_a_token(manifest.model, matrices, manifest.data.seq_len),
            peak * ranks.size if peak is not None else None,
        )

    def mfu(self, tokens: int, seconds: float) -> float | None:
        """The share of the peak used for ``tokens`` in ``seconds``; None where it is not known."""
        if self.flops_a_token is None or self.peak is None or seconds <= 0:
            return None
        return self.flops_a_token * tokens / seconds / self.peak
