"""How long a state is tried for, and what the tries so far have come to. Sans-IO."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bootstrap.state import DownloadProgress
from bootstrap.state.offers import making_s
from node.entry.looking import PATIENCE_S
from node.errors import operator_error
from protocols.errors import OperatorError, RemoteProtocolError, TransportError
from protocols.messages import Announce

COPIES = 3  # that are waited for beyond PATIENCE_S: some sources only claim to make one
MAX_UNTRUE = 3
MAX_UNWANTED = 3
MAX_UNANSWERED = 3  # looks in a row: one that starts again, or a lost packet, is no sign of an end
NOBODY = "no island has announced a state"
GONE = "none of the peers that were greeted answers any more: the run may be over"
BACK = (
    "ask whose run it is: where it is not over, node start --resume there brings it back; or give "
    "other peers of it with --peers"
)


class CaughtUp(OperatorError):
    """A state was looked for in vain: nobody is further than this node any more."""


@dataclass
class Patience:
    """Until when a state of ``size`` bytes is tried for, by the clock ``now``."""

    size: int
    now: Callable[[], float]
    _began: float = field(init=False)
    _waited: float = 0.0  # seconds in all for copies that were being made

    def __post_init__(self) -> None:
        self._began = self.now()

    def until(self) -> float:
        """As of now: it is put off while a source makes its copy."""
        return self._began + PATIENCE_S + min(self._waited, COPIES * making_s(self.size))

    def waited(self, seconds: float) -> None:
        """So long a copy was being made."""
        self._waited += seconds

    def excuse(self, since: float) -> None:
        """What took until now was no patience with others."""
        self._began += self.now() - since

    def renew(self) -> None:
        """Have as much again."""
        self._began, self._waited = self.now(), 0.0


@dataclass
class Attempt:
    """One download, which is told of its ``progress``: did anything come of it?"""

    progress: DownloadProgress
    patience: Patience
    came: bool = False  # something, from a source
    filled: bool = False  # something was on disk
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.patience.now()

    def __call__(self, done: int, total: int, sources: int) -> None:
        self.came = self.came or sources > 0
        if not sources and done:  # reading it takes minutes
            self.filled = True
            self.patience.excuse(self._began)
        self.progress(done, total, sources)


@dataclass
class Looks:
    """Looks around for a state, none of which has brought one yet, and why."""

    reason: str = NOBODY
    _wrong: str = ""  # what was wrong in this look
    _silent: bool = False  # somebody failed to give a state in this look that might be true
    _untrue: int = 0  # looks in a row that brought only lies
    _unwanted: int = 0  # looks in a row that brought nothing wanted
    _unanswered: int = 0  # looks in a row in which nobody was there at all

    def begin(self) -> None:
        """Others are asked again who stands where."""
        self._wrong, self._silent = "", False

    def failed(self, error: RemoteProtocolError | TransportError) -> None:
        """A state could not be had."""
        if isinstance(error, RemoteProtocolError):
            self._wrong = str(error)  # the next best may be true
        else:  # a claim costs nothing
            self.reason, self._silent = str(error), True

    def in_vain(
        self, found: Sequence[Announce], wanted: Sequence[Announce], *, answered: bool
    ) -> None:
        """This look has brought no state. Raises OperatorError where others would not either;
        CaughtUp where that is because this node needs none.

        ``answered``: by anybody who was asked. Who does not may be back in a moment, so that is
        only told.
        """
        self._unanswered = 0 if answered else self._unanswered + 1
        if self._unanswered >= MAX_UNANSWERED:
            self.reason = GONE
        elif self.reason == GONE:
            self.reason = NOBODY
        self._untrue = self._untrue + 1 if self._wrong and not self._silent else 0
        if self._untrue >= MAX_UNTRUE:
            raise operator_error("E206", why=self._wrong)
        self._unwanted = self._unwanted + 1 if found and not wanted else 0
        if self._unwanted >= MAX_UNWANTED:
            self.reason = "nobody is further than this node any more"
            said = self.ended()
            raise CaughtUp(said.code, said.what, said.why, said.fix, exit_code=said.exit_code)

    def ended(self) -> OperatorError:
        """What is said where no more is tried."""
        what = "the swarm's state could not be fetched"
        fix = BACK if self.reason == GONE else ""
        return operator_error("E502", what, why=self.reason, fix=fix)
