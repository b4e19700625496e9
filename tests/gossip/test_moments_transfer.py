"""An optimizer's moments on their way from a donor to a newcomer."""

from __future__ import annotations

import asyncio
import gc

import pytest
import torch
from moments_kit import RUN, Bench, N, run

from bootstrap.state.copies import SLOWEST, START_S
from bootstrap.state.moments import MAX_AGE_S
from protocols.errors import BadSignature, Malformed, RemoteRefused, Stale, TransportError
from protocols.identity import Identity, PeerId
from protocols.messages import MomentsOffer, MomentsRequest

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
        assert bench.keeps
        await asyncio.sleep(2)
        assert not bench.keeps
        with pytest.raises(RemoteRefused, match="gone"):
            await bench.chunk(offers[0].digest)

    run(scenario)


def test_who_takes_a_chunk_now_and_then_does_not_keep_others_from_newer_ones() -> None:
    async def scenario(bench: Bench) -> None:
        clock, digest = asyncio.get_running_loop().time, (await bench.offer()).digest
        end = clock() + MAX_AGE_S + START_S + 4 * N / SLOWEST
        while clock() < end:
            await bench.chunk(digest)
            if clock() > MAX_AGE_S + 1:
                with pytest.raises(RemoteRefused, match="busy"):
                    await bench.offer()
            await asyncio.sleep(50)
        await bench.offer()
        assert bench.copies == [2]

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
        assert bench.keeps != refuses
        await asyncio.sleep(62)
        assert not bench.keeps
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
        assert not bench.keeps

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
