"""On the way into a run: what is compared with the peers' run, and what is told of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from identity_kit import identity

from bootstrap.manifest import Manifest
from bootstrap.signed_manifest import SignedManifest
from node.config import resolve
from node.entrance import Entrance, Run
from node.monitor.event_log import EventLog
from protocols.errors import OperatorError

SCRIPT = {"layout": "ab" * 32, "parameters": 8}


def entrance(config: Any, told: Callable[[str], None] = lambda text: None) -> Entrance:
    """One that knows nobody, of a node that has these settings."""

    async def offload(work: Callable[[], Any]) -> Any:
        return work()

    log = EventLog()
    log.subscribe(lambda record: told(getattr(record.event, "text", "")))
    nothing: Any = None
    return Entrance(config, *[nothing] * 5, log, offload, nothing)


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


@pytest.mark.parametrize("data", ["", "mine.txt"])
async def test_who_joins_without_data_is_told_which_text_it_trains_on(
    tmp_path: Path, theirs: SignedManifest, monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    monkeypatch.setattr("node.data.supply.tokens_for", lambda *_: "tokens")
    config = resolve({"dir": str(tmp_path)} | ({"data": data} if data else {}), {})
    told: list[str] = []
    assert (
        await entrance(config, told.append).tokens(Run(theirs, b"", created=False), "") == "tokens"
    )
    assert [text.partition(",")[0] for text in told] == (
        [] if data else ["no --data: trains on the recipe of the run"]
    )


async def test_who_makes_a_run_with_data_is_told_that_others_do_not_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(manifest: Manifest, *_: Any) -> Any:
        return SimpleNamespace(manifest=manifest, shard=b"", tokens="tokens", tokenizer=b"")

    monkeypatch.setattr("node.data.supply.make", make)
    for recipe, notices in (("docstrings", 1), ("text", 0)):
        told: list[str] = []
        way_in = entrance(resolve({"dir": str(tmp_path), "data": "mine.txt"}, {}), told.append)
        way_in.identity = identity(3)
        await way_in.create(Manifest(data={"recipe": recipe}))
        assert len(told) == notices
        assert all("who joins without --data trains on docstrings" in text for text in told)
