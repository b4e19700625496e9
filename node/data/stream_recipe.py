"""What is made of a stream before it is trained on: the recipe of its parts, an evaluation shard.

How the parts come about is in :mod:`node.data.live`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bootstrap.manifest import Manifest
from node.data.batches import batches
from node.data.cached_file import CACHE_FIX, cache_folder
from node.data.streamed import DataSet, Reader
from node.data.tokenizer import BYTES, FileTokenizer, Tokenizer, tokenizer_of
from node.errors import cannot_write, operator_error
from node.headway import OnProgress
from node.trainer.corpus import MORE_TEXT, is_held_out, spread
from node.trainer.data import token_type
from protocols.files import replacing

SUFFIX = ".stream.json"
HEAD = 512  # texts, from which follows how many bytes a token has
MARGIN = 17 / 16  # for texts further on that have more bytes a token
EVALUATION_TEXTS = 100_000  # looked through, at most, for those that are held out
QUARTER = 4  # parts of a round's steps, where batches are numbered: some are cut between islands


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

    def coder(self, end: int | None) -> Tokenizer:
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


def recipe_for(manifest: Manifest, tokenizer: Tokenizer, place: str, progress: OnProgress) -> str:
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


def evaluation_shard(
    manifest: Manifest, tokenizer: Tokenizer, place: str, done: OnProgress
) -> bytes:
    """Windows out of the first texts that are held out; as :meth:`Corpus.make_shard` else.

    Raises OperatorError E601 where too few are found in ``EVALUATION_TEXTS``, or in one pass, and
    E204 where it is larger than others take.
    """
    seq_len, kind = manifest.data.seq_len, token_type(manifest.model.vocab_size)
    enough = manifest.evaluation.sequences * (seq_len + 1)
    reader, found, count = Reader(DataSet.parse(place)), [], 0
    for number, text in enumerate(reader):
        if count >= enough or reader.passes or number >= EVALUATION_TEXTS:
            break
        done(number, 0)
        if is_held_out(text):
            found.append(with_end(tokenizer.encode([text])[0], tokenizer, kind))
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


def _bytes_a_token(source: DataSet, tokenizer: Tokenizer, progress: OnProgress) -> float:
    """Mean over the first texts, document ends counted; the same number on every island."""
    reader, read, tokens = Reader(source), 0, 0

    def head() -> Iterator[bytes]:
        for number, text in enumerate(itertools.islice(reader, HEAD)):
            if reader.passes:
                return
            progress(number, HEAD)
            yield text

    for batch in batches(head(), len):
        read += sum(len(text) + 1 for text in batch)
        tokens += sum(len(ids) + 1 for ids in tokenizer.encode(batch))
    return read / tokens


def _keep(name: str, data: bytes) -> Path:
    """A file in the user's cache folder, written whole."""
    path = cache_folder() / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(data)
    except OSError as error:
        what = f"cannot write {path}"
        raise cannot_write(what, error, fix=CACHE_FIX, full_fix=CACHE_FIX) from error
    return path


def with_end(ids: npt.NDArray[Any], tokenizer: Tokenizer, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    """A document's tokens [n] and the one that ends it, as ``kind`` [n + 1]."""
    return np.append(ids, tokenizer.document_end).astype(kind)
