"""Numbers of batches: given once, read in order, and read off certificates."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gossip_kit import PLACE, SHAPE, counts_of, leader, plan_of
from hypothesis import example, given
from hypothesis import strategies as st
from planning_kit import Identities
from replica_kit import ME, OTHER

from bootstrap.manifest import Manifest
from gossip.plans.certificate import work_after
from gossip.plans.validity import MAX_TOKENS, VerifiedResults, check_plan
from node.island.allotment import Allotment
from node.run_rules import CARRIED, most_tokens
from node.trainer.channel import Applied, StepDone
from node.trainer.numbers import MOST, Numbers, following
from node.trainer.trainer_state import FOLDER, STATE, FragmentState, TrainerState
from protocols.counts import Included
from protocols.errors import Malformed
from protocols.identity import PeerId
from protocols.messages import Contributor, Outcome, PartResult

BATCH, STEPS, ISLANDS = 1000, 16, 4
RUN = {
    "mode": "async",
    "data": {"batch_size": 10, "seq_len": 100, "islands": ISLANDS},
    "rounds": {"inner_steps": STEPS},
}
SIZE = 600


def read(numbers: Numbers, count: int) -> list[int]:
    found = []
    for _ in range(count):
        found.append(numbers.next)
        numbers.take()
    return found


def stepped(*left: int) -> StepDone:
    return StepDone(0, 1, 3.0, 1.0, 0.1, BATCH, 0.1, batches=left)


def test_numbers_are_read_in_the_order_in_which_they_are_given() -> None:
    numbers = Numbers((4, 6))
    numbers.give((10, 12))
    numbers.give((12, 12))
    numbers.give((20, 21))
    assert numbers.stretches == (4, 6, 10, 12, 12, 12, 20, 21)
    assert read(numbers, 3) == [4, 5, 10]
    assert Numbers(numbers.stretches).stretches == numbers.stretches
    assert read(numbers, 4) == [11, 20, 21, 22], "who has none left reads on"
    numbers.give((30, 32))
    assert read(numbers, 2) == [30, 31]


def test_what_follows_is_known_as_far_as_numbers_are_given() -> None:
    stretches = (4, 6, 10, 12)
    found = [following(stretches, number) for number in range(3, 13)]
    assert found == [4, 4, 5, 10, 10, 10, 10, 10, 11, None]


def test_what_an_earlier_life_may_have_read_is_left_out() -> None:
    numbers = Numbers((4, 6, 10, 12))
    numbers.give((20, 22), anew=True)
    assert numbers.stretches == (20, 22)


def test_no_more_stretches_are_kept_than_a_message_has() -> None:
    numbers = Numbers((0, 1))
    for first in range(10, 10 * MOST, 2):
        numbers.give((first, first + 1))
    assert len(numbers.stretches) == 2 * MOST
    for wrong in ((), (1,), (-1, 3)):
        with pytest.raises(ValueError, match="no numbers"):
            Numbers(wrong)


@pytest.mark.parametrize(
    ("tables", "numbered"),
    [
        ({"mode": "async"}, True),
        ({"mode": "async", "rounds": {"staleness": 2}}, True),
        ({"mode": "server", "rounds": {"staleness": 2}}, True),
        ({"mode": "server"}, False),
        ({}, False),
        ({"mode": "eager"}, False),
        ({"mode": "gossip"}, False),
        ({"mode": "push-sum"}, False),
        ({"mode": "async", "script": {"layout": "00" * 32, "parameters": 4}}, False),
    ],
)
def test_batches_are_numbered_where_a_round_is_one_arrival(
    tables: dict[str, Any], numbered: bool
) -> None:
    assert Manifest.model_validate(tables).numbered is numbered


class Chain:
    """Rounds of some islands, each of which has an allotment."""

    def __init__(self, count: int, run: dict[str, Any] = RUN) -> None:
        manifest, self.work, self.round = Manifest.model_validate(run), 0, 0
        self.peers = [ME, OTHER, *(PeerId(bytes([n]) * 32) for n in range(count - 2))]
        self.replicas: list[Any] = [
            SimpleNamespace(me=peer, brought=None, relived=False, place=SimpleNamespace(work=0))
            for peer in self.peers
        ]
        self.islands = [Allotment(manifest, replica) for replica in self.replicas]

    def commit(self, brought: dict[int, int], elements: int = SIZE) -> None:
        """A round with so many tokens by island, of which a part's first elements were merged."""
        contributors = tuple(Contributor(self.peers[n], 1.0, t, True) for n, t in brought.items())
        counts = counts_of(tuple(Included(n, elements) for n in range(len(contributors))))
        part = PartResult(0, 0, 0, SIZE, OTHER, "fp32", bytes(32), counts, bytes(32), b"")
        self.work = work_after(self.work, contributors, [part])
        outcome = Outcome(
            0, self.round, bytes(32), bytes(32), "fp32", contributors, (part,), (), self.work
        )
        self.round += 1
        for number, replica in enumerate(self.replicas):
            replica.place = SimpleNamespace(work=self.work)
            replica.brought = outcome if number in brought else None


ROUNDS = st.lists(
    st.dictionaries(st.integers(0, 3), st.integers(1, 40), min_size=1), min_size=1, max_size=20
)


@given(ROUNDS, st.sampled_from([SIZE, 171]))
def test_numbers_are_given_once_each_and_none_is_left_out(
    rounds: list[dict[int, int]], elements: int
) -> None:
    chain, given_ = Chain(4), list[tuple[int, int]]()
    for brought in rounds:
        chain.commit({n: steps * BATCH for n, steps in brought.items()}, elements)
        for number, island in enumerate(chain.islands):
            more, anew = island.next_batches(number)
            assert not anew
            assert bool(more) is (number in brought)
            if more:
                given_.append((more[0], more[1]))
                if elements == SIZE:
                    assert more[1] - more[0] == brought[number]
            assert island.next_batches(number) == ((), False), "once"
    given_.sort()
    assert given_[0][0] == ISLANDS * STEPS
    assert all(one[1] == other[0] for one, other in itertools.pairwise(given_))
    assert given_[-1][1] == ISLANDS * STEPS - (-chain.work // BATCH)


def test_who_has_had_nothing_merged_begins_by_its_place() -> None:
    chain = Chain(4)
    first = [island.begin(None, slot) for slot, island in enumerate(chain.islands)]
    assert first == [(slot * STEPS, (slot + 1) * STEPS) for slot in range(4)]
    chain.commit({0: 5 * BATCH})
    manifest = Manifest.model_validate(RUN)
    newcomer = Allotment(manifest, chain.replicas[1])
    assert newcomer.begin(None, 1) == (5 + STEPS, 5 + 2 * STEPS)
    # of what has to be made first more is known
    streams = Allotment(manifest, chain.replicas[0], ahead=True)
    assert streams.begin(None, 1) == (5 + 2 * STEPS, 5 + 4 * STEPS)
    assert streams.next_batches(1) == ((2 * ISLANDS * STEPS, 2 * ISLANDS * STEPS + 5), False)


def test_ranks_that_are_started_again_go_on_where_the_others_were() -> None:
    chain = Chain(2)
    island = chain.islands[0]
    island.begin(None, 0)
    island.heard(stepped(STEPS + 3, STEPS))  # it has read on
    chain.commit({0: STEPS * BATCH})
    more, _ = island.next_batches(0)
    assert island.begin(None, 0) == more == (ISLANDS * STEPS, ISLANDS * STEPS + STEPS)
    island.heard(stepped(more[0] + 1, more[1]))
    assert island.begin(None, 0) == (more[0] + 1, more[1])


class Ranks:
    """A trainer that reads numbers, whose reports and commands are under way for a while."""

    def __init__(self, island: Allotment) -> None:
        self.island, self.read = island, list[int]()
        self.numbers = Numbers(island.begin(None, 0))
        self.reports = deque[StepDone | Applied]()
        self.commands = deque[tuple[tuple[int, ...], bool]]()

    def step(self) -> None:
        self.read.append(self.numbers.next)
        self.numbers.take()
        self.reports.append(stepped(*self.numbers.stretches))

    def apply(self) -> None:
        more, anew = self.commands.popleft()
        if more:
            self.numbers.give(more, anew=anew)
        self.reports.append(Applied(0, 0, 0, None, 0, batches=self.numbers.stretches))

    def hear(self, count: int) -> None:
        for _ in range(min(count, len(self.reports))):
            self.island.heard(self.reports.popleft())

    def die(self) -> None:
        """All that they have said is heard, and what they were told last is not done."""
        self.hear(len(self.reports))
        self.commands.clear()
        self.numbers = Numbers(self.island.begin(None, 0))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("step"), st.integers(1, STEPS + 4)),
            st.tuples(st.just("hear"), st.integers(1, 4)),
            st.tuples(st.sampled_from(["round", "relived", "apply", "die"]), st.just(0)),
        ),
        max_size=20,
    )
)
@example([("step", STEPS + 4), ("round", 0), ("die", 0)])  # it reads on, and that is not known yet
@example([("step", 3), ("relived", 0), ("die", 0)])
@example([("round", 0), ("apply", 0), ("step", STEPS + 4), ("die", 0)])
def test_ranks_that_are_killed_between_steps_leave_no_batch_out_and_read_none_twice(
    happens: list[tuple[str, int]],
) -> None:
    """Whenever a round brings some, reports of steps are under way, and so may the numbers be."""
    chain, others = Chain(2), {1: 500 * BATCH}  # more than it can read on between two rounds
    island, given_ = chain.islands[0], list[int]()
    ranks = Ranks(island)
    chain.commit(others)
    for what, count in [*happens, ("apply", 0), ("step", STEPS + 20 * len(happens))]:
        if what == "step":
            for _ in range(count):
                ranks.step()
        elif what == "hear":
            ranks.hear(count)
        elif what == "die":
            ranks.die()
        elif what == "apply" and ranks.commands:
            ranks.apply()
        elif what in ("round", "relived") and not ranks.commands:
            if any(isinstance(report, Applied) for report in ranks.reports):
                continue  # the daemon has yet to hear that the last round is applied
            chain.commit({0: 5 * BATCH} | others)
            chain.replicas[0].relived = what == "relived"
            more, anew = island.next_batches(0)
            ranks.commands.append((more, anew))
            if anew:
                given_.clear()
            given_ += range(*more)
    times = Counter(ranks.read)
    assert [number for number in given_ if times[number] != 1] == []


def test_a_checkpoints_numbers_are_preferred_and_an_earlier_lifes_left_out(tmp_path: Path) -> None:
    standing = TrainerState(
        fragments=(FragmentState(round=0),), round_step=0, step=3, tokens=99, rewarm_from=None,
        optimizer_steps=3, batches=(70, 75, 90, 99),
    )  # fmt: skip
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / STATE).write_text(standing.model_dump_json())
    chain = Chain(2)
    island, replica = chain.islands[0], chain.replicas[0]
    assert island.begin(tmp_path, 0) == standing.batches
    chain.commit({0: STEPS * BATCH})
    replica.relived = True
    more, anew = island.next_batches(0)
    assert anew
    assert island.begin(None, 0) == more
    # what was merged of it since is not known: it begins as a newcomer would
    replica.relived = True
    assert island.next_batches(1) == ((2 * STEPS, 3 * STEPS), True)
    assert island.begin(None, 0) == (2 * STEPS, 3 * STEPS)


def test_a_run_whose_rounds_have_windows_of_their_own_numbers_nothing(tmp_path: Path) -> None:
    chain = Chain(2, RUN | {"mode": "diloco"})
    island = chain.islands[0]
    assert island.begin(None, 0) == ()
    chain.commit({0: BATCH})
    chain.replicas[0].relived = True
    assert island.next_batches(0) == ((), False)
    island.heard(stepped())
    assert island.begin(None, 0) == ()


def test_a_false_count_of_tokens_sends_nobody_far_ahead(identities: Identities) -> None:
    """Numbers follow from the tokens merged: a round's steps, some times over, at the most."""
    manifest = Manifest.model_validate({"name": "numbered", "mode": "async"})
    rounds, data = manifest.rounds, manifest.data
    steps = max(rounds.inner_steps, rounds.most_steps) + rounds.overlap_steps
    most = most_tokens(manifest)
    assert most == CARRIED * steps * data.batch_size * data.seq_len
    members = identities(3)
    plan = plan_of(leader(members), members)
    shape = dataclasses.replace(SHAPE, most_tokens=most)
    check_plan(plan, PLACE, shape, plan.roster, VerifiedResults())
    false = tuple(dataclasses.replace(c, tokens=most + 1) for c in plan.contributors)
    with pytest.raises(Malformed, match="more tokens than there can be"):
        check_plan(
            dataclasses.replace(plan, contributors=false),
            PLACE,
            shape,
            plan.roster,
            VerifiedResults(),
        )
    assert most_tokens(Manifest(name="by-round")) == MAX_TOKENS
