"""What tests of a run's directory share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from dht_kit import Swarm


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    """No node yet; those that are added are closed."""
    swarm = Swarm()
    yield swarm
    await swarm.upkeep.aclose()
    for dht in swarm.dhts:
        await dht.aclose()
