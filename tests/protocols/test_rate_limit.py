"""How often a peer may ask for something."""

from __future__ import annotations

from identity_kit import identity

from protocols.rate_limit import RateLimit


def test_tokens_come_back_and_buckets_are_bounded() -> None:
    now = [0.0]
    limit = RateLimit(rate=2.0, burst=4.0, clock=lambda: now[0], limit=3)
    alice = identity(1).peer_id
    assert [limit.take(alice) for _ in range(5)] == [True] * 4 + [False]
    now[0] += 1.0
    assert [limit.take(alice) for _ in range(3)] == [True, True, False]
    for number in range(2, 12):
        limit.take(identity(number).peer_id)
    assert len(limit._buckets) == 3
