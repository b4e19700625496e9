"""How a trainer begins: with which base, moments and data, and what becomes of them in a restart.

Sans-IO: the ranks' reports and the daemon's moves go in, what is to be done comes out. The ranks
are coming, then built, then told to begin; from there they are at work until they are lost.

=================  =============================================================================
event              what follows
=================  =============================================================================
:meth:`built`      they may begin: once the node is in office (or has a checkpoint), and once a
                   donor's moments have come or will not, where some are on their way
:meth:`given`      the same, with these moments, or without
:meth:`steps`      asked whenever something of that may have changed, it says what is to be done,
                   one by one: bring the state up to date (once), find moments (after a restart),
                   hand the base over, send :meth:`command`. Ranks that die meanwhile are sent
                   nothing; those that come up meanwhile are what it ends with
:meth:`read`       they have read what they began with: it is dropped, and not earlier, since ranks
                   that die while they read it are to get it again
:meth:`lost`       the next ranks begin from the last merge, with what moments are found then; those
                   that had yet to read a checkpoint begin from that
=================  =============================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from enum import Enum
from pathlib import Path

from bootstrap.manifest import Manifest
from node.checkpoints.trainer_files import Taken
from node.island.pace import Pace
from node.modes import at_will, by_gradients
from node.trainer.channel import Begin, Ready
from node.trainer.layout import Outline
from protocols.errors import OperatorError


class Stage(Enum):
    """How far they are."""

    COMING = "not there yet, or no more"
    BUILT = "their model is built, and they wait"
    BEGUN = "told to begin"


class Todo(Enum):
    """One step on the way to a beginning."""

    REFRESH = "bring the state up to date"
    FIND_MOMENTS = "look for a checkpoint's moments, and tell :meth:`Beginning.found`"
    HAND_OVER = "wait until nobody writes what the ranks read"
    BEGIN = "send :meth:`Beginning.command`"
    LET_GO = "the ranks have died meanwhile: nobody reads"


class Beginning:
    """Of one island's trainer, through all its restarts."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        checkpoint: Path | None = None,
        moments: Taken | None = None,
        joined: bool = False,
    ) -> None:
        """``checkpoint``: where a trainer finds all it needs; ``moments`` are for one without.

        ``joined``: the island came into a run under way, so its optimizer is cold.
        """
        self._manifest = manifest
        self.checkpoint = checkpoint
        self.moments = moments
        self.joined = joined  # or was started again, without moments
        self.expects_moments = False  # a donor's are on their way
        self.stage = Stage.COMING
        self._on_the_way = False  # to a beginning: the steps are being carried out
        self._refreshed = False
        self._anew = False  # the ranks have been started again, from the last merge

    @property
    def begun(self) -> bool:
        """Whether there are ranks that have been told to begin."""
        return self.stage is Stage.BEGUN

    @property
    def there(self) -> bool:
        """Whether there are ranks, which have begun or will."""
        return self.stage is not Stage.COMING

    # --- events ----------------------------------------------------------------------------------

    def built(self) -> None:
        """The ranks have built their model."""
        self.stage = Stage.BUILT

    def given(self, moments: Taken | None) -> None:
        """A donor's moments have come; None: there are none to be had."""
        self.expects_moments, self.moments = False, moments

    def found(self, moments: Taken | None) -> None:
        """The moments of the newest checkpoint; None: it has none, so the optimizer is cold."""
        self.moments, self.joined = moments, moments is None

    def read(self) -> Path | None:
        """The ranks have read what they began with; a donor's file of it, which nobody needs."""
        file = self.donated
        self.checkpoint = self.moments = None
        return file

    def lost(self) -> bool:
        """The ranks are no more; whether the base may change before the next ones are there.

        Not where they have yet to stand where a checkpoint was made.
        """
        self.stage = Stage.COMING
        if self.checkpoint is not None:
            return False
        self.joined = self._anew = True
        return True

    # --- what is to be done ----------------------------------------------------------------------

    @property
    def donated(self) -> Path | None:
        """The file of a donor's moments that have yet to be read."""
        return self.moments.path if self.moments is not None and self.moments.steps else None

    def steps(self, *, in_office: bool, alive: Callable[[], bool]) -> Generator[Todo, None, None]:
        """What is to be done now, each before the next is asked for; nothing: not yet.

        ``in_office``: others count this node in. Until then it follows the rounds. ``alive`` says
        whether ranks are there, of whose end there may have been no word yet.
        """
        may = in_office or self.checkpoint is not None
        if self.stage is not Stage.BUILT or not may or self._on_the_way or self.expects_moments:
            return
        self._on_the_way = True
        try:
            if not self._refreshed:
                self._refreshed = True
                yield Todo.REFRESH
            if self._anew:
                yield Todo.FIND_MOMENTS
                self._anew = False
            yield Todo.HAND_OVER
        finally:
            self._on_the_way = False
        if self.stage is Stage.BUILT and alive():
            self.stage = Stage.BEGUN
            yield Todo.BEGIN
        elif self.checkpoint is None:
            yield Todo.LET_GO

    def command(
        self,
        rounds: Sequence[int],
        target: int,
        slot: tuple[int, int],
        pace: Pace,
        *,
        untrained: bool,
        tau: int,
        position: int,
        steps_read: int,
        batches: tuple[int, ...],
    ) -> Begin:
        """What ranks begin with.

        ``rounds`` are by fragment, ``slot`` is the place among the readers of a round's windows.
        A base that is ``untrained`` is evaluated first. The data of ``steps_read`` inner steps of
        the cycle is not read again. ``position`` is the swarm's in the learning rate's schedule,
        ``pace`` this island's.
        """
        round_, *others = rounds
        resume = str(self.checkpoint) if self.checkpoint else ""
        moments, manifest = self.moments, self._manifest
        return Begin(
            round_,
            target,
            *slot,
            pace.step,
            pace.tokens,
            resume,
            rewarm=self.joined and not (resume or moments),
            evaluate=bool(manifest.rounds.eval_every) and untrained and not resume,
            others=tuple(others),
            tau=tau,
            at_will=at_will(manifest),
            forgets=not manifest.inner.keep_moments,
            gradients=by_gradients(manifest),
            moments=str(moments.path) if moments else "",
            moments_steps=moments.steps if moments else 0,
            position=max(pace.position, position),
            round_step=steps_read,
            batches=batches,
        )


def check_built(ready: Ready, layout: Outline) -> None:
    """Raise E405 where ranks have built another model than the run's."""
    if ready.parameters != layout.size or ready.layout.hex() != layout.digest:
        raise OperatorError(
            "E405",
            "the trainer built another model than the manifest describes",
            f"{ready.parameters:,} parameters instead of {layout.size:,}",
            "all ranks need the same version of Atoll",
        )
