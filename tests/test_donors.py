"""Moments on their way from a donor to a newcomer, and everything that makes it do without."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_kit import tiny_manifest

from bootstrap.manifest import Manifest
from bootstrap.state import Moments, MomentsServer, download_moments, offered_moments
from bootstrap.state.moments import MAX_AGE_S
from node.donors import FAILURES, TAKEN, Giving, Taking
from node.trainer.channel import ChannelClosedError, Donate, Donated
from node.trainer.layout import Layout
from node.trainer.moments import Places, mapped
from node.trainer_files import TrainerFiles
from protocols import virtual_time
from protocols.errors import (
    BadSignature,
    Malformed,
    RemoteRefused,
    Stale,
    TransportError,
    Unreachable,
)
from protocols.identity import Identity, PeerId
from protocols.memory import Link, MemoryNetwork, MemoryTransport
from protocols.messages import MomentsChunk, MomentsOffer, MomentsRequest
from protocols.virtual_time import inline

RUN = bytes(range(32))
N = 300_000
Scenario = Callable[["Bench"], Awaitable[None]]


class Bench:
    """Donors that count their copies, and a newcomer."""

    def __init__(self, donors: int = 1, run: bytes = RUN, size: int = N) -> None:
        self.network = MemoryNetwork(link=Link(latency=0.01), upload=2e6)
        ids = [Identity.from_seed(bytes([n]) * 32).peer_id for n in range(1, donors + 2)]
        self.me: MemoryTransport = self.network.join(ids[0])
        self.peers = ids[1:]
        self.size, self.run = size, run
        self.copies = [0] * donors
        self.vectors = [honest(size, seed) for seed in range(donors)]
        self.servers = [self._server(number) for number in range(donors)]
        self.refuses: set[int] = set()
        self.silent: set[int] = set()
        self.copy_s = 0.0

    def _server(self, number: int) -> MomentsServer:
        async def copy() -> Moments:
            self.copies[number] += 1
            await asyncio.sleep(1e6 if number in self.silent else self.copy_s)
            if number in self.refuses:
                raise RemoteRefused("none", "its moments are cold themselves")
            return Moments(50 + number, self.vectors[number].clone())

        transport = self.network.join(self.peers[number])
        return MomentsServer(transport, self.run, copy, offload=inline)

    async def offer(
        self, run: bytes = RUN, length: int = 4 * N, timeout: float = 5.0
    ) -> MomentsOffer:
        return await offered_moments(self.me, self.peers[0], run, length, timeout=timeout)

    async def chunk(self, digest: bytes, index: int = 0) -> int:
        """Fetch one; its bytes."""
        header = MomentsChunk(RUN, digest, index).encode()
        async with self.me.pull(
            self.peers[0], "moment", header, max_length=4 * N, timeout=5.0
        ) as incoming:
            return sum([len(piece) async for piece in incoming])

    async def download(self) -> torch.Tensor:
        got = torch.full((self.size,), float("nan"))
        offer = await self.offer()
        await download_moments(self.me, self.peers[0], RUN, offer, [got], offload=inline)
        return got


def honest(size: int, seed: int) -> torch.Tensor:
    """First and second moments of one gradient after another."""
    gradient = torch.randn(size // 2, generator=torch.Generator().manual_seed(seed))
    return torch.cat([0.1 * gradient, 0.05 * gradient.square()])


def run(scenario: Scenario, **options: Any) -> None:
    async def main() -> None:
        await scenario(Bench(**options))

    virtual_time.run(main())


# --- the transfer ------------------------------------------------------------------------------


def test_what_is_offered_arrives_while_the_donor_trains_on() -> None:
    async def scenario(bench: Bench) -> None:
        before = bench.vectors[0].clone()
        assert (await bench.offer()).steps == 50
        bench.vectors[0] += 1
        assert torch.equal(await bench.download(), before)
        assert bench.copies == [1]

    run(scenario)


def test_a_link_that_breaks_is_tried_again() -> None:
    async def scenario(bench: Bench) -> None:
        task = asyncio.create_task(bench.download())
        await asyncio.sleep(0.3)  # of 0.6 s
        bench.network.cut(bench.me.peer_id, bench.peers[0])
        await asyncio.sleep(1.0)
        bench.network.splice(bench.me.peer_id, bench.peers[0])
        assert torch.equal(await task, bench.vectors[0])

    run(scenario)


def test_changed_bytes_end_it() -> None:
    async def scenario(bench: Bench) -> None:
        def tamper(sender: PeerId, receiver: PeerId, name: str, data: bytes) -> bytes:
            return bytes([data[0] ^ 1]) + data[1:] if name == "moment" and len(data) > 999 else data

        bench.network.tamper = tamper
        with pytest.raises(TransportError, match="another hash"):
            await bench.download()

    run(scenario)


def test_all_who_ask_have_one_copy_which_is_given_up_when_idle() -> None:
    async def scenario(bench: Bench) -> None:
        bench.copy_s = 2.0
        offers = await asyncio.gather(*(bench.offer() for _ in range(5)))
        assert len({offer.digest for offer in offers}) == 1
        assert bench.copies == [1]
        await asyncio.sleep(59)
        assert bench.servers[0].keeps
        await asyncio.sleep(2)
        assert not bench.servers[0].keeps
        with pytest.raises(RemoteRefused, match="gone"):
            await bench.chunk(offers[0].digest)

    run(scenario)


def test_copies_take_little_of_a_trainers_time_whoever_asks() -> None:
    """Also those that come to nothing."""

    async def scenario(bench: Bench) -> None:
        bench.copy_s, bench.refuses = 3.0, {0}
        began, asked = asyncio.get_running_loop().time(), 0
        while asyncio.get_running_loop().time() < began + 330:
            with pytest.raises(RemoteRefused):
                await bench.offer()
            asked += 1
            await asyncio.sleep(0.5)
        assert asked > 100
        assert bench.copies[0] <= 11

    run(scenario)


@pytest.mark.parametrize("refuses", [False, True])
def test_who_hangs_up_leaves_the_copy_to_the_next(
    refuses: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a trainer would be at copies as often as somebody hangs up."""

    async def scenario(bench: Bench) -> None:
        bench.copy_s = 30.0
        bench.refuses = {0} if refuses else set()
        for _ in range(20):
            with pytest.raises(TransportError):
                await bench.offer(timeout=0.1)
            await asyncio.sleep(1)
        await asyncio.sleep(60)
        assert bench.servers[0].keeps != refuses
        await asyncio.sleep(62)
        assert not bench.servers[0].keeps
        assert bench.copies == [1]

    run(scenario)
    gc.collect()
    assert not caplog.records


def test_a_server_that_is_closed_makes_no_copy() -> None:
    async def scenario(bench: Bench) -> None:
        bench.copy_s = 30.0
        asked = asyncio.create_task(bench.offer(timeout=60.0))
        await asyncio.sleep(1)
        await bench.servers[0].aclose()
        with pytest.raises(TransportError):
            await asked
        assert not bench.servers[0].keeps

    run(scenario)


def test_an_old_copy_is_for_those_alone_who_are_at_it() -> None:
    async def scenario(bench: Bench) -> None:
        offer = await bench.offer()
        for _ in range(int(MAX_AGE_S // 50) + 1):
            await asyncio.sleep(50)
            assert await bench.chunk(offer.digest) == offer.chunk
        with pytest.raises(RemoteRefused, match="busy"):
            await bench.offer()
        await asyncio.sleep(61)
        await bench.offer()
        assert bench.copies == [2]

    run(scenario)


def test_a_chunk_that_is_not_there_is_refused() -> None:
    async def scenario(bench: Bench) -> None:
        offer = await bench.offer()
        with pytest.raises(RemoteRefused, match="protocol"):
            await bench.chunk(offer.digest, 10**6)

    run(scenario)


def test_another_run_or_length_is_refused() -> None:
    async def scenario(bench: Bench) -> None:
        with pytest.raises((RemoteRefused, Stale)):
            await bench.offer(run=bytes(32))
        with pytest.raises(Malformed, match="bytes"):
            await bench.offer(length=4 * N + 4)

    run(scenario)


@pytest.mark.parametrize("change", ["steps", "chunk", "hashes", "digest", "garbage"])
def test_an_offer_that_is_not_well_formed_is_refused(change: str) -> None:
    async def scenario(bench: Bench) -> None:
        true = await bench.offer()
        values = {name: getattr(true, name) for name in MomentsOffer.__annotations__}
        values |= {
            "steps": {"steps": 0},
            "chunk": {"chunk": 1},
            "hashes": {"hashes": true.hashes[:-32]},
            "digest": {"digest": bytes(32)},
            "garbage": {},
        }[change]
        answer = b"garbage" if change == "garbage" else MomentsOffer(**values).encode()
        liar = bench.network.join(Identity.from_seed(b"l" * 32).peer_id)

        async def lie(peer: PeerId, body: bytes) -> bytes:
            assert MomentsRequest.decode(body).run == RUN
            return answer

        liar.on_call("moments", lie)
        bench.peers.insert(0, liar.peer_id)
        with pytest.raises((Malformed, BadSignature)):
            await bench.offer()

    run(scenario)


# --- what a newcomer makes of it -----------------------------------------------------------------


def tried(tmp_path: Path, scenario: Callable[[Bench, Taking], Awaitable[None]]) -> None:
    manifest = tiny_manifest()
    places = Places.of(Layout.of_manifest(manifest), manifest.inner)

    async def main() -> None:
        bench = Bench(2, manifest.run_id, places.size)
        await scenario(bench, taking(bench, tmp_path, manifest))

    virtual_time.run(main())


def taking(bench: Bench, directory: Path, manifest: Manifest) -> Taking:
    async def greet(peer: PeerId) -> None:
        await asyncio.sleep(0)

    return Taking(bench.me, manifest, directory, inline, greet)


def test_the_first_donor_that_has_some_gives_them(tmp_path: Path) -> None:
    async def scenario(bench: Bench, taking: Taking) -> None:
        for refuses in (0, 1):
            bench.refuses = {refuses}
            taken, said = await taking.take(bench.peers, 1.0)
            assert taken.steps == 50 + 1 - refuses
            assert str(bench.peers[1 - refuses]) in said
            assert torch.equal(mapped(taken.path, bench.size), bench.vectors[1 - refuses])
            await asyncio.sleep(100)

    tried(tmp_path, scenario)


@pytest.mark.parametrize(("where", "value"), [(3, float("nan")), (-1, -1.0), (3, 1e9)])
def test_poisoned_moments_are_passed_over(tmp_path: Path, where: int, value: float) -> None:
    async def scenario(bench: Bench, taking: Taking) -> None:
        bench.vectors[0][where] = value
        taken, _ = await taking.take(bench.peers, 1.0)
        assert taken.steps == 51
        with pytest.raises(Malformed, match="moments of which exp_avg"):
            await taking.take(bench.peers[:1], 1.0)
        assert not (tmp_path / TAKEN).exists()

    tried(tmp_path, scenario)


def test_a_newcomer_gives_up_in_time(tmp_path: Path) -> None:
    async def scenario(bench: Bench, taking: Taking) -> None:
        with pytest.raises(Unreachable, match="no island is active"):
            await taking.take([], 1.0)
        bench.refuses = {0, 1}
        with pytest.raises(RemoteRefused, match="cold"):
            await taking.take(bench.peers, 1.0)
        await asyncio.sleep(10)
        bench.refuses, bench.silent = set(), {0, 1}
        began = asyncio.get_running_loop().time()
        with pytest.raises(FAILURES):
            await taking.take(bench.peers, 10.0)
        assert asyncio.get_running_loop().time() - began <= 91
        assert not (tmp_path / TAKEN).exists()

    tried(tmp_path, scenario)


def test_a_silent_donor_leaves_time_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.sample", lambda donors, count: donors[:count])

    async def scenario(bench: Bench, taking: Taking) -> None:
        bench.silent = {0}
        taken, _ = await taking.take(bench.peers, 1.0)
        assert taken.steps == 51

    tried(tmp_path, scenario)


def test_a_run_that_forgets_moments_has_none(tmp_path: Path) -> None:
    manifest = tiny_manifest()
    inner = manifest.inner.model_copy(update={"keep_moments": False})

    async def scenario(bench: Bench) -> None:
        one = taking(bench, tmp_path, manifest.model_copy(update={"inner": inner}))
        with pytest.raises(RemoteRefused, match="none that another could use"):
            await one.take(bench.peers, 1.0)
        assert bench.copies == [0]

    run(scenario)


# --- what a donor does ---------------------------------------------------------------------------


class Trainer:
    """What :class:`Giving` knows of a conductor; ``answer`` is the trainer's."""

    def __init__(self, answer: Callable[[Path], Donated]) -> None:
        self.training, self.files, self.answer = True, self, answer

    async def donate(self, path: Path) -> Donated:
        return self.answer(path)


def giving(trainer: Any, directory: Path) -> Giving:
    manifest = tiny_manifest()
    places = Places.of(Layout.of_manifest(manifest), manifest.inner)
    return Giving(trainer, places, directory, inline)


async def test_the_file_is_gone_while_its_copy_is_served(tmp_path: Path) -> None:
    def write(path: Path) -> Donated:
        path.write_bytes(honest(one.places.size, 0).numpy().tobytes())
        return Donated(str(path), 77, "")

    one = giving(Trainer(write), tmp_path)
    moments = await one.copy()
    assert moments.steps == 77
    assert torch.equal(moments.vector, honest(one.places.size, 0))
    assert not list(tmp_path.iterdir())  # noqa: ASYNC240 - nothing else runs in this loop


@pytest.mark.parametrize("case", ["cold", "disk", "gone", "idle", "short"])
async def test_a_donor_that_has_none_says_so(tmp_path: Path, case: str) -> None:
    def answer(path: Path) -> Donated:
        if case == "gone":
            raise ChannelClosedError("the trainer was started again")
        path.write_bytes(b"short")
        return Donated(str(path), 0 if case == "cold" else 50, "full" if case == "disk" else "")

    trainer = Trainer(answer)
    trainer.training = case != "idle"
    with pytest.raises(RemoteRefused, match="none"):
        await giving(trainer, tmp_path).copy()
    assert not list(tmp_path.iterdir())  # noqa: ASYNC240 - nothing else runs in this loop


async def test_a_copy_that_comes_too_late_is_removed(tmp_path: Path) -> None:
    class Island:
        async def send(self, command: Donate) -> None:
            assert command.path == str(tmp_path / "copy")

    files = TrainerFiles(Island())  # type: ignore[arg-type]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await files.donate(tmp_path / "copy")
    (tmp_path / "copy").write_bytes(bytes(8))
    files.told(Donated(str(tmp_path / "copy"), 50, ""))
    assert not list(tmp_path.iterdir())  # noqa: ASYNC240 - nothing else runs in this loop
