"""What may stand in the DHT: the validator, the storage and the message bounds."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from identity_kit import identity

from bootstrap import records
from bootstrap.records import DhtInspector, SignedRecords, Storage, check_dictionary, node_id
from protocols.envelope import CLOCK_SKEW, seal
from protocols.errors import Malformed, RemoteProtocolError
from protocols.identity import Identity, PeerId
from protocols.messages import Envelope, PeerRecord
from protocols.p2p import bindings

bindings()

from hivemind.dht.routing import DHTID  # noqa: E402
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue  # noqa: E402
from hivemind.dht.validation import DHTRecord  # noqa: E402
from hivemind.proto import dht_pb2  # noqa: E402
from hivemind.utils import MSGPackSerializer  # noqa: E402

RUN = b"\x07" * 32
NOW = 1_800_000_000.0
KEY = DHTID.generate(f"run/{RUN.hex()}/islands")


ALICE, BOB = identity(1), identity(2)


def sealed(
    who: Identity = ALICE, about: PeerId | None = None, sequence: int = 1, **changes: Any
) -> bytes:
    record = PeerRecord(about or who.peer_id, ("192.0.2.1:4390",), "")
    options = {"purpose": "record", "run": RUN, "expires": NOW + 600.0} | changes
    return seal(who, record, sequence=sequence, **options)


def for_one(peer: PeerId) -> bytes:
    return replace(Envelope.decode(sealed()), recipient=peer).encode()


def record(data: bytes, **changes: Any) -> DHTRecord:
    fields = {
        "key": KEY.to_bytes(),
        "subkey": MSGPackSerializer.dumps(ALICE.peer_id),
        "value": MSGPackSerializer.dumps(data),
        "expiration_time": NOW + 600.0,
    } | changes
    return DHTRecord(**fields)


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


def test_a_signed_record_under_its_own_name_passes() -> None:
    validator = SignedRecords(Clock())
    valid = record(sealed())
    assert validator.validate(valid)
    assert validator.validate(valid)
    assert validator.sign_value(valid) == validator.strip_value(valid) == valid.value


REFUSED = {
    "under another's name": record(sealed(BOB)),
    "about another": record(sealed(ALICE, about=BOB.peer_id)),
    "with another expiry": record(sealed(), expiration_time=NOW + 601.0),
    "of another run": record(sealed(run=b"\x08" * 32)),
    "under another key": record(sealed(), key=DHTID.generate("else").to_bytes()),
    "of no purpose of the directory": record(sealed(purpose="diary")),
    "for one recipient": record(for_one(BOB.peer_id)),
    "long expired": record(sealed(expires=NOW - 60.0), expiration_time=NOW - 60.0),
    "for a whole day": record(sealed(expires=NOW + 86_000.0), expiration_time=NOW + 86_000.0),
    "without sub-key": record(sealed(), subkey=MSGPackSerializer.dumps(None)),
    "a whole dictionary": record(sealed(), subkey=b""),
    "with a number as sub-key": record(sealed(), subkey=MSGPackSerializer.dumps(7)),
    "not an envelope": record(b"\x93\x01\x01\x01"),
    "a bare number": record(b"", value=b"\x07"),
    "too large": record(bytes(records.MAX_VALUE_BYTES + 100)),
    "with a long sub-key": record(sealed(), subkey=MSGPackSerializer.dumps("x" * 200)),
    "forged": record(sealed()[:-1] + bytes([sealed()[-1] ^ 1])),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused(reason: str) -> None:
    validator = SignedRecords(Clock())
    assert not validator.validate(REFUSED[reason])


def test_a_record_once_verified_still_expires() -> None:
    clock = Clock()
    validator = SignedRecords(clock)
    assert validator.validate(record(sealed()))
    clock.now = NOW + 600.0 + CLOCK_SKEW - 1
    assert validator.validate(record(sealed()))
    clock.now = NOW + 600.0 + CLOCK_SKEW + 1
    assert not validator.validate(record(sealed()))


def test_a_signature_is_verified_once_and_the_memory_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(records, "MAX_VERIFIED", 3)
    validator = SignedRecords(Clock())
    opened = []
    original = records.open_entry
    monkeypatch.setattr(
        records, "open_entry", lambda data, now: opened.append(data) or original(data, now)
    )
    for _ in range(5):
        assert validator.validate(record(sealed()))
    assert len(opened) == 1
    for sequence in range(2, 9):
        assert validator.validate(record(sealed(sequence=sequence)))
    assert len(validator._verified) == 3


@given(st.binary(max_size=300), st.binary(max_size=100))
def test_noise_is_refused_without_a_crash(value: bytes, subkey: bytes) -> None:
    assert not SignedRecords(Clock()).validate(record(b"", value=value, subkey=subkey))


# --- storage ----------------------------------------------------------------------------------


def value(sequence: int, who: Identity = ALICE) -> bytes:
    packed: bytes = MSGPackSerializer.dumps(sealed(who, sequence=sequence))
    return packed


def test_a_refused_older_store_does_not_shorten_the_newer_records_life() -> None:
    now = time.time()
    defect, ours = DHTLocalStorage(), Storage()
    for storage in (defect, ours):
        assert storage.store(KEY, b"new", now + 100)
        assert not storage.store(KEY, b"old", now + 50)
    # hivemind 1.1.12 would now drop the new one after 50 s; this line fails when it is mended
    assert defect.key_to_heap[KEY].expiration_time == now + 50
    assert ours.key_to_heap[KEY].expiration_time == now + 100

    ours.store_subkey(DHTID.generate("k"), "a", value(5), now + 100)
    assert not ours.store_subkey(DHTID.generate("k"), "a", value(4), now + 50)
    entries = ours.get(DHTID.generate("k")).value
    assert entries.key_to_heap["a"].expiration_time == now + 100


def test_the_newest_sequence_wins_whatever_it_says_of_its_expiry() -> None:
    now = time.time()
    storage = Storage()
    assert storage.store_subkey(KEY, ALICE.peer_id, value(5), now + 100)
    assert not storage.store_subkey(KEY, ALICE.peer_id, value(4), now + 500)
    assert storage.store_subkey(KEY, ALICE.peer_id, value(5), now + 500)  # it is there
    assert storage.store_subkey(KEY, ALICE.peer_id, value(6), now + 50)
    entry = storage.get(KEY).value.get(ALICE.peer_id)
    assert records.sequence_of(entry.value) == 6
    assert entry.expiration_time == now + 50


def test_of_two_records_with_one_sequence_the_first_stays() -> None:
    """Else whoever has both can put either in the other's place, again and again."""
    now = time.time()
    storage = Storage()
    other = MSGPackSerializer.dumps(sealed(sequence=5, expires=NOW + 601.0))
    assert storage.store_subkey(KEY, ALICE.peer_id, value(5), now + 100)
    assert not storage.store_subkey(KEY, ALICE.peer_id, other, now + 101)
    assert storage.get(KEY).value.get(ALICE.peer_id).value == value(5)


def test_refreshing_does_not_grow_the_heap() -> None:
    now = time.time()
    defect, ours = DHTLocalStorage(), Storage()
    for refresh in range(500):
        for storage in (defect, ours):
            assert storage.store_subkey(KEY, "a", value(refresh), now + 100 + refresh)
    assert len(defect.expiration_heap) > 400  # hivemind 1.1.12; fails when it is mended
    assert len(ours.expiration_heap) <= 20
    assert len(ours.get(KEY).value.expiration_heap) <= 20
    assert len(ours) == 1


def test_what_a_search_is_given_is_not_what_is_stored() -> None:
    """hivemind merges into it what all peers answer, in any number and of any age."""
    now = time.time()
    storage = Storage()
    assert storage.store_subkey(KEY, ALICE.peer_id, value(5), now + 100)
    given = storage.get(KEY).value
    for number in range(records.MAX_SUBKEYS):
        given.store(f"peer{number}", value(1), now + 100)
    given.store(ALICE.peer_id, value(4), now + 50)
    held = storage.get(KEY).value
    assert list(held.data) == [ALICE.peer_id]
    assert held.key_to_heap[ALICE.peer_id].expiration_time == now + 100

    assert storage.store_subkey(KEY, BOB.peer_id, value(1, BOB), now + 200)
    assert set(storage.get(KEY).value.data) == {ALICE.peer_id, BOB.peer_id}
    assert storage.get(KEY).expiration_time == now + 200


def test_keys_and_sub_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_KEYS", 3)
    monkeypatch.setattr(records, "MAX_SUBKEYS", 4)
    now = time.time()
    storage = Storage()
    stored = [storage.store(KEY, value(1), now + 60, subkey=f"peer{n}") for n in range(6)]
    assert stored == [True] * 4 + [False] * 2
    assert storage.store_subkey(KEY, "peer0", value(2), now + 61)
    keys = [DHTID.generate(n) for n in range(4)]
    assert [storage.store_subkey(k, "a", value(1), now + 60) for k in keys] == [True] * 2 + [
        False
    ] * 2
    assert not storage.store(DHTID.generate("plain"), b"x", now + 60)


def test_expired_entries_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_KEYS", 1)
    now = [1000.0]
    monkeypatch.setattr("hivemind.utils.timed_storage.get_dht_time", lambda: now[0])
    storage = Storage()
    assert storage.store_subkey(KEY, "a", value(1), 1010.0)
    assert not storage.store_subkey(DHTID.generate("b"), "a", value(1), 1100.0)
    now[0] = 1020.0
    assert storage.store_subkey(DHTID.generate("b"), "a", value(1), 1100.0)


# --- messages ---------------------------------------------------------------------------------


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
