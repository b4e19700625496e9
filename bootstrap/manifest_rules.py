"""Rules for a run that is to be made, which a run under way may break.

A manifest is signed and never changes. A rule that also held for those that are read would shut
everybody out of each run that breaks it, and nobody could go on from its checkpoints or export
them. So a rule across keys that is new stands here, and a joiner is told at most
(:func:`node.modes.doubts`). Those among the validators of the tables have held since protocol
version 2 (tests/bootstrap/test_manifests_of_before.py), and what a run does relies on them.
"""

from __future__ import annotations

from bootstrap.manifest_gossip import PAIRED
from bootstrap.manifest_rounds import NO_MOMENTUM, SCALES, Outer, Rounds

# for rules that apply an arrival in full: with a higher η, η D of two islands exceeds their mean
MOST_LR_AT_WILL = 0.5


def check_new(mode: str, outer: Outer, rounds: Rounds) -> None:
    """Raise ValueError for what no run is made with any more."""
    if rounds.one_is_enough and rounds.staleness != 0 and mode not in PAIRED:
        check_arrivals(outer.optimizer, outer.highest_lr)
        _check_kept(rounds)
    if mode == "btm":
        _check_only_merge(rounds)
    _check_moments(outer)


def check_arrivals(optimizer: str, lr: float) -> None:
    """Raise ValueError for an outer optimizer that goes astray where every arrival is a round.

    Of the rules with momentum or second moments only delayed-nesterov takes an arrival for its
    share, and waits with the momentum until shares add up to one (2401.09135). The others carry
    on, or scale, one island's work as if it were the mean of all. ``lr`` is the highest η.
    """
    if optimizer == "delayed-nesterov":
        return
    if optimizer not in NO_MOMENTUM:
        raise ValueError(
            f"outer.optimizer {optimizer} where a round begins as soon as one island is ready: "
            "each arrival would be a full outer step, with momentum that grows stale; use "
            "delayed-nesterov, which takes each for its share (delayed Nesterov), or set "
            "rounds.quorum to 0.5"
        )
    if lr > MOST_LR_AT_WILL:
        raise ValueError(
            f"outer.optimizer {optimizer} with outer.lr {lr:g} where a round begins as soon as one "
            "island is ready: the model would move by the sum of what islands bring, not by its "
            f"mean; set outer.lr to one by their number, {MOST_LR_AT_WILL:g} at most, or use "
            "delayed-nesterov with outer.momentum and outer.momentum_start 0"
        )


def _check_kept(rounds: Rounds) -> None:
    """What an island keeps of merged work is for rounds in which all others take it back.

    In a mean of all, what sets islands apart from it adds up to nothing. Of an arrival nearly all
    of the work itself would stay, to be sent and merged again.
    """
    if rounds.fragments > 1 and rounds.alpha:
        raise ValueError(
            f"rounds.alpha {rounds.alpha:g} where a round begins as soon as one island is ready: "
            "that share of work which is merged already would be sent again; leave it at 0 there, "
            "or set rounds.quorum to 0.5"
        )


def _check_only_merge(rounds: Rounds) -> None:
    """With one merge all are waited for: who is not in it is in none.

    Nor could a leader tell how near somebody is who is late: with a single merge, islands announce
    when they would have taken all steps, and end with the others before that.
    """
    if rounds.staleness:
        raise ValueError(
            f"mode btm with rounds.staleness {rounds.staleness}: there is no later round for who "
            "is not in the only one; leave it at 0, so that all are waited for"
        )


def _check_moments(outer: Outer) -> None:
    """Adaptive rules have one β₁ from the first round on."""
    warmed = outer.warmup_rounds and outer.momentum_start != outer.momentum
    if outer.optimizer in SCALES and warmed:
        raise ValueError(
            f"outer.optimizer {outer.optimizer} with outer.momentum_start "
            f"{outer.momentum_start:g} and outer.momentum {outer.momentum:g}: its first moments "
            "are corrected for their start at zero by one β₁ from the first round on, and with "
            "another one steps overshoot; leave outer.momentum_start away, and warm up "
            "outer.lr_start"
        )
