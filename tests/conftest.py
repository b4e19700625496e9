"""What all tests share."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import re
import socket
import sys
import tempfile
import threading
import types
from collections.abc import AsyncIterator, Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from contract_kit import NETWORKS, SOON, Net
from hypothesis import HealthCheck, settings
from signals_kit import signals_kept

from node.bench.memory import resident_bytes
from protocols.identity import Identity, verify
from protocols.transport import Transport

if TYPE_CHECKING:
    from api_kit import Kit
    from browser_kit import Page

    from node.monitor.api import ApiServer

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


MUCH_BYTES = 500_000_000
_resident = [0]  # bytes, after garbage was collected last


@pytest.fixture(autouse=True)
def _garbage_does_not_pile_up() -> Iterator[None]:
    """Simulated swarms are cycles of hundreds of megabytes, and few objects for the collector.

    What is free then lies in the arenas of threads that have ended, unless it is trimmed.
    """
    yield
    if resident_bytes() > _resident[0] + MUCH_BYTES:
        gc.collect()
        with contextlib.suppress(AttributeError):  # glibc's
            ctypes.CDLL(None).malloc_trim(0)
        _resident[0] = resident_bytes()


@pytest.fixture(scope="module")
def remembered_signatures() -> Iterator[None]:
    """Many members of one process verify the same signatures: the valid ones are remembered."""
    remembering = lru_cache(maxsize=65536)(verify)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gossip.plans.certificate.verify", remembering)
        patch.setattr("protocols.envelope.verify", remembering)
        yield


@pytest.fixture
def quick_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that do not exist are told so at once; some machines' resolvers take seconds."""
    resolve = socket.getaddrinfo

    def getaddrinfo(host: Any, *rest: Any, **named: Any) -> Any:
        if str(host).endswith(".invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *rest, **named)

    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)


@pytest.fixture
def identities() -> Callable[[int], list[Identity]]:
    """``identities(n)``: n identities, the same in every run."""
    return lambda n: [Identity.from_seed(i.to_bytes(32, "big")) for i in range(1, n + 1)]


@pytest.fixture
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands of this process use a state directory of the test's own, and no other settings."""
    for name in os.environ:
        if name.startswith("ATOLL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ATOLL_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "state"


@pytest.fixture
def command(
    own_directory: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """``command(*arguments)`` as the console script would: (exit status, stdout, stderr)."""
    from node import outermost

    def call(*arguments: object) -> tuple[int, str, str]:
        with signals_kept():  # it takes the process for its own
            status = outermost.run(list(map(str, arguments)))
        out, err = capsys.readouterr()
        return status, out, err

    return call


@pytest.fixture
def refused(
    command: Callable[..., tuple[int, str, str]], own_directory: Path
) -> Callable[..., tuple[str, list[dict[str, Any]]]]:
    """``refused(code, *arguments)``: run the command, which must fail so; its text and events."""
    from node.errors import TABLE

    def call(code: str, *arguments: object) -> tuple[str, list[dict[str, Any]]]:
        before = set(threading.enumerate())
        status, _, text = command(*arguments)
        assert status == TABLE[code].exit_code, text
        assert re.fullmatch(rf"error {code}: .+\n  why: (.|\n)+\n  fix: .+\n", text), text
        assert "Traceback" not in text
        for thread in set(threading.enumerate()) - before:
            thread.join(10.0)  # what it was asked is answered, and it may have yet to end
        assert threading.active_count() <= len(before)
        log = own_directory / "events.jsonl"
        assert not list(own_directory.glob("logs/crash-*"))
        lines = log.read_text().splitlines() if log.exists() else []
        return text, [json.loads(line) for line in lines]

    return call


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """A stand-in for the daemon that records what it is started with: settings, manifest."""
    started: list[tuple[Any, Any]] = []

    def run(config: Any, manifest: Any) -> int:
        started.append((config, manifest))
        return 0

    module = types.ModuleType("node.daemon")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "node.daemon", module)
    return started


@pytest.fixture
def kit() -> Kit:
    """What a node's API tells of, with a clock in hand."""
    from api_kit import Kit

    return Kit()


@pytest.fixture
async def api_server(kit: Kit) -> AsyncIterator[ApiServer]:
    """That API, which listens."""
    from api_kit import listening

    async with listening(kit) as server:
        yield server


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


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[Page]:
    from browser_kit import browser

    async with browser(tmp_path / "profile") as page:
        await page.shape(1440, 900)
        yield page
