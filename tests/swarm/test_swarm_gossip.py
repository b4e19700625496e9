"""Real islands that gossip: four processes, one killed and resumed, one joins late, one leaves."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from swarm_kit import START_S, Island, Record, until

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]

ROUNDS = 60
RUN = """
name = "pairs"
mode = "{mode}"

[rounds]
inner_steps = 8
total_rounds = {rounds}
{more}

[evaluation]
sequences = 16
"""


def rounds(island: Island) -> list[dict[str, Any]]:
    return island.events("round")


def losses(island: Island) -> list[float]:
    return [e["validation_loss"] for e in rounds(island) if e["validation_loss"] is not None]


def begin(
    root: Path, mode: str, count: int = ROUNDS, more: str = "overlap_steps = 2"
) -> list[Island]:
    """Four islands of a run that the first has made."""
    text = RUN.format(mode=mode, rounds=count, more=more)
    (root / "run.toml").write_text(text, encoding="utf-8")
    islands = [Island(name, root) for name in "abcd"]
    islands[0].start("--run", str(root / "run.toml"))
    until(lambda: rounds(islands[0]), START_S, "the first round", islands[0].tail)
    return islands


def join(island: Island, first: Island, *arguments: str) -> None:
    island.start("--peers", first.await_up(), *arguments)


@pytest.mark.parametrize("more", ["overlap_steps = 2", "fragments = 2"])
def test_islands_in_pairs_learn_through_kill_join_and_leave(
    tmp_path: Path, record_property: Record, more: str
) -> None:
    a, b, c, d = begin(tmp_path, "gossip", 2 * ROUNDS, more)
    try:
        for island in (b, c, d):  # newcomers to a run under way
            join(island, a)
        for island in (b, c, d):
            until(lambda i=island: len(rounds(i)) >= 3, START_S, "rounds", island.tail)
        c.kill()
        before = len(rounds(c))
        join(c, a, "--resume")
        until(lambda: len(rounds(c)) > before + 1, START_S, "rounds after --resume", c.tail)
        b.signal(signal.SIGINT)
        assert b.await_end(START_S) == 0, b.tail()
        for island in (a, c, d):
            assert island.await_end(4 * START_S) == 0, island.tail()
        ends = [losses(island)[-1] for island in (a, c, d)]
        far = [e["consensus"] for i in (a, c, d) for e in rounds(i)[-5:] if e["consensus"]]
        exchanged = [e for i in (a, c, d) for e in i.events("exchanged")]
        met = [e for e in exchanged if e["outcome"] in ("mixed", "answered") or e["others"]]
        record_property("validation losses", json.dumps(ends))
        record_property("consensus", json.dumps(far))
        record_property("share of exchanges with a letter", len(met) / len(exchanged))
        assert losses(a)[0] - max(ends) > 1.0
        assert max(ends) - min(ends) < 0.5
        assert max(far) < 0.5
        assert len(met) > len(exchanged) / 4
        assert all(e["agreeing"] is None for i in (a, c, d) for e in rounds(i))
        pieces = {e["fragment"] for e in exchanged}
        assert pieces == ({0, 1} if "fragments" in more else {0})
    finally:
        for island in (a, b, c, d):
            island.kill()


def curve(islands: list[Island]) -> list[tuple[int, float]]:
    """Tokens that all islands have trained on, and the validation loss that one found then."""
    facts: list[tuple[float, int, float | None]] = []
    for island in islands:
        facts += [(e["time"], e["tokens"], None) for e in island.events("step")]
        facts += [(e["time"], 0, e["validation_loss"]) for e in rounds(island)]
    found, tokens = [], 0
    for _, more, loss in sorted(facts, key=lambda fact: fact[0]):
        tokens += more
        if loss is not None:
            found.append((tokens, loss))
    return found


def test_pairs_come_as_far_as_certified_rounds_with_as_many_tokens(
    tmp_path: Path, record_property: Record
) -> None:
    """The same run but for its mode. Losses are compared where both have seen as many tokens.

    In a long run NoLoCo ends 0.04 above DiLoCo (docs/algorithms.md). In one as short as this it is
    ahead: by 0.14 where two simulated islands train so, by 0.44 here, where DiLoCo's outer step is
    still warming up. When b begins is the machine's choice, and losses fall by about 0.04 a round:
    0.3 is what some rounds more or less make, and a tenth of what is learnt.
    """
    curves = {}
    for mode in ("gossip", "diloco"):
        root = tmp_path / mode
        root.mkdir()
        a, b, _, _ = begin(root, mode)
        try:
            join(b, a)
            for island in (a, b):
                assert island.await_end(4 * START_S) == 0, island.tail()
            curves[mode] = curve([a, b])
        finally:
            for island in (a, b):
                island.kill()
    tokens = min(points[-1][0] for points in curves.values())
    ends = {}
    for mode, points in curves.items():
        upto = [loss for seen, loss in points if seen <= tokens][-4:]
        ends[mode] = sum(upto) / len(upto)
        record_property(f"validation loss, {mode}", ends[mode])
        record_property(f"curve, {mode}", json.dumps(points))
        assert points[0][1] - ends[mode] > 1.0
    record_property("tokens", tokens)
    assert ends["gossip"] < ends["diloco"] + 0.3, ends


def test_push_sum_learns(tmp_path: Path, record_property: Record) -> None:
    a, b, _, _ = begin(tmp_path, "push-sum")
    try:
        join(b, a)
        for island in (a, b):
            assert island.await_end(4 * START_S) == 0, island.tail()
        ends = [losses(island)[-1] for island in (a, b)]
        record_property("validation losses", json.dumps(ends))
        assert losses(a)[0] - max(ends) > 0.5
        assert all(e["outcome"] == "sent" for e in b.events("exchanged"))
    finally:
        for island in (a, b):
            island.kill()


def weight_in_all(islands: list[Island]) -> float:
    """Push-sum weight in the accounts on disk, a share that has come counted once.

    All stand still meanwhile, or a share might move on between two looks.
    """
    running = [island for island in islands if island.running]
    for island in running:
        island.signal(signal.SIGSTOP)
    accounts = {i.peer: json.loads((i.dir / "weight-0.json").read_text()) for i in islands}
    for island in running:
        island.signal(signal.SIGCONT)
    found = 0.0
    for peer, account in accounts.items():
        found += account["own"]
        for to, (name, weight) in account["given"].items():
            if accounts[to]["came"].get(peer) != name:
                found += weight
    return found


def test_push_sum_loses_no_weight_to_kills(tmp_path: Path, record_property: Record) -> None:
    """Killed while others send to it and it sends to others; each time it goes on where it was."""
    kills = 4
    a, b, c, _ = begin(tmp_path, "push-sum", 4 * ROUNDS)
    try:
        for island in (b, c):
            join(island, a)
        until(lambda: len(rounds(b)) >= 3 and len(rounds(c)) >= 3, START_S, "rounds", b.tail)
        for _ in range(kills):
            b.kill()
            assert weight_in_all([a, b, c]) == pytest.approx(3.0, abs=1e-9)
            before, others = len(rounds(b)), len(rounds(a))
            join(b, a, "--resume")
            until(lambda n=before: len(rounds(b)) > n + 2, START_S, "rounds", b.tail)
            assert len(rounds(a)) > others, "the others did not go on"
        for island in (a, b, c):
            assert island.await_end(4 * START_S) == 0, island.tail()
        ends = [losses(island)[-1] for island in (a, b, c)]
        record_property("validation losses", json.dumps(ends))
        record_property("weight", weight_in_all([a, b, c]))
        assert weight_in_all([a, b, c]) == pytest.approx(3.0, abs=1e-9)
        assert losses(a)[0] - max(ends) > 0.5
        assert max(ends) - min(ends) < 0.5
    finally:
        for island in (a, b, c):
            island.kill()
