"""What a bench averages: noise in the place of a pseudo-gradient."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import torch
from blake3 import blake3

from gossip.place import Place
from gossip.plans.certificate import genesis, outcome_hash
from node.bench.settings import Settings
from node.bench.watching import Stage, Watch
from protocols.codecs import RangeCodec
from protocols.identity import PeerId
from protocols.messages import Certificate
from protocols.tasks import Offload


class Noise:
    """A :class:`~gossip.hooks.Replica`: the vector is this island's noise, then the mean."""

    def __init__(
        self,
        settings: Settings,
        codec: RangeCodec,
        watch: Watch,
        offload: Offload,
    ) -> None:
        self.settings, self.codec, self.watch = settings, codec, watch
        self.offload = offload
        self.vector = torch.empty(settings.size)
        self.mean = self.vector  # of all, once a round is over: fp32 [size]
        self.moved = asyncio.Event()
        self.norm = 0.0  # of the vector that was drawn
        self.contributors, self.included = 0, 0.0
        self.computed = 0.0  # processor seconds of this process when the mean was there
        self._roster: tuple[PeerId, ...] = ()
        self._place = Place(settings.run, 0, 0, genesis(settings.run), bytes(32), 0)

    @property
    def place(self) -> Place:
        return self._place

    @property
    def roster(self) -> tuple[PeerId, ...]:
        return self._roster

    def meet(self, roster: tuple[PeerId, ...]) -> None:
        """The members of ``roster`` decide the first round."""
        self._roster = roster

    def draw(self) -> None:
        """New noise, determined by the member's seed and the round."""
        self.mean = self.vector  # drops the buffer into which an fp32 mean was received
        generator = torch.Generator().manual_seed(1009 * self.settings.seed + self.place.round)
        self.vector.normal_(generator=generator)
        self.norm = torch.linalg.vector_norm(self.vector).item()  # as an island announces it

    def delta(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        """This member's noise, where it lies."""
        return self.vector[start:stop]

    async def apply(
        self, certificate: Certificate, parts: dict[tuple[int, int], torch.Tensor]
    ) -> None:
        """Put the mean into the place of the noise."""
        self.watch.pass_(Stage.COMMITTED)
        outcome = certificate.outcome
        await self.offload(lambda: self._decode(certificate, parts))
        self.watch.pass_(Stage.APPLIED)
        self.computed = time.process_time()
        # the state's digest, from those of the parts, which were checked as they came
        state = blake3(b"".join(result.digest for result in outcome.parts)).digest()
        self._place = Place(
            self.settings.run, 0, outcome.round + 1, outcome_hash(outcome), state, outcome.work
        )
        self._roster = outcome.next_roster
        included = [one for result in outcome.parts for one in result.included]
        self.contributors = len({one.contributor for one in included})
        everything = self.settings.members * self.settings.size
        self.included = sum(one.elements for one in included) / everything
        self.moved.set()

    def _decode(self, certificate: Certificate, parts: dict[tuple[int, int], torch.Tensor]) -> None:
        results = certificate.outcome.parts
        if self.settings.codec == "fp32" and all(result.digest for result in results):
            whole = joined([parts[result.start, result.stop] for result in results])
            if whole is not None:  # its parts were received side by side: no copy
                self.mean = whole.view(torch.float32)
                return
        self.mean = self.vector  # the noise is needed no more
        for result in results:
            into = self.mean[result.start : result.stop]
            if not result.digest:
                into.zero_()
            else:
                self.codec.decode(result.start, parts[result.start, result.stop], into)

    def digest(self) -> bytes:
        """BLAKE3 of the mean: 32 bytes."""
        view = memoryview(self.mean.numpy()).cast("B")  # type: ignore[arg-type]  # as in merging
        return blake3(view, max_threads=blake3.AUTO).digest()


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Uint8 tensors that follow each other in memory as one, without a copy; None: they do not."""
    at, size = parts[0].storage_offset(), 0
    block = parts[0].untyped_storage().data_ptr()
    for part in parts:
        if part.untyped_storage().data_ptr() != block or part.storage_offset() != at + size:
            return None
        size += len(part)
    return parts[0].as_strided((size,), (1,))
