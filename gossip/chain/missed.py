"""Whose work recent rounds lacked, and who was left out, as far as a node has seen. Sans-IO.

Plans count less on these: they own no parts for some rounds, relay none, lead last, or are waited
for less.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from gossip.plans.certificate import merged_peers
from protocols.identity import PeerId
from protocols.messages import Outcome

LONGEST = 64  # rounds in which somebody is not counted on, however often that was in vain


@dataclass
class Missed:
    """Fed with every outcome; a member that has just come into office has missed nothing."""

    _last: dict[PeerId, int] = field(default_factory=dict)  # the last round with their work
    _left_out: dict[PeerId, tuple[int, int]] = field(default_factory=dict)  # how often, and when
    # relays: how often, and when
    _mute: dict[PeerId, tuple[int, int]] = field(default_factory=dict)
    _idle: dict[PeerId, tuple[int, int]] = field(default_factory=dict)
    _silent: dict[PeerId, int] = field(default_factory=dict)  # plans that counted on it in vain

    def note(self, outcome: Outcome, owners: Set[PeerId] = frozenset()) -> None:
        """A round is committed; ``owners`` were to merge parts by one plan or another of it."""
        brought = merged_peers(outcome)
        self._last = {
            peer: outcome.round if peer in brought else self._last.get(peer, outcome.round)
            for peer in outcome.next_roster
        }
        failed = owners - {part.owner for part in outcome.parts}
        failed |= {c.peer for c in outcome.contributors if not c.active}
        self._note_left_out(outcome.round, failed, brought)
        for relays in (self._mute, self._idle):
            for peer, since in list(relays.items()):
                # one that has served again for as long as it was not relied on is as any
                if peer not in self._last or outcome.round >= _until(*since, times=2):
                    del relays[peer]
        self._note_silent(outcome, brought)

    def rounds(self, round_: int) -> Mapping[PeerId, int]:
        """Rounds missed by those in office before ``round_``."""
        return {peer: round_ - 1 - last for peer, last in self._last.items()}

    def unreliable(self, round_: int) -> frozenset[PeerId]:
        """Members that are to own no part of a round: it would be waited for in vain.

        One left out of a round, or of its parts, owns none in the next two rounds, if left out once
        more none in the next four, and so on. It comes back sooner if it delivers as a contributor.
        """
        return frozenset(
            peer for peer, (often, last) in self._left_out.items() if round_ <= _until(often, last)
        )

    def note_mute(self, relay: PeerId, round_: int) -> None:
        """A relay has not passed on to this member what it was to in a round."""
        _note_again(self._mute, relay, round_)

    def note_idle(self, relay: PeerId, round_: int) -> None:
        """A relay has done nothing for its group in a round, by what others say among it."""
        _note_again(self._idle, relay, round_)

    def mute(self, round_: int) -> frozenset[PeerId]:
        """Relays that this member does not wait for in a round.

        One that has not passed on a part is not relied on in the next two rounds, if that happens
        again not in the next four, and so on.
        """
        return _those_of(self._mute, round_)

    def idle(self, round_: int) -> frozenset[PeerId]:
        """Relays that this member does not choose when it leads a round: those and idle ones.

        Nothing else follows from what others say: they could make a group exchange everything by
        itself.
        """
        return _those_of(self._mute, round_) | _those_of(self._idle, round_)

    def doubtful(self) -> frozenset[PeerId]:
        """Members that brought nothing to any of the recent rounds whose plans counted on them.

        But not after 1, 2, 4, 8, … such rounds, nor after each :data:`LONGEST`-th: then a member
        gets the time that all others get, since its link may carry its work by now.
        """
        return frozenset(
            peer for peer, often in self._silent.items() if often & (often - 1) and often % LONGEST
        )

    def _note_silent(self, outcome: Outcome, brought: Set[PeerId]) -> None:
        for contributor in outcome.contributors:
            if contributor.active and contributor.peer not in brought:
                self._silent[contributor.peer] = self._silent.get(contributor.peer, 0) + 1
        self._silent = {
            peer: often
            for peer, often in self._silent.items()
            if peer in self._last and peer not in brought
        }

    def _note_left_out(self, round_: int, failed: Set[PeerId], brought: Set[PeerId]) -> None:
        for peer in failed:
            often = self._left_out.get(peer, (0, 0))[0] + 1
            self._left_out[peer] = (min(often, LONGEST), round_)
        self._left_out = {
            peer: since
            for peer, since in self._left_out.items()
            if peer in self._last and (peer in failed or peer not in brought)
        }


def _note_again(relays: dict[PeerId, tuple[int, int]], relay: PeerId, round_: int) -> None:
    often, last = relays.get(relay, (0, -1))
    if last < round_:
        relays[relay] = min(often + 1, LONGEST), round_


def _those_of(relays: Mapping[PeerId, tuple[int, int]], round_: int) -> frozenset[PeerId]:
    return frozenset(peer for peer, since in relays.items() if round_ <= _until(*since))


def _until(often: int, last: int, *, times: int = 1) -> int:
    """The last round in which one is not counted on that has failed so often, and ``last`` then."""
    rounds: int = min(2**often, LONGEST)
    return last + times * rounds
