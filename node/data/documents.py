"""Documents out of files: text, JSON lines, parquet, and data sets of Hugging Face's ``datasets``.

Every input is read in order, so that a position in it is a number, and reading can go on there.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from node.data.plain_text import (
    EMPTY,
    JSON_LINES,
    look_into,
    text_file_documents,
    text_problem,
    told,
    unreadable,
)
from node.data.streamed import STREAMED, DataSet, Mark, Reader, with_field
from node.data.tokenizer import need
from node.errors import operator_error
from node.headway import Tell
from protocols.errors import OperatorError, reason

MAX_RECORD_BYTES = 64 * 1024 * 1024  # a line of JSON; what is longer is no text to train on
PARQUET_BATCH = 1024  # rows
PARQUET = ".parquet"
BY_NAME = (*JSON_LINES, PARQUET)  # what is none of these is text


@dataclass(frozen=True)
class Input:
    """One file or data set to read documents from."""

    name: str  # a path, or datasets:NAME
    size: int  # bytes, 0 where nobody knows
    changed: int = 0  # time of the last change, ns


@dataclass(frozen=True)
class Document:
    """A document as UTF-8, and where its input stands behind it."""

    text: bytes
    records: int  # of the input, read so far: where to go on
    done: int  # bytes of the input, for the progress


def find_inputs(places: list[str], tell: Tell = lambda line: None) -> list[Input]:
    """Files named, those in folders named (sorted), and data sets.

    ``tell`` gets what is left out, as a line for people. Raises OperatorError E601 where there is
    none, or a file cannot be read: a fault that is found late costs work.
    """
    found: list[Input] = []
    left_out: list[str] = []
    for place in places:
        if place.startswith(STREAMED):
            found.append(Input(place, 0))
            continue
        if not place.strip():  # Path would take it for the current directory
            raise operator_error(
                "E601", "one of the inputs is empty", why="'' is neither a path nor a data set"
            )
        path = Path(os.path.expanduser(place))
        if os.path.isdir(path):
            inside, others = look_into(path, BY_NAME, tell)
            found += [_input(file) for file in inside]
            left_out += others
            continue
        file = _input(path)
        if path.name.lower().endswith(BY_NAME) or not (problem := text_problem(path)):
            found.append(file)
        elif problem == EMPTY:
            left_out.append(f"{path} ({problem})")
        else:
            raise unreadable(path, problem)
    if left_out:
        tell(told(left_out))
    if not found:
        raise operator_error(
            "E601",
            "there is nothing to read",
            why=f"no file of text, JSON lines or parquet is in {', '.join(places)}",
        )
    return found


def _input(path: Path) -> Input:
    try:
        status = path.stat()
    except OSError as error:
        raise operator_error("E601", f"cannot read {path}", why=reason(error)) from error
    return Input(str(path), status.st_size, status.st_mtime_ns)


def read(source: Input, field: str, skip: int = 0) -> Iterator[Document]:
    """The documents of an input behind the first ``skip`` records; empty ones are left out.

    ``field`` is the key or column that has the text. Raises OperatorError E601 for what cannot be
    read and E605 for a library that is missing.
    """
    name = source.name
    try:
        ending = name.lower()
        if name.startswith(STREAMED):
            yield from _data_set(name.removeprefix(STREAMED), field, skip)
        elif ending.endswith(JSON_LINES):
            yield from _json_lines(Path(name), field, skip)
        elif ending.endswith(PARQUET):
            yield from _parquet(Path(name), field, skip)
        else:
            yield from _text(Path(name), skip)
    except OperatorError:
        raise
    except (EOFError, zlib.error) as error:  # gzip's, whose other errors are OSErrors
        why = f"its compressed data is damaged or cut off: {error}"
        raise operator_error("E601", f"cannot read {name}", why=why) from error
    except (OSError, ValueError) as error:  # parquet's errors are among them
        raise operator_error("E601", f"cannot read {name}", why=reason(error)[:500]) from error


def _text(path: Path, skip: int) -> Iterator[Document]:
    if problem := text_problem(path):
        raise unreadable(path, problem)
    done = 0
    for number, text in enumerate(text_file_documents(path), 1):
        done += len(text) + 1
        if number > skip and text:
            yield Document(text, number, done)


def _json_lines(path: Path, field: str, skip: int) -> Iterator[Document]:
    with path.open("rb") as raw:
        packed = path.name.lower().endswith(".gz")
        lines = cast(IO[bytes], gzip.GzipFile(fileobj=raw) if packed else raw)
        for number in itertools.count(1):
            line = lines.readline(MAX_RECORD_BYTES + 1)
            if not line:
                return
            if len(line) > MAX_RECORD_BYTES:
                raise ValueError(f"line {number} has more than {MAX_RECORD_BYTES} bytes")
            if number > skip and line.strip():
                text = _field(_parsed(line, number), field, number)
                if text:
                    yield Document(text, number, raw.tell())


def _parsed(line: bytes, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number} is no JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"line {number} has too many brackets within brackets") from error


def _field(record: Any, field: str, number: int) -> bytes:
    value = record.get(field) if isinstance(record, dict) else None
    if value is None and not (isinstance(record, dict) and field in record):
        keys = ", ".join(list(record)[:8]) if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"record {number} has no {field!r} (it has: {keys}); see --field")
    if value is None:
        return b""
    if not isinstance(value, str):
        raise ValueError(f"{field!r} of record {number} is no text; see --field")
    return value.replace("\0", "").encode("utf-8", errors="replace")


def _parquet(path: Path, field: str, skip: int) -> Iterator[Document]:
    parquet = need("pyarrow.parquet", "parquet", "read parquet")
    size = path.stat().st_size
    with parquet.ParquetFile(path) as file:
        if field not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names[:8])
            raise ValueError(f"no column {field!r} (it has: {names}); see --field")
        rows = max(1, file.metadata.num_rows)
        number = 0
        for group in range(file.num_row_groups):
            if number + file.metadata.row_group(group).num_rows <= skip:
                number += file.metadata.row_group(group).num_rows
                continue
            batches = file.iter_batches(PARQUET_BATCH, row_groups=[group], columns=[field])
            for value in (value for batch in batches for value in batch.column(0).to_pylist()):
                number += 1
                text = _field({field: value}, field, number) if number > skip else b""
                if text:
                    yield Document(text, number, size * number // rows)


def _data_set(place: str, field: str, skip: int) -> Iterator[Document]:
    """One pass over a data set (:mod:`node.data.streamed`)."""
    reader = Reader(with_field(DataSet.parse(place), field), Mark(examples=skip))
    for text in reader:
        if reader.passes:
            return
        yield Document(text, reader.examples, 0)
