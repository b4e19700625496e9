"""Text into a token folder: ``node data prepare``.

One document is held in memory at a time, apart from a batch that is being tokenized. After every
file of tokens what has been done is noted, and a later call goes on from there
(:mod:`node.data.begun`); the result has the same bytes as one made without a break.

Documents are told apart for evaluation by their hash (:func:`node.trainer.corpus.is_held_out`), so
that no island trains on what another one evaluates.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from node.data.batches import batches
from node.data.begun import BEGUN, Job, Place, begin, chained, digest_of
from node.data.documents import Document, find_inputs, read
from node.data.folder import HELD_OUT, INDEX, PARTIAL, Index, Shard, ends
from node.data.intact import file_sha256
from node.data.tokenizer import FILE, FileTokenizer, Ids, Tokenizer, tell_of_gaps
from node.errors import cannot_write, operator_error
from node.headway import Tell
from node.trainer.data import token_type
from protocols.files import READABLE, replacing

DEFAULT_SHARD_TOKENS = 50_000_000
HELD_OUT_TOKENS = 20_000_000  # kept for evaluation; held-out documents beyond are left out


@dataclass(frozen=True)
class PrepareProgress:
    """How far the work is."""

    done: int  # bytes of the inputs
    total: int  # 0 where nobody knows
    tokens: int
    documents: int


Report = Callable[[PrepareProgress], None]


@dataclass(frozen=True)
class _Stand:
    """Where reading stands before a document."""

    source: int  # the input it is of
    records: int = 0  # of that, before it
    texts: str | None = ""  # of those, a digest: see :func:`node.data.begun.chained`


def prepare(
    places: list[str],
    out: Path,
    tokenizer: Tokenizer,
    *,
    field: str = "text",
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    report: Report = lambda progress: None,
    tell: Tell = lambda line: None,
) -> Index:
    """Write a token folder at ``out``, or finish one that was begun (:mod:`node.data.begun`).

    ``tell`` gets what is left out, as a line for people. Raises OperatorError E601 for inputs that
    cannot be read, E603 for a folder that has something else in it, E402 when the disk is full,
    E605 for a library that is missing.
    """
    job = Job(find_inputs(places, tell), tokenizer, field, shard_tokens)
    tell_of_gaps(tokenizer, tell)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with _alone(out):
            return _Writer(out, job, begin(out, job, tell), report).run()
    except OSError as error:
        raise cannot_write(
            f"cannot write tokens to {out}",
            error,
            fix="name a folder that this user may write with --out",
            full_fix="free some disk space and give the same command again: it goes on where it "
            "was",
            otherwise="E603",
        ) from error


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """E603 while another process writes there. The folder itself is locked: no file stays in it."""
    handle = os.open(out, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system that has no locks for folders, as NFS
            _lock(handle, out)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, out: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise operator_error(
            "E603",
            f"{out} is being written",
            why="another `node data prepare` works there",
            fix="wait for it, or name another folder with --out",
        ) from error


class _Writer:
    """Writes one folder."""

    def __init__(self, out: Path, job: Job, place: Place, report: Report) -> None:
        self.out, self.job, self.place, self.report = out, job, place, report
        self.inputs, self.tokenizer = job.inputs, job.tokenizer
        self.kind = token_type(self.tokenizer.vocab_size)
        self.total = 0 if any(not i.size for i in self.inputs) else sum(i.size for i in self.inputs)
        self.tokens = sum(shard.tokens for shard in place.shards)
        self.documents = sum(shard.documents for shard in place.shards)

    def run(self) -> Index:
        self._drop_unfinished()
        self._note()
        with _File(self.out, HELD_OUT, "r+b") as held_out:
            held_out.count(self.place.held_out_tokens, self.place.held_out_documents)
            self._write_shards(held_out)
            held = held_out.finish()
        index = Index(
            tokenizer=self.tokenizer.digest,
            vocab_size=self.tokenizer.vocab_size,
            document_end=self.tokenizer.document_end,
            dtype=self.kind.name,
            shards=tuple(self.place.shards),
            held_out=held,
        )
        if not index.tokens:
            for name in (*BEGUN, PARTIAL):
                (self.out / name).unlink()
            with contextlib.suppress(OSError):  # it is mounted, linked, or the working directory
                self.out.rmdir()
            raise operator_error(
                "E601",
                "the inputs have no text",
                why=f"{len(self.inputs)} were read and no document to train on is in them",
            )
        if isinstance(self.tokenizer, FileTokenizer):
            (self.out / FILE).write_bytes(self.tokenizer.data)
        _replace(self.out / INDEX, index.model_dump_json(indent=1).encode())
        (self.out / PARTIAL).unlink()
        return index

    def _write_shards(self, held_out: _File) -> None:
        from node.trainer.corpus import is_held_out

        shard: _File | None = None
        try:
            for stand, document, ids in self._encoded():
                size = len(ids) + 1
                if is_held_out(document.text):
                    if held_out.tokens + size <= HELD_OUT_TOKENS or not held_out.documents:
                        held_out.add(self._with_end(ids))
                    continue
                if shard is not None and shard.tokens + size > self.job.shard_tokens:
                    self._complete(shard, held_out, stand, digest_of(document.text))
                    shard = None
                if shard is None:
                    shard = _File(self.out, f"train-{len(self.place.shards):05d}.bin", "w+b")
                shard.add(self._with_end(ids))
                self.tokens += size
                self.documents += 1
            if shard is not None:
                self._complete(shard, held_out, _Stand(len(self.inputs)))
        finally:
            if shard is not None:
                shard.close()

    def _with_end(self, ids: Ids) -> Ids:
        return np.append(ids, self.tokenizer.document_end).astype(self.kind)

    def _encoded(self) -> Iterator[tuple[_Stand, Document, Ids]]:
        """Documents, each with where it stands."""
        place = self.place
        stand = _Stand(place.source, place.records, place.texts)
        behind = sum(source.size for source in self.inputs[: stand.source])
        for number in range(stand.source, len(self.inputs)):
            source = self.inputs[number]
            documents = read(source, self.job.field, stand.records)
            for batch in batches(documents, lambda one: len(one.text)):
                coded = self.tokenizer.encode([document.text for document in batch])
                for document, ids in zip(batch, coded, strict=True):
                    yield stand, document, ids
                    texts = chained(stand.texts, document.text)
                    stand = _Stand(number, document.records, texts)
                self.report(
                    PrepareProgress(
                        behind + batch[-1].done, self.total, self.tokens, self.documents
                    )
                )
            behind += source.size
            stand = _Stand(number + 1)
        self.report(PrepareProgress(behind, self.total, self.tokens, self.documents))

    def _complete(self, shard: _File, held_out: _File, stand: _Stand, next: str = "") -> None:
        """A file of tokens is whole: note it, and where the next one begins.

        ``next``: a digest of the text that it begins with.
        """
        place, job = self.place, self.job
        place.shards.append(shard.finish())
        shard.close()
        held_out.flush()
        place.source, place.records, place.texts = stand.source, stand.records, stand.texts
        place.used_up, place.input = job.used_up(stand.source), job.input(stand.source)
        place.next = next
        place.held_out_tokens, place.held_out_documents = held_out.tokens, held_out.documents
        self._note()

    def _note(self) -> None:
        _replace(self.out / PARTIAL, self.place.model_dump_json().encode())

    def _drop_unfinished(self) -> None:
        """Take back what was written after the last note; E603 where less than that is there."""
        place = self.place
        whole: dict[str, int] = {}
        for shard in place.shards:
            whole |= self._sizes(shard.name, shard.tokens, shard.documents)
        held_out = self._sizes(HELD_OUT, place.held_out_tokens, place.held_out_documents)
        for name, size in (whole | held_out).items():
            self._check_size(self.out / name, size)
        for file in self.out.glob("train-*"):
            if file.name not in whole:
                file.unlink()
        for name, size in held_out.items():
            with (self.out / name).open("ab") as kept:
                kept.truncate(size)

    def _sizes(self, name: str, tokens: int, documents: int) -> dict[str, int]:
        """Bytes of a file of tokens, and of the one beside it."""
        return {name: tokens * self.kind.itemsize, ends(name): documents * 8}

    def _check_size(self, file: Path, noted: int) -> None:
        """E603 where a file has lost something: it would be filled with zeros, or named in vain."""
        found = file.stat().st_size if file.exists() else None
        if (found or 0) < noted:
            why = "is missing" if found is None else f"has {found:,} bytes instead of {noted:,}"
            raise operator_error(
                "E603",
                f"{self.out} cannot be finished",
                why=f"{file.name} {why}",
                fix="put that file back; or remove the folder, and give the same command again",
            )


class _File:
    """A file of tokens that is being written, and the one beside it with its documents' ends."""

    def __init__(self, folder: Path, name: str, mode: str) -> None:
        self.name, self.folder = name, folder
        self.tokens = self.documents = 0
        self._files: list[BinaryIO] = []
        for part in (name, ends(name)):
            file = (folder / part).open(mode)
            file.seek(0, os.SEEK_END)
            self._files.append(file)  # type: ignore[arg-type]

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def count(self, tokens: int, documents: int) -> None:
        """What it already has."""
        self.tokens, self.documents = tokens, documents

    def add(self, ids: Ids) -> None:
        """Append a document's tokens, in the width that they are to have."""
        body, marks = self._files
        body.write(ids.tobytes())
        self.documents += 1
        self.tokens += len(ids)
        marks.write(self.tokens.to_bytes(8, "little"))

    def flush(self) -> None:
        """To the disk."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> Shard:
        """What it is, once nothing more comes."""
        self.flush()
        body, marks = (file_sha256(self.folder / part) for part in (self.name, ends(self.name)))
        return Shard(
            name=self.name,
            tokens=self.tokens,
            documents=self.documents,
            sha256=body,
            ends_sha256=marks,
        )

    def close(self) -> None:
        """Without effect the second time."""
        for file in self._files:
            file.close()


def _replace(path: Path, data: bytes) -> None:
    with replacing(path, mode=READABLE) as file:
        file.write(data)
