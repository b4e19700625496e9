"""The command line: quick to start, clear when wrong, and never a traceback."""

import json
import os
import resource
import subprocess
import sys
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bootstrap.manifest import Manifest, SignedManifest
from node import __version__, outermost
from node.checkpoint import CheckpointStore, Facts
from node.cli import app
from node.commands.running import manifest_for
from node.config import NodeConfig, resolve
from node.outer_files import OuterFiles, read_checkpoint, write_outer
from protocols.errors import OperatorError
from protocols.identity import Identity

CPU_LIMIT_S = 1.0  # twice what is promised: machines differ


@pytest.fixture(autouse=True)
def _own_directory(tmp_path, monkeypatch):
    for name in os.environ:
        if name.startswith("ATOLL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ATOLL_DIR", str(tmp_path / "state"))


@pytest.fixture
def run(capsys, monkeypatch):
    """``run(*arguments)`` as the console script would: (exit status, stdout, stderr)."""

    def call(*arguments):
        status = outermost.run(list(map(str, arguments)))
        out, err = capsys.readouterr()
        return status, out, err

    return call


@pytest.fixture
def runtime(monkeypatch):
    """A stand-in for the daemon that records what it is started with."""
    started = []
    module = types.ModuleType("node.runtime")
    module.run = lambda config, manifest: started.append((config, manifest)) or 0
    monkeypatch.setitem(sys.modules, "node.runtime", module)
    return started


def _process(*arguments):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "node", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return done, seconds


# --- starting up ------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("--help",), ("start", "--help"), ("status",)])
def test_it_answers_at_once(arguments):
    done, seconds = _process(*arguments)
    assert done.stdout or done.stderr
    assert seconds < CPU_LIMIT_S


def test_nothing_heavy_is_imported_for_help():
    code = (
        "import sys; from node.cli import app; app(['start', '--help'], standalone_mode=False);"
        "print([m for m in ('torch', 'hivemind', 'aiohttp', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]"


COMMANDS = (
    [], ["start"], ["bootstrap"], ["demo"], ["bench"], ["status"], ["keygen"], ["export"],
    ["bootstrap", "template"], ["version"], ["doctor"], ["runs"], ["stop"], ["monitor"],
    ["config"], ["config", "show"],
)  # fmt: skip


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


def test_version(run):
    status, out, _ = run("version")
    assert status == 0
    assert f"atoll {__version__} (protocol 1)" in out
    assert run("--version")[1] == f"atoll {__version__}\n"


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
def test_wrong_usage_exits_2(run, arguments):
    status, out, err = run(*arguments)
    assert status == 2
    assert "Usage" in out + err


def test_a_near_miss_is_suggested(run):
    assert "--listen" in run("start", "--lisen", "x")[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ("server.js",), ("/x/y.MJS", "--port"), ("-e", "1"), ("--eval", "1"), ("-p", "1"),
        ("--inspect=0.0.0.0:9229", "x.js"), ("--inspect-brk",), ("-",), ("-v",), ("-r", "esm"),
        ("--max-old-space-size=4096", "x"), ("--experimental-vm-modules",),
    ],
)  # fmt: skip
def test_calls_of_nodejs_are_recognised(run, arguments):
    status, _, err = run(*arguments)
    assert status == 2
    assert "this is not Node.js" in err
    assert "`atoll`" in err


def test_errors_are_text(run):
    status, _, err = run("start", "--nproc", "-1")
    assert status == 2
    assert err.splitlines()[0] == "error E204: bad setting"
    assert "  why: nproc = '-1': must be 0 to 1024 (from --nproc)" in err
    assert "  fix: " in err
    assert "Traceback" not in err


def test_bad_addresses_are_e102(run):
    status, _, err = run("start", "--peers", "/ip4/1.2.3.4/tcp/4390")
    assert status == 2
    assert err.startswith("error E102")


# --- commands ---------------------------------------------------------------------------------


def test_start_hands_over_checked_settings(run, runtime):
    status, _, _ = run("start", "--peers", "a:1,b:2", "--peers", "c:3", "--rounds", "3")
    assert status == 0
    [(config, manifest)] = runtime
    assert config.peers == ("a:1", "b:2", "c:3")
    assert config.rounds == 3
    assert config.source("peers") == "--peers"
    assert manifest is None


def test_start_alone_creates_the_default_run(run, runtime):
    run("start")
    assert runtime[0][1] == Manifest()
    assert runtime[0][0].is_default("listen")


def test_start_with_a_run_file(run, runtime, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("name = 'mine'\n[model]\nn_layers = 2\n")
    run("start", "--run", path)
    assert runtime[0][1].name == "mine"
    path.write_text("[model]\nn_layer = 2\n")
    status, _, err = run("start", "--run", path)
    assert status == 2
    assert "did you mean model.n_layers?" in err


def test_start_with_a_preset(run, runtime, tmp_path):
    run("start", "--preset", "small", "--set", "inner.lr=1e-4")
    assert runtime[0][1].name == "small-docs"
    assert runtime[0][1].inner.lr == 1e-4
    for wrong, told in (
        (("--preset", "huge"), "choose one of tiny"),
        (("--set", "inner.lrr=1"), "did you mean inner.lr?"),
        (("--set", "inner.lr=-1"), "inner.lr = '-1': must be more than 0"),
        (("--set", "inner.lr"), "inner.lr"),
        (("--preset", "tiny", "--run", tmp_path / "x.toml"), "excludes"),
    ):
        status, _, err = run("start", *wrong)
        assert status == 2, wrong
        assert err.startswith("error E204"), wrong
        assert told in err, wrong


def test_the_exit_status_of_the_daemon_is_ours(run, runtime):
    sys.modules["node.runtime"].run = lambda config, manifest: 3
    assert run("start")[0] == 3


def test_a_seed_brings_no_run(run, runtime):
    run("bootstrap", "--listen", "127.0.0.1:0")
    [(config, manifest)] = runtime
    assert config.role == "seed"
    assert manifest is None


def test_which_manifest():
    def of(**flags):
        return manifest_for(resolve(flags, {}))

    assert of(peers=["a:1"]) is None
    assert of(resume=True) is None
    assert of(role="seed") is None
    assert of() == Manifest()
    with pytest.raises(OperatorError, match="observer"):
        of(role="observer")


def test_demo_gets_its_arguments(run, monkeypatch):
    module = types.ModuleType("node.demo")
    seen = []
    module.main = lambda **arguments: seen.append(arguments) or 0
    monkeypatch.setitem(sys.modules, "node.demo", module)
    assert run("demo", "--seconds", 5, "--islands", 2, "--seed", 7, "--json")[0] == 0
    assert seen == [{"seconds": 5, "islands": 2, "seed": 7, "as_json": True}]


def test_keygen_never_overwrites(run, tmp_path):
    path = tmp_path / "deep" / "key.pem"
    status, out, _ = run("keygen", "--out", path)
    assert status == 0
    assert Identity.load(path).peer_id == out.strip()
    before = path.read_bytes()
    status, _, err = run("keygen", "--out", path)
    assert status == 2
    assert err.startswith("error E104")
    assert path.read_bytes() == before


def test_keygen_writes_to_the_state_directory(run, tmp_path):
    run("keygen")
    assert (tmp_path / "state" / "identity.pem").stat().st_mode & 0o777 == 0o600
    status, _, err = run("keygen", "--out", tmp_path / "state" / "identity.pem" / "x")
    assert (status, err[:10]) == (2, "error E104")


def test_status_without_a_daemon(run):
    status, _, err = run("status")
    assert status == 1
    assert err.startswith("error E106: no node runs with the state directory")


def test_config_show_names_sources_and_hides_secrets(run, tmp_path, monkeypatch):
    monkeypatch.setenv("ATOLL_REGION", "alps")
    run_file = tmp_path / "run.toml"
    run_file.write_text("seed = 3\n")
    shown = ("config", "show", "--threads", "2", "--invitation", "hunter2", "--run", run_file)
    status, out, _ = run(*shown)
    assert status == 0
    assert "threads = 2  # --threads" in out
    assert 'region = "alps"  # ATOLL_REGION' in out
    assert 'listen = "0.0.0.0:4390"  # default' in out
    assert "seed = 3\n" in out
    assert "hunter2" not in out
    plain = json.loads(run(*shown, "--json")[1])
    assert plain["settings"]["threads"] == {"value": 2, "source": "--threads"}
    assert plain["run"]["id"] == Manifest(seed=3).run_id.hex()
    assert "hunter2" not in json.dumps(plain)


# --- checkpoints and export -------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    """A state directory with one checkpoint of a model that is a ramp."""
    import torch

    from node.trainer.layout import Layout

    manifest = Manifest()
    size = Layout.of_config(manifest.model).size
    signed = SignedManifest.create(manifest, Identity.from_seed(bytes(32)))
    outer = OuterFiles(torch.arange(size) / size, {"v": torch.zeros(size)}, signed)
    store = CheckpointStore(tmp_path / "state" / "checkpoints")
    with store.draft() as draft:
        write_outer(draft, outer)
        facts = Facts(run=manifest.run_id.hex(), round=3, step=30, tokens=300)
        return outer, store.commit(draft, facts).path


def test_outer_files_round_trip(checkpoint, tmp_path):
    outer, path = checkpoint
    for source in (path, tmp_path / "state"):
        back = read_checkpoint(source)
        assert back.base.equal(outer.base)
        assert back.vectors["v"].equal(outer.vectors["v"])
        assert back.signed == outer.signed


def test_export(run, checkpoint, tmp_path):
    status, out, _ = run("export", "--to", "hf", tmp_path / "model", "--from", tmp_path / "state")
    assert status == 0
    assert out.strip() == str(tmp_path / "model")
    assert (tmp_path / "model" / "config.json").exists()
    assert run("export", tmp_path / "model", "--from", checkpoint[1])[2].startswith("error E602")


def test_export_of_what_is_not_there(run, checkpoint, tmp_path):
    assert run("export", tmp_path / "m", "--from", tmp_path)[2].startswith("error E404")
    assert run("export", "--to", "gguf", tmp_path / "m", "--from", tmp_path)[0] == 2
    path = checkpoint[1] / "outer.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert run("export", tmp_path / "m", "--from", checkpoint[1])[2].startswith("error E404")
    assert not (tmp_path / "m").exists()


# --- the last resort --------------------------------------------------------------------------


def _raising(error):
    def raise_it(config, manifest):
        raise error

    sys.modules["node.runtime"].run = raise_it


def test_a_defect_is_e999_with_a_log(run, runtime, tmp_path):
    _raising(ZeroDivisionError("oops"))
    status, _, err = run("start", "--dir", tmp_path / "other")
    assert status == 70
    assert err.startswith("error E999")
    assert "Traceback" not in err
    [log] = (tmp_path / "other" / "logs").iterdir()
    assert str(log) in err
    assert "ZeroDivisionError: oops" in log.read_text()
    assert "Traceback" in log.read_text()


def test_a_log_goes_elsewhere_where_the_directory_is_broken(run, runtime, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    _raising(ZeroDivisionError("oops"))
    _, _, err = run("start", f"--dir={tmp_path / 'file'}")
    [log] = (tmp_path / "temporary").iterdir()
    assert str(log) in err


@pytest.mark.parametrize(
    "given",
    [
        ("--peers", ""),
        ("--peers", " , "),
        ("--peers",),
        ("--peers", "--resume"),
        ("--peers", "--listen", "127.0.0.1:0"),
        ("--peers=",),
    ],
)
def test_peers_without_an_address_creates_no_run(run, runtime, given):
    status, _, err = run("start", *given)
    assert status == 2
    assert "error E102: --peers names nobody" in err
    assert not runtime


def test_an_empty_variable_is_no_list_of_peers(run, runtime, monkeypatch):
    monkeypatch.setenv("ATOLL_PEERS", "")
    assert run("start")[0] == 2
    assert not runtime


def test_ctrl_c_is_130(run, runtime):
    _raising(KeyboardInterrupt())
    status, _, err = run("start")
    assert status == 130
    assert "Traceback" not in err


def test_errors_of_a_task_group_are_told_once_each(run, runtime):
    one = OperatorError("E501", "no peers", "w", "f", exit_code=5)
    same = OperatorError("E501", "no peers", "w", "f")
    other = OperatorError("E405", "trainer died", "w", "f")
    _raising(ExceptionGroup("tasks", [one, ExceptionGroup("inner", [same, other])]))
    status, _, err = run("start")
    assert status == 5
    assert err.count("error E501") == 1
    assert err.count("error E405") == 1


def test_a_defect_beside_an_operators_error_tells_both(run, runtime):
    _raising(ExceptionGroup("tasks", [OperatorError("E501", "a", "b", "c"), ValueError("x")]))
    status, _, err = run("start")
    assert status == 70
    assert err.index("error E501") < err.index("error E999")


def test_the_packages_are_ours():
    import bootstrap
    import diloco
    import gossip
    import node
    import protocols

    root = Path(__file__).parent.parent
    for package in (node, protocols, diloco, gossip, bootstrap):
        assert Path(package.__file__).is_relative_to(root)


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
def test_what_is_mistyped_is_answered_with_the_nearest(run, words, told):
    status, _, err = run(*words)
    assert status == 2
    assert told in err
    assert err.count("Possible options") <= 1
    assert "--zero" not in err
