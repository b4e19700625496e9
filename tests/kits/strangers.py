"""Identities from anywhere that announce themselves to one member of a simulated swarm."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from simulated_swarm import Member, SimulatedSwarm
from toy_replica import RUN

from protocols.envelope import seal
from protocols.errors import Crowded
from protocols.identity import Identity, PeerId

MOST = 8  # of them may come from one place


class Strangers:
    """Identities that announce themselves to one member."""

    def __init__(self, swarm: SimulatedSwarm, member: Member) -> None:
        self.swarm, self.member = swarm, member
        self.presence = member.swarm.presence
        self.at: dict[PeerId, str] = {}
        self.found: dict[PeerId, str] = {}
        self.made = 0
        self.told: list[str] = []
        self.presence.membership.most_from_one_place = MOST
        self.presence.observed = lambda peer: self.at.get(peer, "")
        self.presence.reached = lambda peer: self.found.get(peer, "")
        self.presence.on_rejected = lambda peer, error: self.told.append(str(error))

    def envelope(self, *claims: str, role: str = "island") -> tuple[PeerId, bytes]:
        """The announcement of a new one."""
        self.made += 1
        return self.announcement(self.made, *claims, role=role)

    def announcement(
        self, number: int, *claims: str, sequence: int = 1, **said: str
    ) -> tuple[PeerId, bytes]:
        """What one of them says; ``*`` in what it claims stands for its number."""
        identity = Identity.from_seed(number.to_bytes(4, "big") * 8)
        addresses = tuple(claim.replace("*", str(number)) for claim in claims if claim)
        status = replace(self.presence.status, peer=identity.peer_id, addresses=addresses, **said)
        expires = self.presence.wall() + 30.0
        return identity.peer_id, seal(
            identity, status, purpose="announce", run=RUN, expires=expires, sequence=sequence
        )

    def say(self, number: int, *, sequence: int, status: str = "running") -> None:
        """One of them says something new itself."""
        peer, envelope = self.announcement(number, sequence=sequence, status=status)
        with suppress(Crowded):
            self.presence.learn(envelope, peer)

    def come(
        self, count: int, at: str, *claims: str, directly: bool = True, role: str = "island"
    ) -> int:
        """So many announce themselves from an address, or others pass it on; how many are taken."""
        taken = 0
        for _ in range(count):
            peer, envelope = self.envelope(*claims, role=role)
            self.at[peer] = at
            try:
                self.presence.learn(envelope, peer if directly else None)
            except Crowded:
                continue
            taken += 1
        return taken

    @property
    def there(self) -> list[PeerId]:
        """Those of them that this member takes to be there."""
        now = self.presence.wiring.now()
        return [peer for peer in self.at if self.presence.membership.there(peer, now)]
