"""What islands in pairs mix in, counted: no letter twice, and push-sum's weights to the last."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from roamer_kit import Islander, ToyState

from gossip.pairs.letters import Letter
from gossip.pairs.meeting import Post
from gossip.pairs.roamer import Roamer
from protocols.codecs import Encoded
from protocols.identity import PeerId


@dataclass
class Ledger:
    """Push-sum's weights, and values times weights: what there has to be of them."""

    size: int
    weights: float = 0.0
    values: torch.Tensor = field(init=False)
    under_way: dict[object, tuple[PeerId, PeerId, float]] = field(default_factory=dict)
    # of these, when one of the two was killed: nobody can tell whether they came; what did not
    # went down with it, or is taken back beside what did
    lost: float = 0.0
    twice: float = 0.0

    def __post_init__(self) -> None:
        self.values = torch.zeros(self.size, dtype=torch.float64)

    def add(self, weight: float, values: torch.Tensor) -> None:
        """So much more there is."""
        self.weights += weight
        self.values += weight * values.double()

    def holds(self, one: Islander, sign: int = 1) -> None:
        """What an island has, and letters that it has yet to mix in."""
        for state, roamer in zip(one.states, one.roamers, strict=True):
            training = roamer.core.resting
            self.add(sign * state.blend.weight, state.base if training else state.blend.fast)
            for letter in roamer.letters.held.values():
                values = torch.empty(self.size)
                letter.body.codec.decode(0, letter.body.data, values)
                self.add(sign * letter.weight, values)

    def gone(self, one: Islander) -> None:
        """It is about to be killed."""
        self.holds(one, -1)
        for sender, to, weight in self.under_way.values():
            self.lost += weight * (sender == one.peer)
            self.twice += weight * (to == one.peer)

    def watch(self, roamer: Roamer) -> None:
        """Note which letters of an island are on their way, and whose its state is."""
        assert isinstance(roamer.replica, Counted)
        roamer.replica.me = roamer.me

        def watched(send: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
            async def noted(post: Post, body: Encoded, weight: float, *more: Any) -> Any:
                name = object()
                self.under_way[name] = (roamer.me, post.to, weight)
                try:
                    return await send(post, body, weight, *more)
                finally:
                    del self.under_way[name]

            return noted

        postman = roamer.postman
        postman._send = watched(postman._send)  # type: ignore[method-assign]
        postman._settle = watched(postman._settle)  # type: ignore[method-assign]

    def check(self, living: Sequence[Islander]) -> None:
        """Is all of it there, once nothing is under way?"""
        there = Ledger(self.size)
        for one in living:
            there.holds(one)
        more = there.weights - self.weights
        assert -self.lost - 1e-9 < more < self.twice + 1e-9, more
        if not self.lost and not self.twice:
            assert (there.values - self.values).abs().max().item() < 1e-3


class Counted(ToyState):
    """A state whose letters and work stand in a ledger."""

    def __init__(self, ledger: Ledger, *how: Any) -> None:
        super().__init__(*how)
        self.ledger, self.mixed = ledger, set[tuple[Any, ...]]()
        self.me = ""

    async def start(self) -> None:
        self.ledger.add(self.blend.weight, self.sent)
        self.ledger.add(-self.blend.weight, self.base)
        await super().start()

    async def mix(self, letters: Sequence[tuple[Letter, Encoded | None]]) -> float:
        for letter, _ in letters:
            body, stamp = letter.body.data.numpy().tobytes(), letter.stamp
            # an opening that its sender takes for lost may have come, and be an answer later
            name = (stamp.sender, stamp.round, stamp.exchange, stamp.answers, body)
            # of one round's own shares, which are equal, several may have come back
            assert name not in self.mixed or stamp.sender == self.me, "mixed in before"
            self.mixed.add(name)
        return await super().mix(letters)
