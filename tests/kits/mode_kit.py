"""What tests of modes with real processes share: slow islands, tokens in certificates, losses."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from swarm_kit import START_S, Island, Stranger, digests, until

from protocols.errors import OperatorError
from protocols.identity import PeerId
from protocols.messages import Certificate

TURN_S = 0.1
LOOK_S = 0.5


@contextmanager
def slowed(island: Island, factor: int) -> Iterator[None]:
    """An island whose trainer runs in one of ``factor`` turns; its daemon is as quick as ever."""
    daemon = island.process.pid if island.process is not None else 0
    ranks = [pid for pid in island.processes() if pid != daemon]
    assert ranks, f"{island.name} has no trainer"
    over = threading.Event()

    def hold_back() -> None:
        turn = 0
        while not over.wait(TURN_S):
            turn += 1
            send(signal.SIGCONT if turn % factor == 0 else signal.SIGSTOP)
        send(signal.SIGCONT)

    def send(what: signal.Signals) -> None:
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, what)

    thread = threading.Thread(target=hold_back)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Watcher:
    """Asks one island for its certificates, and for the new ones alone each time."""

    def __init__(self, island: Island) -> None:
        self.island, self._known = island, list[Certificate]()
        self._stranger, self._asked = Stranger(), 0.0
        self.run_id = until(lambda: asked(island), START_S, "it answers", island.tail)

    def rounds(self) -> list[Certificate]:
        """All rounds that were committed until about now."""
        if time.monotonic() > self._asked + LOOK_S:  # who asks often is no burden to it
            self._known += self._stranger.certificates(
                self.island, len(self._known), run_id=self.run_id
            )
            self._asked = time.monotonic()
        return self._known

    def close(self) -> None:
        self._stranger.close()


def asked(island: Island) -> bytes:
    """The run's id; empty where a busy machine does not let it answer in time."""
    try:
        return island.run_id
    except OperatorError:
        return b""


def merged_tokens(certificates: Sequence[Certificate]) -> Counter[PeerId]:
    """Tokens of each island whose work is in these rounds."""
    found: Counter[PeerId] = Counter()
    for certificate in certificates:
        outcome = certificate.outcome
        size = sum(part.stop - part.start for part in outcome.parts)
        for part in outcome.parts:
            for index, elements in part.included:
                who = outcome.contributors[index]
                found[who.peer] += who.tokens * elements // size
    return found


def trained_tokens(island: Island) -> int:
    """Tokens that an island has trained on, by its own log."""
    return sum(event["tokens"] for event in island.events("step"))


def falls(island: Island) -> tuple[float, float]:
    """Its first and its last validation loss; the last is much lower, or AssertionError."""
    found = [e["validation_loss"] for e in island.events("round") if e.get("validation_loss")]
    first = [e["validation_loss"] for e in island.events("validation")]
    losses = [*first, *found]
    assert losses[-1] < losses[0] - 1.0, losses
    return losses[0], losses[-1]


def agree(swarm: Sequence[Island]) -> None:
    """No round has two states, whoever reports it and in whichever life."""
    split = {round_: states for round_, states in digests(swarm).items() if len(states) > 1}
    assert not split, split
