"""Atoll: real members without a trainer (:mod:`node.bench`)."""

from __future__ import annotations

import asyncio
import math

from benchmarks.worker import SIZE, options, say, wait_for_turn
from node.bench.member import Member, Taken
from node.bench.settings import Settings
from node.bench.watching import Stage
from node.collector import spare_what_stays
from protocols.connections import same_machine


def stay_with_tcp() -> None:
    """Do without Unix sockets between processes of one machine: nobody is found there."""
    same_machine.listener = lambda port, peer: None


async def main() -> None:
    """Take a round each turn, until killed."""
    given = options()
    if given.get("tcp", False):
        stay_with_tcp()
    first = [given["rendezvous"]] if given["rendezvous"] else []
    settings = Settings(
        members=given["count"],
        size=given.get("size", SIZE),
        codec=given.get("codec", "int4"),
        rounds=2**31,
        tls=given.get("tls", True),
        listen=f"{given['address']}:0",
        peers=tuple(first),
        seed=given["rank"],
        max_upload=given.get("max_upload", 0.0),
        patience_s=math.inf,  # the fleet has a bound, and other fleets may meet first
    )

    async def turn(round_: int) -> None:
        if round_ == 0:
            say("met")
        await asyncio.to_thread(wait_for_turn)

    def took(taken: Taken) -> None:
        at = taken.moments
        say(
            "took",
            round=taken.round,
            asked=at[Stage.READY],
            start=at.get(Stage.PLANNED, at[Stage.COMMITTED]),
            first_byte=at.get(Stage.SENDING),
            end=at[Stage.APPLIED],
            moments={stage.value: moment for stage, moment in at.items()},
            whole=taken.merged == 1,
            sent=taken.sent,
            received=taken.received,
            cpu=taken.cpu_s,
            peak=taken.peak_bytes,
            digest=taken.digest,
        )

    member = Member(
        settings,
        opened=lambda peer, address: say("opened", rendezvous=address),
        passed=lambda stage, round_: say("stage", stage=stage.value, round=round_),
        took=took,
        said=lambda text: say("said", text=text),
        turn=turn,
    )
    spare_what_stays()  # as `node start` does
    await member.run()


if __name__ == "__main__":
    asyncio.run(main())
