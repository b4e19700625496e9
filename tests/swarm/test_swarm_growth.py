"""Several hundred rounds of real nodes: nothing that they hold grows, once they are warm."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from places import KITS
from swarm_kit import Island, Record, settings, until

from gossip.exchange.ledger import MOST

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]

ROUNDS, WARM = 900, 300
RUN = settings(
    inner_steps=1, total_rounds=10 * ROUNDS, min_grace_s=10, data__batch_size=1, data__seq_len=16,
    model__d_model=16, model__n_layers=1, model__d_ff=32, model__max_seq_len=16,
    evaluation__sequences=1,
)  # fmt: skip
A_ROUND = 3600  # bytes of merged parts, int4
# the one that made the run gains some 7 objects a round, without a byte more of resident memory
# connections come and go with what else the machine does: in 1,700 rounds between 36 and 56
# descriptors, with 42 at both ends
SPARE = {"rss": 4 * 2**20, "fds": 12, "tasks": 12, "objects": 4000}


class Watched(Island):
    """An island that writes down what it holds."""

    program = (str(KITS / "growth_island.py"),)

    def measured(self) -> list[dict[str, Any]]:
        file = self.dir / "growth.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines]


def test_nothing_grows_from_round_to_round(tmp_path: Path, record_property: Record) -> None:
    islands = [Watched(f"island-{number}", tmp_path) for number in (1, 2, 3)]
    try:
        islands[0].start(*RUN)
        joined = islands[0].await_up()
        for island in islands[1:]:
            island.start("--peers", joined)

        def done() -> bool:
            assert all(island.running for island in islands), [i.tail() for i in islands]
            return all(i.measured() and i.measured()[-1]["round"] >= ROUNDS for i in islands)

        until(done, 500, f"{ROUNDS} rounds", lambda: "\n".join(i.tail() for i in islands))
    finally:
        for island in islands:
            island.kill()
    for island in islands:
        held = [m for m in island.measured() if WARM <= m["round"] <= ROUNDS]
        third = len(held) // 3
        grown = {
            what: median(m[what] for m in held[-third:]) - median(m[what] for m in held[:third])
            for what in SPARE
        }
        record_property(f"grown_{island.name}", grown)
        record_property(f"rss_{island.name}", held[-1]["rss"])
        assert {what: by for what, by in grown.items() if by > SPARE[what]} == {}, held
        # who falls behind and downloads the state begins a ledger anew, at whatever round
        assert max(m["ledger"] for m in held) <= MOST, held
        assert max(m["ledger_bytes"] / m["ledger"] for m in held) <= A_ROUND, held
