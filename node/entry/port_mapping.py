"""Having the router forward a port to this node, which then can be dialled (``--map-port``).

The router is asked as UPnP has it (Internet gateway device, WANIPConnection), by the library
miniupnpc (extra ``upnp``). It forwards for an hour and is asked again while the node
lives; whatever ends the node, nothing stays open for longer, but on a router that knows no end of
it and lets go only when it is told. Where this machine gets another address, the port leads there,
and no more to the old one. Whether peers get in is found out as for every address, by having them
dial back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Protocol

from node.errors import operator_error, with_extra
from node.monitor.event_log import EventLog
from node.monitor.events import Notice, Problem
from protocols.addresses import host_of, hostport, ip_of

LEASE_S = 3600  # for which the router forwards
AGAIN_S = LEASE_S / 3  # so that it may fail to answer once
OTHERS = 16  # outer ports that are tried: some may be forwarded to others of the network
DISCOVER_S = 2.0  # for routers to answer
SILENT_S = 20.0  # for the router's whole answer; the library itself waits for seconds


class Router(Protocol):
    """A router that forwards ports. Each method blocks, and raises OSError where it fails."""

    outside: str  # its address towards the internet
    inside: str  # this machine's address in its network

    def forward(self, outer: int, inner: int, seconds: int, before: str) -> bool:
        """Forward ``outer`` to ``inner`` of this machine; False where it is another machine's.

        What leads to ``inner`` at ``before``, its last address if it has another now, is its own.
        """

    def forget(self, outer: int) -> None:
        """Forward it no more."""


class UpnpRouter:
    """The router that answers to UPnP in this network; raises OSError where none does."""

    def __init__(self) -> None:
        import miniupnpc

        self._upnp: Any = miniupnpc.UPnP()
        self._upnp.discoverdelay = int(1000 * DISCOVER_S)
        try:
            _asked(self._upnp.discover)
            _asked(self._upnp.selectigd)
        except OSError as error:  # whose text is "Success" where nobody has answered
            raise OSError("none answers to UPnP in this network") from error
        self.inside = str(self._upnp.lanaddr)
        self.outside = str(_asked(self._upnp.externalipaddress))

    def forward(self, outer: int, inner: int, seconds: int, before: str) -> bool:
        """See :class:`Router`."""
        leads_to = self._leads_to(outer)
        if leads_to == (before, inner) != (self.inside, inner):
            with contextlib.suppress(OSError):  # some let only the old address do so
                self.forget(outer)
            leads_to = self._leads_to(outer)
        if leads_to not in (None, (self.inside, inner)):
            return False
        try:
            self._add(outer, inner, seconds)
        except OSError:  # some routers know no end of it (error 725): until it is told, then
            self._add(outer, inner, 0)
        return True

    def forget(self, outer: int) -> None:
        """See :class:`Router`."""
        _asked(lambda: self._upnp.deleteportmapping(outer, "TCP"))

    def _leads_to(self, outer: int) -> tuple[str, int] | None:
        there = _asked(lambda: self._upnp.getspecificportmapping(outer, "TCP"))
        return None if there is None else (there[0], there[1])

    def _add(self, outer: int, inner: int, seconds: int) -> None:
        words = (outer, "TCP", self.inside, inner, "Atoll", "", seconds)
        _asked(lambda: self._upnp.addportmapping(*words))


def _asked(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception as error:  # the library raises no other class, whatever is the matter
        raise OSError(str(error)) from error


class PortMapping:
    """The port that is forwarded to one node. ``outer``: where; empty where nothing is."""

    def __init__(self, events: EventLog, find: Callable[[], Router] = UpnpRouter) -> None:
        self.outer = ""
        self._events = events
        self._find = find
        self._router: Router | None = None
        self._ports = (0, 0)  # outer and inner
        self._forwarded: tuple[Router, int] | None = None  # newest outer port; a thread's
        self._given_up = False  # it took too long, as was told, or is closed

    async def open(self, port: int) -> None:
        """Have a router forward to ``port``, by the same number if it may be.

        That there is none is an event. Raises OperatorError E605 without the library.
        """
        try:
            async with asyncio.timeout(SILENT_S):
                router, self._ports = await asyncio.to_thread(self._open, port)
        except ImportError as error:
            raise operator_error(
                "E605",
                "--map-port: needs miniupnpc",
                why="it is not installed",
                fix=f"{with_extra('upnp')}; or forward the port on the router by hand",
            ) from error
        except OSError as error:  # TimeoutError among them, and then the thread goes on
            self._given_up = True
            self._say(f"no router forwards a port to this node: {str(error) or 'it is silent'}")
            return
        self._router, self.outer = router, hostport(router.outside, self._ports[0])
        said = f"the router forwards {self.outer} to this node"
        if not _is_outside(self.outer):
            said += "; but that is no address of the internet: it is behind a translator itself"
        self._say(said)

    def _open(self, port: int) -> tuple[Router, tuple[int, int]]:
        router, last = self._find(), self._router
        # another router's entry for that address is of a machine there
        before = last.inside if last is not None and last.outside == router.outside else ""
        ports = [self._ports[0]] if self._ports[0] else []
        for outer in [*ports, *range(port, min(port + OTHERS, 65536))]:
            if router.forward(outer, port, LEASE_S, before):
                self._forwarded = router, outer
                if self._given_up:  # nobody would renew it, and what was told is that there is none
                    self._let_go()
                return router, (outer, port)
        raise OSError(f"ports {port} to {port + OTHERS - 1} are forwarded to others")

    async def keep(self) -> None:
        """Ask for it again as long as the node lives; that it is refused is an event, once.

        The router may be another one by then, have another address outside, or have given the port
        to another machine.
        """
        failing = False
        while self._router is not None:
            await asyncio.sleep(AGAIN_S)
            reason = await self.renew()
            if reason and not failing:
                self._events.emit(
                    Problem.of(
                        operator_error(
                            "E302",
                            f"the router does not go on to forward {self.outer}",
                            why=reason,
                            fix="it is asked again; peers that have a connection keep it",
                        )
                    )
                )
            failing = bool(reason)

    async def renew(self) -> str:
        """Ask for it again now, as where this machine has another address; why it is refused."""
        if self._router is None:
            return ""
        try:
            async with asyncio.timeout(SILENT_S):
                router, ports = await asyncio.to_thread(self._open, self._ports[1])
        except OSError as error:  # TimeoutError among them
            return str(error) or "it is silent"
        return self._renewed(router, ports)

    def _renewed(self, router: Router, ports: tuple[int, int]) -> str:
        """Take what is forwarded now; why it is of no use, if it is not as it was."""
        if self._router is None:  # closed meanwhile
            return ""
        outer = hostport(router.outside, ports[0])
        if _is_outside(self.outer) and not _is_outside(outer):
            return "it has no address of the internet at the moment"
        if outer != self.outer:
            self._say(f"the router forwards {outer} to this node now")
        self._router, self._ports, self.outer = router, ports, outer
        return ""

    async def aclose(self) -> None:
        """Have the router forward no more. Nothing is raised: it does so in an hour."""
        self._given_up, self._router = True, None  # a thread that still asks lets go by itself
        if self._forwarded is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SILENT_S):
                    await asyncio.to_thread(self._let_go)

    def _let_go(self) -> None:
        forwarded, self._forwarded = self._forwarded, None
        if forwarded is not None:
            router, outer = forwarded
            with contextlib.suppress(OSError):
                router.forget(outer)

    def _say(self, text: str) -> None:
        self._events.emit(Notice(text=text))


def _is_outside(address: str) -> bool:
    """Whether it is an address of the internet, and not of a provider's translator (RFC 6598)."""
    try:
        return ip_of(host_of(address)).is_global
    except ValueError:
        return False
