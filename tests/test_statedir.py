"""What a node keeps from one start to the next."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.statedir import StateDir


def test_a_later_start_has_a_larger_number_though_the_clock_was_put_back(tmp_path: Path) -> None:
    home = StateDir(tmp_path)
    first = home.incarnation(1_700_000_000.0)
    assert first == 1_700_000_000_000
    assert home.incarnation(1_600_000_000.0) == first + 1
    assert StateDir(tmp_path).incarnation(0.0) == first + 2
    assert home.incarnation(1_800_000_000.0) == 1_800_000_000_000


@pytest.mark.parametrize("spoilt", [b"", b"x", b"\xff\xfe", b"-7", b"9" * 400])
def test_a_number_that_is_none_does_no_harm(tmp_path: Path, spoilt: bytes) -> None:
    (tmp_path / "incarnation").write_bytes(spoilt)
    found = StateDir(tmp_path).incarnation(1_700_000_000.0)
    assert 1_700_000_000_000 <= found < 2**63
    assert StateDir(tmp_path).incarnation(1_700_000_000.0) == found + 1


def test_without_a_disk_the_clock_has_to_do(tmp_path: Path) -> None:
    home = StateDir(tmp_path / "nowhere")
    assert home.incarnation(5.0) == 5000
    assert home.incarnation(5.0) == 5000
