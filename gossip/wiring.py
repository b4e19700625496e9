"""What all that talks to peers needs of its node: who it is, its run, its transport, its clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from protocols.codecs import RangeCodec
from protocols.identity import Identity
from protocols.tasks import Offload, Spawn
from protocols.transport import Transport


@dataclass
class Wiring:
    """One node's, as one fragment of the model sees it; fragments share all but ``codec``."""

    transport: Transport
    identity: Identity
    run: bytes
    codec: RangeCodec  # of the vector; each round's is ``codec.named(plan.codec)``
    spawn: Spawn
    offload: Offload
    now: Callable[[], float]  # monotonic seconds
