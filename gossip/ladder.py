"""Which codec a round has, where the manifest leaves it to the links. Pure.

Codecs stand on a ladder, the finest first. A round takes the finest one whose bytes pass in the
time that the run is willing to wait for them: its *budget*, a share of a round (5 % by default)
and the time that is hidden behind inner steps. Measured speeds vary from round to round, so the
choice stays as it was while it costs up to a fifth more than the budget, and goes up only if the
finer codec would leave three tenths of it free; one rung at a time, since speeds measured with
few bytes are the least certain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from protocols.errors import LocalProtocolError

OVERRUN: Final = 1.2  # of the budget, before the ladder is stepped down
ROOM: Final = 0.7  # of the budget, at most, to step up


def budget_s(round_s: float, exposed: float, overlapped: float) -> float:
    """Seconds that the exchange of a round may take.

    ``round_s`` is the usual time from round to round, ``exposed`` the share of it that may be
    spent waiting, ``overlapped`` the share during which inner steps go on anyway.
    """
    return round_s * (exposed + overlapped)


def choose(
    codecs: Sequence[str],
    seconds: Callable[[str], float],
    budget: float,
    previous: str | None = None,
) -> str:
    """The codec of a round, out of ``codecs``, the finest first.

    ``seconds`` tells how long the exchange takes with a codec on the links as they were measured;
    it must fall along the ladder. ``previous`` is the codec of the round before. Where even the
    coarsest takes too long it is chosen nevertheless. Raises :class:`LocalProtocolError` for an
    empty ladder.
    """
    if not codecs:
        raise LocalProtocolError("a ladder without rungs")
    if math.isnan(budget):
        raise LocalProtocolError("no budget")
    fitting = (name for name in codecs if seconds(name) <= budget)
    if previous is None or previous not in codecs:
        return next(fitting, codecs[-1])
    at = codecs.index(previous)
    if seconds(previous) > OVERRUN * budget:
        coarser = (name for name in codecs[at:] if seconds(name) <= budget)
        return next(coarser, codecs[-1])
    if at and seconds(codecs[at - 1]) <= ROOM * budget:
        return codecs[at - 1]
    return previous
