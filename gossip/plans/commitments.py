"""Commitments to what was sent: hash trees over the chunks of a slice. Pure.

A contributor signs the root of its slice of a part, and the part's owner signs the roots of all
slices that it has, before anybody knows their weights. Whoever gets one chunk later, with the
hashes beside its way up to the root, knows that it is what was sent (Merkle, CRYPTO '87). Leaves
may carry numbers; then each node also commits to their sum below it, so that one chunk's numbers
can be shown to be part of a total (as in proofs of liabilities, Chalkias et al. 2020).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from blake3 import blake3

from protocols.errors import Malformed
from protocols.identity import Identity, PeerId, verify
from protocols.messages import TransferHeader
from protocols.transport import Buffer

_LEAF, _NODE = b"\x00", b"\x01"
_SLICE = b"atoll slice\x00"
_HASH, _SIGNATURE = 32, 64
SEAL_SIZE = _HASH + _SIGNATURE  # root and signature, in bytes

NONE = torch.zeros(0, dtype=torch.float64)


@dataclass(frozen=True)
class TreeNode:
    """A hash, and the sum of the numbers of all leaves below it: float64 [m]."""

    hash: bytes
    total: torch.Tensor = NONE

    @property
    def bytes(self) -> bytes:
        """What stands for it in a proof."""
        return self.hash + packed(self.total)


def leaf(data: Buffer) -> TreeNode:
    """The node of one chunk."""
    return TreeNode(blake3(_LEAF).update(data).digest())


def leaf_of(numbers: torch.Tensor) -> TreeNode:
    """The node of some numbers, float64 [m]."""
    return TreeNode(blake3(_LEAF + packed(numbers)).digest(), numbers)


def packed(numbers: torch.Tensor) -> bytes:
    """Float64 [m], little endian."""
    found: bytes = numbers.numpy().astype("<f8").tobytes()
    return found


def unpacked(data: Buffer) -> torch.Tensor:
    """The float64 [m] that were packed."""
    return torch.frombuffer(bytearray(data), dtype=torch.float64) if len(data) else NONE


def root(leaves: Sequence[TreeNode]) -> TreeNode:
    """The root over the leaves, at least one; a node without a sibling goes up as it is."""
    level = list(leaves)
    while len(level) > 1:
        level = list(_above(level))
    return level[0]


def way(leaves: Sequence[TreeNode], index: int) -> list[TreeNode]:
    """The siblings along the path from a leaf up to the root."""
    level, found = list(leaves), []
    while len(level) > 1:
        if index ^ 1 < len(level):
            found.append(level[index ^ 1])
        level, index = list(_above(level)), index // 2
    return found


def way_length(count: int, index: int) -> int:
    """How many siblings the path of one of ``count`` leaves has."""
    found = 0
    while count > 1:
        found += index ^ 1 < count
        count, index = -(-count // 2), index // 2
    return found


def top(node: TreeNode, beside: Sequence[TreeNode], count: int, index: int) -> TreeNode:
    """The root, from a leaf and its path's siblings; Malformed for too few or too many."""
    if not 0 <= index < count or len(beside) != way_length(count, index):
        raise Malformed("a way through another tree")
    nodes = iter(beside)
    while count > 1:
        if index ^ 1 < count:
            other = next(nodes)
            node = _join(other, node) if index & 1 else _join(node, other)
        count, index = -(-count // 2), index // 2
    return node


def _above(level: Sequence[TreeNode]) -> Iterator[TreeNode]:
    for at in range(0, len(level) - 1, 2):
        yield _join(level[at], level[at + 1])
    if len(level) % 2:
        yield level[-1]


def _join(left: TreeNode, right: TreeNode) -> TreeNode:
    digest = blake3(_NODE + left.bytes + right.bytes).digest()
    return TreeNode(digest, left.total + right.total)


# --- what a contributor signs ---------------------------------------------------------------------


def seal(identity: Identity, header: TransferHeader, leaves: Sequence[TreeNode]) -> bytes:
    """What is sent behind a slice: the root of its chunks, signed. ``SEAL_SIZE`` bytes."""
    found = root(leaves).hash
    return found + identity.sign(_statement(header, found))


def root_of(seal_: bytes) -> bytes:
    """The root in a seal."""
    return seal_[:_HASH]


def signature_of(seal_: bytes) -> bytes:
    """The signature in a seal; empty where an owner names the root of its own slice."""
    return seal_[_HASH:]


def check_seal(sender: PeerId, header: TransferHeader, seal_: bytes) -> None:
    """Raise BadSignature unless ``sender`` has sealed its slice so."""
    verify(sender, signature_of(seal_), _statement(header, root_of(seal_)))


def _statement(header: TransferHeader, found: bytes) -> bytes:
    return _SLICE + dataclasses.replace(header, done=0).encode() + found
