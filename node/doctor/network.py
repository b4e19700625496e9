"""Between this machine and its peers: can they be reached, would they take it, can they dial back?

It asks under an identity made for the occasion and takes part in nothing, so that peers remember
nothing of it and count nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from bootstrap.dial_back import Reach, asked_back, outside, reach
from bootstrap.handshake import Clocks, Greeting, greet
from bootstrap.manifest import Manifest
from bootstrap.probe import probe
from bootstrap.seeds import PeerCache, Unreached, dial_all, explain
from bootstrap.state import fetch_manifest
from gossip.membership.opening import open_announce
from node import __version__
from node.config import NodeConfig
from node.doctor import nat
from node.doctor.finding import Finding, fail, failed, ok, warn
from node.entry.own_address import addresses, outward_address
from node.headway import counted
from node.setting_values import host_port
from node.statedir import StateDir
from protocols.addresses import PeerAddress, host_of, hostport, ip_of, is_loopback, parse_peers
from protocols.connections.listening import EVERY_IPV4
from protocols.errors import OperatorError, RemoteProtocolError, RemoteRefused, TransportError
from protocols.http.transport import HttpTransport
from protocols.identity import Identity, PeerId
from protocols.whereabouts import Whereabouts

MAX_ASKED = 3  # peers that dial back and measure
MAPPED = 2  # peers that are asked as what they see one port; a further one tries to get in there
SLOW = 1e6 / 8  # bytes a second


async def network(
    config: NodeConfig, learned: Callable[[Manifest], None] | None = None
) -> list[Finding]:
    """All checks that need a peer; one finding that says so where none is known.

    ``learned`` is told the manifest of the run that the peers take part in.
    """
    seeds = parse_peers(config.peers) or PeerCache(config.dir / "peers.json").load()
    if not seeds:
        return [
            warn(
                "peers",
                "none given, and none met before",
                "without one nothing can be said about the network",
                "give one with --peers HOST:PORT/ID",
            )
        ]
    findings: list[Finding] = []
    async with AsyncExitStack() as stack:
        running = StateDir(config.dir).holder()
        transport, listens = await _open(config, stack, running)
        whereabouts = Whereabouts(transport, transport.identity, transport.book)
        whereabouts.publish(addresses(config, transport.listening))
        dialled = await dial_all(transport, seeds)
        findings += [_missed(one, bool(dialled.reached)) for one in dialled.missed]
        greetings: list[tuple[PeerAddress, Greeting]] = []
        for reached in dialled.reached:
            where = reached.address.hostport
            findings.append(ok("peer", f"{where} answers in {reached.seconds * 1000:.0f} ms"))
            try:
                greeting = await _greet(config, transport, whereabouts, reached.peer)
            except OperatorError as error:
                findings.append(failed("greeting", error))
            except TransportError as error:
                findings.append(failed("greeting", explain(where, error)))
            else:
                greetings.append((reached.address, greeting))
        if greetings:
            known = [greeting for _, greeting in greetings]
            findings += [_runs(known), _clock(known)]
            if learned is not None and (manifest := await _manifest(transport, known)):
                learned(manifest)
            await _tell_where(config, transport, whereabouts, known[:MAX_ASKED])
            findings += await _reach(transport, config, greetings, listens, running)
            findings += [await _speed(transport, at, one) for at, one in greetings[:MAX_ASKED]]
    return findings


async def _open(
    config: NodeConfig, stack: AsyncExitStack, running: int | None
) -> tuple[HttpTransport, bool]:
    """A transport on the node's own port; on none where that is not to be had."""
    identity = Identity.generate()
    for listen in (None,) if running else (config.listen, None):
        transport = HttpTransport(identity, listen=listen)
        try:
            await stack.enter_async_context(transport)
        except OperatorError:
            continue  # the check of the ports tells why
        return transport, listen is not None
    raise AssertionError("a transport that does not listen always starts")


async def _greet(
    config: NodeConfig, transport: HttpTransport, whereabouts: Whereabouts, peer: PeerId
) -> Greeting:
    return await greet(
        transport, whereabouts, peer, software=__version__, invitation=config.invitation
    )


async def _tell_where(
    config: NodeConfig,
    transport: HttpTransport,
    whereabouts: Whereabouts,
    greetings: Sequence[Greeting],
) -> None:
    """As a node does, tell those who dial back by which address of its own it gets to them."""
    listening, seen = transport.listening, [transport.own_end(one.peer) for one in greetings]
    where = addresses(config, listening, seen)
    if where == addresses(config, listening):
        return
    whereabouts.publish(where)
    for one in greetings:
        with contextlib.suppress(OperatorError, TransportError):  # gone: others are asked
            await _greet(config, transport, whereabouts, one.peer)


def _missed(missed: Unreached, others: bool) -> Finding:
    error = explain(missed.address.hostport, missed.error)
    if others:
        return warn("peer", f"{error.code}: {error.what}", error.why, error.fix)
    return failed("peer", error)


def _runs(greetings: Sequence[Greeting]) -> Finding:
    runs = {one.welcome.run.hex()[:8] for one in greetings if one.welcome.run}
    versions = ", ".join(sorted({one.welcome.software[:16] for one in greetings}))
    if len(runs) > 1:
        return fail(
            "run",
            f"the peers train different runs: {', '.join(sorted(runs))}",
            "E201: a node takes part in one",
            "give only peers of the run you want with --peers",
        )
    known = counted(len(_islands(greetings)), "island")
    text = f"run {runs.pop()}, {known} announced" if runs else "no run there yet"
    return ok("run", f"{text}; this is {__version__}, they have {versions}")


def _islands(greetings: Sequence[Greeting]) -> set[PeerId]:
    """Those that they have announcements of; seeds and servers train nothing."""
    found = set()
    for welcome in (one.welcome for one in greetings):
        for envelope in welcome.announces:
            with contextlib.suppress(RemoteProtocolError):  # told of once a node takes part
                said = open_announce(envelope, welcome.run, welcome.time).message
                if said.role == "island":
                    found.add(said.peer)
    return found


async def _manifest(transport: HttpTransport, greetings: Sequence[Greeting]) -> Manifest | None:
    """Of the one run they all train; None where they have none or several, or do not tell it."""
    having = [one for one in greetings if one.welcome.run]
    if len({one.welcome.run for one in having}) != 1:
        return None
    try:
        peers = [one.peer for one in having]
        return (await fetch_manifest(transport, peers, having[0].welcome.run)).manifest
    except (TransportError, RemoteProtocolError):
        return None


def _clock(greetings: Sequence[Greeting]) -> Finding:
    clocks = Clocks()
    for one in greetings:
        clocks.add(one.peer, one.offset, one.round_trip)
    try:
        clocks.check()
    except OperatorError as error:
        return failed("clock", error)
    return ok("clock", f"{clocks.offset:+.2f} s against the median of {len(greetings)} peers")


async def _ip(host: str, observed: str) -> str:
    """The IP address behind a name, of the kind by which a peer sees this machine, if it has one.

    On the way to another one this machine may have another address of its own.
    """
    try:
        ipv6 = ip_of(host_of(observed)).version == 6
        family = socket.AF_INET6 if ipv6 else socket.AF_INET
        found = await asyncio.get_running_loop().getaddrinfo(host, None, family=family)
    except (OSError, ValueError):  # also where the peer has said nonsense
        return host
    return str(found[0][4][0])


async def _reach(
    transport: HttpTransport,
    config: NodeConfig,
    greetings: Sequence[tuple[PeerAddress, Greeting]],
    listens: bool,
    running: int | None,
) -> list[Finding]:
    """Whether peers can open connections to this machine, and what stands in between."""
    translation = nat.describe(
        [
            (one.welcome.observed, outward_address(await _ip(at.host, one.welcome.observed)))
            for at, one in greetings
            if one.welcome.observed
        ]
    )
    findings = await _between(config, greetings) if translation.translated else []
    asked = [one.peer for _, one in greetings[:MAX_ASKED]]
    back = await reach(transport, asked) if listens else None
    if back is Reach.YES and translation.translated and transport.listening is not None:
        outer = config.public_addr or hostport(translation.outer, transport.listening[1])
        findings.append(await nat.hairpin(outer))
    tail = [ok("nat", translation.text), *findings]
    if back is None:
        who = f"process {running} has the port" if running else "the port cannot be opened"
        text = f"not tested: {who}; `node status` shows what peers say"
        return [ok("reach", text), *tail]
    if back is Reach.YES:
        return [ok("reach", "a peer dialled back: direct"), *tail]
    if back is Reach.UNKNOWN or (back is Reach.ELSEWHERE and config.public_addr):
        return [ok("reach", f"not tested: {back}"), *tail]
    if translation.translated and (where := await _passed(transport, config, greetings)):
        text = f"direct at {where}, as peers see it, which the node finds out by itself"
        return [ok("reach", f"a peer dialled back: {text}"), *tail]
    fix = "open the port in the firewall of this machine or network"
    if translation.translated:
        fix = "forward the port and give its public address with --public-addr HOST:PORT"
        tail[0] = warn("nat", translation.text, "connections from outside end there", fix)
    return [await _advice(transport, config, greetings, str(back), fix), *tail]


async def _between(
    config: NodeConfig, greetings: Sequence[tuple[PeerAddress, Greeting]]
) -> list[Finding]:
    """What a translator of addresses does with a port, and with calls to it."""
    mapped = await nat.mapping([at.hostport for at, _ in greetings[:MAPPED]])
    findings = [nat.mapping_finding(mapped)]
    if len(greetings) > MAPPED and len(set(mapped.seen)) == 1:
        findings.append(await _filtering(config, mapped, greetings[MAPPED][0]))
    return findings


async def _advice(
    transport: HttpTransport,
    config: NodeConfig,
    greetings: Sequence[tuple[PeerAddress, Greeting]],
    why: str,
    fix: str,
) -> Finding:
    """What a node would do that nobody can dial, and what makes it one that peers can dial."""
    if inside := _bound_inside(transport, greetings):
        fix = f"listen where peers get to, with --listen {EVERY_IPV4}:{host_port(config.listen)[1]}"
        why = f"it listens at {inside}, where this machine alone gets to"
    return await _outbound(transport, config, greetings, why, fix)


def _bound_inside(
    transport: HttpTransport, greetings: Sequence[tuple[PeerAddress, Greeting]]
) -> str:
    """The loopback address that it listens at while peers are elsewhere; else empty."""
    host = transport.listening[0] if transport.listening else ""
    seen = [host_of(one.welcome.observed) for _, one in greetings if one.welcome.observed]
    return host if is_loopback(host) and not all(map(is_loopback, seen)) else ""


async def _filtering(config: NodeConfig, mapped: nat.Mapping, stranger: PeerAddress) -> Finding:
    """Have somebody call a port that was opened by calls to others."""
    where = mapped.seen[0]
    listen = hostport(host_port(config.listen)[0], mapped.local_port)
    try:
        async with HttpTransport(Identity.generate(), listen=listen) as transport:
            back = await _dialled_at(transport, config, stranger, where)
    except (OperatorError, TransportError) as error:
        return ok("filtering", f"cannot be told: {str(error).splitlines()[0]}")
    if back is Reach.ELSEWHERE:
        return ok("filtering", f"cannot be told: {back}")
    return nat.filtering_finding(where, back is Reach.YES)


async def _passed(
    transport: HttpTransport,
    config: NodeConfig,
    greetings: Sequence[tuple[PeerAddress, Greeting]],
) -> str:
    """``HOST:PORT`` where a translator lets peers in; empty where none does."""
    if config.public_addr or transport.listening is None:
        return ""
    seen = {one.peer: one.welcome.observed for _, one in greetings[:MAX_ASKED]}
    return await outside(transport, seen, transport.listening[1])


async def _dialled_at(
    transport: HttpTransport, config: NodeConfig, peer: PeerAddress, where: str
) -> Reach:
    """Whether ``peer`` can call this transport at ``where``.

    Raises what :func:`greet` and dialling raise.
    """
    whereabouts = Whereabouts(transport, transport.identity, transport.book)
    whereabouts.publish([where])
    known = await transport.dial(peer.hostport, peer.peer)
    await greet(transport, whereabouts, known, software=__version__, invitation=config.invitation)
    return await asked_back(transport, known)


async def _outbound(
    transport: HttpTransport,
    config: NodeConfig,
    greetings: Sequence[tuple[PeerAddress, Greeting]],
    why: str,
    fix: str,
) -> Finding:
    """What a node would do that nobody can dial: use a relay, if there is one and it may."""
    told = "E302: no peer can dial this node"
    if config.require_reachable or config.public_addr:
        given = "--public-addr" if config.public_addr else "--require-reachable"
        return fail("reach", f"{told}, and with {given} that is the end", why, fix)
    for at, one in greetings[:MAX_ASKED]:
        try:
            rate = await transport.relays.reserve(one.peer)
        except TransportError:
            continue
        carries = f"which carries {8 * rate / 1e6:,.0f} Mbit/s" if rate else "which only tells"
        return warn(
            "reach",
            f"outbound only: will use relay {at.hostport}, {carries}",
            f"{told}: {why}",
            f"nothing has to be done; for a shorter way {fix}",
        )
    return fail("reach", f"{told}, and none of them would relay", why, fix)


async def _speed(transport: HttpTransport, at: PeerAddress, one: Greeting) -> Finding:
    try:
        speeds = await probe(transport, one.peer)
    except RemoteRefused as error:
        return ok("speed", f"{at.hostport} does not measure now: {error.detail[:80]}")
    except TransportError as error:
        why = "rounds move megabytes"
        return warn("speed", f"{at.hostport}: {error}", why, "look for what limits long transfers")
    up, down = (8 * value / 1e6 for value in (speeds.upload, speeds.download))
    trip = one.round_trip * 1000
    text = f"{at.hostport}: {up:,.1f} Mbit/s up, {down:,.1f} down, {trip:.1f} ms"
    if min(speeds.upload, speeds.download) < SLOW:
        why = "rounds of all but the smallest models would take minutes"
        return warn("speed", text, why, "use another link, or another peer")
    return ok("speed", text)


def check(config: NodeConfig) -> tuple[list[Finding], Manifest | None]:
    """As :func:`network`, with the manifest of the peers' run where they have one and tell it."""
    runs: list[Manifest] = []
    findings = asyncio.run(network(config, runs.append))
    return findings, runs[0] if runs else None
