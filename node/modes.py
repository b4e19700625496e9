"""What a run's mode means to one node: what follows from its knobs.

The knobs stand in the manifest (:mod:`bootstrap.manifest_rounds`); docs/modes.md is the page.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bootstrap.manifest import Manifest
from bootstrap.manifest_gossip import PAIRED
from bootstrap.manifest_modes import EAGER_LR
from bootstrap.manifest_rounds import Outer
from bootstrap.manifest_rules import check_new
from gossip.place import Place
from gossip.plans.rules import Clients
from node.errors import operator_error
from protocols.identity import PeerId

OFF_SCHEDULE = 0.2  # of a run's inner steps: a schedule that is as far from their end is told of
PLAIN = ("auto", "mean", "clip")  # merge rules that judge nobody
# of the table outer, where the optimizer steps by gradients
UNREAD = ("lr", "lr_start", "momentum", "momentum_start", "beta2", "epsilon", "warmup_rounds")
# a branch that stands still for a moment in the only merge of a run is not left out for good
ONLY_MERGE_S = 15.0
# tokens a step that count fully where weights are tokens² / steps: a weight is at most the tokens
MOST_A_STEP = 2**24


def check_runs(manifest: Manifest) -> None:
    """Raise E204 for a run that is known to diverge, or that its model is no match for."""
    if manifest.outer.optimizer == "powersgd":
        from node.replicas.lowrank_state import plan_of
        from node.trainer.layout import Layout

        try:
            plan_of(Layout.of_manifest(manifest).entries, manifest.outer.rank)
        except ValueError as error:
            why = f"outer.rank {manifest.outer.rank}: {error}"
            raise operator_error("E204", why=why) from error
    if manifest.mode == "sparta":
        from diloco.sparta import MOST
        from node.trainer.layout import Layout

        size = manifest.script.parameters or Layout.of_manifest(manifest).size
        if size > MOST:
            why = f"mode sparta: {size:,} parameters, more than the {MOST:,} that it can draw from"
            raise operator_error("E204", why=why)
    if manifest.model.kind == "hf" and manifest.rounds.fragments > 1:
        from node.trainer.layout import Layout

        try:  # some families call their layers by names that nobody knows
            Layout.of_manifest(manifest)
        except ValueError as error:
            why = f"rounds.fragments {manifest.rounds.fragments}: {error}"
            raise operator_error("E204", why=why) from error
    if manifest.mode in PAIRED and manifest.gossip.rule == "noloco":
        from diloco.mixing import check_noloco

        outer = manifest.outer
        try:
            check_noloco(outer.momentum, outer.lr, outer.lr)
        except ValueError as error:
            raise operator_error("E204", why=str(error)) from error


def check_role(manifest: Manifest, role: str) -> None:
    """Raise E204 for a role that has nothing to do in a run."""
    if role == "server" and manifest.mode in PAIRED:
        why = f"--role server in a run of mode {manifest.mode}: each island mixes for itself there"
        raise operator_error("E204", why=why)


def check_wait(manifest: Manifest, islands: int) -> None:
    """Raise E204 where a run cannot wait for so many islands before it begins."""
    if islands > 1 and manifest.mode in PAIRED:
        why = f"--wait-for in a run of mode {manifest.mode}: each island begins by itself there"
        raise operator_error("E204", why=why, fix="leave out --wait-for, or take another mode")


def doubts(manifest: Manifest, *, schedule: bool = True) -> list[str]:
    """What of a run is likely to disappoint, and why; it is not refused, for it may be meant.

    ``schedule``: whether the manifest's learning rate is the one that is trained with.
    """
    from diloco.optimizers import highest_rate

    outer, rounds, found = manifest.outer, manifest.rounds, list[str]()
    bound = highest_rate(outer.optimizer, outer.momentum)
    if outer.lr > bound and manifest.mode not in PAIRED:
        found.append(
            f"outer.lr {outer.lr:g} with {outer.optimizer} and momentum {outer.momentum:g}: beyond "
            f"{bound:.2f} outer steps overshoot, more in each round, where inner steps come near "
            "an optimum"
        )
    if eager(manifest) and outer.moving and outer.lr > EAGER_LR:
        found.append(
            f"outer.lr {outer.lr:g} with mode eager: inner steps start from guesses, and with a "
            f"mean that comes late more than {EAGER_LR:g} makes their errors grow"
        )
    if by_gradients(manifest) and (unread := _unread(outer)):
        found.append(
            f"{unread} with mode allreduce: nothing is done with it, for the step by merged "
            "gradients is AdamW's, with the rates, betas and eps of the table inner; set them there"
        )
    if rounds.one_is_enough and rounds.staleness != 0 and manifest.merge.rule not in PLAIN:
        found.append(
            f"merge.rule {manifest.merge.rule} where a round begins as soon as one island is "
            "ready: work that is alone in a round is merged whatever it is"
        )
    merge = manifest.merge
    judging = merge.rule not in PLAIN or (merge.trust == "open" and merge.rule == "auto")
    if rounds.sparse and judging:  # gossip/exchange/kept_slices.py says why
        asked = f"trust {merge.trust}" if merge.rule == "auto" else f"rule {merge.rule}"
        found.append(
            f"codec {rounds.sparse} with merge.{asked}: what a part's owner leaves out as it "
            "encodes the result is lost, where means have it sent with the next; int4 leaves "
            "nothing out"
        )
    try:
        check_new(manifest.mode, outer, rounds)
    except ValueError as error:
        found.append(f"an earlier version made this run, and none is made so any more: {error}")
    return found + (_off_schedule(manifest) if schedule else [])


def _unread(outer: Outer) -> str:
    """What is set of an outer optimizer that goes by the table inner; empty for nothing."""
    usual = Outer(optimizer=outer.optimizer)
    values = {name: getattr(outer, name) for name in UNREAD}
    if outer.optimizer == "onebit-adam":  # its first phase is as long
        del values["warmup_rounds"]
    for name in ("lr", "momentum"):
        if values[f"{name}_start"] == values[name]:  # follows it where it is not set
            del values[f"{name}_start"]
    return " and ".join(
        f"outer.{name} {value:g}" for name, value in values.items() if value != getattr(usual, name)
    )


def _off_schedule(manifest: Manifest) -> list[str]:
    """That the learning rate falls long before a run's end, or has not fallen there.

    Only where an island's inner steps follow from the rounds: not where it is in some of them only,
    or may take more steps. A script's learning rate is its own.
    """
    inner, rounds = manifest.inner, manifest.rounds
    unknown = manifest.script.layout or rounds.most_steps or rounds.clients < 1
    flat = inner.schedule == "constant" or inner.min_lr_ratio == 1
    whole, total = rounds.inner_steps * rounds.total_rounds, inner.total_steps
    near = abs(total - whole) <= OFF_SCHEDULE * whole
    if unknown or flat or near or rounds.one_is_enough or once(manifest):
        return []
    if total < whole:
        what = (
            f"{100 * (1 - total / whole):.0f} % of the run has {inner.min_lr_ratio:g} of inner.lr"
        )
    else:
        what = "the run is over before the learning rate has fallen"
    return [
        f"inner.total_steps {total} with {rounds.total_rounds} rounds of {rounds.inner_steps} "
        f"inner steps: {what}; whoever creates the run can set inner.total_steps={whole}"
    ]


def once(manifest: Manifest) -> bool:
    """Whether islands meet a single time, when all have trained (branch-train-merge)."""
    return manifest.mode == "btm"


def eager(manifest: Manifest) -> bool:
    """Whether islands go on from a guess of a round's result (:mod:`node.island.guessing`)."""
    return manifest.mode == "eager"


def by_gradients(manifest: Manifest) -> bool:
    """Whether islands contribute gradients and the outer optimizer alone takes steps."""
    return manifest.mode == "allreduce"


def at_will(manifest: Manifest) -> bool:
    """Whether an island's steps count from its own last contribution, not from the last round."""
    return manifest.rounds.one_is_enough or once(manifest) or eager(manifest)


def by_outer_steps(manifest: Manifest) -> bool:
    """Whether a round's work is one step of an outer optimizer, made for so many inner steps.

    Not where islands contribute at will, and where they meet so often that what they average is
    hardly a step (sparta, pairs).
    """
    each = manifest.mode == "sparta" or manifest.mode in PAIRED or by_gradients(manifest)
    return not (each or at_will(manifest))


def is_over(manifest: Manifest, round_: int, work: int) -> bool:
    """Whether the run is over at a place of the chain with ``work`` tokens merged.

    Rounds that merge nothing do not count where there is one merge only.
    """
    return work > 0 if once(manifest) else round_ >= manifest.rounds.total_rounds


def clients_of(manifest: Manifest) -> Clients | None:
    """Who of the live islands trains in a round: a share of them by a hash; None: all."""
    share, seed = manifest.rounds.clients, int.from_bytes(manifest.run_id[:8], "big")
    if share >= 1:
        return None

    def choose(place: Place, islands: Sequence[PeerId]) -> Collection[PeerId]:
        from diloco.federated import sampled

        return sampled(sorted(islands), share, place.round, seed)

    return choose


def weight_of(manifest: Manifest, tokens: int, steps: int) -> float:
    """What a contribution asks to count for (``merge.weights``), at most its tokens.

    Only ratios matter: tokens² / steps is scaled so that it stays below the tokens.
    """
    if manifest.merge.weights == "tokens" or not steps:
        return float(tokens)
    from diloco.asynchronous import rate

    return min(float(tokens), rate(tokens, steps) / MOST_A_STEP)
