"""The trainer's end of the channel to its daemon: no report waits until the daemon reads it.

One that hangs, or that Ctrl-Z has stopped, reads nothing, and a socket is full after some hundred
reports. Rank 0 would stand in the middle of a step then, until the others give their collective
call up; as would a script, where nobody tells it so and Ctrl-C is held back.
"""

from __future__ import annotations

import socket

from node.trainer.channel import Channel, ChannelClosedError, Command, Report, StepDone
from node.trainer.framing import frame

MOST_UNSENT = 2**16  # bytes; beyond them StepDone, which is for people only, is left out


class Unhurried(Channel):
    """What the socket does not take at once is sent with the next report, or look for a command."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._unsent = bytearray()

    def send(self, report: Report) -> None:
        """Send one message, now or later; raises :class:`ChannelClosedError`."""
        if not (isinstance(report, StepDone) and len(self._unsent) > MOST_UNSENT):
            self._unsent += frame(report)
        self._flush()

    def receive(self, timeout: float) -> Command | None:
        """See :meth:`Channel.receive`."""
        self._flush()
        return super().receive(timeout)

    def finish(self) -> None:
        """Send what is unsent, however long that takes: nothing follows that could bring it along.

        Raises :class:`ChannelClosedError`.
        """
        try:
            self._socket.sendall(self._unsent)
        except OSError as error:
            raise ChannelClosedError(f"the daemon is gone ({error})") from error
        self._unsent.clear()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelClosedError(f"the daemon is gone ({error})") from error
