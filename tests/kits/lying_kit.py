"""Members that lie: whatever one sends is changed before it is signed, as drawn from a seed.

A liar is a real member on a transport that changes what it says (:class:`LyingTransport`): messages
before they are signed, answers, bodies; each anew, so that two receivers hear two things. What is
signed and sent in another's name stays as that one has signed it, or breaks.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgpack

from gossip.plans.certificate import sign_vote
from gossip.plans.weighing import sign_gram
from gossip.rounds.spreading import passed
from protocols.codecs import RangeCodec
from protocols.envelope import seal
from protocols.errors import (
    LocalProtocolError,
    ProtocolError,
)
from protocols.identity import Identity, PeerId
from protocols.messages import (
    Announce,
    Certificate,
    Envelope,
    Gram,
    Handover,
    Outcome,
    Passed,
    Plan,
    Prepare,
    Promise,
    Suspect,
    Vote,
    Votes,
)
from protocols.wire import Message, Struct, decode_any

INTEGERS = (0, -1, 1, 2**31, 2**62, 2**63 - 1, 2**64 - 1, -(2**63))
FLOATS = (0.0, -1.0, math.nan, math.inf, -math.inf, 1e-9, 1e9, 1e30, 1.7e308)
WORDS = (
    "",
    "x",
    "fp32",
    "int4",
    "int8",
    "joining",
    "active",
    "leaving",
    "island",
    "server",
    "seed",
)
CLAIMS = (  # of its own worth and speed
    "tokens", "steps", "weight", "eta", "norm", "upload", "download", "tokens_per_second",
    "steps_per_second", "round_trip", "behind_s", "wanted_steps", "work", "round", "epoch",
)  # fmt: skip
DEEP: dict[type[Struct], tuple[str, ...]] = {  # else it would mostly be of another place
    Plan: (
        "codec", "contributors", "parts", "next_roster", "expected_s", "patience_s", "draft",
        "grams", "groups", "servers",
    ),
    Certificate: ("outcome", "votes", "roster", "epoch"),
    Outcome: ("codec", "contributors", "parts", "next_roster", "work", "servers"),
    Promise: ("voted", "held", "epoch", "ballot"),
    Handover: ("roster", "next_roster", "work", "content", "votes"),
}  # fmt: skip
REFUSALS = ("again", "busy", "late", "early", "stranger", "doubted", "abstaining", "behind", "gone")
WORDED = ("field", "body", "slander", "twice")
KEPT = 40  # messages to be said again
ABOUT = {  # names of what it lies about; "round" is told apart by what is said
    "itself": ("announce", "known", "re: known"),
    "plans": ("Passed", "re: plan"),
    "votes": ("Vote", "Suspect", "Gram"),
    "promises": ("Prepare", "re: round"),
    "bodies": ("slice", "merged", "part", "re: slice", "re: merged", "re: part"),
    "the past": ("re: certificates", "re: handovers", "re: state", "chunk", "part", "re: round"),
}
LETTERS = ("letter", "re: letter")  # where islands meet in pairs
EVERYTHING = tuple({name: None for names in ABOUT.values() for name in names})


@dataclass(frozen=True)
class Raw:
    """A message that no node would encode."""

    data: bytes
    fragment: int = 0
    round: int = 0

    def encode(self) -> bytes:
        return self.data


def raw(message: Message) -> bytes:
    """The bytes of a message, whatever stands in it."""

    def packed(value: Any) -> Any:
        if isinstance(value, Struct):
            return [packed(getattr(value, name)) for name in type(value).codecs()]
        return [packed(one) for one in value] if isinstance(value, tuple) else value

    return msgpack.packb([message.KIND, message.VERSION, *packed(message)])  # type: ignore[no-any-return]


def decoded(body: bytes) -> Message | None:
    """A message of whatever kind; None if it is none."""
    at = 1 if body and body[0] & 0xF0 == 0x90 else 3
    cls = Message.registry.get(body[at]) if at < len(body) else None
    try:
        return None if cls is None else cls.decode(body)
    except ProtocolError:
        return None


@dataclass
class Liar:
    """Who lies, how often, and about what; ``names`` are whom it can name."""

    identity: Identity
    run: bytes
    codec: RangeCodec
    dice: random.Random
    chance: float
    about: Sequence[str]
    two_faced: bool  # signs two results and two votes, of which one excludes the other
    worded: bool  # does all that is asked of it, and says something else
    alike: bool  # tells everybody the same
    names: Callable[[], Sequence[PeerId]]
    lies: bool = True
    told: dict[bytes, bytes] = field(default_factory=dict)  # the newest: what for what
    said: dict[str, deque[bytes]] = field(default_factory=dict)  # and heard, by name

    made_up: Callable[[str, bytes], bytes | None] = lambda name, body: None  # to be answered
    instead: Callable[[str, bytes], bytes] = lambda name, body: body  # of what its node calls

    @property
    def me(self) -> PeerId:
        return self.identity.peer_id

    def tempted(self, name: str, body: bytes = b"") -> bool:
        what = type(decoded(body)).__name__ if name == "round" else name
        if not self.lies or what not in self.about:
            return False
        # who is not believed to be there has no say in anything else
        return self.dice.random() < self.chance * (0.3 if name in ABOUT["itself"] else 1.0)

    def way(self, *kinds: str) -> str:
        """How it lies this time."""
        found = [kind for kind in kinds if kind in WORDED] if self.worded else kinds
        return self.dice.choice(found or kinds)

    def note(self, name: str, body: bytes) -> None:
        self.said.setdefault(name, deque(maxlen=KEPT)).append(body)

    def again(self, name: str) -> bytes:
        """Something that was said before, by itself or to it."""
        return self.dice.choice(self.said[name])

    # --- messages --------------------------------------------------------------------------------

    def say(self, body: bytes) -> bytes:
        """What it says instead: the same to all, or to each another."""
        if not self.alike or self.dice.random() < 0.2:
            return self.another(body)
        if body not in self.told:
            self.told = {body: self.another(body)}
        return self.told[body]

    def another(self, body: bytes) -> bytes:
        """Something else, signed again where it signs it."""
        message = decoded(body)
        if message is None:
            return self.changed(body, "")  # type: ignore[no-any-return]
        try:
            return self.encoded(self.lie(message))
        except (OverflowError, ProtocolError):  # not even to be signed
            return self.changed(body, "")  # type: ignore[no-any-return]

    def encoded(self, message: Message | Raw) -> bytes:
        try:
            return message.encode()
        except LocalProtocolError:
            return message.data if isinstance(message, Raw) else raw(message)

    def lie(self, message: Message) -> Message | Raw:
        match message:
            case Envelope(signer=self.me) if self.dice.random() < 0.97:
                body = self.encoded(self.lie(Announce.decode(message.body)))
                sealed = seal(
                    self.identity, cast(Message, Raw(body)), purpose=message.purpose,
                    run=message.run, expires=message.expires, sequence=message.sequence,
                )  # fmt: skip
                return Raw(sealed)
            case Passed(author=self.me) if self.dice.random() < 0.9:
                said = self.lie(decode_any(message.body, Plan, Votes))
                whole = cast(Plan, Raw(self.encoded(said), message.fragment, message.round))
                return dataclasses.replace(passed(self.identity, self.run, whole), to=message.to)
            case Announce() if self.dice.random() < 0.9:
                name = self.dice.choice(CLAIMS)
                claim = self.changed(getattr(message, name), name)
                return dataclasses.replace(message, **{name: claim})
            case Vote():
                return self.vote(message)
            case Promise() if not self.two_faced:
                held = self.listed(message.held)
                return dataclasses.replace(message, held=held)
        for _ in range(self.dice.choice([1, 1, 1, 2, 5])):
            message = self.changed(message, "")
        if isinstance(message, Gram):
            return sign_gram(self.identity, self.run, message)
        if isinstance(message, Plan):
            return self.signed_again(message)
        return message

    def vote(self, vote: Vote) -> Vote:
        other = self.changed(vote, "")
        try:
            return sign_vote(
                self.identity, other.run, other.fragment, other.round, other.previous,
                (other.epoch, other.ballot), other.outcome,
            )  # fmt: skip
        except ProtocolError:
            return other  # type: ignore[no-any-return]

    def signed_again(self, plan: Plan) -> Plan:
        """Grams, and results where it signs any, of its own."""
        try:
            grams = tuple(
                sign_gram(self.identity, self.run, gram) if gram.owner == self.me else gram
                for gram in plan.grams
            )
            return dataclasses.replace(plan, grams=grams)
        except ProtocolError:
            return plan

    def changed(self, value: Any, name: str) -> Any:
        """Something in it is another."""
        dice = self.dice
        match value:
            case Struct():
                deep = DEEP.get(type(value), ()) if dice.random() < 0.8 else ()
                part = dice.choice(deep or tuple(type(value).codecs()))
                other: Any = value
                return dataclasses.replace(
                    other, **{part: self.changed(getattr(value, part), part)}
                )
            case tuple():
                if not value or dice.random() < 0.3:
                    return self.listed(value)
                at = dice.randrange(len(value))
                return (*value[:at], self.changed(value[at], name), *value[at + 1 :])
            case bool():
                return not value
            case int():
                return dice.choice([value + 1, value - 1, *INTEGERS])
            case float():
                return dice.choice([-value, value * 1.5, value / 3, *FLOATS])
            case str():
                made_up = Identity.from_seed(dice.randbytes(32)).peer_id
                names = [*self.names(), made_up]
                return dice.choice([dice.choice(names), dice.choice(names), dice.choice(WORDS)])
            case bytes():
                at = dice.randrange(len(value) + 1)
                flipped = value[:at] + bytes([dice.randrange(256)]) + value[at + 1 :]
                return dice.choice([flipped, value[:at], b"", dice.randbytes(32)])
        return value

    def listed(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        """Shorter, repeated or shuffled."""
        items = list(value)
        match self.dice.choice(["shorter", "repeated", "shuffled", "none"]):
            case "shorter" if items:
                del items[self.dice.randrange(len(items))]
            case "repeated":
                items = items * 2
            case "shuffled":
                self.dice.shuffle(items)
            case "none":
                items = []
        return tuple(items)

    def slander(self, body: bytes) -> bytes | None:
        """That others do not deliver, or a candidacy out of turn; None if there is no cue."""
        cue = decoded(body)
        if isinstance(cue, Passed):
            cue = decoded(cue.body)
        if not isinstance(cue, Plan | Vote | Prepare):
            return None
        at = (cue.fragment, cue.round, cue.epoch, cue.ballot)
        if isinstance(cue, Plan) and self.dice.random() < 0.3:
            ballot = self.dice.randrange(3 * len(cue.roster))
            asked = Prepare(*at[:3], ballot, cue.previous, cue.roster)
            return asked.encode()
        names = list(self.names())
        return Suspect(
            *at, tuple(self.dice.sample(names, self.dice.randint(1, len(names))))
        ).encode()
