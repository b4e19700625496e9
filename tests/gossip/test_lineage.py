"""Whose signatures lead from the run's creator to now, and what a liar can make of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from gossip_kit import RUN, roster_of
from lineage_kit import CREATOR, FOUNDERS, OTHERS, Chain, changing

from gossip.catchup import lineage as lineages
from gossip.catchup.lineage import Claim, Lineage, prove
from gossip.plans.certificate import handover_hash, handover_of, outcome_hash
from protocols.errors import BadSignature, Malformed, RemoteProtocolError, Stale
from protocols.identity import PeerId
from protocols.memory.virtual_time import inline
from protocols.messages import (
    Certificate,
    CertificateRequest,
    Certificates,
    Handover,
    HandoverRequest,
    Handovers,
)

pytestmark = pytest.mark.usefixtures("remembered_signatures")


class Shows:
    """A peer that answers from ``certificates`` and ``handovers``, whatever is asked."""

    def __init__(self, newest: Certificate, kept: Lineage) -> None:
        self.newest, self.kept = newest, kept
        self.calls = 0
        self.given = 0  # handovers

    async def call(self, peer: PeerId, name: str, body: bytes, **_: Any) -> bytes:
        self.calls += 1
        if name == "certificates":
            CertificateRequest.decode(body)
            return Certificates((self.newest,)).encode()
        request = HandoverRequest.decode(body)
        page = self.kept.page(request.first, request.count)
        self.given += len(page.handovers)
        return page.encode()


def proven(
    shows: Any,
    claim: tuple[int, bytes, int],
    known: Lineage | None = None,
    shown: Callable[[int], None] = lambda count: None,
) -> Lineage:
    proof = prove(
        shows, OTHERS[0].peer_id, RUN, FOUNDERS, Claim(*claim), inline, known=known, shown=shown
    )
    return asyncio.run(proof)[1]


def test_a_handover_has_the_hash_of_its_outcome() -> None:
    certificate = Chain().add(OTHERS[:3])
    handover = handover_of(certificate)
    assert handover_hash(handover) == outcome_hash(certificate.outcome)
    for change in ({"work": 1}, {"next_roster": ()}, {"round": 9}, {"content": bytes(32)}):
        assert handover_hash(replace(handover, **change)) != handover_hash(handover)


def test_fifty_changes_of_the_roster_lead_to_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineages, "ANSWER_BYTES", 5000)
    chain = changing(50)
    shows = Shows(chain.certificates[-1], chain.lineage())
    found = proven(shows, chain.claim)
    assert len(found) == 50
    assert set(found.roster) == set(roster_of(chain.roster))
    assert shows.calls > 5  # in pages
    # some hundred bytes each, whatever was merged
    assert len(found.encode()) < 50 * 1200
    again = Lineage.decode(RUN, FOUNDERS, found.encode())
    assert again.encode() == found.encode()
    again.check(chain.certificates[-1])
    again.add(chain.add([CREATOR]))
    again.check(chain.certificates[-1])
    assert len(again) == 51


def test_who_was_there_before_is_shown_what_has_come_since() -> None:
    chain = changing(20)
    known = chain.lineage()
    before = known.encode()
    for roster in (OTHERS[:2], [CREATOR, OTHERS[3]], OTHERS[2:4]):
        chain.add(roster)
    shows = Shows(chain.certificates[-1], chain.lineage())
    assert proven(shows, chain.claim, known).encode() == chain.lineage().encode()
    assert shows.given == 3
    assert known.encode() == before


def forked(common: int) -> tuple[Chain, Chain]:
    """Two chains whose first ``common`` changes are the same."""
    ours, theirs = changing(common), changing(common)
    ours.add([*ours.roster, OTHERS[6]])
    ours.add()
    for roster in ([CREATOR, OTHERS[5]], OTHERS[:2], OTHERS[1:4]):
        theirs.add([*theirs.roster, roster[-1]])
        theirs.add(roster)
    return ours, theirs


@pytest.mark.parametrize("common", [0, 1, 2, 3, 30])
def test_the_other_side_of_a_fork_is_shown_from_where_they_parted(common: int) -> None:
    ours, theirs = forked(common)
    shows = Shows(theirs.certificates[-1], theirs.lineage())
    told: list[int] = []
    found = proven(shows, theirs.claim, ours.lineage(), told.append)
    assert found.encode() == theirs.lineage().encode()
    assert sum(told) == theirs.lineage().bytes - theirs.lineage().first(common).bytes
    assert shows.given <= 5 + 6 + (common + 1).bit_length()  # not all that they have in common


def test_what_is_known_buys_no_time_however_often_it_is_shown() -> None:
    """Also not from who denies at first that it has it, to be asked for all of it."""
    ours, _ = forked(30)
    told: list[int] = []

    class Denies(Shows):
        async def call(self, peer: PeerId, name: str, body: bytes, **more: Any) -> bytes:
            if name == "handovers" and HandoverRequest.decode(body).count == 1:
                return Handovers(0, ()).encode()
            return await super().call(peer, name, body, **more)

    after, (round_, _, work) = ours.certificates[-1], ours.claim
    outcome = replace(after.outcome, previous=outcome_hash(after.outcome), round=round_)
    made_up = replace(after, outcome=outcome)
    claim = (round_ + 1, outcome_hash(outcome), work)
    for kind in (Shows, Denies):
        with pytest.raises(RemoteProtocolError):
            proven(kind(made_up, ours.lineage()), claim, ours.lineage(), told.append)
    assert sum(told) == 0


def test_every_place_of_a_chain_is_proven_by_who_has_moved_on() -> None:
    chain, heads = Chain(), []
    for roster in ([CREATOR, OTHERS[0]], None, OTHERS[:2], None, OTHERS[:3]):
        chain.add(roster)
        heads.append(chain.claim)
    for claim, certificate in zip(heads, chain.certificates, strict=True):
        found = proven(Shows(certificate, chain.lineage()), claim)
        assert set(found.roster) == set(certificate.outcome.next_roster)


def forgeries() -> Iterator[tuple[str, Chain, Lineage, type[RemoteProtocolError]]]:
    """What somebody who was admitted, OTHERS[0], can make by himself."""
    liar = OTHERS[0]
    members = [CREATOR, liar, OTHERS[1]]

    def begun() -> Chain:
        chain = Chain()
        chain.add(members)
        return chain

    chain = begun()
    chain.add([liar], voters=[liar])
    chain.add(tokens=10**9)
    yield "votes of its own alone", chain, chain.lineage(), BadSignature

    chain = begun()
    chain.add([liar], voters=[liar], deciders=[liar])
    chain.add(tokens=10**9)
    yield "a roster of its own", chain, chain.lineage(), Stale

    chain = begun()
    chain.roster = [liar]
    chain.add(tokens=10**9)
    yield "a roster nobody handed over to", chain, chain.lineage(), Stale

    chain = begun()
    chain.add(
        [liar, OTHERS[5]], voters=[liar, OTHERS[5]], deciders=[liar, OTHERS[5]], ballot=(1, 0)
    )
    yield "an epoch with strangers", chain, chain.lineage(), Stale

    chain = Chain()
    chain.roster = [liar]
    chain.add(tokens=10**9)
    chain.add()
    yield "no creator", chain, Lineage(RUN, (liar.peer_id,)), Malformed

    chain = begun()
    other = handover_of(chain.certificates[0])
    kept = Lineage(RUN, FOUNDERS)
    kept._keep(replace(other, next_roster=roster_of([liar])))
    chain.roster = [liar]
    chain.add(tokens=10**9)
    yield "somebody else's votes under another roster", chain, kept, BadSignature

    chain = begun()
    kept = chain.lineage()
    kept._keep(handover_of(chain.certificates[0]))
    chain.add()
    yield "a hand-over twice", chain, kept, Stale


@pytest.mark.parametrize(
    ("chain", "kept", "error"),
    [pytest.param(c, k, e, id=what) for what, c, k, e in forgeries()],
)
def test_a_forged_chain_is_refused(
    chain: Chain, kept: Lineage, error: type[RemoteProtocolError]
) -> None:
    with pytest.raises(error):
        proven(Shows(chain.certificates[-1], kept), chain.claim)


def test_what_was_signed_for_one_fragment_proves_nothing_of_another() -> None:
    """Its signatures are good, and its members may be of that other fragment as well."""
    chain = Chain()
    alone = chain.add()  # by who is in office in both
    handed = handover_of(chain.add([CREATOR, OTHERS[0]]))
    of_another = Lineage(RUN, FOUNDERS, fragment=1)
    with pytest.raises(Malformed, match="another fragment"):
        of_another.check(alone)
    with pytest.raises(Malformed, match="another fragment"):
        of_another.follow([handed])
    assert len(of_another) == 0


def test_who_says_that_there_are_more_handovers_than_it_shows_is_refused() -> None:
    chain = changing(3)

    class Boasts(Shows):
        """It would be asked for the rest for ever."""

        async def call(self, peer: PeerId, name: str, body: bytes, **more: Any) -> bytes:
            answer = await super().call(peer, name, body, **more)
            assert self.calls < 10
            if name == "certificates":
                return answer
            page: Handovers = Handovers.decode(answer)
            return replace(page, total=page.total + 1).encode()

    with pytest.raises(Malformed, match="fewer handovers"):
        proven(Boasts(chain.certificates[-1], chain.lineage()), chain.claim)


def test_another_certificate_than_announced_is_refused() -> None:
    chain = changing(3)
    shows = Shows(chain.certificates[-1], chain.lineage())
    round_, head, work = chain.claim
    for claim in ((round_ + 1, head, work), (round_, bytes(32), work), (round_, head, work + 1)):
        with pytest.raises(Stale):
            proven(shows, claim)
    with pytest.raises(Stale):
        proven(shows, (0, head, work))


def test_survivors_without_a_majority_are_followed() -> None:
    chain = Chain()
    chain.add([CREATOR, *OTHERS[:3]])
    chain.add(OTHERS[:1], deciders=OTHERS[:1], ballot=(1, 0))
    chain.add()
    found = proven(Shows(chain.certificates[-1], chain.lineage()), chain.claim)
    assert found.roster == roster_of(OTHERS[:1])


def test_endless_handovers_end(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = changing(30)
    kept = chain.lineage()
    monkeypatch.setattr(lineages, "MAX_BYTES", Handover.MAX_BYTES + 3000)
    with pytest.raises(Malformed, match="more than"):
        proven(Shows(chain.certificates[-1], kept), chain.claim)


def test_a_full_record_stays_as_it_is_and_convinces_its_owner_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lineages, "MAX_BYTES", Handover.MAX_BYTES + 3000)
    chain = changing(30)
    kept, newest = chain.lineage(), chain.certificates[-1]
    assert kept.full
    assert 0 < len(kept) < 10
    with pytest.raises(Malformed, match="no newcomer can follow"):
        proven(Shows(newest, kept), chain.claim)
    again = Lineage.decode(RUN, FOUNDERS, kept.encode())
    assert again.full
    again.check(newest, own=True)
    with pytest.raises(BadSignature):
        again.check(replace(newest, votes=newest.votes[:1]), own=True)
