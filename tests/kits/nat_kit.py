"""A router with address translation between one machine and the rest of a network of namespaces.

The kinds of translators of RFC 5382, as far as netfilter makes them: every connection that the
machine opens leaves with the router's address.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from benchmarks.netns import Network

INSIDE = "192.168.77.2"  # of the first machine behind a router
KINDS = {
    # mapping endpoint-independent, filtering endpoint-independent: whatever comes in goes to it
    "full cone": ("masquerade", "accept"),
    # the same mapping (ports are kept), and only answers come in; nothing is said to strangers
    "restricted": ("masquerade", "drop"),
    # strangers are told that nobody is there, which ends what two inside have begun at once
    "refusing": ("masquerade", "reject with tcp reset"),
    # another port for every connection, and only answers come in
    "symmetric": ("masquerade random,fully-random", "drop"),
}


def put_behind(network: Network, machine: str, router: str, kind: str) -> None:
    """Take ``machine`` off the network and put it behind ``router``, which has an address there."""
    how, strangers = KINDS[kind]
    new = f"iifname eth0 meta l4proto tcp ct state new {strangers}"
    asked = "ct status dnat accept"  # what the router was told to forward
    _wire(network, machine, router, 0)
    _in(network, router, ["sysctl", "-qw", "net.ipv4.ip_forward=1"])
    inwards = f"iifname eth0 dnat to {INSIDE}" if strangers == "accept" else "iifname lan0 accept"
    rules = f"""
    table ip nat {{
      chain out {{ type nat hook postrouting priority 100; oifname eth0 {how}; }}
      chain in {{ type nat hook prerouting priority -100; {inwards}; }}
    }}
    table ip guard {{
      chain pass {{ type filter hook forward priority 0; {asked}; {new}; }}
      chain own {{ type filter hook input priority 0; {new}; }}
    }}
    """
    _in(network, router, ["nft", "-f", "-"], rules)


def forward(network: Network, router: str, port: int) -> None:
    """Have a router forward a port to the first machine behind it, as by hand."""
    rule = f"tcp dport {port} iifname eth0 dnat to {INSIDE}"
    _in(network, router, ["nft", "insert", "rule", "ip", "nat", "in", *rule.split()])


def let_ask(network: Network, router: str, outside: str, folder: Path) -> subprocess.Popen[Any]:
    """Have a router forward what machines behind it ask for by UPnP (miniupnpd).

    It has the address ``outside`` as well, which others reach; it must be one of the internet.
    """
    _ip(network, router, "addr", "add", f"{outside}/32", "dev", "eth0")
    tables = """
    table inet upnp {
      chain let { }
      chain to { }
      chain from { }
      chain pass { type filter hook forward priority 0; jump let; }
      chain in { type nat hook prerouting priority -100; jump to; }
      chain out { type nat hook postrouting priority 100; jump from; }
    }
    """
    _in(network, router, ["nft", "-f", "-"], tables)
    settings = {
        "ext_ifname": "eth0",
        "ext_ip": outside,
        "listening_ip": "lan0",
        "enable_upnp": "yes",
        "secure_mode": "yes",
        "uuid": "a7851df0-8fe1-40e0-b8ac-bc802e92725e",
        "upnp_table_name": "upnp",
        "upnp_forward_chain": "let",
        "upnp_nat_table_name": "upnp",
        "upnp_nat_chain": "to",
        "upnp_nat_postrouting_chain": "from",
    }
    lines = [f"{name}={value}" for name, value in settings.items()]
    lines.append("allow 1024-65535 0.0.0.0/0 1024-65535")
    (folder / "router.conf").write_text("\n".join(lines) + "\n")
    words = ["miniupnpd", "-d", "-f", str(folder / "router.conf"), "-P", str(folder / "router.pid")]
    with (folder / "router.out").open("wb") as out:
        return network.start(router, words, stdout=out, stderr=subprocess.STDOUT)


def dial_by(network: Network, machine: str, outside: str, router: str) -> None:
    """Let a machine reach the address ``outside`` of a router."""
    _ip(network, machine, "route", "add", outside, "via", network.address(router))


def put_beside(network: Network, machine: str, router: str) -> None:
    """A second machine behind a router, which passes on what the two send each other."""
    _wire(network, machine, router, 1)


def _wire(network: Network, machine: str, router: str, number: int) -> None:
    port, inner, outer = f"lan{number}", *(f"192.168.{77 + number}.{end}" for end in (2, 1))
    _ip(network, machine, "link", "set", "eth0", "down")
    _ip(network, machine, "link", "set", "eth0", "name", "unplugged")
    end = network.path(machine)
    _ip(network, router, "link", "add", port, "type", "veth", "peer", "eth0", "netns", end)
    _ip(network, router, "addr", "add", f"{outer}/24", "dev", port)
    _ip(network, router, "link", "set", port, "up")
    _ip(network, machine, "addr", "add", f"{inner}/24", "dev", "eth0")
    _ip(network, machine, "link", "set", "eth0", "up")
    _ip(network, machine, "route", "add", "default", "via", outer)


def _ip(network: Network, name: str, *words: str) -> None:
    _in(network, name, ["ip", *words])


def _in(network: Network, name: str, command: list[str], given: str = "") -> None:
    done = subprocess.run(
        network.command(name, command), input=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (command, done.stderr)
