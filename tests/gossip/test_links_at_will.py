"""A round as soon as one island is ready, where links take longer than a contribution's steps."""

from __future__ import annotations

import pytest
from catching_up_kit import merging, played, scene
from exchange_kit import until
from working_kit import SIZE, WorkingSwarm

from bootstrap.manifest import Manifest

pytestmark = pytest.mark.usefixtures("remembered_signatures")


@pytest.mark.parametrize(("count", "seed"), [(3, 1), (5, 1)])
def test_whom_results_reach_last_is_in_some_rounds(count: int, seed: int) -> None:
    """The others have a result, and work for the next round, before it is there."""
    rounds = {"inner_steps": 4, "total_rounds": 1_000_000, "codec": "fp32", "alpha": 0.0}
    tables = {"mode": "async", "rounds": rounds | {"staleness": -1}, "merge": {"rule": "mean"}}

    async def story() -> None:
        async with scene(
            count,
            size=SIZE,
            codec="fp32",
            think=(0.12, 0.12),
            uploads=[2e5] * count,
            seed=seed,
            made=WorkingSwarm,
            manifest=Manifest.model_validate(tables),
        ) as here:
            for _ in range(3):
                begun = max(member.replica.place.round for member in here.founders)
                await until(merging(here.founders), 60.0)
                over = max(member.replica.place.round for member in here.founders)
                assert over - begun <= 4 * count

    played(story)
