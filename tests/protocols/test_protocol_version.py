"""Nodes of one protocol version understand each other: what messages hold is tied to it."""

from __future__ import annotations

import hashlib
import types
from typing import Annotated, Any, NewType, Union, get_args, get_origin, get_type_hints

from protocols import messages
from protocols.messages import PROTOCOL_VERSION
from protocols.wire import Max, Message, Struct

# by version, of what :func:`spelled` says; 3 differs from 2 in what lanes carry
DIGESTS = {3: "4ea52c3613b38221", 4: "8d9f295cc123e67c"}


def spelled() -> str:
    """Kinds, versions and fields of all that travels, a line for each class."""
    found = [
        cls
        for cls in vars(messages).values()
        if isinstance(cls, type) and issubclass(cls, Struct) and cls not in (Message, Struct)
    ]
    return "\n".join(sorted(map(_line, found)))


def _line(cls: type[Struct]) -> str:
    number = f" {cls.KIND}.{cls.VERSION}" if issubclass(cls, Message) else ""
    hints = get_type_hints(cls, include_extras=True)
    fields = [f"{name} {_type(hints[name])}" for name in cls.codecs()]
    return f"{cls.__name__}{number}: {', '.join(fields)}"


def _type(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        inner, *marks = get_args(hint)
        return f"{_type(inner)}<={next(mark.size for mark in marks if isinstance(mark, Max))}"
    if isinstance(hint, NewType):
        return _type(hint.__supertype__)
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_type(one) for one in get_args(hint))
    if get_origin(hint) is tuple:
        return f"[{_type(get_args(hint)[0])}]"
    return str(hint.__name__)


def test_messages_are_those_of_the_protocol_version() -> None:
    """Once a release has a version its messages stay: raise it, and note the new digest here."""
    digest = hashlib.sha256(spelled().encode()).hexdigest()[:16]
    assert DIGESTS.get(PROTOCOL_VERSION) == digest, f"{PROTOCOL_VERSION}: {digest!r}"
    assert max(DIGESTS) == PROTOCOL_VERSION
