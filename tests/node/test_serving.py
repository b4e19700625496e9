"""What a node gives to newcomers."""

from __future__ import annotations

from contextlib import AsyncExitStack, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from node.entry import serving
from node.entry.serving import serve_moments, serve_state


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """What is made, and with what."""
    made = MagicMock()
    monkeypatch.setattr("node.member.StateServer", made)
    monkeypatch.setattr(serving, "MomentsServer", made)
    return made


def test_a_state_is_served_while_the_present_keeper_says_so(servers: MagicMock) -> None:
    """The last checkpoint replaces what keeps rounds from being applied."""
    keeper: Any = SimpleNamespace(still=MagicMock())
    stack: Any = MagicMock()
    served = serve_state(MagicMock(), MagicMock(), MagicMock(), [MagicMock()], keeper, stack)
    assert served is servers.return_value
    stack.push_async_callback.assert_called_once_with(served.aclose)
    keeper.still = last = MagicMock(return_value=nullcontext())
    servers.call_args.kwargs["still"]()
    last.assert_called_once_with()


def test_moments_that_no_other_island_could_use_are_not_served(servers: MagicMock) -> None:
    """The layout of a script's model says nothing of what its optimizer holds."""
    outline: Any = SimpleNamespace(size=9)
    run, stack = MagicMock(), AsyncExitStack()
    run.manifest.inner.keep_moments = True
    serve_moments(MagicMock(), run, outline, MagicMock(), stack)
    servers.assert_not_called()
