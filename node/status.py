"""``node status``: one screen of what the local daemon says of itself."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from node import __version__
from node.directories import hosts_in
from node.errors import operator_error
from node.monitor.wording import (
    JOIN_STEPS,
    clean,
    duration,
    join_line,
    megabytes,
    number,
    of_own_text,
    of_scripts,
    short,
)
from node.setting_values import host_port
from node.statedir import Holder, StateDir
from protocols.bounds import ENDLESS_ROUNDS
from protocols.errors import OperatorError, reason

TIMEOUT_S = 3.0  # without a byte
WHOLE_S = 10.0  # for the whole answer, however it drips
MAX_STATE_BYTES = 16 * 1024 * 1024
_SHOWN_PEERS = 16
_SHOWN_GPUS = 8
OTHER_FORM = (LookupError, TypeError, ValueError, AttributeError)  # by reading another form
_TROUBLE = ("suspect", "dead", "leaving", "joining")


def report(directory: Path, *, api: str = "", key: str = "") -> dict[str, Any]:
    """As :func:`fetch`; of a host of an island that only trains its number and process.

    Under the names by which `node runs` has them: it runs as it should, and has no state.
    """
    if not api and (host := _only_trains(StateDir(directory))) is not None:
        return {"role": f"host {host.host}", "pid": host.pid}
    return fetch(directory, api=api, key=key)


def fetch(directory: Path, *, api: str = "", key: str = "") -> dict[str, Any]:
    """The state of the daemon at ``api``, or of the one that runs in ``directory``; else E106."""
    api, key = find(directory, api=api, key=key)
    return ask(api, key, "/api/v1/state", "schema")


def find(directory: Path, *, api: str = "", key: str = "") -> tuple[str, str]:
    """``HOST:PORT`` and key of the API of the daemon that runs in ``directory``; else E106."""
    if api:
        return api, key
    home = StateDir(directory)
    if (host := _only_trains(home)) is not None:
        raise operator_error(
            "E106",
            f"no node runs with the state directory {directory}, but host {host.host} of an island",
            why=f"{host} has trainer ranks alone; host 0 has the node",
            fix="ask on host 0",
        )
    found, pid = home.find_api(), home.holder()
    # a killed node leaves the file, and the next one on this machine may have taken the port
    if pid is None:
        raise operator_error("E106", f"no node runs with the state directory {directory}")
    if found is None or found.pid != pid:
        raise operator_error(
            "E106",
            f"the node with the state directory {directory} does not answer yet",
            why=f"process {pid} has just started: libraries are loaded before anything else",
            fix="ask again in some seconds; if it repeats, see what that process prints",
        )
    return found.address, key or found.key


def _only_trains(home: StateDir) -> Holder | None:
    """The host of an island that runs in a directory or in a folder of it, where it is not host 0.

    None for a node, for none, and where several are there. The disk may be shared with a host 0
    that runs elsewhere, whose API is not here, and with other hosts, which say nothing of this
    machine: where nothing runs here, that is what is to be told.
    """
    holder = home.held_by()
    if holder is not None and (holder.host or holder.here):
        return holder if holder.host else None
    hosts = [host for _, host in hosts_in(home.root) if host.here]
    return hosts[0] if len(hosts) == 1 else None


def ask(api: str, key: str, path: str, has: str) -> dict[str, Any]:
    """What the API at ``HOST:PORT`` answers: an object that has the key ``has``; else E106."""
    try:
        host, port = host_port(api)
    except ValueError as error:
        raise operator_error("E204", f"bad API address {api}", why=str(error)) from error
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.connect()
        with _bounded(connection.sock):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            body = answer.read(MAX_STATE_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        why = reason(error) or type(error).__name__
        raise operator_error("E106", f"no node answers at {api}", why=why) from error
    finally:
        connection.close()
    return _checked(api, answer.status, body, has)


@contextmanager
def _bounded(sock: socket.socket) -> Iterator[None]:
    """End a connection after :data:`WHOLE_S`; raises TimeoutError then."""
    over = threading.Event()

    def end() -> None:
        over.set()
        with suppress(OSError):  # it was closed in this moment
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(WHOLE_S, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException):
        if not over.is_set():
            raise
    finally:
        timer.cancel()
    if over.is_set():
        raise TimeoutError(f"its answer takes more than {WHOLE_S:g} s")


def _checked(api: str, status: int, body: bytes, has: str) -> dict[str, Any]:
    if status == 401:
        raise operator_error(
            "E106",
            f"the node at {api} asks for a key",
            why="its API is open to the network",
            fix="set ATOLL_API_KEY, or run this on the node's own machine as its user",
        )
    if status >= 500:
        raise operator_error(
            "E106",
            f"the node at {api} fails to answer",
            why=f"its answer is HTTP status {status}: an error of its own",
            fix="see logs/daemon.log in that node's state directory, and report the defect",
        )
    try:
        if status != 200 or len(body) > MAX_STATE_BYTES:
            raise ValueError(f"status {status}, {len(body)} bytes")
        state = json.loads(body)
        if not isinstance(state, dict) or has not in state:
            raise ValueError("no state in it")
    except (ValueError, RecursionError) as error:  # the second: nested without end
        raise _not_atoll(api, error) from error
    return state


def _not_atoll(api: str, error: Exception) -> OperatorError:
    return operator_error(
        "E106",
        f"what answers at {api} is not an Atoll node",
        why=str(error),
        fix="give the address that `node start` printed as its dashboard with --api",
    )


def watch_it(look: Callable[[], dict[str, Any]], every_s: float, *, as_json: bool) -> NoReturn:
    """Show the state every few seconds until Ctrl-C; a node that does not answer may come back.

    As JSON: a line each, and nothing for a look that failed.
    """
    from rich.console import Console  # one look needs none

    console = Console(highlight=False, markup=False)
    clear = console.is_terminal and not as_json
    while True:
        try:
            state = look()
            text = json.dumps(state) if as_json else render(state)
        except OperatorError as error:
            text = "" if as_json else error.text()
        if text:
            if clear:
                console.clear()
            console.out(text, highlight=False)
            console.file.flush()
        time.sleep(every_s)


def render(state: dict[str, Any]) -> str:
    """The state as text of at most 80 columns or so; raises E202 where it has another form."""
    try:
        return _screen(state)
    except OTHER_FORM as error:
        raise other_version(state, error) from error


def other_version(state: Any, error: Exception) -> OperatorError:
    """E202 for what a node says of itself in a form that is not this version's."""
    node = state.get("node") if isinstance(state, dict) else None
    theirs = node.get("version") if isinstance(node, dict) else None
    return operator_error(
        "E202",
        "the node that runs is of another version than this command",
        why=f"it is Atoll {clean(str(theirs or '?'), 20)}, this is {__version__}, and what it "
        f"says of itself has another form ({type(error).__name__}: {clean(str(error))})",
        fix="after an upgrade: node stop, and node start --resume",
    )


def _screen(state: dict[str, Any]) -> str:
    if "role" in state:  # see :func:`report`
        who = f"{state['role']} of an island, process {state['pid']}"
        return f"{who}; its state: node status on host 0"
    node, run, training = state["node"], state["run"], state["training"]
    lines = [
        f"{clean(node['name']) or short(node['peer'])}  {node['role']}  {state['status']}"
        f"  up {duration(node['uptime_s'])}  {node['device']}",
        f"identity  {node['peer']}",
    ]
    if run is not None:
        eta = training["eta_s"]
        lines.append(
            f"run       {run['label']}  round {of_total(state['rounds']['committed'], run)}"
            + (f"  ETA {duration(eta)}" if eta is not None else "")
        )
    lines += _alarms(state)
    if joins := joining(state):
        lines.append(f"joining   {joins}")
    step = training["step"]
    if step is not None:
        lines.append(
            f"training  step {step['step']}  loss {number(step['loss'])}"
            f"  val {number(training['validation_loss'])}"
            f"  {step['tokens_per_second']:,.0f} tokens/s" + _waits(step)
        )
    lines += _consensus(state) + _network(state) + _knobs(state)
    lines += [f"gpu       {gpu_line(gpu)}" for gpu in state["machine"]["gpus"][:_SHOWN_GPUS]]
    lines += _peers(state["peers"])
    lines.append(f"health    {healthy(state)}")
    lines += [f"          {item['code']} {clean(item['what'])}" for item in state["problems"][-3:]]
    if node["join_address"]:
        invited, scripts = node["invitation_needed"], of_scripts(run)
        line = join_line(
            node["join_address"], invited=invited, scripts=scripts, own_text=of_own_text(run)
        )
        lines += [f"join      {line}", *(f"          {told}" for told in node["join_hint"])]
    return "\n".join(lines)


def healthy(state: Mapping[str, Any]) -> str:
    """``ok``, or why not; a critical alarm, which ``/healthz`` does not count, is hinted at."""
    health = state["health"]
    if not health["healthy"]:
        return "; ".join(map(clean, health["reasons"]))
    critical = [alarm["kind"] for alarm in state["alarms"] if alarm["level"] == "critical"]
    return f"ok, but for the alarm ({', '.join(dict.fromkeys(critical))})" if critical else "ok"


def of_total(done: int, run: Mapping[str, Any] | None) -> str:
    """``12/400``, or ``12`` in a run that only its operators end."""
    total = run["total_rounds"] if run else 0
    return f"{done}/{total}" if 0 < total < ENDLESS_ROUNDS else str(done)


def joining(state: Mapping[str, Any]) -> str:
    """The newest step of joining, while it lasts."""
    if state["status"] not in ("starting", "joining") or not state["join"]:
        return ""
    step = state["join"][-1]
    return f"[{step['step']}/{JOIN_STEPS}] {clean(step['name'])} {clean(step['text'])}"


def gpu_line(gpu: Mapping[str, Any]) -> str:
    """``0 NVIDIA H100  87% used  21.5 of 85.9 GB  61 °C  350 W``, as far as the driver tells."""
    parts = [f"{gpu['index']} {clean(gpu['name'], 40)}".rstrip()]
    if gpu["utilisation"] is not None:
        parts.append(f"{gpu['utilisation']:.0%} used")
    if gpu["memory_total"]:
        parts.append(f"{gpu['memory_used'] / 1e9:.1f} of {gpu['memory_total'] / 1e9:.1f} GB")
    if gpu["temperature_c"] is not None:
        parts.append(f"{gpu['temperature_c']:.0f} °C")
    if gpu["power_w"] is not None:
        parts.append(f"{gpu['power_w']:.0f} W")
    return "  ".join(parts)


def gpus_line(gpus: Sequence[Mapping[str, Any]]) -> str:
    """One GPU as :func:`gpu_line`; of several means and sums, and the hottest."""
    if len(gpus) == 1:
        return gpu_line(gpus[0])

    def known(key: str) -> list[float]:
        return [gpu[key] for gpu in gpus if gpu[key] is not None]

    parts = [f"{len(gpus)} x {clean(gpus[0]['name'], 30)}".rstrip()]
    if use := known("utilisation"):
        parts.append(f"{sum(use) / len(use):.0%} used")
    if total := known("memory_total"):
        parts.append(f"{sum(known('memory_used')) / 1e9:.0f} of {sum(total) / 1e9:.0f} GB")
    if heat := known("temperature_c"):
        parts.append(f"up to {max(heat):.0f} °C")
    return "  ".join(parts)


def _waits(step: dict[str, Any]) -> str:
    """How much of the inner steps is waiting for data, where that is worth a look."""
    share = (step["data_s"] or 0.0) / (step["seconds"] or 1.0)
    return f"  {share:.0%} waiting for data" if share > 0.02 else ""


def _alarms(state: dict[str, Any]) -> list[str]:
    lines = []
    for alarm in state["alarms"]:
        word = "ALARM" if alarm["level"] == "critical" else "alarm"
        lines += [f"{word}     {clean(alarm['what'])}", f"          {clean(alarm['fix'])}"]
    return lines


def _consensus(state: dict[str, Any]) -> list[str]:
    consensus = state["consensus"]
    if consensus is None:
        return []
    before, after = consensus["before"], consensus["after"]
    distance = "-" if before is None else f"{before:.3f}"
    if before is not None and after is not None:
        distance += f" -> {after:.3f}"
    return [
        f"consensus {distance}  {consensus['members']}/{consensus['live']} merged"
        + (
            "  each its own state"
            if consensus["agreeing"] is None
            else f"  {consensus['agreeing']} agree bit for bit"
        )
    ]


def _network(state: dict[str, Any]) -> list[str]:
    rounds = state["network"]["rounds"]
    if not rounds["sent_bytes"] and not rounds["received_bytes"]:
        return []
    compression = rounds["compression"]
    return [
        f"network   sent {megabytes(rounds['sent_bytes'])}"
        f"  received {megabytes(rounds['received_bytes'])}"
        + (f"  compressed {compression:.1f}x" if compression else "")
        + (f"  codec {clean(rounds['codec'])}" if rounds["codec"] else "")
        + f"  {state['node']['reachability']}".rstrip()
    ]


def _knobs(state: dict[str, Any]) -> list[str]:
    """What was chosen from measurements, and why; what from stands in the state and the log."""
    return [
        f"knob      {clean(name)} {knob['value']}: {clean(knob['why'])}"
        for name, knob in state["knobs"].items()
    ]


def _peers(peers: list[dict[str, Any]]) -> list[str]:
    if not peers:
        return []
    lines = [f"{'peer':<22} {'status':<9} {'round':>6} {'loss':>6} {'tok/s':>9} {'link':<6} rtt"]
    if len(peers) > _SHOWN_PEERS:  # this node, then whoever is not as all others are
        head = max(peer["round"] for peer in peers)
        peers = sorted(peers, key=lambda peer: _unusual(peer, head))
    for peer in peers[:_SHOWN_PEERS]:
        rtt = "-" if peer["rtt_s"] is None else f"{peer['rtt_s'] * 1000:.0f} ms"
        name = clean(peer["name"], 12)
        who = f"{name} {short(peer['peer'])}" if name else short(peer["peer"])
        lines.append(
            f"{who:<22} {clean(peer['status'], 9):<9} {peer['round']:>6} {number(peer['loss']):>6}"
            f" {peer['tokens_per_second']:>9,.0f} {peer['link']:<6} {rtt}"
        )
    if len(peers) > _SHOWN_PEERS:
        rest = Counter(peer["status"] for peer in peers[_SHOWN_PEERS:])
        told = ", ".join(f"{count} {clean(status, 9)}" for status, count in rest.most_common())
        lines.append(f"… and {len(peers) - _SHOWN_PEERS} more: {told}")
    return lines


def _unusual(peer: dict[str, Any], head: int) -> tuple[bool, bool, bool, int]:
    """Sorts this node first, then who has another state, is in trouble, or is behind."""
    mine = peer["link"] == "self"
    return (
        not mine,
        peer["agrees"] is not False,
        peer["status"] not in _TROUBLE,
        -max(0, head - peer["round"]),
    )
