"""The outer state of one fragment of the model at this node, and what a round does to it.

``base`` G and what the outer optimizer keeps beside it (momentum, second moments: ``vectors``) are
what all members have in common, bit for bit. ``sent`` is what the
trainer had learnt at its last snapshot; Δ = base − sent is its pseudo-gradient. When a round
commits, everything of ``sent`` that was not merged is set back to the old ``base``, so that the
trainer's ``θ ← base + (θ − sent)`` keeps exactly the work that nobody has counted yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from bootstrap.manifest import Manifest
from bootstrap.state import state_digest
from diloco import optimizers, outer
from diloco.fragments import blend
from diloco.pseudo_gradient import norm, pseudo_gradient
from gossip.catchup.lineage import Lineage
from gossip.place import Place
from gossip.plans.certificate import genesis, outcome_hash, tokens_by_island
from node.checkpoints.freezing import FrozenOuter
from node.replicas.arrivals import Arrived, arrived, by_chunk, together
from node.replicas.residual import Residual
from node.replicas.trainer_gate import TrainerGate
from node.replicas.turning import Turning
from node.trainer.shared import SharedVectors
from protocols.codecs import CHUNK, Chunk, RangeCodec
from protocols.identity import PeerId
from protocols.messages import Certificate, Outcome, PartResult
from protocols.tasks import Offload


@dataclass
class ChainStanding:
    """Where an outer state stands in the chain, as it is checkpointed and downloaded with it."""

    place: Place
    roster: tuple[PeerId, ...]
    certificate: Certificate | None  # the newest one
    lineage: Lineage  # who handed office to whom on the way there


class OuterReplica:
    """Outer parameters and state of a fragment, and the place in the chain they belong to."""

    whole = True  # a round merges every element

    def __init__(
        self,
        manifest: Manifest,
        me: PeerId,
        vectors: SharedVectors,
        codec: RangeCodec,
        offload: Offload,
        first_roster: tuple[PeerId, ...],
        fragment: int = 0,
        cut: slice = slice(None),
    ) -> None:
        """``codec`` is the fragment's; the fragment is the slice ``cut`` of ``vectors``."""
        self.manifest, self.me, self.codec, self.offload = manifest, me, codec, offload
        self.base, self.sent = (vector[cut] for vector in vectors.tensors())
        self.dense = codec.dense  # elements of ``base`` in matrices, which come first
        self.rule = optimizers.named(manifest.outer.optimizer)
        self.vectors = self.rule.init(self.base).vectors  # by name
        self.alpha = manifest.rounds.alpha if manifest.rounds.fragments > 1 else 0.0
        self.trainer: TrainerGate | None = None
        self.residual: Residual | None = None  # where codecs are so coarse that it is needed
        self.certificate: Certificate | None = None
        self.frozen: FrozenOuter | None = None  # while a checkpoint of this state is written
        # where late work is turned towards the momentum, which is a rule's first vector
        aligned = manifest.rounds.align
        self.turning = Turning(self.vectors[self.rule.vectors[0]]) if aligned else None
        # Local work and residual are from a checkpoint: both may have been merged since then.
        self.inherited = False
        self.voids = False  # ``sent`` is NaN where the trainer is to take ``base`` as it is
        # outcome of the last move if it merged work of ours; whether an earlier life had sent that
        self.brought: Outcome | None = None
        self.relived = False
        run = manifest.run_id
        self._place = Place(run, fragment, 0, genesis(run), b"", 0)
        self._roster = first_roster

    @property
    def place(self) -> Place:
        """Where in the chain this state stands."""
        return self._place

    @property
    def size(self) -> int:
        """Elements of the vector that a round merges."""
        return len(self.base)

    @property
    def roster(self) -> tuple[PeerId, ...]:
        """Who decides the next round."""
        return self._roster

    @property
    def state(self) -> list[torch.Tensor]:
        """All that members have in common: base, and the optimizer's vectors in its order.

        fp32 [size] each, or [1] where the optimizer keeps a number.
        """
        return [self.base, *self.vectors.values()]

    @property
    def standing(self) -> tuple[int, bytes, list[torch.Tensor]]:
        """Round, digest and state, for peers that download them."""
        return self._place.round, self._place.state, self.state

    def new_residual(self) -> Residual | None:
        """Zeros, for what codecs lose of this island's contributions; None: too little to keep."""
        rounds = self.manifest.rounds
        return Residual(self.size, rounds.feedback) if rounds.feeds_back else None

    def delta(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        """What is to be sent of elements [start, stop), fp32, into ``out``; returns it.

        Δ = base − sent, and with error feedback what coarse codecs have lost of earlier ones.
        """
        self._progress(start, stop, out)
        return out if self.residual is None else self.residual.add_to(out, start)

    def norm(self) -> float:
        """L2 norm of what is to be sent of a new snapshot; infinite or NaN if an element is."""
        if self.turning is not None:
            self.turning.look(self._learnt)
        scratch, size = torch.empty(CHUNK), self.size
        return math.hypot(
            *(
                norm(self.delta(at, min(at + CHUNK, size), scratch[: min(CHUNK, size - at)]))
                for at in range(0, size, CHUNK)
            )
        )

    def note_lost(
        self, codec: RangeCodec, chunk: Chunk, mean: torch.Tensor, data: torch.Tensor, share: float
    ) -> None:
        """For :class:`gossip.exchange.slicing.KeepsLost`: a chunk was merged here and encoded."""
        if self.residual is not None:
            self.residual.note_lost(codec, chunk, mean, data, share)

    def _progress(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        self._learnt(start, stop, out)
        return out if self.turning is None else self.turning.turn(start, stop, out)

    def _learnt(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        return pseudo_gradient(self.base[start:stop], self.sent[start:stop], out)

    async def settle(self, state: ChainStanding | None = None, digest: bytes | None = None) -> None:
        """Take ``base`` and ``vectors`` as they are now for the state at a place of the chain.

        Without ``state``: at the place held already (the very first round). Computes the digest,
        unless it is known from a download, which has checked every byte.
        """
        place, roster = self._place, self._roster
        if state is not None:
            place, roster, self.certificate = state.place, state.roster, state.certificate
        if digest is None:
            digest = await self.offload(lambda: state_digest(self.state)[0])
        self._place = replace(place, state=digest)
        self._roster = roster

    async def apply(
        self, certificate: Certificate, parts: dict[tuple[int, int], torch.Tensor]
    ) -> None:
        """Take the outer step of a committed round and hand the result to the trainer.

        The round may merge work that was sent before a restart. If this node was restarted, the
        local work in its checkpoint was part of that: it is dropped, or it would count twice. If
        only its ranks were, they began without that work, but its residual is still here. Where a
        round merges only some elements, local work at these alone is dropped in both cases: how
        many rounds an earlier life took part in is not known, and new ranks learnt little there.
        """
        outcome = certificate.outcome
        snapshot = await self._hold()
        merged = self.merged_of_mine(outcome)
        mine = merged if snapshot == outcome.round else []
        unseen = bool(merged) and not mine
        reset, self.voids = unseen and self.whole and self.inherited, unseen and not self.whole
        self.brought, self.relived = outcome if merged else None, unseen
        codec = self.codec.named(outcome.codec)
        rates = self._rates(outcome)

        def step() -> bytes:
            self._settle_residual(outcome, mine, [(0, self.size)] if reset else merged)
            self._set_back(mine)
            if self.voids:
                self._void(merged)
            for result in outcome.parts:
                if result.digest:
                    data = parts[result.start, result.stop]
                    self._step_part(codec, self._arrived(outcome, result), data, rates)
                elif rates.carried < 1:  # nobody could complete it
                    self.vectors["v"][result.start : result.stop].mul_(rates.carried)
            if self.rule.end is not None:
                self.rule.end(self.vectors, self.base, rates)
            self._keep_apart(mine)
            self._finish(mine, outcome)
            return bytes(state_digest(self.state)[0])

        await self._thawed()
        digest: bytes = await self.offload(step)
        self.inherited = self.inherited and not (merged if self.whole else mine)
        if self.turning is not None:
            # a common round is one, however few were in it
            whole = rates.share if self.manifest.rounds.one_is_enough else math.ceil(rates.share)
            self.turning.note(whole, mine=bool(merged))
        self.certificate = certificate
        self._place = replace(
            self._place,
            round=outcome.round + 1,
            previous=outcome_hash(outcome),
            state=digest,
            work=outcome.work,
        )
        self._roster = outcome.next_roster
        if self.trainer is not None:
            await self.trainer.release(contributed=bool(mine), reset=reset)

    async def jump(
        self,
        vectors: Sequence[torch.Tensor],
        state: ChainStanding,
        *,
        keep: str,
        decided: Outcome | None = None,
        sent: bool = False,
    ) -> None:
        """Move to a downloaded state; ``vectors`` are as in :attr:`state`.

        ``keep`` says what becomes of local work: ``"local"`` keeps what was learnt since the
        last merge on top of the new base, ``"all"`` keeps θ as it is (a fork that lost: its
        whole progress goes into the next contribution), ``"nothing"`` drops it. With ``"local"``,
        what the round of the unanswered snapshot has merged of it is dropped, by the outcome
        ``decided``; where that is not known, all of the snapshot if it was ``sent``.

        An island that has resumed drops all after rounds that may have merged work from its
        checkpoint. What it has learnt since is no better: from a checkpoint it takes the very
        steps that the life before took from there on, and may have sent.
        """
        ahead = state.place.round > self._place.round
        self.relived = self.inherited and ahead
        self.inherited = self.inherited and not ahead
        if self.relived and keep == "local":
            keep = "nothing"
        onward = ahead and keep == "local"
        out = await self._hold() == self._place.round
        merged = self._merged_meanwhile(decided, sent=sent) if onward else []
        counted = merged if out else []  # else the ranks that sent it have died since
        self.brought = decided if merged else None
        self.voids = False

        def move() -> None:
            self._settle_residual(decided, counted, merged)
            self._set_back(counted)
            if keep == "all":
                self._leave_theta(vectors[0])
            for mine, theirs in zip(self.state, vectors, strict=True):
                mine.copy_(theirs)
            if self.turning is not None and (merged or keep == "nothing"):
                self.turning.reset()
            if self.residual is not None and keep == "nothing":
                self.residual.reset()

        missed = state.place.round - self._place.round
        await self._thawed()
        await self.offload(move)
        await self.settle(state)
        if self.turning is not None and onward and not merged:
            # what each of them merged is not known: where islands arrive one by one, one's work
            share = 1 / len(state.roster) if self.manifest.rounds.one_is_enough else 1.0
            self.turning.note(missed * share, mine=False)
        if self.trainer is not None:
            await self.trainer.release(contributed=bool(counted), reset=keep == "nothing")

    def late_s(self) -> float:
        """Seconds that the trainer takes to go on from the last move, beyond what it ever took."""
        return self.trainer.late_s() if self.trainer is not None else 0.0

    async def _hold(self) -> int | None:
        """Keep the trainer from the vectors; returns an unanswered snapshot's round, or None."""
        return await self.trainer.hold() if self.trainer is not None else None

    async def _thawed(self) -> None:
        """Return when a checkpoint that is being written does not need the vectors any more."""
        if self.frozen is not None:
            await self.frozen.thaw(self._place.fragment)

    def merged_of_mine(self, outcome: Outcome) -> list[tuple[int, int]]:
        """Ranges of my snapshot that are in the merged parts."""
        at = next((i for i, c in enumerate(outcome.contributors) if c.peer == self.me), None)
        return [
            (result.start, result.start + included.elements)
            for result in outcome.parts
            for included in result.included
            if included.contributor == at and included.elements
        ]

    def _merged_meanwhile(self, decided: Outcome | None, *, sent: bool) -> list[tuple[int, int]]:
        """Ranges of the unanswered snapshot that its round has merged; not known: all, if sent."""
        if decided is not None:
            return self.merged_of_mine(decided)
        return [(0, self.size)] if sent else []

    def _settle_residual(
        self,
        outcome: Outcome | None,
        mine: list[tuple[int, int]],
        unseen: list[tuple[int, int]],
    ) -> None:
        """Before the state moves: what was merged of a contribution leaves the residual.

        ``mine``: ranges that ``outcome`` has merged of the snapshot that is here, so it can be told
        what its codec lost of them. Else ``unseen``: of one that is here no more, or by an outcome
        that is not known.
        """
        if self.residual is None:
            return
        if mine and outcome is not None:
            codec = self.codec.named(outcome.codec)
            self.residual.settle(outcome, self.me, codec, self._progress)
        elif unseen:
            self.residual.settle_unseen(unseen)
        else:
            self.residual.forget_round()

    def _set_back(self, merged: list[tuple[int, int]]) -> None:
        """Outside of ``merged``, ``sent`` becomes the old ``base``: not counted yet."""
        for start, stop in gaps(merged, len(self.base)):
            self.sent[start:stop].copy_(self.base[start:stop])

    def _leave_theta(self, onto: torch.Tensor) -> None:
        """``sent`` is set back: let θ stay where it is as ``base`` becomes ``onto``."""
        self.sent.copy_(onto)

    def _void(self, merged: list[tuple[int, int]]) -> None:
        """Mark elements of ``sent`` for :attr:`voids`; for rounds that merge only some elements."""

    def _keep_apart(self, merged: list[tuple[int, int]]) -> None:
        """Let the trainer keep ``alpha`` of what set this island apart from the merged result.

        Streaming DiLoCo sets θ ← α θ + (1 − α) G, which would also drop 1 − α of what was learnt
        since the snapshot. The trainer's θ ← G + (θ − sent) keeps all of that; with this ``sent``
        it comes to G + α (snapshot − G) + (θ − snapshot), the same at the snapshot itself.
        """
        for start, stop in merged if self.alpha else ():
            blend(self.sent[start:stop], self.base[start:stop], 1 - self.alpha)

    def _step_part(
        self,
        codec: RangeCodec,
        part: Sequence[Arrived],
        data: torch.Tensor,
        rates: optimizers.Rates,
    ) -> None:
        for chunk, here in by_chunk(codec, part):
            mean = torch.empty(chunk.stop - chunk.start)
            codec.decode_chunk(chunk, data[chunk.span], mean)
            own = replace(rates, share=here.share, weight=here.weight)
            self._merge(slice(chunk.start, chunk.stop), mean, own)

    def _merge(self, here: slice, mean: torch.Tensor, rates: optimizers.Rates) -> None:
        """Take the outer step for some elements, with D = ``mean``."""
        vectors = {name: self.vectors[name][here] for name in self.rule.vectors}
        vectors |= {name: self.vectors[name] for name in self.rule.numbers}
        self.rule.step(vectors, mean, self.base[here], rates)

    def _finish(self, mine: list[tuple[int, int]], outcome: Outcome) -> None:
        """Hook for other modes, after the outer step; ``mine``: ranges with this island's work."""

    def _rates(self, outcome: Outcome) -> optimizers.Rates:
        """The numbers of a whole round's outer step, which follow from the certificate alone."""
        turns = self.vectors.get("turns")  # each about as many arrivals as other modes' rounds have
        rates = self._rates_of(outcome.round if turns is None else int(turns.item()))
        share, weight = together(self._arrived(outcome, part) for part in outcome.parts)
        if self.rule.carries and self.certificate is not None:
            before = tokens_by_island(self.certificate.outcome)
            rates = replace(rates, carried=outer.carried(tokens_by_island(outcome), before))
        return replace(rates, share=share, weight=weight)

    def _arrived(self, outcome: Outcome, part: PartResult) -> list[Arrived]:
        """Whose work is in the elements of a part."""
        return arrived(outcome, part, len(self._roster) - outcome.servers)

    def _rates_of(self, round_: int) -> optimizers.Rates:
        settings = self.manifest.outer
        lr, momentum = outer.outer_rates(round_, **settings.schedule)
        return optimizers.Rates(
            lr, momentum, round_ + 1, beta2=settings.beta2, epsilon=settings.epsilon
        )


def gaps(ranges: Sequence[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """The parts of [0, size) that lie in none of the ranges."""
    at = 0
    for start, stop in sorted(ranges):
        if start > at:
            yield at, start
        at = max(at, stop)
    if at < size:
        yield at, size


def chunks(size: int) -> Iterator[slice]:
    """[0, size) in pieces that fit into a processor's cache."""
    return (slice(at, min(at + CHUNK, size)) for at in range(0, size, CHUNK))
