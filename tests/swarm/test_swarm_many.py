"""Many real processes on one machine take rounds together."""

from __future__ import annotations

import fault_member
import pytest
from fault_member import Setup, identity_of
from member_kit import Crew, Process, forked, free_ports
from swarm_kit import Record

from gossip.membership.members import Patience
from protocols.messages import Certificate

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

COUNT = 32
SIZE = 200_000
ROUNDS = 2
CROWDED = Patience(heartbeat_s=10.0)  # each has a sixteenth of a core
MEETING_S = 180.0


def test_thirty_two_processes_commit_rounds_with_equal_digests(record_property: Record) -> None:
    peers = [identity_of(k).peer_id for k in range(COUNT)]
    listening = [f"127.0.0.1:{port}" for port in free_ports(COUNT)]
    with forked() as start:
        members = []
        for k in range(COUNT):
            addresses = {peers[j]: listening[j] for j in range(COUNT) if j != k}
            setup = Setup(k, listening[k], addresses, SIZE, "int8", 1.0, CROWDED)
            members.append(Process(peers[k], f"m{k}", *start(fault_member.main, setup)))
        crew = Crew(members)
        crew.go_on_to(ROUNDS - 1, MEETING_S)
    chain = crew.chain()
    for round_ in range(ROUNDS):
        assert len(crew.facts_of(round_)) == 1, f"round {round_}"
        assert len(chain[round_].roster) == COUNT
    for fact in (f for one in members for f in one.of("rejected")):
        # a sixteenth of a core is slow, and nothing else is wrong
        assert "too late" in fact["why"] or "does not come" in fact["why"], fact
    last = members[0].of("applied", ROUNDS - 1)[0]
    contributors = [len(one.outcome.contributors) for one in chain]
    counted = [
        len({i.contributor for part in one.outcome.parts for i in part.included}) for one in chain
    ]
    record_property("contributors", contributors)
    record_property("counted", counted)
    record_property("certificate_bytes", len(last["certificate"]))
    assert len(last["certificate"]) < Certificate.MAX_BYTES / 4
    # some are too late on two cores, three quarters of all were the fewest that were seen
    assert min(contributors) > COUNT / 2
    assert min(counted) > COUNT / 2
