from __future__ import annotations

import errno
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from node.trainer.shared import HEADER_BYTES, SharedVectors, file_bytes
from protocols.errors import OperatorError

# A second process: says what try_snapshot gave, keeps it, and leaves when its input ends.
CHILD = """
import sys
from node.trainer.shared import SharedVectors
vectors = SharedVectors(int(sys.argv[1]), int(sys.argv[2]))
print(vectors.try_snapshot(), flush=True)
vectors.sent[:] = 2 * vectors.base
if sys.stdin.readline():
    vectors.end_snapshot(6)
    print("ended", flush=True)
    sys.stdin.readline()
"""


def child(vectors: SharedVectors) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(vectors.descriptor), str(vectors.size)],
        pass_fds=(vectors.descriptor,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def test_both_views_are_the_same_memory() -> None:
    vectors = SharedVectors.create(1001)
    base, sent = vectors.tensors()
    base.fill_(1.5)
    sent.fill_(-2.0)
    assert base.dtype == torch.float32
    assert base.shape == sent.shape == (1001,)
    assert np.all(vectors.base == 1.5)
    assert np.all(vectors.sent == -2.0)
    assert vectors.snapshot() is None
    vectors.close()
    assert float(base.sum()) == 1.5 * 1001  # the mapping lives as long as its views


def test_nothing_has_a_name() -> None:
    vectors = SharedVectors.create(100)
    assert os.fstat(vectors.descriptor).st_nlink == 0
    vectors.close()


def test_a_snapshot_and_a_claim_exclude_each_other_across_processes() -> None:
    vectors = SharedVectors.create(64)
    vectors.base[:] = 3.0
    with child(vectors) as trainer:
        assert line(trainer) == "True"
        assert not vectors.try_claim()  # it is being written
        tell(trainer)
        assert line(trainer) == "ended"
        assert vectors.try_claim()
        assert vectors.snapshot() == 6
        assert np.all(vectors.sent == 6.0)
        tell(trainer)
    with child(vectors) as trainer:
        assert line(trainer) == "False"  # claimed
        tell(trainer)
        tell(trainer)
    vectors.clear()
    assert vectors.snapshot() is None
    vectors.close()


def test_a_snapshot_that_is_kept_is_followed_by_none_until_a_claim() -> None:
    vectors = SharedVectors.create(64)
    vectors.keep(1, on=True)
    vectors.clear(1)
    vectors.clear()
    assert not vectors.try_snapshot(1)
    assert vectors.try_snapshot(0)
    vectors.end_snapshot(6, 0)
    assert vectors.try_read(1)  # `base` is as it should be
    vectors.end_reading()
    assert vectors.try_claim(1)
    assert not vectors.try_read(1)
    vectors.clear(1)
    assert vectors.try_snapshot(1)
    vectors.end_snapshot(7, 1)
    vectors.close()


def test_a_killed_trainer_leaves_no_lock() -> None:
    vectors = SharedVectors.create(64)
    with child(vectors) as trainer:
        assert line(trainer) == "True"
        assert not vectors.try_claim()
        trainer.kill()
        trainer.wait()
        assert vectors.try_claim()
        assert vectors.snapshot() is None
    vectors.close()


def test_another_size_is_refused() -> None:
    vectors = SharedVectors.create(64)
    with pytest.raises(ValueError, match="another length"):
        SharedVectors(vectors.descriptor, 65)
    with pytest.raises(ValueError, match="at least 1"):
        SharedVectors.create(0)
    assert os.fstat(vectors.descriptor).st_size == file_bytes(64) == HEADER_BYTES + 512
    vectors.close()


def test_no_memory_is_an_operators_error(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    def full(descriptor: int, offset: int, length: int) -> None:
        opened.append(descriptor)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OperatorError, match="No space left") as caught:
        SharedVectors.create(1000)
    assert caught.value.code == "E401"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])
