"""A member that is too far behind to replay: killed in its download, it goes on with that."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import arrival_kit
import pytest
import torch
from arrival_kit import CREATOR, NEWCOMER, OTHERS, RUN, Scene, played, swarm
from lineage_kit import Chain

from bootstrap.state import PartialState
from bootstrap.state.server import IDLE_S
from gossip.catchup.approach import Approach
from gossip.catchup.replay import Ending
from gossip.place import Place
from node.checkpoints.names import FETCHED_PREFIX
from node.entry.downloading import take_state
from node.entry.fetching import Fetcher
from node.monitor.event_log import EventLog
from node.monitor.events import Behind, Event
from node.replicas.replica import ChainStanding
from protocols.errors import OperatorError

SIZE = 200_000
BYTES = 8 * SIZE
SECONDS = 10.0  # that a download takes

pytestmark = pytest.mark.usefixtures("remembered_signatures", "_large")


@pytest.fixture
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival_kit, "SIZE", SIZE)


class Member:
    """What is told of a replica and its chain of rounds, and what comes of it."""

    def __init__(self, scene: Scene, place: Place) -> None:
        if scene.network.node(NEWCOMER.peer_id) is not None:
            scene.network.kill(NEWCOMER.peer_id)
        self.arrival = scene.arrival()
        self.place, self.state = place, [torch.zeros(SIZE), torch.zeros(SIZE)]
        self.manifest = SimpleNamespace(rounds=SimpleNamespace(max_staleness=3))
        self.approach = Approach(round_bytes=BYTES // 8, state_bytes=BYTES)
        self.following = self.exchange = self  # of the chain
        self.decided, self.sent = None, False
        self.had = self.came = 0  # bytes

    @contextmanager
    def downloading(self) -> Iterator[Approach]:
        now = asyncio.get_running_loop().time
        self.approach.begins(1, now())
        yield self.approach
        self.approach.ends(now(), arrived=True)

    async def move(self, work: Any, *to: Any, diverged: bool, forked: bool) -> None:
        self.diverged, self.forked = diverged, forked
        await work()

    async def jump(self, vectors: Sequence[torch.Tensor], state: ChainStanding, **_: Any) -> None:
        self.state, self.place = list(vectors), state.place

    def told(self, done: int, total: int, sources: int) -> None:
        if sources:
            self.came = done - self.had
        else:
            self.had = done

    async def take(self, directory: Path, ending: Ending = Ending.GONE) -> None:
        me: Any = self
        on_disk = PartialState(directory / f"{FETCHED_PREFIX}state-0", RUN)
        await take_state(me, me, self.arrival, ending, self.told, on_disk)


def behind() -> Place:
    """A round before where :func:`swarm` ends."""
    first = Chain()
    first.add(arrival_kit.HONEST)
    round_, head, work = first.claim
    return Place(RUN, 0, round_, head, bytes(32), work)


async def killed(scene: Scene, chain: Chain, directory: Path) -> bytes:
    """A member is killed when most of a download has come; returns the state's digest."""
    stood = scene.stand(CREATOR, chain, 5.0)
    node = scene.network.node(CREATOR.peer_id)
    assert node is not None
    node.upload = BYTES / SECONDS
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(7.0):
            await Member(scene, behind()).take(directory)
    return stood.state


def test_a_member_that_is_started_again_goes_on_with_its_download(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        chain = swarm()
        before, place = chain.claim[0], behind()
        chain.add(state=await killed(scene, chain, tmp_path))  # the others go on
        scene.stand(OTHERS[0], chain, 7.0)
        again = Member(scene, place)
        await again.take(tmp_path)
        assert again.place.round == before
        assert torch.equal(again.state[0], torch.full((SIZE,), 5.0))
        assert again.had > 0.5 * BYTES
        assert again.came == BYTES - again.had
        # what was there before says nothing of how long a download takes
        assert again.approach.download_s > 0.8 * SECONDS

    played(story)


@pytest.mark.parametrize("gone", [True, False])
def test_what_it_cannot_have_or_has_left_behind_is_not_gone_on_with(
    tmp_path: Path, gone: bool
) -> None:
    async def story(scene: Scene) -> None:
        chain = swarm()
        place = behind()
        state = await killed(scene, chain, tmp_path)
        round_, head, work = chain.claim
        if gone:
            await asyncio.sleep(2 * IDLE_S)
        else:  # it has come there by replaying rounds
            place = Place(RUN, 0, round_, head, state, work)
        chain.add(state=state)
        scene.stand(OTHERS[0], chain, 7.0)
        again = Member(scene, place)
        await again.take(tmp_path)
        assert again.place.round == round_ + 1
        assert torch.equal(again.state[0], torch.full((SIZE,), 7.0))
        assert (again.had, again.came) == (0, BYTES)

    played(story)


@pytest.mark.parametrize("ending", [Ending.GONE, Ending.FORKED, Ending.DIVERGED])
def test_a_chain_is_told_whether_the_round_under_way_is_abandoned(
    tmp_path: Path, ending: Ending
) -> None:
    async def story(scene: Scene) -> None:
        scene.stand(CREATOR, swarm(), 5.0)
        member = Member(scene, behind())
        await member.take(tmp_path, ending)
        assert member.forked == (ending is Ending.FORKED)
        assert member.diverged == (ending is Ending.DIVERGED)

    played(story)


@pytest.mark.parametrize("ending", list(Ending))
def test_who_has_caught_up_by_itself_has_not_failed_to_download(
    tmp_path: Path, ending: Ending
) -> None:
    """The round that was missed came while others were asked for the state."""

    async def story(scene: Scene) -> None:
        chain = swarm()
        state = scene.stand(CREATOR, chain, 5.0).state
        round_, head, work = chain.claim
        place = Place(RUN, 0, round_, head, state, work)
        member = Member(scene, place)
        member.approach.downloaded(SECONDS)
        before = member.approach.download_s
        if ending in (Ending.FAR, Ending.GONE):
            await member.take(tmp_path, ending)
        else:  # where the others are on another side, or have other bits, that is told
            with pytest.raises(OperatorError, match="nobody is further"):
                await member.take(tmp_path, ending)
        assert (member.place, member.came) == (place, 0)
        assert member.approach.download_s == before

    played(story)


@pytest.mark.parametrize("ending", [Ending.GONE, Ending.FAR])
def test_rounds_that_are_passed_over_have_not_failed(ending: Ending) -> None:
    """The others have committed them."""
    log, told = EventLog(), list[Event]()
    log.subscribe(lambda record: told.append(record.event))
    tasks = SimpleNamespace(spawn=lambda work: work.close())
    node: Any = SimpleNamespace(events=log, tasks=tasks)
    member: Any = SimpleNamespace(place=behind())
    ahead = SimpleNamespace(round=member.place.round + 4)
    others = SimpleNamespace(members_alive=lambda now: [ahead])
    chains = [SimpleNamespace(membership=others)]
    swarm: Any = SimpleNamespace(chains=chains, now=lambda: 0.0)
    run: Any = None
    fetcher = Fetcher(node, run, [member], torch.zeros(1), lambda announce: None)
    fetcher.on_behind(swarm, 0, ending)
    here, head = member.place.round, ahead.round
    assert told == [Behind(round=here, head=head, action="download", reason=ending.value)]


def test_checkpoints_leave_what_is_fetched_of_a_state_further_on(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        chain = swarm()
        await killed(scene, chain, tmp_path)
        home = SimpleNamespace(checkpoints=tmp_path)
        node: Any = SimpleNamespace(home=home, offload_files=None, events=None)
        run: Any = SimpleNamespace(signed=SimpleNamespace(run_id=RUN))
        member: Any = SimpleNamespace(place=behind())
        fetcher = Fetcher(node, run, [member], torch.zeros(1), lambda announce: None)
        there = {tmp_path / name for name in os.listdir(tmp_path)}
        assert there
        assert there <= set(fetcher.ahead())
        member.place = Place(RUN, 0, *chain.claim[:2], bytes(32), chain.claim[2])
        assert fetcher.ahead() == []

    played(story)
