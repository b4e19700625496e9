"""Typed, bounded msgpack: how a frozen dataclass becomes bytes and back.

A message is ``[kind, version, field, field, …]``. What a field may hold is read once from its
annotation, so :mod:`protocols.messages` is the whole specification:

>>> class Ping(Message, kind=1):
...     nonce: int
...     note: Annotated[str, Max(64)] = ""

Every ``str``, ``bytes`` and ``tuple`` carries a :class:`Max`; a class without one does not
import. Decoding checks the size of the whole before it allocates and every bound after, and
raises nothing but :class:`~protocols.errors.Malformed`.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Union, dataclass_transform, get_args, get_origin

import msgpack

from protocols.errors import LocalProtocolError, Malformed

MAX_INT = 2**63 - 1
MAX_DEPTH_ITEMS = 4096  # upper bound of any array on the wire


@dataclasses.dataclass(frozen=True)
class Max:
    """The largest length of a str (UTF-8 bytes), bytes (bytes) or tuple (items)."""

    size: int


_Check = Callable[[Any, str], Any]


@dataclass_transform(frozen_default=True, kw_only_default=False)
class Struct:
    """A value inside a message: ``[field, field, …]`` on the wire."""

    _checks: ClassVar[dict[str, _Check] | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True)(cls)
        cls._checks = None

    @classmethod
    def checks(cls) -> dict[str, _Check]:
        """Validators by field name, compiled on first use (annotations may be strings)."""
        if cls.__dict__.get("_checks") is None:
            from typing import get_type_hints

            hints = get_type_hints(cls, include_extras=True)
            cls._checks = {
                field.name: _compile(hints[field.name], f"{cls.__name__}.{field.name}")
                for field in dataclasses.fields(cls)  # type: ignore[arg-type]
            }
        assert cls._checks is not None
        return cls._checks

    def pack(self) -> list[Any]:
        """The fields as plain msgpack values, checked against the same bounds as on receipt."""
        out = []
        for name, check in self.checks().items():
            value = getattr(self, name)
            out.append(_plain(value))
            try:
                check(out[-1], name)
            except Malformed as error:
                raise LocalProtocolError(f"{type(self).__name__}: {error}") from error
        return out

    @classmethod
    def unpack(cls, values: Any, where: str = "") -> Any:
        """Build from decoded msgpack values; raises :class:`Malformed`."""
        checks = cls.checks()
        if not isinstance(values, tuple) or len(values) != len(checks):
            raise Malformed(f"{where or cls.__name__}: wrong number of fields")
        return cls(*[check(v, name) for v, (name, check) in zip(values, checks.items(), strict=True)])


class Message(Struct):
    """A :class:`Struct` that stands alone: it has a kind and a version."""

    KIND: ClassVar[int]
    VERSION: ClassVar[int]
    MAX_BYTES: ClassVar[int]
    registry: ClassVar[dict[int, type[Message]]] = {}

    def __init_subclass__(
        cls, kind: int = 0, version: int = 1, max_bytes: int = 64 * 1024, **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        if kind in Message.registry:
            raise LocalProtocolError(f"kind {kind} is taken by {Message.registry[kind].__name__}")
        cls.KIND, cls.VERSION, cls.MAX_BYTES = kind, version, max_bytes
        Message.registry[kind] = cls

    def encode(self) -> bytes:
        """Canonical bytes: equal messages have equal bytes."""
        data: bytes = msgpack.packb([self.KIND, self.VERSION, *self.pack()], use_bin_type=True)
        if len(data) > self.MAX_BYTES:
            raise LocalProtocolError(
                f"{type(self).__name__} of {len(data)} bytes exceeds {self.MAX_BYTES}"
            )
        return data

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Any:
        """Decode one message of this class; raises :class:`Malformed` for anything else."""
        if len(data) > cls.MAX_BYTES:
            raise Malformed(f"{cls.__name__}: {len(data)} bytes exceed {cls.MAX_BYTES}")
        values = unpack_plain(data, cls.__name__)
        if not isinstance(values, tuple) or len(values) < 2 or values[0] != cls.KIND:
            raise Malformed(f"not a {cls.__name__}")
        if values[1] != cls.VERSION or isinstance(values[1], bool):
            raise Malformed(f"{cls.__name__}: version {values[1]!r}, this node speaks {cls.VERSION}")
        return cls.unpack(values[2:], cls.__name__)


def decode_any(data: bytes | memoryview, *expected: type[Message]) -> Any:
    """Decode a message that may be of several classes, told apart by its kind."""
    if len(data) > max(cls.MAX_BYTES for cls in expected):
        raise Malformed(f"{len(data)} bytes exceed the bound")
    values = unpack_plain(data, "message")
    kind = values[0] if isinstance(values, tuple) and values else None
    for cls in expected:
        if cls.KIND == kind:
            return cls.decode(data)
    raise Malformed(f"unexpected message kind {kind!r}")


def unpack_plain(data: bytes | memoryview, where: str) -> Any:
    """msgpack to tuples, ints, floats, str and bytes; maps, extensions and depth are refused."""
    size = len(data)
    try:
        return msgpack.unpackb(
            data,
            use_list=False,
            strict_map_key=True,
            max_str_len=size,
            max_bin_len=size,
            max_array_len=min(size, MAX_DEPTH_ITEMS),
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise Malformed(f"{where}: {type(error).__name__}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, Struct):
        return tuple(value.pack())
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, memoryview | bytearray):
        return bytes(value)
    return value


def _compile(hint: Any, where: str) -> _Check:
    bound: int | None = None
    if get_origin(hint) is Annotated:
        hint, *marks = get_args(hint)
        bound = next((m.size for m in marks if isinstance(m, Max)), None)
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        inner = [arg for arg in get_args(hint) if arg is not type(None)]
        if len(inner) != 1 or len(get_args(hint)) != 2:
            raise LocalProtocolError(f"{where}: only `X | None` unions travel")
        some = _compile(Annotated[inner[0], Max(bound)] if bound else inner[0], where)
        return lambda v, n: None if v is None else some(v, n)
    if origin is tuple:
        if bound is None or bound > MAX_DEPTH_ITEMS or get_args(hint)[1:] != (Ellipsis,):
            raise LocalProtocolError(f"{where}: needs Annotated[tuple[X, ...], Max(n)]")
        return _sequence(_compile(get_args(hint)[0], where), bound)
    supertype = getattr(hint, "__supertype__", None)  # NewType
    if supertype is not None:
        return _compile(Annotated[supertype, Max(bound)] if bound else supertype, where)
    if isinstance(hint, type) and issubclass(hint, Struct):
        return hint.unpack
    if hint in (str, bytes):
        if bound is None:
            raise LocalProtocolError(f"{where}: needs Annotated[{hint.__name__}, Max(n)]")
        return _text(bound) if hint is str else _blob(bound)
    scalar = {int: _integer, float: _number, bool: _boolean}.get(hint)
    if scalar is None:
        raise LocalProtocolError(f"{where}: {hint!r} does not travel")
    return scalar


def _integer(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_INT:
        raise Malformed(f"{name}: not an integer from 0 to 2^63-1")
    return value


def _number(value: Any, name: str) -> float:
    if type(value) not in (float, int) or not math.isfinite(value):
        raise Malformed(f"{name}: not a finite number")
    return float(value)


def _boolean(value: Any, name: str) -> bool:
    if type(value) is not bool:
        raise Malformed(f"{name}: not a boolean")
    return value


def _text(bound: int) -> _Check:
    def check(value: Any, name: str) -> str:
        if type(value) is not str or len(value) > bound or len(value.encode(errors="replace")) > bound:
            raise Malformed(f"{name}: not a text of at most {bound} bytes")
        return value

    return check


def _blob(bound: int) -> _Check:
    def check(value: Any, name: str) -> bytes:
        if type(value) is not bytes or len(value) > bound:
            raise Malformed(f"{name}: not a byte string of at most {bound} bytes")
        return value

    return check


def _sequence(item: _Check, bound: int) -> _Check:
    def check(value: Any, name: str) -> tuple[Any, ...]:
        if type(value) is not tuple or len(value) > bound:
            raise Malformed(f"{name}: not a sequence of at most {bound} items")
        return tuple(item(v, name) for v in value)

    return check
