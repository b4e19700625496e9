"""Making a member of a run of gossip, where :mod:`node.assembly` makes one of certified rounds."""

from __future__ import annotations

from bootstrap.manifest import Manifest
from diloco.mixing import extra_exchanges
from gossip.bodies import Wiring
from gossip.hooks import Hooks
from gossip.presence import Presence
from gossip.roamer import Roamer
from gossip.wandering import Habits
from node.own_state import OwnReplica


def make_roamer(
    manifest: Manifest,
    wiring: Wiring,
    replica: OwnReplica,
    presence: Presence,
    hooks: Hooks,
    *,
    newcomer: bool,
) -> Roamer:
    """This node's membership; ``hooks.applied`` is told of each round, ``behind`` of nothing."""
    gossip = manifest.gossip

    def more(distance: float, progress: float) -> int:
        """Consensus control, within what the run allows."""
        return min(gossip.extra, extra_exchanges(distance, progress, gossip.bound))

    roamer = Roamer(
        wiring,
        replica,
        presence,
        Habits(
            manifest.run_id,
            manifest.rounds.max_staleness,
            one_way=gossip.rule == "push-sum",
        ),
        len(replica.base),
        neighbours=gossip.neighbours,
        more=more,
        applied=lambda rounded: hooks.applied(rounded, None),
        rejected=hooks.rejected,
        learned=hooks.learned,
        changed=hooks.peer,
        newcomer=newcomer,
    )
    replica.who, replica.waiting = roamer.roster, roamer.waiting_weight
    return roamer
