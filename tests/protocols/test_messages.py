"""Every message class: what it may hold travels, and hostile bytes are refused in little memory."""

from __future__ import annotations

import dataclasses
import sys
import tracemalloc
import types
from collections.abc import Callable
from typing import Annotated, Any, NewType, Union, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols import messages
from protocols.errors import Malformed
from protocols.identity import PeerId
from protocols.wire import MAX_ARRAY, MAX_INT, MAX_ITEMS, Max, Message, Struct, decode_any

CLASSES = sorted(
    (c for c in Message.registry.values() if c.__module__ == messages.__name__),
    key=lambda cls: cls.KIND,
)
every_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
SIZE = 5  # most items of a generated text or tuple; the bounds themselves are tested apart


def strategy(hint: Any, bound: int = sys.maxsize) -> st.SearchStrategy[Any]:
    """Values of an annotation."""
    if get_origin(hint) is Annotated:
        hint, *marks = get_args(hint)
        bound = next(mark.size for mark in marks if isinstance(mark, Max))
    if isinstance(hint, NewType):
        return strategy(hint.__supertype__, bound)
    if get_origin(hint) in (Union, types.UnionType):
        return st.one_of(st.none(), *[strategy(a) for a in get_args(hint) if a is not type(None)])
    if get_origin(hint) is tuple:
        items = st.lists(strategy(get_args(hint)[0]), max_size=min(bound, SIZE))
        return items.map(tuple)
    if isinstance(hint, type) and issubclass(hint, Struct):
        return instances(hint)
    scalars: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(0, MAX_INT),
        float: st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
        bytes: st.binary(max_size=min(bound, 40)),
        str: st.text(st.characters(exclude_categories=["Cs"]), max_size=min(bound // 4, SIZE)),
    }
    return scalars[hint]


def instances(cls: type[Struct]) -> st.SearchStrategy[Any]:
    """Values of a class of messages."""
    hints = get_type_hints(cls, include_extras=True)
    fields = {f.name: strategy(hints[f.name]) for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return st.builds(cls, **fields)


def plain(message: Message) -> list[Any]:
    values: list[Any] = msgpack.unpackb(message.encode())
    return values


def smallest(cls: type[Struct]) -> Any:
    """A message with nothing in it."""
    hints = get_type_hints(cls, include_extras=True)

    def value(hint: Any) -> Any:
        if get_origin(hint) is Annotated:
            hint = get_args(hint)[0]
        hint = getattr(hint, "__supertype__", hint)
        if get_origin(hint) in (Union, types.UnionType):
            return None
        if isinstance(hint, type) and issubclass(hint, Struct):
            return smallest(hint)
        return (get_origin(hint) or hint)()

    return cls(**{f.name: value(hints[f.name]) for f in dataclasses.fields(cls)})  # type: ignore[arg-type]


def test_every_message_is_here() -> None:
    defined = [
        value
        for value in vars(messages).values()
        if isinstance(value, type) and issubclass(value, Message) and value is not Message
    ]
    assert {c.KIND for c in CLASSES} == {c.KIND for c in defined}
    assert len(CLASSES) == len(defined) > 20


@every_class
def test_every_class_compiles(cls: type[Message]) -> None:
    assert set(cls.codecs()) == {f.name for f in dataclasses.fields(cls)}


@every_class
@settings(max_examples=25)
@given(data=st.data())
def test_messages_round_trip(cls: type[Message], data: st.DataObject) -> None:
    message = data.draw(instances(cls))
    encoded = message.encode()
    assert cls.decode(encoded) == message
    assert cls.decode(memoryview(encoded)) == message
    assert cls.decode(encoded).encode() == encoded
    assert decode_any(encoded, *CLASSES) == message


@every_class
@settings(max_examples=50)
@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_are_malformed(cls: type[Message], data: bytes) -> None:
    with pytest.raises(Malformed):
        cls.decode(data)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=70)
    | st.just(msgpack.Timestamp(1))
    | st.just(msgpack.ExtType(1, b"")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=12,
)


@every_class
@settings(max_examples=50)
@given(data=st.data())
def test_well_formed_msgpack_of_the_wrong_shape(cls: type[Message], data: st.DataObject) -> None:
    """A field is replaced by anything: it is refused, or it was something the field may hold."""
    values = plain(smallest(cls))
    values[data.draw(st.integers(0, len(values) - 1))] = data.draw(PLAIN)
    packed = msgpack.packb(values)
    try:
        message = cls.decode(packed)
    except Malformed:
        return
    assert cls.decode(message.encode()) == message


@every_class
@settings(max_examples=50)
@given(data=st.data())
def test_damaged_messages(cls: type[Message], data: st.DataObject) -> None:
    """Bytes flipped, cut out, doubled: Malformed, or another message within all bounds."""
    encoded = bytearray(data.draw(instances(cls)).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(encoded) - 1))
        match data.draw(st.integers(0, 2)):
            case 0:
                encoded[at] ^= data.draw(st.integers(1, 255))
            case 1:
                encoded[at : at + 1] = data.draw(st.binary(max_size=5))
            case _:
                encoded = encoded[: at + 1]
        if not encoded:
            break
    try:
        message = cls.decode(bytes(encoded))
    except Malformed:
        return
    assert cls.decode(message.encode()) == message


@every_class
def test_a_cut_or_longer_message(cls: type[Message]) -> None:
    encoded = smallest(cls).encode()
    for end in range(len(encoded)):
        with pytest.raises(Malformed):
            cls.decode(encoded[:end])
    with pytest.raises(Malformed):
        cls.decode(encoded + b"\x00")


@every_class
def test_kind_and_version_are_exact(cls: type[Message]) -> None:
    values = plain(smallest(cls))
    for at in (0, 1):
        wrongs: list[Any] = [values[at] + 1, float(values[at]), str(values[at]), None, []]
        for wrong in wrongs:
            with pytest.raises(Malformed):
                cls.decode(msgpack.packb([*values[:at], wrong, *values[at + 1 :]]))
    with pytest.raises(Malformed):
        cls.decode(msgpack.packb([values[0], True, *values[2:]]))


@every_class
def test_fields_cannot_be_left_out_or_added(cls: type[Message]) -> None:
    values = plain(smallest(cls))
    wrongs: list[list[Any]] = [values[:-1], [*values, 0], [], values[:1], values[:2] * 100]
    for wrong in wrongs:
        with pytest.raises(Malformed):
            cls.decode(msgpack.packb(wrong))


# --- memory -------------------------------------------------------------------------------------


def refused_in(cls: type[Message], data: bytes) -> int:
    """Peak bytes allocated while ``data`` is refused."""
    tracemalloc.start()
    try:
        with pytest.raises(Malformed):
            cls.decode(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def array(items: int) -> bytes:
    return b"\xdd" + items.to_bytes(4, "big")


BOMBS: dict[str, Callable[[int], bytes]] = {
    "empty arrays": lambda n: array(n - 5) + b"\x90" * (n - 5),
    "nested arrays": lambda n: b"\x91" * n,
    "wide and deep": lambda n: (array(n // 600) + (b"\x91" * 599 + b"\xc0") * (n // 600))[:n],
    "small tuples": lambda n: array((n - 5) // 2) + b"\x91\xc0" * ((n - 5) // 2),
    "short texts": lambda n: array((n - 5) // 3) + b"\xa2ab" * ((n - 5) // 3),
    "floats": lambda n: array((n - 5) // 9) + b"\xcb@\t!\xfbTD-\x18" * ((n - 5) // 9),
    "nested maps": lambda n: b"\x81\x00" * (n // 2),
    "a huge array announced": lambda n: array(2**32 - 1),
    "a huge text announced": lambda n: b"\xdb\xff\xff\xff\xff",
    "huge bytes announced": lambda n: b"\xc6\xff\xff\xff\xff",
    "a huge map announced": lambda n: b"\xdf\xff\xff\xff\xff",
    "a huge extension announced": lambda n: b"\xc9\xff\xff\xff\xff\x01",
}


@every_class
@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_cost_no_more_than_their_bytes(cls: type[Message], bomb: str) -> None:
    """As the whole message, and in the place of every field."""
    data = BOMBS[bomb](min(cls.MAX_BYTES, 300_000))
    allowed = len(data) * 2 + 200_000  # a copy of the bytes, and the error's own
    assert refused_in(cls, data) < allowed
    values = [msgpack.packb(value) for value in plain(smallest(cls))]
    for at in range(2, len(values)):
        whole = b"\xdc" + len(values).to_bytes(2, "big")
        whole += b"".join([*values[:at], data, *values[at + 1 :]])
        if len(whole) <= cls.MAX_BYTES:
            assert refused_in(cls, whole) < allowed, at


@every_class
def test_ten_million_empty_arrays(cls: type[Message]) -> None:
    assert refused_in(cls, array(10_000_000) + b"\x90" * 10_000_000) < 100_000


def test_the_largest_message_of_small_things_is_bounded() -> None:
    """Objects take more memory than the bytes they come from; MAX_ITEMS bounds that."""
    result = plain(smallest(messages.PartResult))[2:]
    result[7] = [[1, 2]] * messages.MAX_PEERS
    outcome = plain(smallest(messages.Outcome))[2:]
    outcome[6] = [result] * messages.MAX_PARTS
    values = plain(smallest(messages.Certificate))
    values[6] = outcome
    data = msgpack.packb(values)
    assert len(data) < messages.Certificate.MAX_BYTES
    assert messages.MAX_PARTS * messages.MAX_PEERS * 3 > MAX_ITEMS
    assert refused_in(messages.Certificate, data) < 64 * 2**20


def test_bounds_are_those_of_the_annotations() -> None:
    record = messages.PeerRecord(peer=PeerId("p" * 64), addresses=(), relay="")
    full = dataclasses.replace(record, addresses=("a" * 128,) * 8)
    assert messages.PeerRecord.decode(full.encode()) == full
    values = plain(full)
    for at, wrong in [
        (2, "p" * 65),
        (3, ["a"] * 9),
        (3, ["a" * 129]),
        (3, ["ä" * 65]),
        (4, "r" * 65),
    ]:
        with pytest.raises(Malformed):
            messages.PeerRecord.decode(msgpack.packb([*values[:at], wrong, *values[at + 1 :]]))
    assert messages.MAX_PARTS <= MAX_ARRAY
