"""What a further host keeps of host 0's words while it is busy has a bound."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast, get_type_hints

import pytest
from hub_kit import JOB

from bootstrap.manifest import MAX_MANIFEST_BYTES, MAX_SHARD_BYTES
from node.config import resolve
from node.data.tokenizer import MAX_TOKENIZER_BYTES
from node.hosts.helper import MAX_WORDS, Helper
from node.hosts.meeting import Meeting
from node.hosts.wire import (
    MAX_GREETED_FRAME,
    Halt,
    HostConnection,
    HostLostError,
    Job,
    Word,
)


def test_a_job_has_room_for_whatever_a_run_may_have() -> None:
    """What an island fetches from peers it can tell its other hosts."""
    hints = get_type_hints(Job, include_extras=True)
    bounds = {name: hints[name].__metadata__[0].size for name in hints if name in vars(JOB)}
    assert bounds.keys() == vars(JOB).keys()
    assert bounds["shard"] == MAX_SHARD_BYTES
    assert bounds["tokenizer"] == MAX_TOKENIZER_BYTES
    assert bounds["manifest"] > 2 * MAX_MANIFEST_BYTES  # which is that of a shorter form
    assert sum(bounds.values()) < Job.MAX_BYTES == MAX_GREETED_FRAME


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
