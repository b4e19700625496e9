"""What both kinds of swarms have in common: certified rounds, and islands that meet in pairs.

:class:`gossip.chain.swarm.Swarm` has a chain of rounds for each fragment of the model,
:class:`gossip.pairs.swarm.Pairs` a series of exchanges. Whoever drives a trainer, keeps checkpoints
or looks who is there needs no more than :class:`AnySwarm` and its :class:`AnyChain`.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from gossip.catchup.lineage import Lineage
from gossip.membership.members import Membership
from gossip.membership.presence import Presence
from gossip.membership.standing import changed, seen_from
from gossip.place import Place
from gossip.plans.ladder import Chosen
from gossip.wiring import Wiring
from protocols.identity import PeerId
from protocols.messages import Announce


class Wired:
    """What follows from how a node is wired."""

    wiring: Wiring

    @property
    def me(self) -> PeerId:
        """This node."""
        return self.wiring.identity.peer_id

    def now(self) -> float:
        """Monotonic seconds."""
        return self.wiring.now()


class FragmentPresence(Wired):
    """What a node says of itself, as far as one fragment of the model is concerned."""

    fragment: int
    presence: Presence

    @property
    def status(self) -> Announce:
        """What this node says of itself, seen from this fragment."""
        return seen_from(self.presence.status, self.fragment)

    def note(self, **changes: Any) -> None:
        """Change what this node says of itself; it is said with the next heartbeat."""
        self.presence.status = changed(self.presence.status, self.fragment, **changes)


class SwarmPresence(Wired):
    """What a node says of itself and whom it knows, with all fragments, in swarms of both kinds."""

    presence: Presence

    @property
    def status(self) -> Announce:
        """What this node says of itself."""
        return self.presence.status

    @property
    def membership(self) -> Membership:
        """Who else is there."""
        return self.presence.membership

    def note(self, **changes: Any) -> None:
        """Change what this node says of itself; it is said with the next heartbeat."""
        self.presence.note(**changes)


class AnyChain(Protocol):
    """This node's rounds, or exchanges, of one fragment."""

    wiring: Wiring
    presence: Presence
    fragment: int

    @property
    def membership(self) -> Membership:
        """Who else is there, seen from this fragment."""
        ...

    @property
    def lineage(self) -> Lineage:
        """The handovers up to where the fragment stands; without any, the creator alone."""
        ...

    @property
    def under_way(self) -> bool:
        """Whether the round has a plan, or in pairs an exchange is under way.

        It says nothing about this node's own work: see :attr:`contributes`.
        """
        ...

    @property
    def contributes(self) -> bool:
        """Whether the trainer's snapshot may be sent: then it must not be overwritten."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether what the trainer has learnt up to its snapshot may still come into the base."""
        ...

    @property
    def chosen(self) -> Chosen | None:
        """How the newest round's, or letter's, codec was chosen; None where there is only one."""
        ...

    @property
    def in_doubt(self) -> Set[PeerId]:
        """Who may have got, or not, what this node has given away (:meth:`settle`)."""
        ...

    def timed(self) -> list[float]:
        """Seconds that each exchange of a round took, of those since this was last called."""
        ...

    def note(self, **changes: Any) -> None:
        """Change what this node says of itself; it is said with the next heartbeat."""
        ...

    def update(self, **changes: Any) -> None:
        """Change what this node says of itself, and say it at once."""
        ...

    def announced_place(self) -> Place:
        """Where this node says that it stands."""
        ...

    def still(self) -> AbstractAsyncContextManager[None]:
        """No outer step is taken while this is held."""
        ...

    def on_news(self, announce: Announce) -> None:
        """A peer announced something."""
        ...

    def kick(self) -> None:
        """Something has changed: check what is due."""
        ...

    def wait_for_all(self) -> None:
        """Begin no round before all who ask for it have caught up: this node will leave soon."""
        ...

    async def settle(self) -> None:
        """Give nothing more away, and wait until nobody is :attr:`in_doubt`, to save and leave."""
        ...

    async def run(self) -> None:
        """Do what is due, until cancelled."""
        ...


class AnySwarm(Protocol):
    """This node's part in a run."""

    @property
    def chains(self) -> Sequence[AnyChain]: ...

    @property
    def presence(self) -> Presence: ...

    @property
    def membership(self) -> Membership: ...

    @property
    def status(self) -> Announce:
        """What this node says of itself."""
        ...

    @property
    def me(self) -> PeerId: ...

    def now(self) -> float: ...

    def still(self) -> AbstractAsyncContextManager[None]:
        """No outer step is taken while this is held."""
        ...

    async def run(self) -> None:
        """Take part until cancelled."""
        ...
