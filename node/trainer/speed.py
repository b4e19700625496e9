"""How much of a device's arithmetic training uses: model FLOPs utilisation (PaLM, 2204.02311).

What counts is what the model needs, 6 operations a parameter and token, and 12 T d_model a layer
and token for attention over T tokens; not what recomputation adds. The peaks are the makers'
figures for dense products in bf16 without sparsity, in 10^12 operations a second, and for a GPU
that is not listed, or on a CPU, there is no utilisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bootstrap.manifest import Manifest, Model
from node.trainer.parallel import Ranks

# by part of the name that CUDA gives the device; the first that fits
PEAKS_TFLOPS = (
    ("B200", 2250.0),
    ("H200", 989.0),
    ("H100 NVL", 835.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("A100", 312.0),
    ("L40S", 362.0),
    ("L4", 121.0),
    ("A10", 125.0),
    ("RTX 4090", 165.0),
    ("RTX 3090", 71.0),
)


def peak_flops(device: torch.device) -> float | None:
    """Operations a second of a device in bf16; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak * 1e12 for part, peak in PEAKS_TFLOPS if part in name), None)


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
    """What an island's devices could do, and what a token takes."""

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
        """The share of the peak that was used for so many tokens; None where it is not known."""
        if self.flops_a_token is None or self.peak is None or seconds <= 0:
            return None
        return self.flops_a_token * tokens / seconds / self.peak
