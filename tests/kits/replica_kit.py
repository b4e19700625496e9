"""Members of a run's replicas, and values to fill these with."""

from __future__ import annotations

import torch

from protocols.identity import Identity, PeerId

ME, OTHER = (PeerId(Identity.from_seed(bytes([n]) * 32).peer_id) for n in (1, 2))


def normal(seed: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))
