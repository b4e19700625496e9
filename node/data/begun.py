"""What a token folder notes while it is made, and whether it goes on with the inputs at hand.

Settings and the inputs that are used up have to be what they were. Of the input in which the work
stopped the texts have to be, as far as they were read: a record further on may have been mended.
What is behind it may be anything. So the result is that of one call with the inputs at hand.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from pydantic import BaseModel, ConfigDict

from node.data.documents import Input, read
from node.data.folder import HELD_OUT, INDEX, PARTIAL, Shard, ends
from node.data.streamed import is_stream
from node.data.tokenizer import FileTokenizer, Tokenizer
from node.errors import operator_error
from node.headway import Tell, counted
from protocols.errors import OperatorError
from protocols.files import DRAFT

BEGUN = (HELD_OUT, ends(HELD_OUT))  # there, and empty, before anything is noted


@dataclass(frozen=True)
class Job:
    """What a call of ``node data prepare`` is to do."""

    inputs: Sequence[Input]
    tokenizer: Tokenizer
    field: str  # with the text
    shard_tokens: int

    @property
    def settings(self) -> str:
        """A digest of what shapes the tokens, but for the inputs."""
        return self._digest([])

    @property
    def earlier(self) -> str:
        """What versions noted that had one digest of all: these settings, all of these inputs."""
        return self._digest(self.inputs)

    def used_up(self, count: int) -> str:
        """A digest of the first inputs."""
        return _sha256(_said(self.inputs[:count]))

    def input(self, number: int) -> str:
        """A digest of which input this is, and when it last changed; empty behind the last."""
        return _sha256(_said(self.inputs[number : number + 1])) if self.inputs[number:] else ""

    def _digest(self, inputs: Sequence[Input]) -> str:
        said = [_said(inputs), self.tokenizer.digest, self.field, self.shard_tokens]
        # else as by versions that did not note it, so that what they began can be finished
        coder = self.tokenizer
        if isinstance(coder, FileTokenizer) and coder.document_end != coder.earlier_end:
            said.append(coder.document_end)
        if isinstance(coder, FileTokenizer) and coder.spells_end:  # versions before left it in
            said.append("taken out")
        return _sha256(said)


class Place(BaseModel):
    """What ``.partial.json`` notes: files that are complete, and where the rest begins."""

    model_config = ConfigDict(extra="forbid")
    job: str  # see :attr:`Job.settings`; of earlier versions :attr:`Job.earlier`
    shards: list[Shard] = []
    source: int = 0  # the input to go on with
    records: int = 0  # of it, to be passed over
    held_out_tokens: int = 0
    held_out_documents: int = 0
    used_up: str = ""  # a digest of the inputs before that one
    input: str = ""  # of that one; empty behind the last
    # of its texts among those records, see :func:`chained`; None: an earlier version read them
    texts: str | None = ""
    next: str = ""  # of the text behind them: the last file is closed since it did not fit there


def digest_of(text: bytes) -> str:
    """See :attr:`Place.next`."""
    return blake3(text).hexdigest()


def chained(texts: str | None, text: bytes) -> str | None:
    """The digest of some texts and one more; None where it is not known of some."""
    return None if texts is None else digest_of((texts + digest_of(text)).encode())


def is_begun(out: Path) -> bool:
    """Whether a file of tokens is whole in a folder that is not."""
    with contextlib.suppress(OSError, ValueError):
        return bool(Place.model_validate_json((out / PARTIAL).read_bytes()).shards)
    return False


def begin(out: Path, job: Job, tell: Tell) -> Place:
    """Where to go on in ``out``; E603 where it belongs to something else.

    Raises E601 where an input cannot be read that was before.
    """
    partial = out / PARTIAL
    if partial.is_file():
        with contextlib.suppress(ValueError):
            place = Place.model_validate_json(partial.read_bytes())
            if place.job == job.earlier:
                place.job, place.texts = job.settings, None
                place.used_up, place.input = job.used_up(place.source), job.input(place.source)
                return place
            if not place.shards:  # no whole file is lost: a mistake, as in --field, shows
                return Place(job=job.settings)  # before there is one
            if place.job == job.settings:
                _check_inputs(out, job, place, tell)
                return place
        raise _of_other_data(out, "it was begun with other inputs or other settings")
    # drafts are of one that was killed before it had noted anything
    there = [file for file in out.iterdir() if not file.name.startswith(DRAFT)]
    if any(file.name not in BEGUN or file.stat().st_size for file in there):
        raise operator_error(
            "E603",
            f"{out} is not empty",
            why=f"it has a {INDEX}" if (out / INDEX).exists() else "it holds other files",
            fix="name another folder with --out",
        )
    return Place(job=job.settings)


def _check_inputs(out: Path, job: Job, place: Place, tell: Tell) -> None:
    """E603 where what was read of the inputs is not what they have now."""
    count = place.source
    if place.used_up != job.used_up(count):
        raise _of_other_data(
            out, f"it has all of its first {counted(count, 'input')}, not all of which are as then"
        )
    if place.input == job.input(count):
        return
    if not place.input or not job.inputs[count:]:  # where its files end may follow from that
        more = "more" if place.input else "fewer"
        raise _of_other_data(out, f"it was begun with {more} inputs")
    source = job.inputs[count]
    if not is_stream(source.name):
        tell(f"{source.name} changed: compares it with what was read of it")
        if _begins_alike(source, job.field, place):
            return
    raise _of_other_data(out, f"{source.name} changed in what was read of it already")


def _begins_alike(source: Input, field: str, place: Place) -> bool:
    """Whether an input has the texts that were read of it."""
    texts: str | None = ""
    for document in read(source, field):
        if document.records > place.records:
            return (place.texts, place.next) == (texts, digest_of(document.text))
        texts = chained(texts, document.text)
    return False


def _of_other_data(out: Path, why: str) -> OperatorError:
    return operator_error(
        "E603",
        f"{out} has the beginning of other data",
        why=why,
        fix="give the inputs and settings that it was begun with, which may be changed behind what "
        "was read of them; or remove the folder, or name another one with --out",
    )


def _said(inputs: Sequence[Input]) -> list[list[str | int]]:
    return [[one.name, one.size, one.changed] for one in inputs]


def _sha256(said: object) -> str:
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()
