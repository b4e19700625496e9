"""What a node reads of text, for a run that it makes and to train on; and what is told of it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from data_kit import folder, serving
from identity_kit import identity

from bootstrap.manifest import Manifest
from bootstrap.signed_manifest import SignedManifest
from node.config import NodeConfig, resolve
from node.data import plain_text
from node.data.cached_file import write
from node.entry.entrance import Run
from node.errors import operator_error
from node.hosts.crew import job_of
from node.monitor.event_log import EventLog
from node.reading import NOTE, Reading
from protocols.errors import OperatorError


def reading(config: NodeConfig, told: list[str]) -> Reading:
    """Of a node with these settings; its notices go into a list."""

    async def offload(work: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(work)

    log = EventLog()
    log.subscribe(lambda record: told.append(getattr(record.event, "text", "")))
    return Reading(config, identity(3), log, offload)


@pytest.mark.parametrize("data", ["", "mine.txt"])
async def test_who_joins_without_data_is_told_which_text_it_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    monkeypatch.setattr("node.data.supply.tokens_for", lambda *_: "tokens")
    config = resolve({"dir": str(tmp_path)} | ({"data": data} if data else {}), {})
    told: list[str] = []
    theirs = Run(SignedManifest.create(Manifest(), identity(1)), b"", created=False)
    assert await reading(config, told).tokens(theirs) == "tokens"
    assert [text.partition(",")[0] for text in told] == (
        [] if data else ["no --data: trains on the recipe of the run"]
    )


def made_at_once(manifest: Manifest, *_: Any) -> Any:
    return SimpleNamespace(manifest=manifest, shard=b"", tokens="tokens", tokenizer=b"")


async def test_who_makes_a_run_with_data_is_told_that_others_do_not_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.data.supply.make", made_at_once)
    config = resolve({"dir": str(tmp_path), "data": "mine.txt"}, {})
    for recipe, notices in (("docstrings", 1), ("text", 0)):
        told: list[str] = []
        await reading(config, told).make_run(Manifest(data={"recipe": recipe}))
        assert len(told) == notices
        assert all("who joins without --data trains on docstrings" in text for text in told)


async def test_who_starts_from_weights_without_data_is_told_what_they_are_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.data.supply.make", made_at_once)

    async def said(recipe: dict[str, str], **flags: str) -> list[str]:
        told: list[str] = []
        config = resolve({"dir": str(tmp_path), **flags}, {})
        await reading(config, told).make_run(Manifest(data=recipe))
        return told

    weights = {"init_from": str(tmp_path)}
    (told,) = await said({}, **weights)
    assert "--init-from without --data: trains these weights on" in told
    assert "docstrings of Python packages" in told
    assert not await said({})
    assert not await said({"recipe": "text"}, **weights)
    assert not await said({"recipe": "text", "path": "mine.txt"}, **weights)
    assert "trains these weights" not in str(await said({}, data="mine.txt", **weights))


async def test_files_of_a_folder_that_are_no_text_are_named_by_who_makes_a_run_and_who_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each looks through the folder once: it may be a large one on a slow disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "text"
    (text / ".ssh").mkdir(parents=True)
    prose = "\n\n".join(f"Paragraph {i} of a text to train on." for i in range(3000))
    (text / "good.txt").write_text(prose)
    for name in ("1.txt", "2.txt", "3.txt", "4.txt", ".hidden", ".ssh/key"):
        (text / name).write_bytes("caf\xe9".encode("latin-1"))
    looks, look_into = [], plain_text.look_into

    def look(*args: Any) -> Any:
        looks.append(args)
        return look_into(*args)

    monkeypatch.setattr(plain_text, "look_into", look)
    told: list[str] = []
    node = reading(resolve({"dir": str(tmp_path), "data": str(text)}, {}), told)
    run = await node.make_run(Manifest(data={"recipe": "text"}))
    run.tokens = ""  # as at another node
    await node.tokens(run)
    assert len(looks) == 2
    told = [line for line in told if not line.startswith("reads windows again")]
    assert len(told) == 2
    for line in told:
        assert f"{text / '1.txt'} (it is not UTF-8 (byte 3)), " in line
        assert line.endswith("and 1 more")
        assert "good" not in line


async def trained_on(path: Path) -> tuple[Path, Run]:
    """A token folder that a node has been given, which it remembers, and the run."""
    made = folder(path / "data")
    run = Run(SignedManifest.create(Manifest(), identity(1)), b"", created=False)
    await reading(resolve({"dir": str(path), "data": str(made)}, {}), []).tokens(run)
    return made, run


async def test_tokens_that_were_damaged_since_are_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made, run = await trained_on(tmp_path)
    node = reading(resolve({"dir": str(tmp_path)}, {}), [])
    assert await node.tokens(run) == str(made)
    with (made / "train-00000.bin").open("r+b") as file:
        file.write(b"xx")
    with pytest.raises(OperatorError) as caught:
        await node.tokens(run)
    assert caught.value.code == "E603"


async def test_a_tokens_file_that_was_damaged_since_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever happened to it, to its size or its record; and that is told."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Paragraph {i} of a text to train on." for i in range(3000)))
    node = reading(resolve({"dir": str(tmp_path), "data": str(text)}, {}), [])
    run = await node.make_run(Manifest())
    tokens = tmp_path / await node.tokens(run)
    whole = tokens.read_bytes()
    run.tokens = ""  # as where it resumes
    told: list[str] = []
    resumed = reading(resolve({"dir": str(tmp_path)}, {}), told)
    assert await resumed.tokens(run) == str(tokens)
    assert not told
    for damaged in (bytes(len(whole)), whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        tokens.write_bytes(damaged)
        told.clear()
        assert await resumed.tokens(run) == str(tokens)
        assert tokens.read_bytes() == whole
        assert told[0].startswith(f"{tokens} is damaged: ")
    tokens.with_suffix(".json").unlink()
    assert await resumed.tokens(run) == str(tokens)
    assert tokens.with_suffix(".json").exists()


async def test_where_the_tokens_are_may_be_any_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is no UTF-8; it is made once, and found again by who resumes."""
    made = tmp_path / os.fsdecode(b"caf\xe9.bin")
    write(made, [b"tokens"])
    asked: list[str] = []

    def tokens_for(*given: Any) -> str:
        asked.append("asked")
        return str(made)

    monkeypatch.setattr("node.data.supply.tokens_for", tokens_for)
    node = reading(resolve({"dir": str(tmp_path)}, {}), [])
    run = Run(SignedManifest.create(Manifest(), identity(1)), b"", created=False)
    assert [await node.tokens(run) for _ in range(2)] == [str(made)] * 2
    assert len(asked) == 1
    made.unlink()
    await node.tokens(run)
    assert len(asked) == 2


async def test_tokens_of_another_run_are_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be a text that was given for that run alone, or ids of another tokenizer."""
    theirs, recipe = tmp_path / "theirs.bin", tmp_path / "recipe.bin"
    for path in (theirs, recipe):
        write(path, [bytes(1000)])
    places: list[str] = []

    def tokens_for(manifest: Manifest, shard: bytes, tokenizer: bytes, place: str, *_: Any) -> str:
        places.append(place)
        return str(theirs if place else recipe)

    monkeypatch.setattr("node.data.supply.tokens_for", tokens_for)
    first, second = (
        Run(SignedManifest.create(Manifest(seed=seed), identity(1)), b"", created=False)
        for seed in (1, 2)
    )
    private = reading(resolve({"dir": str(tmp_path), "data": "private.txt"}, {}), [])
    assert await private.tokens(first) == str(theirs)
    node = reading(resolve({"dir": str(tmp_path)}, {}), [])
    assert await node.tokens(second) == str(recipe)
    assert node.place == ""
    assert await node.tokens(second) == str(recipe)
    assert [Path(place).name for place in places] == ["private.txt", ""]


async def test_tokens_that_are_gone_are_made_again_of_what_they_were_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else is trained on instead, and where it cannot be read the note stays."""
    made, places = tmp_path / "made.bin", list[str]()

    def tokens_for(manifest: Manifest, shard: bytes, tokenizer: bytes, place: str, *_: Any) -> str:
        places.append(Path(place).name)
        if not made.exists():
            raise operator_error("E601", why="the disk is not mounted")
        return str(made)

    monkeypatch.setattr("node.data.supply.tokens_for", tokens_for)
    run = Run(SignedManifest.create(Manifest(), identity(1)), b"", created=False)
    write(made, [bytes(1000)])
    await reading(resolve({"dir": str(tmp_path), "data": "own.txt"}, {}), []).tokens(run)
    made.unlink()
    for _ in range(2):
        with pytest.raises(OperatorError, match="not mounted"):
            await reading(resolve({"dir": str(tmp_path)}, {}), []).tokens(run)
    write(made, [bytes(1000)])
    assert await reading(resolve({"dir": str(tmp_path)}, {}), []).tokens(run) == str(made)
    assert places == ["own.txt"] * 3


async def test_tokens_that_were_made_anew_of_another_tokenizer_are_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made, run = await trained_on(tmp_path)
    index = json.loads((made / "data.json").read_bytes())
    (made / "data.json").write_text(json.dumps(index | {"tokenizer": "ab" * 32}))
    with pytest.raises(OperatorError, match="another tokenizer") as caught:
        await reading(resolve({"dir": str(tmp_path)}, {}), []).tokens(run)
    assert caught.value.code == "E603"


@pytest.mark.parametrize(
    "noted", [b"", b"[]", b"{", b"\xff", b"[" * 4096, b'{"run": 1}', b'{"more": ""}', None]
)
@pytest.mark.parametrize("trained", [False, True])
async def test_a_damaged_note_of_tokens_is_not_the_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noted: bytes | None, trained: bool
) -> None:
    """Its own text is named once more, or the recipe; until then the note stays as it is."""
    places: list[str] = []

    def tokens_for(manifest: Manifest, shard: bytes, tokenizer: bytes, place: str, *_: Any) -> str:
        places.append(Path(place).name)
        return "tokens"

    monkeypatch.setattr("node.data.supply.tokens_for", tokens_for)
    note = tmp_path / NOTE
    note.mkdir() if noted is None else note.write_bytes(noted)
    run = Run(SignedManifest.create(Manifest(), identity(1)), b"", created=False)
    told: list[str] = []
    for _ in range(2):
        with pytest.raises(OperatorError, match="is not known any more") as caught:
            await reading(resolve({"dir": str(tmp_path)}, {}), told).tokens(run, trained=trained)
        assert caught.value.code == "E601"
        assert str(note) in caught.value.why
        assert "--data docstrings" in caught.value.fix
    assert places == told == []
    if noted is None:
        note.rmdir()
    for data in ("own.txt", "docstrings"):
        node = reading(resolve({"dir": str(tmp_path), "data": data}, {}), told)
        assert await node.tokens(run, trained=trained) == "tokens"
        known = json.loads(note.read_bytes())["place"]
        assert (
            known
            == node.place
            == ("" if data == "docstrings" else resolve({"data": data}, {}).data)
        )
    assert places == ["own.txt", ""]
    assert told == []


@pytest.mark.parametrize("of_another", [False, True])
async def test_who_has_trained_takes_no_recipe_for_a_text_that_is_not_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_another: bool
) -> None:
    """Who has not, as one that was a seed, takes it like any newcomer."""
    monkeypatch.setattr("node.data.supply.tokens_for", lambda *_: "tokens")
    first, second = (
        Run(SignedManifest.create(Manifest(seed=seed), identity(1)), b"", created=False)
        for seed in (1, 2)
    )
    node = reading(resolve({"dir": str(tmp_path)}, {}), [])
    if of_another:
        await node.tokens(first)
    with pytest.raises(OperatorError, match="is not known any more") as caught:
        await node.tokens(second, trained=True)
    assert caught.value.code == "E601"
    assert await node.tokens(second) == "tokens"
    assert await node.tokens(second, trained=True) == "tokens"


async def test_who_resumes_without_data_still_knows_what_its_tokens_were_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other hosts of an island make theirs of the same, which they are told each time."""
    made, text = tmp_path / "tokens.bin", tmp_path / "text"
    write(made, [bytes(1000)])
    monkeypatch.setattr("node.data.supply.tokens_for", lambda *_: str(made))
    run = Run(SignedManifest.create(Manifest(), identity(1)), b"", created=False)

    async def told(**settings: Any) -> str:
        node = reading(resolve({"dir": str(tmp_path), **settings}, {}), [])
        tokens = await node.tokens(run)
        return job_of(run, tokens, node.place, tmp_path).place

    assert await told(data=str(text)) == str(text)
    assert await told() == str(text)
    assert await told(data=str(tmp_path / "other")) == str(tmp_path / "other")
    run.tokens = str(made)  # of a run that this node has made of the recipe, in the same directory
    assert await told() == ""
    run.tokens = ""
    assert await told() == ""


async def test_who_makes_a_run_of_a_files_text_knows_what_its_tokens_were_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.data.supply.make", made_at_once)
    own = Manifest(data={"recipe": "text", "path": str(tmp_path / "of-run.txt")})
    node = reading(resolve({"dir": str(tmp_path)}, {}), [])
    await node.tokens(await node.make_run(own))
    assert node.place == str(tmp_path / "of-run.txt")


async def test_a_script_has_its_own_data(tmp_path: Path) -> None:
    script = {"layout": "ab" * 32, "parameters": 8}
    run = Run(SignedManifest.create(Manifest(script=script), identity(1)), b"", created=False)
    assert await reading(resolve({"dir": str(tmp_path)}, {}), []).tokens(run) == ""


async def test_what_comes_from_a_url_is_kept_in_the_state_directory_within_its_bound(
    tmp_path: Path,
) -> None:
    folder(tmp_path / "www" / "data")
    with serving(tmp_path / "www") as server:
        given = {"dir": str(tmp_path / "state"), "data": f"{server.url}/data"}
        config = resolve(given, {})
        small = config.model_copy(update={"data_cache": 100.0})
        with pytest.raises(OperatorError, match="cache is too small"):
            await reading(small, []).make_run(Manifest())
        node = reading(config, [])
        made = await node.make_run(Manifest())
        (tmp_path / "state" / "data-cache").rename(tmp_path / "other")
        joined = Run(made.signed, made.shard, created=False)
        assert await node.tokens(joined) == given["data"]
        server.away = 10**6  # from here on what is known has to do
        assert await node.tokens(joined) == given["data"]
