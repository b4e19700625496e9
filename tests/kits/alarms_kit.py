"""Peers as a node that looks for alarms sees them."""

from __future__ import annotations

from node.monitor.views import PeerView

NAMES = ("alps", "fjord", "mesa", "reef")


def peers(count: int = 4) -> list[PeerView]:
    """With whom all is well."""
    return [
        PeerView(peer=f"12D3KooW{name}", name=name, status="active", round=9, agrees=True)
        for name in NAMES[:count]
    ]
