"""Identities that are the same in every run."""

from __future__ import annotations

from protocols.identity import Identity


def identity(number: int) -> Identity:
    return Identity.from_seed(bytes([number]) * 32)
