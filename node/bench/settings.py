"""What one member of a bench is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from blake3 import blake3

VECTORS = 2.5  # fp32 vectors that a member needs memory for at the most


@dataclass(frozen=True)
class Settings:
    """One member. What is not marked as its own must be equal on all."""

    members: int = 2
    size: int = 25_000_000  # fp32 elements
    codec: str = "int4"
    rounds: int = 5
    tls: bool = True
    quorum: float = 1.0  # a round waits for all live members
    groups: Literal["none", "region", "grid"] = "none"
    max_group: int = 64  # more members than that stand in a grid
    # its own
    listen: str = "0.0.0.0:4390"
    region: str = ""  # its site, for groups
    advertise: str = ""  # HOST:PORT where the others reach it; empty: where it listens
    peers: tuple[str, ...] = ()  # HOST:PORT of members to begin with
    seed: int = 0  # of its noise
    max_upload: float = 0.0  # bytes a second; 0: no limit
    patience_s: float = 60.0  # for the others to come, at first and to each round

    @property
    def alike(self) -> str:
        """Options with which the others have to start as well, where they are not the defaults."""
        names = ("members", "size", "codec", "rounds", "groups", "max_group")
        given = {name: getattr(self, name) for name in names}
        words = [
            f" --{name.replace('_', '-')} {value}"
            for name, value in given.items()
            if value != getattr(Settings, name)
        ]
        return "".join(words) + ("" if self.tls else " --no-tls")

    @property
    def run(self) -> bytes:
        """32 bytes that name what all must agree on."""
        agreed = (
            self.members,
            self.size,
            self.codec,
            self.rounds,
            self.quorum,
            self.groups,
            self.max_group,
        )
        return blake3(f"atoll bench {agreed}".encode()).digest()
