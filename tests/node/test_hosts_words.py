"""What a further host keeps of host 0's words while it is busy has a bound."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from node.config import resolve
from node.hosts.helper import MAX_WORDS, Helper
from node.hosts.meeting import Meeting
from node.hosts.wire import Halt, HostConnection, HostLostError, Word


async def test_host_0_says_no_more_than_a_busy_host_keeps(tmp_path: Path) -> None:
    class Talkative:
        said = 0

        async def receive(self) -> Word:
            self.said += 1
            return Halt(self.said)

    config = resolve({"dir": str(tmp_path), "device": "cpu"}, {})
    meeting = Meeting(host=1, minimum=2, maximum=2, address="127.0.0.1", port=1, key="k", wait_s=1)
    connection, words = Talkative(), asyncio.Queue[Word](MAX_WORDS)
    with pytest.raises(HostLostError, match="more than"):
        await Helper(config, meeting)._listen(
            cast("HostConnection", cast("Any", connection)), words
        )
    assert (connection.said, words.qsize()) == (MAX_WORDS + 1, MAX_WORDS)
