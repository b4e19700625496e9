"""Where an island stands between the rounds: the inner steps that it has taken, and what is due.

Sans-IO: no tensors are touched here. :class:`~node.trainer.progress.Progress` has them.
"""

from __future__ import annotations

from collections.abc import Sequence

from node.trainer.fragment_progress import FragmentProgress, due, due_at_will
from node.trainer.numbers import Numbers
from node.trainer.trainer_state import StepTotals

BAD_STEPS = 3  # steps without a finite gradient after which the island says that it is lost


class Cycle:
    """The inner steps of one island, by fragment and altogether; alike on all of its ranks."""

    def __init__(self, names: Sequence[frozenset[str]], overlap: int) -> None:
        """``names``: parameters by fragment; ``overlap``: see :attr:`waiting`."""
        self.overlap = overlap
        self.begun = False
        self.fragments = [FragmentProgress(of_one) for of_one in names]
        self.slot = 0
        self.slots = 1
        self.target_steps = 0  # 0: at rest, once it has begun
        self.at_will = self.gradients = False  # see :class:`~node.trainer.channel.Begin`
        self.in_hand = False  # whether there is a gradient to be sent
        self.round_step = 0  # inner steps since the last Apply: the sampler's position
        self.numbers: Numbers | None = None  # its position where rounds have no own windows
        self.step = self.tokens = 0
        self.position = 0  # in the learning rate's schedule: of the swarm, which may be further
        self.bad_steps = 0  # in a row

    @property
    def round(self) -> int:
        """Rounds applied so far; of fragment 0, with which cycles end."""
        return self.fragments[0].round

    @property
    def batches(self) -> tuple[int, ...]:
        """Those left to read, by number; empty where each round has windows of its own."""
        return () if self.numbers is None else self.numbers.stretches

    @property
    def due(self) -> list[int]:
        """Fragments of which a snapshot is to be taken: it is their turn, or training is lost.

        Steps are counted from the last Apply, which comes to all islands at once, so that all
        are due at once; an island late in the last round has more to send, not a phase of its own.
        Where islands contribute at will they are counted from the last contribution.
        """
        if not self.begun or self.resting:
            return []
        if self.bad_steps >= BAD_STEPS:
            return [f for f, one in enumerate(self.fragments) if one.outstanding is None]
        if self.gradients:
            return [0] if self.in_hand else []
        if self.at_will:
            return due_at_will(self.fragments, self.target_steps)
        return due(self.fragments, self.round_step, self.target_steps)

    @property
    def resting(self) -> bool:
        """Whether there is nothing to do until the daemon says so.

        The next rounds do without this island; or its gradient is on its way, and the next one is
        to be taken where the merge leads.
        """
        out = self.gradients and self.fragments[0].outstanding is not None
        return self.begun and (out or not self.target_steps)

    @property
    def waiting(self) -> bool:
        """Whether a snapshot is unanswered after the steps that may overlap its round."""
        return any(
            progress.outstanding is not None and progress.unsent.steps >= self.overlap
            for progress in self.fragments
        )

    def count(self, tokens: int, *, finite: bool) -> None:
        """An inner step of so many tokens was taken; ``finite``: its loss and gradient were."""
        self.bad_steps = 0 if finite else self.bad_steps + 1
        for progress in self.fragments:
            progress.unsent += StepTotals(1, tokens, int(not finite))
        self.round_step += 1
        if self.numbers is not None:
            self.numbers.take()
        self.step += 1
        self.position += 1
        self.tokens += tokens
