"""Handing on a round's plan to members that have not received it.

A leader may die, or its link may fail, when its plan has reached some members and not others. To
those who have it the others would seem to deliver nothing. They would be left out of the next plan,
and much would be sent again. So a leader signs its plan, and whoever adopts it keeps it as signed.
Whoever hears something from a member that no plan it knows explains asks that member for the plan.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace

from gossip.chain.chain import Chain
from gossip.plans.rules import PATIENCE_S
from protocols.asking import ask
from protocols.errors import RemoteProtocolError, RemoteRefused, TransportError
from protocols.identity import PeerId
from protocols.messages import Passed, Plan, PlanRequest, TransferHeader


def explains(
    plan: Plan | None, bases: Set[bytes], transfer: TransferHeader, ends: set[PeerId]
) -> bool:
    """Whether a plan asks for a transfer between these two ``ends``.

    One of them owns the part, or relays it where the plan has groups. ``bases`` are the plan's
    basis, and what goes through its groups.
    """
    return plan is not None and any(
        (part.start, part.stop) == (transfer.start, transfer.stop)
        and (part.owner in ends or bool(plan.groups))
        and transfer.basis in bases
        for part in plan.parts
    )


@dataclass
class Handing:
    """Asks others for their plan, and answers such questions. ``taken`` gets the plan handed on,
    and raises RemoteProtocolError where it is not what was asked for.
    """

    taken: Callable[[Chain, PeerId, Passed], object]
    rejected: Callable[[PeerId, RemoteProtocolError], None]
    _asking: set[tuple[int, PeerId]] = field(default_factory=set)  # fragment, and whom

    def answer(self, chain: Chain, sender: PeerId, request: PlanRequest) -> Passed:
        """The plan that this node works by. Raises RemoteRefused where there is none."""
        if sender not in chain.replica.roster:
            raise RemoteRefused("stranger", "not a member of this round")
        note = chain.signed_plan
        if note is None or note.round != request.round or chain.round.place.round != request.round:
            raise RemoteRefused("unknown", "no plan of this round is known here")
        return replace(note, to=())

    def wonder(self, chain: Chain, sender: PeerId, known: Callable[[], bool]) -> None:
        """A member goes by a plan that is not ``known`` here: ask for it, if it does not come."""
        at = (chain.fragment, sender)
        if known() or at in self._asking or sender not in chain.replica.roster:
            return
        self._asking.add(at)
        chain.wiring.spawn(self._ask(chain, sender, known, at))

    async def _ask(
        self, chain: Chain, sender: PeerId, known: Callable[[], bool], at: tuple[int, PeerId]
    ) -> None:
        of = chain.round
        request, transport = PlanRequest(chain.fragment, of.place.round), chain.wiring.transport
        patience = chain.membership.answer_s(sender, PATIENCE_S)
        try:
            await asyncio.sleep(of.doubt_s)  # it may be on its way, and only slower
            if of is not chain.round or known():
                return
            note = await ask(transport, sender, "plan", request, Passed, timeout=patience)
            if of is chain.round:
                self.taken(chain, sender, note)
        except RemoteProtocolError as error:
            self.rejected(sender, error)
        except TransportError:
            return  # whoever brings something next is asked as well
        finally:
            self._asking.discard(at)
