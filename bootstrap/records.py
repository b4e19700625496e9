"""What may stand in the DHT: envelopes, each under the id of the peer that signed it.

hivemind's storage takes what its record validator passes, and asks it again for every record a
look-up brings. Ours passes a record only if its sub-key is a peer id, its value an envelope signed
by that peer, its key the one that follows from the envelope's run and purpose, and its expiry the
envelope's own, no further off than :data:`MAX_LIFETIME`. So nobody can write another's entry,
lengthen its life, or put it where it does not belong. A node of a run keeps that run's alone.

:class:`Storage` bounds keys and sub-keys, lets the newest *sequence* win, and covers three defects
of hivemind 1.1.12: a refused older store made the newer record expire early, every refresh
left a dead entry in the expiration heap, and searches wrote into what is stored.
:class:`DhtInspector` bounds every DHT message before hivemind sees it, and binds a node's place in
the key space to its peer id.

This module imports hivemind; import it where the DHT starts, not from the command line's modules.
"""

from __future__ import annotations

import copy
import hashlib
import heapq
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import base58
import blake3
import msgpack

from protocols import envelope
from protocols.errors import Malformed, RemoteProtocolError, Stale
from protocols.identity import PeerId, is_raw_id
from protocols.messages import Envelope, PeerRecord
from protocols.p2p import bindings
from protocols.whereabouts import PURPOSE as RECORD

bindings()  # before the imports below: it puts hivemind's import-time warnings away

from hivemind.dht.routing import DHTID  # noqa: E402
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue  # noqa: E402
from hivemind.dht.validation import DHTRecord, RecordValidatorBase  # noqa: E402
from hivemind.utils.timed_storage import ValueWithExpiration  # noqa: E402

MAX_VALUE_BYTES = 2048  # of one envelope; a record is about 300
MAX_SUBKEYS = 400  # islands under one key; as many values of that size fit one reply
MAX_SUBKEY_BYTES = 80
MAX_KEYS = 1024  # that one node stores for others
MAX_KEYS_PER_CALL = 64
MAX_RECORDS_PER_CALL = MAX_SUBKEYS  # a whole key: each is a signature to verify
MAX_NEIGHBOURS = 64  # that one reply names per key
MAX_LIFETIME = 2 * 3600.0  # seconds
MAX_VERIFIED = 4096  # signatures remembered as good

DICTIONARY_CODE = 0x50  # hivemind's msgpack extension for a dictionary of sub-keys
ID_BYTES = 20

# what the directory holds: envelope purpose -> (name in the key, message)
TOPICS: dict[str, tuple[str, type[PeerRecord]]] = {RECORD: ("islands", PeerRecord)}


def topic_key(run: bytes, purpose: str) -> str:
    """The DHT key under which envelopes of one purpose stand, e.g. ``run/<hex>/islands``.

    Raises :class:`Malformed` for a purpose that has no place in the directory.
    """
    if purpose not in TOPICS:
        raise Malformed("no purpose of the directory")
    return f"run/{run.hex()}/{TOPICS[purpose][0]}"


def open_entry(data: bytes, now: float) -> Envelope:
    """Verify an entry of the directory: signature, lifetime, and that it speaks of its signer.

    One bad entry makes hivemind drop the whole dictionary it came in, so the leeway that
    envelopes have for clocks that differ is needed here too.

    Raises :class:`~protocols.errors.RemoteProtocolError`.
    """
    opened = envelope.open(data, now=now, max_lifetime=MAX_LIFETIME)
    if opened.purpose not in TOPICS:
        raise Malformed("not an entry of the directory")
    if TOPICS[opened.purpose][1].decode(opened.body).peer != opened.signer:
        raise Malformed("an entry that speaks of somebody else")
    return opened


def node_id(peer: PeerId) -> bytes:
    """A peer's place in the DHT's key space: SHA-1 of its id's bytes, so nobody can choose it."""
    return hashlib.sha1(base58.b58decode(peer), usedforsecurity=False).digest()


def unpack_value(value: bytes) -> bytes:
    """The envelope inside a value as hivemind stores it; raises :class:`Malformed`."""
    if len(value) > MAX_VALUE_BYTES + 8:
        raise Malformed("an oversized DHT value")
    data: bytes = _expect(value, bytes)
    return data


def unpack_subkey(subkey: bytes) -> PeerId:
    """The peer id inside a sub-key; raises :class:`Malformed`."""
    if len(subkey) > MAX_SUBKEY_BYTES:
        raise Malformed("an oversized DHT sub-key")
    return PeerId(_expect(subkey, str))


class SignedRecords(RecordValidatorBase):  # type: ignore[misc]  # hivemind is untyped
    """The rules above as hivemind's validator. ``clock`` is wall time; ``run`` empty: of any."""

    def __init__(self, clock: Callable[[], float] = time.time, run: bytes = b"") -> None:
        self._clock, self._run = clock, run
        self._verified: OrderedDict[bytes, tuple[bytes, PeerId, float]] = OrderedDict()

    def validate(self, record: Any) -> bool:
        """Whether a :class:`hivemind.dht.validation.DHTRecord` may stand where it stands."""
        try:
            self.check(record)
        except RemoteProtocolError:
            return False
        return True

    def check(self, record: DHTRecord) -> None:
        """As :meth:`validate`, raising the reason."""
        signer = unpack_subkey(record.subkey)
        data = unpack_value(record.value)
        key, owner, expires = self._open(data)
        if owner != signer:
            raise Malformed("the sub-key is not the signer")
        if record.key != key:
            raise Malformed("the envelope does not belong under this key")
        now = self._clock()
        if record.expiration_time != expires:
            raise Stale("the record's expiry is not the envelope's")
        if expires + envelope.CLOCK_SKEW <= now:  # a verified one may have expired since
            raise Stale("expired")

    def _open(self, data: bytes) -> tuple[bytes, PeerId, float]:
        """(key, signer, expiry) of an envelope; a signature is verified once."""
        digest = blake3.blake3(data).digest()
        known = self._verified.get(digest)
        if known is None:
            if self._run and Envelope.decode(data).run != self._run:
                raise Malformed("an entry of another run")
            opened = open_entry(data, self._clock())
            key: bytes = DHTID.generate(topic_key(opened.run, opened.purpose)).to_bytes()
            known = (key, opened.signer, opened.expires)
            self._verified[digest] = known
            if len(self._verified) > MAX_VERIFIED:
                self._verified.popitem(last=False)
        return known


class NoCache(DHTLocalStorage):  # type: ignore[misc]  # hivemind is untyped
    """In the place of hivemind's cache: what it kept would hide records of a higher sequence."""

    def store(self, key: Any, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        """Nothing is kept."""
        return False

    def store_subkey(self, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """Nothing is kept."""
        return False


class Storage(DHTLocalStorage):  # type: ignore[misc]  # hivemind is untyped
    """hivemind's storage with bounds, the newest sequence winning, and its defects covered."""

    def get(self, key: Any) -> Any:
        """What is held, a dictionary as a copy: searches merge what all peers answer into it."""
        held = super().get(key)
        if held is None or not isinstance(held.value, DictionaryDHTValue):
            return held
        entries = copy.copy(held.value)
        entries.data = dict(entries.data)
        entries.expiration_heap = list(entries.expiration_heap)
        entries.key_to_heap = dict(entries.key_to_heap)
        return ValueWithExpiration(entries, held.expiration_time)

    def store(self, key: Any, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        """Store one value; False where it is older than what is held, or there is no room."""
        if subkey is not None:
            return self.store_subkey(key, subkey, value, expiration_time)
        held = super().get(key)
        if held is not None and held.expiration_time >= expiration_time:
            return False  # hivemind would give the held value the refused one's earlier expiry
        if held is None and len(self) >= MAX_KEYS:
            return False
        stored: bool = super().store(key, value, expiration_time)
        _compact(self)
        return stored

    def store_subkey(self, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """Store one entry of a key; False where a newer is held, or there is no room."""
        held = super().get(key)
        if held is None and len(self) >= MAX_KEYS:
            return False
        entries = held.value if held and isinstance(held.value, DictionaryDHTValue) else None
        if entries is None:
            stored: bool = super().store_subkey(key, subkey, value, expiration_time)
            _compact(self)
            return stored
        entry = entries.get(subkey)
        if entry is None and len(entries) >= MAX_SUBKEYS:
            return False
        if entry is not None:
            if sequence_of(entry.value) >= sequence_of(value):
                return bool(entry.value == value)  # the same value again counts as stored
            if entry.expiration_time >= expiration_time:
                del entries[subkey]  # newer by sequence though it expires earlier
        if expiration_time > entries.latest_expiration_time:
            super().store(key, entries, expiration_time)
        stored = entries.store(subkey, value, expiration_time)
        _compact(entries)
        _compact(self)
        return stored


def sequence_of(value: bytes) -> int:
    """The sequence number of a validated value."""
    opened: Envelope = Envelope.decode(unpack_value(value))
    return opened.sequence


def _compact(storage: Any) -> None:
    """Drop what refreshes left in the expiration heap, once it outweighs what is stored."""
    if len(storage.expiration_heap) > 2 * len(storage.data) + 16:
        storage.expiration_heap = list(storage.key_to_heap.values())
        heapq.heapify(storage.expiration_heap)


class DhtInspector:
    """Bounds on DHT messages (:class:`protocols.p2p.Inspector`): hivemind itself has none."""

    def request(self, peer: PeerId, handler: str, message: Any) -> int:
        """Refuse oversized or misaligned requests, and a node id that is not the caller's.

        A request counts as many calls as it has keys to look up, or records to verify.
        """
        _own_node_id(peer, message)
        kind = message.DESCRIPTOR.name
        if kind == "FindRequest":
            _check_ids(message.keys, MAX_KEYS_PER_CALL)
            if len(set(message.keys)) < len(message.keys):
                raise Malformed("a key twice in one look-up")  # each answer is packed anew
            return max(1, len(message.keys))
        if kind != "StoreRequest":
            return 1
        columns = (message.subkeys, message.values, message.expiration_time, message.in_cache)
        _check_ids(message.keys, MAX_RECORDS_PER_CALL)
        if any(len(column) != len(message.keys) for column in columns):
            raise Malformed("the columns of a store differ in length")
        if any(message.in_cache):
            raise Malformed("a record for a cache, and nobody keeps one")
        records = 0
        for tag, value in zip(message.subkeys, message.values, strict=True):
            if tag == b"":  # hivemind's tag for a whole dictionary
                records += check_dictionary(value)
            else:
                unpack_subkey(tag)
                unpack_value(value)
                records += 1
            if records > MAX_RECORDS_PER_CALL:
                raise Malformed(f"more than {MAX_RECORDS_PER_CALL} records in one call")
        return max(1, records)

    def reply(self, peer: PeerId, handler: str, message: Any) -> None:
        """Refuse oversized replies, and neighbours whose node ids are not their own."""
        _own_node_id(peer, message)
        if message.DESCRIPTOR.name != "FindResponse":
            return
        if len(message.results) > MAX_KEYS_PER_CALL:
            raise Malformed("too many results")
        for result in message.results:
            _check_ids(result.nearest_node_ids, MAX_NEIGHBOURS)
            if len(result.nearest_peer_ids) != len(result.nearest_node_ids):
                raise Malformed("neighbours without ids")
            for place, raw in zip(result.nearest_node_ids, result.nearest_peer_ids, strict=True):
                if not is_raw_id(raw):  # to print one of a megabyte takes minutes
                    raise Malformed("a neighbour whose id is none")
                if hashlib.sha1(raw, usedforsecurity=False).digest() != place:
                    raise Malformed("a neighbour's node id is not its own")
            if result.type == _FOUND_DICTIONARY:
                check_dictionary(result.value)
            elif result.value:
                raise Malformed("a value without a signer")


def check_dictionary(value: bytes) -> int:
    """Walk a dictionary as hivemind packs it, bounded at each step; returns the number of entries.

    Raises :class:`Malformed`.

    hivemind's own decoder has no bounds: a few bytes can claim millions of entries.
    """
    extension = _expect(value, msgpack.ExtType)
    if extension.code != DICTIONARY_CODE:
        raise Malformed("not a dictionary of records")
    content = _expect(extension.data, list, items=MAX_SUBKEYS)
    match content:
        case [float(), float(), [*entries]]:  # hivemind's size limit and latest expiry
            pass
        case _:
            raise Malformed("not a dictionary of records")
    for entry in entries:
        match entry:
            case [str(subkey), bytes(data), float()]:
                if len(subkey) > MAX_SUBKEY_BYTES or len(data) > MAX_VALUE_BYTES + 8:
                    raise Malformed("an oversized entry in a dictionary of records")
            case _:
                raise Malformed("not an entry of a dictionary of records")
    return len(entries)


_FOUND_DICTIONARY = 2  # dht_pb2.FOUND_DICTIONARY


def _own_node_id(peer: PeerId, message: Any) -> None:
    claimed = message.peer.node_id
    if claimed and claimed != node_id(peer):
        raise Malformed("the node id does not follow from the peer id")


def _check_ids(ids: Any, most: int) -> None:
    if len(ids) > most or any(len(item) != ID_BYTES for item in ids):
        raise Malformed("too many DHT ids, or not ids")


def _expect(data: bytes, kind: Any, items: int = 0) -> Any:
    """Decode one msgpack value of one type; arrays of at most ``items``, no maps."""
    try:
        value = msgpack.unpackb(
            data, raw=False, max_array_len=items, max_map_len=0, max_ext_len=len(data)
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise Malformed("not a DHT value") from error
    if not isinstance(value, kind):
        raise Malformed("not a DHT value")
    return value
