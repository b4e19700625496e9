"""Members without a trainer: rounds over the real transport, and what they report."""

from __future__ import annotations

import asyncio
import io
import json
import mmap
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from typer.testing import CliRunner

from gossip.exchange.ledger import Ledger
from gossip.exchange.merging import PartMerge
from gossip.exchange.relaying import GroupMerge
from gossip.membership.presence import Presence
from gossip.rounds.instructions import Commit, Instruction
from gossip.rounds.round import Round
from node.bench.command import Json, Text, main
from node.bench.member import Member, Taken
from node.bench.memory import forget_peak, peak_bytes, resident_bytes
from node.bench.noise import Noise
from node.bench.settings import Settings
from node.bench.watching import Stage, Watch, WatchedChain
from node.cli import app
from node.outermost import first_known
from protocols.codecs import CHUNK, Codec
from protocols.errors import OperatorError
from protocols.http.transport import HttpTransport
from protocols.identity import Identity
from protocols.lanes import lane, packing
from protocols.lanes.packing import Packer, Unpacker
from protocols.messages import PartResult

SETTINGS = Settings(members=3, size=200_000, codec="fp32", rounds=2, listen="127.0.0.1:0")


Passed = list[tuple[Stage, int]]


async def take_rounds(
    settings: Settings, regions: tuple[str, ...] = ("",)
) -> tuple[list[list[Taken]], list[Passed]]:
    """What each of the members reports, and the stages that it passed."""
    taken: list[list[Taken]] = [[] for _ in range(settings.members)]
    passed: list[Passed] = [[] for _ in range(settings.members)]
    addresses: asyncio.Queue[str] = asyncio.Queue()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        first = ""
        for seed in range(settings.members):
            own = replace(
                settings,
                seed=seed,
                peers=(first,) if first else (),
                region=regions[seed % len(regions)],
            )
            member = Member(
                own,
                opened=lambda peer, address: addresses.put_nowait(f"{address}/{peer}"),
                took=taken[seed].append,
                passed=lambda stage, round_, mine=passed[seed]: mine.append((stage, round_)),
            )
            group.create_task(member.run())
            first = first or await addresses.get()
    return taken, passed


def mean(settings: Settings, round_: int) -> torch.Tensor:
    """What the members' noise comes to, added in the order of weights of a third."""
    drawn = []
    for seed in range(settings.members):
        generator = torch.Generator().manual_seed(1009 * seed + round_)
        drawn.append(torch.empty(settings.size).normal_(generator=generator))
    return torch.stack(drawn).mean(0)


@pytest.mark.parametrize("tls", [True, False])
async def test_all_end_with_the_mean(tls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors: dict[str, torch.Tensor] = {}

    real = Noise.digest

    def digest(noise: Noise) -> bytes:
        found = real(noise)
        vectors[found.hex()] = noise.mean.clone()
        return found

    monkeypatch.setattr(Noise, "digest", digest)
    settings = replace(SETTINGS, tls=tls)
    taken, passed = await take_rounds(settings)
    for round_ in range(2):
        ours = [member[round_] for member in taken]
        assert {one.round for one in ours} == {round_}
        assert len({one.digest for one in ours}) == 1
        torch.testing.assert_close(vectors[ours[0].digest], mean(settings, round_))
        assert {(one.contributors, one.merged) for one in ours} == {(3, 1.0)}
        # what the others merged, two thirds; what is not needed for a majority may come later
        assert all(one.received >= 4 * settings.size * 2 / 3 for one in ours)
    assert sum(one.sent for member in taken for one in member) >= 2 * 4 * settings.size
    for round_ in range(2):
        each = [[stage for stage, of in stages if of == round_] for stages in passed]
        # two votes of three are enough: who is last may hold the certificate before it votes
        assert sum(Stage.CERTIFYING in came for came in each) >= 2
        for came in each:
            assert sorted({*came, Stage.CERTIFYING}) == sorted(Stage)
            # two slices leave beside each other, and the own part is merged beside both
            assert came[:2] == [Stage.READY, Stage.PLANNED]
            assert came.index(Stage.SENDING) < came.index(Stage.HALF_SENT)
            assert came[-2:] == [Stage.COMMITTED, Stage.APPLIED]


async def test_who_misses_a_commit_repeats_the_round_from_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missed: list[WatchedChain] = []
    real = WatchedChain.carry_out

    def carry_out(chain: WatchedChain, of: Round, instructions: list[Instruction]) -> None:
        commits = any(isinstance(one, Commit) for one in instructions)
        if commits and not missed:
            missed.append(chain)
            instructions = [one for one in instructions if not isinstance(one, Commit)]
        real(chain, of, instructions)

    monkeypatch.setattr(WatchedChain, "carry_out", carry_out)
    taken, _ = await take_rounds(SETTINGS)
    assert missed
    for round_ in range(2):
        assert len({member[round_].digest for member in taken}) == 1


async def test_who_cannot_catch_up_ends_with_an_error_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stood still for longer than rounds are kept: all waited for each other for ever."""
    late: list[WatchedChain] = []
    ended: list[OperatorError] = []
    carry_out, run = WatchedChain.carry_out, Member.run

    def standing_still(chain: WatchedChain, of: Round, instructions: list[Instruction]) -> None:
        if not late and any(isinstance(one, Commit) for one in instructions):
            late.append(chain)
        if late and late[0] is chain:
            instructions = [one for one in instructions if not isinstance(one, Commit)]
        carry_out(chain, of, instructions)

    async def run_to_its_end(member: Member) -> None:
        try:
            await run(member)
        except ExceptionGroup as error:
            ended.append(first_known(error))

    monkeypatch.setattr(WatchedChain, "carry_out", standing_still)

    async def not_held(chain: WatchedChain, result: PartResult) -> None:
        return None

    monkeypatch.setattr(Ledger, "part", lambda *args: None)  # no round is kept
    monkeypatch.setattr(WatchedChain, "_bytes_of", not_held)
    monkeypatch.setattr(Member, "run", run_to_its_end)
    taken, _ = await take_rounds(replace(SETTINGS, rounds=3))
    assert sorted(map(len, taken)) == [0, 3, 3]
    (error,) = ended
    assert error.code == "E502"
    assert "left behind in round 0" in error.what


async def test_who_is_there_and_comes_no_further_is_not_waited_for_for_ever() -> None:
    said: list[str] = []
    stays = SimpleNamespace(peer=Identity.generate().peer_id, round=0)
    loop = asyncio.get_running_loop()
    presence = SimpleNamespace(
        membership=SimpleNamespace(members_alive=lambda now: [stays]),
        wiring=SimpleNamespace(now=loop.time),
    )
    member = Member(replace(SETTINGS, patience_s=0.2), said=said.append)
    member._met = frozenset([stays.peer])
    async with asyncio.timeout(30):
        await member._others_at(cast(Presence, presence), 1)
    assert said == ["not all who are there have come to round 1: it begins all the same"]


async def test_who_was_not_met_is_not_waited_for() -> None:
    said: list[str] = []
    stranger = SimpleNamespace(peer=Identity.generate().peer_id, round=0)
    loop = asyncio.get_running_loop()
    presence = SimpleNamespace(
        membership=SimpleNamespace(members_alive=lambda now: [stranger]),
        wiring=SimpleNamespace(now=loop.time),
    )
    member = Member(replace(SETTINGS, patience_s=0.2), said=said.append)
    async with asyncio.timeout(30):
        await member._others_at(cast(Presence, presence), 1)
    assert not said


class Begun:
    """Members that are started one by one, of a bench that does not end by itself."""

    def __init__(self, group: asyncio.TaskGroup, settings: Settings) -> None:
        self.group, self.settings = group, settings
        self.address = ""
        self.rounds: list[asyncio.Queue[Taken]] = []  # of each member

    async def one(self) -> asyncio.Task[OperatorError]:
        """Start one more; with what it ends, once its port is open."""
        opened: asyncio.Queue[str] = asyncio.Queue()
        rounds: asyncio.Queue[Taken] = asyncio.Queue()
        self.rounds.append(rounds)
        member = Member(
            replace(self.settings, peers=(self.address,) if self.address else ()),
            opened=lambda peer, address: opened.put_nowait(f"{address}/{peer}"),
            took=rounds.put_nowait,
        )
        task = self.group.create_task(self._end_of(member))
        address = await opened.get()
        self.address = self.address or address
        return task

    async def _end_of(self, member: Member) -> OperatorError:
        try:
            await member.run()
        except ExceptionGroup as error:
            return first_known(error)
        raise AssertionError("it came to its last round")


TWO = replace(SETTINGS, members=2, size=1000, rounds=10**6)


async def test_who_comes_to_a_bench_that_is_complete_ends_and_the_others_go_on() -> None:
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        begun = Begun(group, TWO)
        first, second = await begun.one(), await begun.one()
        await begun.rounds[1].get()
        error = await (await begun.one())
        assert error.code == "E501"
        assert error.what == "3 members came, --members says 2"
        assert begun.rounds[2].empty()
        for rounds in begun.rounds[:2]:
            while not rounds.empty():
                rounds.get_nowait()
            assert (await rounds.get()).contributors == 2
        for task in (first, second):
            assert not task.done()
            task.cancel()


async def test_where_more_meet_than_was_agreed_on_all_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two came at once, and neither knew of the other when it met the first."""
    asked, real = asyncio.Barrier(2), Member._not_met

    async def at_once(member: Member, *arguments: Any) -> str:
        found = await real(member, *arguments)
        await asked.wait()
        return found

    monkeypatch.setattr(Member, "_not_met", at_once)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        begun = Begun(group, TWO)
        tasks = [await begun.one() for _ in range(3)]
        for task in tasks:
            error = await task
            assert (error.code, error.what) == ("E501", "3 members came, --members says 2")


async def test_who_does_not_come_is_waited_for_in_vain() -> None:
    lonely = Member(replace(SETTINGS, patience_s=0.3))
    with pytest.raises(ExceptionGroup) as caught:
        await lonely.run()
    [error] = caught.value.exceptions
    assert isinstance(error, OperatorError)
    assert error.code == "E501"
    assert "1 of 3 members" in str(error)


def test_only_those_who_agree_form_a_run() -> None:
    for change in (
        {"members": 4},
        {"size": 7},
        {"codec": "int8"},
        {"rounds": 9},
        {"quorum": 0.5},
        {"max_group": 8},
    ):
        assert replace(SETTINGS, **change).run != SETTINGS.run
    for own in ({"seed": 4}, {"listen": "[::1]:1"}, {"patience_s": 9.0}):
        assert replace(SETTINGS, **own).run == SETTINGS.run


def test_a_stage_counts_once_a_round() -> None:
    told: list[tuple[Stage, int]] = []
    watch = Watch(lambda stage, round_: told.append((stage, round_)))
    for round_ in range(2):
        watch.begin(round_)
        watch.pass_(Stage.SENDING)
        first = watch.moments[Stage.SENDING]
        watch.pass_(Stage.SENDING)
        assert watch.moments == {Stage.SENDING: first}
    assert told == [(Stage.SENDING, 0), (Stage.SENDING, 1)]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells peaks")
def test_a_peak_is_forgotten() -> None:
    before = resident_bytes()
    # not by an allocator, which may keep it: what ranks set for theirs holds for the process
    with mmap.mmap(-1, 64 * 2**20) as block:
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
        assert peak_bytes() >= before + 60 * 2**20
    forget_peak()
    assert peak_bytes() < before + 40 * 2**20


def taken(round_: int, seconds: float) -> Taken:
    moments = {Stage.READY: 1.0, Stage.PLANNED: 1.25, Stage.APPLIED: 1.25 + seconds}
    return Taken(round_, moments, 3, 0.5, 10**6, 2 * 10**6, 10**6, "ab" * 32)


async def test_why_a_peer_is_not_met_is_told_while_it_waits_and_at_the_end() -> None:
    said: list[str] = []
    stranger = HttpTransport(Identity.generate(), listen="127.0.0.1:0")
    async with stranger:
        assert stranger.listening is not None
        trains = f"127.0.0.1:{stranger.listening[1]}"
        settings = replace(SETTINGS, peers=("127.0.0.1:1", trains), patience_s=0.3)
        with pytest.raises(ExceptionGroup) as error:
            await Member(settings, said=said.append).run()
    assert [text.partition(":")[0] for text in said] == ["cannot reach 127.0.0.1", "127.0.0.1"]
    assert "nothing listens there" in said[0]
    assert f"{trains} answers, but is no member of this bench" in said[1]
    told = first_known(error.value)
    assert isinstance(told, OperatorError)
    assert told.code == "E501"
    assert "nothing listens there" in told.why


def test_what_people_read() -> None:
    out = io.StringIO()
    report = Text(out, SETTINGS)
    report.opened("12D3KooWx", "192.0.2.7:4390")  # type: ignore[arg-type]
    for round_, seconds in enumerate((0.5, 0.25, 2.0)):
        report.took(taken(round_, seconds))
    report.took(replace(taken(3, 1), moments={Stage.APPLIED: 2.0}))
    report.took(replace(taken(4, 0.1), contributors=2))  # fast, with fewer to wait for
    report.end()
    lines = out.getvalue().splitlines()
    assert lines[0] == "200,000 elements, 0.8 MB as fp32, 3 members, mutual TLS"
    assert " node bench --peers 192.0.2.7:4390/12D3KooWx --members 3 " in lines[1]
    assert "0.500 s, waited 0.250 s" in lines[2]
    assert "16 and 32 Mbit/s" in lines[2]
    assert "3 peers, 50% merged" in lines[2]
    assert "1.25 x the vector" in lines[2]
    assert "missed" in lines[5]
    assert "2 peers" in lines[6]
    end = "median of 3 of 5 rounds, those with all 3 members, 0.500 s, fastest 0.250 s"
    assert lines[7] == end


def test_rounds_that_all_had_all_members_are_just_rounds() -> None:
    out = io.StringIO()
    report = Text(out, SETTINGS)
    for round_, seconds in enumerate((0.5, 0.25, 2.0)):
        report.took(taken(round_, seconds))
    report.end()
    assert out.getvalue().splitlines()[-1] == "median of 3 rounds 0.500 s, fastest 0.250 s"


@pytest.mark.parametrize(
    "last",
    [
        replace(taken(1, 0.5), contributors=2),
        replace(taken(1, 0.5), moments={Stage.APPLIED: 2.0}),
    ],
)
def test_where_no_round_had_all_members_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], last: Taken
) -> None:
    taken_here = [replace(taken(0, 0.5), contributors=2), last]

    async def run(member: Member) -> None:
        for one in taken_here:
            member.took(one)

    monkeypatch.setattr(Member, "run", run)
    monkeypatch.setattr("node.bench.command.spare_what_stays", lambda: None)
    with pytest.raises(OperatorError, match="none of 2 rounds had all 3 members") as caught:
        main(SETTINGS)
    assert caught.value.code == "E501"
    assert "median" not in capsys.readouterr().out
    taken_here.append(taken(2, 0.5))
    assert main(SETTINGS) == 0
    assert "median of 1 of 3 rounds" in capsys.readouterr().out


def test_what_programs_read() -> None:
    out = io.StringIO()
    report = Json(out)
    report.opened("12D3KooWx", "192.0.2.7:4390")  # type: ignore[arg-type]
    report.took(taken(0, 0.5))
    report.end()
    opened, round_, end = map(json.loads, out.getvalue().splitlines())
    assert opened == {"event": "opened", "peer": "12D3KooWx", "address": "192.0.2.7:4390"}
    assert round_["moments"] == {"ready": 1.0, "planned": 1.25, "applied": 1.75}
    assert round_["sent"] == 10**6
    assert end == {"event": "end"}


def test_a_codec_that_there_is_not() -> None:
    result = CliRunner().invoke(app, ["bench", "--codec", "int3"])
    assert isinstance(result.exception, OperatorError)
    assert result.exception.code == "E204"
    assert "int4" in str(result.exception)


def test_more_than_there_is_memory_for() -> None:
    result = CliRunner().invoke(app, ["bench", "--size", str(10**12)])
    assert isinstance(result.exception, OperatorError)
    assert result.exception.code == "E401"
    assert "10000.0 GB" in result.exception.why
    assert "--size" in result.exception.fix


def test_an_upload_limit_is_the_member_s(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Settings] = []
    monkeypatch.setattr(
        "node.bench.command.main", lambda settings, as_json: taken.append(settings) or 0
    )
    assert CliRunner().invoke(app, ["bench", "--max-upload", "20Mbit"]).exit_code == 0
    assert taken[0].max_upload == 2.5e6


@pytest.mark.parametrize(
    "change", [{"members": 4, "groups": "region"}, {"members": 6, "groups": "grid", "max_group": 4}]
)
async def test_members_in_groups_end_with_the_mean_over_real_connections(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over mutual TLS: at two sites, or in a grid, each part has relays that add up slices."""
    summed: Counter[tuple[int, int]] = Counter()
    real = GroupMerge.settle

    def settle(merge: GroupMerge, *source: Any) -> None:
        summed[merge.start, merge.stop] += 1
        real(merge, *source)

    monkeypatch.setattr(GroupMerge, "settle", settle)
    settings = replace(SETTINGS, size=300_000, **change)
    taken, _ = await take_rounds(settings, regions=("north", "south"))
    for round_ in range(2):
        ours = [member[round_] for member in taken]
        assert len({one.digest for one in ours}) == 1
        assert {(one.contributors, one.merged) for one in ours} == {(settings.members, 1.0)}
    assert len(summed) >= settings.members  # parts; those of the second round may be cut otherwise


@pytest.mark.parametrize(
    ("codec", "packs"), [("fp32", False), ("int8", False), ("top12", False), ("fp32", True)]
)
async def test_nothing_is_encoded_decoded_or_added_up_on_the_event_loop(
    codec: str, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor packed or unpacked for a slow link. Calls and heartbeats are answered there."""
    loop, worked, there = threading.current_thread(), Counter[str](), list[str]()

    def beside(place: Any, name: str) -> None:
        real = getattr(place, name)

        def work(*args: object, **options: object) -> object:
            longest = max((len(a) for a in args if isinstance(a, torch.Tensor)), default=CHUNK)
            # else it is asked how large a value the codec can carry
            if longest > 64 and threading.current_thread() is loop:
                there.append(name)  # what is raised in a slice's way, its sender tries again
                raise AssertionError(f"{name} on the event loop")
            worked[name] += 1
            return real(*args, **options)

        monkeypatch.setattr(place, name, work)

    for name in ("encode_one", "decode_one", "decode_add_one", "check_one"):
        beside(Codec, name)
    for name in ("_take", "_merge"):
        beside(PartMerge, name)
    for name in ("draw", "digest"):
        beside(Noise, name)
    for place, name in ((Packer, "pack"), (Unpacker, "took"), (packing, "_unpacked")):
        beside(place, name)
    settings = replace(SETTINGS, codec=codec)
    if packs:
        monkeypatch.setattr(lane, "same_machine", lambda sock: False)
        settings = replace(settings, max_upload=8e6)
    taken, _ = await take_rounds(settings)
    assert there == []
    assert len({member[1].digest for member in taken}) == 1
    assert worked["_take"] >= 6
    assert worked["_merge"] >= 3
    assert worked["check_one"] >= 6
    assert [worked[name] > 0 for name in ("pack", "took", "_unpacked")] == [packs] * 3


def test_the_others_are_told_all_that_they_have_to_type() -> None:
    assert Settings().alike == ""
    out = io.StringIO()
    Text(out, replace(SETTINGS, tls=False)).opened("ID", "a:1")  # type: ignore[arg-type]
    line = out.getvalue().splitlines()[-1].partition("node ")[2]
    assert line == (
        "bench --peers a:1/ID --members 3 --size 200000 --codec fp32 --rounds 2 --no-tls"
    )
