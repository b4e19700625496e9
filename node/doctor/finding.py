"""What a check comes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protocols.errors import OperatorError

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. ``fail``: this node would not train; ``warn``: not as it should."""

    name: str
    status: Status
    found: str
    why: str = ""
    fix: str = ""


def ok(name: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(name, "ok", found)


def warn(name: str, found: str, why: str, fix: str) -> Finding:
    """It works, but not as it should."""
    return Finding(name, "warn", found, why, fix)


def fail(name: str, found: str, why: str, fix: str) -> Finding:
    """``node start`` would end with an error, or never get anywhere."""
    return Finding(name, "fail", found, why, fix)


def failed(name: str, error: OperatorError) -> Finding:
    """An operator's error, as the finding that it would come true."""
    return Finding(name, "fail", f"{error.code}: {error.what}", error.why, error.fix)
