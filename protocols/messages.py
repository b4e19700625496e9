"""The messages that travel between peers: the wire specification.

Messages with relays (kinds 45 to 47) are in :mod:`protocols.relay.wire`, the headers of lanes in
:mod:`protocols.lanes.wire`.

Encoding, bounds and versions: :mod:`protocols.wire`. Messages that are forwarded or stored
(:class:`PeerRecord`, :class:`Announce`, the manifest) travel inside a signed
:class:`~protocols.envelope.Envelope`; the others go over a link whose two ends have proven
their identity and need no signature of their own. Votes and part results are signed where
they are made (:mod:`gossip.plans.certificate`), since they end up in certificates.

Times are seconds since the Unix epoch, speeds bytes or tokens a second, digests BLAKE3-256.
"""

from __future__ import annotations

from typing import Annotated

from protocols.bounds import MAX_FRAGMENTS, MAX_PEERS
from protocols.counts import MAX_BYTES, Included, included_in
from protocols.identity import PeerId
from protocols.wire import Max, Message, Struct

PROTOCOL_VERSION = 4  # raised for any change below (tests/protocols/test_protocol_version.py)
MAX_ANNOUNCE_BYTES = 5 * 1024  # of an announcement in its envelope, with all fragments
MAX_HANDOVERS_AT_ONCE = 256
TAG_BYTES = 6  # of the hash of an announcement or a sketch, where one is asked for by name
PULSE_BYTES = 10  # of each value in the chain that heartbeats show (:mod:`gossip.membership.pulse`)
BEAT_BYTES = TAG_BYTES + 1 + PULSE_BYTES
SKETCH_NAME_BYTES = 16  # of a sketch's hash, where that stands for it
MAX_SKETCH_BYTES = 1024
MAX_PARTS = 1024  # parts one round is cut into
MAX_PAST = 600  # rounds that a newcomer's charts are given of the time before it
MAX_READERS = 16  # of one state that are named to each other
MAX_WEIGHED = 64  # contributors of one round whose weights follow from their inner products

Digest = Annotated[bytes, Max(32)]
Signature = Annotated[bytes, Max(64)]
Peer = Annotated[PeerId, Max(64)]
Address = Annotated[str, Max(128)]
Name = Annotated[str, Max(64)]
AnnounceEnvelope = Annotated[bytes, Max(MAX_ANNOUNCE_BYTES)]
Peers = Annotated[tuple[Peer, ...], Max(MAX_PEERS)]

EMPTY_DIGEST = b""  # a part that nobody could complete
UNKNOWN_ETA_S = 1e6  # of an island that cannot tell yet when it will be ready


# --- who is there -----------------------------------------------------------------------------


class Envelope(Message, kind=1, max_bytes=64 * 1024):
    """Signed bytes with a purpose, an expiry and, where it matters, a run."""

    signer: Peer
    purpose: Name
    run: Digest
    recipient: Annotated[str, Max(64)]  # always empty: for anyone
    sequence: int  # grows with every envelope of this signer and purpose
    expires: float
    body: Annotated[bytes, Max(60 * 1024)]
    signature: Signature


class PeerRecord(Message, kind=2):
    """Where a peer can be dialled, said by itself (in an envelope, purpose ``record``)."""

    peer: Peer
    addresses: Annotated[tuple[Address, ...], Max(8)]
    relay: Annotated[str, Max(64)]  # the peer that relays for it; empty: none


class Standing(Struct):
    """Where an island stands with one fragment, and what it has for its next round."""

    active: bool  # decides in its rounds, as far as it is in office
    round: int
    head: Digest
    state: Digest
    work: int
    ready: bool = False
    tokens: int = 0
    steps: int = 0
    weight: float = 0.0
    eta: float = UNKNOWN_ETA_S
    norm: float = 0.0
    behind_s: float = 0.0
    epoch: int = 0


class Announce(Message, kind=3):
    """What an island says of itself every second or so (in an envelope, purpose ``announce``).

    The fields on its standing and its contribution are about fragment 0; ``others`` has the same
    for each further fragment (:mod:`gossip.membership.standing`).
    """

    peer: Peer
    role: Name  # "island", "server", "seed" or "observer"; the first two take part in rounds
    status: Name  # "joining", "active" or "leaving"
    incarnation: int  # grows with every start of the process
    addresses: Annotated[tuple[Address, ...], Max(8)]
    version: Name  # of the software
    region: Name  # declared by the operator, may be empty
    # where it stands
    round: int  # rounds committed, which is the number of the next one
    head: Digest  # hash of its newest certificate
    state: Digest  # digest of its outer state, equal on all who stand at `head`
    work: int  # tokens merged along its chain of certificates: the heavier chain wins
    # its contribution to the next round
    ready: bool = False
    tokens: int = 0  # since its last contribution
    steps: int = 0  # inner steps since its last contribution
    weight: float = 0.0  # the weight it asks for: tokens, less while it is new
    # seconds until ready, by its own estimate, or once it may begin; unknown before it can begin
    eta: float = UNKNOWN_ETA_S
    # measured speeds
    tokens_per_second: float = 0.0
    steps_per_second: float = 0.0
    upload: float = 0.0
    download: float = 0.0
    # for people
    loss: float = 0.0
    validation_loss: float = 0.0  # 0 until evaluated
    total_tokens: int = 0
    sketch_round: int = 0
    # projection of its θ before that round's merge; in a large swarm the BLAKE3 of it, 16 bytes,
    # and the sketch itself is asked for
    sketch: Annotated[bytes, Max(MAX_SKETCH_BYTES)] = b""
    admission: Digest = b""  # proof that it knows the run's invitation, where one is needed
    name: Name = ""  # given by the operator, for people
    norm: float = 0.0  # L2 norm of its contribution to the next round
    others: Annotated[tuple[Standing, ...], Max(MAX_FRAGMENTS - 1)] = ()
    round_trip: float = 0.0  # seconds to the peers it calls, the median; 0: not measured
    wanted_steps: int = 0  # inner steps a round that its links ask for; 0: it has no say
    # where it cannot catch up by itself: seconds in which it would, if the others waited
    behind_s: float = 0.0
    position: int = 0  # its inner steps in the learning rate's schedule; 0: it has none yet
    epoch: int = 0  # promised for `round`: its votes in an earlier epoch no longer count
    # what heartbeats between this announcement and the next lead to; empty: there are none
    pulse: Annotated[bytes, Max(PULSE_BYTES)] = b""


class Hello(Message, kind=4):
    """First call on a new link: what I speak, which run I want (empty: whichever you have)."""

    protocol: int
    software: Name
    run: Digest
    time: float  # the caller's wall clock
    invitation: Annotated[str, Max(256)]  # proof that I know it, empty where none is needed
    record: Annotated[bytes, Max(4096)]  # my PeerRecord in its envelope


class Welcome(Message, kind=5, max_bytes=1024 * 1024):
    """Answer to :class:`Hello`."""

    protocol: int
    software: Name
    run: Digest  # empty: this peer takes part in no run
    time: float
    observed: Address  # the caller's address as seen from here
    record: Annotated[bytes, Max(4096)]
    announces: Annotated[tuple[AnnounceEnvelope, ...], Max(256)]


class Known(Message, kind=6, max_bytes=1024 * 1024):
    """Envelopes of the announcements a peer holds, its own among them; also asked for later.

    As a rumour in a large swarm: what is new of them, and heartbeats.
    """

    announces: Annotated[tuple[AnnounceEnvelope, ...], Max(256)]
    beats: Annotated[bytes, Max(BEAT_BYTES * MAX_PEERS)] = b""  # the newest of each peer
    sketches: Annotated[tuple[Annotated[bytes, Max(MAX_SKETCH_BYTES)], ...], Max(256)] = ()


class KnownRequest(Message, kind=7):
    """Ask for :class:`Known`, without the announcements that the caller has, or for a few alone."""

    have: Annotated[bytes, Max(8 * MAX_PEERS)] = b""  # of BLAKE3 of each envelope, 8 bytes
    # tags of announcements and sketches that alone are asked for; empty: for all
    want: Annotated[bytes, Max(TAG_BYTES * MAX_PEERS)] = b""


class Link(Struct):
    """What a peer has measured in passing of its link to another; 0: not measured."""

    peer: Peer
    upload: float  # to it
    download: float  # from it
    round_trip: float  # seconds


class Links(Message, kind=8):
    """A peer's own links and its wall clock; asked for where somebody looks at the whole swarm."""

    time: float
    links: Annotated[tuple[Link, ...], Max(MAX_PEERS)]


class PastRequest(Message, kind=9):
    """Ask how the run went before a round: what charts show, from any peer and not proven."""

    run: Digest
    since: int  # the oldest round that is asked for
    before: int
    rows: int  # at most; where there are more rounds, several share a row


class PastRound(Struct):
    """One round, or several put together: means, and the newest round and time."""

    round: int
    time: float
    members: float
    live: float
    loss: float | None
    validation_loss: float | None
    consensus: float | None
    consensus_after: float | None


class Merged(Struct):
    """How many tokens of an island were merged before the round asked for, as certificates say."""

    peer: Peer
    tokens: int


class Past(Message, kind=36, max_bytes=256 * 1024):
    """Answer to :class:`PastRequest`, oldest first."""

    rounds: Annotated[tuple[PastRound, ...], Max(MAX_PAST)]
    merged: Annotated[tuple[Merged, ...], Max(MAX_PEERS)]


# --- a round ----------------------------------------------------------------------------------


class Contributor(Struct):
    """One island's contribution to a round, as announced."""

    peer: Peer
    weight: float  # 0: takes part without being counted
    tokens: int
    active: bool  # False: found dead during the round; owners wait for it no more
    norm: float = 0.0  # as announced
    scale: float = 1.0  # factor on its share, by the run's merge rule; 0: left out


class PartResult(Message, kind=10):
    """An owner's statement on the part it merged; signed, since it ends up in certificates."""

    fragment: int
    round: int
    start: int  # elements of the fragment
    stop: int
    owner: Peer
    codec: Name
    digest: Digest  # of the merged part's encoded bytes; empty: nobody could complete it
    counts: Annotated[bytes, Max(MAX_BYTES)]  # what is in it: :mod:`protocols.counts`
    basis: Digest  # names the contributors and weights of the plan it was merged for
    signature: Signature

    @property
    def included(self) -> tuple[Included, ...]:
        """Whose slices are in it, and how much of each. Raises Malformed."""
        return included_in(self.counts)


class Part(Struct):
    """A range of the fragment, who merges it, and the result where it is known already."""

    start: int
    stop: int
    owner: Peer
    result: PartResult | None


class Gram(Message, kind=18):
    """An owner's inner products of the slices of one part; signed, for the plan shows them."""

    fragment: int
    round: int
    start: int
    stop: int
    owner: Peer
    basis: Digest  # names the contributors of the draft
    present: Annotated[tuple[int, ...], Max(MAX_WEIGHED)]  # whose slice came whole; ascending
    # products of those slices, row by row up to the diagonal: float64, little endian
    products: Annotated[bytes, Max(8 * MAX_WEIGHED * (MAX_WEIGHED + 1) // 2)]
    signature: Signature
    # what the owner may have to prove later (:mod:`gossip.exchange.auditing`): for each slice
    # present the root of its chunks, and the signature of its sender, empty for the owner's own
    roots: Annotated[tuple[Digest, ...], Max(MAX_WEIGHED)] = ()
    signatures: Annotated[tuple[Signature, ...], Max(MAX_WEIGHED)] = ()
    tree: Digest = b""  # the root of the products by chunk


class Group(Struct):
    """Members that exchange slices and merged parts with others through one of them."""

    members: Peers
    # for each part of the plan: 1 + the index of the member that relays it; 0: none does
    relays: Annotated[tuple[int, ...], Max(MAX_PARTS)]


class Plan(Message, kind=11, max_bytes=2 * 1024 * 1024):
    """The leader's proposal for a round, or what a later leader makes of its remains."""

    fragment: int
    round: int
    epoch: int  # grows when a round is reformed without its majority
    ballot: int
    leader: Peer
    previous: Digest  # certificate the round builds on
    state: Digest  # outer state the round starts from
    codec: Name
    roster: Peers  # who votes: a majority of these decides
    contributors: Annotated[tuple[Contributor, ...], Max(MAX_PEERS)]
    parts: Annotated[tuple[Part, ...], Max(MAX_PARTS)]
    next_roster: Peers
    expected_s: float  # how long the bytes need on the measured links
    patience_s: float  # how long a transfer may stand still
    draft: bool = False  # scales are not known yet: owners collect slices and report their products
    grams: Annotated[tuple[Gram, ...], Max(MAX_PARTS)] = ()  # what the scales follow from, by part
    groups: Annotated[tuple[Group, ...], Max(MAX_PEERS)] = ()  # disjoint; outsiders have no relay
    servers: int = 0  # members in office that do not train


class Prepare(Message, kind=12):
    """A new leader's question: promise to ignore lower ballots, and tell what you hold."""

    fragment: int
    round: int
    epoch: int
    ballot: int
    previous: Digest
    roster: Peers  # equal to the certified roster in epoch 0; the survivors' in a later one


class Outcome(Message, kind=13, max_bytes=1024 * 1024):
    """What a round comes to. Its hash is what members vote on."""

    fragment: int
    round: int
    previous: Digest
    state: Digest
    codec: Name
    contributors: Annotated[tuple[Contributor, ...], Max(MAX_PEERS)]
    parts: Annotated[tuple[PartResult, ...], Max(MAX_PARTS)]
    next_roster: Peers
    work: int  # tokens merged along the chain, this round's included
    servers: int = 0  # members in office that do not train


class Promise(Message, kind=14, max_bytes=2 * 1024 * 1024):
    """Answer to :class:`Prepare`; ``voted`` is the outcome this member last voted for.

    Not signed: it goes back on the asker's connection, for the place in the chain that it named.
    """

    epoch: int
    ballot: int  # the promised ballot; higher than asked for: refused
    voted_epoch: int
    voted_ballot: int
    voted: Outcome | None
    held: Annotated[tuple[PartResult, ...], Max(MAX_PARTS)]


class Vote(Message, kind=15):
    """``I hold every part of this outcome``; signed over everything but the signature.

    With ``previous``, since rounds of one number on two sides of a fork are not the same round.
    """

    run: Digest
    fragment: int
    round: int
    previous: Digest  # certificate the round builds on
    epoch: int
    ballot: int
    outcome: Digest
    voter: Peer
    signature: Signature


class Signed(Struct):
    """A voter's signature inside a certificate."""

    voter: Peer
    signature: Signature


class Votes(Message, kind=19):
    """Votes for one outcome, from who collected them: a majority, so the round is decided."""

    fragment: int
    round: int
    previous: Digest
    epoch: int
    ballot: int
    outcome: Digest
    votes: Annotated[tuple[Signed, ...], Max(MAX_PEERS)]


class Passed(Message, kind=25, max_bytes=2 * 1024 * 1024 + 64 * 1024):
    """A :class:`Plan`, or :class:`Votes` on their way through a large roster, signed by the author
    as a whole, so that any member can pass it on."""

    fragment: int
    round: int
    author: Peer
    to: Peers  # those that the receiver is to pass it on to
    body: Annotated[bytes, Max(2 * 1024 * 1024)]
    signature: Signature


class PlanRequest(Message, kind=26):
    """Asks by which plan the receiver works; the answer is a :class:`Passed`."""

    fragment: int
    round: int


class Certificate(Message, kind=16, max_bytes=2 * 1024 * 1024):
    """An outcome with the votes of a majority of the roster: the round is committed."""

    run: Digest
    epoch: int
    ballot: int
    roster: Peers
    outcome: Outcome
    votes: Annotated[tuple[Signed, ...], Max(MAX_PEERS)]


class Handover(Message, kind=27, max_bytes=128 * 1024):
    """The part of a certificate that shows who decided, and who decides the next round.

    Votes sign the hash of an outcome, which is computed from these fields and ``content``.
    """

    run: Digest
    fragment: int
    round: int
    epoch: int
    ballot: int
    roster: Peers  # who decided
    previous: Digest
    next_roster: Peers
    work: int
    content: Digest  # hash of the whole outcome
    votes: Annotated[tuple[Signed, ...], Max(MAX_PEERS)]  # a majority of the roster, no more


class Suspect(Message, kind=17):
    """To the leader: these peers do not deliver; make a plan without them."""

    fragment: int
    round: int
    epoch: int
    ballot: int
    peers: Peers


# --- headers of long bodies --------------------------------------------------------------------


class TransferHeader(Message, kind=20):
    """Header of a slice on its way to a part's owner, or of the merged part from there to all.

    The body of a slice is the encoded range; that of a merged part goes on with the trailer of
    :mod:`gossip.exchange.bodies`. A slice with an empty body: this island declines. Sent as a call,
    it asks for the same header with the true :attr:`done`.
    """

    run: Digest
    fragment: int
    round: int
    start: int
    stop: int
    codec: Name
    basis: Digest  # as in PartResult; through a relay, a hash of that and of whose slices it is for
    done: int  # elements that are there already: the body begins after them


class PartRequest(Message, kind=22):
    """Header of a pull: a merged part's encoded bytes, by digest, without the first ``skip``."""

    run: Digest
    fragment: int
    round: int
    start: int
    stop: int
    digest: Digest
    skip: int


class EvidenceRequest(Message, kind=48):
    """Header of a pull: what shows how one chunk of a certified part was weighed and merged."""

    run: Digest
    fragment: int
    round: int
    start: int  # of the part
    stop: int
    chunk: int  # its number in the part


class Accusation(Message, kind=49):
    """An owner has merged something else than it was sent, as one chunk of its part shows.

    The accuser has the evidence, and gives it to any peer that asks.
    """

    fragment: int
    round: int
    start: int
    stop: int
    chunk: int


class CertificateRequest(Message, kind=23):
    """Certificates from ``round`` on, oldest first."""

    run: Digest
    fragment: int
    round: int
    count: int


class Certificates(Message, kind=24, max_bytes=4 * 1024 * 1024):
    """Answer to :class:`CertificateRequest`; empty when the round is not kept any more."""

    certificates: Annotated[tuple[Certificate, ...], Max(32)]


class HandoverRequest(Message, kind=28):
    """Handovers in the order of their rounds, from the ``first``-th on."""

    run: Digest
    first: int
    count: int
    fragment: int = 0


class Handovers(Message, kind=29, max_bytes=1024 * 1024):
    """Answer to :class:`HandoverRequest`; there are ``total`` in all."""

    total: int
    handovers: Annotated[tuple[Handover, ...], Max(MAX_HANDOVERS_AT_ONCE)]


# --- how a newcomer gets in -------------------------------------------------------------------


class ManifestRequest(Message, kind=30):
    """Header of a pull: the run's manifest in its envelope."""

    run: Digest


class ManifestText(Message, kind=35):
    """A run's manifest in its canonical form (in its creator's envelope, purpose ``manifest``)."""

    canonical: Annotated[bytes, Max(48 * 1024)]


class StateRequest(Message, kind=31):
    """Ask a peer to keep its outer state of ``round`` for chunk downloads.

    ``or_newer``: a later round will do, if that is where the peer stands by now.
    ``kept``: only if it keeps a copy of that round already; nothing is copied for this one.
    """

    run: Digest
    round: int
    fragment: int = 0
    or_newer: bool = False
    kept: bool = False


class StateOffer(Message, kind=32, max_bytes=4 * 1024 * 1024):
    """Answer to :class:`StateRequest`: the state's shape and the hash of each chunk."""

    round: int
    digest: Digest  # hash over the chunk hashes; what announcements carry as `state`
    length: int  # bytes
    chunk: int  # bytes, the last one may be shorter
    hashes: Annotated[bytes, Max(2 * 1024 * 1024)]  # 32 bytes each
    readers: Annotated[tuple[Peer, ...], Max(MAX_READERS)] = ()  # who else downloads it now


class InPlaceRequest(Message, kind=50):
    """Ask a newcomer that downloads the same state for its chunks; tells it of the caller."""

    run: Digest
    round: int
    digest: Digest
    fragment: int = 0


class InPlace(Message, kind=51, max_bytes=16 * 1024):
    """Answer to :class:`InPlaceRequest`: a bit for each chunk, the lowest of a byte first."""

    chunks: Annotated[bytes, Max(2 * 1024 * 1024 // 32 // 8)]


class ChunkRequest(Message, kind=33):
    """Header of a pull: one chunk of a kept state."""

    run: Digest
    round: int
    index: int
    fragment: int = 0


class MomentsRequest(Message, kind=37):
    """Ask an island for a copy of its inner optimizer's moments, kept for chunk downloads."""

    run: Digest


class MomentsOffer(Message, kind=38, max_bytes=4 * 1024 * 1024):
    """Answer to :class:`MomentsRequest`; nobody but the island vouches for it."""

    steps: int  # inner steps that the moments have seen
    digest: Digest  # as in :class:`StateOffer`
    length: int  # bytes
    chunk: int  # bytes, the last one may be shorter
    hashes: Annotated[bytes, Max(2 * 1024 * 1024)]  # 32 bytes each


class MomentsChunk(Message, kind=39):
    """Header of a pull: one chunk of the copy with this digest."""

    run: Digest
    digest: Digest
    index: int


class Blob(Message, kind=34):
    """Header of a pull: bytes by content hash (evaluation shard, tokenizer)."""

    run: Digest
    digest: Digest


# --- discovery --------------------------------------------------------------------------------


class RemoteCall(Message, kind=40, max_bytes=1024 * 1024 + 8 * 1024):
    """A protobuf call of the DHT (:mod:`protocols.p2p`), with the caller's signed address."""

    handler: Annotated[str, Max(128)]
    record: Annotated[bytes, Max(4096)]  # the caller's PeerRecord in its envelope, may be empty
    known: int  # sequence of the callee's record that the caller holds; 0: none
    body: Annotated[bytes, Max(1024 * 1024)]  # the protobuf


class RemoteReply(Message, kind=41, max_bytes=1024 * 1024 + 8 * 1024):
    """Answer to :class:`RemoteCall` and :class:`StreamStep`."""

    error: Annotated[str, Max(512)]  # what the handler raised; empty: it returned
    record: Annotated[bytes, Max(4096)]  # the callee's record where it is newer than `known`
    bodies: Annotated[tuple[Annotated[bytes, Max(1024 * 1024)], ...], Max(64)]
    done: bool  # no more bodies will follow (always true for a plain call)


class StreamStep(Message, kind=42, max_bytes=1024 * 1024 + 8 * 1024):
    """One step of a streaming protobuf call: items in, items out."""

    stream: Annotated[bytes, Max(16)]
    verb: Name  # "open", "send", "end" (no more input), "next" (wait for output), "cancel"
    handler: Annotated[str, Max(128)]  # for "open"
    bodies: Annotated[tuple[Annotated[bytes, Max(1024 * 1024)], ...], Max(64)]


class Where(Message, kind=43):
    """Where are these peers? Asked of a peer who named them."""

    peers: Annotated[tuple[Peer, ...], Max(32)]


class Found(Message, kind=44, max_bytes=160 * 1024):
    """Answer to :class:`Where`: signed records of those that are known, newest held."""

    records: Annotated[tuple[Annotated[bytes, Max(4096)], ...], Max(32)]


class DialBackAt(Message, kind=54):
    """Can you dial me at this port, at the IP address that you see me come from?"""

    port: int
