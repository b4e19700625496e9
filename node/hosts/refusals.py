"""Why host 0 turns a host away that knows the rendezvous id."""

from __future__ import annotations

from node import __version__
from node.errors import operator_error
from node.hosts.wire import Hello
from protocols.errors import OperatorError


def unfit(hello: Hello, maximum: int, device: str) -> OperatorError | None:
    """E410 for what keeps a host from an island of ``maximum`` hosts that train on ``device``."""
    if hello.version != __version__:
        return operator_error(
            "E410",
            "the hosts of this island run different versions of Atoll",
            why=f"host 0 has {__version__}, host {hello.host} has {hello.version}",
        )
    if not 1 <= hello.host < maximum:
        return operator_error(
            "E410",
            f"host {hello.host} is not of this island",
            why=f"host 0 was started with --nnodes for {maximum} hosts",
        )
    if hello.device != device:
        return operator_error(
            "E410",
            "the hosts of this island train on different devices",
            why=f"host 0 on {device}, host {hello.host} on {hello.device}",
        )
    return None


def taken(hello: Hello, name: str) -> OperatorError | None:
    """E410 where another machine than ``name``, which is there, comes with its number.

    The same machine may come again: its processes have ended before their connection has.
    """
    if hello.name == name:
        return None
    return operator_error(
        "E410",
        f"this island has a host {hello.host} already",
        why=f"{name} has that number and is there, and {hello.name} comes with it",
        fix="give each host a --node-rank of its own",
    )
