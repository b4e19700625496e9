"""Swarms whose codec follows their links, on the simulated network."""

from __future__ import annotations

import pytest
from exchange_kit import until
from simulated_swarm import simulated_swarm

from protocols.memory import virtual_time
from protocols.memory.transport import Link

pytestmark = pytest.mark.usefixtures("remembered_signatures")


def test_links_that_became_fast_get_the_finer_codec_though_nobody_has_measured_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that is sent may be too short to show it, but not how long the exchange takes."""
    slow, fast = 2e4, 4e6  # bytes a second: int2 takes 0.7 s of rounds of 4 s
    monkeypatch.setattr("protocols.stats.Meter.read", lambda self: slow)

    async def main() -> None:
        async with simulated_swarm(
            3,
            size=40_000,
            codec=("bf16", "int4", "int2"),
            think=(4.0, 4.1),
            link=Link(latency=0.002),
            uploads=[slow] * 3,
        ) as swarm:
            one = next(iter(swarm.members.values()))

            async def rounds(count: int) -> list[str]:
                done = one.replica.certificates
                have = len(done)
                await until(lambda: len(done) >= have + count, 600.0)
                return [certificate.outcome.codec for certificate in done]

            taken = await rounds(6)
            assert taken[0] == "bf16"  # no round had been timed yet
            assert taken[2:] == ["int2"] * 4
            for member in swarm.members.values():
                node = swarm.network.node(member.peer)
                assert node is not None
                node.upload = node.download = fast
            taken = await rounds(7)
            assert taken[-3:] == ["bf16"] * 3
            assert "int4" in taken
            swarm.agree()

    virtual_time.run(main())


@pytest.mark.parametrize("count", [3, 4])
def test_rounds_go_on_over_links_that_carry_a_thousandth_at_once(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything was planned with speeds that are a thousand times too high."""
    monkeypatch.setattr("protocols.stats.LONG_BYTES", 4096)
    fast, slow = 25e6, 25e3  # bytes a second: bf16 takes 8 s at the latter, int2 about 1 s

    async def main() -> None:
        async with simulated_swarm(
            count,
            size=100_000,
            codec=("bf16", "int4", "int2"),
            think=(4.0, 4.1),
            link=Link(latency=0.002),
            uploads=[fast] * count,
        ) as swarm:
            done = next(iter(swarm.members.values())).replica.certificates
            await until(lambda: len(done) >= 4, 60.0)
            for member in swarm.members.values():
                node = swarm.network.node(member.peer)
                assert node is not None
                node.upload = node.download = slow
            before = len(done)
            await until(lambda: len(done) > before, 60.0)
            await until(lambda: len(done) >= before + 8, 90.0)
            assert done[-1].outcome.codec == "int2"
            assert all(c.epoch == 0 for c in done)  # nobody was thought gone
            swarm.agree()

    virtual_time.run(main())


def test_the_codec_follows_the_links_down_and_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocols.stats.LONG_BYTES", 4096)
    fast, slow = 4e6, 4e5  # bytes a second: int4 takes 0.08 s and 0.8 s of rounds of 4 s

    async def main() -> None:
        async with simulated_swarm(
            4,
            size=400_000,
            codec=("int4", "int2"),
            think=(4.0, 4.1),
            link=Link(latency=0.002),
            uploads=[fast] * 4,
        ) as swarm:
            one = next(iter(swarm.members.values()))

            def speed(rate: float) -> int:
                for member in swarm.members.values():
                    node = swarm.network.node(member.peer)
                    assert node is not None
                    node.upload = node.download = rate
                return len(one.replica.certificates)

            async def rounds(count: int) -> None:
                await until(lambda: len(one.replica.certificates) >= count, 600.0)

            await rounds(2)
            dropped = speed(slow)
            await rounds(dropped + 3)
            risen = speed(fast)
            await rounds(risen + 6)
            swarm.agree()
            taken = [certificate.outcome.codec for certificate in one.replica.certificates]
            assert taken[:dropped] == ["int4"] * dropped
            assert taken[dropped + 2 : risen] == ["int2"] * (risen - dropped - 2)
            assert taken[risen + 4 :] == ["int4"] * (len(taken) - risen - 4)
            for member in swarm.members.values():
                assert member.rejected == []
                for certificate in member.replica.certificates:
                    outcome = certificate.outcome
                    assert {part.codec for part in outcome.parts} == {outcome.codec}

    virtual_time.run(main())
