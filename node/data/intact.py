"""Whether a token folder's files are those that its index names.

Files of a URL are checked as they come (:mod:`node.data.remote`). Those on this machine are hashed
before they are first trained on, and what was found intact is noted in the user's cache folder,
since a large folder takes minutes: a file is hashed again once its size or a time of it changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

from node.data.cached_file import cache_folder
from node.data.folder import Index, ends
from node.data.remote import Folder
from node.errors import operator_error
from node.headway import OnProgress
from protocols.errors import reason
from protocols.files import replacing

Seen = list[str | int]  # of a file found intact: sha256, size, two times in ns


def check(folder: Folder, progress: OnProgress, *, anew: bool = False) -> None:
    """Raise OperatorError E603 for a file that is missing or is not what the index says. Blocks.

    Lengths are compared first, so that what can be told at once is. ``progress`` is of files;
    ``anew``: hash all of them, whatever is noted.
    """
    parts = _parts(folder.index)
    if not folder.remote:
        for name, sha256, size in parts:
            folder.file(name, sha256, size)
    note = _note_of(folder.place)
    known = {} if anew or folder.remote else _read(note)
    intact: dict[str, Seen] = {}
    for done, (name, sha256, size) in enumerate(parts, 1):
        path = folder.file(name, sha256, size)
        status = path.stat()
        seen: Seen = [sha256, size, status.st_mtime_ns, status.st_ctime_ns]
        if known.get(name) != seen and _sha256(folder, path) != sha256:
            raise operator_error(
                "E603",
                f"{name} of {folder.place} is damaged",
                why="its sha256 is not the one in its index",
            )
        intact[name] = seen
        progress(done, len(parts))
    if not folder.remote and intact != known:
        with contextlib.suppress(OSError):  # then it is hashed again the next time
            note.parent.mkdir(parents=True, exist_ok=True)
            with replacing(note) as file:
                file.write(json.dumps(intact).encode())


def _parts(index: Index) -> list[tuple[str, str, int]]:
    """Name, sha256 and bytes of every file beside the index and the tokenizer."""
    found = []
    for shard in (*index.shards, index.held_out):
        found.append((shard.name, shard.sha256, shard.tokens * index.width))
        found.append((ends(shard.name), shard.ends_sha256, shard.documents * 8))
    return found


def _sha256(folder: Folder, path: Path) -> str:
    try:
        return file_sha256(path)
    except OSError as error:
        raise operator_error(
            "E603", f"cannot read {path.name} of {folder.place}", why=reason(error)
        ) from error


def file_sha256(path: Path) -> str:
    """Hex; the file is read once."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _note_of(place: str) -> Path:
    key = hashlib.sha256(os.fsencode(os.path.realpath(place))).hexdigest()[:16]
    return cache_folder() / f"intact-{key}.json"


def _read(note: Path) -> dict[str, Seen]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(note.read_bytes())
        return found if isinstance(found, dict) else {}
    return {}
