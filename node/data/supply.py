"""What an island trains on, and the evaluation shard and tokenizer of a run that it makes."""

from __future__ import annotations

import contextlib
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3

from bootstrap.manifest import Data, Manifest
from node.data.cached_file import intact
from node.data.folder import is_folder
from node.data.intact import check
from node.data.remote import DEFAULT_CACHE_BYTES, Folder
from node.data.stream_recipe import evaluation_shard, is_recipe, recipe_for
from node.data.streamed import is_stream
from node.data.tokenizer import (
    BY_ID,
    BYTES,
    BYTES_VOCABULARY,
    FILE,
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    read_tokenizer,
    tell_of_gaps,
    tokenizer_of,
)
from node.errors import operator_error
from node.headway import OnProgress, Tell
from node.hf.import_hf import import_hf, tokenizer_in
from node.setting_values import is_url
from node.trainer.corpus import MORE_TEXT, Corpus, collect, spread
from node.trainer.data import open_tokens, sampler_of, token_type

OWN_TEXT = "tiny-text"  # the name of a run of its creator's text, where it was given none


@dataclass(frozen=True)
class Supply:
    """What a run begins with at its creator."""

    manifest: Manifest  # with what follows from data and tokenizer filled in
    shard: bytes  # for evaluation
    tokenizer: bytes  # its file; empty for bytes
    tokens: str  # where this island's training tokens are


@dataclass(frozen=True)
class Given:
    """What the operator gives a run to start with, beside its manifest."""

    tokenizer: Path | None = None  # a tokenizer.json
    init_from: Path | None = None  # a folder with weights of the manifest's model


def make(
    manifest: Manifest,
    place: str,
    given: Given,
    cache: Path,
    progress: OnProgress,
    tell: Tell = lambda line: None,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
) -> Supply:
    """Prepare a new run's data; ``place`` is this island's own, empty for the manifest's recipe.

    ``cache`` has what comes from a URL, at most ``cache_bytes`` of it. ``tell`` gets what is left
    out of a folder of text, as a line for people. Blocks. Raises OperatorError E204, E601, E603,
    E604, E605, E606, E402.
    """
    model = manifest.model
    said = "document_end" in model.model_fields_set  # by config.json, or by the operator
    stated = _stated(given, model.document_end if said else None)
    if given.init_from is not None:
        manifest = with_weights(manifest, given.init_from)
    if manifest.model.kind == "hf":
        from node.trainer.foreign_balance import check_balance

        check_balance(manifest.model)  # else this island's ranks refuse it once there is a run
    place = place or manifest.data.path
    if place and "name" not in manifest.model_fields_set:  # not the path: it is nobody's business
        manifest = manifest.model_copy(update={"name": OWN_TEXT})
    folder = Folder(place, cache, cache_bytes) if place and is_folder(place) else None
    tokenizer = stated or ByteTokenizer()
    if folder is not None:
        _check_tokenizer(folder, stated, given)
        index = folder.index  # its tokens have the end that it says
        tokenizer = tokenizer_of(index.tokenizer, folder.tokenizer(), index.document_end)
    if stated is None and tokenizer.digest == BYTES:
        _check_bytes(manifest, given, tell)
    if folder is None:
        tell_of_gaps(tokenizer, tell)
    if folder is not None:
        manifest, shard, tokens = _of_folder(manifest, tokenizer, folder, place, progress, tell)
    elif is_stream(place):
        manifest, shard, tokens = _of_stream(manifest, tokenizer, place, progress)
    else:
        manifest, shard, tokens = _of_text(manifest, tokenizer, place, progress, tell)
    evaluation = manifest.evaluation.model_copy(update={"digest": blake3(shard).hexdigest()})
    return Supply(
        manifest.model_copy(update={"evaluation": evaluation}),
        shard,
        tokenizer.data if isinstance(tokenizer, FileTokenizer) else b"",
        tokens,
    )


def tokens_for(
    manifest: Manifest,
    shard: bytes,
    tokenizer: bytes,
    place: str,
    progress: OnProgress,
    tell: Tell = lambda line: None,
    cache: Path | None = None,
) -> str:
    """Where this island's training tokens of a run are, without anything from its shard.

    ``tell`` and ``cache`` as in :func:`make`. Blocks. Raises OperatorError E601, E603, E604, E605,
    E402.
    """
    if place and is_folder(place):
        index = Folder(place, cache).index
        found = index.tokenizer
        if found != manifest.data.tokenizer:
            raise operator_error(
                "E603",
                f"{place} was made with another tokenizer",
                why=f"its tokens are of {found[:16]}, the run's of {manifest.data.tokenizer[:16]}",
                fix="make it again with the run's tokenizer.json, which is in the state directory",
            )
        if index.document_end != (end := manifest.model.document_end):
            coder = tokenizer_of(manifest.data.tokenizer, tokenizer, end)
            raise operator_error(
                "E603",
                f"{place} has another token between documents than the run",
                why=f"its documents end with {_written(coder, index.document_end)}, the run's with "
                f"{_written(coder, end)}",
                fix=f"make it again, with {_written(coder, end)} as --document-end",
            )
        check_files(place, progress)
        _tell_of_repeats(manifest, index.tokens, tell)
        return place
    coder = tokenizer_of(manifest.data.tokenizer, tokenizer, manifest.model.document_end)
    tell_of_gaps(coder, tell)
    if is_stream(place):
        return recipe_for(manifest, coder, place, progress)
    corpus = collect(own_data(manifest, place), progress=progress, tell=tell)
    return _text_tokens(corpus, manifest, shard, coder, tell)


def _of_folder(
    manifest: Manifest,
    tokenizer: Tokenizer,
    folder: Folder,
    place: str,
    progress: OnProgress,
    tell: Tell,
) -> tuple[Manifest, bytes, str]:
    """Manifest, evaluation shard and training tokens of a folder of tokens."""
    check_files(place, progress)
    manifest = _filled_in(manifest, tokenizer)
    kind = token_type(manifest.model.vocab_size)
    held_out = folder.tokens(folder.index.held_out).astype(kind).tobytes()
    seq_len = manifest.data.seq_len
    shard = spread(held_out, kind.itemsize, manifest.evaluation.sequences, seq_len)
    _tell_of_repeats(manifest, folder.index.tokens, tell)
    if not shard:
        raise operator_error(
            "E601",
            f"{place} is too small to evaluate with",
            why=f"{folder.index.held_out.tokens} tokens were held out for it, and one "
            f"sequence needs {seq_len + 1}",
            fix=MORE_TEXT,
        )
    return manifest, shard, place


def _of_stream(
    manifest: Manifest, tokenizer: Tokenizer, place: str, progress: OnProgress
) -> tuple[Manifest, bytes, str]:
    """The same of a stream, whose training tokens are a recipe."""
    manifest = _filled_in(manifest, tokenizer)
    tokens = recipe_for(manifest, tokenizer, place, progress)
    return manifest, evaluation_shard(manifest, tokenizer, place, progress), tokens


def _of_text(
    manifest: Manifest, tokenizer: Tokenizer, place: str, progress: OnProgress, tell: Tell
) -> tuple[Manifest, bytes, str]:
    """The same of text."""
    manifest = _filled_in(manifest, tokenizer)
    corpus = collect(own_data(manifest, place), progress=progress, tell=tell)
    shard = corpus.make_shard(
        manifest.evaluation.sequences,
        manifest.data.seq_len,
        tokenizer,
        manifest.model.vocab_size,
    )
    return manifest, shard, _text_tokens(corpus, manifest, shard, tokenizer, tell)


def _text_tokens(
    corpus: Corpus, manifest: Manifest, shard: bytes, tokenizer: Tokenizer, tell: Tell
) -> str:
    """Where the training tokens of text are, without anything from ``shard``."""
    vocabulary, seq_len = manifest.model.vocab_size, manifest.data.seq_len
    tokens = str(corpus.training_file(shard, seq_len, tokenizer, vocabulary, tell))
    _tell_of_repeats(manifest, len(open_tokens(tokens, vocabulary)), tell)
    return tokens


def _written(tokenizer: Tokenizer, number: int) -> str:
    """A token as a shell takes it for ``--document-end``."""
    text = tokenizer.token(number) if isinstance(tokenizer, FileTokenizer) else None
    return shlex.quote(f"#{number}" if text is None or BY_ID.fullmatch(text) else text)


def _tell_of_repeats(manifest: Manifest, tokens: int, tell: Tell) -> None:
    """Say where a round has no windows of its own, since there are too few of them."""
    try:
        sampler = sampler_of(manifest, tokens)
    except ValueError:
        return  # the sampler refuses them
    if sampler.reserved and not sampler.rounds:
        tell(
            f"reads windows again: {sampler.windows:,} are fewer than the {sampler.reserved:,} "
            f"that a round has of its own (inner steps, batch, data.islands)"
        )


def check_files(place: str, progress: OnProgress) -> None:
    """E603 for a damaged file of a token folder on this machine; a URL's are checked as they come.

    Without effect for any other place. Blocks.
    """
    if is_folder(place) and not is_url(place):
        check(Folder(place), progress)


def usable(kept: str, tell: Tell = lambda line: None) -> bool:
    """Whether tokens that were used before are still there, a file as it was written. Blocks.

    A token folder is looked into where it is opened, and a recipe where it is read.
    """
    if not os.path.isfile(kept):
        return bool(kept) and is_folder(kept)
    with contextlib.suppress(OSError):  # as a bad disk has them
        if is_recipe(kept) or intact(Path(kept)) is not None:
            return True
    tell(f"{kept} is damaged: makes these tokens again")
    return False


def own_data(manifest: Manifest, place: str) -> Data:
    """The recipe with this island's own text; a path in a peer's manifest is never read."""
    if place:
        return manifest.data.model_copy(update={"recipe": "text", "path": place})
    if manifest.data.recipe == "text":
        raise operator_error(
            "E601",
            "this run trains on each island's own text",
            why="its recipe is 'text', and this node was given none",
            fix="give a file or folder of UTF-8 text with --data",
        )
    return manifest.data.model_copy(update={"path": ""})


def with_weights(manifest: Manifest, folder: Path) -> Manifest:
    """The manifest with the hash of the weights in ``folder``, which the run starts from."""
    import torch

    from node.trainer.layout import Layout

    model = manifest.model
    vector = torch.empty(Layout.of_config(model).size)
    import_hf(model, folder, vector)
    digest = blake3(vector.numpy().view(np.uint8).data, max_threads=blake3.AUTO).hexdigest()
    return manifest.model_copy(update={"model": model.model_copy(update={"initial": digest})})


def _stated(given: Given, eos: int | None) -> Tokenizer | None:
    """The tokenizer that was given, by itself or with weights; None where none was."""
    if given.tokenizer is not None:
        return read_tokenizer(given.tokenizer, eos=eos)
    return tokenizer_in(given.init_from, eos) if given.init_from is not None else None


def _check_tokenizer(folder: Folder, stated: Tokenizer | None, given: Given) -> None:
    """E604 where the tokens of a folder are of another tokenizer than the one that was given."""
    if stated is None or stated.digest == folder.index.tokenizer:
        return
    why = f"the folder's tokens are of {folder.index.tokenizer[:16]}"
    if given.tokenizer is None:
        raise operator_error(
            "E604",
            f"{folder.place} was made with another tokenizer than {given.init_from}",
            why=f"{why}, the weights' are of {stated.digest[:16]}",
            fix="make the folder with the tokenizer that belongs to the weights",
        )
    raise operator_error(
        "E604",
        f"{given.tokenizer} is not the tokenizer of {folder.place}",
        why=why,
        fix="leave out --tokenizer: the folder has its own",
    )


def _check_bytes(manifest: Manifest, given: Given, tell: Tell) -> None:
    """E604 for weights with more ids than bytes, where no tokenizer was given.

    A new model of that kind is told of: it may be meant to be trained on bytes.
    """
    vocabulary = manifest.model.vocab_size
    if vocabulary <= BYTES_VOCABULARY:
        return
    if given.init_from is not None:
        raise operator_error(
            "E604",
            f"nothing says which tokenizer the weights of {given.init_from} belong to",
            why=f"there is no {FILE}, and bytes would be taken for the first {BYTES_VOCABULARY} of "
            f"its {vocabulary:,} ids",
            fix=f"give the model's {FILE} with --tokenizer, or put it into the folder",
        )
    tell(
        f"trains on bytes, {BYTES_VOCABULARY} of the {vocabulary:,} ids that the model has: "
        "no --tokenizer was given"
    )


def _filled_in(manifest: Manifest, tokenizer: Tokenizer) -> Manifest:
    """The manifest with the tokenizer's hash, vocabulary and document end; E604 for too few ids."""
    model = manifest.model
    given = "vocab_size" in model.model_fields_set
    if given and model.vocab_size < tokenizer.vocab_size:
        raise operator_error(
            "E604",
            "the model's vocabulary is too small for the tokenizer",
            why=f"model.vocab_size is {model.vocab_size}, the tokenizer has {tokenizer.vocab_size}",
            fix="leave out model.vocab_size: it is taken from the tokenizer; with a config.json, "
            "give the tokenizer that belongs to that model",
        )
    changes = {"document_end": tokenizer.document_end}
    if not given:
        changes["vocab_size"] = tokenizer.vocab_size
    return manifest.model_copy(
        update={
            "model": model.model_copy(update=changes),
            "data": manifest.data.model_copy(update={"path": "", "tokenizer": tokenizer.digest}),
        }
    )
