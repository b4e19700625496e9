"""Sending a round's control messages: straight, or passed on by others, and again if need be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gossip.membership.members import Membership
from gossip.membership.presence import Presence
from gossip.plans.rules import PATIENCE_S
from gossip.rounds.round import Round
from gossip.wiring import Wiring
from protocols.errors import (
    RemoteProtocolError,
    TransferStalled,
    TransportError,
    Unreachable,
    Why,
)
from protocols.identity import PeerId
from protocols.messages import (
    Certificate,
    Gram,
    Passed,
    Prepare,
    Promise,
    Suspect,
    Vote,
)
from protocols.wire import decode_any

Control = Prepare | Vote | Suspect | Gram | Passed

TRIES = 3  # of a control message


@dataclass
class ControlSender:
    """What one chain sends.

    ``answered`` gets the replies that are messages, and may raise RemoteProtocolError.
    """

    wiring: Wiring
    presence: Presence
    membership: Membership
    answered: Callable[[Round, PeerId, Promise | Certificate], None]
    rejected: Callable[[PeerId, RemoteProtocolError], None]

    def tell(self, of: Round, leg: Sequence[PeerId], message: Control) -> None:
        """Tell the first of these, who passes it on to the others; else tell these as well."""
        first, *rest = leg

        async def go() -> None:
            note = replace(message, to=tuple(rest)) if isinstance(message, Passed) else message
            if not await self._send(of, first, note):
                for peer in rest:
                    self.tell(of, (peer,), message)

        self.wiring.spawn(go())

    async def _send(self, of: Round, to: PeerId, message: Control) -> bool:
        """Whether it was taken."""
        body = message.encode()
        patience = self.membership.answer_s(to, PATIENCE_S)
        upload = self.presence.status.upload
        if upload > 0:  # a long plan is on its way for a while
            patience += len(body) / upload
        for left in reversed(range(TRIES)):
            try:
                reply = await self.wiring.transport.call(
                    to, "round", body, timeout=patience, max_reply=Certificate.MAX_BYTES
                )
            except TransferStalled:
                if of.finished:
                    return False
                patience *= 2  # it may have much to do
                continue
            except Unreachable as error:
                if error.why is Why.RESET and left and not of.finished:
                    continue
                self.presence.unreachable(to)
                return False
            except TransportError:
                return False  # refused: it knows better, or cannot now
            self.presence.contact(to)
            if reply:
                try:
                    self.answered(of, to, decode_any(reply, Promise, Certificate))
                except RemoteProtocolError as error:
                    self.rejected(to, error)
            return True
        return False
