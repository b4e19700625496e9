"""Numbers, times and the texts of peers, as a terminal shows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from ipaddress import ip_network
from typing import Any

from protocols.addresses import host_of, ip_of, is_loopback

JOIN_STEPS = 6
_NEAR = [  # known within one network, of a site or a VPN: RFC 1918, 6598, 3927, 4193 and 4291
    *map(ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")),
    *map(ip_network, ("169.254.0.0/16", "fc00::/7", "fe80::/10")),
]
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


def join_hint(
    address: str, *, me: str, listen: str, public_addr: str = "", scripts: bool = False
) -> list[str]:
    """What to say below the join line of node ``me`` where few can use ``HOST:PORT/ID``.

    Nothing where the operator has said that this is its address, or where it is that of a relay.
    """
    where, _, peer = address.partition("/")
    if public_addr or peer != me:
        return []
    given = 'public_addr="HOST:PORT"' if scripts else "--public-addr HOST:PORT"
    if is_loopback(host_of(where)):
        here = "(on this machine only"
        on_purpose = is_loopback(host_of(listen))
        return [f"{here})" if on_purpose else f"{here}; for others start it again with {given})"]
    if not _is_near(host_of(where)):
        return []
    port, mapped = where.rpartition(":")[2], "map_port=True" if scripts else "--map-port"
    return [
        f"(in your own network only; for others forward port {port} and give {given}, or {mapped};",
        f" in a VPN such as Tailscale or WireGuard give {given} with this machine's address there)",
    ]


def _is_near(host: str) -> bool:
    try:
        ip = ip_of(host)
    except ValueError:  # a name
        return False
    return any(ip in network for network in _NEAR)


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
