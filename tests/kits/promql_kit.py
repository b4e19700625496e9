"""What an expression in PromQL is of one scrape, and whether the sides of its operators can meet.

Without ``on`` or ``ignoring`` only series whose labels are all equal meet, and an expression whose
sides never do is empty for ever, without any complaint. (Prometheus: Vector matching.)
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from promql_parser import (
    AggModifierType,
    AggregateExpr,
    BinaryExpr,
    Call,
    LabelModifierType,
    MatchOp,
    MatrixSelector,
    NumberLiteral,
    ParenExpr,
    UnaryExpr,
    VectorSelector,
)

Labels = dict[str, set[str]]  # beside instance and job, which all series of a node share
NONE = {""}  # a label that is not there
REDUCED: dict[str, Callable[[float, float], float]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
}  # fmt: skip
COMPARED: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt, "<": operator.lt, "==": operator.eq,
}  # fmt: skip


def evaluated(expression: Any, samples: Mapping[str, float], now: float) -> float | None:
    """Of one node at ``now``: of single samples by name and labels; None where it is empty.

    Counters were at 0 an hour ago, or however long rates go back.
    """
    match expression:
        case NumberLiteral():
            return float(expression.val)
        case ParenExpr():
            return evaluated(expression.expr, samples, now)
        case VectorSelector():
            given = ",".join(f'{one.name}="{one.value}"' for one in expression.matchers.matchers)
            return samples.get(f"{expression.name}{{{given}}}" if given else expression.name or "")
        case Call() if expression.func.name == "time":
            return now
        case AggregateExpr(expr=Call() as rate) if rate.func.name == "rate":
            matrix = rate.args[0]
            found = _all(matrix.vector_selector, samples)
            return sum(found) / matrix.range.total_seconds() if found else None
        case BinaryExpr():
            left = evaluated(expression.lhs, samples, now)
            right = evaluated(expression.rhs, samples, now)
            sign = str(expression.op)
            if sign == "or":
                return right if left is None else left
            if left is None or right is None:
                return None
            if sign in REDUCED:
                return REDUCED[sign](left, right)
            return left if sign == "and" or COMPARED[sign](left, right) else None
    raise NotImplementedError(expression)


def _all(selector: VectorSelector, samples: Mapping[str, float]) -> list[float]:
    """The samples of a metric that fit a selector, whatever else their labels are."""
    found = []
    for told, sample in samples.items():
        name, _, rest = told.partition("{")
        given = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        fits = (
            re.fullmatch(one.value, given[one.name])  # in what is asked for there are no signs
            for one in selector.matchers.matchers
        )
        if name == selector.name and all(fits):
            found.append(sample)
    return found


def labels(expression: Any, exported: Mapping[str, Mapping[str, set[str]]]) -> Labels | None:
    """The labels that its series may have; None of a number. Fails where two sides never meet."""
    match expression:
        case VectorSelector():
            found = {name: set(values) for name, values in exported[expression.name or ""].items()}
            for one in expression.matchers.matchers:
                if one.name in found and one.op in (MatchOp.Equal, MatchOp.Re):
                    found[one.name] &= set(one.value.split("|"))
            return found
        case MatrixSelector():
            return labels(expression.vector_selector, exported)
        case Call():
            inner = [labels(one, exported) for one in expression.args]
            kept = next((one for one in inner if one is not None), None)
            return {} if expression.func.name == "absent" else kept
        case AggregateExpr():
            kept, modifier = labels(expression.expr, exported) or {}, expression.modifier
            if modifier is None:
                return {}
            without = modifier.type == AggModifierType.Without
            return {n: v for n, v in kept.items() if (n in modifier.labels) != without}
        case ParenExpr() | UnaryExpr():
            return labels(expression.expr, exported)
        case BinaryExpr():
            return _both(expression, exported)
        case _:
            return None


def _both(expression: Any, exported: Mapping[str, Mapping[str, set[str]]]) -> Labels | None:
    left, right = labels(expression.lhs, exported), labels(expression.rhs, exported)
    if left is None or right is None:
        return right if left is None else left
    if str(expression.op) == "or":
        return {name: left.get(name, NONE) | right.get(name, NONE) for name in left | right}
    compared = set(left | right)
    matching = expression.modifier.matching if expression.modifier else None
    if matching is not None:
        listed = set(matching.labels)
        ignores = matching.type == LabelModifierType.Exclude
        compared = compared - listed if ignores else compared & listed
        left = {name: values for name, values in left.items() if name in compared}
    for name in compared:
        ours, theirs = left.get(name, NONE), right.get(name, NONE)
        assert ours & theirs, (
            f"{name} is {ours} on one side and {theirs} on the other of {expression}"
        )
    return left
