"""Where the ranks of one host meet: at a file in memory, which a full disk keeps from nothing.

It grows as long as they run: each further process group begins there.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from node.statedir import RANKS

FILES = Path("/proc/self/fd")  # where Linux has a process's open files, also those without a name


class Rendezvous:
    """For one start of the ranks, each of which has to inherit :attr:`inherited`.

    ``store`` is as :meth:`node.trainer.parallel.Ranks.join` takes it.
    """

    def __init__(self, directory: Path) -> None:
        """Raises OSError. ``directory``: on the disk, for systems without such files."""
        self.inherited: tuple[int, ...] = ()
        self._folder: Path | None = None
        if hasattr(os, "memfd_create") and FILES.is_dir():
            descriptor = os.memfd_create("atoll-ranks", os.MFD_CLOEXEC)
            self.inherited, self.store = (descriptor,), f"file://{FILES}/{descriptor}"
        else:
            self._folder = Path(tempfile.mkdtemp(prefix=RANKS, dir=directory))
            self.store = f"file://{self._folder}/store"

    def close(self) -> None:
        """The ranks are down."""
        for descriptor in self.inherited:
            os.close(descriptor)
        self.inherited = ()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
