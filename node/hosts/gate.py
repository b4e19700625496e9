"""Whom host 0 lets in as a host of its island, and why it turns others away."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from node import __version__
from node.errors import operator_error
from node.hosts.meeting import Meeting
from node.hosts.remote import Host
from node.hosts.wire import (
    FAREWELL_S,
    GREETING_S,
    Challenge,
    Hello,
    HostConnection,
    HostLostError,
    Welcome,
    farewell,
    nonce,
    proof,
    proven,
    signed,
)
from protocols.addresses import ip_of
from protocols.errors import OperatorError

MAX_STRANGERS = 64  # connections at a time that have not shown who they are
GONE_BEATS = 2  # silent beats after which another machine may take a host's number


@dataclass(frozen=True)
class Refusal:
    """A host that was turned away, by the number that it gave itself."""

    number: int
    error: OperatorError
    unfit: bool = False  # it knows the rendezvous id, and lacks what the island needs
    doubted: HostConnection | None = None  # of a host that may be gone, and stands in its way


class Gate:
    """Greets those who connect, among the ``hosts`` that are there, by number."""

    def __init__(self, meeting: Meeting, device: str, hosts: Mapping[int, Host]) -> None:
        self._meeting, self._device, self._hosts = meeting, device, hosts
        self._strangers = 0

    async def greet(self, connection: HostConnection) -> Host | Refusal | None:
        """Let a host in that knows the rendezvous id; None: it said nothing of use.

        The caller has it among the hosts before it awaits anything: its number is free until then.
        """
        if self._strangers >= MAX_STRANGERS:
            return None
        challenge = nonce()
        connection.send(Challenge(challenge))
        self._strangers += 1
        try:
            async with asyncio.timeout(GREETING_S):
                hello = await connection.receive()
        except (TimeoutError, HostLostError):
            return None
        finally:
            self._strangers -= 1
        if not isinstance(hello, Hello):
            return None
        whole = signed(challenge, hello.nonce, hello.host)
        refusal = self._refusal(hello, whole, connection.own_address)
        if refusal is not None and refusal.doubted is not None:
            await refusal.doubted.falls_silent(GONE_BEATS)
            refusal = self._refusal(hello, whole, connection.own_address)
        if refusal is None:
            connection.admit()
            connection.send(Welcome(proof(self._meeting.key, b"welcome", *whole)))
            return Host(hello.host, hello.name, hello.ranks, connection, hello.process)
        connection.send(farewell(refusal.error))
        await connection.flush(FAREWELL_S)
        return refusal

    def _refusal(self, hello: Hello, whole: tuple[bytes, ...], came_to: str) -> Refusal | None:
        if not proven(self._meeting.key, hello.proof, b"hello", *whole):
            return Refusal(hello.host, _stranger())
        if error := _unfit(hello, self._meeting.maximum, self._device) or _unmet(came_to):
            return Refusal(hello.host, error, unfit=True)
        there = self._hosts.get(hello.host)
        if there is None or there.connection.silent >= GONE_BEATS:
            return None
        if (error := _taken(hello, there)) is None:
            return None
        alike = hello.name == there.name  # perhaps restarted: its end has yet to be noticed then
        return Refusal(hello.host, error, doubted=there.connection if alike else None)


def _stranger() -> OperatorError:
    return operator_error(
        "E410",
        "the rendezvous id differs from host 0's",
        why="who does not know it is a stranger",
        fix="give all hosts the same --rdzv-id",
    )


def _unfit(hello: Hello, maximum: int, device: str) -> OperatorError | None:
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


def _unmet(came_to: str) -> OperatorError | None:
    """E410 where a host came to an address that means nothing to the others."""
    ip = ip_of(came_to)
    if ip.version == 4 or not ip.is_link_local:
        return None
    return operator_error(
        "E410",
        "host 0 was reached by a link-local address",
        why=f"{ip} is another machine's at each interface: ranks cannot be told to meet there",
        fix="give all hosts another address of host 0 with --rdzv-endpoint",
    )


def _taken(hello: Hello, there: Host) -> OperatorError | None:
    """E410 where another process than that of a host which is there comes with its number.

    The same one may come again: its connection may have broken on one side alone.
    """
    if hello.name == there.name:
        if hello.process == there.process:
            return None
        why = f"two processes come with that number, and the machines of both are {there.name}"
    else:
        why = f"{there.name} has that number and is there, and {hello.name} comes with it"
    return operator_error(
        "E410",
        f"this island has a host {hello.host} already",
        why=why,
        fix="give each host a --node-rank of its own",
    )
