"""The encoding: what classes may declare, canonical bytes, and bounds on both sides."""

from __future__ import annotations

import dataclasses
import enum
from typing import Annotated, Any, NewType

import msgpack
import pytest

from protocols.errors import LocalProtocolError, Malformed
from protocols.wire import MAX_ARRAY, MAX_INT, MAX_ITEMS, Max, Message, Struct, decode_any

Label = NewType("Label", str)


class Pair(Struct):
    left: int
    right: float


class Sample(Message, kind=61001, max_bytes=4096):
    count: int
    ratio: float = 0.5
    flag: bool = False
    text: Annotated[str, Max(8)] = ""
    blob: Annotated[bytes, Max(8)] = b""
    label: Annotated[Label, Max(4)] = Label("")
    pairs: Annotated[tuple[Pair, ...], Max(3)] = ()
    nested: Annotated[tuple[Annotated[tuple[int, ...], Max(2)], ...], Max(2)] = ()
    maybe: Pair | None = None
    note: Annotated[str | None, Max(3)] = None


class Other(Message, kind=61002, version=3, max_bytes=100):
    value: int


class Long(Message, kind=61003, max_bytes=8 * 2**20):
    rows: Annotated[tuple[Annotated[tuple[int, ...], Max(MAX_ARRAY)], ...], Max(MAX_ARRAY)]


FULL = Sample(
    count=MAX_INT,
    ratio=1e300,
    flag=True,
    text="äöü",
    blob=bytes(range(8)),
    label=Label("four"),
    pairs=(Pair(1, 0.25), Pair(0, -1.5)),
    nested=((1, 2), ()),
    maybe=Pair(9, 9.0),
    note="abc",
)


def test_a_message_round_trips() -> None:
    for message in (FULL, Sample(0), Other(7)):
        assert type(message).decode(message.encode()) == message


def test_a_message_is_frozen_and_hashable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FULL.count = 1  # type: ignore[misc]
    assert len({FULL, dataclasses.replace(FULL), Sample(0)}) == 2


def test_the_layout_on_the_wire() -> None:
    assert msgpack.unpackb(Other(7).encode()) == [61002, 3, 7]
    assert msgpack.unpackb(Sample(1).encode()) == [61001, 1, 1, 0.5, False, "", b"", "", [], [], None, None]  # fmt: skip  # noqa: E501
    assert msgpack.unpackb(FULL.encode())[8:] == [[[1, 0.25], [0, -1.5]], [[1, 2], []], [9, 9.0], "abc"]  # fmt: skip  # noqa: E501


def test_equal_messages_have_equal_bytes() -> None:
    assert Sample(1, ratio=1).encode() == Sample(1, ratio=1.0).encode()
    assert Sample(1, ratio=-0.0).encode() == Sample(1, ratio=0.0).encode()
    assert Sample(1, blob=memoryview(b"xy")).encode() == Sample(1, blob=b"xy").encode()  # type: ignore[arg-type]


def test_whole_numbers_become_floats_where_floats_are_due() -> None:
    values = msgpack.unpackb(Sample(1).encode())
    values[3] = 2
    decoded = Sample.decode(msgpack.packb(values))
    assert decoded.ratio == 2.0
    assert type(decoded.ratio) is float


def test_text_enums_travel_as_text() -> None:
    class Colour(enum.StrEnum):
        RED = "red"

    assert Sample.decode(Sample(1, text=Colour.RED).encode()).text == "red"


@pytest.mark.parametrize(
    "changes",
    [
        {"count": -1},
        {"count": MAX_INT + 1},
        {"count": True},
        {"count": 1.0},
        {"count": None},
        {"ratio": float("nan")},
        {"ratio": float("inf")},
        {"ratio": True},
        {"ratio": "1"},
        {"flag": 1},
        {"text": "123456789"},
        {"text": "äääää"},
        {"text": b"x"},
        {"blob": b"123456789"},
        {"blob": "x"},
        {"label": "fives"},
        {"pairs": (Pair(1, 1.0),) * 4},
        {"pairs": [Pair(1, 1.0)]},
        {"pairs": ((1, 1.0),)},
        {"pairs": (None,)},
        {"nested": ((1, 2, 3),)},
        {"nested": ((-1,),)},
        {"maybe": Other(1)},
        {"maybe": Pair(-1, 1.0)},
        {"note": "abcd"},
    ],
    ids=str,
)
def test_bounds_hold_on_both_sides(changes: dict[str, Any]) -> None:
    message = dataclasses.replace(FULL, **changes)
    with pytest.raises(LocalProtocolError, match="Sample"):
        message.encode()

    def plain(value: Any) -> Any:
        if isinstance(value, Struct):
            return [plain(v) for v in dataclasses.astuple(value)]  # type: ignore[call-overload]
        return [plain(v) for v in value] if isinstance(value, tuple | list) else value

    name, value = next(iter(changes.items()))
    if isinstance(value, list) or name == "maybe" or value == ((1, 1.0),):
        return  # the same on the wire as something that is allowed
    values = msgpack.unpackb(FULL.encode())
    at = 2 + [f.name for f in dataclasses.fields(Sample)].index(name)
    values[at] = plain(value)
    with pytest.raises(Malformed):
        Sample.decode(msgpack.packb(values))


def test_a_lone_surrogate_does_not_travel() -> None:
    with pytest.raises(LocalProtocolError):
        Sample(1, text="\ud800").encode()
    values = msgpack.unpackb(Sample(1).encode())
    packed = msgpack.packb([*values[:5], "\ud800", *values[6:]], unicode_errors="surrogatepass")
    with pytest.raises(Malformed):
        Sample.decode(packed)


def test_the_whole_message_is_bounded_on_both_sides() -> None:
    big = Long(((2**60,) * 4096,) * 300)
    with pytest.raises(LocalProtocolError, match="exceeds"):
        big.encode()
    with pytest.raises(Malformed, match="exceed"):
        Other.decode(b"\x00" * 101)
    with pytest.raises(Malformed, match="exceed"):
        decode_any(b"\x00" * 4097, Sample, Other)


def test_each_class_keeps_its_own_bound_among_several() -> None:
    padded = b"\x93" + msgpack.packb(61002) + b"\x03" + b"\xc6\x00\x00\x01\x00" + b"x" * 256
    with pytest.raises(Malformed, match="not a Sample or Other"):
        decode_any(padded, Sample, Other)


def test_the_items_of_all_arrays_together_are_bounded() -> None:
    row = (0,) * MAX_ARRAY
    rows = MAX_ITEMS // MAX_ARRAY
    with pytest.raises(Malformed, match="items"):
        Long.decode(Long((row,) * rows).encode())
    fitting = Long((row,) * (rows - 1))
    assert Long.decode(fitting.encode()) == fitting


def test_one_of_several_classes_by_its_kind() -> None:
    assert decode_any(Other(5).encode(), Sample, Other) == Other(5)
    assert decode_any(FULL.encode(), Sample, Other) == FULL
    with pytest.raises(Malformed, match="not a Long or Other"):
        decode_any(FULL.encode(), Long, Other)


def test_other_versions_are_refused_by_name() -> None:
    with pytest.raises(Malformed, match="version 4, this node speaks 3"):
        Other.decode(msgpack.packb([61002, 4, 7]))


def test_a_kind_can_be_taken_once() -> None:
    with pytest.raises(LocalProtocolError, match="61001 is taken by Sample"):
        type("Twin", (Message,), {"__annotations__": {}}, kind=61001)


@pytest.mark.parametrize(
    "hint",
    [
        str,
        bytes,
        tuple[int, ...],
        Annotated[tuple[int, ...], Max(MAX_ARRAY + 1)],
        Annotated[tuple[int, int], Max(2)],
        Annotated[tuple[str, ...], Max(2)],
        list[int],
        dict[str, int],
        int | str,
        object,
        Any,
    ],
    ids=str,
)
def test_a_field_without_a_bound_is_refused(hint: Any) -> None:
    cls: Any = type("Loose", (Struct,), {"__annotations__": {"field": hint}})
    with pytest.raises(LocalProtocolError, match=r"Loose\.field"):
        cls.codecs()
