"""Fetches of a URL go on where they broke off, also where their process was killed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from aiohttp import web

from node.data.opened import opened
from node.data.partial_file import PART, VERSION, PartialFile
from node.data.remote import Folder
from node.data.shard_cache import PROGRESS_BYTES, ShardCache
from protocols.errors import OperatorError

CUT = PROGRESS_BYTES + 1000  # where answers break off: more than what counts as progress
SIZE = 3 * CUT
NAME = "train-00000.bin"
PATIENCE_S = 60.0
YEAR = {"Date": "Thu, 26 Nov 2026 12:00:00 GMT", "Last-Modified": "Wed, 26 Nov 2025 12:00:00 GMT"}
WEAK = {**YEAR, "Date": YEAR["Last-Modified"]}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - it changes in another thread
            await asyncio.sleep(0.001)


def body(seed: int = 0, size: int = SIZE) -> bytes:
    return random.Random(seed).randbytes(size)


@dataclass
class Site:
    """One file on a web server, and what is to go wrong with it."""

    content: bytes = field(default_factory=body)
    headers: dict[str, str] = field(default_factory=lambda: {"ETag": '"one"'})
    url: str = ""
    ranges: bool = True
    heeds: bool = True  # If-Range
    breaks: list[int] = field(default_factory=list)  # after so many bytes, by answer; -1: not
    stalls: bool = False  # in the place of a break
    then: Callable[[], None] = lambda: None  # after a break
    asked: list[tuple[str, str]] = field(default_factory=list)  # Range and If-Range
    sent: int = 0
    taken: ClassVar[int] = 0  # of what was sent, by this process

    async def answer(self, request: web.Request) -> web.StreamResponse:
        wanted = request.headers.get("Range", "")
        known = request.headers.get("If-Range", "")
        assert request.headers["Accept-Encoding"] == "identity"
        self.asked.append((wanted, known))
        start, status, headers = 0, 200, dict(self.headers)
        fits = not known or not self.heeds or known in self.headers.values()
        if wanted and self.ranges and fits:
            start, status = int(wanted.removeprefix("bytes=").removesuffix("-")), 206
            if start >= len(self.content):
                return web.Response(status=416)
            headers["Content-Range"] = f"bytes {start}-{len(self.content) - 1}/{len(self.content)}"
        response = web.StreamResponse(status=status, headers=headers)
        rest = self.content[start:]
        response.content_length = len(rest)
        await response.prepare(request)
        cut = self.breaks.pop(0) if self.breaks else -1
        part = rest if cut < 0 else rest[:cut]
        await response.write(part)
        self.sent += len(part)
        if cut >= 0:
            if self.stalls:
                await until(lambda: request.transport is None)
                return response
            # what aiohttp has read and the fetch has not is lost with the connection
            await until(lambda: Site.taken >= start + len(part))
            assert request.transport is not None
            request.transport.close()
            self.then()
        return response


@contextmanager
def serving(site: Site) -> Iterator[Site]:
    """The file on a port of the loopback address."""
    Site.taken = 0
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    ending = asyncio.Event()

    async def run() -> None:
        app = web.Application()
        app.router.add_get(f"/{NAME}", site.answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        await runner.setup()
        listening = web.TCPSite(runner, "127.0.0.1", 0)
        await listening.start()
        host, port = runner.addresses[0]
        site.url = f"http://{host}:{port}"
        ready.set()
        await ending.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    assert ready.wait(PATIENCE_S)
    try:
        yield site
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join()
        loop.close()


@dataclass
class Place:
    """The site's file as a folder that has no index."""

    place: str

    opening = Folder.opening
    remote = True


def fetch(site: Site, cache: Path, content: bytes | None = None) -> int:
    """Have the file of this content, and how many fetches of a file it took."""
    content = site.content if content is None else content
    kept = ShardCache(cache, 10 * SIZE)
    found = kept.get(Place(site.url), NAME, hashlib.sha256(content).hexdigest(), len(content))
    assert found.read_bytes() == content
    assert not [*cache.glob(f"{PART}*"), *cache.glob(f"{VERSION}*")]
    return kept.fetched


def test_more_of_a_file_is_a_sign_to_who_waits_for_it(tmp_path: Path) -> None:
    kept, part = ShardCache(tmp_path, 10 * SIZE), PartialFile(tmp_path, "ab" * 32, SIZE)
    assert kept.headway() == 0
    part.open()
    part.begin("its version")
    os.utime(part.path, (1, 1))
    before = kept.headway()
    part.add(bytes(PROGRESS_BYTES))
    assert kept.headway() > before > 0
    part.close()


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.data.patience.FIRST_PAUSE_S", 0.001)
    add = PartialFile.add

    def counted(part: PartialFile, piece: bytes) -> None:
        add(part, piece)
        Site.taken = part.length

    monkeypatch.setattr(PartialFile, "add", counted)


def rest(start: int) -> str:
    return f"bytes={start}-"


@pytest.mark.parametrize(
    ("headers", "known"),
    [({"ETag": '"one"', **YEAR}, '"one"'), (YEAR, YEAR["Last-Modified"])],
)
def test_a_fetch_that_breaks_off_goes_on_where_it_was(
    tmp_path: Path, headers: dict[str, str], known: str
) -> None:
    with serving(Site(headers=headers, breaks=[CUT, CUT])) as site:
        assert fetch(site, tmp_path) == 1
    assert site.asked == [("", ""), (rest(CUT), known), (rest(2 * CUT), known)]
    assert site.sent == SIZE


@pytest.mark.parametrize("headers", [{}, {"ETag": 'W/"one"', **YEAR}, WEAK])
def test_where_nothing_tells_versions_apart_the_hash_does(
    tmp_path: Path, headers: dict[str, str]
) -> None:
    """A weak tag is no condition of a range, nor a file that has changed in this second."""
    with serving(Site(headers=headers, breaks=[CUT])) as site:
        assert fetch(site, tmp_path) == 1
    assert site.asked == [("", ""), (rest(CUT), "")]
    wrong = Site(headers=headers, content=body(1), breaks=[CUT])
    wrong.then = lambda: setattr(wrong, "content", body())
    with serving(wrong):
        assert fetch(wrong, tmp_path / "other", body()) == 1
    assert wrong.asked == [("", ""), (rest(CUT), ""), ("", "")]


@pytest.mark.parametrize("heeds", [True, False])
def test_a_file_that_has_changed_meanwhile_begins_anew(tmp_path: Path, heeds: bool) -> None:
    site = Site(content=body(1), breaks=[CUT], heeds=heeds)

    def change() -> None:
        site.content, site.headers = body(), {"ETag": '"two"'}

    site.then = change
    with serving(site):
        assert fetch(site, tmp_path, body()) == 1
    # who takes no notice of the condition is asked without a range
    assert site.asked == [("", ""), (rest(CUT), '"one"'), *([] if heeds else [("", "")])]


def test_a_server_without_ranges_sends_it_from_the_beginning(tmp_path: Path) -> None:
    with serving(Site(ranges=False, breaks=[CUT, 2 * CUT])) as site:
        assert fetch(site, tmp_path) == 1
    assert site.sent == SIZE + 3 * CUT
    assert len(site.asked) == 3
    with serving(Site(headers={"ETag": '"one"', "Accept-Ranges": "none"}, breaks=[CUT])) as site:
        assert fetch(site, tmp_path / "told") == 1
    assert site.asked == [("", ""), ("", "")]


def test_a_file_that_is_shorter_now_begins_anew(tmp_path: Path) -> None:
    site = Site(headers={}, breaks=[CUT])
    site.then = lambda: setattr(site, "content", body(size=1000))
    with serving(site), pytest.raises(OperatorError, match="another hash") as caught:
        fetch(site, tmp_path, body())
    assert caught.value.code == "E603"
    assert site.asked[:3] == [("", ""), (rest(CUT), ""), ("", "")]
    assert len(site.asked) < 10


def test_what_came_outlives_a_server_that_stays_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.data.patience.PATIENCE_S", 0.05)
    with serving(Site(breaks=[CUT] + 50 * [0])) as site:
        with pytest.raises(OperatorError, match=NAME) as caught:
            fetch(site, tmp_path)
        assert caught.value.code == "E603"
        (part,) = tmp_path.glob(f"{PART}*")
        kept = part.stat().st_size
        assert kept == CUT
        site.breaks, site.sent = [], 0
        assert fetch(site, tmp_path) == 1
    assert site.sent == SIZE - kept


def test_breaks_cost_no_patience_as_long_as_it_comes_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.data.patience.PATIENCE_S", 0.0015)  # one more try
    with serving(Site(content=body(size=8 * CUT), breaks=7 * [CUT])) as site:
        assert fetch(site, tmp_path) == 1
    assert len(site.asked) == 8
    endless = Site(content=body(size=8 * CUT), breaks=100 * [CUT], ranges=False)
    with serving(endless), pytest.raises(OperatorError, match=NAME):
        fetch(endless, tmp_path / "other")
    assert len(endless.asked) < 5, "what comes again and again is no progress"


KILLED = """
import sys
cache, url, name, sha256, size, *sys.path[:0] = sys.argv[1:]
from pathlib import Path
from node.data.remote import Folder
from node.data.shard_cache import ShardCache
class Place:
    place, remote, opening = url, True, Folder.opening
ShardCache(Path(cache), 10 * int(size)).get(Place(), name, sha256, int(size))
"""


def test_what_came_outlives_its_process(tmp_path: Path) -> None:
    with serving(Site(breaks=[CUT], stalls=True)) as site:
        sha256 = hashlib.sha256(site.content).hexdigest()
        given = [str(tmp_path), site.url, NAME, sha256, str(SIZE)]
        command = [sys.executable, "-c", KILLED, *given, *sys.path]
        process = subprocess.Popen(command)
        try:
            end, part = time.monotonic() + PATIENCE_S, tmp_path / f"{PART}{sha256}-{SIZE}"
            while not part.exists() or part.stat().st_size < CUT // 4:
                assert time.monotonic() < end
                assert process.poll() is None
                time.sleep(0.01)
            counted, whole = ShardCache(tmp_path, 10 * SIZE)._held()
            assert counted >= SIZE, "it holds its room"
            assert not whole
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        kept = part.stat().st_size
        site.sent = 0
        assert fetch(site, tmp_path) == 1
    assert site.asked[1:] == [(rest(kept), '"one"')]
    assert site.sent == SIZE - kept


def left(cache: Path, content: bytes, *, version: str | None) -> Path:
    """What a killed process has left of a file."""
    part = cache / f"{PART}{hashlib.sha256(content).hexdigest()}-{len(content)}"
    part.write_bytes(content[:CUT])
    if version is not None:
        part.with_name(part.name.replace(PART, VERSION)).write_text(version)
    return part


def test_what_was_left_makes_way_for_others(tmp_path: Path) -> None:
    part = left(tmp_path, body(1), version='"other"')
    with serving(Site()) as site:
        kept = ShardCache(tmp_path, SIZE + CUT - 1)
        kept.get(Place(site.url), NAME, hashlib.sha256(site.content).hexdigest(), SIZE)
    assert not part.exists()
    assert not list(tmp_path.glob(f"{VERSION}*"))


def test_what_cannot_be_gone_on_from_does_not_stay(tmp_path: Path) -> None:
    part = left(tmp_path, body(1), version=None)
    with serving(Site()) as site:
        fetch(site, tmp_path)
    assert not part.exists()


def test_what_is_damaged_costs_one_fetch_more(tmp_path: Path) -> None:
    part = left(tmp_path, body(), version='"one"')
    part.write_bytes(bytes(CUT))  # as after a loss of power
    with serving(Site()) as site:
        assert fetch(site, tmp_path) == 1
    assert site.asked == [(rest(CUT), '"one"'), ("", "")]


def test_one_that_is_whole_needs_no_server(tmp_path: Path) -> None:
    left(tmp_path, body(), version='"one"').write_bytes(body())
    assert fetch(Site(url="http://127.0.0.1:9"), tmp_path) == 1


def test_object_stores_go_on_by_their_own_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As fsspec's files do that can be read from anywhere."""
    files = fsspec.filesystem("memory")
    files.pipe_file(f"/continued/{NAME}", body())
    begun = []

    def broken(path: str, *args: object, **options: object) -> BytesIO:
        begun.append(BytesIO(body()) if begun else Broken(body()))
        return begun[-1]

    monkeypatch.setattr(files, "_open", broken)
    try:
        assert fetch(Site(url="memory://continued"), tmp_path, body()) == 1
        assert len(begun) == 2
        with opened(f"memory://continued/{NAME}", SIZE - 1) as found:
            assert (found.start, found.file.read(9)) == (SIZE - 1, body()[-1:])
    finally:
        files.rm("/continued", recursive=True)


class Broken(BytesIO):
    """Can be read up to a place."""

    def read(self, size: int | None = -1) -> bytes:
        if self.tell() == CUT:
            raise ConnectionResetError("broken off")
        return super().read(CUT)


def test_headers_that_fsspec_is_configured_with_go_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fsspec.config.conf, "http", {"headers": {"If-Range": "mine"}})
    with serving(Site(breaks=[CUT])) as site:
        fetch(site, tmp_path)
    assert site.asked == [("", "mine"), (rest(CUT), '"one"')]
