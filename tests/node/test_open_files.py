"""A process that may open few files or none: what its node does, and what it thinks of others."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from http_kit import B, address, take, two

from node.config import NodeConfig
from node.daemon import Daemon
from node.monitor.event_log import EventLog
from node.open_files import MOST, raise_limit
from protocols.bodies import BufferFeed
from protocols.errors import Unreachable, Why
from protocols.limits import Limits


@contextmanager
def at_most(files: int) -> Iterator[None]:
    """The soft limit meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def no_more() -> Iterator[None]:
    """No file can be opened meanwhile."""
    free = os.dup(0)
    os.close(free)
    with at_most(free):
        yield


@pytest.mark.parametrize("verb", ["call", "push"])
async def test_who_has_no_descriptors_left_holds_it_against_no_address(verb: str) -> None:
    async with two() as (a, b):
        a.on_push("take", take, max_length=100)
        b.book.succeeded(a.peer_id, address(a))
        b.book.add(a.peer_id, "192.0.2.1:1")  # would be tried next
        asked = (
            b.call(a.peer_id, "echo", b"", timeout=5)
            if verb == "call"
            else b.push(a.peer_id, "take", b"", BufferFeed(bytes(9)), timeout=5)
        )
        with no_more(), pytest.raises(Unreachable) as error:
            await asked
        assert error.value.why is Why.NO_FILES
        assert b.book.has_worked(a.peer_id, address(a))
        assert await b.call(a.peer_id, "echo", b"x", timeout=5) == b"x"


def test_the_limit_of_open_files_is_raised_to_what_is_allowed() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    allowed = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    with at_most(256):
        assert raise_limit() == allowed
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (allowed, hard)
    with at_most(allowed):
        assert raise_limit() == allowed


def test_a_limit_that_cannot_be_raised_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError("not permitted")

    with at_most(256), monkeypatch.context() as patched:
        patched.setattr("resource.setrlimit", refused)
        assert raise_limit() == 256


def test_connections_of_others_take_half_of_the_descriptors() -> None:
    assert Limits().within(MOST) == Limits()
    few = Limits().within(256)
    assert (few.total, few.per_ip) == (128, 128)


async def test_a_node_accepts_no_more_than_it_can_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.open_files.raise_limit", lambda: 600)
    daemon = Daemon(NodeConfig(dir=tmp_path, listen="127.0.0.1:0"), None)
    transport = await daemon._open_transport(B, EventLog())
    await transport.aclose()
    assert transport.limits.total == 300
