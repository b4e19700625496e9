"""What a checkpoint takes over from the one before it, where no trainer is there to be asked.

A script that was killed, or a trainer that has died, has taken θ and moments with it. Work that
is neither merged nor in a checkpoint is lost, but moments of some rounds ago are better than none.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from node.checkpoint import CheckpointStore, Facts, verify
from node.trainer.resume import FOLDER, MOMENTS, STATE, Standing


def has_trained(checkpoint: Path, folder: str = FOLDER) -> bool:
    """Whether a trainer's files are in it; ``folder``: :data:`MOMENTS` for those of before."""
    return (checkpoint / folder / STATE).exists()


def take_over(store: CheckpointStore, facts: Facts, rounds: tuple[int, ...], draft: Path) -> None:
    """Put the trainer's files of the newest checkpoint into ``draft``, which is to have none.

    As they are, where that is of the same outer state (``rounds``: of its fragments), else for
    their moments. By hard links, where the disk has such. There is nothing to do where the newest
    checkpoint is damaged, of another run, or without any. Raises OSError.
    """
    for path in store.paths()[:1]:
        with suppress(ValueError):
            was = verify(path)
            found = next((name for name in (FOLDER, MOMENTS) if has_trained(path, name)), None)
            if was.run != facts.run or found is None:
                return
            standing = Standing.model_validate_json((path / found / STATE).read_bytes())
            at = tuple(share.round for share in standing.fragments)
            same = facts.state and (was.head, was.state, at) == (facts.head, facts.state, rounds)
            folder = FOLDER if same and found == FOLDER else MOMENTS
            shutil.copytree(path / found, draft / folder, copy_function=_link)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
