"""The exchanges of one fragment in pairs: carries out what :mod:`gossip.pairs.wandering` instructs.

What :class:`gossip.chain.chain.Chain` is for certified rounds, but there is no chain and nothing to
agree on. After a snapshot the parameters are encoded once for each exchange
(:mod:`gossip.pairs.own_letters`), sent as a letter (:mod:`gossip.pairs.letters`), mixed with those
that came, and at the end the replica takes its outer step. The trainer goes on with its inner steps
meanwhile. What the fragments share is in :mod:`gossip.pairs.swarm`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from gossip.catchup.lineage import Lineage
from gossip.common import FragmentPresence
from gossip.membership.members import Membership
from gossip.membership.presence import Presence
from gossip.pairs.account import Account
from gossip.pairs.letter_times import LetterTerms, LetterTimes
from gossip.pairs.letters import Letter, Letters, Mail
from gossip.pairs.meeting import Drop, Finish, Habits, Instruction, Post, Take, Taken
from gossip.pairs.own_letters import Own, OwnLetters
from gossip.pairs.postman import Postman
from gossip.pairs.replica import PairReplica
from gossip.pairs.rounded import Acquaintance, Rounded, RoundLog
from gossip.pairs.wandering import Wandering
from gossip.place import Place
from gossip.plans.ladder import Chosen
from gossip.plans.ramp import ramp
from gossip.wiring import Wiring
from protocols.errors import RemoteProtocolError
from protocols.identity import PeerId
from protocols.messages import Announce

SPENT = (
    "nearly all push-sum weight of this island is given away, and nothing has come back: it gives "
    "no more until something does. Can others reach it? (`node doctor`)"
)
LEAST_HEAVIEST = 8.0  # weight of a share that is taken, however few islands are known
SPARE = 6  # letters that have room beside those of one round's exchanges


@dataclass
class Roamer(FragmentPresence):
    """This node's exchanges of one fragment. :meth:`run` runs until cancelled.

    ``more(distance, progress, lost)`` says how many exchanges to add to a round, from mean squares
    of an element. ``applied`` is told of every round that is through.
    """

    wiring: Wiring
    replica: PairReplica
    presence: Presence
    habits: Habits
    size: int  # elements of the fragment
    acquaintance: Acquaintance
    terms: LetterTerms
    neighbours: int = 1
    more: Callable[[float, float, float], int] = lambda distance, progress, lost: 0
    applied: Callable[[Rounded], None] = lambda rounded: None
    rejected: Callable[[PeerId, RemoteProtocolError], None] = lambda peer, error: None
    notice: Callable[[str], None] = lambda text: None
    newcomer: bool = False  # its state is an older one of somebody else's
    account: Account | None = None  # of push-sum's weight
    fragment: int = field(init=False)
    membership: Membership = field(init=False)  # who else is there, seen from this fragment
    core: Wandering = field(init=False)
    letters: Letters = field(init=False)
    postman: Postman = field(init=False)
    own: OwnLetters = field(init=False)
    _log: RoundLog = field(init=False)
    _norm: float = 0.0
    _rounds: int = 0  # that are through
    _extra: int = 0
    _ours: bool = True
    _spent: bool = False  # it has been told that there is no weight left to give away
    _still: asyncio.Lock = field(default_factory=asyncio.Lock)
    _kick: asyncio.Event = field(default_factory=asyncio.Event)
    _beginning: bool = False  # takes the snapshot over
    _leaving: bool = False  # begins no round any more
    _sending: int = 0  # letters on their way for the first time
    _sent: asyncio.Event = field(default_factory=asyncio.Event)  # something has become of one

    def __post_init__(self) -> None:
        place = self.replica.place
        self.fragment = place.fragment
        self.membership = self.presence.membership.seen_from(self.fragment)
        self.core = Wandering(self.me, self.habits, self.membership, place.round)
        mail = Mail(
            welcome=self._welcome,
            coming=lambda peer: self.core.on_coming(peer, self.now()),
            broken=lambda peer: self._carry_soon(self.core.on_broken(peer, self.now())),
            arrived=self._arrived,
            dropped=self.core.on_dropped,
            rejected=self.rejected,
            counts=self.core.counts,
        )
        room = 2 * self.neighbours + SPARE
        self.letters = Letters(
            self.wiring,
            self.size,
            mail,
            room,
            keep_all=self.habits.one_way,
            fragment=self.fragment,
            codecs=self.terms.codecs,
            longest=lambda: self.core.patience.longest_s,
            heaviest=self._heaviest,
            account=self.account,
        )
        self.postman = Postman(
            self.wiring,
            self.presence,
            self.membership,
            self.core,
            self.letters,
            self.replica.take_back,
            self._carry_soon,
            self.notice,
        )
        if self.account is not None:
            self.core.owed |= self.account.balance.given.keys()
        size_as, size = self.wiring.codec.size_as, self.size
        times = LetterTimes(self.terms, lambda name: size_as(name, 0, size))
        self.own = OwnLetters(self.replica, self.membership, self.core, times)
        self._log = RoundLog(self.letters.transfers)

    # --- for whoever owns this -------------------------------------------------------------------

    @property
    def lineage(self) -> Lineage:
        """Nobody has handed office to anybody."""
        return Lineage(self.wiring.run, (self.me,))

    @property
    def _standing(self) -> float:
        """What a letter of this island's counts, beside a share's own weight."""
        ramped = self.newcomer and not self.habits.one_way
        return ramp(self._rounds) if ramped else 1.0

    @property
    def under_way(self) -> bool:
        """Whether an exchange is under way."""
        return not self.core.resting

    @property
    def contributes(self) -> bool:
        """Never: copies are sent, so the snapshot may be overwritten, by another trainer too."""
        return False

    @property
    def has_work(self) -> bool:
        """Whether an outer step is to come that goes towards the snapshot, whoever trains by then.

        It was copied, or is being copied, when the round began.
        """
        return self._beginning or self.under_way

    @property
    def _meetings(self) -> int:
        """Exchanges of a round, or those who get a share in it."""
        return self.neighbours + self._extra

    @property
    def exchanges(self) -> int:
        """Exchanges of a round, one after the other; 1 for push-sum, whose shares leave at once."""
        return 1 if self.habits.one_way else self._meetings

    @property
    def chosen(self) -> Chosen | None:
        """How the codec of the newest letter was chosen; None where the run has only one."""
        return self.own.times.chosen

    def timed(self) -> list[float]:
        """Seconds of letters on their way in a round, by each exchange since it was last asked."""
        timed, self._log.timed = self._log.timed, []
        return [self.exchanges * seconds for seconds in timed]

    def note(self, **changes: Any) -> None:
        """Change what this node says of itself; who says when it is ready next is training."""
        if changes.get("eta") and changes.get("ready") is not False:
            self.core.patience.training(self.now())
        super().note(**changes)

    def update(self, **changes: Any) -> None:
        """Change what this node says of itself, and say it at once; ``ready`` begins a round."""
        if changes.get("ready") is False:
            self._ours = False  # the trainer is another one now
        if changes.get("ready") and not (self._beginning or self.under_way or self._leaving):
            self._beginning = True
            if self.status.status != "leaving":
                changes["status"] = "active"
            self._norm = changes.get("norm", 0.0)
            self.wiring.spawn(self._begin())
        self.note(**changes)
        self.presence.tell()

    def wait_for_all(self) -> None:
        """Nobody has to catch up with others here."""

    @property
    def in_doubt(self) -> set[PeerId]:
        """Who may have a share of this island's by now, or not."""
        return self.core.in_doubt

    async def settle(self) -> None:
        """Give and take no more shares, and wait until it is known of each whether it has come.

        For a node about to save its weight and leave. Nothing to do where letters are answered.
        After a cancellation, too, no share is taken in: the weight to be saved would lack it.
        """
        self._leaving = self.habits.one_way
        try:
            if self._leaving:
                await self.letters.last()
            islands = self.membership.islands  # nobody else could answer
            while self._leaving and (
                self._beginning or self._sending or self.core.owed & islands.keys()
            ):
                self._sent.clear()
                await self._sent.wait()
        finally:
            if self._leaving:
                self.letters.close()

    def announced_place(self) -> Place:
        """Where this island stands, with the number of the round that is under way."""
        place = self.replica.place
        return place if self.core.resting else replace(place, round=self.core.round)

    def roster(self) -> tuple[PeerId, ...]:
        """Everybody who trains, this island included, in one order for all."""
        return tuple(sorted({self.me, *(a.peer for a in self.core.others(self.now()))}))

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """No outer step is taken while this is held: the replica can be read as a whole."""
        async with self._still:
            yield

    def on_news(self, announce: Announce) -> None:
        """A peer announced something: perhaps it is not to be waited for any more."""
        self._kick.set()

    def kick(self) -> None:
        """Something has changed: check what is due."""
        self._kick.set()

    async def run(self) -> None:
        """Do what is due, until cancelled."""
        self.postman.resume()
        while True:
            now = self.now()
            await self._carry(self.core.tick(now))
            wake = self.core.wake_at(now)
            self._kick.clear()
            try:
                async with asyncio.timeout(max(0.01, wake - now)):
                    await self._kick.wait()
            except TimeoutError:
                self.presence.woke_late(wake)

    # --- instructions ----------------------------------------------------------------------------

    async def _begin(self) -> None:
        self._ours = True
        await self.replica.start()
        self._beginning, now = False, self.now()
        self._sent.set()  # if any
        self._log.begin(now)
        meetings = self._meetings if self.replica.gives else 0
        if not (meetings or self._spent):
            self._spent = True
            self.notice(SPENT)
        place = self.replica.place.round
        instructions = self.core.begin(place, meetings, now)
        if leap := self.core.round - place:  # else a sketch of just now would seem to be old
            self.note(sketch_round=self.status.sketch_round + leap)
        await self._carry(instructions)
        self.presence.tell()  # the round may have another number now

    def _carry_soon(self, instructions: list[Instruction]) -> None:
        if instructions:
            self._claim(instructions)
            self.wiring.spawn(self._carry(instructions))
        self._kick.set()
        self._sent.set()

    async def _carry(self, instructions: list[Instruction]) -> None:
        while instructions:
            self._claim(instructions)
            following: list[Instruction] = []
            if posts := [one for one in instructions if isinstance(one, Post)]:
                await self._post(posts)  # first: what is mixed in moves what they tell of
            for instruction in instructions:
                match instruction:
                    case Take(letters):
                        following += await self._take(letters)
                    case Drop(letters):
                        for stamp in letters:
                            self.letters.take(stamp)
                    case Finish(round_):
                        await self._finish(round_)
            instructions = following

    def _claim(self, instructions: Sequence[Instruction]) -> None:
        """What is to be taken stays: its answer is on its way before, and takes seconds to make."""
        for instruction in instructions:
            if isinstance(instruction, Take):
                self.letters.claim(one.stamp for one in instruction.letters)

    async def _post(self, posts: Sequence[Post]) -> None:
        self._sending += 1
        own = await self.own.to(posts, self.status, self.exchanges)
        self._log.codecs[posts[0].exchange] = own.choice.codec
        self.wiring.spawn(self._send_all(posts, own))

    async def _send_all(self, posts: Sequence[Post], own: Own) -> None:
        """Send one letter to all of them at once."""
        began = self.now()
        sent = await self.postman.send_all(posts, own.body, own.weight * self._standing)
        took = self.now() - began
        if sent.arrived or sent.overdue:  # which says that it takes longer still
            self.own.timed(own, posts, took, self.now())
            if not any(post.awaited for post in posts):
                self._log.timed.append(took)
        self._sending -= 1
        self._sent.set()

    async def _take(self, taken: Sequence[Taken]) -> list[Instruction]:
        letters = [
            (letter, self.own.body(one.mine))
            for one in taken
            if (letter := self.letters.take(one.stamp))
        ]
        letters.sort(key=lambda one: one[0].stamp.sender == self.me)  # the first tells how far
        difference = await self.replica.mix(letters) if letters else None
        self.own.ended()
        self._log.ended(self.core.met[-1], difference)
        return self.core.on_taken(self.now())

    async def _finish(self, round_: int) -> None:
        exchanged = self._log.through(self.core.met)
        said = [*self.core.others(self.now()), self.status]
        mixed = [peer for one in exchanged for peer in one.met.mixed]
        spread, after = self.acquaintance.left(said, self.me, self.fragment, mixed)
        async with self._still:
            await self.replica.finish(round_, ours=self._ours)
        self.own.ended()
        self.core.on_finished()
        progress = self._norm**2 / self.size
        lost = self.replica.lost
        self._extra = self.more(spread.square / self.acquaintance.elements, progress, lost)
        ended = self.now()
        self._rounds += 1
        self.note(ready=False)
        self.applied(
            Rounded(
                self.fragment,
                round_,
                self._log.began,
                ended,
                exchanged,
                spread,
                after,
                self._meetings,
                progress,
                lost,
            )
        )
        self.presence.tell()

    # --- news ------------------------------------------------------------------------------------

    def _heaviest(self) -> float:
        """What a letter may weigh: a share is half of what all weigh together at most.

        That is about as much as there are islands; there is room for twice that, since some may not
        be known yet, or have gone and left their weight here. Letters that are answered weigh 1.
        """
        known = 1 + len(self.membership.islands)
        return max(LEAST_HEAVIEST, float(known)) if self.habits.one_way else 1.0

    def _welcome(self, peer: PeerId) -> bool:
        self.presence.contact(peer)
        said = self.membership.announcement(peer)
        return said is not None and said.role == "island"

    def _arrived(self, letter: Letter) -> None:
        self._carry_soon(self.core.on_letter(letter.stamp, self.now()))
