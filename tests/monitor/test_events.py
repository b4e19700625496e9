"""Events: numbered, written, rotated, surviving a full disk; and the lines a person reads."""

import dataclasses
import errno
import io
import json
import os
from typing import Any

import pytest

from node.monitor import events
from node.monitor.console import Console, render
from node.monitor.event_log import KEPT_IN_MEMORY, KEPT_ROUNDS, LOOK_LINES, EventLog
from node.monitor.events import (
    Behind,
    CheckpointSaved,
    DataAwaited,
    DataCame,
    Event,
    JoinProgress,
    Notice,
    PeerJoined,
    PeerLeft,
    PeerRefused,
    Problem,
    RoundDone,
    RoundFailed,
    Started,
    Step,
    Stopping,
    Validation,
)
from node.monitor.plain import MAX_ITEMS, MAX_TEXT
from node.monitor.wording import clean, duration, megabytes
from protocols.bounds import ENDLESS_ROUNDS

KINDS = [cls for cls in vars(events).values() if isinstance(cls, type) and issubclass(cls, Event)]


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def _step(number=1, **more):
    return Step(step=number, round=0, loss=2.1, **more)


def _example(cls):
    """An event of a class with something in each field that has no default."""
    values = {"str": "x", "int": 1, "float": 1.0, "bool": True}
    values["Mapping[str, float]"] = {"step_s": 0.25}
    needed = [
        field
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    return cls(**{field.name: values.get(field.type.split(" | ")[0], "replay") for field in needed})


def test_events_are_numbered_written_and_passed_on(tmp_path):
    seen = []
    log = EventLog(tmp_path / "events.jsonl", clock=lambda: 12.3456)
    log.subscribe(seen.append)
    log.emit(_step(7))
    log.emit(PeerJoined(peer="12D3", name="ä"))
    log.close()
    first, second = _lines(tmp_path / "events.jsonl")
    assert first == seen[0].plain()
    assert (first["seq"], first["time"], first["kind"], first["step"]) == (1, 12.346, "step", 7)
    assert (second["seq"], second["kind"], second["name"]) == (2, "peer_joined", "ä")
    assert [record.seq for record in log.since(1)] == [2]
    assert log.since(2) == []


def test_kinds_are_told_apart():
    kinds = [cls.kind for cls in KINDS if cls is not Event]
    assert len(kinds) == len(set(kinds)) > 14


@pytest.mark.parametrize("cls", [cls for cls in KINDS if cls is not Event])
def test_every_event_can_be_written_and_shown(cls):
    log = EventLog()
    record = log.emit(_example(cls))
    assert json.loads(record.line())["kind"] == cls.kind
    assert isinstance(render(record.event), str)


def test_the_line_of_a_round_names_a_codec_that_has_changed():
    assert "codec" not in render(RoundDone(round=3, codec="int4"))
    assert "codec int4 -> int2" in render(RoundDone(round=4, codec="int2", codec_before="int4"))


def test_odd_values_become_bounded_json():
    event = RoundDone(
        round=1,
        loss=float("nan"),
        dropped={"p" * 9999: "w" * 9999},
        phases={f"phase{i}": float("inf") for i in range(5000)},
    )
    plain = json.loads(EventLog().emit(event).line())
    assert plain["loss"] is None
    assert len(plain["phases"]) == MAX_ITEMS
    assert max(map(len, plain["dropped"])) == MAX_TEXT


def test_the_log_is_appended_to_and_private(tmp_path):
    path = tmp_path / "events.jsonl"
    for _ in range(2):
        log = EventLog(path)
        log.emit(_step())
        log.close()
    assert len(_lines(path)) == 2
    assert path.stat().st_mode & 0o077 == 0


def test_the_log_rotates_and_stays_bounded(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path, max_bytes=1000, kept=2)
    for number in range(100):
        log.emit(Notice(text=f"{number:03}" + "x" * 100))
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["events.jsonl", "events.jsonl.1", "events.jsonl.2"]
    assert all(file.stat().st_size <= 1000 for file in files)
    numbers = [line["seq"] for file in reversed(files) for line in _lines(file)]
    assert numbers == list(range(numbers[0], 101))  # the newest, none missing in between
    reopened = EventLog(path, max_bytes=1000, kept=2)
    for _ in range(5):
        reopened.emit(Notice(text="y" * 300))
    assert all(file.stat().st_size <= 1000 for file in tmp_path.iterdir())


@pytest.mark.parametrize("how", ["moved", "removed", "cut"])
def test_a_log_that_somebody_takes_away_is_begun_anew(tmp_path, how):
    """As logrotate does, or an operator whose disk is full."""
    path = tmp_path / "events.jsonl"
    log = EventLog(path, max_bytes=15_000)
    for number in range(50):
        log.emit(Notice(text=f"{number}" + "x" * 100))
    match how:
        case "moved":
            path.rename(tmp_path / "taken")
        case "removed":
            path.unlink()
        case _:
            os.truncate(path, 0)
    for number in range(50):
        log.emit(Notice(text=f"{number}" + "x" * 100))
    numbers = [line["seq"] for line in _lines(path)]
    assert numbers == list(range(numbers[0], 101))
    assert numbers[0] <= 50 + LOOK_LINES
    assert not (tmp_path / "events.jsonl.1").exists()
    assert log.dropped == 0


def test_a_full_disk_drops_lines_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    seen = []
    log.subscribe(seen.append)
    log.emit(_step(1))
    real = os.write

    def full(descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    def half(descriptor, data):
        return real(descriptor, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", full)
    log.emit(_step(2))
    monkeypatch.setattr(os, "write", half)
    log.emit(_step(3))
    monkeypatch.setattr(os, "write", real)
    log.emit(_step(4))
    log.emit(_step(5))
    assert log.dropped == 2
    assert len(seen) == 5
    whole = []
    for line in path.read_text().splitlines():
        try:
            whole.append(json.loads(line)["step"])
        except ValueError:
            assert line.startswith("{")  # the torn one stands alone on its line
    assert whole == [1, 4, 5]


@pytest.mark.parametrize("again", [False, True], ids=["next life", "put back"])
def test_after_a_line_that_an_earlier_life_has_torn_nothing_is_lost(tmp_path, again):
    """A machine that lost its power, or a disk that was full as the node ended."""
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    for number in range(3):
        log.emit(_step(number))
    os.truncate(path, path.stat().st_size - 20)
    if again:  # the same life, in which somebody has put the torn file in the place of a whole one
        text = path.read_bytes()
        path.unlink()
        path.write_bytes(text)
        for _ in range(LOOK_LINES - 4):
            log.emit(_step())  # to the file that was removed
    else:
        log.close()
        log = EventLog(path)
    for number in range(3, 6):
        log.emit(_step(number))
    lines = path.read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines[:2] + lines[3:]]
    assert steps == [0, 1, 3, 4, 5]
    assert lines[2].startswith("{")
    assert log.dropped == 0


def test_a_log_that_cannot_be_opened_is_counted(tmp_path):
    log = EventLog(tmp_path / "missing" / "events.jsonl")
    log.emit(_step())
    assert log.dropped == 1


def test_memory_is_bounded():
    log = EventLog()
    for number in range(KEPT_IN_MEMORY + 10):
        log.emit(_step(number))
    assert len(log.recent) == KEPT_IN_MEMORY
    assert len(log.since(0)) == 500


def test_of_older_rounds_the_figures_of_each_island_are_not_kept(tmp_path):
    """Of hundreds of islands those of 2,048 rounds would take hundreds of megabytes."""
    log, seen = EventLog(tmp_path / "events.jsonl"), []
    log.subscribe(seen.append)
    rounds = KEPT_ROUNDS + 10
    for number in range(rounds):
        log.emit(_step(number))
        log.emit(RoundDone(round=number, dropped={"b": "late"}, islands={"a": {"loss": 2.0}}))
    log.close()
    told = [record for record in log.recent if isinstance(record.event, RoundDone)]
    assert [len(record.event.islands) for record in told] == [0] * 10 + [1] * KEPT_ROUNDS
    assert [record.event.round for record in told] == list(range(rounds))
    assert all(record.event.dropped for record in told)
    assert [record.seq for record in log.recent] == list(range(1, 2 * rounds + 1))
    assert all(record.event.islands for record in seen[1::2])
    assert all(line["islands"] for line in _lines(tmp_path / "events.jsonl")[1::2])


def test_rounds_that_steps_have_pushed_out_are_not_looked_for():
    log = EventLog()
    for number in range(KEPT_ROUNDS + 1):
        log.emit(RoundDone(round=number, islands={"a": {"loss": 2.0}}))
        for step in range(KEPT_IN_MEMORY // KEPT_ROUNDS + 1):
            log.emit(_step(step))
    assert len(log.recent) == KEPT_IN_MEMORY


# --- the terminal -----------------------------------------------------------------------------


def test_the_step_line():
    event = Step(step=12, round=1, loss=2.104, grad_norm=0.9, tokens_per_second=14021.4, peers=4)
    assert render(event) == "step: 12 loss: 2.10 grad_norm: 0.9 tps: 14,021 mfu: - peers: 4"
    assert "loss: -" in render(_step().__class__(step=1, round=0, loss=None, mfu=0.411))
    assert "mfu: 41.1%" in render(_step(mfu=0.411))


def test_the_round_line():
    event = RoundDone(
        round=129,
        members=5,
        live=6,
        loss=2.31,
        sync_s=0.9,
        utilisation=0.93,
        sent_bytes=290_000,
        consensus=0.046,
        eta_s=2280,
    )
    assert render(event) == (
        "round 129 loss 2.31 5/6 peers sync 0.9 s util 93% sent 0.29 MB consensus 0.046 ETA 38m"
    )
    degraded = dataclasses.replace(event, outcome="degraded", dropped={"12D3KooWabcdefgh": "slow"})
    assert render(degraded).startswith("round 129 degraded loss")
    assert render(degraded).endswith("without …abcdefgh: slow")
    roll = RoundDone(round=0, members=0, live=2, loss=None)
    assert render(roll) == "round 0 merges nothing: it lets in who is there, 2 islands"
    failed = RoundFailed(round=3, reason="no majority")
    assert render(failed) == "an attempt at round 3 failed: no majority"


@pytest.mark.parametrize("total", [0, 60, ENDLESS_ROUNDS])
def test_the_start_up_block_ends_with_the_join_line_and_how_long_there_is(total: int) -> None:
    text = render(
        Started(
            peer="12D3KooWx",
            run="tiny-docs-8c41",
            version="0.1.0",
            device="cuda:0",
            api="127.0.0.1:4391",
            join_address="203.0.113.7:4390/12D3KooWx",
            total_rounds=total,
        )
    )
    assert "identity 12D3KooWx (saved) · run tiny-docs-8c41 · cuda:0" in text
    assert "dashboard http://127.0.0.1:4391/" in text
    at = text.splitlines().index("     node start --peers 203.0.113.7:4390/12D3KooWx")
    rest = text.splitlines()[at + 1 :]
    if total in (0, ENDLESS_ROUNDS):
        assert not rest
    else:
        assert "over after 60 rounds" in rest[0]
        assert rest[0].endswith("--set rounds.total_rounds=N")


def test_a_seed_without_a_run_tells_who_brings_one() -> None:
    seed = Started(peer=ME, run="", version="1", role="seed", join_address="8.8.8.8:4390/p")
    lines = render(seed).splitlines()
    assert lines[-2:] == [
        "   Who creates a run brings it here, with its settings:",
        "     node start --peers 8.8.8.8:4390/p --preset tiny",
    ]
    assert "Others can join with:" in render(dataclasses.replace(seed, run="r"))


ME = "12D3KooWx"
NEAR = "in your own network only"


@pytest.mark.parametrize(
    ("address", "more", "told"),
    [
        (f"192.168.1.20:4390/{ME}", {}, f"({NEAR}; for others forward port 4390 and give --public"),
        (f"100.101.1.1:5000/{ME}", {}, f"({NEAR}; for others forward port 5000 "),
        (f"[fd7a::1]:4390/{ME}", {}, f"({NEAR}"),
        (f"10.0.0.1:4390/{ME}", {"scripts": True}, 'public_addr="HOST:PORT", or map_port=True;'),
        (f"127.0.0.1:4390/{ME}", {"listen": "127.0.0.1:4390"}, "(on this machine only)"),
        (f"127.0.0.1:4390/{ME}", {"listen": "0.0.0.0:4390"}, "again with --public-addr HOST:PORT"),
        (f"8.8.8.8:4390/{ME}", {}, ""),
        (f"seed.example:4390/{ME}", {}, ""),
        (f"100.101.1.1:4390/{ME}", {"public_addr": "100.101.1.1:4390"}, ""),  # it is known
        ("192.168.1.7:4390/12D3KooWy", {}, ""),  # its relay's
    ],
)
def test_a_join_line_that_few_can_use_says_so(address: str, more: Any, told: str) -> None:
    text = render(Started(peer=ME, run="r", version="1", join_address=address, **more))
    below = text.splitlines()[3:]
    if told:
        assert told in below[0]
        assert (NEAR in below[0]) == (len(below) == 2)
        assert NEAR not in below[0] or "Tailscale" in below[1]
    else:
        assert not below


def test_a_script_without_a_validation_loss_is_told_of_none():
    assert not render(Validation(round=0, step=0, validation_loss=None))
    assert render(Validation(round=0, step=0, validation_loss=2.5)).endswith("loss 2.50")


def test_who_has_to_bring_text_is_told_so_by_the_join_line():
    started = Started(peer="p", run="r", version="1", join_address="a:1/p", own_text=True)
    assert "node start --peers a:1/p --data …" in render(started).splitlines()[-1]


def test_a_run_of_scripts_is_not_joined_with_node_start():
    started = Started(peer="p", run="script-8c41", version="1", join_address="a:1/p", scripts=True)
    told = render(started).splitlines()[-1].strip()
    assert told == 'node.join(model, optimizer, peers="a:1/p"), in a script'


def test_join_steps():
    assert render(JoinProgress(step=1, name="dial", text="ok 41 ms, peer verified")) == (
        "   [1/6] dial     ok 41 ms, peer verified"
    )
    assert "! refused" in render(JoinProgress(step=2, name="checks", text="refused", ok=False))


def test_other_lines():
    behind = Behind(round=3, head=5, action="download")
    assert render(behind) == "behind by 2 rounds: downloads the state"
    gone = Behind(round=4, head=5, action="download", reason="nobody keeps them")
    assert render(gone) == "behind by 1 round: downloads the state (nobody keeps them)"
    assert "error E301: clock" in render(
        Problem(code="E301", what="clock", why="w", fix="f", fatal=True)
    )
    waits = DataAwaited(step=7, since=1e9, ranks=tuple(range(1, 6)))
    assert render(waits) == "step 7 waits for its data: rank 1, 2, 3, 4, … has none yet"
    assert render(DataCame(step=7, seconds=95.2)) == "step 7 has its data, after 95 s"
    assert "Ctrl-C" in render(Stopping(reason="interrupted"))
    assert "(Ctrl-C again stops now)" in render(Stopping(reason="SIGINT"))
    assert "(Ctrl-C twice stops now)" in render(Stopping(reason="3 s are over"))
    assert "12.00 MB in 0.5 s" in render(
        CheckpointSaved(round=1, path="/x", bytes=12_000_000, seconds=0.5)
    )


def test_peers_cannot_write_into_the_terminal():
    hostile = "\x1b]0;owned\x07\x1b[2J\u202eevil\x00"
    for event in (
        PeerJoined(peer=hostile, name=hostile, region=hostile, version=hostile, role=hostile),
        PeerRefused(peer=hostile, code=hostile),
        RoundDone(round=1, dropped={hostile: hostile}),
        Notice(text=hostile),
    ):
        text = render(event)
        assert all(c.isprintable() or c == "\n" for c in text)
    forged = "alps\nround 9 loss 0.01"
    for event in (
        PeerJoined(peer="p", name=forged, region=forged, version=forged, role=forged),
        PeerLeft(peer="p", reason=forged),
    ):
        assert "\n" not in render(event), "nobody writes a line of its own into the log"
    assert "\n" in render(Problem(code="E501", what="x", why="a: refused\nb: no answer", fix="y"))
    assert len(clean("x" * 10_000)) == 500


def test_steps_are_rate_limited_and_rounds_are_not():
    now = [0.0]
    out = io.StringIO()
    log = EventLog()
    log.subscribe(Console(out, clock=lambda: now[0]))
    for number in range(10):
        log.emit(_step(number))
        log.emit(RoundDone(round=number))
        now[0] += 0.3
    lines = out.getvalue().splitlines()
    assert sum(line.startswith("round") for line in lines) == 10
    assert [line.split()[1] for line in lines if line.startswith("step")] == ["0", "4", "8"]


def test_the_json_log_has_every_event():
    out = io.StringIO()
    log = EventLog()
    log.subscribe(Console(out, as_json=True))
    for number in range(3):
        log.emit(_step(number))
    assert [json.loads(line)["step"] for line in out.getvalue().splitlines()] == [0, 1, 2]


def test_signs_that_a_terminal_does_not_have_do_not_silence_it():
    """A script's own stream, in Latin-1; those of the commands are set up by node.__main__."""
    file = io.BytesIO()
    log = EventLog()
    log.subscribe(Console(io.TextIOWrapper(file, encoding="latin-1")))
    log.emit(PeerJoined(peer="p", name="caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{ROCKET}"))
    log.emit(RoundFailed(round=3, reason="no majority"))
    joined, failed = file.getvalue().decode("latin-1").splitlines()
    assert "caf\N{LATIN SMALL LETTER E WITH ACUTE} ?" in joined
    assert failed == "an attempt at round 3 failed: no majority"


def test_a_closed_terminal_does_not_stop_the_log():
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    log = EventLog()
    log.subscribe(Console(Gone()))
    log.emit(_step())
    log.emit(_step())
    assert len(log.recent) == 2


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.4, "0s"), (59.4, "59s"), (60, "1m"), (2280, "38m"), (11_100, "3h05m"), (187_200, "2d04h")],
)
def test_durations(seconds, expected):
    assert duration(seconds) == expected


def test_sizes():
    assert megabytes(290_000) == "0.29 MB"
    assert megabytes(1_200_000_000) == "1.20 GB"
