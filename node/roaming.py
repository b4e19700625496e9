"""Making a member of a run of gossip, where :mod:`node.member` makes one of certified rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from bootstrap.manifest import Manifest
from diloco.mixing import extra_exchanges
from gossip.hooks import Hooks
from gossip.membership.presence import Presence
from gossip.pairs.account import Account, BookFile
from gossip.pairs.letter_times import LetterTerms
from gossip.pairs.meeting import Habits
from gossip.pairs.roamer import Roamer
from gossip.pairs.rounded import Acquaintance, Rounded
from gossip.pairs.swarm import Pairs
from gossip.wiring import Wiring
from node.replicas.own_state import OwnReplica
from node.replicas.replica import OuterReplica
from node.run_rules import hidden_steps


def make_pairs(
    manifest: Manifest,
    wiring: Wiring,
    replicas: Sequence[OuterReplica],
    presence: Presence,
    hooks: Hooks,
    applied: Callable[[Rounded], None],
    *,
    newcomer: bool,
    directory: Path | None,
) -> Pairs:
    """This node's membership; ``applied`` is told of each round, ``hooks`` of all else.

    ``replicas`` are those of fragments 0, 1, …; ``directory`` is where push-sum's weights are kept,
    so that they outlive the process.
    """
    gossip = manifest.gossip
    rounds = manifest.rounds
    acquaintance = Acquaintance([replica.size for replica in replicas])
    terms = LetterTerms(
        rounds.allowed_codecs, rounds.exposed, hidden_steps(rounds), rounds.fragments
    )

    def more(distance: float, progress: float, lost: float) -> int:
        """Consensus control, within what the run allows."""
        return min(gossip.extra, extra_exchanges(distance, progress, gossip.bound, lost))

    def made(replica: OuterReplica) -> Roamer:
        assert isinstance(replica, OwnReplica)
        # each fragment has partners of its own: what one learnt goes to more of the others
        fragment, one_way = replica.place.fragment, gossip.rule == "push-sum"
        seed = manifest.run_id + bytes([fragment] if fragment else [])
        account = None
        if one_way:
            book = None
            if directory is not None:
                name = f"weight-{fragment}.json"
                book = BookFile(directory / name, manifest.run_id, wiring.identity.peer_id)
            account = kept = Account(replica.blend.weight, book, wiring.offload)
            replica.blend.weight = account.balance.own
            replica.here = lambda: kept.balance.own
        roamer = Roamer(
            replace(wiring, codec=replica.codec),
            replica,
            presence,
            Habits(seed, rounds.max_staleness, one_way=one_way),
            replica.size,
            acquaintance,
            terms,
            neighbours=gossip.neighbours,
            more=more,
            applied=applied,
            rejected=hooks.rejected,
            notice=hooks.notice,
            newcomer=newcomer,
            account=account,
        )
        replica.who = roamer.roster
        return roamer

    return Pairs([made(replica) for replica in replicas], hooks)
