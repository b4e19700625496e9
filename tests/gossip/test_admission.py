"""A run with an invitation: who does not know it is not listened to."""

from __future__ import annotations

import pytest
from simulated_swarm import simulated_swarm
from toy_replica import RUN

from bootstrap.handshake import admission
from protocols.errors import BadSignature
from protocols.memory import virtual_time


def test_announcements_without_the_invitation_are_refused() -> None:
    async def main() -> None:
        async with simulated_swarm(3) as swarm:
            first, second, third = (member.swarm.presence for member in swarm.members.values())
            first.admission = lambda peer: admission("secret", RUN, peer)
            first.membership.islands.clear()
            second.note(admission=admission("secret", RUN, second.status.peer))
            assert first.learn(second.envelope()).peer == second.status.peer
            with pytest.raises(BadSignature, match="invitation"):
                first.learn(third.envelope())
            # somebody else's proof is of no use
            third.note(admission=second.status.admission)
            with pytest.raises(BadSignature, match="invitation"):
                first.learn(third.envelope())
            assert set(first.membership.islands) == {second.status.peer}

    virtual_time.run(main())
