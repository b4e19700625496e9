"""Eager rounds, rounds of gradients and of coordinates, in real processes: kill -9 in each."""

from __future__ import annotations

from pathlib import Path

import pytest
from mode_kit import agree, falls
from swarm_kit import Island, Islands, Record, islands, settings, until

from bootstrap.manifest import Manifest
from node.checkpoints.outer_files import read_newest
from node.replicas.lowrank_state import BASES
from node.trainer.layout import Layout

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

SMALL = {"data__batch_size": 4, "total_rounds": 5000}


def lived_through(made: Islands, first: Island) -> list[Island]:
    """Two islands, of which one is killed and comes back, and a third that joins meanwhile."""
    address = first.await_up()
    victim = made.new("--peers", address)
    made.await_office(first, 2)
    until(lambda: victim.events("checkpoint"), 90, "a checkpoint", victim.tail)
    victim.kill()
    late = made.new("--peers", made.addresses(without=victim))
    made.come_back(victim)
    made.await_office(first, 3)
    return [first, victim, late]


def test_eager_islands_train_through_their_rounds(tmp_path: Path, record_property: Record) -> None:
    with islands(tmp_path) as made:
        first = made.new(*settings(mode="eager", inner_steps=20, eval_every=1, **SMALL))
        swarm = lived_through(made, first)
        goal = first.events("round")[-1]["round"] + 5
        for island in swarm:
            island.await_round(goal, 120)
        agree(swarm)
        record_property("losses", falls(first))


@pytest.mark.parametrize("optimizer", ["adamw", "onebit-adam", "powersgd"])
def test_a_round_for_every_gradient(
    tmp_path: Path, optimizer: str, record_property: Record
) -> None:
    """A joiner has moments and bases, or digests would differ; signs travel after the warm-up."""
    run = {"mode": "allreduce", "outer__optimizer": optimizer, "eval_every": 10}
    warm = 60
    if optimizer == "onebit-adam":
        run["outer__warmup_rounds"] = warm
    with islands(tmp_path) as made:
        first = made.new(*settings(**run, **SMALL))
        swarm = lived_through(made, first)
        goal = max(first.events("round")[-1]["round"], warm) + 30
        for island in swarm:
            island.await_round(goal, 120)
        agree(swarm)
        codecs = {event["round"]: event["codec"] for event in first.events("round")}
        signs = {name for round_, name in codecs.items() if round_ >= warm}
        assert {name for round_, name in codecs.items() if round_ < warm} == {"bf16"}
        assert signs == {"int1" if optimizer == "onebit-adam" else "bf16"}
        record_property("losses", falls(first))
        rounds = first.events("round")
        record_property("seconds a round", (rounds[-1]["time"] - rounds[-11]["time"]) / 10)
        sent = [event["sent_bytes"] for event in rounds[-20:]]
        record_property("bytes a round", sum(sent) / len(sent))
        if optimizer == "powersgd":
            assert sum(sent) / len(sent) < Layout.of_manifest(Manifest()).size / 2  # 2.7 whole
        for island in swarm:
            island.kill()
            kept = read_newest(island.dir)[1]
            assert (BASES in kept.vectors) == (optimizer == "powersgd")
            if optimizer == "adamw":
                assert kept.residual is None
            else:  # of gradients that this island has seen
                assert kept.residual is not None
                assert kept.residual.any()


def test_a_few_coordinates_in_each_round(tmp_path: Path, record_property: Record) -> None:
    """SPARTA with a walk of ten rounds; who comes back has its own parameters beside the mean."""
    run = {"mode": "sparta", "share": 0.1, "inner_steps": 2, "eval_every": 10}
    with islands(tmp_path) as made:
        first = made.new(*settings(**run, **SMALL))
        swarm = lived_through(made, first)
        goal = first.events("round")[-1]["round"] + 40
        for island in swarm:
            island.await_round(goal, 120)
        agree(swarm)
        record_property("losses", falls(first))
        sent = [event["sent_bytes"] for event in first.events("round")[-20:]]
        record_property("bytes a round", sum(sent) / len(sent))
