"""A router with address translation between one machine and the rest of a network of namespaces.

The kinds of translators of RFC 5382, as far as netfilter makes them: every connection that the
machine opens leaves with the router's address.
"""

from __future__ import annotations

import subprocess

from benchmarks.netns import Network

INSIDE = "192.168.77.2"
LAN = "192.168.77.1"
KINDS = {
    # mapping endpoint-independent, filtering endpoint-independent: whatever comes in goes to it
    "full cone": ("masquerade", True),
    # the same mapping (ports are kept), and only answers come in
    "restricted": ("masquerade", False),
    # another port for every connection, and only answers come in
    "symmetric": ("masquerade random,fully-random", False),
}


def put_behind(network: Network, machine: str, router: str, kind: str) -> None:
    """Take ``machine`` off the network and put it behind ``router``, which has an address there."""
    how, lets_in = KINDS[kind]
    _ip(network, machine, "link", "del", "eth0")
    end = network.path(machine)
    _ip(network, router, "link", "add", "lan0", "type", "veth", "peer", "eth0", "netns", end)
    _ip(network, router, "addr", "add", f"{LAN}/24", "dev", "lan0")
    _ip(network, router, "link", "set", "lan0", "up")
    _ip(network, machine, "addr", "add", f"{INSIDE}/24", "dev", "eth0")
    _ip(network, machine, "link", "set", "eth0", "up")
    _ip(network, machine, "route", "add", "default", "via", LAN)
    _in(network, router, ["sysctl", "-qw", "net.ipv4.ip_forward=1"])
    inwards = f"iifname eth0 dnat to {INSIDE}" if lets_in else "iifname lan0 accept"
    strangers = "accept" if lets_in else "drop"
    rules = f"""
    table ip nat {{
      chain out {{ type nat hook postrouting priority 100; oifname eth0 {how}; }}
      chain in {{ type nat hook prerouting priority -100; {inwards}; }}
    }}
    table ip guard {{
      chain pass {{ type filter hook forward priority 0; iifname eth0 ct state new {strangers}; }}
    }}
    """
    _in(network, router, ["nft", "-f", "-"], rules)


def _ip(network: Network, name: str, *words: str) -> None:
    _in(network, name, ["ip", *words])


def _in(network: Network, name: str, command: list[str], given: str = "") -> None:
    done = subprocess.run(
        network.command(name, command), input=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (command, done.stderr)
