"""Training from a data set that is streamed: who reads which of its texts.

A stream cannot be permuted as a whole, so here a round has a stretch of it. Round r's stretch
begins where that of round r - 1 ends. Its texts are dealt in order into ``data.islands`` parts,
each to the part that has the fewest bytes so far, until every part has enough for the inner steps
that a round is to take; the texts that are held out for evaluation are passed over. The island in
slot s of S has part s. It makes tokens of that part alone, in a file, and reads the file's windows
in the order that a sampler of its own gives them (:mod:`node.trainer.sampler`). So

- no text is read by two islands in one pass over the data set, nor in two rounds,
- who read what follows from the stream's order, the round and the slot: anybody can read up to
  there and deal again; nothing is kept but the parts of two rounds, and the next one, made ahead,
- a resumed island finds its place by a mark: examples so far, and the library's own state.

Where batches are numbered through the run (:mod:`node.trainer.numbers`) a stretch is one part, of a
quarter of a round's inner steps, and batch n of that many steps lies in part n // steps. An island
makes those parts alone of which it reads batches, and passes over the others.

Only bytes are counted to tell where a stretch ends, so the parts of others cost reading, not
tokenizing. Islands beyond ``data.islands`` share parts, taking turns at its windows. An island
that trains for longer in a round than planned reads its part again, in another order.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import math
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from bootstrap.manifest import Manifest
from node.data.cached_file import cache_folder, intact, replacing, write
from node.data.marks import Marks
from node.data.patience import Patience
from node.data.streamed import DataSet, Reader
from node.data.tokenizer import BYTES, FileTokenizer, Tokenizer, tokenizer_of
from node.errors import operator_error, reason
from node.headway import Progress
from node.trainer.corpus import MORE_TEXT, is_held_out, spread
from node.trainer.data import gather, targets, token_type
from node.trainer.numbers import following
from node.trainer.sampler import Sampler
from protocols.errors import OperatorError

SUFFIX = ".stream.json"
HEAD = 512  # texts, from which follows how many bytes a token has
MARGIN = 17 / 16  # for texts further on that have more bytes a token
EVALUATION_TEXTS = 100_000  # looked through, at most, for those that are held out
QUARTER = 4  # parts of a round's steps, where batches are numbered: some are cut between islands
AT_ONCE = 256  # documents tokenized in one call
LOOK_S = 0.1  # between looks for a part that another process is to make
SIGN, SIGN_S = ".reading", 1.0  # a file that is touched so often while somebody reads
IDLE_S = 10.0  # seconds to wait for a maker before making it: ranks of an island ask at one time


class Recipe(BaseModel):
    """What ranks need to train from a stream: a file beside the cached corpora."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    format: Literal[1] = 1
    place: str  # datasets:…
    tokenizer: str  # its name in the manifest
    tokenizer_file: str = ""
    # of a tokenizer from a file; None: its ``earlier_end``, as in recipes of earlier versions, so
    # that a run of theirs keeps its parts and its place
    document_end: int | None = Field(default=None, ge=0)
    parts: int = Field(ge=1)  # of a stretch
    part_bytes: int = Field(ge=1)  # the least text that a part has
    # batches of a part, where these are numbered; None: a part is a round's
    part_steps: int | None = Field(default=None, ge=1)

    @property
    def digest(self) -> str:
        """Hex; equal where the parts are equal, if the data set is."""
        said = self.model_dump_json(exclude={"tokenizer_file"}, exclude_none=True)
        return blake3(said.encode()).hexdigest()

    def coder(self, end: int | None = None) -> Tokenizer:
        """``end`` is the run's document end. Raises OperatorError E604, E605, and OSError."""
        data = Path(self.tokenizer_file).read_bytes() if self.tokenizer_file else b""
        return tokenizer_of(
            self.tokenizer, data, end if self.document_end is None else self.document_end
        )


def is_recipe(place: str) -> bool:
    """Whether a place is a file that :func:`recipe_for` made."""
    return place.endswith(SUFFIX)


def read_recipe(place: str) -> Recipe:
    """Raises ValueError for another file, and OSError."""
    try:
        return Recipe.model_validate_json(Path(place).read_bytes())
    except ValidationError as error:
        raise ValueError(f"{place} is no recipe of a stream") from error


def recipe_for(manifest: Manifest, tokenizer: Tokenizer, place: str, progress: Progress) -> str:
    """The path of a recipe to stream ``place`` in this run, after a look at its beginning.

    Raises OperatorError E601 (it cannot be read), E402 (nor the recipe written), E605.
    """
    try:
        source = DataSet.parse(place)
    except ValueError as error:
        raise operator_error("E601", f"cannot stream {place}", why=str(error)) from error
    data, rounds = manifest.data, manifest.rounds
    steps, parts, part_steps = rounds.inner_steps + rounds.overlap_steps, data.islands, None
    if manifest.numbered:
        steps = part_steps = -(-steps // QUARTER)
        parts = 1
    # the sampler leaves a sequence for its offset, and a window has one token more than it
    wanted = (steps * data.batch_size + 1) * data.seq_len + 1
    if tokenizer.digest != BYTES:
        wanted = int(wanted * _bytes_a_token(source, tokenizer, progress) * MARGIN)
    else:
        next(Reader(source))  # it can be read, and has the column
    known, end = "", None
    if isinstance(tokenizer, FileTokenizer):
        if tokenizer.document_end != tokenizer.earlier_end:
            end = tokenizer.document_end
        known = str(_keep(f"tokenizer-{tokenizer.digest[:16]}.json", tokenizer.data))
    recipe = Recipe(
        place=str(source),
        tokenizer=tokenizer.digest,
        tokenizer_file=known,
        document_end=end,
        parts=parts,
        part_bytes=wanted,
        part_steps=part_steps,
    )
    name = f"{recipe.digest[:16]}{SUFFIX}"
    return str(_keep(name, recipe.model_dump_json(indent=1).encode()))


def evaluation_shard(manifest: Manifest, tokenizer: Tokenizer, place: str, done: Progress) -> bytes:
    """Windows out of the first texts that are held out; as :meth:`Corpus.make_shard` else.

    Raises OperatorError E601 where too few are found in ``EVALUATION_TEXTS``, or in one pass.
    """
    seq_len, kind = manifest.data.seq_len, token_type(manifest.model.vocab_size)
    enough = manifest.evaluation.sequences * (seq_len + 1)
    reader, found, count = Reader(DataSet.parse(place)), [], 0
    for number, text in enumerate(reader):
        if count >= enough or reader.passes or number >= EVALUATION_TEXTS:
            break
        done(number, 0)
        if is_held_out(text):
            found.append(_ended(tokenizer.encode([text])[0], tokenizer, kind))
            count += len(found[-1])
    joined = b"".join(ids.tobytes() for ids in found)
    shard = spread(joined, kind.itemsize, manifest.evaluation.sequences, seq_len)
    if not shard:
        raise operator_error(
            "E601",
            f"{place} is too small to evaluate with",
            why=f"{count} tokens were found for it, and one sequence needs {seq_len + 1}",
            fix=MORE_TEXT,
        )
    return shard


def _bytes_a_token(source: DataSet, tokenizer: Tokenizer, progress: Progress) -> float:
    """Mean over the first texts, document ends counted; the same number on every island."""
    reader, texts = Reader(source), []
    for number, text in enumerate(itertools.islice(reader, HEAD)):
        if reader.passes:
            break
        progress(number, HEAD)
        texts.append(text)
    tokens = sum(len(ids) + 1 for ids in tokenizer.encode(texts))
    return sum(len(text) + 1 for text in texts) / tokens


def _keep(name: str, data: bytes) -> Path:
    """A file in the user's cache folder, written whole."""
    path = cache_folder() / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(data)
    except OSError as error:
        raise operator_error("E402", f"cannot write {path}", why=reason(error)) from error
    return path


def _ended(ids: npt.NDArray[Any], tokenizer: Tokenizer, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.append(ids, tokenizer.document_end).astype(kind)


def trained_on(reader: Reader) -> Iterator[bytes]:
    """Its texts that are not held out; raises OperatorError E601 where a whole pass has none."""
    last = reader.passes
    for text in reader:
        if not is_held_out(text):
            last = reader.passes
            yield text
        elif reader.passes > last + 1:
            raise operator_error(
                "E601",
                "the data set has nothing to train on",
                why="all of its texts are held out for evaluation, as one in twenty is",
                fix=MORE_TEXT,
            )


def deal(texts: Iterator[bytes], parts: int, part_bytes: int) -> Iterator[tuple[int, bytes]]:
    """One stretch: texts with the part that each is dealt to, until all parts have enough.

    An ended document counts for one byte more than its text.
    """
    filled = [(0, part) for part in range(parts)]
    while filled[0][0] < part_bytes:
        text = next(texts)
        size, part = filled[0]
        heapq.heapreplace(filled, (size + len(text) + 1, part))
        yield part, text


class Parts:
    """The parts of a stream as files of tokens. For several threads and processes at once.

    One process makes part s of every round, as long as it lives, and the others wait for it: only
    its reader stands where the next stretch begins. Another's would have to go there from a mark,
    which lies in the middle of a file, and the library reads a file from its beginning.
    """

    def __init__(
        self, recipe: Recipe, kind: np.dtype[Any], directory: Path, end: int | None = None
    ) -> None:
        """``directory``: where files may be kept, of this stream and others; ``end``: see coder."""
        self._recipe, self._kind = recipe, kind
        self._coder = recipe.coder(end)
        self._source = DataSet.parse(recipe.place)
        self._directory = directory / f"stream-{recipe.digest[:16]}"
        self._marks = Marks(self._directory / "marks")  # of stretches that were begun
        self._reader: tuple[int, Reader] | None = None  # the round whose stretch it is at
        self._making: int | None = None  # the part that this process makes in every round
        self._give_up: weakref.finalize[..., Any] | None = None  # ends that; so does gc
        self._lock = threading.Lock()
        self._looked = False  # whether the parts of before are intact
        self._signed = -math.inf  # when the last sign of reading was left
        self.made = 0  # by this process

    def get(self, round: int, part: int) -> npt.NDArray[np.integer[Any]]:
        """Tokens of a part, mapped; made if they are not there.

        Raises OperatorError E601 for a data set that cannot be read, after minutes of retries if it
        may pass, and E402 for a full disk.
        """
        patience = Patience()
        while True:
            try:
                return self._got(round, part)
            except OperatorError as error:  # no lock is held: others may try meanwhile
                if error.code != "E601" or not patience.wait(error):
                    raise

    def _got(self, round: int, part: int) -> npt.NDArray[np.integer[Any]]:
        path = self._directory / f"part-{round}-{part}.bin"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            idle_s = 0.0
            with self._lock:
                while True:
                    with self._alone():  # waits for any other that is making a part
                        self._look_over()
                        there = path.is_file()
                        if not there and (self._makes(part) or idle_s >= IDLE_S):
                            self._make(round, part, path)
                            there = True
                        if there:
                            return np.memmap(path, dtype=self._kind, mode="r")
                    time.sleep(LOOK_S)
                    idle_s += LOOK_S
        except OSError as error:
            raise operator_error(
                "E402", f"no room for training data in {self._directory}", why=reason(error)
            ) from error

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with (self._directory / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released by closing
            yield

    def _makes(self, part: int) -> bool:
        """Whether this process makes this part of every round: it does if no other does."""
        if self._making == part:
            return True
        lock = os.open(self._directory / f".maker-{part}", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if isinstance(error, BlockingIOError):
                return False
            raise
        if self._give_up is not None:  # the island has another slot by now
            self._give_up()
        self._making, self._give_up = part, weakref.finalize(self, os.close, lock)
        return True

    def _look_over(self) -> None:
        """Remove parts that are not what was written, once: this machine may have lost its power.

        Parts made from now on need no such look.
        """
        if not self._looked:
            for path in self._directory.glob("part-*.bin"):
                if intact(path) is None:
                    path.unlink()
        self._looked = True

    def _make(self, round: int, part: int, path: Path) -> None:
        at, reader = self._reader or (-1, None)
        known, mark = self._marks.nearest(round)
        if reader is None or at > round or at < known:
            at, reader = known, Reader(self._source, mark, self._sign)
        self._reader = None  # until it stands at the beginning of a stretch again
        while at < round:
            for _ in self._stretch(reader):
                pass
            at += 1
            self._marks.note(at, reader.mark)
        own = (text for dealt, text in self._stretch(reader) if dealt == part)
        write(path, self._coded(own))
        self._marks.note(at + 1, reader.mark)
        self._reader = at + 1, reader
        self.made += 1
        there = [(int(old.name.split("-")[1]), old) for old in self._directory.glob("part-*")]
        before = max((number for number, _ in there if number < round), default=0)
        for number, old in there:  # the round before may still be read
            if number < before:
                old.unlink(missing_ok=True)

    def _stretch(self, reader: Reader) -> Iterator[tuple[int, bytes]]:
        return deal(trained_on(reader), self._recipe.parts, self._recipe.part_bytes)

    def _sign(self) -> None:
        if (now := time.monotonic()) >= self._signed + SIGN_S:
            self._signed = now
            (self._directory / SIGN).touch()

    @property
    def headway(self) -> int:
        """Another number whenever a process of this machine has read, or passed, more examples."""
        try:
            return (self._directory / SIGN).stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def _coded(self, texts: Iterator[bytes]) -> Iterator[bytes]:
        while batch := list(itertools.islice(texts, AT_ONCE)):
            for ids in self._coder.encode(batch):
                yield _ended(ids, self._coder, self._kind).tobytes()


class StreamData:
    """Batches from a stream; reads as :class:`node.trainer.data.TrainingData` does.

    While one round is trained on, a thread makes this island's part of the next one.
    """

    def __init__(self, recipe: Recipe, manifest: Manifest, cache: Path) -> None:
        """Raises OperatorError E604, E605, and OSError."""
        self._data, self._count = manifest.data, recipe.parts
        apart, end = manifest.model.attention == "document", manifest.model.document_end
        self._document_end = end if apart else None
        self.parts = Parts(recipe, token_type(manifest.model.vocab_size), cache, end)
        self._steps = recipe.part_steps  # of a part of numbered batches
        self._open: tuple[tuple[int, int], npt.NDArray[Any], Sampler] | None = None
        self._stretches: tuple[int, ...] = ()
        self._following: int | None = None  # the part that is made ahead

    @property
    def numbered(self) -> bool:
        """False as well for a stream that was begun by a version that dealt it out by rounds."""
        return self._steps is not None

    @property
    def headway(self) -> int:
        """See :class:`node.trainer.data.Batches`."""
        return self.parts.headway

    def expect(self, stretches: tuple[int, ...]) -> None:
        """Note the batches that come next, and have the part after the open one made."""
        self._stretches = stretches
        self._look_ahead()

    def batch(
        self, round: int, slot: int, slots: int, step: int, rows: range | None = None
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [rows, seq_len] each; see :meth:`TrainingData.batch`."""
        if not 0 <= slot < slots:
            raise ValueError(f"no such place: slot {slot} of {slots}")
        if self._steps is not None:
            round, step = divmod(step, self._steps)
        part, turn = slot % self._count, slot // self._count
        sharing = len(range(part, slots, self._count))
        tokens, sampler = self._part(round, part)
        starts = sampler.starts(round, turn, sharing, step, rows)
        window = gather(tokens, starts, sampler.seq_len + 1)
        return window[:, :-1], targets(window, self._document_end)

    def _part(self, round: int, part: int) -> tuple[npt.NDArray[Any], Sampler]:
        if self._open is None or self._open[0] != (round, part):
            tokens = self.parts.get(round, part)
            data = self._data
            sampler = Sampler(len(tokens), data.seq_len, data.batch_size, data.seed)
            self._open = (round, part), tokens, sampler
            self._look_ahead()
        return self._open[1], self._open[2]

    def _look_ahead(self) -> None:
        """Make the part that follows the open one in a thread, once it is known which that is."""
        if self._open is None:
            return
        round, part = self._open[0]
        next_round: int | None = round + 1
        if self._steps is not None:
            number = following(self._stretches, (round + 1) * self._steps)
            next_round = None if number is None else number // self._steps
        if next_round is not None and next_round != self._following:
            self._following = next_round
            threading.Thread(
                target=self._ahead, args=(next_round, part), name="stream-ahead", daemon=True
            ).start()

    def _ahead(self, round: int, part: int) -> None:
        # the read that needs the part tries again, and says what is wrong
        with contextlib.suppress(OperatorError):
            self.parts.get(round, part)
