"""Groups against the plain butterfly, on the simulated network: links, bytes and seconds.

One exchange of one vector among many members, all of whose links are equal; whatever is counted
is what crosses the simulated wire, not what was planned. ::

    python -m benchmarks.groups --json benchmarks/results/groups.json
    python -m benchmarks.groups --members 16 --json -       # a look, in seconds

Keys of a row: ``links`` most that any member has; ``sent`` most that any member sends, in encoded
vectors; ``between_sites`` what crosses from site to site, in encoded vectors, where members stand
at sites; ``seconds`` virtual, until all hold all; ``exact`` whether everybody's bytes are equal and
the result is the weighted mean to within ``error`` (relative).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.output import write
from gossip.exchange.exchange import Exchange
from gossip.place import Place
from gossip.plans.certificate import genesis
from gossip.plans.grouping import Grouping, lay_out, traffic
from gossip.plans.partition import MIN_PART, MemberLink
from gossip.plans.validity import PartKey, Shape
from gossip.wiring import Wiring
from protocols.codecs import RangeCodec
from protocols.identity import Identity, PeerId
from protocols.memory import virtual_time
from protocols.memory.transport import Link, MemoryNetwork, MemoryTransport
from protocols.messages import Contributor, Gram, Part, PartResult, Plan, TransferHeader
from protocols.transport import Incoming

RUN = b"r" * 32
PLACE = Place(RUN, 0, 0, genesis(RUN), b"s" * 32, 0)
UPLOAD = 12.5e6  # bytes a second: 100 Mbit/s


@dataclass
class Member:
    """One member of one exchange; its contribution is ``scale`` times what all have."""

    identity: Identity
    transport: MemoryTransport
    common: torch.Tensor
    scale: float
    codec: RangeCodec
    shape: Shape
    spawn: Callable[..., Any]
    complaints: list[str] = field(default_factory=list)
    exchange: Exchange = field(init=False)

    def __post_init__(self) -> None:
        clock = asyncio.get_running_loop().time
        wiring = Wiring(
            self.transport, self.identity, RUN, self.codec, self.spawn, virtual_time.inline, clock
        )
        self.exchange = Exchange(wiring, PLACE, self.shape, self, self)
        slices, merged = self.exchange.slices, self.exchange.merged
        for name, takes in (("slice", slices), ("merged", merged), ("sum", slices)):
            self._answer_push(name, getattr(takes, f"on_{name}"))
            self._answer_call(name, getattr(takes, f"{name}_reached"))
        self._answer_call("bring", self.exchange.outbox.bring)
        self._answer_call("give", slices.give)

    def _answer_push(self, name: str, take: Callable[..., Any]) -> None:
        async def push(sender: PeerId, header: bytes, incoming: Incoming) -> bytes:
            answer: bytes = await take(sender, TransferHeader.decode(header), incoming)
            return answer

        self.transport.on_push(name, push, max_length=2**40)

    def _answer_call(self, name: str, answer: Callable[..., Any]) -> None:
        async def call(sender: PeerId, body: bytes) -> bytes:
            found: bytes = await answer(sender, TransferHeader.decode(body))
            return found

        self.transport.on_call(name, call)

    def delta(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        return torch.mul(self.common[start:stop], self.scale, out=out)

    def held(self, result: PartResult) -> None:
        """The exchange keeps it."""

    def fault(self, peer: PeerId, why: str) -> None:
        self.complaints.append(why)

    def declined(self, peer: PeerId, why: str) -> None:
        self.complaints.append(why)

    def lost(self, result: PartResult) -> None:
        self.complaints.append("lost")

    def refused(self, peer: PeerId, why: str) -> None:
        self.complaints.append(why)

    def unpassed(self, relay: PeerId) -> None:
        self.complaints.append("not passed on")

    def unserved(self, relay: PeerId) -> None:
        self.complaints.append("does nothing for its group")

    def mute(self) -> frozenset[PeerId]:
        """Nobody is."""
        return frozenset()

    def doubtful(self) -> frozenset[PeerId]:
        """Nobody is."""
        return frozenset()

    def behind(self, peer: PeerId) -> bool:
        """Everybody takes part."""
        return False

    def needed(self) -> set[PartKey]:
        """There is one plan alone."""
        return set()

    def dropped(self, key: PartKey) -> None:
        """Nothing is."""

    def weighed(self, gram: Gram) -> None:
        """Nothing is weighed here."""


def plan_of(
    roster: list[PeerId], size: int, codec: RangeCodec, grouping: Grouping, sites: int
) -> Plan:
    """What a leader plans where all links are equal."""
    per = -(-len(roster) // sites)
    regions = {peer: f"site-{number // per}" for number, peer in enumerate(roster)}
    layout = lay_out(size, [MemberLink(peer, UPLOAD, UPLOAD) for peer in roster], regions, grouping)
    parts = tuple(Part(*piece, None) for piece in layout.pieces)
    moved = traffic(parts, layout.groups, dict.fromkeys(roster, True))
    busiest = max(max(pair) for pair in moved.values())
    expected = busiest * codec.encoded_size(0, size) / size / UPLOAD
    names = tuple(roster)
    contributors = tuple(Contributor(peer, 100.0, 100, True) for peer in roster)
    return Plan(
        0, 0, 0, 0, roster[0], PLACE.previous, PLACE.state, codec.name, names, contributors,
        parts, names, expected, max(1.0, expected / 4), groups=layout.groups,
    )  # fmt: skip


async def exchange(
    count: int, size: int, codec_name: str, grouping: Grouping, sites: int
) -> dict[str, Any]:
    """One exchange among ``count`` members."""
    codec = RangeCodec(codec_name, dense=size)
    network = MemoryNetwork(1, link=Link(latency=0.02), upload=UPLOAD, download=UPLOAD)
    sent: defaultdict[tuple[PeerId, PeerId], int] = defaultdict(int)

    def tap(sender: PeerId, receiver: PeerId, name: str, data: bytes) -> bytes:
        sent[sender, receiver] += len(data)
        return data

    network.tamper = tap
    common = torch.randn(size, generator=torch.Generator().manual_seed(1))
    identities = [Identity.from_seed((n + 1).to_bytes(32, "big")) for n in range(count)]
    identities.sort(key=lambda identity: identity.peer_id)
    roster = [identity.peer_id for identity in identities]
    shape = Shape(size, (codec_name,), grouped=True)
    plan = plan_of(roster, size, codec, grouping, sites)
    clock = asyncio.get_running_loop().time
    async with asyncio.TaskGroup() as group:
        members = [
            Member(
                identity, network.join(identity.peer_id), common, 0.5 + number / (count - 1),
                codec, shape, group.create_task,
            )
            for number, identity in enumerate(identities)
        ]  # fmt: skip
        began = clock()
        for member in members:
            member.exchange.work(plan)
        while not all(len(member.exchange.parts) == len(plan.parts) for member in members):
            if clock() > began + 600:
                raise SystemExit(f"it does not end: {[m.complaints[:3] for m in members][:3]}")
            await asyncio.sleep(0.01)
        seconds = clock() - began
        await asyncio.sleep(1.0)  # a member that holds all may still be sending
        first = members[0].exchange.parts
        equal = all(
            torch.equal(member.exchange.parts[key][1], data)
            for member in members
            for key, (_, data) in first.items()
        )
        mean = torch.empty(size)
        for result, data in first.values():
            codec.decode(result.start, data, mean[result.start : result.stop])
        error = ((mean - common).norm() / common.norm()).item()
        counted = sum(len(result.included) for result, _ in first.values())
        for member in members:
            await member.exchange.stop()
    whole = codec.encoded_size(0, size)
    per = -(-count // sites)
    site = {peer: number // per for number, peer in enumerate(roster)}
    pairs = {frozenset(pair) for pair in sent}
    by_peer = {p: sum(n for (a, _), n in sent.items() if a == p) for p in roster}
    return {
        "members": count,
        "links": max(sum(peer in pair for pair in pairs) for peer in roster),
        "sent": round(max(by_peer.values()) / whole, 3),
        "between_sites": round(
            sum(n for (a, b), n in sent.items() if site[a] != site[b]) / whole, 3
        ),
        "seconds": round(seconds, 3),
        "expected_s": round(plan.expected_s, 3),
        "exact": equal and counted == count * len(plan.parts),
        "error": round(error, 8),
        "complaints": sum(len(member.complaints) for member in members),
    }


def main() -> None:
    """Parse arguments, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--members", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--only", choices=["butterfly", "sites", "grid"], action="append")
    parser.add_argument("--json", required=True, help="- for the terminal")
    options = parser.parse_args()
    rows = []
    for count in options.members:
        ways = {
            "butterfly": Grouping(),
            "sites": Grouping("region", most=512),
            "grid": Grouping("grid", most=4),
        }
        for name, grouping in ways.items():
            if options.only and name not in options.only:
                continue
            size, began = count * MIN_PART, time.perf_counter()
            row = virtual_time.run(
                exchange(count, size, options.codec, replace(grouping), options.sites)
            )
            took = round(time.perf_counter() - began, 1)
            rows.append({"way": name, "elements": size, **row, "simulated_in_s": took})
            sys.stderr.write(f"{rows[-1]}\n")
    write({"codec": options.codec, "sites": options.sites, "rows": rows}, options.json)


if __name__ == "__main__":
    main()
