"""Manifests of runs under way, made by this version or another: what is read, and what is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from blake3 import blake3
from manifest_kit import freeze, frozen

from bootstrap import manifest_form
from bootstrap.manifest import Manifest
from bootstrap.manifest_form import LEFT_OUT, READING, flat
from bootstrap.manifest_rounds import Rounds
from bootstrap.signed_manifest import PURPOSE, SignedManifest
from protocols import envelope
from protocols.errors import Malformed, OtherVersion
from protocols.messages import PROTOCOL_VERSION, ManifestText

FIRST = 2  # the protocol version since which manifests have the keys that are never left out
HOW = (
    "a run that protocol version {} made would be lost to its nodes: no joining, no --resume, no "
    "export. A new key goes into LEFT_OUT of bootstrap/manifest_form.py, with what a run without "
    "it does; a new rule across keys into bootstrap/manifest_rules.py, which holds for new runs "
    "alone; a key, a name or a value that was taken stays. See docs/contributing.md"
)


@pytest.mark.parametrize("version", range(FIRST, PROTOCOL_VERSION + 1))
def test_runs_of_a_protocol_version_can_be_read_and_keep_their_ids(version: int) -> None:
    """A new version's are frozen before it is released: tests/kits/manifest_kit.py."""
    for run, data in frozen(version):
        assert blake3(data).digest() == run
        try:
            read = Manifest.parse(data)
        except Malformed as error:
            pytest.fail(f"{HOW.format(version)}\n{error}")
        assert read.run_id == run, HOW.format(version)
        assert Manifest.model_validate(read.model_dump(), context=READING) == read


def test_they_can_be_frozen_as_this_version_makes_them() -> None:
    lines = [json.loads(line) for line in freeze(PROTOCOL_VERSION)]
    assert bytes.fromhex(lines[0]["run"]) == Manifest().run_id
    assert {"gossip", "async", "btm"} <= {line.get("changes", {}).get("mode") for line in lines}


def test_what_a_key_means_that_is_left_out_is_what_it_meant() -> None:
    """Else a run of before would go on in another way, on the nodes that were upgraded."""
    before = {"script.frozen": "", "script.frozen_marks": ""}
    assert {key: LEFT_OUT[key] for key in before} == before
    assert LEFT_OUT.keys() <= flat(Manifest().model_dump()).keys()


class LaterRounds(Rounds):
    later: int = 7  # the meaning of before has not stayed the default


class Later(Manifest):
    """A manifest of a version that has two keys more."""

    rounds: LaterRounds = LaterRounds()
    also: str = ""


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> type[Later]:
    monkeypatch.setitem(manifest_form.LEFT_OUT, "rounds.later", 0)
    monkeypatch.setitem(manifest_form.LEFT_OUT, "also", "")
    return Later


def test_a_later_version_reads_the_runs_of_before_it(later: type[Later]) -> None:
    for run, data in frozen(PROTOCOL_VERSION):
        read = later.parse(data)
        assert (read.run_id, read.rounds.later, read.also) == (run, 0, "")


def test_a_key_that_came_later_is_in_the_form_where_it_says_something(later: type[Later]) -> None:
    usual, said = later(), later.model_validate({"rounds": {"later": 0}, "also": "this"})
    assert b'"later":7' in usual.canonical()
    assert b"also" not in usual.canonical()
    assert b"later" not in said.canonical()
    for made in (usual, said):
        assert later.parse(made.canonical()) == made
    spelled = json.loads(said.canonical())
    spelled["rounds"]["later"] = 0
    with pytest.raises(Malformed, match="canonical"):  # else a run would have two ids
        later.parse(_bytes(spelled))


def _bytes(plain: dict[str, Any]) -> bytes:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("table", "change", "told"),
    [
        ("rounds", {"brandnew": 1}, r"none of this version of Atoll: rounds\.brandnew: unknown"),
        ("rounds", {"brandnew": 1, "n" * 4000: 2}, r"rounds\.brandnew: unknown"),
        ("outer", {"optimizer": "lion"}, r"none of this version.* outer\.optimizer = 'lion'"),
        ("model", {"n_heads": 5}, "none of this version.* no multiple of n_heads 5"),
        ("", {"format": 2}, "none of this version.* format = 2"),
        ("rounds", {"align": None}, r"an older version of Atoll: without rounds\.align"),
    ],
)
def test_another_version_s_is_told_as_such(
    identities: Any, table: str, change: dict[str, Any], told: str
) -> None:
    plain = json.loads(Manifest().canonical())
    place = plain[table] if table else plain
    place |= change
    for key in [key for key, value in place.items() if value is None]:
        del place[key]
    run, [creator] = blake3(_bytes(plain)).digest(), identities(1)
    data = envelope.seal(
        creator,
        ManifestText(_bytes(plain)),
        purpose=PURPOSE,
        expires=253_402_300_800.0,
        sequence=0,
        run=run,
    )
    with pytest.raises(OtherVersion, match=told) as caught:
        SignedManifest.open(data, run)
    assert len(str(caught.value)) < 1100
    assert "did you mean" not in str(caught.value)
    assert "known here" not in str(caught.value)


def test_what_is_no_manifest_of_any_version_is_malformed() -> None:
    for data in (b"[]", b"{", b'{"seed":', Manifest().canonical().replace(b":64", b":-64")):
        with pytest.raises(Malformed) as caught:
            Manifest.parse(data)
        assert not isinstance(caught.value, OtherVersion)
