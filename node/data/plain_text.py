"""Documents out of what people have lying about: text files, and Python's own docstrings."""

from __future__ import annotations

import ast
import codecs
import importlib.util
import os
import re
import stat
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

from node.data.folder import HELD_OUT, check_finished
from node.errors import operator_error
from node.headway import Headway, OnProgress, Tell
from node.trainer.data import DOCUMENT_END, encode
from protocols.errors import OperatorError, reason

MIN_DOCSTRING = 200  # characters
PACKAGES = ("networkx",)
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}
PARAGRAPH_LIMIT = 4096  # characters
CHUNK_LIMIT = 65_536
CHUNK_ONE_IN = 4  # a chunk ends after one paragraph in this many, chosen by their hash
JSON_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
EMPTY = "it is empty"
TOLD = 3  # how many of several files are named
PROBE = 65_536  # bytes looked at to tell text from binary files
PIECE = 1024 * 1024
SET_PATH = "give a file or folder of UTF-8 text on this machine with --data (a run file: data.path)"

_WORD = re.compile(r"[a-z]+")
_ENGLISH = {"the", "of", "to", "a", "is", "and", "in", "for", "be", "are", "that", "with", "if"}


# -- docstrings ------------------------------------------------------------------------------


def source_roots() -> list[Path]:
    """Folders with Python's own library and :data:`PACKAGES`."""
    roots = [Path(sysconfig.get_path("stdlib"))]
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        roots += [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    return roots


def python_files(root: Path) -> list[Path]:
    """The sources under a folder, in order, but for tests and what is installed."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
        found += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    return found


def docstrings(files: list[Path], progress: OnProgress) -> Iterator[bytes]:
    """English docstrings of some length."""
    for done, file in enumerate(files, 1):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in other people's sources
                tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError, OSError, RecursionError):
            continue  # templates and broken examples that come with packages
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= MIN_DOCSTRING and _is_english(text):
                    yield encode(text)
        progress(done, len(files))


def _is_english(text: str) -> bool:
    """At least one word in ten is among the commonest of English."""
    words = _WORD.findall(text.lower())
    return sum(word in _ENGLISH for word in words) * 10 >= len(words) > 0


# -- text ------------------------------------------------------------------------------------


def text_files(paths: str, tell: Tell = lambda line: None) -> list[Path]:
    """Files named by ``paths``; folders are searched for text.

    That is one path where there is such a file or folder, else several, separated as in PATH.
    ``tell`` gets what is left out of folders, and what is JSON, as lines for people. Raises
    OperatorError E601 where there is no text, or a file that is named is none; E603 as
    :func:`look_into`.
    """
    found: list[Path] = []
    left_out: list[str] = []
    for place in _places(paths):
        if os.path.isdir(place):
            inside, others = look_into(place, (), tell)
            found += inside
            left_out += others
        elif problem := text_problem(place):
            raise unreadable(place, problem)
        else:
            found.append(place)
    if left_out:
        tell(told(left_out))
    if lines := [str(file) for file in found if file.name.lower().endswith(JSON_LINES)]:
        tell(
            f"reads {_some(lines)} as {'they are' if lines[1:] else 'it is'}, with all that is "
            "JSON: for the texts alone make a token folder (`node data prepare`), or give --data "
            "'datasets:json?files=FILE&field=text'"
        )
    if not found:
        raise operator_error(
            "E601",
            f"no training text at {paths!r}" if paths else "data.path is not set",
            why="no readable, non-empty UTF-8 file is there",
            fix=SET_PATH,
        )
    return found


def _places(paths: str) -> list[Path]:
    whole = Path(os.path.expanduser(paths))
    if paths and os.path.lexists(whole):  # the separator may be in its name, as in 10:00
        return [whole]
    return [Path(os.path.expanduser(part)) for part in paths.split(os.pathsep) if part]


def unreadable(file: Path, why: str) -> OperatorError:
    """E601 for a file of text."""
    return operator_error("E601", f"cannot read the training text {file}", why=why, fix=SET_PATH)


def look_into(
    folder: Path, taken: tuple[str, ...] = (), tell: Tell = lambda line: None
) -> tuple[list[Path], list[str]]:
    """The files of text in a folder, in order; and what is left out of it, each with the reason.

    What is hidden or empty is in neither list. ``taken`` are endings of names that need no look. A
    token folder is left out with all that is in it: its index is text as well. ``tell``
    gets how far it has come, where that takes long. Raises OperatorError E603 for a token folder
    that is not finished.
    """
    check_finished(folder)
    files: list[Path] = []
    others: list[str] = []
    tokens: set[Path] = set()
    found = [folder, *sorted(folder.rglob("*"))]
    headway = Headway(lambda text: tell(f"looks for text: {text}"), unit="files")
    for done, path in enumerate(found):
        headway(done, len(found))
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        if not tokens.isdisjoint(path.parents):
            continue
        if os.path.isdir(path):  # Path's own raises where a folder cannot be entered
            if os.path.isfile(path / HELD_OUT):
                tokens.add(path)
                others.append(f"{path} (a token folder, which is given alone)")
            elif path != folder and os.path.islink(path):
                others.append(f"{path} (a link to a folder, which is not followed)")
            elif not os.access(path, os.R_OK | os.X_OK):
                others.append(f"{path} (a folder that this user may not read)")
        elif not os.path.exists(path):
            others.append(f"{path} (a link to what is not there)")
        elif not os.path.isfile(path):
            others.append(f"{path} ({text_problem(path)})")
        elif path.name.lower().endswith(taken) or not (problem := text_problem(path)):
            files.append(path)
        elif problem != EMPTY:
            others.append(f"{path} ({problem})")
    return files, others


def told(left_out: list[str]) -> str:
    """A line for people about what is left out (not an empty list)."""
    return f"leaves out {_some(left_out)}"


def _some(files: list[str]) -> str:
    more = f" and {len(files) - TOLD:,} more" if len(files) > TOLD else ""
    return f"{', '.join(files[:TOLD])}{more}"


def text_problem(file: Path) -> str:
    """Why a file is no text; empty if it is. All of it is read, unless its beginning tells."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    at = pending = 0  # where the piece begins, and bytes of a character that the last one cut
    blank = True  # so far: a log may begin with any number of blank lines
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            return "it is a pipe or device, and text is read twice"
        with file.open("rb") as stream:
            piece = stream.read(PROBE)
            while piece:
                decoder.decode(piece)
                if not at and DOCUMENT_END in piece:
                    return "it is a binary file"
                blank = blank and not (piece if at else piece.removeprefix(codecs.BOM_UTF8)).strip()
                at, pending = at + len(piece), len(decoder.getstate()[0])
                piece = stream.read(PIECE)
            decoder.decode(b"", final=True)
    except OSError as error:
        return reason(error)
    except UnicodeDecodeError as error:
        return f"it is not UTF-8 (byte {at - pending + error.start:,})"
    return EMPTY if blank else ""


def text_documents(files: list[Path], progress: OnProgress) -> Iterator[bytes]:
    """The documents of all files; ``progress`` is of files.

    Raises OperatorError E601 for one that cannot be read any more.
    """
    for done, file in enumerate(files, 1):
        try:
            for number, document in enumerate(text_file_documents(file)):
                if number:
                    progress(done - 1, len(files))
                yield document
        except OSError as error:
            raise unreadable(file, reason(error)) from error
        progress(done, len(files))


def text_file_documents(file: Path) -> Iterator[bytes]:
    """Chunks of whole paragraphs whose ends depend on the paragraphs' own text.

    So the same text yields the same documents wherever it stands in a file. Some may be empty.
    """
    chunk = ""
    for paragraph in _paragraphs(file):
        chunk += paragraph
        if blake3(encode(paragraph)).digest()[0] % CHUNK_ONE_IN == 0 or len(chunk) >= CHUNK_LIMIT:
            yield encode(chunk.strip())
            chunk = ""
    yield encode(chunk.strip())


def _paragraphs(file: Path) -> Iterator[str]:
    """Lines up to and with a blank one, or up to the limit for text without any."""
    paragraph = ""
    with file.open(encoding="utf-8-sig", errors="replace") as stream:
        while line := stream.readline(PARAGRAPH_LIMIT):
            paragraph += line.replace("\0", "")
            if not line.strip() or len(paragraph) >= PARAGRAPH_LIMIT:
                yield paragraph
                paragraph = ""
    yield paragraph
