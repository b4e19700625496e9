"""A node's settings: precedence, where each came from, and mistakes in words."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.config import NodeConfig, resolve
from node.outermost import report
from node.setting_values import DEFAULT_PORT, host_port
from protocols.addresses import is_loopback
from protocols.errors import OperatorError
from protocols.identity import Identity

PEER = Identity.from_seed(bytes(32)).peer_id


@pytest.fixture
def env(tmp_path):
    return {"ATOLL_DIR": str(tmp_path)}


def _refused(flags, environ=None, code="E204", file=None):
    with pytest.raises(OperatorError) as caught:
        resolve(flags, environ or {}, file)
    assert caught.value.code == code
    assert caught.value.exit_code == 2
    return caught.value.text()


def test_flag_over_environment_over_file_over_default(tmp_path, env):
    (tmp_path / "node.toml").write_text('name = "file"\nregion = "file"\nthreads = 2\n')
    config = resolve(
        {"name": "flag", "listen": None}, env | {"ATOLL_NAME": "env", "ATOLL_REGION": "env"}
    )
    assert (config.name, config.region, config.threads) == ("flag", "env", 2)
    assert config.source("name") == "--name"
    assert config.source("region") == "ATOLL_REGION"
    assert config.source("threads") == str(tmp_path / "node.toml")
    assert config.source("listen") == "default"
    assert config.is_default("listen")
    assert not config.is_default("threads")
    assert config.listen == f"0.0.0.0:{DEFAULT_PORT}"
    assert config.identity_path == tmp_path / "identity.pem"


def test_the_file_can_be_named(tmp_path, env):
    other = tmp_path / "other.toml"
    other.write_text('peers = ["a:1"]\nrounds = 3\njson_log = true\n')
    by_flag = resolve({}, env, other)
    by_environment = resolve({}, env | {"ATOLL_CONFIG": str(other)})
    assert by_flag == by_environment
    assert by_flag.peers == ("a:1",)
    assert by_flag.rounds == 3
    assert by_flag.json_log


def test_a_flag_of_zero_or_false_is_given(env):
    config = resolve({"json_log": False, "wait_s": "0"}, env | {"ATOLL_JSON_LOG": "true"})
    assert not config.json_log
    assert config.wait_s == 0


def test_peers_from_everywhere(tmp_path, env):
    listed = tmp_path / "peers.txt"
    listed.write_text(f"c:3 # the third\n\n# nothing\nd:4, [::1]:5/{PEER}\n")
    config = resolve({"peers": ["a:1,b:2", f"@{listed}", "a:1"]}, env)
    assert config.peers == ("a:1", "b:2", "c:3", "d:4", f"[::1]:5/{PEER}")
    assert resolve({}, env | {"ATOLL_PEERS": "a:1 b:2"}).peers == ("a:1", "b:2")


def test_what_kubernetes_sets_for_a_service_of_our_name_is_no_setting(env):
    """As a pod sees a service called atoll with a port called peers."""
    found = env | {
        "ATOLL_SERVICE_HOST": "10.0.0.7",
        "ATOLL_SERVICE_PORT": "4390",
        "ATOLL_SERVICE_PORT_PEERS": "4390",
        "ATOLL_PORT": "tcp://10.0.0.7:4390",
        "ATOLL_PORT_4390_TCP": "tcp://10.0.0.7:4390",
        "ATOLL_PORT_4390_TCP_ADDR": "10.0.0.7",
        "ATOLL_HOSTS_PORT_4390_TCP_PROTO": "tcp",
        "ATOLL_HOSTS_SERVICE_HOST": "10.0.0.8",
        "ATOLL_NAME": "pod",
    }
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert resolve({}, found | pod).name == "pod"
    assert "ATOLL_" in _refused({}, found)  # elsewhere they are somebody's mistake
    assert "did you mean ATOLL_PEERS?" in _refused({}, env | pod | {"ATOLL_PEER": "a:1"})


def test_bad_peers_are_e102(env):
    assert "http://" in _refused({"peers": ["http://a:1"]}, env, "E102")
    assert "port" in _refused({"peers": ["a"]}, env, "E102")
    assert "0.0.0.0" in _refused({"public_addr": "0.0.0.0:4390"}, env, "E102")


@pytest.mark.parametrize(
    ("flags", "environ", "expected"),
    [
        ({"lisen": "x"}, {}, "did you mean listen? (from --lisen)"),
        ({}, {"ATOLL_LISTN": "x"}, "did you mean ATOLL_LISTEN?"),
        ({"nproc": "-1"}, {}, "nproc = '-1': must be 0 to 1024 (from --nproc)"),
        ({}, {"ATOLL_NPROC": "x"}, "nproc = 'x': must be a valid integer"),
        ({"inner_steps": f"1{'0' * 30}"}, {}, "must be 0 to 10000000 (from --inner-steps)"),
        ({"device": "gpu"}, {}, "device = 'gpu': must be 'auto', 'cpu' or 'cuda'"),
        ({"listen": "1.2.3.4"}, {}, "has no port"),
        ({"listen": "[::1]"}, {}, "has no port"),
        ({"listen": "::1"}, {}, "in brackets: [::1]:4390"),
        ({"listen": "::1:80"}, {}, "[::1]:80"),
        ({"listen": "a:70000"}, {}, "from 0 to 65535"),
        ({"listen": ""}, {}, "listen"),
        ({"data": ""}, {}, "data: is empty; give a path, or leave it out (from --data)"),
        ({}, {"ATOLL_DATA": " "}, "(from ATOLL_DATA)"),
        ({"dir": ""}, {}, "dir: is empty"),
        ({"run": ""}, {}, "run: is empty"),
        ({"invitation": ""}, {}, "invitation: is empty (from --invitation)"),
        ({}, {"ATOLL_INVITATION": " "}, "invitation: is empty (from ATOLL_INVITATION)"),
        ({"api": "0.0.0.0:80"}, {}, "set api_key"),
        ({"seconds": "nan"}, {}, "seconds"),
        ({"data_cache": "20"}, {}, "data_cache: must be at least 1MB (from --data-cache)"),
        ({"name": "a\x1b[2J"}, {}, "name"),
        ({"name": "x" * 65}, {}, "name"),
    ],
)
def test_mistakes_are_explained(env, flags, environ, expected):
    assert expected in _refused(flags, env | environ)


def test_an_unknown_key_of_the_file_names_the_file(tmp_path, env):
    (tmp_path / "node.toml").write_text("thread = 2\n")
    text = _refused({}, env)
    assert "did you mean threads?" in text
    assert str(tmp_path / "node.toml") in text


def test_secrets_are_not_repeated(env):
    text = _refused({"api_key": "hunter2"}, env)
    assert "api_key" in text
    assert "hunter2" not in text


def test_an_open_api_needs_a_key(env):
    config = resolve({"api": "0.0.0.0:80", "api_key": "k" * 16}, env)
    assert config.api == "0.0.0.0:80"
    assert resolve({"api": "[::1]:80"}, env).api == "[::1]:80"


@given(st.text(max_size=40))
def test_host_port_raises_value_error_only(text):
    try:
        host, port = host_port(text)
    except ValueError:
        return
    assert host
    assert 0 <= port <= 65_535


@pytest.mark.parametrize("host", ["head..site", ".head", "h" * 64, f"a.{'h' * 64}.b", "a-.b", "."])
def test_a_host_that_no_name_can_be_is_refused_before_it_is_looked_up(host):
    """Python raises UnicodeError when it is to look such a name up."""
    with pytest.raises(ValueError, match="neither a name nor an address"):
        host_port(f"{host}:80")


@pytest.mark.parametrize("host", ["head", "head.site.", "h" * 63, "_srv.a-b", "10.0.0.1"])
def test_names_and_addresses_are_hosts(host):
    assert host_port(f"{host}:80") == (host, 80)


def test_text_that_travels_is_bounded_in_bytes(env):
    assert resolve({"region": "ü" * 32}, env).region == "ü" * 32
    for flags in ({"region": "ü" * 33}, {"name": "x" * 65}, {"invitation": "ü" * 129}):
        with pytest.raises(OperatorError, match=r"bytes in UTF-8|not in the form"):
            resolve(flags, env)


def test_loopback():
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org")))


def test_every_setting_has_a_description():
    for key, field in NodeConfig.model_fields.items():
        assert (field.description or "").endswith("."), key


def test_a_variable_that_is_read_elsewhere_is_no_unknown_setting(env):
    assert resolve({}, {**env, "ATOLL_KERNELS": "off"}) == resolve({}, env)


@pytest.mark.parametrize("flags", [{"dir": "~no.such.user/x"}, {"data": "~no.such.user/x"}])
def test_a_home_of_nobody_stands_for_itself_as_in_a_shell(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (setting,) = flags
    assert str(getattr(resolve(flags, {}), setting)) == str(tmp_path / "~no.such.user/x")


def test_what_goes_wrong_with_a_home_of_nobody_is_told(capsys):
    error = OperatorError("E204", "what", "why", "fix")
    assert report(error, ["start", "--dir", "~no.such.user/x"]) == error.exit_code
    assert "what" in capsys.readouterr().err


def test_settings_of_this_machine_are_not_for_another(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "node.toml").write_text('peers = ["10.0.0.1:1"]\nnoclue = 1\n')
    assert resolve({"dir": str(home)}, {}, here=False).peers == ()


def test_a_relative_path_in_a_removed_directory_is_refused(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(OperatorError, match="bad setting") as refused:
        resolve({"dir": "here"}, {})
    assert refused.value.code == "E204"
    assert "dir: 'here' is relative, and the working directory is no longer" in refused.value.why
    assert resolve({"dir": str(tmp_path)}, {}).dir == tmp_path


def test_a_path_that_json_cannot_tell_is_refused(tmp_path):
    with pytest.raises(OperatorError, match="bad setting") as refused:
        resolve({"dir": os.fsdecode(os.fsencode(tmp_path) + b"/n\xff")}, {})
    assert "is not UTF-8" in refused.value.why
