"""Files of a URL on a disk that is full, for a moment or for longer."""

import contextlib
import errno
import hashlib
import io
import itertools
import os
import random
from types import SimpleNamespace

import numpy as np
import pytest
from data_kit import folder, serving

from node.data import patience
from node.data.opened import Opened
from node.data.partial_file import PartialFile
from node.data.remote import Folder, FolderTokens
from node.data.shard_cache import ShardCache
from node.trainer.data import open_tokens
from protocols.errors import OperatorError


def filling_up(monkeypatch, rooms):
    """A disk that time after time has room for so many bytes alone, and then for all."""
    add, left = PartialFile.add, iter(rooms)

    def refused(part, piece):
        room = next(left, None)
        add(part, piece[:room])
        if room is not None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(PartialFile, "add", refused)


class OneFile:
    """A source of one file."""

    place, body = "memory", random.Random(0).randbytes(5000)

    def __init__(self):
        self.asked = []

    @contextlib.contextmanager
    def opening(self, name, start=0, version=""):
        self.asked.append(start)
        yield Opened(io.BytesIO(self.body[start:]), start, '"one"')

    def fetch(self, cache):
        kept, sha256 = ShardCache(cache, 10_000), hashlib.sha256(self.body).hexdigest()
        return kept.get(self, "file", sha256, len(self.body)).read_bytes() == self.body


def test_a_disk_that_is_full_for_a_moment_costs_no_fetch(tmp_path, monkeypatch):
    """What fills it may be a checkpoint, which is removed again where it does not fit."""
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.001)
    source = OneFile()
    filling_up(monkeypatch, [1000, 1000])
    assert source.fetch(tmp_path)
    assert source.asked == [0, 1000, 2000]


def test_a_disk_that_stays_full_is_told_of_and_what_came_is_kept(tmp_path, monkeypatch, caplog):
    source, slept = OneFile(), [0.0]
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(patience, "time", clock)
    with monkeypatch.context() as patched:
        filling_up(patched, itertools.chain([1000], itertools.repeat(0)))
        with pytest.raises(OperatorError, match="No space left") as caught:
            source.fetch(tmp_path)
    assert caught.value.code == "E402"
    assert patience.PATIENCE_S / 2 < sum(slept) <= patience.PATIENCE_S
    assert "No space left on device; again in 1 s" in caplog.text
    assert source.fetch(tmp_path)
    assert set(source.asked) == {0, 1000}


def test_training_waits_for_room_and_a_look_into_a_folder_does_not(
    command, tmp_path, monkeypatch, caplog
):
    made = folder(tmp_path / "www")
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.001)
    filling_up(monkeypatch, [0, 0, 0])
    with serving(made) as server:
        status, _, err = command("data", "inspect", server.url)
        assert (status, "E402" in err, "again in" in caplog.text) == (1, True, False)
        tokens = open_tokens(server.url, cache=tmp_path / "cache", cache_bytes=10**9)
        found = tokens.window(5, 9)
    assert np.array_equal(found, FolderTokens(Folder(str(made))).window(5, 9))
    assert caplog.text.count("No space left on device; again in") == 2
