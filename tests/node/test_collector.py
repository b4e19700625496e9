"""What a process holds when it is set up costs later collections nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from node.collector import spare_what_stays


class Knot:
    """A cycle of one."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()  # else what the other tests have left so far would stay for ever


@pytest.mark.usefixtures("thawed")
def test_only_what_came_later_is_looked_at() -> None:
    before = weakref.ref(Knot())
    stays = [Knot() for _ in range(10)]
    spare_what_stays()
    assert before() is None  # garbage of the beginning is not kept for ever
    assert gc.get_freeze_count() > 10_000
    assert not any(kept in stays for kept in gc.get_objects() if isinstance(kept, Knot))
    later = weakref.ref(Knot())
    gc.collect()
    assert later() is None
