"""A checkpoint's outer state: of one moment, though rounds change it while it is written."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from replica_kit import ME, OTHER, normal
from saving_kit import SlowTrainer, keeper_at

from bootstrap.manifest import Manifest
from bootstrap.signed_manifest import SignedManifest
from gossip.catchup.lineage import Lineage
from node.checkpoints import freezing
from node.checkpoints.freezing import FrozenOuter, GivenUpError
from node.checkpoints.tensor_files import PIECE, read_tensors
from node.conductor import Conductor
from node.replicas.own_state import OwnReplica
from node.replicas.replica import ChainStanding, OuterReplica
from node.trainer.shared import SharedVectors
from protocols.codecs import RangeCodec
from protocols.identity import Identity
from protocols.memory import virtual_time
from protocols.memory.virtual_time import inline

PIECES = 3
ONE = PIECE // 4  # elements of a piece
SIZE = PIECES * ONE + 7
NOBODY = cast(SignedManifest, None)
IDENTITY = Identity.from_seed(bytes(32))


def frozen(
    *parts: torch.Tensor, room: Callable[[], int | None] = lambda: None
) -> tuple[FrozenOuter, Iterator[np.ndarray[Any, Any]]]:
    """One vector, which the parts are of, and its pieces on their way to the disk."""
    one = FrozenOuter(NOBODY, {"base": parts}, inline, room)
    (entry,) = one.entries()
    assert entry.shape == (sum(map(len, parts)),)
    return one, (np.array(piece).view(np.float32) for piece in entry.pieces())


async def test_what_is_not_written_when_a_round_comes_is_copied() -> None:
    vector = normal(1, SIZE)
    before = vector.clone()
    one, pieces = frozen(vector)
    found = [next(pieces)]
    await one.thaw(0)
    vector.zero_()
    found += pieces
    assert np.array_equal(np.concatenate(found), before.numpy())
    await one.thaw(0)  # the next round: there is nothing left to do


async def test_what_is_written_already_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    vector, copied, clone = normal(1, SIZE), list[int](), torch.Tensor.clone
    one, pieces = frozen(vector)
    next(pieces)

    def counted(part: torch.Tensor) -> torch.Tensor:
        copied.append(len(part))
        return clone(part)

    monkeypatch.setattr(torch.Tensor, "clone", counted)
    await one.thaw(0)
    assert copied == [SIZE - ONE]
    next(pieces)
    await one.thaw(0)
    assert copied == [SIZE - ONE], "the next round finds nothing in its way"


async def test_the_file_goes_on_while_much_is_copied_and_that_is_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(freezing, "COPIED", PIECE)
    vector = normal(1, SIZE)
    before = vector.clone()
    one, pieces = frozen(vector)
    found, copied = list[np.ndarray[Any, Any]](), list[int]()
    clone = torch.Tensor.clone

    def counted(part: torch.Tensor) -> torch.Tensor:
        copied.append(len(part))
        found.extend(islice(pieces, 2))
        return clone(part)

    monkeypatch.setattr(torch.Tensor, "clone", counted)
    await one.thaw(0)
    vector.zero_()
    assert copied == [ONE, 7], "of the last one not even that is kept: it has been written"
    found += pieces
    assert np.array_equal(np.concatenate(found), before.numpy())


async def test_a_copy_that_nobody_wants_any_more_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freezing, "COPIED", PIECE)
    one, _ = frozen(normal(1, SIZE))
    copied, clone = list[int](), torch.Tensor.clone

    def counted(part: torch.Tensor) -> torch.Tensor:
        copied.append(len(part))
        one.close()
        return clone(part)

    monkeypatch.setattr(torch.Tensor, "clone", counted)
    await one.thaw(0)
    assert copied == [ONE]


async def test_two_fragments_do_not_count_on_the_same_memory() -> None:
    """Their rounds may end at one moment: the second one sees what the first has taken."""
    vectors, left = (normal(1, SIZE), normal(2, SIZE)), [6 * SIZE]  # bytes: room for one of them

    async def offload(work: Callable[[], Any]) -> None:
        await asyncio.sleep(0)
        work()
        left[0] -= 4 * SIZE

    one = FrozenOuter(NOBODY, {"base": vectors}, offload, lambda: left[0])
    async with asyncio.timeout(10), asyncio.TaskGroup() as rounds:
        first, second = (rounds.create_task(one.thaw(fragment)) for fragment in (0, 1))
        for _ in range(20):
            await asyncio.sleep(0)
        assert first.done()
        assert not second.done(), "it waits for the file"
        one.close()


async def test_one_fragment_s_round_leaves_the_others_where_they_lie() -> None:
    first, second = normal(1, ONE + 5), normal(2, ONE + 9)
    before = second.clone()
    one, pieces = frozen(first, second)
    next(pieces)
    await one.thaw(1)
    second.zero_()
    first[ONE:] = 3.0  # nobody has released it: that is what is written
    found = np.concatenate(list(pieces))
    assert found[:5].tolist() == [3.0] * 5
    assert np.array_equal(found[5:], before.numpy())


@pytest.mark.parametrize("gives_up", [False, True])
async def test_without_the_memory_for_a_copy_the_round_waits_for_the_disk(gives_up: bool) -> None:
    vector = normal(1, SIZE)
    before = vector.clone()
    one, pieces = frozen(vector, room=lambda: int(1.05 * vector.nbytes))
    released = asyncio.ensure_future(one.thaw(0))
    await asyncio.sleep(0)
    found = [next(pieces)]
    assert not released.done()
    if gives_up:
        one.close()
        with pytest.raises(GivenUpError):
            next(pieces)
    else:
        found += pieces
        assert np.array_equal(np.concatenate(found), before.numpy())
        one.close()
    await released


@contextmanager
def replica_of(mode: str) -> Iterator[OuterReplica]:
    """A real one with momentum."""
    rounds = {"rounds": {"codec": "fp32"}} if mode == "diloco" else {}
    manifest = Manifest.model_validate({"mode": mode, **rounds})
    vectors = SharedVectors.create(SIZE)
    kind = OuterReplica if mode == "diloco" else OwnReplica
    one = kind(manifest, ME, vectors, RangeCodec("fp32", SIZE - 100), inline, (ME, OTHER))
    one.base.copy_(normal(1, SIZE))
    one.sent.copy_(normal(2, SIZE))
    one.vectors["v"].copy_(normal(3, SIZE))
    yield one
    del one.base, one.sent
    if isinstance(one, OwnReplica):
        del one.blend
    vectors.close()


async def moved(replica: OuterReplica) -> None:
    """A round, or a download, changes it."""
    if isinstance(replica, OwnReplica):
        await replica.start()
        await replica.finish(0, ours=True)
        return
    state = ChainStanding(replica.place, (ME, OTHER), None, Lineage(b"r" * 32, (ME,)))
    await replica.jump([normal(8, SIZE), normal(9, SIZE)], state, keep="nothing")


@pytest.mark.parametrize("mode", ["diloco", "gossip"])
@pytest.mark.parametrize("memory", [None, 0])
def test_a_round_while_the_state_is_written_is_not_in_the_checkpoint(
    tmp_path: Path, mode: str, memory: int | None
) -> None:
    async def story(replica: OuterReplica) -> None:
        expected = {"base": replica.base.clone(), "outer.v": replica.vectors["v"].clone()}
        keeper, trainer = keeper_at(tmp_path, []), SlowTrainer(copies=False)
        keeper.replicas, keeper.conductor = [replica], cast(Conductor, trainer)
        keeper.available = lambda: memory
        keeper.signed = SignedManifest.create(replica.manifest, IDENTITY)
        begun, goes_on = asyncio.Event(), asyncio.Event()

        async def held(work: Callable[[], Any]) -> Any:
            """The disk takes its time, and the first thing that is done is to write."""
            if not begun.is_set():
                begun.set()
                await goes_on.wait()
            return work()

        keeper.offload = held
        async with asyncio.TaskGroup() as tasks:
            saving = tasks.create_task(keeper.save())
            await begun.wait()
            round_ = tasks.create_task(moved(replica))
            await asyncio.sleep(1.0)
            assert round_.done() == (memory is None)
            assert torch.equal(replica.base, expected["base"]) != round_.done()
            goes_on.set()
            await round_  # which waits for no trainer
            assert not torch.equal(replica.base, expected["base"])
            assert trainer.copied is not None
            trainer.copied.set_result(None)
            await asyncio.sleep(0)
            trainer.write()
        assert saving.result()
        assert replica.frozen is None
        found = keeper.store.latest().checkpoint
        assert found is not None
        written = read_tensors(found.path / "outer.safetensors")
        for name, vector in expected.items():
            assert np.array_equal(written[name], vector.numpy())

    with replica_of(mode) as replica:
        virtual_time.run(story(replica))


async def test_the_last_piece_is_waited_for_while_it_is_being_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is left to copy then, and the outer step would begin in the middle of it."""
    vector, reading, take = normal(1, ONE), threading.Event(), freezing._Part.take

    def slow(part: freezing._Part, most: int) -> np.ndarray[Any, Any]:
        got = take(part, most)
        if len(got):
            reading.set()
            stepped.wait(0.2)  # with the lock: it is in vain
        return got

    monkeypatch.setattr(freezing._Part, "take", slow)
    stepped, before = threading.Event(), vector.clone()
    one = FrozenOuter(NOBODY, {"base": [vector]}, asyncio.to_thread)
    (entry,) = one.entries()
    writing = asyncio.create_task(
        asyncio.to_thread(lambda: [np.array(piece).view(np.float32) for piece in entry.pieces()])
    )
    assert await asyncio.to_thread(reading.wait, 10)
    await one.thaw(0)
    vector.zero_()
    stepped.set()
    assert np.array_equal(np.concatenate(await writing), before.numpy())
