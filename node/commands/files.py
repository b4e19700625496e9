"""Commands that write files and end: ``keygen``, ``export``."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from bootstrap.validation import bad_config
from node.commands.shared import given, given_path
from node.config import resolve
from node.errors import operator_error
from node.interrupts import clean_up_at_any_end
from node.options import with_settings
from node.setting_values import size
from protocols.errors import OperatorError, reason


@with_settings("dir")
def keygen(
    flags: dict[str, Any],
    out: Annotated[
        Path | None,
        typer.Option(
            parser=given_path, metavar="FILE", help="[default: identity.pem in the state directory]"
        ),
    ] = None,
) -> None:
    """Make a new identity and print its peer id; never overwrites one."""
    from protocols.identity import Identity

    path = out or resolve(flags, os.environ).identity_path
    identity = Identity.generate()
    try:
        identity.save(path)
    except FileExistsError as error:
        raise operator_error(
            "E104",
            f"{path} exists",
            why="a lost key is a lost identity, so none is overwritten",
            fix="give another file with --out, or move that one away",
        ) from error
    except OSError as error:
        raise operator_error(
            "E104",
            f"cannot write {path}",
            why=reason(error),
            fix="give a file this user may write with --out",
        ) from error
    typer.echo(identity.peer_id)
    if out is not None:  # apart from the id, which scripts read
        use = f"node bootstrap --identity {shlex.quote(str(path))}"
        typer.echo(f"A node has it with --identity, on each start: {use}", err=True)


def export(
    folder: Annotated[
        Path,
        typer.Argument(
            parser=given_path, metavar="DIR", help="Folder to write: a new or an empty one."
        ),
    ],
    source: Annotated[
        str,
        typer.Option(
            "--from",
            parser=given,
            metavar="PATH",
            help="Path or URL: a checkpoint, or the newest of a state directory or of a "
            "--checkpoint-copy.",
        ),
    ],
    best: Annotated[
        bool,
        typer.Option(
            "--best", help="Take the one with the lowest validation loss, not the newest."
        ),
    ] = False,
    to: Annotated[str, typer.Option(metavar="hf", help="Format: hf (Hugging Face).")] = "hf",
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest file of weights to write, as in 500MB.")
    ] = "5GB",
    like: Annotated[
        Path | None,
        typer.Option(
            parser=given_path,
            metavar="FOLDER",
            help="Take chat template, special tokens and generation settings from this model's "
            "folder.",
        ),
    ] = None,
) -> None:
    """Write the model of a checkpoint for other programs.

    Of a training script's run (node.join) the parameters alone, by the script's names.
    """
    if to != "hf":
        raise bad_config(f"cannot export to {to!r}", "hf is the one format", "give --to hf")
    most = _shard_size(max_shard_size)
    from node.checkpoints.fetched import outer_at
    from node.checkpoints.outer_files import read_tokenizer_of
    from node.checkpoints.script_layout import script_layout
    from node.hf.export import check_empty, export_hf, export_weights
    from node.hf.likeness import files_like

    def warn(error: OperatorError) -> None:
        typer.echo(error.text().replace("error", "warning", 1), err=True)

    def tell(text: str) -> None:
        typer.echo(text, err=True)

    clean_up_at_any_end()  # a folder may be half written, or have come from a URL
    check_empty(folder)  # before what takes long
    with outer_at(source, folder, best=best, warn=warn, tell=tell) as (checkpoint, outer):
        manifest = outer.signed.manifest
        script = bool(manifest.script.layout)
        if script and like is not None:
            raise bad_config(
                "--like with the run of a training script",
                "its model is the script's, of which only the parameters are written",
                "leave out --like",
            )
        layout = script_layout(checkpoint, manifest.script) if script else None
        tokenizer = b"" if script else read_tokenizer_of(checkpoint, manifest)
    if layout is not None:
        export_weights(layout.views(outer.base), folder, most)
    else:
        export_hf(
            manifest.model,
            outer.base,
            folder,
            fragments=manifest.rounds.fragments,
            tokenizer=tokenizer,
            max_shard=most,
            beside=files_like(like, tokenizer) if like is not None else {},
        )
    files = len(os.listdir(folder))
    typer.echo(
        f"{folder}: {len(outer.base):,} parameters of {checkpoint.name} in "
        f"{files} {'file' if files == 1 else 'files'}"
    )


def _shard_size(text: str) -> float:
    """Bytes, at least one; raises OperatorError E204."""
    why = "it must be at least one byte"
    try:
        found = size(text)
        if isinstance(found, float) and found >= 1:
            return found
    except ValueError as error:
        why = f"it {error}"
    raise bad_config(
        f"--max-shard-size cannot be {text!r}", why, "give --max-shard-size 5GB, or leave it out"
    )
