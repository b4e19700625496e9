"""What stands on a lane, byte by byte. Integers are big endian.

A lane is a TCP connection to a node's one port that carries long bodies::

    client: PREAMBLE, 8 bytes, told from TLS and HTTP by the first of them
    both:   a TLS 1.3 handshake; then each end sends, first of all, that it means a lane, and the
            key of its sealed frames (protocols.connections.tls). Without TLS each sends its claimed
            peer id instead, behind one byte with its length
    then, again and again:
    client: request   verb u8 | length of name u8 | of header u32 | of body u64 | name | header
    client: the body of a push; for a pull the length of body is the most that is wanted
    server: reply     ok u8 | length of code u8 | took u32 (microseconds of the handler)
                      | length u64 | code | detail, reply, or the body of a pull

Verb 3 is a push whose body comes packed (:mod:`protocols.lanes.packing`), and ok is 2 where that of
a pull does. Lengths are of bodies as they are.

A push may be refused before its body has been read to the end; the server then throws the rest
away, for a short time, and the client closes the lane. A good reply that comes so early counts as
none.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

from protocols.errors import Malformed
from protocols.transport import MAX_HEADER_BYTES

MARK = b"\xa7"  # begins no HTTP request (a letter) and no TLS record
PREAMBLE = {True: MARK + b"atoll2S", False: MARK + b"atoll1P"}  # by whether TLS follows
PUSH, PULL, PACKED_PUSH = 1, 2, 3
MAX_DETAIL_BYTES = 512
MAX_CODE_BYTES = 64

_REQUEST = struct.Struct(">BBIQ")
_REPLY = struct.Struct(">BBIQ")
_CODE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_ID_BYTES = 128


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks for: one of three verbs.

    ``length`` is of the body pushed, or the most to be pulled.

    The name and the bound of the header must have been checked before one is made.
    """

    verb: int
    name: str
    header: bytes
    length: int

    def encode(self) -> bytes:
        name = self.name.encode("ascii")
        return (
            _REQUEST.pack(self.verb, len(name), len(self.header), self.length) + name + self.header
        )

    @classmethod
    def decode(cls, data: bytes | bytearray) -> Request:
        """Raises :class:`Malformed`; the lengths have been checked by :func:`request_frame`."""
        verb, name_length, _, length = _REQUEST.unpack_from(data)
        at = _REQUEST.size
        try:
            name = bytes(data[at : at + name_length]).decode("ascii")
        except UnicodeDecodeError as error:
            raise Malformed("a name that is not ASCII") from error
        return cls(verb, name, bytes(data[at + name_length :]), length)


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server answers: ``code`` is empty if all went well."""

    code: str
    took: float  # seconds
    length: int  # of what follows
    detail: bytes = b""  # what follows, except the body of a pull
    packed: bool = False  # the body of a pull comes packed

    def encode(self) -> bytes:
        code = self.code.encode("ascii")
        took = min(int(self.took * 1e6), 2**32 - 1)
        ok = 0 if code else 1 + self.packed
        return _REPLY.pack(ok, len(code), took, self.length) + code + self.detail

    @classmethod
    def refusal(cls, code: str, detail: str) -> Reply:
        word = code if _CODE.fullmatch(code) else "refused"
        text = detail.encode(errors="replace")[:MAX_DETAIL_BYTES]
        return cls(word, 0.0, len(text), text)

    @classmethod
    def decode(cls, data: bytes | bytearray) -> Reply:
        """Raises :class:`Malformed`."""
        ok, code_length, took, length = _REPLY.unpack_from(data)
        at = _REPLY.size
        code = bytes(data[at : at + code_length]).decode("ascii", errors="replace")
        if bool(ok) == bool(code) or (code and not _CODE.fullmatch(code)):
            raise Malformed("a reply that is neither good nor bad")
        return cls(code, took / 1e6, length, bytes(data[at + code_length :]), ok > 1)


class Frame:
    """A drain for a message: ``first`` bytes, then as many more as ``rest`` returns for them.

    ``rest`` raises :class:`Malformed` for what exceeds a bound, so nothing is allocated for it.
    """

    def __init__(self, first: int, rest: Callable[[bytearray], int]) -> None:
        self.data = bytearray(first)
        self.length = first
        self._rest: Callable[[bytearray], int] | None = rest
        self._at = 0

    def attach(self, wake: Callable[[], None]) -> None:
        """There is always room."""

    def room(self) -> memoryview:
        return memoryview(self.data)[self._at :]

    def took(self, count: int) -> None:
        self._at += count
        if self._at == len(self.data) and self._rest is not None:
            more, self._rest = self._rest(self.data), None
            self.data = self.data + bytes(more)  # a new one: views of the old are still out
            self.length += more


def request_frame() -> Frame:
    """For a :class:`Request`."""
    return Frame(_REQUEST.size, _request_rest)


def _request_rest(first: bytearray) -> int:
    verb, name, header, length = _REQUEST.unpack(first)
    if verb not in (PUSH, PULL, PACKED_PUSH) or not 0 < name <= 128 or header > MAX_HEADER_BYTES:
        raise Malformed("not a request")
    if length >= 1 << 63:
        raise Malformed(f"a body of {length} bytes")
    return int(name + header)


def reply_frame(max_bytes: int | None) -> Frame:
    """For a :class:`Reply`, with at most ``max_bytes`` behind it; None: what follows is a body."""

    def rest(first: bytearray) -> int:
        ok, code, _, length = _REPLY.unpack(first)
        if ok > (2 if max_bytes is None else 1) or code > MAX_CODE_BYTES or bool(code) == bool(ok):
            raise Malformed("not a reply")
        if ok and max_bytes is None:
            return 0
        # too long a reply is not read; the caller sees from its length that it is too long
        bound = (max_bytes or 0) if ok else MAX_DETAIL_BYTES
        return int(code + (length if length <= bound else 0))

    return Frame(_REPLY.size, rest)


def preamble_frame() -> Frame:
    """For what a client sends first."""
    return Frame(len(PREAMBLE[True]), lambda first: 0)


def claim(peer: str) -> bytes:
    """An identity claimed where there is no TLS."""
    raw = peer.encode("ascii")
    return bytes([len(raw)]) + raw


def claim_frame() -> Frame:
    """For a claimed identity; its text is all but the first byte."""

    def rest(first: bytearray) -> int:
        if not 0 < first[0] <= _MAX_ID_BYTES:
            raise Malformed("no identity")
        return first[0]

    return Frame(1, rest)
