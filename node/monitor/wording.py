"""Numbers, times and the texts of peers, as a terminal shows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

JOIN_STEPS = 6
_BLANK = "\u115f\u1160\u2800\u3164\uffa0"  # are letters or signs, and show nothing


def number(value: float | None) -> str:
    """A loss with two decimals, ``-`` where there is none."""
    return "-" if value is None else f"{value:.2f}"


def megabytes(count: float) -> str:
    """Bytes as ``0.29 MB`` or ``1.20 GB``."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"


def duration(seconds: float) -> str:
    """``42s``, ``38m``, ``3h05m``, ``2d04h``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02d}h"


def clean(text: str, limit: int = 500, *, lines: bool = False) -> str:
    """Text for a terminal: printable characters only, cut at ``limit``.

    ``lines`` keeps line ends, which in a peer's name or reason would forge lines of a log.
    """
    if not lines:
        text = text[: limit + 1].replace("\n", " ")
    kept = "".join(c for c in text[: limit + 1] if c.isprintable() or c == "\n")
    return kept if len(kept) <= limit else kept[: limit - 1] + "…"


def join_line(
    address: str, *, invited: bool = False, scripts: bool = False, own_text: bool = False
) -> str:
    """What others begin with to join by ``HOST:PORT/ID``; in a run of scripts, a script's line.

    An invitation, and text where each island has its own, stand for what only those know.
    """
    if scripts:
        invitation = ', invitation="…"' if invited else ""
        return f'node.join(model, optimizer, peers="{address}"{invitation}), in a script'
    rest = (" --invitation …" if invited else "") + (" --data …" if own_text else "")
    return f"node start --peers {address}{rest}"


def of_scripts(run: Mapping[str, Any] | None) -> bool:
    """Whether islands of a run, as the API describes it, train with scripts of their own."""
    return bool(run and run["manifest"].get("script", {}).get("layout"))


def of_own_text(run: Mapping[str, Any] | None) -> bool:
    """Whether each island of a run, as the API describes it, has to bring text."""
    return bool(run and run["manifest"].get("data", {}).get("recipe") == "text")


def names_apart(names: Mapping[str, str]) -> dict[str, str]:
    """Names by peer id, with the end of the id where others have the same name.

    Who has a name of which nothing can be seen is left out.
    """
    looks = {peer: _seen(name) for peer, name in names.items()}
    times = Counter(looks.values())
    return {
        peer: name if times[looks[peer]] == 1 else f"{name} {short(peer)}"
        for peer, name in names.items()
        if looks[peer]
    }


def _seen(name: str) -> str:
    return "".join(c for c in name if c.isprintable() and not c.isspace() and c not in _BLANK)


def short(peer: str) -> str:
    """The end of a peer id, which tells peers apart (all begin with 12D3KooW)."""
    return "…" + clean(peer)[-8:]
