"""The only member of a run is told to leave while a newcomer is on its way in."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from swarm_kit import islands, settings, until

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

RUN = settings(inner_steps=10, total_rounds=100_000, inner__total_steps=1_000_000)


def test_it_stays_until_the_newcomer_can_go_on_without_it(tmp_path: Path):
    with islands(tmp_path) as made:
        first = made.new("--max-upload", "400kbit", *RUN)  # a download of many seconds
        first.await_round(2, 120)
        newcomer = made.new("--peers", first.await_up())
        until(lambda: "sync " in newcomer.tail(), 90, "its download", newcomer.tail)
        first.signal(signal.SIGINT)
        assert first.await_end(200) == 0, first.tail()
        last = max(first.rounds())
        newcomer.await_round(last + 3, 60)
