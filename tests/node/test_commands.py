"""What the commands do: start, keygen, status, config, data prepare."""

import json
import sys
import tomllib
import types

import pytest

from bootstrap.manifest import Manifest
from node.commands.manifest import manifest_for
from node.config import resolve
from protocols.errors import OperatorError
from protocols.identity import Identity

pytestmark = pytest.mark.usefixtures("own_directory")


def test_start_hands_over_checked_settings(command, runtime):
    status, _, _ = command("start", "--peers", "a:1,b:2", "--peers", "c:3", "--rounds", "3")
    assert status == 0
    [(config, manifest)] = runtime
    assert config.peers == ("a:1", "b:2", "c:3")
    assert config.rounds == 3
    assert config.source("peers") == "--peers"
    assert manifest is None


def test_a_server_that_creates_a_run_cuts_the_evaluation_shard_from_its_own_text(command, runtime):
    flags = ("start", "--role", "server", "--data", "text.txt")
    assert command(*flags, "--mode", "server")[0] == 0
    assert runtime[0][0].data.endswith("/text.txt")
    for joins in (("--peers", "a:1"), ("--resume",)):
        status, _, told = command(*flags, *joins)
        assert (status, "--data with --role server" in told) == (2, True)


@pytest.mark.parametrize("role", ["server", "observer", "seed"])
def test_who_trains_nothing_is_told_which_flags_do_nothing(command, runtime, role):
    flags = ("--data", "text.txt", "--nproc", "2", "--device", "cpu")
    status, _, told = command("start", "--peers", "a:1", "--role", role, *flags)
    assert status != 0
    assert "E204" in told
    assert f"--nproc, --data with --role {role}" in told
    status, _, _ = command("start", "--peers", "a:1", "--role", role, "--device", "cpu")
    assert status == 0
    assert len(runtime) == 1


def test_start_alone_creates_the_default_run(command, runtime):
    command("start")
    assert runtime[0][1] == Manifest()
    assert runtime[0][0].is_default("listen")


def test_start_with_a_run_file(command, runtime, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("name = 'mine'\n[model]\nn_layers = 2\n")
    command("start", "--run", path)
    assert runtime[0][1].name == "mine"
    path.write_text("[model]\nn_layer = 2\n")
    status, _, err = command("start", "--run", path)
    assert status == 2
    assert "did you mean model.n_layers?" in err


def test_start_with_a_preset(command, runtime, tmp_path):
    command("start", "--preset", "small", "--set", "inner.lr=1e-4")
    assert runtime[0][1].name == "small-docs"
    assert runtime[0][1].inner.lr == 1e-4
    for wrong, told in (
        (("--preset", "huge"), "choose one of tiny"),
        (("--set", "inner.lrr=1"), "did you mean inner.lr?"),
        (("--set", "inner.lr=-1"), "inner.lr = '-1': must be more than 0"),
        (("--set", "inner.lr"), "'inner.lr' is no KEY=VALUE"),
        (("--set", "=1"), "'=1' is no KEY=VALUE"),
        (("--preset", "tiny", "--run", tmp_path / "x.toml"), "excludes"),
        (("--set", "seed=2", "--run", tmp_path / "x.toml"), f"into {tmp_path / 'x.toml'}"),
    ):
        status, _, err = command("start", *wrong)
        assert status == 2, wrong
        assert err.startswith("error E204"), wrong
        assert told in err, wrong


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
def test_peers_without_an_address_creates_no_run(command, runtime, given):
    status, _, err = command("start", *given)
    assert status == 2
    assert "error E102: --peers names nobody" in err
    assert not runtime


def test_an_empty_variable_is_no_list_of_peers(command, runtime, monkeypatch):
    monkeypatch.setenv("ATOLL_PEERS", "")
    assert command("start")[0] == 2
    assert not runtime


def test_the_exit_status_of_the_daemon_is_ours(command, runtime):
    sys.modules["node.daemon"].run = lambda config, manifest: 3
    assert command("start")[0] == 3


def test_a_seed_brings_no_run(command, runtime):
    command("bootstrap", "--listen", "127.0.0.1:0")
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


def test_demo_gets_its_arguments(command, monkeypatch):
    module = types.ModuleType("node.demo.run")
    seen = []
    module.main = lambda **arguments: seen.append(arguments) or 0
    monkeypatch.setitem(sys.modules, "node.demo.run", module)
    assert command("demo", "--seconds", 5, "--islands", 2, "--seed", 7, "--json")[0] == 0
    assert seen == [{"seconds": 5, "islands": 2, "seed": 7, "as_json": True}]


def test_keygen_never_overwrites(command, tmp_path):
    path = tmp_path / "deep" / "key.pem"
    status, out, told = command("keygen", "--out", path)
    assert status == 0
    assert Identity.load(path).peer_id == out.strip()
    assert f"--identity {path}" in told, "else nobody knows what to do with it"
    before = path.read_bytes()
    status, _, err = command("keygen", "--out", path)
    assert status == 2
    assert err.startswith("error E104")
    assert path.read_bytes() == before


def test_keygen_writes_to_the_state_directory(command, tmp_path):
    assert command("keygen")[2] == ""  # nodes of that directory take it by themselves
    assert (tmp_path / "state" / "identity.pem").stat().st_mode & 0o777 == 0o600
    status, _, err = command("keygen", "--out", tmp_path / "state" / "identity.pem" / "x")
    assert (status, err[:10]) == (2, "error E104")


def test_status_without_a_daemon(command):
    status, _, err = command("status")
    assert status == 1
    assert err.startswith("error E106: no node runs with the state directory")


def test_config_show_names_sources_and_hides_secrets(command, tmp_path, monkeypatch):
    monkeypatch.setenv("ATOLL_REGION", "alps")
    run_file = tmp_path / "run.toml"
    run_file.write_text("seed = 3\n")
    shown = ("config", "show", "--threads", "2", "--invitation", "hunter2", "--run", run_file)
    shown += ("--rdzv-id", "hunter22")
    status, out, _ = command(*shown)
    assert status == 0
    assert "threads = 2  # --threads" in out
    assert 'region = "alps"  # ATOLL_REGION' in out
    assert 'listen = "0.0.0.0:4390"  # default' in out
    assert "seed = 3\n" in out
    assert "hunter2" not in out
    plain = json.loads(command(*shown, "--json")[1])
    assert plain["settings"]["threads"] == {"value": 2, "source": "--threads"}
    assert plain["run"]["id"] == Manifest(seed=3).run_id.hex()
    assert "hunter2" not in json.dumps(plain)


def test_config_show_lists_all_of_the_run_that_would_be_created(command):
    status, out, _ = command("config", "show", "--mode", "async", "--set", "inner.lr=1e-3")
    assert status == 0
    _, _, run = out.partition("# manifest: run ")
    _, _, tables = run.partition("\n")
    shown = tomllib.loads(tables)
    assert (shown["mode"], shown["inner"]["lr"]) == ("async", 1e-3)
    whole = Manifest(mode="async", inner={"lr": 1e-3}).model_dump(mode="json")
    assert {name: set(table) for name, table in shown.items() if isinstance(table, dict)} == {
        name: {key for key, value in table.items() if value is not None}
        for name, table in whole.items()
        if isinstance(table, dict)
    }
    # which run another node would join only its peers can tell
    for words in (("--peers", "a:1"), ("--role", "observer")):
        status, out, _ = command("config", "show", *words)
        assert status == 0
        assert "# manifest" not in out


def test_what_prepare_cannot_read_is_not_to_be_given_with_data(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "here.txt").write_text("not named, so not to be read\n" * 1000)
    for bad in (tmp_path / "empty.txt", tmp_path / "nowhere", ""):
        status, _, err = command("data", "prepare", bad, "--out", tmp_path / "out")
        assert status == 1
        assert "error E601" in err
        assert "--data" not in err
        assert "data.path" not in err
        assert ".jsonl" in err


def test_what_was_prepared_is_told_in_words(command, tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "The one document of this file."}\n')
    _, out, err = command("data", "prepare", source, "--out", tmp_path / "out")
    assert not err  # no bar where there is no terminal
    assert out.startswith("31 tokens of 1 document in 1 file, 0 documents held out")


def test_what_is_left_out_of_a_folder_is_told(command, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "The one document of this file."}\n')
    (tmp_path / "in" / "b.txt").write_bytes(b"caf\xe9")
    status, _, err = command("data", "prepare", tmp_path / "in", "--out", tmp_path / "out")
    assert status == 0
    assert err == f"leaves out {tmp_path / 'in' / 'b.txt'} (it is not UTF-8 (byte 3))\n"


def test_settings_are_shown_without_credentials(command, tmp_path):
    url = "s3://key:secret@bucket/x"
    _, out, _ = command("config", "show", "--checkpoint-copy", url, "--dir", tmp_path)
    assert "s3://bucket/x" in out
    assert "secret" not in out
