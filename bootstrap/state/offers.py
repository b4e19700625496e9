"""Asking a source for its offer, which takes as long as it needs to make a copy of its state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from protocols.asking import ask
from protocols.errors import RemoteRefused
from protocols.identity import PeerId
from protocols.messages import StateOffer, StateRequest
from protocols.transport import Transport

MAKING = "again"  # code of a refusal: the copy is being made, ask again later
ANSWER_S = 3.0  # after which a source says that it is making one
AGAIN_S = 1.0  # until it is asked the next time
OUTER_STEP_S = 30.0  # that an outer step may take before the source can begin to copy
COPY_RATE = 2.5e8  # bytes a second at least: a fifth of what one thread copies and hashes
USUAL_RATE = 5 * COPY_RATE


def making_s(length: int) -> float:
    """Seconds within which a source must have made a copy of ``length`` bytes."""
    return OUTER_STEP_S + length / COPY_RATE


def turn_s(length: int) -> float:
    """Seconds that a copy of ``length`` bytes usually takes: then others are asked meanwhile."""
    return length / USUAL_RATE


def is_making(error: Exception) -> bool:
    """Whether a source refused only since it is making its copy."""
    return isinstance(error, RemoteRefused) and error.code == MAKING


async def offered(
    transport: Transport,
    peer: PeerId,
    request: StateRequest,
    *,
    timeout: float,
    until: float,
    making: Callable[[], object] = lambda: None,
) -> StateOffer:
    """A source's offer of a state; each answer has ``timeout`` seconds.

    Asked for again as long as the source says that it is ``making`` a copy, ``until`` then by the
    event loop's clock. Raises as :func:`protocols.asking.ask`.
    """
    now = asyncio.get_running_loop().time
    while True:
        try:
            return await ask(transport, peer, "state", request, StateOffer, timeout=timeout)
        except RemoteRefused as error:
            if error.code != MAKING:
                raise
            making()
            if now() + AGAIN_S > until:
                raise
        await asyncio.sleep(AGAIN_S)
