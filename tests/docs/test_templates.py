"""Templates of how nodes are run pass the linters of those who read them."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

from node import outermost
from node.cli import app
from node.config import resolve
from node.hosts.meeting import meeting
from node.templates import STOP_S, TEMPLATES, checkpoint_s, open_to_others, render, stop_s

PEERS = ("203.0.113.7:4390/12D3KooWNZcxuidu2rkHZK2K5H1WMTHuvb2QbLhPfnmLGuqU9Xdz", "seed.example:1")
KINDS = [{}, {"peers": PEERS, "public_addr": "198.51.100.2:4390"}]
BIN = sys.executable.rpartition("/")[0]


def written(tmp_path, name, kind):
    path = tmp_path / TEMPLATES[name].file
    path.write_text(render(name, **kind))
    return path


def passes(*command):
    done = subprocess.run(
        [*map(str, command)], check=False, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS, ids=["seed", "island"])
def test_nothing_is_left_to_fill_in(name, kind):
    text = render(name, **kind)
    assert not re.findall(r"@[A-Z_]+@", text)
    assert text.endswith("\n")
    assert (PEERS[0] in text) == bool(kind and name not in ("prometheus", "grafana"))


@pytest.mark.parametrize("name", ["systemd", "docker", "compose", "kubernetes", "slurm"])
def test_a_large_model_s_node_is_given_the_time_of_two_checkpoints(name):
    words = ["bootstrap", "template", name, "--parameters", "7e9", "--disk", "1e9"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert done.output == render(name, stop=340)  # 140 GB, twice, and a minute
    assert re.search(r"\b340(s|\b)", done.output)
    assert stop_s(checkpoint_s(1e6)) == STOP_S


def test_hosts_that_a_file_has_no_place_for_are_refused():
    for name in ("systemd", "skypilot", "grafana"):
        done = CliRunner().invoke(app, ["bootstrap", "template", name, "--nnodes", "2:4"])
        assert done.exception.what == f"--nnodes 2:4 with {name}"
        assert done.exception.fix == "leave it out, or take kubernetes-hosts or slurm"
    for name in ("slurm", "kubernetes-hosts"):
        several = ["bootstrap", "template", name, "--peers", "a:1", "--nnodes", "2"]
        assert CliRunner().invoke(app, several).exit_code == 0


@pytest.mark.parametrize(("nnodes", "minimum"), [("4", 1), ("3:4", 3)])
def test_how_many_hosts_an_island_goes_on_with_is_in_the_file(nnodes, minimum):
    for name, said in (("slurm", "$SLURM_NNODES"), ("kubernetes-hosts", "4")):
        done = CliRunner().invoke(app, ["bootstrap", "template", name, "--nnodes", nnodes])
        assert f'"{minimum}:{said}"' in done.output
        assert done.output == render(name, minimum=minimum, hosts=4)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd")
@pytest.mark.parametrize("kind", KINDS, ids=["seed", "island"])
def test_systemd(tmp_path, kind):
    unit = written(tmp_path, "systemd", kind)
    said = passes("systemd-analyze", "verify", "--recursive-errors=no", "--man=no", unit)
    assert "atoll" not in said  # it also complains of units of the machine
    text = unit.read_text()
    assert "KillMode=mixed" in text
    assert "OOMPolicy=continue\n" in text  # else a rank that is killed for memory ends the node
    assert "StateDirectory=atoll" in text
    assert "CacheDirectory=atoll\n" in text  # $XDG_CACHE_HOME: the home is read-only
    assert "XDG_CACHE_HOME=%C/atoll\n" in text
    assert f"TimeoutStopSec={STOP_S}" in text


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("closed", [False, True])
def test_a_unit_says_that_its_user_cannot_get_to_the_installation(
    tmp_path, monkeypatch, closed, linked
):
    """The README's installation is a clone, often below a home that others cannot enter."""
    home, elsewhere = tmp_path / "home", tmp_path / "opt"
    for folder in (home, elsewhere):
        folder.mkdir()
    python = home / "python"
    python.touch()
    if linked:
        python = elsewhere / "python"
        python.symlink_to(home / "python")
    monkeypatch.setattr("node.templates.sys.executable", str(python))
    monkeypatch.setattr(
        "node.templates.open_to_others", lambda folder: not (closed and folder == home)
    )
    text = render("systemd")
    assert (f"no other user can enter {home},\n" in text) == closed
    assert text.count("203/EXEC") == closed


@pytest.mark.parametrize(("mode", "open_to_all"), [(0o700, False), (0o750, False), (0o755, True)])
def test_a_home_that_others_cannot_enter(tmp_path, mode, open_to_all):
    tmp_path.chmod(mode)
    assert open_to_others(tmp_path) == open_to_all


@pytest.mark.parametrize("kind", KINDS, ids=["seed", "island"])
def test_docker(tmp_path, kind):
    passes(f"{BIN}/hadolint", "--ignore", "DL3013", written(tmp_path, "docker", kind))
    text = render("docker", **kind)
    [command] = re.findall(r"^CMD (\[.*)$", text, re.MULTILINE)
    assert json.loads(command)[0] == ("start" if kind else "bootstrap")
    assert 'ENTRYPOINT ["python", "-m", "node"]' in text  # no shell, which would keep the signal
    assert "VOLUME /var/lib/atoll" in text


@pytest.mark.parametrize("kind", KINDS, ids=["seed", "island"])
def test_compose(tmp_path, kind):
    path = written(tmp_path, "compose", kind)
    passes(f"{BIN}/check-jsonschema", "--builtin-schema", "vendor.compose-spec", path)
    service = yaml.safe_load(path.read_text())["services"]["node"]
    assert service["stop_grace_period"] == f"{STOP_S}s"
    assert service["volumes"] == ["state:/var/lib/atoll"]


@pytest.mark.parametrize("kind", KINDS, ids=["seed", "island"])
def test_kubernetes(tmp_path, kind):
    path = written(tmp_path, "kubernetes", kind)
    passes(f"{BIN}/kubernetes-validate", "--strict", path)
    service, pods = yaml.safe_load_all(path.read_text())
    pod = pods["spec"]["template"]["spec"]
    assert pod["enableServiceLinks"] is False  # ATOLL_PORT and its like are no settings
    assert pod["terminationGracePeriodSeconds"] == STOP_S
    assert service["spec"]["selector"] == pods["spec"]["selector"]["matchLabels"]
    [node] = pod["containers"]
    mounts = {mount["name"] for mount in node["volumeMounts"]}
    claims = {claim["metadata"]["name"] for claim in pods["spec"]["volumeClaimTemplates"]}
    assert mounts == claims | {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("kind", KINDS, ids=["alone", "island"])
def test_kubernetes_with_several_hosts(tmp_path, kind, monkeypatch):
    """The pods' names, ports and variables are those by which hosts find each other."""
    path = written(tmp_path, "kubernetes-hosts", {**kind, "hosts": 3})
    passes(f"{BIN}/kubernetes-validate", "--strict", path)
    meet, public, pods = yaml.safe_load_all(path.read_text())
    spec = pods["spec"]
    assert (spec["replicas"], spec["podManagementPolicy"]) == (3, "Parallel")
    assert spec["serviceName"] == meet["metadata"]["name"]
    assert meet["spec"]["clusterIP"] == "None"
    [node] = spec["template"]["spec"]["containers"]
    assert spec["template"]["spec"]["enableServiceLinks"] is False
    environ = {item["name"]: item["value"] for item in node["env"]}
    for index in (0, 2):
        name = f"{pods['metadata']['name']}-{index}.{spec['serviceName']}.ns.svc"
        monkeypatch.setattr("node.hosts.meeting.socket.getfqdn", lambda name=name: name)
        seen = environ | {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
        found = meeting(resolve({}, environ), seen)
        assert (found.host, found.minimum, found.maximum) == (index, 1, 3)
        assert (found.address, found.port) == ("atoll-0.atoll-hosts", 29400)
    ports = {port["containerPort"]: port["name"] for port in node["ports"]}
    for service in (meet, public):
        [port] = service["spec"]["ports"]
        assert ports[port["port"]] == port["targetPort"]


@pytest.mark.parametrize("kind", [*KINDS, {"hosts": 2}], ids=["seed", "island", "hosts"])
def test_slurm(tmp_path, kind):
    path = written(tmp_path, "slurm", kind)
    assert f"#SBATCH --nodes={kind.get('hosts', 1)}\n" in path.read_text()
    passes("bash", "-n", path)
    passes(f"{BIN}/shellcheck", path)
    assert f"#SBATCH --signal=B:TERM@{STOP_S}" in path.read_text()


@pytest.mark.parametrize("kind", KINDS, ids=["seed", "island"])
def test_skypilot(tmp_path, kind):
    task = yaml.safe_load(render("skypilot", **kind))
    assert set(task) == {"name", "workdir", "resources", "envs", "setup", "run"}
    for part in ("setup", "run"):
        script = tmp_path / part
        script.write_text("#!/bin/bash\n" + task[part])
        passes("bash", "-n", script)
        passes(f"{BIN}/shellcheck", script)


@pytest.mark.parametrize("kind", KINDS, ids=["seed", "island"])
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "compose"][:6])
def test_the_commands_in_them_are_taken(name, kind, monkeypatch):
    """What follows ``-m node`` parses, with every option of it known."""
    text = render(name, **kind)
    words = {
        "docker": r"(?m)^CMD (\[.*\])",
        "kubernetes-hosts": r"args: (\[.*\])", "kubernetes": r"args: (\[.*\])",
        "systemd": r"-m node (.*)",
        "slurm": r"arguments=\((.*)\)", "skypilot": r"arguments=\((.*)\)",
    }  # fmt: skip
    [found] = re.findall(words[name], text)
    command = json.loads(found) if found.startswith("[") else found.split()
    started = []
    monkeypatch.setattr("node.commands.running._run", lambda config, run: started.append(config))
    assert outermost.run(command) == 0
    assert started[0].role == ("seed" if command[0] == "bootstrap" else "island")
    assert command[0] == ("start" if kind or TEMPLATES[name].trains else "bootstrap")
    assert started[0].peers == (PEERS if kind else ())
    assert started[0].resume == bool(kind)


@pytest.mark.parametrize("stopped", [True, False])
def test_the_job_script_passes_the_signal_on_and_waits(tmp_path, stopped):
    """With a stand-in for the node that takes its time to leave."""
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/bash\n"
        f'echo "$@" > {tmp_path}/arguments\n'
        f"trap 'sleep 0.5; echo left > {tmp_path}/left; exit 7' TERM\n"
        f"echo up > {tmp_path}/up\n"
        "for _ in $(seq 300); do sleep 0.1; done\n"
        if stopped
        else f'#!/bin/bash\necho "$@" > {tmp_path}/arguments\nexit 3\n'
    )
    python.chmod(0o755)
    path = tmp_path / "job.sh"
    path.write_text(render("slurm").replace(sys.executable, str(python)))
    (tmp_path / "atoll-state" / "checkpoints" / "ckpt-00000001").mkdir(parents=True)
    job = subprocess.Popen(["bash", path], cwd=tmp_path)
    if stopped:
        from node_process import wait_until

        wait_until((tmp_path / "up").exists, "the node is up")
        job.terminate()
    assert job.wait(30) == (7 if stopped else 3)
    assert (tmp_path / "left").exists() == stopped
    assert (tmp_path / "arguments").read_text() == "-m node start --resume\n"


@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
@pytest.mark.parametrize("name", ["skypilot", "kubernetes-hosts"])
def test_who_makes_a_run_goes_on_with_it(tmp_path, name, again):
    """With a stand-in for the node: a machine that comes back has its disk, with a checkpoint."""
    tools, home = tmp_path / "bin", tmp_path / "home"
    state = home / "atoll-state"
    for folder in (tools, state / "checkpoints" / "ckpt-00000001" if again else state):
        folder.mkdir(parents=True)
    python = tools / "python"
    python.write_text('#!/bin/bash\necho "$@"\n')
    python.chmod(0o755)
    if name == "skypilot":
        task = yaml.safe_load(render(name))
        command, where = ["bash", "-c", task["run"]], task["envs"]["ATOLL_DIR"]
        assert where == f"~/{state.name}"
    else:
        *_, pods = yaml.safe_load_all(render(name))
        [node] = pods["spec"]["template"]["spec"]["containers"]
        command, where = node["command"] + node["args"], str(state)
    environ = {"PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(home), "ATOLL_DIR": where}
    said = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert said.stdout == f"-m node start{' --resume' * again}\n"


@pytest.mark.parametrize("minimum", [1, 2, 3])
def test_the_job_script_starts_a_node_on_each_machine(tmp_path, minimum):
    """With stand-ins for srun and the node: what srun gives each of them is enough to meet.

    Also where ``sbatch --nodes`` asks for fewer machines than the minimum in the file.
    """
    tools = tmp_path / "bin"
    tools.mkdir()
    srun, python = tools / "srun", tools / "python"
    srun.write_text(
        "#!/bin/bash\n"
        f'while [[ "$1" == --* ]]; do echo "$1" >> {tmp_path}/flags; shift; done\n'
        'for n in 0 1; do SLURM_NODEID=$n "$@" & done\nwait\n'
    )
    python.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        "from node.config import resolve\nfrom node.hosts.meeting import meeting\n"
        "assert sys.argv[1:-1] == ['-m', 'node', 'start', '--nnodes'], sys.argv\n"
        "line = repr(meeting(resolve({'nnodes': sys.argv[-1]}, {}), os.environ)) + '\\n'\n"
        "os.write(1, line.encode())  # in one piece: both write at once\n"
    )
    for tool in (srun, python):
        tool.chmod(0o755)
    path = tmp_path / "job.sh"
    text = render("slurm", minimum=minimum, hosts=2)
    path.write_text(text.replace(sys.executable, str(python)))
    environ = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": os.getcwd(),
        "SLURM_JOB_ID": "12",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "gpu[3-4]",
    }
    done = subprocess.run(
        ["bash", path],
        check=False,
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    both = sorted(done.stdout.splitlines())
    for number, line in enumerate(both):
        needed = f"minimum={min(minimum, 2)}, maximum=2"
        assert f"host={number}, {needed}, address='gpu3', port=29412" in line
    assert len(both) == 2
    # one that ends, or whose machine fails, ends no other
    flags = (tmp_path / "flags").read_text().split()
    assert {"--wait=0", "--no-kill", "--kill-on-bad-exit=0"} < set(flags)


def test_the_command_prints_them(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("ATOLL_DIR", str(tmp_path))
    for name in TEMPLATES:
        assert outermost.run(["bootstrap", "template", name, "--peers", PEERS[1]]) == 0
        assert capsys.readouterr().out == render(name, peers=(PEERS[1],))
    assert outermost.run(["bootstrap", "template", "frob"]) == 2
    assert "there are systemd, docker" in capsys.readouterr().err
    assert outermost.run(["bootstrap", "--listen", "127.0.0.1:0", "template", "docker"]) == 2
    assert "--listen before template" in capsys.readouterr().err


def test_a_seed_is_still_started_by_its_command(monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr("node.commands.running._run", lambda config, run: started.append(config))
    assert outermost.run(["bootstrap", "--listen", "127.0.0.1:0", "--dir", str(tmp_path)]) == 0
    assert started[0].role == "seed"
    assert resolve({"dir": str(tmp_path)}, {}).role == "island"
