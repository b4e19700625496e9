"""The account of an island's push-sum weight: what is here, what it has given, and what came.

Push-sum's weights add up only if each share counts once, whoever is killed when. So an account is
changed on disk before anything follows from it: before the first byte of a share leaves, and before
its sender is told that it has come. Then, at each moment, over the accounts of all islands::

    sum of own + sum of given, but for those that are in their receivers' came
        = weight that islands have brought

A share that is given is in doubt until its receiver says whether it came, which it reads from its
account; nobody decides that alone. An island that was killed goes on with the parameters of its
checkpoint, however old that is, and the weight of its account.

There is one share on the way from one island to another at most, and their names only grow. So the
newest name of each sender is all that a receiver has to know: exactly-once delivery by sequence
numbers, as in TCP, with the numbers on disk. A disk that was restored to an earlier state must be
treated as lost: remove the file, and the island has the weight of its checkpoint.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from protocols.bounds import MAX_PEERS
from protocols.files import READABLE, replacing, sync
from protocols.identity import PeerId
from protocols.tasks import Offload

SERIES_BYTES, NAME_BYTES = 8, 16  # of an account's own, and with the number of a share after it


@dataclass(frozen=True, slots=True)
class Given:
    """A share that may have come, or not."""

    name: bytes
    weight: float


@dataclass(frozen=True, slots=True)
class Balance:
    """What an account says at one moment; every change makes another one."""

    own: float  # weight that is here: mixed in, or waiting to be
    series: bytes = field(default_factory=lambda: secrets.token_bytes(SERIES_BYTES))
    count: int = 0  # shares that were ever given
    given: Mapping[PeerId, Given] = field(default_factory=dict)  # in doubt, by receiver
    # the newest share of each sender that is part of ``own``; who gave none for longest comes first
    came: Mapping[PeerId, bytes] = field(default_factory=dict)

    def give(self, to: Sequence[PeerId], weight: float) -> Balance:
        """To each of these, who have none in doubt, a share of ``weight``."""
        names = [self.series + (self.count + n).to_bytes(8, "big") for n in range(len(to))]
        shares = {peer: Given(name, weight) for peer, name in zip(to, names, strict=True)}
        return replace(
            self,
            own=self.own - weight * len(to),
            count=self.count + len(to),
            given={**self.given, **shares},
        )

    def settle(self, to: PeerId, *, came: bool) -> Balance:
        """It is known whether a share has come; if not, its weight is here again."""
        given = dict(self.given)
        share = given.pop(to)
        return replace(self, own=self.own if came else self.own + share.weight, given=given)

    def take(self, sender: PeerId, name: bytes, weight: float) -> Balance:
        """A share has come."""
        came = {peer: newest for peer, newest in self.came.items() if peer != sender}
        if len(came) >= MAX_PEERS:
            del came[next(iter(came))]
        return replace(self, own=self.own + weight, came={**came, sender: name})


class Book(Protocol):
    """Where the balance is kept."""

    def read(self) -> Balance | None:
        """The balance that was written last; None: none is known."""
        ...

    def write(self, balance: Balance) -> None:
        """Have it on disk on return; raises OSError, and then the one before is. Blocks."""
        ...


class Account:
    """One island's of one fragment. Changes are made one after the other."""

    def __init__(self, weight: float, book: Book | None = None, offload: Offload | None = None):
        """``weight``: where the ``book`` has no balance; without a book it ends with the process.

        ``offload`` is needed with a book.
        """
        known = book.read() if book is not None else None
        self.balance = Balance(weight) if known is None else known
        self._book, self._offload = book, offload
        self._changing = asyncio.Lock()

    async def change(self, how: Callable[[Balance], Balance], *, soon: bool = True) -> Balance:
        """Change the balance, on disk first; raises OSError, and then nothing has changed.

        Not ``soon``: it may be written with the next change. Returns the new balance.
        """
        async with self._changing:
            after = how(self.balance)
            book, offload = self._book, self._offload
            if soon and book is not None and offload is not None:
                await offload(lambda: book.write(after))
            self.balance = after
            return after


class BookFile:
    """A book of one island in one fragment of a run: a small file, replaced as a whole."""

    def __init__(self, path: Path, run: bytes, me: PeerId) -> None:
        self._path, self._of = path, {"run": run.hex(), "peer": me}

    def read(self) -> Balance | None:
        """See :class:`Book`; one that is damaged, or another island's or run's, is not known."""
        try:
            found = json.loads(self._path.read_bytes())
            if {name: found[name] for name in self._of} != self._of:
                return None
            return _balance(found)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, balance: Balance) -> None:
        """See :class:`Book`."""
        data = json.dumps({**self._of, **_spelled(balance)}, indent=1).encode()
        with replacing(self._path, mode=READABLE) as file:
            file.write(data)
        sync(self._path.parent)  # or a power failure may bring the one before back


def _spelled(balance: Balance) -> dict[str, object]:
    return {
        "own": balance.own,
        "series": balance.series.hex(),
        "count": balance.count,
        "given": {to: [share.name.hex(), share.weight] for to, share in balance.given.items()},
        "came": {sender: name.hex() for sender, name in balance.came.items()},
    }


def _balance(found: dict[str, Any]) -> Balance:
    """Raises ValueError, KeyError, TypeError or AttributeError for what makes no sense."""
    balance = Balance(
        float(found["own"]),
        bytes.fromhex(found["series"]),
        int(found["count"]),
        {PeerId(to): Given(bytes.fromhex(n), float(w)) for to, (n, w) in found["given"].items()},
        {PeerId(sender): bytes.fromhex(name) for sender, name in found["came"].items()},
    )
    weights = [balance.own, *(share.weight for share in balance.given.values())]
    names = [*(share.name for share in balance.given.values()), *balance.came.values()]
    whole = len(balance.series) == SERIES_BYTES and all(len(n) == NAME_BYTES for n in names)
    if not whole or not all(0 < weight < math.inf for weight in weights) or balance.count < 0:
        raise ValueError(f"no balance: {balance}")
    return balance
