"""The manifest's table of gossip: how islands that meet in pairs mix what they have learnt."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bootstrap.manifest_rounds import FINEST_FIRST, Merge, Outer, Rounds, Section

PAIRED = ("gossip", "push-sum")
# good enough for parameters themselves: int8, and what is finer
PRECISE = FINEST_FIRST[: FINEST_FIRST.index("int8") + 1]


class Gossip(Section):
    """Modes ``gossip`` and ``push-sum`` (docs/gossip.md)."""

    rule: Literal["noloco", "average", "push-sum"] = "noloco"
    """What an island does with its partner's parameters: NoLoCo (2506.10911, with one tensor), the
    average of both, or push-sum, whose mean survives links that lose or go one way."""
    neighbours: int = Field(default=1, ge=1, le=16)
    """Exchanges a round; of push-sum: receivers."""
    extra: int = Field(default=2, ge=0, le=8)
    """Consensus control: up to so many exchanges more in a round while islands disagree too much
    (see bound)."""
    bound: float = Field(default=3.0, gt=0)
    """They do while their mean square distance to their mean exceeds this many times what their
    inner steps moved them."""


def check_gossip(mode: str, gossip: Gossip, outer: Outer, rounds: Rounds, merge: Merge) -> None:
    """Raise ValueError where a run of islands in pairs asks for what has no meaning there."""
    if mode not in PAIRED:
        return
    if (mode == "push-sum") != (gossip.rule == "push-sum"):
        raise ValueError(f"mode {mode} with gossip.rule {gossip.rule}: leave gossip.rule away")
    wanted = "heavyball" if gossip.rule == "noloco" else "sgd"
    if outer.optimizer != wanted or (wanted == "sgd" and (outer.lr, outer.lr_start) != (1.0, 1.0)):
        raise ValueError(
            f"gossip.rule {gossip.rule} with outer.optimizer {outer.optimizer} and outer.lr "
            f"{outer.lr:g}: it is {wanted}"
            + (" with outer.lr 1" if wanted == "sgd" else "; leave outer.optimizer away")
        )
    coarse = [name for name in rounds.allowed_codecs if name not in PRECISE]
    if coarse:
        raise ValueError(
            f"mode {mode} with codec {coarse[0]}: islands have no state in common to which a "
            "difference could be sent, and parameters themselves want one of " + ", ".join(PRECISE)
        )
    if rounds.align:
        raise ValueError(f"mode {mode} with rounds.align: in pairs nobody's work is late")
    if rounds.groups != "none":
        raise ValueError(f"mode {mode} with rounds.groups: pairs are groups of two")
    if merge.trust != "friendly":
        raise ValueError(
            f"mode {mode} with merge.trust open: there are no certificates, so nothing would show "
            "a newcomer or a partner that a peer lies; use mode diloco among strangers"
        )
