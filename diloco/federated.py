"""Federated averaging: a few of many take part in each round; and merging once, at the end.

FedAvg (McMahan et al., 1602.05629): a server sends θ to a random part of the clients, they train,
and θ becomes their mean weighted by tokens. In terms of :mod:`diloco.optimizers` that is outer
``sgd`` with η = 1; FedAvgM is ``heavyball``, FedAdam and FedYogi are ``adam`` and ``yogi``.

Branch-Train-Merge (Li et al., 2208.03306): islands never meet, and their parameters are averaged
when all are done, weighted by tokens (or kept as an ensemble). It is what any of the other modes
is compared with: if it does no better than this, its traffic is for nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from diloco import merge

Name = TypeVar("Name", bound=str)


def sampled(clients: Sequence[Name], share: float, round_: int, seed: int) -> list[Name]:
    """Those who train in a round: ⌈share · clients⌉, the same ones whoever asks, in their order.

    Ranked by a hash of seed, round and name, so a client that comes or goes changes the choice of
    at most one other. Raises :class:`ValueError` unless 0 < share ≤ 1.
    """
    if not 0 < share <= 1:
        raise ValueError(f"a share of {share} of the clients")

    def rank(client: Name) -> bytes:
        return hashlib.blake2b(f"{seed}/{round_}/{client}".encode(), digest_size=8).digest()

    count = math.ceil(round(share * len(clients), 9))  # 0.07 · 100 is 7, and not a bit above
    chosen = set(sorted(clients, key=rank)[: max(1, count)])
    return [client for client in clients if client in chosen]


@torch.no_grad()
def merged_branches(branches: Sequence[Tensor], tokens: Sequence[float]) -> Tensor:
    """Σ tokens · θ / Σ tokens, float32 [n]; raises :class:`ValueError` if nobody saw any."""
    if not sum(tokens) > 0:
        raise ValueError("no branch has seen a token")
    return merge.weighted_mean(branches, tokens, torch.empty_like(branches[0]))
