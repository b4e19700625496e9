"""What a plan, a part's result and an outcome must look like, whoever sends them.

Everything that is indexed, allocated or divided by later is checked here once. All functions
raise :class:`~protocols.errors.RemoteProtocolError` (most :class:`Malformed`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gossip.place import Place
from gossip.plans.certificate import basis_of, check_result, work_after
from gossip.plans.grouping import check_groups
from gossip.plans.mix import MAX_NORM, MAX_SCALE, MEAN, Mix
from gossip.plans.weighing import check_scales
from protocols.bounds import MAX_ROSTER
from protocols.counts import RUN_BYTES, runs_of
from protocols.errors import Malformed, Stale
from protocols.identity import PeerId
from protocols.messages import Contributor, Outcome, Part, PartResult, Plan

MAX_TOKENS = 2**40  # of one island in one round
MAX_EXPECTED_S = 6 * 3600.0
MAX_PATIENCE_S = 1800.0
MAX_KNOWN = 4096
# what an outcome may take, at most: apart from the following, for each contributor, and for each
# part's result but for its counts, which are a run for each contributor where all differ
OUTCOME_BYTES, CONTRIBUTOR_BYTES, RESULT_BYTES = 32 * 1024, 110, 320

PartKey = tuple[int, int, PeerId, bytes]  # start, stop, owner, basis


@dataclass(frozen=True)
class Shape:
    """The vector that a run's rounds merge, and how."""

    size: int  # elements
    codecs: tuple[str, ...]  # that a round may have
    mix: Mix = MEAN
    grouped: bool = False  # whether plans may have groups
    most_tokens: int = MAX_TOKENS  # of one contribution


def check_place(plan: Plan, place: Place) -> None:
    """Raise :class:`Stale` for a plan of another round, or of another side of a fork."""
    if (plan.fragment, plan.round) != (place.fragment, place.round):
        raise Stale("a plan for another round")
    if (plan.previous, plan.state) != (place.previous, place.state):
        raise Stale("the plan builds on another state")


def check_plan(
    plan: Plan, place: Place, shape: Shape, roster: Sequence[PeerId], known: VerifiedResults
) -> None:
    """A plan that is for the round at ``place``, whose roster in office is ``roster``.

    Results that are in ``known`` were verified before.
    """
    if not (0 <= plan.expected_s <= MAX_EXPECTED_S and 0 < plan.patience_s <= MAX_PATIENCE_S):
        raise Malformed("a plan that would wait for ever, or not at all")
    _check_content(plan, shape, roster)
    check_groups(plan, roster, shape.grouped, shape.mix)
    check_scales(plan, place.run, shape.mix, roster)
    basis = basis_of(plan.codec, plan.contributors)
    for part in plan.parts:
        if part.result is None:
            if part.owner not in plan.roster:
                raise Malformed("a part for somebody outside the roster")
        else:
            if (part.result.start, part.result.stop) != (part.start, part.stop):
                raise Malformed("a result for another range")
            _check_merged_part(part.result, place, shape, roster, plan, basis, known)


def check_outcome(
    outcome: Outcome,
    place: Place,
    shape: Shape,
    roster: Sequence[PeerId],
    known: VerifiedResults | None = None,
) -> None:
    """An outcome of the round at ``place``; with ``known``, signatures are verified as well."""
    if (outcome.fragment, outcome.round, outcome.previous) != (
        place.fragment,
        place.round,
        place.previous,
    ):
        raise Stale("an outcome of another round")
    if outcome.state != place.state:
        raise Stale("the outcome builds on another state")
    _check_content(outcome, shape, roster)
    basis = basis_of(outcome.codec, outcome.contributors)
    for result in outcome.parts:
        _check_merged_part(result, place, shape, roster, outcome, basis, known)
    if outcome.work != work_after(place.work, outcome.contributors, outcome.parts):
        raise Malformed("the work is not the sum of the tokens")


def _check_content(what: Plan | Outcome, shape: Shape, roster: Sequence[PeerId]) -> None:
    """What holds for a plan and for its outcome alike."""
    if what.codec not in shape.codecs:
        raise Malformed("a codec that the run does not allow")
    check_contributors(what.contributors, roster, shape.most_tokens)
    if not 0 <= what.servers <= len(roster) - sum(c.tokens > 0 for c in what.contributors):
        raise Malformed("more servers than members without work, or fewer than none")
    shape.mix.check(what.contributors)
    _check_office(what.next_roster)
    _check_cover(what.parts, shape.size)
    _check_size(what)


def check_contributors(
    contributors: Sequence[Contributor], roster: Iterable[PeerId], most_tokens: int
) -> None:
    """Contributors are distinct members with a weight from 0 to their tokens, norm and scale."""
    _check_names([c.peer for c in contributors], "the contributors")
    if not {c.peer for c in contributors} <= set(roster):
        raise Malformed("a contribution of a stranger")
    for c in contributors:
        if not 0 <= c.weight <= c.tokens <= most_tokens:
            raise Malformed("a weight beyond the tokens, or more tokens than there can be")
        if not (0 <= c.norm <= MAX_NORM and 0 <= c.scale <= MAX_SCALE):
            raise Malformed("a norm or a scale beyond all bounds")


class VerifiedResults:
    """Results whose signatures were verified: each costs a tenth of a millisecond."""

    def __init__(self) -> None:
        self._results: dict[PartKey, PartResult] = {}

    def verify(self, run: bytes, result: PartResult) -> None:
        """Raise BadSignature unless its owner signed it."""
        key = key_of(result)
        if self._results.get(key) != result:
            check_result(run, result)
            if len(self._results) >= MAX_KNOWN:
                self._results.clear()
            self._results[key] = result


def key_of(result: PartResult) -> PartKey:
    """Results of one round are told apart by range, owner, and what they were merged for."""
    return (result.start, result.stop, result.owner, result.basis)


def fixes(plan: Plan | None, result: PartResult) -> bool:
    """Whether a plan takes this part for merged, and with this very outcome.

    Only an owner that was started anew, or lies, has two for one part; then the plan decides.
    """
    return plan is not None and any(
        part.result is not None
        and (key_of(part.result), part.result.digest) == (key_of(result), result.digest)
        for part in plan.parts
    )


def check_statement(result: PartResult, place: Place, shape: Shape) -> None:
    """A result as far as it can be judged without the plan, its signature excepted."""
    if (result.fragment, result.round) != (place.fragment, place.round):
        raise Stale("a result of another round")
    if result.codec not in shape.codecs:
        raise Malformed("a codec that the run does not allow")
    if not 0 <= result.start < result.stop <= shape.size:
        raise Malformed("a part outside the vector")
    if len(result.digest) not in (0, 32) or (result.counts and not result.digest):
        raise Malformed("a result without a digest")
    if any(run.elements > result.stop - result.start for run in runs_of(result.counts)):
        raise Malformed("more elements than the part has")


def _check_merged_part(
    result: PartResult,
    place: Place,
    shape: Shape,
    roster: Sequence[PeerId],
    within: Plan | Outcome,
    basis: bytes,
    known: VerifiedResults | None,
) -> None:
    check_statement(result, place, shape)
    if result.basis != basis:
        raise Malformed("a result that was merged for another plan")
    if result.codec != within.codec:
        raise Malformed("a result in another codec than its round's")
    if any(run.stop > len(within.contributors) for run in runs_of(result.counts)):
        raise Malformed("a result that counts an unknown contributor")
    if result.owner not in roster:
        raise Malformed("a result of a stranger")
    if known is not None:
        known.verify(place.run, result)


def _check_office(roster: Sequence[PeerId]) -> None:
    _check_names(roster, "the next roster")
    if len(roster) > MAX_ROSTER:
        raise Malformed("a next roster that no plan has room for")


def _check_size(within: Plan | Outcome) -> None:
    """What it comes to must fit a message: else nobody could vote on it, or repeat it.

    The bound is the same for a plan, for its outcome, and for the plans of later leaders.
    """
    parts, contributors = len(within.parts), len(within.contributors)
    each = RESULT_BYTES + RUN_BYTES * contributors
    if OUTCOME_BYTES + CONTRIBUTOR_BYTES * contributors + each * parts > Outcome.MAX_BYTES:
        raise Malformed("more parts than can be certified for so many contributors")


def _check_names(names: Sequence[PeerId], what: str) -> None:
    if not names or len(set(names)) != len(names):
        raise Malformed(f"{what}: none, or doubled names")


def _check_cover(parts: Sequence[Part] | Sequence[PartResult], size: int) -> None:
    at = 0
    for part in parts:
        if part.start != at or part.stop <= part.start:
            raise Malformed("the parts do not cover the vector")
        at = part.stop
    if at != size:
        raise Malformed("the parts do not cover the vector")
