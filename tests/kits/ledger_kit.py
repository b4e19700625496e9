"""What islands in pairs mix in, counted: no letter twice, and push-sum's sums to the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from roamer_kit import Islander, ToyState, weight_here

from gossip.pairs.letters import Letter
from protocols.codecs import Encoded


@dataclass
class Ledger:
    """Push-sum's values times weights: what there has to be of them."""

    size: int
    values: torch.Tensor = field(init=False)
    # parameters are lost that have a weight: those of a share that went down with somebody
    blurred: bool = False

    def __post_init__(self) -> None:
        self.values = torch.zeros(self.size, dtype=torch.float64)

    def add(self, weight: float, values: torch.Tensor) -> None:
        """So much more there is."""
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
        for state, roamer in zip(one.states, one.roamers, strict=True):
            if roamer.account is not None:
                balance, here = roamer.account.balance, weight_here(state, roamer)
                self.blurred |= bool(balance.given) or abs(balance.own - here) > 1e-9

    def check(self, living: Sequence[Islander]) -> None:
        """Is all of it there, once nothing is under way?"""
        there, doubts = Ledger(self.size), False
        for one in living:
            there.holds(one)
            for state, roamer in zip(one.states, one.roamers, strict=True):
                assert roamer.account is not None
                balance = roamer.account.balance
                doubts |= bool(balance.given)  # to somebody who is gone
                assert weight_here(state, roamer) == pytest.approx(balance.own, abs=1e-9)
        if not (self.blurred or doubts):
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

    async def take_back(self, letter: Encoded | None, weight: float) -> None:
        self.ledger.blurred |= letter is None
        await super().take_back(letter, weight)

    async def mix(self, letters: Sequence[tuple[Letter, Encoded | None]]) -> float:
        for letter, _ in letters:
            body, stamp = letter.body.data.numpy().tobytes(), letter.stamp
            # an opening that its sender takes for lost may have come, and be an answer later
            name = (stamp.sender, stamp.round, stamp.exchange, stamp.answers, body)
            # of one round's own shares, which are equal, several may have come back
            assert name not in self.mixed or stamp.sender == self.me, "mixed in before"
            self.mixed.add(name)
        return await super().mix(letters)
