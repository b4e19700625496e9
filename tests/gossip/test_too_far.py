"""Who asks what it has missed: of one too far ahead to be followed, or that shows nothing new."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from gossip_kit import EVERYBODY, PLACE, RUN, SHAPE, decided, roster_of

from gossip.catchup.replay import Ending, Replay
from protocols.errors import TransportError
from protocols.identity import PeerId
from protocols.messages import Certificate

MEMBERS = EVERYBODY[:3]


def follows(
    shown: Certificate | None, *, far: bool = True, sources: int = 1
) -> tuple[Ending | None, Replay, list[PeerId]]:
    """What comes of asking those who are far ahead; they show that, or do not answer."""
    rejected: list[PeerId] = []
    asked: list[PeerId] = []

    class Asked(Replay):
        async def certificates(
            self, source: PeerId, round_: int, count: int
        ) -> tuple[Certificate, ...]:
            asked.append(source)
            assert len(asked) <= len(MEMBERS), "it asks for ever"
            if shown is None:
                raise TransportError("gone")
            return (shown,)

    unused: Any = None
    made = Asked(
        SimpleNamespace(run=RUN, now=lambda: 0.0),  # type: ignore[arg-type]
        SHAPE,
        lambda: (PLACE, roster_of(MEMBERS)),
        unused,
        unused,
        lambda peer, error: rejected.append(peer),
        lambda peer: None,
        lambda peer: None,
        lambda source: far,
        unused,
        unused,
        unused,
        unused,
    )
    peers = [member.peer_id for member in MEMBERS[:sources]]
    return asyncio.run(made.follow(peers, PLACE.round)), made, rejected


def test_it_learns_what_was_decided_where_it_stands() -> None:
    certificate = decided(MEMBERS)
    ending, made, _ = follows(certificate)
    assert ending is Ending.FAR
    assert made.decided == certificate.outcome


def test_on_another_side_of_a_fork_it_learns_that() -> None:
    ending, made, _ = follows(decided(MEMBERS, replace(PLACE, previous=b"x" * 32)))
    assert ending is Ending.FORKED
    assert made.decided is None


def test_where_nobody_answers_a_download_helps_all_the_same() -> None:
    ending, made, _ = follows(None)
    assert ending is Ending.FAR
    assert made.decided is None


@pytest.mark.parametrize(
    "shown", [decided(MEMBERS, replace(PLACE, round=4)), replace(decided(MEMBERS), votes=())]
)
def test_what_was_not_asked_for_or_has_no_votes_is_not_believed(shown: Certificate) -> None:
    ending, made, rejected = follows(shown)
    assert ending is Ending.UNREACHABLE
    assert made.decided is None
    assert rejected == [MEMBERS[0].peer_id]


@pytest.mark.parametrize("sources", [1, 2])
def test_who_shows_a_round_of_the_past_alone_is_not_asked_for_ever(sources: int) -> None:
    """It is a true one, so nothing else is wrong with it."""
    past = decided(MEMBERS, replace(PLACE, round=PLACE.round - 1))
    ending, _, rejected = follows(past, far=False, sources=sources)
    assert ending is Ending.UNREACHABLE
    assert rejected == [member.peer_id for member in MEMBERS[:sources]]
