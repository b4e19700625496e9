"""One of five islands sends its pseudo-gradient turned round and blown up: real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import KITS
from swarm_kit import Island, Record, digests, islands, settings

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

FACTOR = -30.0
ROUNDS = 14
RUN = {"inner_steps": 20, "total_rounds": ROUNDS, "min_grace_s": 2.0, "data__batch_size": 4}


def poisoned_swarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **rule: str
) -> tuple[list[Island], Island]:
    """Four islands that mean well, and the fifth, after the last round."""
    monkeypatch.setenv("POISON", str(FACTOR))
    with islands(tmp_path) as made:
        first = made.new(*settings(**RUN, **rule))
        address = first.await_up()
        honest = [first, *(made.new("--peers", address) for _ in range(3))]
        liar = Island("liar", tmp_path)
        liar.program = (str(KITS / "poisoned_island.py"),)
        made.all.append(liar)
        liar.start("--peers", address)
        for island in honest:
            assert island.await_end(300) == 0, island.tail()
    return honest, liar


def losses(island: Island) -> list[float]:
    found = island.events("validation") + island.events("round")
    return [e["validation_loss"] for e in found if e.get("validation_loss") is not None]


def test_open_trust_discounts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    """The rounds with all five show by the liar's scale who it is; the others learn all the same.

    Not only five meet in a round, since some are late: of three the liar is one at most.
    """
    honest, liar = poisoned_swarm(tmp_path, monkeypatch, merge__trust="open")
    found = digests(honest)
    assert {r: states for r, states in found.items() if len(states) != 1} == {}
    scales = [
        (event["islands"][liar.peer]["scale"], event["members"])
        for event in honest[0].events("round")
        if "scale" in event["islands"].get(liar.peer, {})
    ]
    record_property("scales of the liar, members", scales)
    record_property("losses", losses(honest[0]))
    told = [scale for scale, members in scales if members >= 3]  # of two nobody can tell who it is
    assert len(told) >= 3
    assert max(told) < 0.3
    assert losses(honest[0])[-1] < losses(honest[0])[0] - 0.5


def test_the_mean_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    honest, _ = poisoned_swarm(tmp_path, monkeypatch, merge__rule="mean")
    record_property("losses", losses(honest[0]))
    assert losses(honest[0])[-1] > losses(honest[0])[0]


def test_who_merges_something_else_is_expelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    """One of four turns round what it merges: the others see it by the slices, and go on alone."""
    with islands(tmp_path) as made:

        def start(name: str, *arguments: str) -> Island:
            island = Island(name, tmp_path)
            island.program = (str(KITS / "lying_owner.py"),)
            made.all.append(island)
            island.start(*arguments)
            return island

        first = start("first", *settings(**(RUN | {"total_rounds": 30}), merge__trust="open"))
        address = first.await_up()
        honest = [first, *(start(f"honest-{n}", "--peers", address) for n in "ab")]
        monkeypatch.setenv("LIES", "1")
        liar = start("liar", "--peers", address)
        liar.await_up()
        for island in honest:
            assert island.await_end(300) == 0, island.tail()
    for island in honest:
        told = [e for e in island.events("rejected") if e["detail"].endswith("expelled")]
        assert {event["peer"] for event in told} == {liar.peer}, island.tail()
    last = max(honest[0].rounds())
    record_property("rounds", last)
    assert liar.peer not in honest[0].rounds()[last]["islands"]
    found = digests(honest)
    assert {r: states for r, states in found.items() if len(states) != 1} == {}
