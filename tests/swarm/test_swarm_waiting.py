"""A run's creator waits until its friends are there."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest
from swarm_kit import islands, settings, until

from node.status import fetch, joining

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

RUN = settings(inner_steps=5, total_rounds=4, inner__total_steps=100, quorum=1)


def waits(island, text: str) -> bool:
    """Whether it has said so of what it waits for."""
    return any(e["name"] == "wait" and text in e["text"] for e in island.events("join"))


def test_no_round_is_made_before_all_are_there(tmp_path: Path):
    with islands(tmp_path) as made:
        first = made.new("--wait-for", "3", *RUN)
        address = first.await_up()
        until(lambda: waits(first, "1 of 3 islands are there"), 60, "it waits", first.tail)
        second = made.new("--peers", address)
        until(lambda: waits(first, "2 of 3 islands are there"), 120, "it counts", first.tail)
        assert "2 of 3 islands are there" in joining(fetch(first.dir)), "node status says it, too"
        assert first.rounds() == {}
        assert first.events("step") == []
        third = made.new("--peers", address)
        for one in (first, second, third):
            assert one.await_end(200) == 0, one.tail()
        merged = [event["members"] for event in first.rounds().values()]
        assert merged == [0, 3, 3, 3]
        assert [event["round"] for event in first.events("validation")] == [1], "as it begins"
        assert {event["outcome"] for event in first.rounds().values()} == {"committed"}


def test_a_creator_that_is_stopped_while_it_waits_leaves_the_run_to_who_is_there(tmp_path: Path):
    with islands(tmp_path) as made:
        first = made.new("--wait-for", "3", *RUN)
        second = made.new("--peers", first.await_up())
        until(lambda: waits(first, "2 of 3 islands are there"), 120, "it counts", first.tail)
        first.signal(signal.SIGINT)
        assert first.await_end(100) == 0, first.tail()
        assert second.await_end(100) == 0, second.tail()
        assert max(second.rounds()) == 3


def test_a_creator_that_is_killed_while_it_waits_comes_back_to_who_is_there(tmp_path: Path):
    with islands(tmp_path) as made, socket.create_server(("127.0.0.1", 0)) as free:
        given = ("--listen", f"127.0.0.1:{free.getsockname()[1]}", "--wait-for", "3", *RUN)
        free.close()
        first = made.new(*given)
        address = first.await_up()
        second = made.new("--peers", address)
        until(lambda: waits(first, "2 of 3 islands are there"), 120, "it counts", first.tail)
        first.kill()
        first.start(*given)
        first.await_up()
        third = made.new("--peers", address)
        for one in (first, second, third):
            assert one.await_end(200) == 0, one.tail()
        assert [event["members"] for event in first.rounds().values()] == [0, 3, 3, 3]
