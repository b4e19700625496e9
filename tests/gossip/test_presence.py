"""What a node says of itself, and how often: on the virtual clock."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
from exchange_kit import until
from simulated_swarm import simulated_swarm
from toy_replica import RUN

from gossip.membership import members
from gossip.membership.crowd import AT_ONCE
from gossip.membership.members import Patience
from gossip.membership.opening import open_announce
from gossip.membership.presence import Presence
from node.assembly import until_doubled
from protocols.bounds import MAX_FRAGMENTS
from protocols.envelope import seal
from protocols.errors import Malformed, OperatorError, RemoteRefused
from protocols.identity import Identity, PeerId
from protocols.memory import virtual_time
from protocols.memory.transport import Link
from protocols.messages import MAX_ANNOUNCE_BYTES, Announce, Envelope, Known
from protocols.wire import MAX_INT, Max, Struct


def test_who_is_slow_to_listen_hears_the_newest_and_not_all_before_it() -> None:
    async def main() -> None:
        async with simulated_swarm(2, link=Link(latency=0.5), think=(90.0, 90.0)) as swarm:
            speaker, listener = swarm.members.values()
            await asyncio.sleep(3.0)
            answered = listener.swarm.wiring.transport.stats.requests_by_name
            before = answered["announce"]
            for steps in range(100):
                speaker.swarm.chains[0].update(steps=steps)
            heard = listener.swarm.membership
            await until(lambda: heard.islands[speaker.peer].announce.steps == 99, 3.0)
            await asyncio.sleep(1.0)
            # one that was on its way, those that may be at once, the newest, and heartbeats
            assert answered["announce"] - before <= 2 * AT_ONCE + 4

    virtual_time.run(main())


def test_who_went_silent_is_told_nothing_more_until_it_is_there_again() -> None:
    """It takes nothing, and there is always something newer to say."""

    async def main() -> None:
        patience = Patience(forget_s=120.0)
        async with simulated_swarm(2, think=(90.0, 90.0), patience=patience) as swarm:
            speaker, listener = swarm.members.values()
            await asyncio.sleep(3.0)
            presence, said = speaker.swarm.presence, list[PeerId]()
            say = presence.say

            async def counted(peer: PeerId, name: str, body: bytes) -> bytes:
                said.append(peer)
                return await say(peer, name, body)

            presence.say = counted  # type: ignore[method-assign]
            swarm.network.freeze(listener.peer)
            await asyncio.sleep(60.0)
            said.clear()
            await asyncio.sleep(120.0)  # it is forgotten meanwhile
            assert not said
            assert not presence._telling
            swarm.network.thaw(listener.peer)
            presence.learn(listener.swarm.presence.envelope())
            await asyncio.sleep(3.0)
            assert listener.peer in said

    virtual_time.run(main())


def test_what_is_known_already_is_not_verified_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with simulated_swarm(8, think=(90.0, 90.0)) as swarm:
            await asyncio.sleep(5.5)
            one, other, *_ = swarm.members.values()
            presence, learnt = one.swarm.presence, []

            def learn(envelope: bytes, sender: PeerId | None = None) -> Announce:
                if sender is None:  # from what somebody knows
                    learnt.append(envelope)
                return Presence.learn(presence, envelope, sender)

            monkeypatch.setattr(presence, "learn", learn)
            await presence.ask(other.peer)
            assert 1 <= len(learnt) <= 3  # of eight: it says of itself what is new

    virtual_time.run(main())


@pytest.mark.parametrize(("later", "double"), [(1, True), (0, False), (-1, False)])
def test_who_hears_its_own_key_from_a_later_start_tells(later: int, double: bool) -> None:
    """Once it has heard two things that are new: one may be an echo of a life before."""

    async def main() -> None:
        async with simulated_swarm(2, think=(90.0, 90.0)) as swarm:
            one, _ = swarm.members.values()
            presence, told = one.swarm.presence, list[bool]()
            presence.on_double = lambda: told.append(True)
            status = replace(presence.status, incarnation=presence.status.incarnation + later)

            def says(sequence: int) -> bytes:
                return seal(
                    one.identity, status, purpose="announce", run=RUN,
                    expires=presence.wall() + 60.0, sequence=sequence,
                )  # fmt: skip

            for envelope in (says(7), says(7), says(6)):
                presence.learn(envelope)
            assert not told
            presence.learn(says(8))
            assert bool(told) is double
            ends = asyncio.ensure_future(until_doubled(presence))  # as a node waits for it
            await asyncio.sleep(0)
            presence.learn(says(9))
            await asyncio.wait([ends], timeout=1.0)
            if double:
                with pytest.raises(OperatorError, match="another node has started as") as caught:
                    ends.result()
                assert caught.value.code == "E108"
            else:
                assert ends.cancel()

    virtual_time.run(main())


def test_a_status_that_changes_is_told_once_and_not_with_every_announcement() -> None:
    async def main() -> None:
        async with simulated_swarm(2, think=(90.0, 90.0)) as swarm:
            one, other = swarm.members.values()
            await asyncio.sleep(3.0)
            told: list[tuple[PeerId, str, str]] = []
            other.swarm.presence.on_change = lambda *change: told.append(change)
            for status in ("joining", "active", "leaving"):
                one.swarm.chains[0].update(status=status)
                await asyncio.sleep(3.0)
            assert told == [
                (one.peer, "joining", "active"),
                (one.peer, "active", "joining"),
                (one.peer, "left", "alive"),  # its liveness says it
            ]

    virtual_time.run(main())


def test_nothing_is_kept_of_those_who_come_only_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "MAX_PEERS", 8)

    async def main() -> None:
        patience = Patience(forget_s=20.0)
        async with simulated_swarm(1, think=(90.0, 90.0), patience=patience) as swarm:
            [one] = swarm.members.values()
            presence = one.swarm.presence
            for number in range(40):
                stranger = Identity.from_seed((number + 100).to_bytes(32, "big"))
                status = replace(presence.status, peer=stranger.peer_id, status="leaving")
                presence.learn(
                    seal(
                        stranger, status, purpose="announce", run=RUN,
                        expires=presence.wall() + 60.0, sequence=1,
                    )
                )  # fmt: skip
                assert presence._seen.keys() == presence.membership.islands.keys()
                presence.unreachable(stranger.peer_id)
                presence.unreachable(PeerId(f"nobody-{number}"))
            assert len(presence._seen) == 8
            await asyncio.sleep(patience.forget_s + 2.0)
            assert not presence._seen

    virtual_time.run(main())


def fullest(hint: Any, size: int = 0) -> Any:
    """The longest value that a field of a message may have."""
    if get_origin(hint) is Annotated:
        inner, *marks = get_args(hint)
        return fullest(inner, next((m.size for m in marks if isinstance(m, Max)), size))
    if get_origin(hint) is tuple:
        return tuple(fullest(get_args(hint)[0]) for _ in range(size))
    if hint in (bool, int, float):
        return {bool: True, int: MAX_INT, float: 0.1}[hint]
    if hint is bytes:
        return bytes(size)
    if isinstance(hint, type) and issubclass(hint, Struct):
        hints = get_type_hints(hint, include_extras=True)
        return hint(*[fullest(hints[name]) for name in hint.codecs()])
    return "x" * size  # a text, or what is one by another name


def test_no_announcement_is_too_long_to_be_passed_on() -> None:
    envelope = replace(
        fullest(Envelope), purpose="announce", recipient="", body=fullest(Announce).encode()
    )
    size = len(envelope.encode())
    assert 4096 < size <= MAX_ANNOUNCE_BYTES
    assert Known((envelope.encode(),)).encode()


def test_the_longest_announcement_of_another_is_told_to_who_asks() -> None:
    """It was kept and could not be passed on: every greeting failed from then on."""

    async def main() -> None:
        async with simulated_swarm(2, size=5_000, fragments=MAX_FRAGMENTS) as swarm:
            one, other = swarm.members.values()
            presence, stranger = one.swarm.presence, Identity.from_seed(bytes([99]) * 32)
            announce = replace(
                fullest(Announce), peer=stranger.peer_id, role="observer", status="active",
                addresses=tuple(f"{'h' * 122}:6553{port}" for port in range(8)),
            )  # fmt: skip
            longest = seal(
                stranger, announce, purpose="announce", run=RUN,
                expires=presence.wall() + 60.0, sequence=MAX_INT,
            )  # fmt: skip
            assert len(longest) > 4096
            transport = other.swarm.wiring.transport
            await transport.call(one.peer, "announce", longest, timeout=5.0)
            assert longest in Known.decode(presence.known().encode()).announces
            too_long = bytes(MAX_ANNOUNCE_BYTES + 1)
            with pytest.raises(RemoteRefused) as refused:
                await transport.call(one.peer, "announce", too_long, timeout=5.0)
            assert refused.value.code == "too_large"
            with pytest.raises(Malformed, match="exceeds"):
                open_announce(longest + bytes(1024), RUN, presence.wall())

    virtual_time.run(main())
