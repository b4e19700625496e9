"""Files with which a node is run and watched elsewhere: ``node bootstrap template NAME``.

All keep the node's identity over restarts (its state directory lies on a disk that stays) and stop
it with one SIGTERM and time enough to leave. They lie in ``files/``; ``@WORDS@`` in them are filled
in here.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from node import __version__

# to leave: a last checkpoint of a small model, the end of the round, a farewell
STOP_S, OTHERWISE_S = 180, 60  # the latter without the checkpoint
FLOATS = 5  # numbers a parameter in a checkpoint: outer parameters, momentum, θ, two moments
DISK = 500e6  # bytes a second that a disk writes, where nobody says
STATE = "/var/lib/atoll"


@dataclass(frozen=True, slots=True)
class Template:
    """One file, and whether a node that is not told of peers trains there.

    ``hosts``: how many an island has there, where nothing else is asked for.
    """

    file: str
    trains: bool = False
    hosts: int = 1

    @property
    def of_hosts(self) -> bool:
        """Whether it is of an island of as many hosts as are asked for."""
        return "@NNODES@" in self.text()

    def text(self) -> str:
        """The file as it lies there, with its ``@WORDS@``."""
        return files("node.templates").joinpath("files", self.file).read_text(encoding="utf-8")


TEMPLATES: Mapping[str, Template] = {
    "systemd": Template("atoll.service"),  # for /etc/systemd/system
    "docker": Template("Dockerfile"),
    "compose": Template("compose.yaml"),  # beside the Dockerfile
    "kubernetes": Template("kubernetes.yaml"),  # a Service and a StatefulSet
    "kubernetes-hosts": Template("kubernetes-hosts.yaml", trains=True, hosts=2),
    "slurm": Template("slurm.sh", trains=True),
    "skypilot": Template("skypilot.yaml", trains=True),
    "prometheus": Template("alerts.yaml"),  # alert rules, and how to scrape a node
    "grafana": Template("grafana.json"),
}


def stop_s(checkpoint_s: float) -> int:
    """Seconds to give a node to leave in, whose checkpoints take so long.

    One may be under way, and the last one follows it.
    """
    return max(STOP_S, math.ceil(OTHERWISE_S + 2 * checkpoint_s))


def checkpoint_s(parameters: float, disk: float = DISK) -> float:
    """Seconds that a checkpoint of such a model takes at so many bytes a second."""
    return 4 * FLOATS * parameters / disk


def closed() -> str:
    """Lines of a unit's head where its own user cannot get to this Python or its packages.

    As below a home that others may not enter: systemd ends such a unit with 203/EXEC.
    """
    python = Path(os.path.abspath(sys.executable))
    for path in (python, python.resolve(), Path(__file__).resolve()):
        for folder in reversed(path.parents):
            if not open_to_others(folder):
                return (
                    f"# AS IT IS IT ENDS WITH 203/EXEC: no other user can enter {folder},\n"
                    "# below which Atoll is installed. Install it elsewhere, as in /opt/atoll, or\n"
                    "# write User= and the name of that folder's owner for DynamicUser=yes.\n"
                )
    return ""


def open_to_others(folder: Path) -> bool:
    """Whether users who have nothing to do with a folder may enter it."""
    return bool(folder.stat().st_mode & stat.S_IXOTH)


def render(
    name: str,
    *,
    peers: tuple[str, ...] = (),
    public_addr: str = "",
    minimum: int = 1,
    hosts: int = 1,
    stop: int = STOP_S,
) -> str:
    """The text of a template; raises KeyError for a name that is none.

    With ``peers`` the node trains with them, else it is a seed, or where that makes no sense
    (slurm, skypilot) makes a run. ``public_addr`` is HOST:PORT under which others reach it.
    ``hosts``: of the island, in those templates that know of several, and the ``minimum`` that it
    goes on with. ``stop``: seconds to leave.
    """
    template = TEMPLATES[name]
    hosts = max(hosts, template.hosts)
    words = ["start", "--resume"] if peers else ["bootstrap"]
    for peer in peers:
        words += ["--peers", peer]
    if template.trains and not peers:
        words = ["start"]
    if public_addr:
        words += ["--public-addr", public_addr]
    text = template.text()
    filled = {
        "VERSION": __version__,
        "PYTHON": sys.executable,
        "COMMAND": shlex.join(words),
        "COMMAND_LIST": json.dumps(words),
        "STATE": STATE,
        "MINIMUM": str(minimum),
        "NNODES": str(hosts),
        "NODES": "one machine" if hosts == 1 else f"{hosts} machines",
        "STOP_S": str(stop),
        "CLOSED": closed(),
    }
    for word, value in filled.items():
        text = text.replace(f"@{word}@", value)
    return text
