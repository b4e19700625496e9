"""Data sets of Hugging Face's ``datasets`` as streams: how one is named, and where one stands.

::

    datasets:NAME@SPLIT?config=C&field=F&revision=R&files=PLACE&files=PLACE

NAME is one on the Hub, a folder, or a format of files ("json", "parquet", "text", ...) with
``files``, each a path, a pattern or a URL. The library is an extra (``pip install
'atoll[datasets]'``); no code of a data set's own is run.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from pydantic import BaseModel, ConfigDict, Field

from node.data.tokenizer import need
from node.errors import operator_error
from node.setting_values import is_url
from protocols.errors import OperatorError, kind_and_reason

STREAMED = "datasets:"
DEFAULT_FIELD = "text"
OPTIONS = ("config", "field", "revision", "files")


@dataclass(frozen=True)
class DataSet:
    """A data set as an operator names it."""

    name: str
    split: str = "train"
    config: str = ""
    field: str = ""  # the column with the text
    revision: str = ""  # of a repository on the Hub
    files: tuple[str, ...] = ()

    @classmethod
    def parse(cls, place: str) -> DataSet:
        """From ``datasets:…``; paths that are there become absolute. Raises ValueError.

        With ``files`` a bare NAME is a format, also where a folder is called "json".
        """
        name, _, rest = place.removeprefix(STREAMED).partition("?")
        name, _, split = name.partition("@")
        # not as forms are read: a plus sign in a path is one
        pairs = (one.partition("=") for one in rest.split("&") if one)
        given = [(unquote(key), unquote(value)) for key, _, value in pairs]
        for key, _ in given:
            if key not in OPTIONS:
                raise ValueError(f"{key!r} is not known; {', '.join(OPTIONS)} are")
        if not name:
            raise ValueError(f"it has no name: {STREAMED}NAME@SPLIT")
        one = {key: value for key, value in given if key != "files"}
        files = tuple(_absolute(value) for key, value in given if key == "files")
        if not files or os.sep in name or name.startswith((".", "~")):
            name = _absolute(name)
        return cls(name, split or "train", files=files, **one)

    def __str__(self) -> str:
        """The place that :meth:`parse` takes."""
        given = [(key, getattr(self, key)) for key in OPTIONS[:-1] if getattr(self, key)]
        given += [("files", file) for file in self.files]
        text = "&".join(f"{key}={quote(value, safe='/:*')}" for key, value in given)
        return f"{STREAMED}{self.name}@{self.split}" + (f"?{text}" if text else "")

    def open(self) -> Any:
        """The library's stream from its beginning; raises OperatorError E605, E601."""
        datasets = need("datasets", "datasets", "stream a data set")
        # its own progress bars; the setting is the process's, and nobody else here uses the library
        datasets.disable_progress_bars()
        try:
            return datasets.load_dataset(
                self.name,
                self.config or None,
                data_files=list(self.files) or None,
                split=self.split,
                revision=self.revision or None,
                streaming=True,
            )
        except (
            Exception
        ) as error:  # the library and whatever it reads from have errors of their own
            raise _unreadable(self, error) from error


def is_stream(place: str) -> bool:
    """Whether a place is a data set to be streamed."""
    return place.startswith(STREAMED)


def _absolute(place: str) -> str:
    """A path, or pattern of paths, that is there on this machine: absolute; else as it is."""
    if not is_url(place):
        path = Path(os.path.expanduser(place))
        if path.exists() or glob.glob(str(path), recursive=True):
            return str(path.absolute())
    return place


class Mark(BaseModel):
    """A place in a stream that is read over and over."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    passes: int = Field(0, ge=0)  # times that its end was met
    examples: int = Field(0, ge=0)  # of this pass, before the place
    state: dict[str, Any] | None = None  # the library's own, which is quicker to go on from
    library: str = ""  # version that wrote the state


class Reader:
    """The texts of a data set, in its own order, again and again; :attr:`mark` is where it stands.

    Nothing is shuffled and nothing read ahead of what is handed out, so the number of examples
    before a place says all about it.
    """

    def __init__(
        self, source: DataSet, at: Mark | None = None, moved: Callable[[], None] = lambda: None
    ) -> None:
        """``moved`` is called for each example, also those that are passed over.

        Raises OperatorError E601, E605.
        """
        self._source, self._at, self._moved = source, at or Mark(), moved
        self._field = source.field or DEFAULT_FIELD
        self._found = bool(self._at.examples)  # whether this pass had a text
        self._begin(self._at)

    @property
    def passes(self) -> int:
        """Times that the end was met."""
        return self._at.passes

    @property
    def examples(self) -> int:
        """Of this pass, those read so far, with and without text."""
        return self._at.examples

    @property
    def mark(self) -> Mark:
        """Where it stands: behind the last text that was handed out."""
        if self._ahead:
            return self._at
        state = {"state": self._stream.state_dict(), "library": _version()}
        return self._at.model_copy(update=state)

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        """The next text as UTF-8, never empty.

        Raises OperatorError E601 where the data set cannot be read or has no text at all.
        """
        while True:
            try:
                record = next(self._records)
            except StopIteration:
                if not self._found:
                    raise operator_error(
                        "E601", f"{self._source} has no text", why="a whole pass found none"
                    ) from None
                self._found = False
                self._begin(Mark(passes=self._at.passes + 1))
                continue
            except Exception as error:  # as in DataSet.open
                raise _unreadable(self._source, error) from error
            self._moved()
            if self._ahead:
                self._ahead -= 1
                continue
            self._at = Mark(passes=self._at.passes, examples=self._at.examples + 1)
            text = self._text(record)
            if text:
                self._found = True
                return text

    def _begin(self, at: Mark) -> None:
        self._stream = self._source.open()
        self._at = at
        known = at.state is not None and at.library == _version()
        # examples before the place; the library's skip() would say nothing until all were passed,
        # and its state would count from there
        self._ahead = 0 if known else at.examples
        if known:
            self._stream.load_state_dict(at.state)
        self._records = iter(self._stream)

    def _text(self, record: Any) -> bytes:
        value = record.get(self._field, _MISSING)
        if value is None:
            return b""
        if not isinstance(value, str):
            here = f"its examples have {', '.join(list(record)[:8])}"
            kind = "no" if value is _MISSING else "no text in"
            raise operator_error(
                "E601",
                f"{self._source} has {kind} {self._field!r}",
                why=here,
                fix="name the column that has the text: ?field=NAME",
            )
        return value.replace("\0", "").encode("utf-8", errors="replace")


_MISSING = object()


def _version() -> str:
    return str(need("datasets", "datasets", "stream a data set").__version__)


def with_field(source: DataSet, field: str) -> DataSet:
    """The data set with a column, unless it names one itself."""
    return source if source.field else replace(source, field=field)


def _unreadable(source: DataSet, error: Exception) -> OperatorError:
    if isinstance(error, OperatorError):
        return error
    return operator_error(
        "E601",
        f"cannot stream {source}",
        why=kind_and_reason(error),
        fix="check its name, split and files, and the way to them",
    )
