"""Who the hosts of an island are and where they meet: from flags, or from what started them.

``--nnodes``, ``--node-rank``, ``--rdzv-endpoint`` and ``--rdzv-id`` are those of torchrun.
With ``--nnodes auto``, or where one of them is left out, the environment is asked: torchrun's own
variables (``PET_*``, ``MASTER_ADDR``), then Slurm's, then those of a Kubernetes Job with an
index or of a StatefulSet. Beyond one machine there has to be a rendezvous id.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from node.errors import operator_error
from node.island.settings import IslandSettings, check_nnodes
from node.setting_values import host_port
from protocols.addresses import hostport, is_loopback
from protocols.errors import OperatorError

DEFAULT_PORT = 29_400  # torchrun's
PORTS = 1000  # from that on; a Slurm job takes one of them by its number
MAX_HOSTS = 1024
MAX_PORT = 65_535


@dataclass(frozen=True, slots=True)
class Meeting:
    """One host's place among those of its island."""

    host: int  # its number; 0 runs the daemon
    minimum: int
    maximum: int
    address: str  # of host 0,
    port: int  # where it listens for the others
    key: str  # the rendezvous id
    wait_s: float  # for hosts that are missing


@dataclass(frozen=True, slots=True)
class Found:
    """What an environment says; None and empty: nothing."""

    nnodes: str = ""
    host: int | None = None
    address: str = ""
    port: int = DEFAULT_PORT
    key: str = ""


def meeting(settings: IslandSettings, environ: Mapping[str, str]) -> Meeting | None:
    """Where this host meets the others; None for an island of one host.

    Raises OperatorError E204 that names the flag that is missing or contradicts another.
    """
    if settings.nnodes != "auto" and _bounds(settings.nnodes)[1] == 1:
        if given := _given(settings) if "nnodes" not in settings.model_fields_set else "":
            raise _bad(f"{given} without --nnodes", "of one host alone there is no other to meet")
        _check_rank(settings.node_rank or 0, 1)
        return None
    found = [*_torchrun(environ), *_slurm(environ), *_kubernetes(environ)]
    minimum, maximum = _hosts(settings, found)
    if maximum == 1:
        _check_rank(settings.node_rank or 0, 1)
        return None
    host = _own_number(settings, found, maximum)
    address, port = _endpoint(settings, found)
    key = _key(settings, found, address)
    return Meeting(host, minimum, maximum, address, port, key, settings.hosts_wait_s)


# --- each from its flag, or from the first environment that says it -------------------------------


def _hosts(settings: IslandSettings, found: Sequence[Found]) -> tuple[int, int]:
    """How many hosts there are, at least and at most."""
    if settings.nnodes != "auto":
        return _bounds(settings.nnodes)
    nnodes = next((item.nnodes for item in found if item.nnodes), "")
    if not nnodes:
        raise _bad(
            "--nnodes auto: nothing says how many hosts there are",
            "neither torchrun's variables (PET_NNODES, NNODES) nor Slurm's are set",
            "give --nnodes with the number, or MIN:MAX",
        )
    try:
        return _bounds(nnodes)
    except ValueError as error:
        raise _bad(f"--nnodes auto: {nnodes!r} hosts", f"it {error}") from error


def _own_number(settings: IslandSettings, found: Sequence[Found], hosts: int) -> int:
    """Which of at most so many ``hosts`` this one is."""
    host = settings.node_rank
    if host is None:
        host = next((item.host for item in found if item.host is not None), None)
    if host is None:
        raise _bad("--node-rank is missing", "nothing says which of the hosts this one is")
    _check_rank(host, hosts)
    return host


def _endpoint(settings: IslandSettings, found: Sequence[Found]) -> tuple[str, int]:
    """Address and port of host 0."""
    address, port = "", DEFAULT_PORT
    if settings.rdzv_endpoint:
        address, port = host_port(settings.rdzv_endpoint)
    elif (named := next((item for item in found if item.address), None)) is not None:
        address, port = named.address, named.port
    if not address:
        raise _bad("--rdzv-endpoint is missing", "nothing says where host 0 is")
    if not 0 <= port <= MAX_PORT:
        raise _bad(f"host 0 at port {port}", f"ports go up to {MAX_PORT}")
    try:  # the address may be the environment's, unchecked
        host_port(hostport(address, port))
    except ValueError as error:
        raise _bad(f"host 0 at {address!r}", str(error)) from error
    return address, port


def _key(settings: IslandSettings, found: Sequence[Found], address: str) -> str:
    """The rendezvous id; on one machine it may be empty."""
    key = settings.rdzv_id or next((item.key for item in found if item.key), "")
    if not key and not is_loopback(address):
        raise _bad(
            "--rdzv-id is missing",
            "anybody who reaches host 0's port could take part as one of its hosts",
            "give all hosts the same one: a secret, long and random",
        )
    return key


# --- flags ----------------------------------------------------------------------------------------


def refuse_hosts(settings: IslandSettings, role: str) -> None:
    """Raise E204 where a node that is no island is said to have several hosts."""
    given = _given(settings)
    if given or settings.nnodes not in ("1", "auto"):
        raise _bad(
            f"{given or '--nnodes'} with --role {role}",
            "only an island has several hosts",
            "leave one of them out",
        )


def _given(settings: IslandSettings) -> str:
    """Which flags say where hosts meet."""
    flags = {
        "--node-rank": settings.node_rank is not None,
        "--rdzv-endpoint": settings.rdzv_endpoint,
        "--rdzv-id": settings.rdzv_id,
    }
    return ", ".join(flag for flag, there in flags.items() if there)


def _check_rank(host: int, hosts: int) -> None:
    if host >= hosts:
        raise _bad(
            f"--node-rank {host} is too large",
            f"hosts are numbered from 0, so the last of {hosts} is {hosts - 1}"
            if hosts > 1
            else "there is one host",
            f"give 0 to {hosts - 1}, or a larger --nnodes" if hosts > 1 else "give --nnodes",
        )


def _bounds(nnodes: str) -> tuple[int, int]:
    """``2`` or ``1:2`` as (minimum, maximum); raises ValueError as :class:`IslandSettings` does."""
    low, _, high = check_nnodes(nnodes).partition(":")
    return int(low), int(high or low)


# --- environments ---------------------------------------------------------------------------------


def _torchrun(environ: Mapping[str, str]) -> list[Found]:
    """``PET_NNODES`` and its like, and the names that training operators set."""

    def first(*names: str) -> str:
        return next((environ[name] for name in names if environ.get(name)), "")

    address, port = first("PET_MASTER_ADDR", "MASTER_ADDR"), first("PET_MASTER_PORT", "MASTER_PORT")
    if endpoint := first("PET_RDZV_ENDPOINT"):
        try:
            address, port = map(str, host_port(endpoint))
        except ValueError:
            address = endpoint
    nnodes = first("PET_NNODES", "NNODES", "GROUP_WORLD_SIZE")
    found = Found(
        nnodes=nnodes if re.fullmatch(r"\d+(:\d+)?", nnodes) else "",
        host=_number(first("PET_NODE_RANK", "NODE_RANK", "GROUP_RANK")),
        address=address,
        port=_number(port) or DEFAULT_PORT,
        key=first("PET_RDZV_ID", "TORCHELASTIC_RUN_ID"),
    )
    return [found] if nnodes or found.host is not None or address else []


def _slurm(environ: Mapping[str, str]) -> list[Found]:
    """The hosts of this task's step; the job may have more, for other islands.

    A step of one host alone has no other to meet: where the flags say that there are several, the
    job's hosts are meant.
    """
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if not job:
        return []
    listed = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
    names, number = hosts_of(listed), _digits(job)
    if len(of_step := hosts_of(environ.get("SLURM_STEP_NODELIST", ""))) > 1:
        step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID", "")
        names, number, job = of_step, number + _digits(step), f"{job}.{step}"
    return [
        Found(
            nnodes=environ.get("SLURM_STEP_NUM_NODES")
            or environ.get("SLURM_NNODES")
            or environ.get("SLURM_JOB_NUM_NODES")
            or str(len(names)),
            host=_number(environ.get("SLURM_NODEID", "")),
            address=names[0] if names else "",
            port=DEFAULT_PORT + number % PORTS,
            key=f"slurm-{job}",
        )
    ]


def _digits(text: str) -> int:
    return int(re.sub(r"[^0-9]", "", text)[-9:] or "0")


def hosts_of(listed: str) -> list[str]:
    """Names in Slurm's list of hosts, as in ``a[1-3,05],b-7``; raises OperatorError E204."""
    names: list[str] = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", listed):
        names += _expanded(part)
    if "".join(re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*,?", listed)) != listed:
        raise _bad(f"SLURM_JOB_NODELIST: {listed!r} is no list of hosts", "brackets do not close")
    return names


def _expanded(part: str) -> list[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, after = rest.partition("]")
    names: list[str] = []
    for piece in inside.split(","):
        low, dash, high = piece.partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            raise _bad(f"SLURM_JOB_NODELIST: {part!r} is no list of hosts", f"what is {piece!r}?")
        if len(names) + int(high or low) - int(low) > MAX_HOSTS:
            raise _bad(f"SLURM_JOB_NODELIST: {part!r} is too long", f"at most {MAX_HOSTS} hosts")
        for number in range(int(low), int(high or low) + 1):
            for end in _expanded(after):
                names.append(f"{before}{number:0{len(low)}d}{end}")
    return names


def _kubernetes(environ: Mapping[str, str]) -> list[Found]:
    """An indexed Job's pod, or a StatefulSet's: ``NAME-INDEX``, and host 0 is ``NAME-0``."""
    if "KUBERNETES_SERVICE_HOST" not in environ:
        return []
    short, dot, domain = socket.getfqdn().partition(".")
    index = _number(environ.get("JOB_COMPLETION_INDEX", ""))
    name, _, last = short.rpartition("-")
    if index is None:
        index = _number(last)
    if index is None or not name:
        return []
    return [Found(host=index, address=f"{name}-0{dot}{domain}", key=name)]


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def _bad(what: str, why: str, fix: str = "") -> OperatorError:
    return operator_error(
        "E204", what, why=why, fix=fix or "give it, or see `Several hosts` in docs/parallelism.md"
    )
