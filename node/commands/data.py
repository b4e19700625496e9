"""``node data``: text into token folders, and a look into them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from node.commands.shared import AsJson, given, given_path
from node.headway import counted
from node.interrupts import clean_up_at_any_end, clean_up_first

if TYPE_CHECKING:
    from node.data.folder import Index
    from node.data.prepare import PrepareProgress
    from node.data.remote import Folder

app = typer.Typer(
    help="Make training data, and look at it.", no_args_is_help=True, rich_markup_mode=None
)

SHOWN_TOKENS = 64
GO_ON = "give the same command again: it goes on after the last whole file"


@app.command("prepare")
def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT…",
            help="Files or folders of text, .jsonl(.gz) and .parquet, or datasets:NAME[@SPLIT].",
        ),
    ],
    out: Annotated[Path, typer.Option(parser=given_path, metavar="DIR", help="Folder to write.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(parser=given_path, metavar="FILE", help="A tokenizer.json. [default: bytes]"),
    ] = None,
    document_end: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            help="Token that ends a document, or its id as in '#2'. [default: the tokenizer's end "
            "of a text]",
        ),
    ] = None,
    field: Annotated[str, typer.Option(help="Key or column that has the text.")] = "text",
    shard_tokens: Annotated[
        int, typer.Option(min=1000, metavar="N", help="Tokens in one file of the folder.")
    ] = 50_000_000,
    as_json: AsJson = False,
) -> None:
    """Turn text into a folder of tokens; run again after a break, it goes on where it was."""
    from node.data.begun import is_begun
    from node.data.prepare import prepare as work
    from node.data.tokenizer import ByteTokenizer, Tokenizer, read_tokenizer
    from node.errors import operator_error
    from protocols.errors import OperatorError

    clean_up_first()
    chosen: Tokenizer = ByteTokenizer()
    if tokenizer is not None:
        chosen = read_tokenizer(tokenizer, document_end=document_end)
    elif document_end is not None:
        raise operator_error(
            "E604", "--document-end without --tokenizer", why="text as bytes ends with NUL"
        )
    started = time.monotonic()
    try:
        with _bar() as report:
            index = work(
                inputs,
                out,
                chosen,
                field=field,
                shard_tokens=shard_tokens,
                report=report,
                tell=lambda line: typer.echo(line, err=True),
            )
    except KeyboardInterrupt:
        typer.echo(GO_ON, err=True)
        raise
    except OperatorError as error:
        if error.code != "E601":
            raise
        fix = "give files or folders of UTF-8 text, .jsonl(.gz) or .parquet, or datasets:NAME@SPLIT"
        if is_begun(out) and not isinstance(error.__cause__, FileNotFoundError):
            fix = f"mend that input, then {GO_ON}"
        raise operator_error("E601", error.what, why=error.why, fix=fix) from error
    if as_json:
        typer.echo(json.dumps(_summary(index, out), indent=2))
        return
    seconds = max(time.monotonic() - started, 1e-9)
    typer.echo(
        f"{index.tokens:,} tokens of {counted(index.documents, 'document')} in "
        f"{counted(len(index.shards), 'file')}, {counted(index.held_out.documents, 'document')} "
        f"held out for evaluation ({seconds:.1f} s)"
    )
    typer.echo(f"Train on them with:  node start --data {out}")


@app.command("inspect")
def inspect(
    place: Annotated[
        str,
        typer.Argument(parser=given, metavar="DIR", help="A token folder, or its URL."),
    ],
    verify: Annotated[bool, typer.Option(help="Check every file of the folder.")] = True,
    as_json: AsJson = False,
) -> None:
    """Say what is in a token folder, and check its files against their hashes."""
    import tempfile

    from node.data.remote import Folder

    clean_up_at_any_end()  # of a URL gigabytes are in that folder
    with tempfile.TemporaryDirectory(prefix="atoll-inspect-") as cache:
        folder = Folder(place, Path(cache))
        if verify:
            _verify(folder)
        summary = _summary(folder.index, place) | {"verified": verify}
        if as_json:
            typer.echo(json.dumps(summary, indent=2))
            return
        for key, value in summary.items():
            typer.echo(f"{key:14} {value:,}" if type(value) is int else f"{key:14} {value}")
        typer.echo(f"{'begins':14} {_beginning(folder)!r}")


def _summary(index: Index, place: object) -> dict[str, Any]:
    return {
        "folder": str(place),
        "tokenizer": index.tokenizer,
        "vocab_size": index.vocab_size,
        "dtype": index.dtype,
        "files": len(index.shards),
        "tokens": index.tokens,
        "documents": index.documents,
        "held_out": index.held_out.tokens,
    }


def _beginning(folder: Folder) -> str:
    from node.data.tokenizer import tokenizer_of

    tokens = folder.tokens(folder.index.shards[0])[:SHOWN_TOKENS]
    index = folder.index
    tokenizer = tokenizer_of(index.tokenizer, folder.tokenizer(), index.document_end)
    return tokenizer.decode(tokens.tolist())


def _verify(folder: Folder) -> None:
    """Raise E603 for the first file that is not what the index says."""
    from rich.console import Console
    from rich.progress import Progress

    from node.data.intact import check

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("checking", total=None)
        check(folder, lambda done, total: bar.update(task, completed=done, total=total), anew=True)


@contextmanager
def _bar() -> Iterator[Callable[[PrepareProgress], None]]:
    """A progress bar with the time left, on standard error; nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task("tokenizing", total=None)

    def report(now: PrepareProgress) -> None:
        told = f"{now.tokens:,} tokens"
        bar.update(task, completed=now.done, total=now.total or None, description=told)

    with bar:
        yield report
