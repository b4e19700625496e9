"""Whether the two sides of an operator in PromQL can have a series in common.

Without ``on`` or ``ignoring`` only series whose labels are all equal meet, and an expression whose
sides never do is empty for ever, without any complaint. (Prometheus: Vector matching.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from promql_parser import (
    AggModifierType,
    AggregateExpr,
    BinaryExpr,
    Call,
    LabelModifierType,
    MatchOp,
    MatrixSelector,
    ParenExpr,
    UnaryExpr,
    VectorSelector,
)

Labels = dict[str, set[str]]  # beside instance and job, which all series of a node share
NONE = {""}  # a label that is not there


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
