"""Where an island stands, as its trainer counts it and as a checkpoint of it says.

The file ``trainer.json`` lies beside the tensors of a checkpoint (:mod:`node.trainer.resume`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from node.trainer.numbers import MOST
from node.trainer.optimizer_state import Number

# folders of a checkpoint, and the file in either that says where the trainer stood
FOLDER = "trainer"
MOMENTS = "moments"  # an earlier checkpoint's, in one that was made while no trainer was up
STATE = "trainer.json"


@dataclass(frozen=True)
class StepTotals:
    """Inner steps, and the tokens that they trained on."""

    __pydantic_config__ = ConfigDict(extra="ignore")  # earlier versions kept losses and times, too

    steps: int = 0
    tokens: int = 0
    skipped: int = 0  # of the steps, those without a finite gradient, which changed nothing

    def __add__(self, other: StepTotals) -> StepTotals:
        return StepTotals(
            self.steps + other.steps, self.tokens + other.tokens, self.skipped + other.skipped
        )


class FragmentState(BaseModel):
    """Where the island stands with one fragment."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    round: int = Field(ge=0)
    carried: StepTotals = StepTotals()  # was in a snapshot, but is not merged
    unsent: StepTotals = StepTotals()


class TrainerState(BaseModel):
    """``trainer.json``: where the island stands besides its tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    fragments: tuple[FragmentState, ...] = Field(min_length=1)
    round_step: int = Field(ge=0)
    step: int = Field(ge=0)
    tokens: int = Field(ge=0)
    # in the learning rate's schedule, the step or beyond; 0: by a version that did not say
    position: int = Field(default=0, ge=0)
    rewarm_from: int | None
    optimizer_steps: int = Field(ge=0)  # 0: there are no moments
    without: tuple[str, ...] = ()  # parameters that have none, where the others have
    # the optimizer of each parameter with moments; empty: by a version that did not say
    kinds: dict[str, str] = {}
    # steps that a parameter's moments have seen, if fewer: its optimizer moves less often
    fewer: dict[str, int] = {}
    # what the optimizer keeps of a parameter beside moments and the count of steps
    numbers: dict[str, dict[str, Number]] = {}
    unkept: str = ""  # what of the optimizer's state is not here, in words
    # those to come, where batches are numbered (node/trainer/numbers.py)
    batches: tuple[NonNegativeInt, ...] = Field(default=(), max_length=2 * MOST)
    # of a script's model: names and shapes, in the order of the flat layout
    parameters: tuple[tuple[str, tuple[NonNegativeInt, ...]], ...] = ()
