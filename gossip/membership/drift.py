"""Whether what a node has said of itself still holds well enough. Pure.

Between two announcements a node of a large swarm only shows that it is alive
(:mod:`gossip.membership.pulse`). Its figures change with every inner step. What others decide by is
said anew once it has drifted too far; what only people read is told with the next announcement.
"""

from __future__ import annotations

from dataclasses import replace

from protocols.messages import Announce

SPEED = 0.25  # by how much of the larger one a speed may differ
ETA_S, ETA = 1.0, 0.05  # seconds, and share of what is left
_SPEEDS = ("tokens_per_second", "steps_per_second", "upload", "download", "round_trip")
_READ = ("loss", "total_tokens", "position")  # that people read, or newcomers begin with


def outdated(said: Announce, now: Announce, passed: float) -> bool:
    """Whether what was ``said`` so many seconds ago does not stand for the status ``now``."""
    if len(said.others) != len(now.others):
        return True
    if any(_differ(getattr(said, name), getattr(now, name)) for name in _SPEEDS):
        return True
    etas = [(said.eta, now.eta)]
    etas += [(old.eta, new.eta) for old, new in zip(said.others, now.others, strict=True)]
    if any(_late(old, new, passed) for old, new in etas):
        return True
    others = tuple(
        replace(old, eta=new.eta) for old, new in zip(said.others, now.others, strict=True)
    )
    drifting = {name: getattr(now, name) for name in (*_SPEEDS, *_READ, "eta")}
    return replace(said, others=others, **drifting) != now


def _differ(one: float, other: float) -> bool:
    return abs(one - other) > SPEED * max(one, other)


def _late(said: float, now: float, passed: float) -> bool:
    left = max(0.0, said - passed)
    return abs(now - left) > ETA_S + ETA * left
