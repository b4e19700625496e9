"""On the way into a run: what is compared with the peers' run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from identity_kit import identity

from bootstrap.manifest import Manifest
from bootstrap.signed_manifest import SignedManifest
from node.config import resolve
from node.entrance import Entrance
from node.monitor.event_log import EventLog
from protocols.errors import OperatorError

SCRIPT = {"layout": "ab" * 32, "parameters": 8}


def entrance(config: Any) -> Entrance:
    """One that knows nobody, of a node that has these settings."""
    nothing: Any = None
    return Entrance(config, *[nothing] * 4, EventLog(), nothing)


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> SignedManifest:
    signed = SignedManifest.create(Manifest(), identity(1))

    async def fetched(*_: Any) -> SignedManifest:
        return signed

    monkeypatch.setattr("node.entrance.fetch_manifest", fetched)
    return signed


@pytest.mark.parametrize(
    ("flags", "own", "named"),
    [
        ({"run": "mine.toml"}, Manifest(seed=5), "leave out --run "),
        ({}, Manifest(seed=5), "leave out --preset, --mode and --set "),
        ({}, Manifest(script=SCRIPT), "leave out run=... of node.join "),
    ],
)
async def test_what_gave_a_node_another_run_is_what_is_to_be_left_out(
    tmp_path: Path, theirs: SignedManifest, flags: dict[str, str], own: Manifest, named: str
) -> None:
    config: Any = resolve({"dir": str(tmp_path), **flags}, {})
    greeting: Any = SimpleNamespace(
        peer=identity(2).peer_id, welcome=SimpleNamespace(run=theirs.run_id)
    )
    with pytest.raises(OperatorError) as caught:
        await entrance(config).take([greeting], own)
    assert caught.value.code == "E201"
    assert caught.value.fix.startswith(named)
