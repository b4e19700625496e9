"""Sending a round's control messages: straight, or passed on by others, and again if need be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from blake3 import blake3

from gossip.membership.members import Membership
from gossip.membership.presence import Presence
from gossip.plans.rules import PATIENCE_S
from gossip.rounds.round import Round
from gossip.rounds.spreading import SMALL, legs
from gossip.wiring import Wiring
from protocols.errors import (
    RemoteProtocolError,
    RemoteRefused,
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
NOTES = 16  # of one author that are passed on in a round: a plan and votes for each of some ballots


@dataclass
class ControlSender:
    """What one chain sends.

    ``answered`` gets the replies that are messages, and may raise RemoteProtocolError; ``refused``
    is told who has refused one.
    """

    wiring: Wiring
    presence: Presence
    membership: Membership
    answered: Callable[[Round, PeerId, Promise | Certificate], None]
    rejected: Callable[[PeerId, RemoteProtocolError], None]
    refused: Callable[[Round, PeerId], None]
    _passed_in: int = -1  # the round
    _passed: dict[PeerId, dict[bytes, set[PeerId]]] = field(default_factory=dict)  # to whom

    def tell(self, of: Round, leg: Sequence[PeerId], message: Control) -> None:
        """Tell the first of these, who passes it on to the others; else tell these as well."""
        first, *rest = leg

        async def go() -> None:
            note = replace(message, to=tuple(rest)) if isinstance(message, Passed) else message
            if not await self._send(of, first, note.encode()):
                for peer in rest:
                    self.tell(of, (peer,), message)

        self.wiring.spawn(go())

    def pass_on(self, of: Round, office: Sequence[PeerId], note: Passed) -> bool:
        """Tell those in office whom a note is for, each once; False: that is for its author to do.

        For one author that is bounded: by the length of a leg, and by its notes in a round.
        """
        if self._passed_in != of.place.round:
            self._passed_in, self._passed = of.place.round, {}
        others = set(office) - {self.wiring.identity.peer_id, note.author}
        to = [peer for peer in dict.fromkeys(note.to) if peer in others]
        if not to:
            return True
        notes = self._passed.setdefault(note.author, {})
        name = blake3(note.body).digest()
        most = max(SMALL, len(legs(office)[0]))
        if len(to) > most or (name not in notes and len(notes) >= NOTES):
            return False
        told = notes.setdefault(name, set())
        body = replace(note, to=()).encode()  # once for all of them: it may be long

        async def tell(peer: PeerId) -> None:
            await self._send(of, peer, body)

        for peer in to:
            if peer not in told:
                told.add(peer)
                self.wiring.spawn(tell(peer))
        return True

    async def _send(self, of: Round, to: PeerId, body: bytes) -> bool:
        """Whether it was taken."""
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
            except RemoteRefused as error:
                if error.code != "unknown":  # else it is no member, whatever it announces
                    self.refused(of, to)
                return False  # it knows better, or cannot now
            except TransportError:
                return False
            self.presence.contact(to)
            if reply:
                try:
                    self.answered(of, to, decode_any(reply, Promise, Certificate))
                except RemoteProtocolError as error:
                    self.rejected(to, error)
            return True
        return False
