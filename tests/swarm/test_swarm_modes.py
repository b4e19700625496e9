"""Every mode over certified rounds in real processes, with a kill -9 and a resume in each."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mode_kit import Watcher, agree, falls, merged_tokens, slowed, trained_tokens
from swarm_kit import Island, Record, islands, settings, until

from protocols.identity import PeerId
from protocols.messages import Certificate

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

Watch = Callable[[Island], Watcher]


@pytest.fixture
def watch() -> Iterator[Watch]:
    """Certificates of an island as they come."""
    with contextlib.ExitStack() as stack:

        def begin(island: Island) -> Watcher:
            return stack.enter_context(contextlib.closing(Watcher(island)))

        yield begin


SMALL = {"data__batch_size": 4, "eval_every": 1}


def test_asynchronous_rounds_wait_for_nobody_and_use_all_tokens(
    tmp_path: Path, watch: Watch, record_property: Record
) -> None:
    """One of four is 4x slower: it holds nobody up, and all it learns is merged."""
    run = {"mode": "async", "inner_steps": 30, "dynamic_steps": "false", "total_rounds": 5000}
    with islands(tmp_path) as made:
        first = made.new(*settings(**run, **SMALL | {"eval_every": 5}))
        address = first.await_up()
        seen = watch(first)
        swarm = [first, *(made.new("--peers", address) for _ in range(3))]
        slow, victim = swarm[3], swarm[2]

        for island in swarm:
            until(lambda island=island: island.since_start("step"), 150, "it trains", island.tail)
        with slowed(slow, 4):
            before = merged_tokens(seen.rounds())
            fast_before = before[first.peer]
            victim.kill()
            made.come_back(victim)

            def slow_has_merged(times: int) -> bool:
                return merged_tokens(seen.rounds())[slow.peer] - before[slow.peer] >= (
                    times * 30 * 4 * 128
                )

            until(lambda: slow_has_merged(2), 140, "two contributions of the slow", slow.tail)
            after = merged_tokens(seen.rounds())
            share = (after[slow.peer] - before[slow.peer]) / (after[first.peer] - fast_before)
            record_property("slow island's tokens of a fast one's", share)
            trained = trained_tokens(slow)
            in_hand = trained - after[slow.peer]
            record_property("of its tokens merged", after[slow.peer] / trained)
            assert in_hand <= 3 * 30 * 4 * 128, "all but what it has learnt since is merged"
            assert share < 0.6, "it is slower, and the others did not wait"
            until(lambda: victim.since_start("step"), 90, "the victim trains again", victim.tail)
        agree(swarm)
        record_property("losses", falls(first))


def owners(certificate: Certificate) -> set[PeerId]:
    """Who merged its parts."""
    return {part.owner for part in certificate.outcome.parts}


def contributors(certificate: Certificate) -> set[PeerId]:
    """Whose work is in it."""
    outcome = certificate.outcome
    numbers = {one.contributor for part in outcome.parts for one in part.included}
    return {outcome.contributors[number].peer for number in numbers}


def test_a_server_merges_what_islands_learn(
    tmp_path: Path, watch: Watch, record_property: Record
) -> None:
    """It trains nothing; when it is killed the islands merge, and when it is back, it does."""
    run = {"mode": "server", "inner_steps": 20, "total_rounds": 5000}
    with islands(tmp_path) as made:
        first = made.new(*settings(**run, **SMALL))
        address = first.await_up()
        seen = watch(first)
        server = made.new("--role", "server", "--peers", address)
        swarm = [first, made.new("--peers", address)]
        until(lambda: server.since_start("started"), 90, "the server is up", server.tail)

        def merged_by(who: set[PeerId], contributors: int) -> bool:
            newest = seen.rounds()[-1:]
            return bool(newest) and (
                owners(newest[0]) == who and len(newest[0].outcome.contributors) == contributors
            )

        until(lambda: merged_by({server.peer}, 2), 120, "the server merges", first.tail)
        everybody = {island.peer for island in swarm}
        server.kill()
        until(lambda: owners(seen.rounds()[-1]) <= everybody, 60, "the islands merge", first.tail)
        victim = swarm[1]
        victim.kill()
        made.come_back(victim)
        server.start("--role", "server", "--peers", made.addresses(without=server))
        until(lambda: merged_by({server.peer}, 2), 120, "the server merges again", first.tail)
        goal = first.events("round")[-1]["round"] + 3
        for island in swarm:
            island.await_round(goal, 60)
        agree([*swarm, server])
        assert not server.events("step")
        record_property("losses", falls(first))


def test_two_servers_share_the_vector_and_who_is_slow_misses_no_more_than_the_bound(
    tmp_path: Path, watch: Watch, record_property: Record
) -> None:
    """Stale-synchronous, 4x slower: waited for after two rounds. Of two servers one is killed."""
    run = {"mode": "server", "staleness": 2, "dynamic_steps": "false", "inner_steps": 20}
    with islands(tmp_path) as made:
        first = made.new(*settings(**run, **SMALL, total_rounds=5000))
        address = first.await_up()
        seen = watch(first)
        servers = [made.new("--role", "server", "--peers", address) for _ in range(2)]
        slow = made.new("--peers", address)
        for node in (*servers, slow):
            node.await_up()
        both = {server.peer for server in servers}

        def merged_by(who: set[PeerId]) -> bool:
            return bool(seen.rounds()) and owners(seen.rounds()[-1]) == who

        def slow_came(since: int) -> list[int]:
            new = list(enumerate(seen.rounds()))[since:]
            return [n for n, one in new if slow.peer in contributors(one)]

        until(lambda: merged_by(both) and slow_came(0), 150, "both merge", first.tail)
        with slowed(slow, 4):
            began = len(seen.rounds())
            until(lambda: len(slow_came(began)) >= 5, 120, "five of the slow", slow.tail)
        came = slow_came(began)
        missed = [later - earlier - 1 for earlier, later in itertools.pairwise(came)]
        record_property("rounds that the slow one missed in between", missed)
        assert max(missed) <= 2
        assert sum(missed) > 0, "nobody waits for it before the bound"
        victim, other = servers
        victim.kill()
        until(lambda: merged_by({other.peer}), 60, "the other server merges all", first.tail)
        victim.start("--role", "server", "--peers", made.addresses(without=victim))
        until(lambda: merged_by(both), 120, "both merge again", first.tail)
        agree([first, slow, *servers])
        assert not any(server.events("step") for server in servers)
        record_property("losses", falls(first))


def test_two_of_three_clients_train_in_each_round(
    tmp_path: Path, watch: Watch, record_property: Record
) -> None:
    """Federated averaging with Adam outside: who is not drawn rests, who is drawn and dies is
    replaced."""
    run = {"mode": "fedavg", "inner_steps": 20, "clients": 0.6, "total_rounds": 5000}
    with islands(tmp_path) as made:
        outer = {"outer__optimizer": "adam", "inner__keep_moments": "false"}
        first = made.new(*settings(**run, **outer, **SMALL))
        address = first.await_up()
        seen = watch(first)
        swarm = [first, made.new("--peers", address), made.new("--peers", address)]

        def drawn_of_three() -> list[set[PeerId]]:
            return [
                {contributor.peer for contributor in certificate.outcome.contributors}
                for certificate in seen.rounds()
                if len(certificate.roster) == 3
            ]

        def all_were_drawn() -> bool:
            return set().union(*drawn_of_three()) == {island.peer for island in swarm}

        until(lambda: len(drawn_of_three()) >= 6, 150, "six rounds of three", first.tail)
        until(all_were_drawn, 60, "a round of each", first.tail)
        assert all(len(who) <= 2 for who in drawn_of_three())
        victim = swarm[2]
        victim.kill()
        before = first.events("round")[-1]["round"]
        first.await_round(before + 3, 60)
        made.come_back(victim)
        victim.await_round(first.events("round")[-1]["round"] + 4, 120)
        agree(swarm)
        record_property("losses", falls(first))


def test_branches_that_never_meet_are_merged_once(tmp_path: Path, record_property: Record) -> None:
    """Two join later, one is killed and goes on from its checkpoint: all are in the one merge."""
    run = {"mode": "btm", "inner_steps": 200}
    save = ("--checkpoint-seconds", "2")
    with islands(tmp_path) as made:
        first = made.new(*settings(**run, **SMALL), *save)
        address = first.await_up()
        until(lambda: first.events("step"), 90, "the first trains", first.tail)
        with slowed(first, 20):  # it is not to be done before the others have come
            second, late = (made.new("--peers", address, *save) for _ in range(2))
            for island in (second, late):
                until(lambda island=island: island.events("step"), 150, "trains", island.tail)
            with slowed(late, 20):
                victim, enough = second, 20
                until(lambda: victim.events("step")[-1]["step"] > enough, 90, "on", victim.tail)
                saved = len(victim.events("checkpoint")) + 1  # the next may have begun before
                until(lambda: len(victim.events("checkpoint")) > saved, 60, "saved", victim.tail)
                victim.kill()
                victim.start("--resume", "--peers", address, *save)
                until(lambda: victim.since_start("step"), 120, "trains again", victim.tail)
            assert victim.since_start("step")[0]["step"] > enough, "not from the beginning"
        swarm = [first, second, late]
        for island in swarm:
            assert island.await_end(150) == 0
        final = {event["round"]: event for event in first.events("round")}
        last = final[max(final)]
        assert last["members"] == 3
        assert sum(bool(event["tokens"]) for event in final.values()) == 1
        agree(swarm)
        start = first.events("validation")[0]["validation_loss"]
        record_property("losses", (start, last["validation_loss"]))
        assert last["validation_loss"] < start - 1.0


@pytest.mark.parametrize("optimizer", ["yogi", "sparseloco"])
def test_other_outer_optimizers_survive_kills_and_joins(
    tmp_path: Path, optimizer: str, record_property: Record
) -> None:
    """Who joins and who resumes has all that the optimizer keeps, or digests would differ."""
    run = {"inner_steps": 20, "total_rounds": 5000, "outer__optimizer": optimizer}
    with islands(tmp_path) as made:
        swarm = made.swarm(2, **run, **SMALL)
        first, victim = swarm
        until(lambda: victim.events("checkpoint"), 60, "a checkpoint", victim.tail)
        victim.kill()
        late = made.new("--peers", made.addresses(without=victim))
        made.come_back(victim)
        made.await_office(first, 3)
        goal = first.events("round")[-1]["round"] + 4
        for island in (first, victim, late):
            island.await_round(goal, 90)
        agree([first, victim, late])
        record_property("losses", falls(first))
