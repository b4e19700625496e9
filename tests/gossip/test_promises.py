"""What a member has promised binds it after a restart: the record on its disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from promises_kit import ME, OTHER, RUN, last

from gossip.chain.forgetting import Forgetting
from gossip.chain.promises import KEPT, Promised, PromiseRecord
from protocols.identity import Identity

pytestmark = pytest.mark.usefixtures("remembered_signatures")
HEAD = b"h" * 32  # of the certificate that a round builds on
FORK = b"f" * 32  # of another one


def test_a_record_is_read_by_the_same_member_of_the_same_run_alone(tmp_path: Path) -> None:
    path = tmp_path / "promised"
    assert last(path) is None
    PromiseRecord(path, RUN, ME).write(None)
    assert last(path) == -1
    for round_ in (0, 7, 10**12):
        PromiseRecord(path, RUN, ME).write((round_, HEAD))
        assert last(path) == round_
    assert PromiseRecord(path, RUN, OTHER).promised is None
    assert PromiseRecord(path, b"s" * 32, ME).promised is None
    assert last(tmp_path) is None  # it cannot be read


def test_a_torn_record_counts_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "promised"
    PromiseRecord(path, RUN, ME).write((7, HEAD))
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert last(path) is None
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert last(path) is None
    PromiseRecord(path, RUN, ME).write((8, HEAD))
    assert last(path) == 8


def test_a_record_and_its_name_are_on_the_disk_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "promised"
    record, sync, synced, failing = PromiseRecord(path, RUN, ME), os.fsync, list[Path](), [tmp_path]

    def fsync(file: int) -> None:
        (which,) = [p for p in (path, tmp_path) if os.path.samestat(os.fstat(file), p.stat())]
        if which in failing:
            raise OSError("no space left on device")
        sync(file)
        if which == path:
            assert last(path) == writing, "before it is written"
        synced.append(which)

    monkeypatch.setattr(os, "fsync", fsync)
    writing = 3
    with pytest.raises(OSError, match="no space"):
        record.write((3, HEAD))
    assert record.promised is None
    failing.clear()
    synced.clear()
    record.write((3, HEAD))
    assert synced == [path, tmp_path], "its name was not on the disk the first time"
    writing = 4
    record.write((4, HEAD))
    assert synced == [path, tmp_path, path]


def test_rounds_behind_the_record_are_not_forgotten() -> None:
    def forgetting(**known: Any) -> Forgetting:
        given = {"joining": True, "new_identity": False, "among_others": True}
        return Forgetting(100.0, 5, **(given | known))

    lost, kept = forgetting(), forgetting(promised=Promised(6))
    for one in (lost, kept):
        one.heard(7)
    assert [lost.forgot(r, HEAD) for r in (5, 6, 7, 8)] == [True, True, True, False]
    assert [kept.forgot(r, HEAD) for r in (5, 6, 7, 8)] == [True, True, False, False]
    assert lost.abstains(101.0)
    assert not kept.abstains(101.0)
    newcomer = forgetting(promised=Promised(9), among_others=False)
    assert [newcomer.forgot(r, HEAD) for r in (8, 9, 10)] == [True, True, False]
    assert [newcomer.remembers(r, HEAD) for r in (8, 9, 10)] == [False, False, True]


def test_what_was_promised_binds_wherever_a_member_begins_and_not_on_another_side_of_a_fork(
    tmp_path: Path,
) -> None:
    path = tmp_path / "promised"
    record = PromiseRecord(path, RUN, ME)
    record.write(None)
    for round_ in (3, 4, 6):  # it was not there for the fifth
        record.write((round_, HEAD))
    found = PromiseRecord(path, RUN, ME).promised
    assert found is not None
    assert found == record.promised
    assert [found.binds(r, HEAD) for r in range(8)] == [False] * 3 + [
        True,
        True,
        False,
        True,
        False,
    ]
    assert not any(found.binds(r, FORK) for r in range(8))
    # started again from an older checkpoint it is bound there, and on the other side of it from now
    record.write((4, FORK))
    found = PromiseRecord(path, RUN, ME).promised
    assert found is not None
    assert found.last == 6
    assert found.binds(4, HEAD)
    assert found.binds(4, FORK)
    assert found.and_in(4, FORK) is found
    assert not found.binds(6, FORK)
    # what is further back than marks are kept
    record.write((3 + KEPT, HEAD))
    found = PromiseRecord(path, RUN, ME).promised
    assert found is not None
    assert [found.binds(r, FORK) for r in (2, 3, 4, 5)] == [True, True, True, False]
    record.write((10**9, HEAD))
    found = PromiseRecord(path, RUN, ME).promised
    assert found is not None
    assert [found.binds(10**9 - n, HEAD) for n in (0, 1, KEPT - 1, KEPT)] == [
        True,
        False,
        False,
        True,
    ]


def test_a_record_that_was_lost_says_nothing_of_the_rounds_before(tmp_path: Path) -> None:
    record = PromiseRecord(tmp_path / "promised", RUN, ME)
    record.write((7, HEAD))
    assert record.promised is not None
    assert all(record.promised.binds(r, FORK) for r in range(7))
    assert not record.promised.binds(7, FORK)


def test_what_was_promised_in_this_life_binds_who_loses_its_place() -> None:
    """A member that takes another state for the same round begins it once more."""
    for before in (None, Promised(4)):
        one = Forgetting(
            100.0, 5, joining=True, new_identity=False, among_others=True, promised=before
        )
        assert not one.forgot(6, HEAD)
        one.again(Promised(5).and_in(6, HEAD))
        assert one.forgot(6, HEAD)
        assert not one.forgot(6, FORK)


def test_who_claims_to_be_far_ahead_mutes_nobody_for_good() -> None:
    """A member can only have voted where most of those in office had come to the round before."""

    def listening(*claims: int) -> Forgetting:
        found = Forgetting(100.0, 5, joining=True, new_identity=False, among_others=True)
        for number, round_ in enumerate(claims):
            peer = Identity.from_seed(bytes([number]) * 32).peer_id
            found.claimed(peer, round_, len(claims) + 1)
        return found

    assert [listening(7, 2**62, 6).forgot(r, HEAD) for r in (7, 8, 9)] == [True, True, False]
    assert [listening(6, 7, 7).forgot(r, HEAD) for r in (7, 8)] == [True, False]
    assert [listening(6, 6, 7).forgot(r, HEAD) for r in (7, 8)] == [True, False]
    assert [listening(7).forgot(r, HEAD) for r in (7, 8)] == [True, False]  # no liar among two
