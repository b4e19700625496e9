"""What the node's state consists of, as plain data: itself, the run, peers, links, the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from protocols.messages import Announce

MAX_LINKS = 4096  # that are told at a time
MAX_DRAWN = 1e12  # what is larger is made up by a peer, or says no more than that it is large


def can_be_drawn(value: float) -> bool:
    """Whether a value is small enough for a chart, and for sums of many; peers may say anything."""
    return abs(value) < MAX_DRAWN


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """What does not change while the process runs."""

    peer: str
    role: str = "island"
    name: str = ""
    region: str = ""
    version: str = ""
    device: str = ""
    listen: str = ""
    public_addr: str = ""
    join_address: str = ""
    invitation_needed: bool = False  # to join, besides the address
    pid: int = 0
    started: float = 0.0  # seconds since the Unix epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """The run this node takes part in."""

    id: str  # hex
    label: str
    total_rounds: int
    manifest: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerView:
    """One peer as this node sees it, itself included."""

    peer: str
    name: str = ""
    role: str = "island"
    status: str = ""
    region: str = ""
    version: str = ""
    round: int = 0
    loss: float | None = None
    validation_loss: float | None = None
    tokens_per_second: float = 0.0
    total_tokens: int = 0
    link: Literal["self", "direct", "relay", "none"] = "none"
    address: str = ""  # the kind of its best address: "public IPv4", "loopback", "name", …
    rtt_s: float | None = None  # from this node to it
    own_rtt_s: float | None = None  # from it to its peers, the median, as it measured itself
    upload: float = 0.0  # bytes a second, as it measured itself
    download: float = 0.0
    # its outer state is ours bit for bit, or was at its round; None: that is not known
    agrees: bool | None = None
    distance: float | None = None  # to the islands' mean before the last merge, relative
    clock_offset_s: float | None = None
    silent_s: float = 0.0  # since it was last heard of

    @classmethod
    def of(cls, said: Announce) -> PeerView:
        """What a peer says of itself; figures that nobody can have are left out."""
        return cls(
            peer=said.peer,
            name=said.name,
            role=said.role,
            status=said.status,
            region=said.region,
            version=said.version,
            round=said.round,
            loss=_figure(said.loss) or None,
            validation_loss=_figure(said.validation_loss) or None,
            tokens_per_second=_figure(said.tokens_per_second),
            total_tokens=said.total_tokens,
            own_rtt_s=_figure(said.round_trip) or None,
            upload=_figure(said.upload),
            download=_figure(said.download),
        )


def _figure(said: float) -> float:
    return said if can_be_drawn(said) else 0.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes since the start, of one of :data:`~node.monitor.metrics.TRAFFIC`."""

    sent: int = 0
    received: int = 0


@dataclass(frozen=True, slots=True)
class LinkView:
    """A link from one peer to another, as this node has measured it, or as one of them told it."""

    source: str
    target: str
    bytes_per_second: float | None  # None: no body was long enough to tell
    round_trip_s: float | None = None
    age_s: float = 0.0  # since it was told; 0: this node's own


@dataclass(frozen=True, slots=True)
class KnownLinks:
    """Links between all islands, :data:`MAX_LINKS` at most."""

    links: Sequence[LinkView] = ()
    left_out: int = 0  # that are known as well


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuView:
    """A GPU of the machine, whoever uses it; bytes, None where the driver does not tell."""

    index: int
    name: str = ""
    utilisation: float | None = None  # share of the time that a kernel ran, 0 to 1
    memory_used: int | None = None
    memory_total: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineView:
    """This node's machine; bytes, None where it cannot be told."""

    cores: int = 0
    load: float | None = None  # processes that wanted to run, mean of a minute
    memory_total: int | None = None  # of the machine or its control group, whichever leaves less
    memory_available: int | None = None
    memory_used: int | None = None  # resident, of the daemon and its ranks; shared memory once
    disk_total: int | None = None  # of the file system of the state directory
    disk_free: int | None = None
    gpus: tuple[GpuView, ...] = ()
