"""A node's part in a run: what it finds when it comes."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
from gossip_kit import PLACE, announce_of
from identity_kit import identity

from bootstrap.handshake import Greeting
from bootstrap.manifest import Manifest
from bootstrap.signed_manifest import SignedManifest
from node import clock
from node.checkpoints.index import Facts
from node.entry.entrance import Run
from node.entry.preflight import preflight
from node.groundwork import Groundwork
from node.multiples import Multiples
from node.participation import Participation, reason_to_end
from node.trainer.channel import Applied
from protocols.codecs import kernels
from protocols.envelope import seal
from protocols.errors import OperatorError


async def test_who_enters_a_run_is_told_what_is_likely_to_disappoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("node.entry.preflight.layout_of", AsyncMock())
    part: Any = MagicMock()
    part.config.wait_for = 0
    for lr, told in ((0.7, 0), (2.0, 1)):
        manifest = Manifest.model_validate({"outer": {"lr": lr}})
        await preflight(part, MagicMock(), manifest)
        assert part.events.emit.call_count == told
    assert "overshoot" in part.events.emit.call_args.args[0].text


@pytest.mark.parametrize("mode", ["gossip", "push-sum"])
async def test_a_server_is_refused_where_islands_meet_in_pairs(mode: str) -> None:
    part: Any = MagicMock()
    part.config.role = "server"
    with pytest.raises(OperatorError, match="bad configuration") as refused:
        await preflight(part, MagicMock(), Manifest.model_validate({"mode": mode}))
    assert refused.value.code == "E204"
    assert "--role server" in refused.value.why


async def test_a_checkpoint_is_made_though_the_count_of_rounds_leaps_over_its_multiple() -> None:
    """As that of an island in pairs does which is slower than the others."""
    part: Any = MagicMock()
    part.node.daemon.stop_reason.done.return_value = False
    part._saves, saved = Multiples(10, 0), list[int]()
    for round_ in (7, 12, 19, 26, 26):
        applied = Applied(round_, 0, 0, 1.0)
        before = part.node.tasks.spawn.call_count
        await Participation._on_applied(part, applied)
        saved += [round_] * (part.node.tasks.spawn.call_count - before)
    assert saved == [12, 26]


@pytest.mark.parametrize(
    ("every", "copy", "asked"),
    [(10, "", [False]), (10, "s3://there", [True]), (0, "", [])],
)
async def test_room_is_asked_for_where_checkpoints_are_made(
    monkeypatch: pytest.MonkeyPatch, every: int, copy: str, asked: list[bool]
) -> None:
    monkeypatch.setattr("node.entry.preflight.layout_of", AsyncMock(return_value=MagicMock(size=9)))
    part: Any = MagicMock()
    part.config = SimpleNamespace(
        role="island", checkpoint_every=every, checkpoint_copy=copy, wait_for=0
    )
    store = MagicMock()
    await preflight(part, store, Manifest())
    assert [call.kwargs["copies"] for call in store.preflight.call_args_list] == asked


@pytest.mark.parametrize("over", [False, True])
async def test_who_comes_when_the_run_is_over_leaves_again(
    monkeypatch: pytest.MonkeyPatch, over: bool
) -> None:
    """Its trainer has no round to take, so nothing else would end it."""
    monkeypatch.setattr("node.participation.device_kind", lambda config: "cpu")
    manifest = Manifest()
    part: Any = MagicMock(manifest=manifest, island=None, conductor=None, finishing=False)
    part.config.rounds = 0
    part.reporter.round = manifest.rounds.total_rounds - (not over)
    part.node.welcome_others = AsyncMock()
    part._check_end = partial(Participation._check_end, part)
    async with AsyncExitStack() as stack:
        await Participation._start(part, stack, MagicMock(greetings=[], peers=[]))
    assert part.finishing is over
    assert part.node.leave.called is over
    assert part.events.emit.called is not over  # that it joins at a round which never comes
    assert part.node.timekeeper.presence is part.swarm.presence  # which tells whether it is behind


@pytest.mark.parametrize("trainer", ["none", "follows", "applies"])
def test_the_last_round_ends_a_node_without_a_trainer_that_would_apply_it(trainer: str) -> None:
    """A newcomer's, too: no further round will let it in."""
    node: Any = MagicMock()
    node.config.rounds = node.config.max_upload = 0
    part: Any = Participation(node, MagicMock())
    part.swarm, part.reporter, part.lookout = MagicMock(), MagicMock(), MagicMock()
    part.replicas = (SimpleNamespace(manifest=Manifest(), place=PLACE),)
    part.reporter.round = Manifest().rounds.total_rounds
    part.conductor = None if trainer == "none" else SimpleNamespace(follows=trainer == "follows")
    part._on_committed(MagicMock(), None)
    assert part.finishing is node.leave.called is (trainer != "applies")


async def test_rounds_of_fragment_0_that_were_before_this_node_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its rows are those of the history: other fragments may lag behind it."""
    monkeypatch.setattr("node.participation.device_kind", lambda config: "cpu")
    made = MagicMock()
    made.return_value.run = AsyncMock()
    monkeypatch.setattr("node.participation.LookingBack", made)
    part: Any = MagicMock(manifest=Manifest(), island=None, conductor=None, finishing=False)
    part.replicas = (SimpleNamespace(place=replace(PLACE, round=7)),)
    part.reporter.round = 6
    part.node.welcome_others = AsyncMock()
    part._look_back = partial(Participation._look_back, part)
    looks: list[Any] = []
    part.node.tasks.spawn = lambda work: looks.append(work) if asyncio.iscoroutine(work) else None
    async with AsyncExitStack() as stack:
        await Participation._start(part, stack, MagicMock(greetings=[], peers=["a peer"]))
    (look,) = looks
    await look
    made.return_value.run.assert_awaited_once_with(7)
    assert made.call_args.args[-2:] == (part.swarm, ["a peer"])


@pytest.mark.parametrize(
    ("over", "committed", "limit", "reason"),
    [
        (False, 7, 0, None),
        (False, 2, 3, None),
        (False, 3, 3, "3 rounds done, as --rounds says"),
        (False, 4, 3, "3 rounds done, as --rounds says"),
        (False, 1, 1, "1 round done, as --rounds says"),
        (True, 0, 0, "the run is over after 9 rounds"),
        (True, 3, 3, "the run is over after 9 rounds"),
    ],
)
def test_a_node_ends_with_the_run_or_after_as_many_rounds_as_it_is_to_take(
    over: bool, committed: int, limit: int, reason: str | None
) -> None:
    assert reason_to_end(9, committed, limit, over=over) == reason


@pytest.mark.parametrize("mode", ["diloco", "btm"])
@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("script", [None, object()])
async def test_no_rank_is_started_for_a_run_that_is_over(
    monkeypatch: pytest.MonkeyPatch, mode: str, over: bool, script: object | None
) -> None:
    """As where it is resumed. A script is there already, and is told."""
    monkeypatch.setattr("node.participation.device_kind", lambda config: "cpu")
    manifest = Manifest.model_validate({"mode": mode})
    part: Any = MagicMock(manifest=manifest, finishing=False)
    part.config.rounds, part.node.daemon.script = 0, script
    part.reporter.round = manifest.rounds.total_rounds - (mode == "diloco" and not over)
    part.replicas[0].place.work = int(over)
    part.conductor.island.start = AsyncMock()
    part.node.welcome_others = AsyncMock()
    part._check_end = partial(Participation._check_end, part)
    async with AsyncExitStack() as stack:
        await Participation._start(part, stack, MagicMock(greetings=[], peers=[]))
        stack.pop_all()
    starts = not over or script is not None
    assert part.conductor.island.start.called is part._conduct.called is starts
    assert part.finishing is part.node.leave.called is over


LAST = Manifest().rounds.total_rounds


def announcement(
    run: Run, number: int, round_: int, *, sequence: int = 1, expires: float = 60.0, **said: Any
) -> bytes:
    """What a peer says of itself; ``expires``: in so many seconds."""
    place = replace(PLACE, run=run.signed.run_id, round=round_)
    return seal(
        identity(number),
        announce_of(identity(number).peer_id, place, **said),
        purpose="announce",
        run=run.signed.run_id,
        sequence=sequence,
        expires=clock.wall() + expires,
    )


def greeting_with(*announces: bytes) -> Greeting:
    welcome: Any = SimpleNamespace(announces=announces)
    return Greeting(identity(2).peer_id, welcome, 0.0, 0.0)


def test_who_is_no_member_any_more_or_says_so_twice_does_not_count() -> None:
    """For a newcomer that asks whether the run is over; and of what one says the newest counts."""
    run = Run(SignedManifest.create(Manifest(), identity(1)), b"", created=False)
    for announces, over in (
        ([announcement(run, 2, LAST)], True),
        ([announcement(run, 2, LAST, expires=-60.0)], False),
        ([announcement(run, 2, LAST, role="observer")], False),
        ([announcement(run, 2, LAST, role="server")], True),
        ([announcement(run, 2, LAST)] * 2 + [announcement(run, 3, LAST - 1)], False),
        ([announcement(run, 2, LAST - 1), announcement(run, 2, LAST, sequence=2)], True),
        ([announcement(run, 2, LAST, sequence=2), announcement(run, 2, LAST - 1)], True),
    ):
        run.greetings = [greeting_with(one) for one in announces]
        assert run.said_to_be_over(clock.wall()) is over


@pytest.mark.parametrize(
    ("resumed", "said", "at", "does"),
    [
        (None, [LAST - 1], LAST - 1, ["read", "get"]),  # the state would be old after reading
        (None, [LAST], LAST, ["get"]),
        (None, [LAST], LAST - 1, ["get", "read"]),  # whoever said so was wrong
        (None, [LAST - 1, LAST, LAST], LAST, ["get"]),
        (None, [10**6, LAST - 1], LAST - 1, ["read", "get"]),  # one alone may be a liar
        (None, [], LAST, ["read", "get"]),
        (7, [], LAST, ["get"]),
        (7, [], LAST - 1, ["get", "read"]),
        (0, [], LAST - 1, ["get", "read"]),  # its trainer has taken no step yet
    ],
)
async def test_no_text_is_read_for_a_run_that_is_over(
    monkeypatch: pytest.MonkeyPatch, resumed: int | None, said: list[int], at: int, does: list[str]
) -> None:
    """It may take minutes, until nobody is there any more to say that it is."""
    run = Run(SignedManifest.create(Manifest(), identity(1)), b"", created=False)
    told = [announcement(run, number, round_) for number, round_ in enumerate(said, 2)]
    run.greetings = [greeting_with(b"nonsense", *told)]
    did: list[str] = []

    def does_so(what: str, result: Any = None) -> AsyncMock:
        return AsyncMock(side_effect=lambda *given, **more: did.append(what) or result)

    found = SimpleNamespace(find=AsyncMock(return_value=run))
    monkeypatch.setattr("node.groundwork.Finder", lambda *given: found)
    fetcher = SimpleNamespace(get=does_so("get"))
    monkeypatch.setattr("node.groundwork.Fetcher", lambda *given: fetcher)
    reading = SimpleNamespace(tokens=does_so("read", "tokens"), place="")
    monkeypatch.setattr("node.groundwork.Reading", lambda *given: reading)
    replicas = [SimpleNamespace(place=replace(PLACE, round=at, work=5))]
    monkeypatch.setattr("node.groundwork.make_replicas", lambda *given: replicas)
    ground: Any = MagicMock(_tell_hosts=AsyncMock())
    ground.config.role = "island"
    ground.node.daemon.script.vectors.tensors.return_value = (None, None)
    ground.node.clocks.offset = 0.0
    ground._read = partial(Groundwork._read, ground)
    restored: Any = None if resumed is None else MagicMock()
    if restored is not None:
        restored.facts.step = resumed
    basis = await Groundwork.lay(ground, restored)
    assert did == does
    assert (basis.tokens == "tokens") is ground._tell_hosts.called is ("read" in does)
    if "read" in does:  # what a trainer has been at work on is not replaced by the recipe
        reading.tokens.assert_awaited_once_with(run, trained=bool(resumed))


def laid(**run: bool) -> Any:
    """Groundwork that is laid at once, for a run like this."""
    return MagicMock(lay=AsyncMock(return_value=MagicMock(run=MagicMock(**run))))


async def test_compiled_loops_are_there_before_slices_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that takes them in serves all lanes, and may not wait for a compiler."""
    monkeypatch.setattr("node.participation.CheckpointStore", MagicMock())
    part: Any = MagicMock()
    part.config.role = "server"
    part._restored = part._keep_start = part._start = AsyncMock()
    monkeypatch.setattr("node.participation.Groundwork", MagicMock(return_value=laid()))
    part.node.offload = AsyncMock()
    part._assemble.side_effect = lambda *given: part.node.offload.assert_awaited_with(kernels.load)
    await Participation.enter(part, MagicMock())
    part._assemble.assert_called_once()


@pytest.mark.parametrize(
    ("created", "waits", "script", "every", "kept"),
    [
        (True, True, True, 10, True),
        (False, True, True, 10, False),  # it is resumed: that is where it is from
        (True, False, True, 10, False),
        (True, True, False, 10, False),  # its start follows from the manifest
        (True, True, True, 0, False),
    ],
)
async def test_the_start_of_a_script_that_waits_for_others_is_kept_before_they_come(
    monkeypatch: pytest.MonkeyPatch,
    created: bool,
    waits: bool,
    script: bool,
    every: int,
    kept: bool,
) -> None:
    monkeypatch.setattr("node.participation.CheckpointStore", MagicMock())
    part: Any = MagicMock()
    part.config = SimpleNamespace(role="server", keep_checkpoints=2, checkpoint_every=every)
    part.config.resume = not created
    part.node.daemon.script = object() if script else None
    part.node.offload = AsyncMock()
    part.replicas = (SimpleNamespace(place=PLACE),)
    part.gathering.on = lambda place: waits
    part._restored = part._start = AsyncMock()
    part._keep_start = partial(Participation._keep_start, part)
    ground = laid(created=created)
    monkeypatch.setattr("node.participation.Groundwork", MagicMock(return_value=ground))
    part._save, saved = AsyncMock(), list[bool]()
    part._serve.side_effect = lambda *given: saved.append(part._save.called)
    await Participation.enter(part, MagicMock())
    assert saved == [kept]


async def test_a_checkpoint_learns_the_validation_loss_of_its_round() -> None:
    part: Any = MagicMock()
    part.node.daemon.stop_reason.done.return_value = True
    await Participation._on_applied(part, Applied(7, 0, 0, 1.5))
    await Participation._on_applied(part, Applied(8, 0, 0, None))
    part.keeper.note_loss.assert_called_once_with(7, 1.5)


@pytest.mark.parametrize(("loss", "known"), [(1.5, ("0a", 1.5)), (None, None)])
def test_who_resumes_knows_the_loss_of_what_it_begins_with(
    monkeypatch: pytest.MonkeyPatch, loss: float | None, known: tuple[str, float] | None
) -> None:
    """Nobody evaluates that again."""
    for name in ("gathering_of", "make_swarm", "make_reports", "Lookout", "Multiples"):
        monkeypatch.setattr(f"node.participation.{name}", MagicMock())
    part, restored = MagicMock(), MagicMock()
    restored.facts = Facts(run="r", round=7, step=0, tokens=0, state="0a", validation=loss)
    Participation._assemble(part, MagicMock(), restored, MagicMock())
    assert part.keeper.validated == known
