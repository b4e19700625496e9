"""Typed, bounded msgpack: how a frozen dataclass becomes bytes and back.

A message is ``[kind, version, field, field, …]``. What a field may hold is read once from its
annotation, so :mod:`protocols.messages` is the whole specification:

>>> class Ping(Message, kind=1):
...     nonce: int
...     note: Annotated[str, Max(64)] = ""

Every ``str``, ``bytes`` and ``tuple`` carries a :class:`Max`; a class without one raises
LocalProtocolError when first used. Decoding follows the annotations: the size of the whole and then
each length is checked before its value is built, so hostile bytes cost no more memory than a
message of the class may. It raises nothing but :class:`~protocols.errors.Malformed`.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable
from typing import (
    Annotated,
    Any,
    ClassVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

import msgpack

from protocols.errors import LocalProtocolError, Malformed

MAX_INT = 2**63 - 1
MAX_ARRAY = 4096  # upper bound of any tuple on the wire
MAX_ITEMS = 512 * 1024  # of all arrays of one message together: objects cost more than bytes

_NIL = 0xC0


@dataclasses.dataclass(frozen=True)
class Max:
    """The largest length of a str (UTF-8 bytes), bytes (bytes) or tuple (items)."""

    size: int


class _Reader:
    """One message being read; counts the items of its arrays."""

    __slots__ = ("_data", "_items", "_unpacker", "scalar")

    def __init__(self, data: bytes | memoryview) -> None:
        size = len(data)
        self._data = data
        self._items = MAX_ITEMS
        self._unpacker = msgpack.Unpacker(
            max_buffer_size=max(size, 1),
            max_str_len=size,
            max_bin_len=size,
            max_array_len=0,  # arrays are only read where the class has one, by their header
            max_map_len=0,
            max_ext_len=0,
        )
        self._unpacker.feed(data)
        self.scalar: Callable[[], Any] = self._unpacker.unpack  # anything but an array

    def array(self) -> int:
        """Number of items of the array that begins here."""
        count: int = self._unpacker.read_array_header()
        self._items -= count
        if self._items < 0:
            raise Malformed(f"more than {MAX_ITEMS} items")
        return count

    def nil(self) -> bool:
        """Whether a nil comes next; it is then passed over."""
        at = self._unpacker.tell()
        if at >= len(self._data) or self._data[at] != _NIL:
            return False
        self._unpacker.skip()
        return True

    def at_end(self) -> bool:
        """Whether everything has been read."""
        return bool(self._unpacker.tell() == len(self._data))


@dataclasses.dataclass(frozen=True, slots=True)
class _Codec:
    """How one annotation travels. Both ways check the same bounds and raise Malformed."""

    write: Callable[[Any, str], Any]  # (value, name of the field) to plain msgpack values
    read: Callable[[_Reader, str], Any]


@dataclass_transform(frozen_default=True, kw_only_default=False)
class Struct:
    """A value inside a message: ``[field, field, …]`` on the wire."""

    _codecs: ClassVar[dict[str, _Codec] | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True)(cls)
        cls._codecs = None

    @classmethod
    def codecs(cls) -> dict[str, _Codec]:
        """Codecs by field name, compiled on first use (annotations may be strings)."""
        if cls.__dict__.get("_codecs") is None:
            hints = get_type_hints(cls, include_extras=True)
            cls._codecs = {
                field.name: _compile(hints[field.name], f"{cls.__name__}.{field.name}")
                for field in dataclasses.fields(cls)  # type: ignore[arg-type]
            }
        assert cls._codecs is not None
        return cls._codecs

    def pack(self) -> list[Any]:
        """The fields as plain msgpack values; raises :class:`Malformed` beyond a bound."""
        return [codec.write(getattr(self, name), name) for name, codec in self.codecs().items()]

    @classmethod
    def unpack(cls, reader: _Reader, count: int) -> Any:
        """Build from the next ``count`` values; raises :class:`Malformed`."""
        codecs = cls.codecs()
        if count != len(codecs):
            raise Malformed(f"{cls.__name__}: {count} fields, not {len(codecs)}")
        return cls(*[codec.read(reader, name) for name, codec in codecs.items()])


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
        try:
            data: bytes = msgpack.packb([self.KIND, self.VERSION, *self.pack()])
        except (Malformed, UnicodeEncodeError) as error:  # the latter for a lone surrogate
            raise LocalProtocolError(f"{type(self).__name__}: {error}") from error
        if len(data) > self.MAX_BYTES:
            raise LocalProtocolError(
                f"{type(self).__name__} of {len(data)} bytes exceeds {self.MAX_BYTES}"
            )
        return data

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Any:
        """Decode one message of this class; raises :class:`Malformed` for anything else."""
        return decode_any(data, cls)


def decode_any(data: bytes | memoryview, *expected: type[Message]) -> Any:
    """Decode a message that may be of several classes, told apart by its kind."""
    names = " or ".join(cls.__name__ for cls in expected)
    bound = max(cls.MAX_BYTES for cls in expected)
    if len(data) > bound:
        raise Malformed(f"{names}: {len(data)} bytes exceed {bound}")
    try:
        reader = _Reader(data)
        count = reader.array()
        kind, version = reader.scalar(), reader.scalar()
        cls = next((c for c in expected if kind == c.KIND and type(kind) is int), None)
        if cls is None or len(data) > cls.MAX_BYTES:
            raise Malformed(f"not a {names}")
        if version != cls.VERSION or type(version) is not int:
            raise Malformed(f"{cls.__name__}: version {version!r}, this node speaks {cls.VERSION}")
        message = cls.unpack(reader, count - 2)
        if not reader.at_end():
            raise Malformed(f"{cls.__name__}: bytes after the end")
    except (ValueError, msgpack.UnpackException) as error:
        raise Malformed(f"{names}: {type(error).__name__}") from error
    return message


def _compile(hint: Any, where: str) -> _Codec:
    bound: int | None = None
    if get_origin(hint) is Annotated:
        hint, *marks = get_args(hint)
        bound = next((m.size for m in marks if isinstance(m, Max)), None)
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        inner = [arg for arg in get_args(hint) if arg is not type(None)]
        if len(inner) != 1 or len(get_args(hint)) != 2:
            raise LocalProtocolError(f"{where}: only `X | None` unions travel")
        return _optional(_compile(_bounded(inner[0], bound), where))
    if origin is tuple:
        if bound is None or bound > MAX_ARRAY or get_args(hint)[1:] != (Ellipsis,):
            raise LocalProtocolError(f"{where}: needs Annotated[tuple[X, ...], Max(n)]")
        return _sequence(_compile(get_args(hint)[0], where), bound)
    supertype = getattr(hint, "__supertype__", None)  # NewType
    if supertype is not None:
        return _compile(_bounded(supertype, bound), where)
    if isinstance(hint, type) and issubclass(hint, Struct):
        return _struct(hint)
    if hint in (str, bytes):
        if bound is None:
            raise LocalProtocolError(f"{where}: needs Annotated[{hint.__name__}, Max(n)]")
        return _leaf(_text(bound) if hint is str else _blob(bound))
    scalar = {int: _integer, float: _number, bool: _boolean}.get(hint)
    if scalar is None:
        raise LocalProtocolError(f"{where}: {hint!r} does not travel")
    return _leaf(scalar)


def _bounded(hint: Any, bound: int | None) -> Any:
    return hint if bound is None else Annotated[hint, Max(bound)]


def _leaf(check: Callable[[Any, str], Any]) -> _Codec:
    return _Codec(write=check, read=lambda reader, name: check(reader.scalar(), name))


def _optional(some: _Codec) -> _Codec:
    return _Codec(
        write=lambda value, name: None if value is None else some.write(value, name),
        read=lambda reader, name: None if reader.nil() else some.read(reader, name),
    )


def _struct(cls: type[Struct]) -> _Codec:
    def write(value: Any, name: str) -> list[Any]:
        if type(value) is not cls:
            raise Malformed(f"{name}: not a {cls.__name__}")
        return value.pack()

    return _Codec(write, lambda reader, name: cls.unpack(reader, reader.array()))


def _sequence(item: _Codec, bound: int) -> _Codec:
    def write(value: Any, name: str) -> list[Any]:
        if type(value) is not tuple or len(value) > bound:
            raise Malformed(f"{name}: not a tuple of at most {bound} items")
        return [item.write(v, name) for v in value]

    def read(reader: _Reader, name: str) -> tuple[Any, ...]:
        count = reader.array()
        if count > bound:
            raise Malformed(f"{name}: {count} items, at most {bound}")
        return tuple([item.read(reader, name) for _ in range(count)])

    return _Codec(write, read)


def _integer(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_INT:
        raise Malformed(f"{name}: not an integer from 0 to 2^63-1")
    return value


def _number(value: Any, name: str) -> float:
    if type(value) not in (float, int) or not math.isfinite(value):
        raise Malformed(f"{name}: not a finite number")
    return float(value) + 0.0  # one encoding for 1 and 1.0, and for 0.0 and -0.0


def _boolean(value: Any, name: str) -> bool:
    if type(value) is not bool:
        raise Malformed(f"{name}: not a boolean")
    return value


def _text(bound: int) -> Callable[[Any, str], str]:
    def check(value: Any, name: str) -> str:
        if not isinstance(value, str) or len(value) > bound or len(value.encode()) > bound:
            raise Malformed(f"{name}: not a text of at most {bound} bytes")
        return value

    return check


def _blob(bound: int) -> Callable[[Any, str], bytes]:
    def check(value: Any, name: str) -> bytes:
        if not isinstance(value, bytes | bytearray | memoryview) or len(value) > bound:
            raise Malformed(f"{name}: not a byte string of at most {bound} bytes")
        return bytes(value)

    return check
