"""The index of a folder at a URL: read when tokens are prepared, and kept for when it is away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from data_kit import Server, folder, serving

from bootstrap.manifest import Data, Manifest
from node.data.folder import INDEX
from node.data.remote import Folder
from node.data.shard_cache import INDEX_COPY
from node.data.supply import Given, make, tokens_for
from node.hosts.tokens import fingerprint
from node.trainer.data import open_tokens
from protocols.errors import OperatorError

QUIET = lambda done, total: None  # noqa: E731
NEVER = 10**6
Served = tuple[Server, str, Path]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr("node.data.patience.FIRST_PAUSE_S", 0.001)
    made = folder(tmp_path / "www" / "data")
    with serving(tmp_path / "www") as server:
        yield server, f"{server.url}/data", made


def prepared(url: str, cache: Path) -> Manifest:
    """A run of the folder, and its tokens looked at, as by a node that joins."""
    made = make(Manifest(data=Data(seq_len=64)), url, Given(), cache.with_name("creator"), QUIET)
    tokens_for(made.manifest, made.shard, b"", url, QUIET, cache=cache)
    return made.manifest


def test_ranks_that_start_again_need_no_server_for_what_is_here(
    served: Served, tmp_path: Path
) -> None:
    server, url, made = served
    run = prepared(url, tmp_path / "cache")
    first = open_tokens(url, run.model.vocab_size, tmp_path / "cache", 10**9)
    assert not isinstance(first, np.ndarray)
    before = first.window(0, 100)
    server.away = NEVER
    asked = len(server.asked)
    again = open_tokens(url, run.model.vocab_size, tmp_path / "cache", 10**9)
    assert not isinstance(again, np.ndarray)
    assert np.array_equal(again.window(0, 100), before)
    assert len(server.asked) == asked
    # and a node that is started again then, on either kind of host
    assert tokens_for(run, b"", b"", url, QUIET, cache=tmp_path / "cache") == url
    assert fingerprint(url, 256, tmp_path / "cache") == fingerprint(str(made), 256)


def test_ranks_without_a_copy_ask_again(served: Served, tmp_path: Path) -> None:
    server, url, made = served
    prepared(url, tmp_path / "cache")
    (copy,) = (tmp_path / "cache").glob(f"{INDEX_COPY}*")
    for damaged in (b"", b"{}", copy.read_bytes()[:-9]):
        copy.write_bytes(damaged)
        server.away = 4
        tokens = open_tokens(url, 256, tmp_path / "cache", 10**9)
        assert len(tokens) == Folder(str(made)).index.tokens
        assert server.away == 0


def test_a_new_place_that_is_away_is_told_at_once(served: Served, tmp_path: Path) -> None:
    server, url, _ = served
    server.away = NEVER
    with pytest.raises(OperatorError, match="503") as caught:
        Folder(url, tmp_path / "cache")
    assert caught.value.code == "E603"
    assert NEVER - server.away <= 3  # for its size, and for itself


def test_an_index_that_is_there_counts_and_one_that_is_gone_is_told(
    served: Served, tmp_path: Path
) -> None:
    _, url, made = served
    prepared(url, tmp_path / "cache")
    other = folder(tmp_path / "www" / "other", shard_tokens=30_000)
    (made / INDEX).write_bytes((other / INDEX).read_bytes())
    assert Folder(url, tmp_path / "cache").index == Folder(str(other)).index
    (made / INDEX).unlink()
    with pytest.raises(OperatorError, match=INDEX) as caught:
        Folder(url, tmp_path / "cache")
    assert caught.value.code == "E603"


def test_who_makes_a_run_keeps_to_its_cache_as_well(served: Served, tmp_path: Path) -> None:
    _, url, _ = served
    with pytest.raises(OperatorError, match="cache is too small") as caught:
        make(Manifest(), url, Given(), tmp_path / "cache", QUIET, cache_bytes=100)
    assert caught.value.code == "E603"
