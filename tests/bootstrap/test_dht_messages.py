"""The bounds of what peers of a DHT ask and answer."""

from __future__ import annotations

import hashlib
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from records_kit import ALICE, BOB, KEY, NOW, value

from bootstrap import records
from bootstrap.records import DhtInspector, check_dictionary, node_id
from protocols.errors import Malformed, RemoteProtocolError
from protocols.identity import PeerId
from protocols.p2p import bindings

bindings()

from hivemind.dht.routing import DHTID  # noqa: E402
from hivemind.dht.storage import DictionaryDHTValue  # noqa: E402
from hivemind.proto import dht_pb2  # noqa: E402
from hivemind.utils import MSGPackSerializer  # noqa: E402


def dictionary(entries: dict[Any, Any]) -> bytes:
    content = DictionaryDHTValue()
    for subkey, (data, expires) in entries.items():
        with content.freeze():
            content.store(subkey, data, expires)
    with content.freeze():
        packed: bytes = MSGPackSerializer.dumps(content)
    return packed


def test_dictionaries_as_hivemind_packs_them_pass() -> None:
    check_dictionary(dictionary({}))
    check_dictionary(dictionary({"a": (b"x" * 2048, NOW), "b": (b"", NOW)}))
    full = {str(n): (b"x", NOW) for n in range(records.MAX_SUBKEYS)}
    check_dictionary(dictionary(full))


def ext(content: Any) -> bytes:
    data = content if isinstance(content, bytes) else msgpack.packb(content)
    packed: bytes = msgpack.packb(msgpack.ExtType(0x50, data))
    return packed


INFINITY = float("inf")


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\x01",
        dictionary({"a": (b"x" * 4000, NOW)}),
        dictionary({str(n): (b"x", NOW) for n in range(records.MAX_SUBKEYS + 1)}),
        dictionary({"x" * 100: (b"x", NOW)}),
        dictionary({7: (b"x", NOW)}),
        dictionary({"a": ("text", NOW)}),
        msgpack.packb(msgpack.ExtType(0x40, b"\x90")),
        ext([INFINITY, 1.0]),
        ext([1, 1.0, []]),
        ext([INFINITY, "late", []]),
        ext([INFINITY, 1.0, [["a", b"x", "soon"]]]),
        ext([INFINITY, 1.0, {"a": b"x"}]),
        ext(b"\x93\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00\xc0\xdd\xff\xff\xff\xff"),
        ext(b"\x91" * 100_000),
    ],
)
def test_other_dictionaries_are_refused(bad: bytes) -> None:
    with pytest.raises(Malformed):
        check_dictionary(bad)


@given(st.binary(max_size=400))
def test_noise_is_no_dictionary(noise: bytes) -> None:
    for data in (noise, ext(noise)):
        with pytest.raises(RemoteProtocolError):
            check_dictionary(data)


def info(peer: PeerId) -> Any:
    return dht_pb2.NodeInfo(node_id=node_id(peer))


def upstream(peer: PeerId) -> bytes:
    raw: bytes = bindings().PeerID.from_base58(peer).to_bytes()
    return raw


def store_request(**changes: Any) -> Any:
    fields = {
        "keys": [KEY.to_bytes()],
        "subkeys": [MSGPackSerializer.dumps(ALICE.peer_id)],
        "values": [value(1)],
        "expiration_time": [NOW],
        "in_cache": [False],
        "peer": info(ALICE.peer_id),
    } | changes
    return dht_pb2.StoreRequest(**fields)


def test_a_node_id_follows_from_the_peer_id() -> None:
    assert node_id(ALICE.peer_id) == DHTID.generate(upstream(ALICE.peer_id)).to_bytes()
    inspect = DhtInspector()
    for message in (
        dht_pb2.PingRequest(peer=info(ALICE.peer_id)),
        dht_pb2.PingRequest(),
        dht_pb2.FindRequest(keys=[bytes([n] * 20) for n in range(64)], peer=info(ALICE.peer_id)),
        store_request(),
        store_request(subkeys=[b""], values=[dictionary({"a": (b"x", NOW)})]),
    ):
        inspect.request(ALICE.peer_id, "any", message)
        if message.peer.node_id:
            with pytest.raises(Malformed, match="node id"):
                inspect.request(BOB.peer_id, "any", message)


@pytest.mark.parametrize(
    "bad",
    [
        dht_pb2.FindRequest(keys=[bytes([n] * 20) for n in range(65)]),
        dht_pb2.FindRequest(keys=[KEY.to_bytes()] * 2),
        dht_pb2.FindRequest(keys=[b"short"]),
        store_request(keys=[]),
        store_request(in_cache=[]),
        store_request(in_cache=[True]),
        store_request(keys=[b"x" * 21]),
        store_request(values=[bytes(5000)]),
        store_request(subkeys=[MSGPackSerializer.dumps(None)]),
        store_request(subkeys=[b""], values=[b"\x01"]),
    ],
)
def test_requests_out_of_bounds_are_refused(bad: Any) -> None:
    with pytest.raises(Malformed):
        DhtInspector().request(ALICE.peer_id, "any", bad)


def test_what_a_call_costs_is_all_that_is_in_it() -> None:
    """Each record of each dictionary is a signature to verify, each key an answer to pack."""
    half = dictionary({str(n): (b"x", NOW) for n in range(records.MAX_RECORDS_PER_CALL // 2)})
    one = dictionary({"a": (b"x", NOW)})

    def cost(*values: bytes) -> int:
        count = len(values)
        request = store_request(
            keys=[bytes([n] * 20) for n in range(count)],
            subkeys=[b""] * count,
            values=values,
            expiration_time=[NOW] * count,
            in_cache=[False] * count,
        )
        return DhtInspector().request(ALICE.peer_id, "any", request)

    assert cost(half, half) == records.MAX_RECORDS_PER_CALL
    with pytest.raises(Malformed, match="records in one call"):
        cost(half, half, one)
    keys = [bytes([n] * 20) for n in range(7)]
    request = dht_pb2.FindRequest(keys=keys, peer=info(ALICE.peer_id))
    assert DhtInspector().request(ALICE.peer_id, "any", request) == 7


def found(**changes: Any) -> Any:
    fields = {
        "type": dht_pb2.FOUND_DICTIONARY,
        "value": dictionary({"a": (b"x", NOW)}),
        "nearest_node_ids": [node_id(BOB.peer_id)],
        "nearest_peer_ids": [upstream(BOB.peer_id)],
    } | changes
    return dht_pb2.FindResponse(results=[dht_pb2.FindResult(**fields)], peer=info(ALICE.peer_id))


def sha1(raw: bytes) -> bytes:
    return hashlib.sha1(raw, usedforsecurity=False).digest()


def test_replies_in_bounds_pass() -> None:
    inspect = DhtInspector()
    inspect.reply(ALICE.peer_id, "any", found())
    inspect.reply(ALICE.peer_id, "any", found(type=dht_pb2.NOT_FOUND, value=b""))
    inspect.reply(ALICE.peer_id, "any", dht_pb2.PingResponse(peer=info(ALICE.peer_id)))
    with pytest.raises(Malformed, match="node id"):
        inspect.reply(BOB.peer_id, "any", found())


@pytest.mark.parametrize(
    "bad",
    [
        found(nearest_node_ids=[node_id(ALICE.peer_id)]),
        found(nearest_peer_ids=[]),
        found(nearest_node_ids=[sha1(bytes(10_000))], nearest_peer_ids=[bytes(10_000)]),
        found(
            nearest_node_ids=[sha1(upstream(BOB.peer_id) + b"\0")],
            nearest_peer_ids=[upstream(BOB.peer_id) + b"\0"],
        ),
        found(
            nearest_node_ids=[node_id(BOB.peer_id)] * 65,
            nearest_peer_ids=[upstream(BOB.peer_id)] * 65,
        ),
        found(value=b"\x01"),
        found(type=dht_pb2.FOUND_REGULAR, value=b"\x01"),
        dht_pb2.FindResponse(results=[dht_pb2.FindResult()] * 65),
    ],
)
def test_replies_out_of_bounds_are_refused(bad: Any) -> None:
    with pytest.raises(Malformed):
        DhtInspector().reply(ALICE.peer_id, "any", bad)
