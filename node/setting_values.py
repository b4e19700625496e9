"""Values of settings as people write them: addresses, speeds, sizes, paths; read and checked."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from node.errors import operator_error
from protocols.addresses import is_host_name, parse_address, parse_peers
from protocols.errors import OperatorError

DEFAULT_PORT = 4390


def host_port(text: str) -> tuple[str, int]:
    """``HOST:PORT`` or ``[IPV6]:PORT`` as a pair; raises ``ValueError`` naming the faulty part."""
    text = text.strip()
    host, colon, port = text.rpartition(":")
    if ":" in host and "[" not in text:
        if _is_ipv6(text) and not _is_ipv6(host):  # all of it is the host
            host, port = text, str(DEFAULT_PORT)
        raise ValueError(f"an IPv6 host stands in brackets: [{host}]:{port}")
    if not colon or port.endswith("]"):
        raise ValueError(f"{text!r} has no port; write HOST:PORT, as in 0.0.0.0:{DEFAULT_PORT}")
    if not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise ValueError(f"port {port!r} must be a number from 0 to 65535")
    if host.startswith("[") and host.endswith("]"):
        if not _is_ipv6(host[1:-1]):
            raise ValueError(f"host {host!r} is no IPv6 address")
        return str(ipaddress.IPv6Address(host[1:-1])), int(port)
    if not is_host_name(host):
        raise ValueError(f"host {host!r} is neither a name nor an address")
    return host, int(port)


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def no_address() -> OperatorError:
    """``--peers`` without anybody to dial: starting a run of one's own is not what was meant."""
    return operator_error(
        "E102",
        "--peers names nobody",
        why="it is there, and no address follows it",
        fix="give HOST:PORT/ID from a join line, or leave --peers out to create a run",
    )


def read_peers(value: object) -> object:
    """Repeats, commas, spaces and ``@file`` as addresses in their normal form (E102 if bad)."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not all(isinstance(item, str) for item in values):
        return value
    addresses = parse_peers(values)
    if values and not addresses:  # a variable of the shell that is not set, most likely
        raise no_address()
    return tuple(str(address) for address in addresses)


def read_sinks(value: object) -> object:
    """Repeats, or in one text separated by spaces: ``KIND:WHERE`` each."""
    if not value:
        return ()
    from node.monitor.sinks import split

    values = value.split() if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not all(isinstance(item, str) for item in values):
        return value
    for item in values:
        split(item)
    return tuple(values)


_SPEED = re.compile(
    r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*([kMGT]?)(bits?|bps|B|bytes?)?(?:/s)?", re.IGNORECASE
)
_THOUSANDS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
# bytes a second; messages leave a quarter of it to lanes, one of which moves 1024 at least
MIN_UPLOAD = 5000.0


def speed(value: object) -> object:
    """``20Mbit``, ``2.5 MB/s`` or plain bytes as bytes a second; raises ``ValueError``.

    Bits where it says bit, b or bps, else bytes, as with B or Bps. 0 means no limit.
    """
    if not isinstance(value, str):
        return value
    found = _SPEED.fullmatch(value.strip())
    if found is None:
        raise ValueError("must be a speed, as in 20Mbit, 2.5MB or 2500000 (bytes a second)")
    number, thousands, unit = found.groups()
    bits = (unit or "") in ("b", "bps") or (unit or "").lower() in ("bit", "bits")
    return float(number) * _THOUSANDS[thousands.lower()] / (8 if bits else 1)


def fast_enough(bytes_s: float) -> float:
    """A limit below which nothing would get through in time is refused."""
    if 0 < bytes_s < MIN_UPLOAD:
        raise ValueError("must be at least 40kbit, or 0")
    return bytes_s


RECIPE = "docstrings"  # as --data: the run's own, in so many words; a folder is ./docstrings
MIN_CACHE = 1e6  # bytes
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kMGT]?)B?", re.IGNORECASE)


def size(value: object) -> object:
    """``20GB`` or plain bytes as bytes; raises ``ValueError``."""
    if not isinstance(value, str):
        return value
    found = _SIZE.fullmatch(value.strip())
    if found is None:
        raise ValueError("must be a size, as in 20GB or 500MB")
    return float(found[1]) * _THOUSANDS[found[2].lower()]


def large_enough(bytes_: float) -> float:
    """A cache in which hardly a file has room is refused."""
    if bytes_ < MIN_CACHE:
        raise ValueError("must be at least 1MB")
    return bytes_


def is_url(text: str) -> bool:
    """Whether a place is no path of this machine; ``file://`` is a URL, too."""
    return "://" in text


def place(text: str) -> str:
    """A URL or :data:`RECIPE` as it is, a path made absolute; of a data set, those in its name."""
    if text.startswith("datasets:"):
        from node.data.streamed import DataSet

        return str(DataSet.parse(text))
    return text if text == RECIPE or is_url(text) else str(expanded(Path(text)))


def own_text(data: str | None) -> str:
    """The place that ``--data`` names; empty for the run's recipe, named or not."""
    return "" if data in (None, RECIPE) else data


def checked_host_port(text: str) -> str:
    """Raises ValueError for what is neither empty nor HOST:PORT."""
    if text:
        host_port(text)
    return text


def dialable(text: str) -> str:
    """``HOST:PORT`` that others can dial, or nothing."""
    return parse_address(text).hostport if text else text


def not_empty(value: object) -> object:
    """Raises ValueError for an empty path, which would be the current directory."""
    if isinstance(value, str) and not value.strip():  # a variable of the shell that is not set
        raise ValueError("is empty; give a path, or leave it out")
    return value


def expanded(path: Path) -> Path:
    """An absolute path, ``~`` included; as in a shell, ``~name`` of nobody stands for itself.

    Raises ValueError for a name that is not UTF-8, which no JSON of ours could tell, and for a
    relative one in a working directory that was removed.
    """
    try:
        whole = Path(os.path.expanduser(path)).absolute()
    except FileNotFoundError as error:
        raise ValueError(
            f"{str(path)!r} is relative, and the working directory is no longer there"
        ) from error
    try:
        str(whole).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{str(whole)!r} is not UTF-8") from error
    return whole


def bytes_at_most(limit: int) -> AfterValidator:
    """Text is bounded by its bytes in UTF-8 where it travels."""

    def check(text: str) -> str:
        if len(text.encode()) > limit:
            raise ValueError(f"must be at most {limit} bytes in UTF-8")
        return text

    return AfterValidator(check)


HostPort = Annotated[str, Field(max_length=262), AfterValidator(checked_host_port)]
LocalPath = Annotated[Path, BeforeValidator(not_empty), AfterValidator(expanded)]
PathOrUrl = Annotated[str, BeforeValidator(str), AfterValidator(not_empty), AfterValidator(place)]
Label = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*$"), bytes_at_most(64)]
