"""What a checkpoint takes over from the one before it, where no trainer is there to be asked.

A script that was killed, or a trainer that has died, has taken θ and moments with it. Work that
is neither merged nor in a checkpoint is lost, but moments of some rounds ago are better than none.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from node.checkpoints.index import Facts, Part, files_in, verify
from node.checkpoints.trainer_files import Taken
from node.trainer.trainer_state import FOLDER, MOMENTS, STATE, TrainerState


def has_trained(checkpoint: Path, folder: str = FOLDER) -> bool:
    """Whether a trainer's files are in it; ``folder``: :data:`MOMENTS` for those of before."""
    return (checkpoint / folder / STATE).exists()


def moments_in(checkpoint: Path | None) -> Taken | None:
    """What a trainer that begins at the last merge can take of it; of a damaged one nothing."""
    with suppress(OSError, ValueError):
        if checkpoint is not None and (folder := _folder_in(checkpoint)):
            verify(checkpoint, _within(folder))  # the rest is as long, and not read
            return Taken(checkpoint, 0)
    return None


def take_over(newest: Path | None, facts: Facts, rounds: tuple[int, ...], draft: Path) -> None:
    """Put the trainer's files of the newest checkpoint into ``draft``, which is to have none.

    As they are, where that is of the same outer state (``rounds``: of its fragments), else for
    their moments. By hard links, where the disk has such. There is nothing to do where there is no
    such checkpoint, it is damaged or cannot be read, or has none either. Raises OSError.
    """
    if newest is None:
        return
    try:
        if not (found := _folder_in(newest)):
            return
        was = verify(newest, _within(found))  # as above
        state = TrainerState.model_validate_json((newest / found / STATE).read_bytes())
    except (OSError, ValueError):
        return
    at = tuple(share.round for share in state.fragments)
    same = facts.state and (was.head, was.state, at) == (facts.head, facts.state, rounds)
    folder = FOLDER if same and found == FOLDER else MOMENTS
    for file in files_in(newest / found):  # shutil.copytree loses an error's number
        target = draft / folder / file.relative_to(newest / found)
        target.parent.mkdir(parents=True, exist_ok=True)
        _link(file, target)


def _folder_in(checkpoint: Path) -> str:
    return next((name for name in (FOLDER, MOMENTS) if has_trained(checkpoint, name)), "")


def _within(folder: str) -> Part:
    return lambda name: name.startswith(f"{folder}/")


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
