"""Going on from a checkpoint: what must still be there beside it, and what is not overlooked."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blake3 import blake3
from identity_kit import identity

from bootstrap.manifest import Evaluation, Manifest
from bootstrap.seeds import PeerCache
from bootstrap.signed_manifest import SignedManifest
from node.checkpoints.checkpoint import CheckpointStore
from node.checkpoints.index import Facts
from node.checkpoints.outer_files import SHARD, write_beside
from node.config import resolve
from node.entry.brought import Brought
from node.entry.entrance import Run
from node.entry.finding import Finder
from node.monitor.events import Problem
from node.statedir import StateDir
from protocols.addresses import parse_address
from protocols.errors import OperatorError
from protocols.identity import PeerId

TEXT = b"what nobody trains on" * 40


def signed(**changes: Any) -> SignedManifest:
    evaluation = Evaluation(digest=blake3(TEXT).hexdigest())
    return SignedManifest.create(Manifest(evaluation=evaluation, **changes), identity(1))


class Peers:
    """Stands in for the entrance: one peer that is greeted and hands over the run, or nobody."""

    def __init__(self, run: SignedManifest, *, there: bool, refuses: str = "") -> None:
        self.run, self.there, self.refuses = run, there, refuses

    async def greet_seeds(self, run: bytes) -> list[Any]:
        if self.refuses:
            raise OperatorError(self.refuses, "not you", "of another", "ask")
        if not self.there:
            raise OperatorError("E501", "nobody", "nobody", "nothing")
        welcome = SimpleNamespace(run=self.run.run_id)
        return [SimpleNamespace(peer=identity(2).peer_id, welcome=welcome)]

    async def pass_checks(self) -> None:
        """Nothing is left to be checked."""

    async def patiently(self, join: Any) -> Any:
        return await join()

    async def take(self, greetings: list[Any], own: Manifest | None) -> Run:
        assert own is None
        return Run(self.run, TEXT, created=False, greetings=greetings)


class Reader:
    """Stands in for what reads text, and makes a run of it."""

    async def make_run(self, manifest: Manifest) -> Run:
        return Run(SignedManifest.create(manifest, identity(1)), TEXT, created=True)


async def at_once(work: Callable[[], Any]) -> Any:
    return work()


def finder(
    home: Path,
    run: SignedManifest,
    *,
    own: Manifest | None = None,
    there: bool = False,
    **flags: Any,
) -> Finder:
    offered: list[Run] = []
    node = SimpleNamespace(
        config=resolve({"dir": str(home), "resume": "true", **flags}, {}),
        home=StateDir(home),
        cache=PeerCache(home / "peers.json"),
        daemon=SimpleNamespace(manifest=own),
        offload=at_once,
        events=SimpleNamespace(emit=lambda event: None),
    )

    async def ready(manifest: Manifest) -> None:
        """This machine lacks nothing."""

    peers: Any = Peers(run, there=there)
    reader: Any = Reader()
    return Finder(node, peers, reader, offered.append, ready)  # type: ignore[arg-type]


async def test_what_is_whole_is_taken_without_any_peer(tmp_path: Path) -> None:
    (tmp_path / SHARD).write_bytes(TEXT)
    found = await finder(tmp_path, signed()).find(signed())
    assert found.shard == TEXT
    assert not found.created


@pytest.mark.parametrize("kept", [None, b"", TEXT[:-1], b"x" * len(TEXT)])
async def test_a_lost_or_damaged_evaluation_text_is_told_of(
    tmp_path: Path, kept: bytes | None
) -> None:
    if kept is not None:
        (tmp_path / SHARD).write_bytes(kept)
    with pytest.raises(OperatorError) as caught:
        await finder(tmp_path, signed()).find(signed())
    assert caught.value.code == "E404"
    assert SHARD in caught.value.what
    assert "--peers" in caught.value.fix


async def test_a_disk_that_does_not_give_it_back_ends_no_training_and_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / SHARD).write_bytes(TEXT)
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    read, draft = Path.read_bytes, tmp_path / "draft"

    def damaged(path: Path) -> bytes:
        if path.name == SHARD:
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", damaged)
    draft.mkdir()
    write_beside(draft, tmp_path)
    assert [file.name for file in draft.iterdir()] == ["tokenizer.json"]
    with pytest.raises(OperatorError) as caught:
        await finder(tmp_path, signed()).find(signed())
    assert caught.value.code == "E404"


async def test_and_fetched_from_a_peer_that_has_it(tmp_path: Path) -> None:
    (tmp_path / SHARD).write_bytes(TEXT[:100])
    found = await finder(tmp_path, signed(), there=True, peers=["a:1"]).find(signed())
    assert found.shard == TEXT
    assert (tmp_path / SHARD).read_bytes() == TEXT
    assert found.peers == [identity(2).peer_id]


@pytest.mark.parametrize("code", ["E103", "E201", "E202", "E203", "E301"])
async def test_who_was_where_once_keeps_nobody_from_going_on(tmp_path: Path, code: str) -> None:
    """Only what --peers names has to be right: a cached address may be another's by now."""
    (tmp_path / SHARD).write_bytes(TEXT)
    PeerCache(tmp_path / "peers.json").remember([parse_address("192.0.2.1:4390")])
    for given in ([], ["192.0.2.2:4390"]):
        found = finder(tmp_path, signed(), peers=given)
        found.entrance = Peers(signed(), there=True, refuses=code)  # type: ignore[assignment]
        said: list[Any] = []
        found.node.events.emit = said.append  # type: ignore[method-assign,assignment]
        if given:
            with pytest.raises(OperatorError, match="not you") as caught:
                await found.find(signed())
            assert caught.value.code == code
        else:
            assert (await found.find(signed())).shard == TEXT
            assert [(one.code, one.fix) for one in said] == [(code, "going on alone; ask")]


async def test_and_found_in_a_checkpoint(tmp_path: Path) -> None:
    """A copy of the checkpoints may be all that is left of a disk."""
    before = tmp_path / "before"
    before.mkdir()
    (before / SHARD).write_bytes(TEXT)
    checkpoints = tmp_path / "after" / "checkpoints"
    for number, text in enumerate((TEXT, b"damaged")):
        (checkpoints / f"ckpt-0000000{number}").mkdir(parents=True)
        (before / SHARD).write_bytes(text)
        write_beside(checkpoints / f"ckpt-0000000{number}", before)
    found = await finder(tmp_path / "after", signed()).find(signed())
    assert found.shard == TEXT
    assert (tmp_path / "after" / SHARD).read_bytes() == TEXT


@pytest.mark.parametrize("peers", [[], ["192.0.2.1:4390"]], ids=["alone", "with a peer"])
async def test_a_seed_is_free_again_where_the_run_that_it_was_brought_is_not_to_be_had(
    tmp_path: Path, peers: list[str]
) -> None:
    seed = finder(tmp_path, signed(), role="seed", peers=peers)
    node: Any = seed.node
    node.brought, node.say_started = Brought(str), lambda label, device: None
    told: list[str] = []

    def brings(number: int) -> None:
        """As the gate tells: of nobody who brings one while there is one."""
        if not node.daemon.run_id:
            node.brought.add(identity(number).peer_id, signed().run_id)

    def emit(event: Any) -> None:
        if isinstance(event, Problem):
            told.append(event.fix)
            brings(3)

    class Bringers(Peers):
        """The first has gone by the time that it is asked."""

        async def take_from(self, peer: PeerId, run: bytes) -> Run:
            if peer == identity(2).peer_id:
                raise OperatorError("E502", "gone", "gone", "nothing")
            return Run(self.run, TEXT, created=False)

    node.events.emit, node.daemon.run_id = emit, b""
    brings(2)
    seed.entrance = Bringers(signed(), there=False)  # type: ignore[assignment]
    async with asyncio.timeout(10):
        run = await seed._wait_for_a_run()
    assert run.signed.run_id == node.daemon.run_id == signed().run_id
    assert told == ["waiting for another run"]


async def test_a_run_that_nobody_hands_over_keeps_no_other_from_a_seed(tmp_path: Path) -> None:
    """Nor is anybody told of it: a stranger has made it up, and can again and again."""
    seed = finder(tmp_path, signed(), role="seed")
    node: Any = seed.node
    node.brought, node.say_started = Brought(str), lambda label, device: None
    node.daemon.run_id = b""
    stranger, creator = identity(2).peer_id, identity(3).peer_id
    asked: dict[PeerId, bytes] = {}

    class Bringers(Peers):
        async def take_from(self, peer: PeerId, run: bytes) -> Run:
            asked[peer] = node.daemon.run_id
            if peer == stranger:
                node.brought.add(creator, self.run.run_id)
                await asyncio.get_running_loop().create_future()
            return Run(self.run, TEXT, created=False)

    seed.entrance = Bringers(signed(), there=False)  # type: ignore[assignment]
    node.brought.add(stranger, bytes(32))
    async with asyncio.timeout(10):
        run = await seed._wait_for_a_run()
    assert asked == {stranger: b"", creator: b""}
    assert run.signed.run_id == node.daemon.run_id == signed().run_id


async def test_a_lost_tokenizer_is_told_of(tmp_path: Path) -> None:
    (tmp_path / SHARD).write_bytes(TEXT)
    run = signed(data={"tokenizer": "ab" * 32})
    with pytest.raises(OperatorError, match=r"tokenizer\.json") as caught:
        await finder(tmp_path, run).find(run)
    assert caught.value.code == "E404"


async def test_a_script_s_run_has_no_such_text(tmp_path: Path) -> None:
    script = {"layout": "ab" * 32, "parameters": 8}
    run = SignedManifest.create(Manifest(script=script), identity(1))
    assert (await finder(tmp_path, run).find(run)).shard == b""


async def test_settings_of_a_run_that_the_checkpoint_s_does_not_have_are_e201(
    tmp_path: Path,
) -> None:
    (tmp_path / SHARD).write_bytes(TEXT)
    own = Manifest(inner={"lr": 0.5})
    with pytest.raises(OperatorError) as caught:
        await finder(tmp_path, signed(), own=own).find(signed())
    assert caught.value.code == "E201"
    assert "inner.lr" in caught.value.why
    assert "--set" in caught.value.fix
    assert f"node export FOLDER --from {tmp_path}, and --init-from FOLDER" in caught.value.fix
    same = await finder(tmp_path, signed(inner={"lr": 0.5}), own=own).find(
        signed(inner={"lr": 0.5})
    )
    assert same.manifest.inner.lr == 0.5


async def test_a_script_brings_its_model_itself(tmp_path: Path) -> None:
    kept = signed(script={"layout": "ab" * 32, "parameters": 8})
    with pytest.raises(OperatorError, match="another run") as caught:
        await finder(tmp_path, kept, own=Manifest()).find(kept)
    assert "export" not in caught.value.fix


def checkpoint(home: Path, run: str) -> Path:
    store = CheckpointStore(home / "checkpoints")
    with store.draft() as draft:
        (draft / "trainer.json").write_text("{}")
        return store.commit(draft, Facts(run=run, round=6, step=60, tokens=0)).path


@pytest.mark.parametrize("same", [True, False], ids=["the same settings", "another run"])
async def test_no_run_begins_among_the_checkpoints_of_another(tmp_path: Path, same: bool) -> None:
    (tmp_path / "checkpoints").mkdir()
    again: dict[str, Any] = {"own": Manifest(), "resume": "false"}
    assert (await finder(tmp_path, signed(), **again).find(None)).created  # killed before its first
    kept = checkpoint(tmp_path, Manifest().run_id.hex() if same else "ab" * 32)
    (tmp_path / SHARD).write_bytes(b"of the run before")
    with pytest.raises(OperatorError, match="--resume") as caught:
        await finder(tmp_path, signed(), **again).find(None)
    assert (caught.value.code, caught.value.exit_code) == ("E105", 1)
    assert kept.name in caught.value.why
    assert all(word in caught.value.fix for word in ("--resume", "--dir", "checkpoints away"))
    assert (tmp_path / SHARD).read_bytes() == b"of the run before"
    (kept / "checkpoint.json").unlink()  # nobody can go on from it
    assert (await finder(tmp_path, signed(), **again).find(None)).created


async def test_who_joins_its_own_run_again_is_told_what_resume_would_have_kept(
    tmp_path: Path,
) -> None:
    run = signed()
    joins: dict[str, Any] = {"there": True, "peers": ["a:1"], "resume": "false"}
    assert not await warnings(finder(tmp_path, run, **joins))
    checkpoint(tmp_path, run.run_id.hex())
    (told,) = await warnings(finder(tmp_path, run, **joins))
    assert told.code == "E105"
    assert "ckpt-00000006 of this run is here" in told.what
    assert "--resume" in told.fix
    with pytest.raises(OperatorError, match="has checkpoints") as caught:
        await finder(tmp_path, signed(seed=2), **joins).find(None)
    assert "of another run" in caught.value.why
    seed = finder(tmp_path, signed(seed=2), role="seed", **joins)  # it writes none
    assert (await seed.find(None)).manifest.seed == 2


async def warnings(finder: Finder) -> list[Any]:
    """What it says as it joins a run."""
    said: list[Any] = []
    finder.node.events.emit = said.append  # type: ignore[method-assign,assignment]
    assert not (await finder.find(None)).created
    return said


async def test_no_run_is_made_with_an_invitation_that_can_be_guessed(tmp_path: Path) -> None:
    again: dict[str, Any] = {"own": Manifest(), "resume": "false"}
    with pytest.raises(OperatorError, match="too short") as caught:
        await finder(tmp_path, signed(), **again, invitation="only us").find(None)
    assert caught.value.code == "E204"
    assert "7 characters, at least 12" in caught.value.why
    assert "openssl rand" in caught.value.fix
    assert "only us" not in caught.value.text()
    made = await finder(tmp_path, signed(), **again, invitation="f3" * 16).find(None)
    assert made.created


@pytest.mark.parametrize(("invitation", "told"), [("only us", 1), ("f3" * 16, 0), (None, 0)])
async def test_of_a_run_that_has_one_already_it_is_told(
    tmp_path: Path, invitation: str | None, told: int
) -> None:
    (tmp_path / SHARD).write_bytes(TEXT)
    found = finder(tmp_path, signed(), invitation=invitation)
    said: list[Any] = []
    found.node.events.emit = said.append  # type: ignore[method-assign,assignment]
    await found.find(signed())
    assert [one.code for one in said] == ["E204"] * told


JOINS: dict[str, Any] = {"there": True, "peers": ["a:1"], "resume": "false"}


@pytest.mark.parametrize("flag", ["init_from", "hf_config"])
async def test_a_model_is_not_dropped_in_silence_by_who_joins(tmp_path: Path, flag: str) -> None:
    given: dict[str, Any] = {flag: str(tmp_path)}
    with pytest.raises(OperatorError) as caught:
        await finder(tmp_path, signed(), **JOINS, **given).find(None)
    assert caught.value.code == "E204"
    assert f"--{flag.replace('_', '-')} with --peers" in caught.value.what
    assert "for who creates a run" in caught.value.why
    said: list[Any] = []
    (tmp_path / SHARD).write_bytes(TEXT)
    for own in (None, Manifest()):  # as its creator was started, with --resume
        again = finder(tmp_path, signed(), own=own, **given)
        again.node.events.emit = said.append  # type: ignore[method-assign,assignment]
        await again.find(signed())
    assert len(said) == 2
    assert all("is not read: " in event.text for event in said)


@pytest.mark.parametrize("resume", [False, True])
async def test_another_tokenizer_than_the_run_s_is_e604(tmp_path: Path, resume: bool) -> None:
    (tmp_path / SHARD).write_bytes(TEXT)
    file = tmp_path / "mine.json"
    file.write_bytes(b"{}")
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    same = signed(data={"tokenizer": blake3(b"{}").hexdigest()})
    flags: dict[str, Any] = {"tokenizer": str(file)} | ({} if resume else JOINS)
    for run in (same, signed()):
        found = finder(tmp_path, run, **flags).find(run if resume else None)
        if run is same:
            assert not (await found).created
            continue
        with pytest.raises(OperatorError, match=r"mine\.json is not the tokenizer") as caught:
            await found
        assert caught.value.code == "E604"
    file.unlink()
    with pytest.raises(OperatorError, match="cannot read the tokenizer"):
        await finder(tmp_path, same, **flags).find(same if resume else None)
    made = finder(tmp_path, same, own=Manifest(), tokenizer=str(file), resume="false")
    assert (await made.find(None)).created  # it is read by what makes the run
