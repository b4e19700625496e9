"""An owner's work on one part: collect slices, merge them once, sign what came out.

Slices are kept encoded until all that are expected are in, or the plan gives up on the rest, and
are then summed in the order of the plan's contributors. So the merged bytes depend on who
contributed and not on whose bytes arrived first, and a slice that breaks off half-way has left
no trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from blake3 import blake3

from protocols.codecs import RangeCodec
from protocols.errors import Malformed, NonFinite
from protocols.identity import PeerId
from protocols.messages import Contributor, Included, Plan


@dataclass
class Collecting:
    """The slices of one part as they come in at its owner."""

    start: int
    stop: int
    plan: Plan
    slices: dict[PeerId, torch.Tensor] = field(default_factory=dict)  # uint8, encoded
    refused: set[PeerId] = field(default_factory=set)
    closed: bool = False  # merged, or being merged: later slices come too late

    def renew(self, plan: Plan) -> None:
        """A later plan for the same part: it may expect fewer contributors."""
        self.plan = plan

    def waits_for(self) -> list[PeerId]:
        """Active contributors whose slice is not in yet."""
        return [
            c.peer
            for c in self.plan.contributors
            if c.active and c.peer not in self.slices and c.peer not in self.refused
        ]


def merge(
    codec: RangeCodec, contributors: Sequence[Contributor], collecting: Collecting
) -> tuple[torch.Tensor, bytes, tuple[Included, ...]]:
    """The weighted mean of the slices: encoded bytes (uint8), their digest, who is in it.

    Σ w·x / Σ w over what arrived, accumulated in fp32 in the order of ``contributors``. A slice
    that does not decode to finite numbers is left out and its sender listed in
    ``collecting.refused``; so is the loudest, should the mean be beyond what the codec carries.
    Who has no weight is not in it, and without any weight the mean is zero.
    """
    start, stop = collecting.start, collecting.stop
    encoded = torch.empty(codec.encoded_size(start, stop), dtype=torch.uint8)
    while True:
        counted = [
            (index, c)
            for index, c in enumerate(contributors)
            if c.peer in collecting.slices and c.peer not in collecting.refused and c.weight > 0
        ]
        total = sum(c.weight for _, c in counted)
        mean = torch.zeros(stop - start, dtype=torch.float32)
        at_fault = None
        for _, contributor in counted:
            try:
                _add(
                    codec,
                    collecting.slices[contributor.peer],
                    start,
                    contributor.weight / total,
                    mean,
                )
            except (NonFinite, Malformed):
                at_fault = contributor.peer
                break
        if at_fault is None:
            try:
                codec.encode(start, mean, encoded)
                break
            except ValueError:
                at_fault = _loudest(codec, [c.peer for _, c in counted], collecting)
        collecting.refused.add(at_fault)  # the shares change: sum again without it
    included = tuple(Included(index, stop - start) for index, _ in counted)
    return encoded, blake3(as_bytes(encoded)).digest(), included


def _loudest(codec: RangeCodec, peers: Sequence[PeerId], collecting: Collecting) -> PeerId:
    """Whose slice has the element of largest magnitude."""

    def loudness(peer: PeerId) -> float:
        values = torch.zeros(collecting.stop - collecting.start)
        _add(codec, collecting.slices[peer], collecting.start, 1.0, values)
        return float(values.abs().max())

    return max(peers, key=loudness)


def _add(
    codec: RangeCodec, data: torch.Tensor, start: int, share: float, into: torch.Tensor
) -> None:
    for chunk in codec.chunks(start, start + len(into)):
        codec.decode_add_chunk(
            chunk,
            data[chunk.offset : chunk.offset + chunk.size],
            share,
            into[chunk.start - start : chunk.stop - start],
        )


def as_bytes(data: torch.Tensor) -> memoryview:
    """A uint8 tensor's memory."""
    return memoryview(data.numpy())  # type: ignore[arg-type]  # numpy's stubs lack Buffer on 3.11
