"""Who answers to which name, and what a caller is told about a handler's failure.

No traceback and no text of an unexpected exception leaves this machine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from protocols.errors import (
    RemoteProtocolError,
    RemoteRefused,
    TransferStalled,
    TransportError,
)
from protocols.identity import PeerId
from protocols.transport import CallHandler, PullHandler, PushHandler

logger = logging.getLogger(__name__)


class Handlers:
    """The handlers of one transport, by verb and name."""

    def __init__(self) -> None:
        self.admits: Callable[[PeerId, str], bool] = lambda peer, name: True
        self.calls: dict[str, tuple[CallHandler, int]] = {}
        self.pushes: dict[str, tuple[PushHandler, int]] = {}
        self.pulls: dict[str, tuple[PullHandler, bool]] = {}

    def call(self, peer: PeerId, name: str) -> tuple[CallHandler, int]:
        """Handler and bound for a call of ``peer``; raises :class:`RemoteRefused`."""
        self._admit(peer, name)
        if name not in self.calls:
            raise _unknown()
        return self.calls[name]

    def push(self, peer: PeerId, name: str) -> tuple[PushHandler, int]:
        """Handler and bound for a push of ``peer``; raises :class:`RemoteRefused`."""
        self._admit(peer, name)
        if name not in self.pushes:
            raise _unknown()
        return self.pushes[name]

    def pull(self, peer: PeerId, name: str) -> tuple[PullHandler, bool]:
        """Handler for a pull of ``peer``, and if it may be slow; raises :class:`RemoteRefused`."""
        self._admit(peer, name)
        if name not in self.pulls:
            raise _unknown()
        return self.pulls[name]

    def known(self, name: str) -> str:
        """The name; empty where nothing answers to it: strangers make up as many as they like."""
        return name if name in self.calls or name in self.pushes or name in self.pulls else ""

    def _admit(self, peer: PeerId, name: str) -> None:
        if not self.admits(peer, name):
            raise RemoteRefused("stranger", "this node does not know you: greet it first")


def _unknown() -> RemoteRefused:
    return RemoteRefused("unknown", "nothing here answers to that name")


def refusal(error: Exception, name: str) -> RemoteRefused:
    """What a caller is told about an error of the handler of ``name``."""
    if isinstance(error, RemoteRefused):
        return error
    if isinstance(error, RemoteProtocolError):
        return RemoteRefused("protocol", str(error))
    if isinstance(error, TransferStalled):
        return RemoteRefused("stalled", str(error))
    if isinstance(error, TransportError):
        return RemoteRefused("unreachable")
    logger.error("the handler of %r failed", name, exc_info=error)
    return RemoteRefused("internal")
