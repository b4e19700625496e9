"""What a run's manifest says of its rounds: their rules, and what keeps the outer state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bootstrap.manifest import Manifest
from bootstrap.manifest_rounds import Rounds
from diloco.optimizers import named
from gossip.plans.grouping import Grouping
from gossip.plans.rules import FRIENDS, STRANGERS, Rules
from gossip.plans.validity import MAX_TOKENS
from node.modes import ONLY_MERGE_S, clients_of, once
from node.replicas.eager_state import EagerReplica
from node.replicas.gradient_state import GradientReplica, decaying
from node.replicas.lowrank_state import LowRankReplica, plan_of
from node.replicas.mixing import mix_of
from node.replicas.own_state import OwnReplica
from node.replicas.replica import OuterReplica
from node.replicas.sparse_state import SparseReplica
from node.trainer.layout import Layout, Outline
from node.trainer.shared import SharedVectors
from protocols.codecs import RangeCodec
from protocols.identity import PeerId
from protocols.tasks import Offload

CARRIED = 16  # times a round's inner steps: the most that work may have gathered up until its merge

# what a mode keeps, or merges, in another way than parameters as a whole
REPLICAS: dict[str, type[OuterReplica]] = {
    "eager": EagerReplica,
    "allreduce": GradientReplica,
    "sparta": SparseReplica,
    "gossip": OwnReplica,
    "push-sum": OwnReplica,
}


def kind_of(manifest: Manifest, layout: Outline) -> Callable[..., OuterReplica]:
    """What keeps the outer state of a run."""
    kind = REPLICAS.get(manifest.mode, OuterReplica)
    if kind is not GradientReplica:
        return kind
    assert isinstance(layout, Layout)  # scripts take steps of their own
    edges = decaying(layout.entries)
    if named(manifest.outer.optimizer).factors:
        plan = plan_of(layout.entries, manifest.outer.rank)
        return partial(LowRankReplica, plan=plan, edges=edges)
    return partial(GradientReplica, edges=edges)


def replicas_of(
    manifest: Manifest,
    me: PeerId,
    layout: Outline,
    vectors: SharedVectors,
    offload: Offload,
    founders: tuple[PeerId, ...],
    *,
    trains: bool,
) -> tuple[OuterReplica, ...]:
    """The outer state of every fragment, each a part of the vectors; there is nothing in it yet.

    A node that does not train has nothing to send, and no residual to keep.
    """
    kind = kind_of(manifest, layout)
    replicas: list[OuterReplica] = []
    for fragment, cut in enumerate(layout.cuts):
        codec = RangeCodec(manifest.rounds.allowed_codecs[0], cut.dense)
        here = slice(cut.start, cut.stop)
        replica = kind(manifest, me, vectors, codec, offload, founders, fragment, here)
        if trains:
            replica.residual = replica.new_residual()
        replicas.append(replica)
    return tuple(replicas)


def hidden_steps(rounds: Rounds, wanted: int = 0) -> float:
    """Inner steps of a round that go on while the model, or a fragment, is on its way.

    ``wanted`` is the most that anybody's links ask for, where all have to agree on H.
    """
    steps = rounds.steps_for(wanted)
    if rounds.fragments == 1:
        return steps if rounds.overlaps_all else rounds.overlap_steps
    # they share the link
    return min(rounds.tau or rounds.inner_steps // 4, steps / rounds.fragments)


def most_tokens(manifest: Manifest) -> int:
    """The most that one contribution counts for.

    Where batches are numbered, the tokens merged so far say which come next: with a false count
    one member could send all others far ahead in the data, and through a stream word by word.
    """
    if not manifest.numbered:
        return MAX_TOKENS
    rounds, data = manifest.rounds, manifest.data
    steps = max(rounds.inner_steps, rounds.most_steps) + rounds.overlap_steps
    return CARRIED * steps * data.batch_size * data.seq_len


def rules_of(manifest: Manifest, replica: OuterReplica) -> Rules:
    """How rounds of a fragment go: who is waited for, how long, and what is done with the work."""
    rules = manifest.rounds
    return Rules(
        size=replica.size,
        codecs=rules.allowed_codecs,
        encoded_bytes=replica.codec.size_as,
        exposed=rules.exposed,
        overlap_steps=partial(hidden_steps, rules),
        quorum=rules.quorum,
        grace_fraction=rules.grace_fraction,
        min_grace_s=rules.min_grace_s,
        mix=mix_of(manifest.merge),
        sharing=rules.fragments,
        grouping=Grouping(rules.groups, rules.max_group),
        staleness=rules.staleness,
        clients=clients_of(manifest),
        servers=rules.owners == "servers",
        state_bytes=sum(4 * len(vector) for vector in replica.state),
        switch=manifest.outer.warmup_rounds if manifest.outer.optimizer == "onebit-adam" else None,
        believed=STRANGERS if manifest.merge.trust == "open" else FRIENDS,
        strangers=manifest.merge.trust == "open" and not once(manifest),
        most_tokens=most_tokens(manifest),
        calls=once(manifest),
        least_patience_s=ONLY_MERGE_S if once(manifest) else 0.0,
    )
