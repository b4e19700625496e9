"""Which address records a node keeps: those of the islands that it knows."""

from __future__ import annotations

from pathlib import Path

from identity_kit import identity
from p2p_kit import fast_network
from test_clock import node_in

from protocols.whereabouts import Whereabouts


async def test_strangers_do_not_take_the_place_of_islands(tmp_path: Path) -> None:
    node = node_in(tmp_path / "node")
    island = identity(2).peer_id
    node.is_member = lambda peer: peer == island
    node.whereabouts._limit = 3
    network = fast_network()
    for number in range(2, 12):
        who = identity(number)
        theirs = Whereabouts(network.join(who.peer_id), who)
        node.whereabouts.learn(theirs.publish([f"192.0.2.{number}:1"]))
    assert node.whereabouts.get(island) is not None
    assert node.whereabouts.get(identity(3).peer_id) is None
    assert node.whereabouts.get(identity(11).peer_id) is not None
