"""Several newcomers at once, to a lone member by a narrow link: real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from swarm_kit import Record, digests, islands, settings

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

NEWCOMERS = 4
UPLOAD = "1Mbit"  # the state needs some seven seconds


def test_they_give_each_other_what_they_have(tmp_path: Path, record_property: Record) -> None:
    # on a quick machine the first one must not be done before they have come
    run = {"inner_steps": 200, "total_rounds": 16, "min_grace_s": 2.0, "data__batch_size": 4}
    with islands(tmp_path) as made:
        first = made.new(*settings(**run), "--max-upload", UPLOAD)
        address = first.await_up()
        others = [made.new("--peers", address, "--max-upload", UPLOAD) for _ in range(NEWCOMERS)]
        for island in (first, *others):
            assert island.await_end(300) == 0, island.tail()
    from_first = from_fellows = 0
    for island in others:
        for event in island.events("join"):
            if event["step"] == 5 and event.get("sources"):
                record_property("sync", event["text"])
                for peer, count in event["sources"].items():
                    if peer == first.peer:
                        from_first += count
                    else:
                        from_fellows += count
    record_property("bytes from the first, from fellows", (from_first, from_fellows))
    assert from_fellows > 0.3 * from_first
    found = digests([first, *others])
    assert {r: states for r, states in found.items() if len(states) != 1} == {}
