"""One machine of the swarm: command line, daemon, trainer ranks, monitor.

For a training script of one's own there is :func:`node.join`; all else starts with ``node start``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from node.script.joining import join as join
    from node.script.session import Joined as Joined

__version__ = "0.1.0"
__all__ = ["Joined", "__version__", "join"]


def __getattr__(name: str) -> Any:
    """``join`` and ``Joined``, which need torch: the command line must answer without it."""
    if name == "join":
        from node.script.joining import join

        return join
    if name == "Joined":
        from node.script.session import Joined

        return Joined
    raise AttributeError(f"module 'node' has no attribute {name!r}")
