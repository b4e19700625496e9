"""How often a trainer whose ranks die is started again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bootstrap.manifest import Data, Manifest
from gossip.rounds.gathering import Gathering
from node.conductor import Conductor
from node.island.beginning import Beginning, Stage
from node.island.rank_ends import TrainerDied
from node.island.restarts import MAX_RESTARTS, Restarts
from node.trainer.channel import Applied
from node.trainer.dims import ParallelDims
from node.trainer.settings import TrainerSettings
from protocols.errors import OperatorError

DIMS = ParallelDims(dp_shard=2)


class Ranks:
    """An island whose ranks are played."""

    def __init__(self) -> None:
        data = Data(batch_size=128)
        self.settings = TrainerSettings(
            manifest=Manifest(data=data), tokens="tokens", ranks=DIMS.size, dims=DIMS
        )
        self.tried: list[int] = []

    async def restart(self, **changes: Any) -> None:
        self.settings = self.settings.model_copy(update=changes)
        self.tried.append(self.settings.at_once)


def conductor(ranks: Ranks) -> Any:
    made: Any = object.__new__(Conductor)
    made.gathering = Gathering()
    nothing = SimpleNamespace(lost=lambda: None, free=lambda: None, emit=lambda event: None)
    made.island, made.events, made.files, made._ownership = ranks, nothing, nothing, nothing
    made.swarm, made._guesses, made.replicas, made._drops = None, None, (), {}
    made._restarts, made.beginning = Restarts(()), Beginning(Manifest())
    return made


@pytest.mark.parametrize(
    ("code", "training", "compiles", "tried"),
    [
        # down to one sequence, then as the others
        ("E401", True, False, [32, 16, 8, 4, 2, 1, 1, 1, 1]),
        ("E401", False, False, [32, 16, 8]),  # no room for the model: less at once does not help
        ("E401", False, True, [32, 16, 8, 4, 2, 1, 1, 1, 1]),  # in the step that compiles layers
        ("E405", True, False, [64] * MAX_RESTARTS),
        ("E405", False, True, [64] * MAX_RESTARTS),
    ],
)
async def test_tries_with_less_at_once_are_not_counted(
    code: str, training: bool, compiles: bool, tried: list[int]
) -> None:
    ranks = Ranks()
    ranks.settings = ranks.settings.model_copy(update={"compile": compiles})
    driver = conductor(ranks)

    async def die_again_and_again() -> None:
        while True:
            driver.beginning.stage = Stage.BEGUN if training else Stage.COMING
            await driver._on_death(TrainerDied(1, 77, "", code, "rank 1 ended", Path(), ""))

    with pytest.raises(OperatorError, match="rank 1 ended") as caught:
        await die_again_and_again()
    assert caught.value.code == code
    assert ("--recompute full" in caught.value.fix) == (code == "E401")
    assert ranks.tried == tried


async def test_who_is_sent_to_a_log_finds_it_where_the_rank_ran() -> None:
    driver, log = conductor(Ranks()), Path("/other/host/logs/trainer-rank6.log")
    with pytest.raises(OperatorError) as caught:
        await driver._on_death(TrainerDied(6, 1, "", "E601", "rank 6 on b crashed", log, ""))
    assert caught.value.fix == f"see {log}"


@pytest.mark.parametrize("begun", [False, True])
async def test_ranks_that_die_before_they_have_resumed_begin_from_the_checkpoint_again(
    begun: bool,
) -> None:
    driver = conductor(Ranks())
    freed: list[None] = []
    driver._ownership = SimpleNamespace(free=lambda: freed.append(None))
    driver.beginning.checkpoint = Path("ckpt-00000003")
    driver.beginning.built()
    if begun:
        driver.beginning.read()
    await driver._on_death(TrainerDied(1, -9, "", "E405", "rank 1 ended", Path(), ""))
    assert driver.beginning.checkpoint == (None if begun else Path("ckpt-00000003"))
    # rounds wait until it stands where the checkpoint was made
    assert (len(freed), driver.beginning.joined) == ((1, True) if begun else (0, False))


def ended(code: str = "E405", *, spared: bool = False) -> TrainerDied:
    return TrainerDied(1, 77, "", code, "rank 1 ended", Path(), "", spared=spared)


@pytest.mark.parametrize(
    ("answered", "fatal"),
    [
        ((4, None), True),  # Begin
        ((4, 0), True),  # back to the last merge, after steps that were not finite
        ((7, 1), True),
        ((5, 0), False),
        ((8, 1), False),
    ],
)
def test_only_a_round_in_between_begins_the_count_anew(
    answered: tuple[int, int | None], fatal: bool
) -> None:
    """A trainer that dies in its first inner step has begun each time."""
    places = [SimpleNamespace(place=SimpleNamespace(round=3)) for _ in range(2)]
    restarts, settings = Restarts(cast(Any, places)), Ranks().settings
    for replica, round_ in zip(places, (4, 7), strict=True):  # while it was down
        replica.place.round = round_
    for _ in range(MAX_RESTARTS):
        assert restarts.died(ended(), settings, begun=True) == {}
        restarts.applied(Applied(4, 0, 0, None, None))
    round_, fragment = answered
    restarts.applied(Applied(round_, 1, 1, None, fragment))
    assert (restarts.died(ended(), settings, begun=True) is None) is fatal


@pytest.mark.parametrize("spared", [True, False])
def test_the_loss_of_a_host_that_others_go_on_without_is_not_counted(spared: bool) -> None:
    """A link that is dark now and then ends no island that trains well without it."""
    restarts, settings = Restarts(()), Ranks().settings
    lost = [
        restarts.died(ended("E408", spared=spared), settings, begun=True)
        for _ in range(MAX_RESTARTS + 1)
    ]
    assert lost == [{}] * MAX_RESTARTS + [{} if spared else None]
