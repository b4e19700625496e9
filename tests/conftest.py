"""What all tests share."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from functools import lru_cache
from pathlib import Path

import pytest
from contract_kit import NETWORKS, SOON, Net
from hypothesis import HealthCheck, settings

from protocols.identity import Identity, verify
from protocols.transport import Transport

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch, and by processes tests start
# nodes of tests are none of this user's
os.environ["XDG_STATE_HOME"] = str(Path(tempfile.gettempdir()) / f"atoll-tests-{os.getpid()}")

# a busy machine is slow, not wrong
settings.register_profile(
    "atoll", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("atoll")


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """Tests run beside each other and compare bits: torch gets one thread, once it is loaded."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="module")
def remembered_signatures() -> Iterator[None]:
    """Many members of one process verify the same signatures: the valid ones are remembered."""
    remembering = lru_cache(maxsize=65536)(verify)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gossip.certificate.verify", remembering)
        patch.setattr("protocols.envelope.verify", remembering)
        yield


@pytest.fixture
def identities() -> Callable[[int], list[Identity]]:
    """``identities(n)``: n identities, the same in every run."""
    return lambda n: [Identity.from_seed(i.to_bytes(32, "big")) for i in range(1, n + 1)]


@pytest.fixture(params=NETWORKS)
async def net(request: pytest.FixtureRequest) -> AsyncIterator[Net]:
    """A network of each kind that transports are held to their contract on."""
    network = NETWORKS[request.param]()
    yield network
    await asyncio.wait_for(network.aclose(), SOON)


@pytest.fixture
async def pair(net: Net) -> tuple[Transport, Transport]:
    """Two members of it."""
    return await net.join(), await net.join()
