"""The command line: quick to start, and clear when wrong."""

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import typer
from cli_kit import process
from places import ROOT
from typer.testing import CliRunner

from node import __version__, cli
from node.cli import app
from node.commands import shared
from node.config import NodeConfig
from node.presets import PRESETS
from protocols.messages import PROTOCOL_VERSION

pytestmark = pytest.mark.usefixtures("own_directory")


# --- starting up ------------------------------------------------------------------------------


QUICK = (("--help",), ("start", "--help"), ("status",), ("runs",), ("config", "show"))


@pytest.mark.parametrize("arguments", QUICK, ids=" ".join)
def test_what_answers_at_once_imports_nothing_heavy(arguments):
    """How quick that is: benchmarks/operators.py."""
    done, heavy = process(*arguments)
    assert done.stdout or "error E" in done.stderr
    assert heavy == []


def functions(commands, names=()):
    """Every command that is no group: (its names on the command line, what it calls)."""
    for name, what in commands.items():
        if isinstance(what, typer.Typer):
            below = {
                one.name or one.callback.__name__: one.callback for one in what.registered_commands
            }
            yield from functions(below, (*names, name))
        else:
            yield (*names, name), what


COMMANDS = sorted({(), *((name,) for name in cli.COMMANDS), *dict(functions(cli.COMMANDS))})


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_help(command):
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_every_setting_is_an_option_of_start():
    text = CliRunner().invoke(app, ["start", "--help"], terminal_width=200).output
    for key in NodeConfig.model_fields:
        assert "--" + key.replace("_", "-") in text
    assert "[default: 0.0.0.0:4390]" in text
    assert "[default: 20Mbit]" in text
    assert "[default: 20GB]" in text
    assert "e+" not in text


def test_version(command):
    status, out, _ = command("version")
    assert status == 0
    assert f"atoll {__version__} (protocol {PROTOCOL_VERSION})" in out
    assert command("--version")[1] == f"atoll {__version__}\n"


# --- wrong usage ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("frob",),
        ("start", "--lisen", "x"),
        ("start", "extra"),
        (),
        ("config",),
        ("demo", "--islands", "0"),
    ],
)
def test_wrong_usage_exits_2(command, arguments):
    status, out, err = command(*arguments)
    assert status == 2
    assert "Usage: node" in out + err or err.startswith("error E204: ")


def test_closed_streams_are_no_defect_and_go_to_no_file(tmp_path):
    """As of a node that is started from a script that detaches it: ``>&- 2>&-``."""
    code = (
        "import sys, node.__main__ as m; m.open_streams()\n"
        f"file = open({str(tmp_path / 'file')!r}, 'w'); file.write(str(file.fileno()))\n"
        "print(sys.stdout.isatty(), file=sys.stderr)"
    )
    for closed in ("<&- >&- 2>&-", ">&- 2>&-", "2>&-", ">&-"):
        subprocess.run(["sh", "-c", f'"$0" -c "$1" {closed}', sys.executable, code], check=True)
        assert int((tmp_path / "file").read_text()) > 2
    ended = subprocess.run(["sh", "-c", '"$0" -m node frob 2>&-', sys.executable], check=False)
    assert ended.returncode == 2


@pytest.mark.parametrize(
    ("encoding", "of_locale"),
    [
        ("latin-1", {"PYTHONIOENCODING": "latin-1"}),
        ("ascii", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    ],
)
def test_signs_that_the_locale_does_not_have_are_no_defect(encoding, of_locale):
    code = "import node.__main__ as m; m.open_streams(); print('caf\\u00e9 \\u2026 \\U0001f680')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        env={**os.environ, **of_locale},
    )
    shown = "caf\N{LATIN SMALL LETTER E WITH ACUTE} ? ?\n".encode(encoding, "replace")
    assert done.stdout == shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["start", "--codec", "int8"], ["no such option: --codec", "--set rounds.codec=…"]),
        (["start", "--lr", "1"], ["no such option: --lr\n", "--set inner.lr=…", "start --help"]),
        (["start", "--prest", "x"], ["--preset"]),
        (["status", "--codec", "x"], ["`node status --help`"]),
        (["bench", "--members", "1"], ["invalid value for '--members'", "bench --help"]),
        (["begin"], ["no such command 'begin'", "`node --help`"]),
        (["config", "shew"], ["no such command 'shew'", "`node config --help`"]),
    ],
)
def test_a_command_line_that_is_not_understood_has_a_code_and_a_way_out(command, arguments, said):
    status, out, text = command(*arguments)
    assert (status, out) == (2, "")
    assert text.startswith("error E204: ")
    assert [line.split(":")[0] for line in text.splitlines()[1:]] == ["  why", "  fix"]
    for words in said:
        assert words in text


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_no_option_takes_what_is_no_finite_number(command, number):
    """No minimum refuses nan, and what waits for it waits for ever or ends in an error."""
    floats = [
        (*names, f"--{option}")
        for names, function in functions(cli.COMMANDS)
        for option, hint in get_type_hints(function).items()
        if float in (hint, *get_args(hint))
    ]
    assert {("stop", "--timeout"), ("simulate", "--churn")} < set(floats)
    for words in floats:
        status, _, err = command(*words, number)
        assert status == 2, words
        assert err.startswith(f"error E204: invalid value for '{words[-1]}': "), words


@pytest.mark.parametrize(
    "arguments",
    [
        ("data", "prepare", "text", "--out", ""),
        ("data", "inspect", ""),
        ("export", "", "--from", "state"),
        ("export", "model", "--from", " "),
        ("export", "model", "--from", "state", "--like", ""),
        ("keygen", "--out", ""),
        ("start", "--config", ""),
        ("simulate", "--json", ""),
    ],
)
def test_an_empty_path_is_not_the_current_directory(command, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("words\n" * 1000)
    status, _, err = command(*arguments)
    assert status == 2
    assert err.startswith("error E204: invalid value for ")
    assert "it is empty; give a path" in err
    assert [file.name for file in tmp_path.iterdir()] == ["text"]


def test_no_arguments_are_answered_with_the_help(command):
    status, out, err = command("config")
    assert status == 2
    assert "Usage: node config" in out + err
    assert "error E204" not in err


def test_the_help_names_every_preset():
    assert tuple(PRESETS) == shared.PRESET_NAMES


def test_a_near_miss_is_suggested(command):
    assert "--listen" in command("start", "--lisen", "x")[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ("server.js",), ("/x/y.MJS", "--port"), ("-e", "1"), ("--eval", "1"), ("-p", "1"),
        ("--inspect=0.0.0.0:9229", "x.js"), ("--inspect-brk",), ("-",), ("-v",), ("-r", "esm"),
        ("--max-old-space-size=4096", "x"), ("--experimental-vm-modules",),
    ],
)  # fmt: skip
def test_calls_of_nodejs_are_recognised(command, arguments):
    status, _, err = command(*arguments)
    assert status == 2
    assert "this is not Node.js" in err
    assert "`atoll`" in err


def test_errors_are_text(command):
    status, _, err = command("start", "--nproc", "-1")
    assert status == 2
    assert err.splitlines()[0] == "error E204: bad setting"
    assert "  why: nproc = '-1': must be 0 to 1024 (from --nproc)" in err
    assert "  fix: " in err
    assert "Traceback" not in err


def test_bad_addresses_are_e102(command):
    status, _, err = command("start", "--peers", "/ip4/1.2.3.4/tcp/4390")
    assert status == 2
    assert err.startswith("error E102")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("start", "--peer", "x"), "(Possible options: --peers)"),
        (("start", "--set", "mode=gosip"), "did you mean gossip?"),
        (("start", "--set", "inner_steps=3"), "in another table: rounds.inner_steps"),
        (("bootstrap", "template", "systmd"), "did you mean systemd?"),
        (("strat",), "Did you mean 'start'"),
    ],
)
def test_what_is_mistyped_is_answered_with_the_nearest(command, words, told):
    status, _, err = command(*words)
    assert status == 2
    assert told in err
    assert err.count("Possible options") <= 1
    assert "--zero" not in err


def test_the_packages_are_ours():
    import bootstrap
    import diloco
    import gossip
    import node
    import protocols

    root = ROOT
    for package in (node, protocols, diloco, gossip, bootstrap):
        assert Path(package.__file__).is_relative_to(root)
