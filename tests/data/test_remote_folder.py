"""Token folders read over HTTP: servers that are away, and the cache of their files."""

import contextlib
import errno
import hashlib
import io
import itertools
import json
import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from data_kit import TEXTS, broken_off, folder, json_lines, serving

from node.data.folder import INDEX
from node.data.opened import Opened
from node.data.partial_file import PART
from node.data.prepare import prepare
from node.data.remote import Folder, FolderTokens
from node.data.shard_cache import ShardCache
from node.data.tokenizer import ByteTokenizer
from protocols.errors import OperatorError

BYTES = ByteTokenizer()


@pytest.fixture
def served(tmp_path):
    made = folder(tmp_path / "www" / "data")
    with serving(tmp_path / "www") as server:
        yield server, f"{server.url}/data", made


def test_files_come_over_http_once_and_the_same(served, tmp_path):
    server, url, made = served
    here, there = Folder(str(made)), Folder(url, tmp_path / "cache")
    assert there.index == here.index
    for _ in range(2):
        for shard in there.index.shards:
            assert np.array_equal(there.tokens(shard), here.tokens(shard))
    assert sorted(name for name in server.asked if name.startswith("train")) == sorted(
        shard.name for shard in there.index.shards
    )
    again = Folder(url, tmp_path / "cache")  # another rank: from the cache
    again.tokens(again.index.shards[0])
    assert again._cache.fetched == 0


def test_long_files_come_from_a_server_that_has_no_ranges(tmp_path):
    source = json_lines(tmp_path / "long.jsonl", [TEXTS[0] * n for n in range(1, 40)])
    prepare([str(source)], tmp_path / "www" / "long", BYTES)
    with serving(tmp_path / "www") as server:
        there = Folder(f"{server.url}/long", tmp_path / "cache")
        (shard,) = there.index.shards
        assert shard.tokens > 10 * 2**20  # fsspec asks for less at once
        assert np.array_equal(
            there.tokens(shard), Folder(str(tmp_path / "www" / "long")).tokens(shard)
        )
        assert server.asked.count(shard.name) == 1


def test_the_cache_keeps_its_bound_and_what_was_used_last(served, tmp_path):
    _, url, _ = served
    largest = max(s.tokens for s in Folder(url).index.shards)
    there = Folder(url, tmp_path / "cache", 2 * largest)
    first, *others = there.index.shards
    there.tokens(first)
    for shard in others:
        there.tokens(shard)
        there.tokens(first)  # used again and again
        files = [f for f in (tmp_path / "cache").iterdir() if f.name[0] != "."]
        assert sum(f.stat().st_size for f in files) <= 2 * largest
    assert there._cache.fetched == len(there.index.shards)
    with pytest.raises(OperatorError, match="too small"):
        Folder(url, tmp_path / "small", 100).tokens(first)


def test_what_is_mapped_counts_and_is_in_use(served, tmp_path, monkeypatch):
    """A file that was thrown out takes its room on the disk for as long as it is mapped."""
    monkeypatch.setattr("node.data.remote.NOTED_S", 0.0)
    _, url, _ = served
    largest = max(s.tokens for s in Folder(url).index.shards)
    there = Folder(url, tmp_path / "cache", 2 * largest)
    tokens = FolderTokens(there)
    starts = itertools.accumulate((s.tokens for s in there.index.shards[:-1]), initial=0)
    for start in starts:
        tokens.window(start, 10)
        tokens.window(0, 10)
    assert len(there.index.shards) > 3
    assert there._cache.fetched == len(there.index.shards), "what is read again and again stays"
    kept = {f.name for f in (tmp_path / "cache").iterdir() if f.name[0] != "."}
    mapped = {there.index.shards[number].sha256 for number in tokens._open}
    assert there.index.shards[0].sha256 in mapped <= kept


def test_many_fetch_at_once_into_a_cache_with_room_for_few(tmp_path):
    """Files are thrown out and drafts end while others look for room."""
    bodies = {hashlib.sha256(bytes([n]) * 1000).hexdigest(): bytes([n]) * 1000 for n in range(8)}

    class Place:
        place = "memory"

        @contextlib.contextmanager
        def opening(self, name, start=0, version=""):
            yield Opened(io.BytesIO(bodies[name]))

    def fetch(seed: int) -> int:
        mine = ShardCache(tmp_path, 4000)  # a process of its own
        for name in random.Random(seed).choices(list(bodies), k=150):
            assert mine.get(Place(), name, name, 1000).name == name
            held = [f.name for f in tmp_path.iterdir() if len(f.name) == 64]
            assert len(held) <= 4
        return mine.fetched

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(fetch, range(4)))
    assert not [f for f in tmp_path.iterdir() if f.name.startswith(PART)]


def alike() -> tuple[bytes, bytes]:
    """Contents whose hashes begin with the same two digits."""
    seen: dict[str, bytes] = {}
    for body in (b"%d" % number for number in itertools.count()):
        if (other := seen.setdefault(hashlib.sha256(body).hexdigest()[:2], body)) != body:
            return other, body
    raise AssertionError


def test_a_file_that_is_here_waits_for_none_that_is_being_fetched(tmp_path):
    bodies = {hashlib.sha256(body).hexdigest(): body for body in alike()}
    here, coming = bodies
    begun, go_on = threading.Event(), threading.Event()

    class Place:
        place = "memory"

        @contextlib.contextmanager
        def opening(self, name, start=0, version=""):
            if name == coming:
                begun.set()
                assert go_on.wait(60)
            yield Opened(io.BytesIO(bodies[name]))

    def ask(name, cache):
        return pool.submit(cache.get, Place(), name, name, len(bodies[name]))

    mine, other = ShardCache(tmp_path, 1000), ShardCache(tmp_path, 1000)
    with ThreadPoolExecutor(3) as pool:
        ask(here, mine).result(30)
        fetching = ask(coming, mine)
        try:
            assert begun.wait(30)
            for cache in (mine, other):
                assert ask(here, cache).result(30).read_bytes() == bodies[here]
            assert not fetching.done()
        finally:
            go_on.set()
        fetching.result(30)
    assert (mine.fetched, other.fetched) == (2, 0)


def test_a_folder_beside_the_files_neither_counts_nor_goes(served, tmp_path):
    """Parts of a stream lie there, where the same state directory trained on one."""
    _, url, _ = served
    beside = tmp_path / "cache" / "stream-0123"
    beside.mkdir(parents=True)
    (beside / "part-0-0.bin").write_bytes(bytes(100))
    os.utime(beside, (1, 1))  # it was not used for longest
    largest = max(s.tokens for s in Folder(url).index.shards)
    there = Folder(url, tmp_path / "cache", largest)
    for shard in there.index.shards:
        there.tokens(shard)
    assert (beside / "part-0-0.bin").exists()
    held, files = there._cache._held()
    assert held == sum(status.st_size for status, _ in files) <= largest


def test_a_wrong_hash_is_fetched_again_and_refused_at_last(served, tmp_path):
    server, url, made = served
    there = Folder(url, tmp_path / "cache")
    shard = there.index.shards[0]
    server.spoil[shard.name] = 2
    assert np.array_equal(there.tokens(shard), Folder(str(made)).tokens(shard))
    assert server.asked.count(shard.name) == 3
    server.spoil[there.index.shards[1].name] = 99
    with pytest.raises(OperatorError, match="another hash") as caught:
        there.tokens(there.index.shards[1])
    assert caught.value.code == "E603"
    assert [f.name for f in (tmp_path / "cache").iterdir() if f.name[0] != "."] == [shard.sha256]


@pytest.mark.parametrize("status", [503, 0])
def test_a_server_that_is_away_is_asked_again(served, tmp_path, monkeypatch, status):
    monkeypatch.setattr("node.data.patience.FIRST_PAUSE_S", 0.001)
    server, url, made = served
    there = Folder(url, tmp_path / "cache")
    server.away, server.status = 5, status
    shard = there.index.shards[0]
    assert np.array_equal(there.tokens(shard), Folder(str(made)).tokens(shard))
    assert server.away == 0


def test_a_server_that_stays_away_is_told_of_and_an_answer_is_an_answer(
    served, tmp_path, monkeypatch
):
    server, url, _ = served
    there = Folder(url, tmp_path / "cache")
    server.away, server.status = 99, 403
    with pytest.raises(OperatorError, match="403"):
        there.tokens(there.index.shards[0])
    assert server.away == 98  # asked once only
    server.status = 503
    slept = [0.0]
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr("node.data.patience.time", clock)
    with pytest.raises(OperatorError, match="503") as caught:
        there.tokens(there.index.shards[0])
    assert caught.value.code == "E603"
    assert 0 < server.away < 96


def test_where_the_disk_is_full_cached_files_make_way(served, tmp_path, monkeypatch):
    _, url, made = served
    there = Folder(url, tmp_path / "cache")
    # the first makes room enough for the third, whatever text there is
    first, second, third = sorted(there.index.shards[:3], key=lambda shard: -shard.tokens)
    for shard in (first, second):
        there.tokens(shard)
    real, full = ShardCache._make_room, [True]

    def make_room(cache, part):
        real(cache, part)
        if full:
            full.clear()
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ShardCache, "_make_room", make_room)
    assert np.array_equal(there.tokens(third), Folder(str(made)).tokens(third))
    kept = {f.name for f in (tmp_path / "cache").iterdir() if f.name[0] != "."}
    assert kept == {second.sha256, third.sha256}


def test_what_makes_way_on_a_full_disk_is_not_mapped(served, tmp_path, monkeypatch):
    _, url, made = served
    there = Folder(url, tmp_path / "cache")
    tokens, first = FolderTokens(there), there.index.shards[0]
    tokens.window(0, 10)
    real = ShardCache._make_room

    def make_room(cache, part):
        if tokens._open or (tmp_path / "cache" / first.sha256).exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        real(cache, part)

    monkeypatch.setattr(ShardCache, "_make_room", make_room)
    here = FolderTokens(Folder(str(made)))
    assert np.array_equal(tokens.window(first.tokens, 10), here.window(first.tokens, 10))


def test_a_cache_that_cannot_be_written_is_told_and_one_that_takes_no_notes_is_used(
    served, tmp_path, monkeypatch
):
    _, url, made = served
    (tmp_path / "file").touch()
    there = Folder(url, tmp_path / "file")
    with pytest.raises(OperatorError, match="File exists") as caught:
        there.tokens(there.index.shards[0])
    assert caught.value.code == "E601"  # and not that the disk is full
    assert "may write there" in caught.value.fix

    def refused(*args, **options):
        raise PermissionError(errno.EPERM, "Operation not permitted")  # as for others' files

    tokens = FolderTokens(Folder(url, tmp_path / "cache"))
    tokens.window(0, 5)
    monkeypatch.setattr(os, "utime", refused)
    for start in (0, 5):
        tokens._noted.clear()
        here = FolderTokens(Folder(str(made)))
        assert np.array_equal(tokens.window(start, 5), here.window(start, 5))
        tokens = FolderTokens(Folder(url, tmp_path / "cache"))


def test_a_cached_file_that_was_damaged_is_fetched_again(served, tmp_path):
    _, url, made = served
    shard = Folder(url, tmp_path / "cache").index.shards[0]
    Folder(url, tmp_path / "cache").tokens(shard)
    cached = tmp_path / "cache" / shard.sha256
    cached.write_bytes(b"\1" + cached.read_bytes()[1:])
    there = Folder(url, tmp_path / "cache")
    assert np.array_equal(there.tokens(shard), Folder(str(made)).tokens(shard))
    assert there._cache.fetched == 1


def test_what_is_no_folder_is_refused(served, tmp_path):
    server, url, made = served
    for place in (f"{server.url}/nothing", str(tmp_path / "nothing"), "nosuch://x/y"):
        with pytest.raises(OperatorError) as caught:
            Folder(place, tmp_path / "cache")
        assert caught.value.code in ("E603", "E605")
    (tmp_path / "file").touch()
    with pytest.raises(OperatorError) as caught:
        Folder(str(tmp_path / "file"))
    assert (caught.value.code, caught.value.why) == ("E603", "Not a directory")
    index = json.loads((made / INDEX).read_text())
    index["shards"][0]["name"] = "../../secret"
    (made / INDEX).write_text(json.dumps(index))
    with pytest.raises(OperatorError, match="no token folder"):
        Folder(url, tmp_path / "cache")


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_who_ends_a_look_into_a_folder_of_a_url_finds_nothing_of_it(
    tmp_path: Path, end: signal.Signals
) -> None:
    """Up to as much as the data cache holds would be left in the temporary folder."""
    folder(tmp_path / "tokens")
    to = tmp_path / "to"
    to.mkdir()
    shard = Folder(str(tmp_path / "tokens")).index.shards[-1].name
    with serving(tmp_path / "tokens", stalls=shard) as server:
        command = ["data", "inspect", server.url]
        broken_off(server, command, end, lambda: [*to.glob("atoll-inspect-*/*")], TMPDIR=str(to))
    assert list(to.iterdir()) == []
