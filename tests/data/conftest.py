"""What tests of streamed data share; the rest of it is in ``tests/kits/live_kit.py``."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def stream_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of the data set library and of Atoll, for one test alone."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def texts(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[list[str], str]:
    """See :func:`live_kit.written`; ``request.param`` is the kind of the files."""
    from live_kit import written  # which skips where a library is missing

    found: tuple[list[str], str] = written(getattr(request, "param", "json"), tmp_path)
    return found
