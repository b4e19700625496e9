"""What is done every so many rounds."""

from __future__ import annotations

from node.multiples import Multiples


def test_each_multiple_is_due_once_and_also_where_the_count_leaps_over_it() -> None:
    tens = Multiples(10, 10)
    assert [r for r in (10, 11, 19, 20, 20, 24, 33, 39, 61, 62) if tens.due(r)] == [20, 33, 61]


def test_every_0_is_never() -> None:
    assert not any(Multiples(0, 0).due(round_) for round_ in range(3))


def test_what_is_passed_over_is_not_due() -> None:
    tens = Multiples(10, 0)
    tens.pass_over(25)
    assert [r for r in (26, 29, 30) if tens.due(r)] == [30]
