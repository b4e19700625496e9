"""Answers that say nothing of their length end where their connection does, whole or not."""

import hashlib
import socket
import threading
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from node.data.remote import Folder
from node.data.shard_cache import ShardCache
from protocols.errors import OperatorError

BODY = bytes(range(251)) * 1000
NAME = "train-00000.bin"


@dataclass
class Place:
    """A folder without an index."""

    place: str
    opening = Folder.opening
    remote = True


@contextmanager
def serving(content, cuts=(), ranges=True):
    """A server of HTTP/1.0: its URL, and the first bytes that it was asked for."""
    listening, asked, left = socket.create_server(("127.0.0.1", 0)), [], list(cuts)

    def answer():
        while True:
            connection, _ = listening.accept()
            with connection:
                if not (said := connection.recv(1 << 16)):
                    return
                _, _, wanted = said.partition(b"Range: bytes=")
                start = int(wanted.partition(b"-")[0] or 0) if ranges else 0
                asked.append(start)
                if start >= len(content):
                    connection.sendall(b"HTTP/1.0 416 No\r\n\r\n")
                    continue
                head = b"200 OK\r\n"
                if start:
                    span = f"{start}-{len(content) - 1}/{len(content)}"
                    head = f"206 Partial\r\nContent-Range: bytes {span}\r\n".encode()
                end = start + left.pop(0) if left else len(content)
                head = b"HTTP/1.0 " + head + b'ETag: "a"\r\n\r\n'
                connection.sendall(head + content[start:end])

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", asked
    finally:
        socket.create_connection(listening.getsockname()).close()
        thread.join(30)
        listening.close()


@pytest.fixture(autouse=True)
def _hasty(monkeypatch):
    monkeypatch.setattr("node.data.patience.FIRST_PAUSE_S", 0.001)


def fetched(cache, url):
    kept = ShardCache(cache, 10 * len(BODY))
    return kept.get(Place(url), NAME, hashlib.sha256(BODY).hexdigest(), len(BODY)).read_bytes()


def test_an_answer_that_breaks_off_goes_on_where_it_was(tmp_path):
    with serving(BODY, [40_000] * 5) as (url, asked):
        assert fetched(tmp_path, url) == BODY
    assert asked == [n * 40_000 for n in range(6)]


def test_a_file_that_is_shorter_than_its_index_says_is_refused_soon(tmp_path):
    with serving(BODY[:40_000]) as (url, asked):
        with pytest.raises(OperatorError, match="another hash") as caught:
            fetched(tmp_path, url)
        assert caught.value.code == "E603"
    assert len(asked) < 10


def test_an_answer_that_breaks_off_anywhere_is_not_taken_for_a_damaged_file(tmp_path):
    """Without ranges each begins anew, and may end before the one that came furthest."""
    cuts = [200_000, 150_000, 100_000, 120_000, 90_000, 1]
    with serving(BODY, cuts, ranges=False) as (url, asked):
        assert fetched(tmp_path, url) == BODY
    assert len(asked) == len(cuts) + 1


def test_one_that_breaks_off_for_minutes_is_what_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("node.data.patience.PATIENCE_S", 0.1)
    cuts = [100_000 - n for n in range(10_000)]
    with (
        serving(BODY, cuts, ranges=False) as (url, _asked),
        pytest.raises(OperatorError, match="it ended after") as caught,
    ):
        fetched(tmp_path, url)
    assert caught.value.code == "E603"
