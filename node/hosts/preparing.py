"""The training tokens of a host that is not host 0: the same as host 0's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from bootstrap.manifest import Manifest
from bootstrap.manifest_form import READING
from node.data.folder import is_folder
from node.data.patience import Patience
from node.errors import operator_error
from node.hosts.tokens import fingerprint
from node.hosts.wire import Job
from node.reading import NOTE, TokensNote
from protocols.errors import OperatorError


async def prepare(
    job: Job, own_data: str, home: Path, cache: Path, say: Callable[[str], None]
) -> str:
    """Where this host's training tokens are: made of its own data or of host 0's, or kept.

    Host 0 remembers what it has read once (:meth:`node.reading.Reading.tokens`), so a host that
    comes back needs that, also where the text has changed since. ``home`` is where they are noted.
    Raises OperatorError E410 for other tokens than host 0's, and what keeps this host from reading.
    """
    manifest = Manifest.model_validate_json(job.manifest, context=READING)
    place, vocabulary = own_data or job.place, manifest.model.vocab_size
    note, run = home / NOTE, manifest.evaluation.digest  # which is what the tokens are without
    loop = asyncio.get_running_loop()
    wanted = True

    def progress(done: int, total: int) -> None:
        if not wanted:
            raise asyncio.CancelledError

    def damaged(line: str) -> None:
        loop.call_soon_threadsafe(say, line)

    def tokens() -> tuple[str, bytes]:
        from node.data.supply import tokens_for, usable
        from node.trainer.data import unreadable

        with contextlib.suppress(OSError, ValueError, OperatorError):  # unreadable: made anew
            known = TokensNote.of(note, run)
            kept = known.tokens if known.place == place else ""
            whole = kept and not is_folder(kept) and usable(kept, damaged)
            if whole and fingerprint(kept, vocabulary, cache) == job.tokens:
                return kept, job.tokens
        found = tokens_for(manifest, job.shard, job.tokenizer, place, progress, cache=cache)
        try:
            return found, fingerprint(found, vocabulary, cache)
        except OSError as error:
            raise unreadable(found, error) from error

    patience = Patience()  # host 0 could read the data, so it is worth retrying
    try:
        while True:
            try:
                where, shown = await asyncio.to_thread(tokens)
                break
            except OperatorError as error:
                if (pause := patience.pause(error)) is None:
                    raise
                say(f"{error.what}: {error.why}; again in {pause:.0f} s")
                await asyncio.sleep(pause)
    finally:
        wanted = False  # a thread that still reads stops at its next progress call
    if shown != job.tokens:
        raise operator_error(
            "E410",
            "this host has other training tokens than host 0",
            why=f"{where} differs: other text, another Python or another --data",
            fix="give all hosts the same --data: a folder of `node data prepare` on a disk "
            "that all see, a copy of it, or its URL. If the text has changed since host 0 read "
            "it, start host 0 with --resume and --data: all read it anew then",
        )
    with contextlib.suppress(OSError):  # a full disk: it is read again then
        TokensNote(run, where, place).write(note)
    return where
