"""Owners of parameters: lock-step, stale-synchronous and asynchronous by one knob."""

from __future__ import annotations

from functools import partial

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.asynchronous import NO_BOUND, may_start
from gossip.owner import Owner
from protocols.codecs import codec
from protocols.identity import Identity

A, B, C = (Identity.from_seed(bytes([n + 1]) * 32).peer_id for n in range(3))
ONE = torch.ones(64)


def owner(gather: int = 1, bound: int = NO_BOUND, name: str = "fp32") -> Owner:
    def take(params: torch.Tensor, work: list[tuple[torch.Tensor, float, int]]) -> None:
        for delta, weight, staleness in work:
            params.sub_(delta * weight)
            seen.append(staleness)

    seen: list[int] = []
    made = Owner(torch.zeros(64), codec(name), take, gather, partial(may_start, bound=bound))
    made.seen = seen  # type: ignore[attr-defined]
    for client in (A, B, C):
        made.join(client, torch.zeros(64))
    return made


def test_without_a_bound_everybody_goes_on_at_once() -> None:
    one = owner()
    assert [one.arrive(A, ONE, 1.0) for _ in range(3)] == [[A]] * 3
    assert one.params.tolist() == [-3.0] * 64
    assert one.version == 3


def test_in_lock_step_nobody_goes_on_before_all_have_come() -> None:
    one = owner(gather=3)
    assert one.arrive(A, ONE, 1.0) == []
    assert one.arrive(B, ONE, 1.0) == []
    assert one.params.abs().max() == 0
    assert one.arrive(C, ONE, 1.0) == [A, B, C]
    assert (one.version, one.params[0].item()) == (1, -3.0)


def test_a_bound_holds_back_who_is_ahead_until_the_slowest_comes() -> None:
    one = owner(bound=1)
    assert one.arrive(A, ONE, 1.0) == [A]
    assert one.arrive(A, ONE, 1.0) == []  # two ahead of B and C
    assert one.arrive(B, ONE, 1.0) == [B]
    assert one.arrive(C, ONE, 1.0) == [A, C]
    assert one.version == 4  # all work counted all the same


def test_the_slowest_that_leaves_holds_nobody_back() -> None:
    one = owner(bound=0)
    one.arrive(A, ONE, 1.0)
    one.arrive(B, ONE, 1.0)
    assert one.leave(C) == [A, B]


def test_a_round_whose_time_is_over_is_taken_without_the_late() -> None:
    one = owner(gather=3)
    one.arrive(A, ONE, 1.0)
    one.take_pile()
    assert (one.version, one.params[0].item()) == (1, -1.0)


def test_staleness_counts_what_others_did_since_a_client_was_told() -> None:
    one = owner()
    for client in (A, B, C, B):
        one.arrive(client, ONE, 1.0)
        one.reply(client)
    one.arrive(A, ONE, 1.0)
    assert one.seen == [0, 1, 2, 1, 3]  # type: ignore[attr-defined]


@settings(max_examples=25)
@given(st.sampled_from(["int8", "int4", "int2"]), st.integers(0, 50))
def test_what_a_client_holds_follows_the_parameters_though_replies_are_coarse(
    name: str, seed: int
) -> None:
    """The owner codes the difference to what the client has, so errors do not add up."""
    generator = torch.Generator().manual_seed(seed)
    one, holds = owner(name=name), torch.zeros(64)
    for _ in range(30):
        one.arrive(A, torch.randn(64, generator=generator), 0.1)
        gained = torch.empty(64)
        codec(name).decode(one.reply(A), gained)
        holds += gained
        assert holds.equal(one.clients[A].holds)
    for _ in range(20):  # nothing new: only what is still missing travels
        codec(name).decode(one.reply(A), gained)
        holds += gained
    assert (holds - one.params).norm() < 0.02 * one.params.norm()
