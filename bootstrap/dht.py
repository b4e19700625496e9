"""The directory of a run: hivemind's DHT, unmodified, with our records, bounds and identities.

One node keeps one :class:`Dht`. It stores its own signed address record under the run's key, with
its peer id as the sub-key, signs and stores it again at half its lifetime, and reads the records of
the others. What may be stored is decided in :mod:`bootstrap.records`; how calls travel is
:mod:`protocols.p2p`.

Records expire by wall clock, on machines whose clocks differ. hivemind wants them to agree within
:data:`CLOCK_LIMIT`; :mod:`bootstrap.handshake` measures the offset and tells the operator.

>>> dht = await Dht.start(transport, whereabouts, [seed], run_id)
>>> spawn(dht.maintain())
>>> dht.keep_announced()
>>> peers = await dht.islands()
>>> await dht.aclose()
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from typing import Any

from protocols.errors import Malformed, RemoteProtocolError
from protocols.identity import PeerId
from protocols.messages import Envelope, PeerRecord
from protocols.p2p import P2P, bindings
from protocols.rate_limit import RateLimit
from protocols.transport import Transport
from protocols.whereabouts import PURPOSE as RECORD
from protocols.whereabouts import Whereabouts

logger = logging.getLogger(__name__)

CLOCK_LIMIT = 3.0  # seconds; hivemind's MAX_DHT_TIME_DISCREPANCY_SECONDS
REFRESH = 60.0  # seconds between look-ups of a random key, which keep the routing table alive
RETRY = 5.0  # seconds until a failed announcement is tried again
BUCKET = 20  # peers per bucket of the routing table (Kademlia's k)
REPLICAS = 5
MOST_MET = 64  # peers by whom a node joins, that it has joined by before, or that are there
RPC_TIMEOUT = 3.0  # seconds


def _import_hivemind() -> None:
    bindings()  # first: it puts hivemind's import-time warnings away
    import_module("hivemind.dht")
    import_module("bootstrap.records")


def _keep_time(clock: Callable[[], float]) -> None:
    """Have hivemind tell the time by ``clock``, in the whole process: it asks the machine itself.

    Once somebody has set that, it would find all records expired.
    """
    for name in ("utils.timed_storage", "dht.protocol", "dht.routing", "dht.node"):
        module: Any = import_module(f"hivemind.{name}")
        module.get_dht_time = clock


class Dht:
    """One node's view of the directory; made by :meth:`start`, ended by :meth:`aclose`."""

    def __init__(
        self, node: Any, p2p: P2P, whereabouts: Whereabouts, run: bytes, clock: Callable[[], float]
    ) -> None:
        self._node = node
        self._p2p = p2p
        self._whereabouts = whereabouts
        self._run = run
        self._clock = clock
        self._seeds: list[PeerId] = []
        # who is there by other accounts: a node joins by them where nobody is left in the table
        self.others: Callable[[], Iterable[PeerId]] = tuple
        self._announcing = False
        self._changed = asyncio.Event()

    @classmethod
    async def start(
        cls,
        transport: Transport,
        whereabouts: Whereabouts,
        initial_peers: Iterable[PeerId],
        run_id: bytes,
        *,
        client_mode: bool = False,
        limit: RateLimit | None = None,
        clock: Callable[[], float] = time.time,
    ) -> Dht:
        """Join the DHT through ``initial_peers``; with none of them answering, stand alone.

        ``run_id`` is the run's digest, empty for a node that serves any run. ``client_mode``
        keeps this node out of others' routing tables: for nodes that nobody can dial.
        """
        # in a thread: on a busy machine it takes seconds, in which this node would be silent
        await asyncio.to_thread(_import_hivemind)
        _keep_time(clock)
        from hivemind.dht import DHTNode
        from hivemind.dht.routing import DHTID

        from bootstrap import records

        whereabouts.enter(run_id)
        p2p = P2P(transport, whereabouts, inspector=records.DhtInspector(), limit=limit)
        # bootstrapping is ours (`join`), since hivemind's raises where a seed cannot dial back;
        # and there are no caches: they know nothing of sequence numbers
        node = await DHTNode.create(
            p2p=p2p,
            node_id=DHTID.from_bytes(records.node_id(transport.peer_id)),
            bucket_size=BUCKET,
            num_replicas=REPLICAS,
            num_workers=BUCKET,  # as many as are asked anyway: silent ones cost their time together
            wait_timeout=RPC_TIMEOUT,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            client_mode=client_mode,
            record_validator=records.SignedRecords(clock, run_id),
        )
        node.protocol.storage, node.protocol.cache = records.Storage(), records.NoCache()
        dht = cls(node, p2p, whereabouts, run_id, clock)
        await dht.join(initial_peers)
        return dht

    async def join(self, peers: Iterable[PeerId]) -> int:
        """Meet ``peers`` and those nearest to us; returns how many of ``peers`` answered."""
        peers = list(peers)
        self._seeds = list(dict.fromkeys([*self._seeds, *peers]))[:MOST_MET]
        return await self._meet_some(peers)

    async def _meet_some(self, peers: Iterable[PeerId]) -> int:
        met = await asyncio.gather(*[self._meet(peer) for peer in dict.fromkeys(peers)])
        if any(met):
            await self._node.find_nearest_nodes([self._node.node_id])
        return sum(met)

    async def _meet(self, peer: PeerId) -> bool:
        upstream = bindings().PeerID.from_base58(peer)
        return await self._node.protocol.call_ping(upstream) is not None

    # --- records --------------------------------------------------------------------------------

    async def announce(self, data: bytes) -> bool:
        """Store an envelope of ours until it expires; False where no replica took it."""
        from bootstrap import records

        opened: Envelope = Envelope.decode(data)
        return bool(
            await self._node.store(
                records.topic_key(opened.run, opened.purpose),
                data,
                opened.expires,
                subkey=opened.signer,
            )
        )

    def keep_announced(self) -> None:
        """Announce our address record, and again, freshly signed, at half its lifetime.

        :meth:`maintain` does it. Call again after ``whereabouts.publish`` to announce a change at
        once.
        """
        self._announcing = True
        self._changed.set()

    async def get(self, purpose: str) -> dict[PeerId, bytes]:
        """All verified, unexpired envelopes of one purpose of our run, by signer."""
        from bootstrap import records

        run = self._run
        key = records.topic_key(run, purpose)
        entries: dict[PeerId, bytes] = {}
        try:
            found = await self._node.get(key, latest=True)
        except Exception:  # whatever hivemind makes of what others answer: as if nothing was found
            logger.exception("a look-up in the DHT failed")
            return entries
        if found is None or not isinstance(found.value, dict):
            return entries
        for subkey, item in found.value.items():
            try:
                opened = records.open_entry(item.value, self._clock())
                if opened.purpose != purpose or opened.signer != subkey or opened.run != run:
                    raise Malformed("an entry under somebody else's name")
            except RemoteProtocolError as error:
                logger.debug("dropped an entry of %s: %s", subkey, error)
                continue
            entries[opened.signer] = item.value
        return entries

    async def islands(self) -> dict[PeerId, PeerRecord]:
        """The address records of the run's islands; they are learned on the way."""
        found: dict[PeerId, PeerRecord] = {}
        for peer, data in (await self.get(RECORD)).items():
            try:
                found[peer] = self._whereabouts.learn(data, expected=peer).record
            except RemoteProtocolError as error:
                logger.debug("dropped the record of %s: %s", peer, error)
        return found

    def neighbours(self) -> list[PeerId]:
        """The peers in the routing table."""
        table = self._node.protocol.routing_table
        return [PeerId(peer.to_base58()) for peer in table.peer_id_to_uid]

    # --- upkeep ---------------------------------------------------------------------------------

    async def maintain(self, refresh: float = REFRESH) -> None:
        """Keep the routing table alive, every ``refresh`` seconds, and our record announced.

        Until cancelled, which has to come before :meth:`aclose`.
        """
        now = self._clock()
        next_announce = next_refresh = now + refresh
        while True:
            before, now = now, self._clock()
            if now < before:  # it was put back: by hours, maybe
                next_announce = next_refresh = now
            try:
                if self._announcing and (self._changed.is_set() or now >= next_announce):
                    self._changed.clear()
                    next_announce = now + await self._announce_own()
                if now >= next_refresh:
                    next_refresh = now + refresh
                    await self._refresh()
            except Exception:  # whatever hivemind raises: upkeep that failed must not end discovery
                logger.exception("upkeep of the DHT failed")
                next_announce = now + RETRY
            due = min(next_announce, next_refresh) if self._announcing else next_refresh
            with suppress(TimeoutError):
                async with asyncio.timeout(max(due - self._clock(), 0.01)):
                    await self._changed.wait()

    async def _announce_own(self) -> float:
        """Announce our record; returns the seconds until the next announcement is due."""
        own = self._whereabouts.own
        if own is None or not await self.announce(own.data):
            return RETRY
        return max((own.expires - self._clock()) / 2, RETRY)

    async def _refresh(self) -> None:
        from hivemind.dht.routing import DHTID

        if not self.neighbours():
            others = list(self.others())
            some = random.sample(others, min(len(others), MOST_MET))
            await self._meet_some([*self._seeds, *some])
        # hivemind's own refresh passes a bare id where a collection is expected, and fails
        await self._node.find_nearest_nodes([DHTID(random.getrandbits(160))])

    async def aclose(self) -> None:
        """Leave: answer no more calls and end what runs. The transport stays open."""
        await self._node.shutdown()
        await self._p2p.shutdown()
