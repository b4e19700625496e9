"""Tokenizers: text to token ids, the same on every island.

A run has the byte tokenizer, or one in a file of the ``tokenizers`` library (``tokenizer.json``).
The manifest names such a file by the BLAKE3 hash of its bytes, and whoever joins fetches it from
peers by that hash, so all islands have one vocabulary. The library is an extra
(extra ``tokenizers``): a run over bytes does without.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from bootstrap.manifest import Manifest
from node.errors import operator_error, with_extra
from node.headway import Tell
from protocols.errors import OperatorError, reason

BYTES = "bytes"  # what the manifest calls the byte tokenizer
BYTES_VOCABULARY = 256
MIN_VOCABULARY, MAX_VOCABULARY = 2, 1_000_000  # of models in a manifest
MAX_TOKENIZER_BYTES = 64 * 1024 * 1024  # those of 256,000 tokens have about 30 MB
FILE = "tokenizer.json"
# what models in use call the special token between documents, the commonest first; "</s>" is also
# what some write before their end of a turn, or for a tag of HTML
DOCUMENT_ENDS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<eos>",
    "</s>",
    "<｜end▁of▁sentence｜>",  # noqa: RUF001 - DeepSeek writes it with these bars
    "<|im_end|>",
    "[EOS]",
    "[SEP]",
)
# document ends, special or not, of versions that noted none with a stream or begun folder
EARLIER_ENDS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|im_end|>",
    "[EOS]",
    "[SEP]",
)
# what is in no UTF-8, so that a tokenizer of bytes may do without; as ByteLevel writes these bytes
NEVER = {chr(byte) for byte in (0xC0, 0xC1, *range(0xF5, 0x100))}
BY_ID = re.compile(r"#[0-9]{1,7}")  # how a person names a token by its id

Ids = npt.NDArray[np.integer[Any]]


class Tokenizer(Protocol):
    """Documents to token ids and back."""

    @property
    def digest(self) -> str:
        """Its name in a manifest: ``bytes``, or the BLAKE3 hash of its file in hex."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def document_end(self) -> int:
        """The id that ends every document."""

    def encode(self, documents: Sequence[bytes]) -> list[Ids]:
        """The ids of each document (UTF-8), without the one that ends it.

        Raises OperatorError E604 where it has no id for what is in one.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""


class ByteTokenizer:
    """Token ids are the bytes of the text; a document ends with NUL, which text does not have."""

    digest = BYTES
    vocab_size = BYTES_VOCABULARY
    document_end = 0

    def encode(self, documents: Sequence[bytes]) -> list[Ids]:
        """See :class:`Tokenizer`."""
        return [np.frombuffer(document, dtype=np.uint8) for document in documents]

    def decode(self, ids: Sequence[int]) -> str:
        """See :class:`Tokenizer`; what is no UTF-8 shows as U+FFFD."""
        return bytes(ids).decode("utf-8", errors="replace")


class FileTokenizer:
    """A tokenizer of the ``tokenizers`` library, from the bytes of its JSON file.

    ``document_end`` is the token that ends a document, as it is written or as ``#ID``, or its id,
    where that is settled; ``eos`` what a model's config.json says of it, which counts where it is a
    special token here. Raises OperatorError E604 where the bytes are none or have no token to end
    documents with, E605 where the library is missing.
    """

    def __init__(
        self,
        data: bytes,
        name: str = FILE,
        *,
        document_end: int | str | None = None,
        eos: int | None = None,
    ) -> None:
        library = need("tokenizers", "tokenizers", "read a tokenizer file")
        if len(data) > MAX_TOKENIZER_BYTES:
            raise operator_error(
                "E604",
                f"{name} is too large for a tokenizer",
                why=f"it has {len(data):,} bytes and at most {MAX_TOKENIZER_BYTES:,} are taken",
            )
        with _refused(f"{name} is no tokenizer"):
            self._tokenizer = library.Tokenizer.from_buffer(data)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        # text that spells a special token out is text
        self._tokenizer.encode_special_tokens = True
        self.digest = blake3(data).hexdigest()
        self.data = data
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise operator_error("E604", f"{name} has no tokens", why="its vocabulary is empty")
        self.vocab_size = max(vocabulary.values()) + 1
        # whether it leaves out characters that it has no token for
        # what ends a document where a stream's recipe, or a folder that was begun, does not say it
        self.earlier_end = next((vocabulary[e] for e in EARLIER_ENDS if e in vocabulary), None)
        if not MIN_VOCABULARY <= self.vocab_size <= MAX_VOCABULARY:
            raise operator_error(
                "E604",
                f"{name} has too {'many' if self.vocab_size > MAX_VOCABULARY else 'few'} tokens",
                why=f"its largest id is {self.vocab_size - 1:,}, and models have "
                f"{MIN_VOCABULARY} to {MAX_VOCABULARY:,} of them",
            )
        end = document_end
        if isinstance(end, str):
            end = int(end[1:]) if BY_ID.fullmatch(end) else vocabulary.get(end, -1)
        self.document_end: int = self._end_of(name, eos) if end is None else end
        if not 0 <= self.document_end < self.vocab_size:
            raise operator_error(
                "E604",
                f"{name} has no token {document_end}",
                why="documents are to end with it",
            )
        added = self._tokenizer.get_added_tokens_decoder().get(self.document_end)
        self._end_is_special = added is not None and added.special  # else text may mean it
        taken_out = added.content if self._end_is_special else None
        self.has_gaps = _has_gaps(library, self._tokenizer, vocabulary, taken_out)
        # whether text that spells it out has its id: to the models of Unigram and WordLevel a
        # special token is a piece as any other
        self.spells_end = False
        if self._end_is_special:
            with contextlib.suppress(OperatorError), _refused("the tokenizer cannot encode it"):
                self.spells_end = self.document_end in self._encoded([added.content])[0].ids

    def _end_of(self, name: str, eos: int | None) -> int:
        """What ends a document, where that is not settled; E604 where nothing says it."""
        special: dict[str, int] = {
            token.content: number
            for number, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special  # others may occur in any text
        }
        # a config.json that only gives a new model its shape has the end of another tokenizer
        if eos is not None and eos in special.values():
            return eos
        ends = [special[end] for end in DOCUMENT_ENDS if end in special]
        if not ends:
            raise operator_error(
                "E604",
                f"{name} has no token that ends a document",
                why="none of " + ", ".join(DOCUMENT_ENDS) + " is one of its special tokens",
                fix="add one of them to the tokenizer as a special token",
            )
        return ends[0]

    def encode(self, documents: Sequence[bytes]) -> list[Ids]:
        """See :class:`Tokenizer`."""
        texts = [document.decode("utf-8", errors="replace") for document in documents]
        with _refused("the tokenizer cannot encode this text"):
            encoded = self._encoded(texts)
        coded: list[Ids] = [np.array(one.ids, dtype=np.uint32) for one in encoded]
        if self._end_is_special:  # as NUL is taken out for bytes
            coded = [ids[ids != self.document_end] for ids in coded]
        for text, ids in zip(texts, coded, strict=True):
            # a document of nothing but signs, as an emoji, is not worth ending a run
            if not len(ids) and self.has_gaps and any(map(str.isalnum, text)):
                raise operator_error(
                    "E604",
                    "the tokenizer cannot encode this text",
                    why=f"it has no token for anything in {text.strip()[:40]!r}",
                    fix="use a tokenizer that was made for such text, or one with tokens for bytes",
                )
        return coded

    def _encoded(self, texts: list[str]) -> Any:
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)

    def token(self, number: int) -> str | None:
        """How the vocabulary writes the token with this id; None where it has none."""
        found: str | None = self._tokenizer.id_to_token(number)
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """See :class:`Tokenizer`."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def _has_gaps(
    library: ModuleType, tokenizer: Any, vocabulary: dict[str, int], taken_out: str | None
) -> bool:
    """Whether text may vanish in it; models other than BPE raise where they have no token.

    ``taken_out``: a token that is taken out of texts, which may be that for what is unknown.
    """
    model = tokenizer.model
    unknown = getattr(model, "unk_token", None)
    if type(model).__name__ != "BPE":
        return unknown is not None and unknown == taken_out
    if (unknown is not None and unknown != taken_out) or model.byte_fallback:
        return False
    before = (tokenizer.normalizer, tokenizer.pre_tokenizer)  # either may take text by its bytes
    if not any(b'"ByteLevel"' in one.__getstate__() for one in before if one is not None):
        return True
    return not {*library.pre_tokenizers.ByteLevel.alphabet()} - NEVER <= vocabulary.keys()


def tell_of_gaps(tokenizer: Tokenizer, tell: Tell) -> None:
    """Say where text is about to be encoded by a tokenizer that leaves out some of it."""
    if isinstance(tokenizer, FileTokenizer) and tokenizer.has_gaps:
        tell(
            "leaves out characters that the tokenizer has no token for: it has no unknown token "
            "of its own, and not all bytes"
        )


@contextlib.contextmanager
def _refused(what: str) -> Iterator[None]:
    """What the library raises as OperatorError E604."""
    try:
        yield
    except BaseException as error:  # a panic of its Rust code is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise operator_error("E604", what, why=str(error)[:500]) from error


def read_tokenizer(
    path: Path, *, document_end: str | None = None, eos: int | None = None
) -> FileTokenizer:
    """The tokenizer in a file; more: :class:`FileTokenizer`. Raises OperatorError E604 and E605."""
    return FileTokenizer(_read(path), path.name, document_end=document_end, eos=eos)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_TOKENIZER_BYTES + 1)
    except OSError as error:
        raise operator_error(
            "E604", f"cannot read the tokenizer {path}", why=reason(error)
        ) from error


def check_tokenizer(path: Path, run: Manifest) -> None:
    """Raise E604 where the file is not the tokenizer of a run that is under way."""
    found, wanted = blake3(_read(path)).hexdigest(), run.data.tokenizer
    if found != wanted:
        has = "that of bytes" if wanted == BYTES else wanted[:16]
        raise operator_error(
            "E604",
            f"{path} is not the tokenizer of {run.label}",
            why=f"the file is {found[:16]}, the run's tokenizer {has}",
            fix="leave out --tokenizer: whoever takes part in a run is given its own",
        )


def tokenizer_of(digest: str, data: bytes, document_end: int | None = None) -> Tokenizer:
    """The tokenizer that a manifest names, from its file's bytes (empty for ``bytes``).

    ``document_end`` is the one named beside it: the tokenizer alone may not tell.
    Raises OperatorError E604 where they are another one's.
    """
    if digest == BYTES:
        return ByteTokenizer()
    tokenizer = FileTokenizer(data, document_end=document_end)
    if tokenizer.digest != digest:
        raise operator_error(
            "E604",
            "this is not the run's tokenizer",
            why=f"its hash is {tokenizer.digest[:16]}…, the run's is {digest[:16]}…",
        )
    return tokenizer


def need(module: str, extra: str, what: str) -> ModuleType:
    """Import a library that comes with an extra; raises OperatorError E605 that names it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise operator_error(
            "E605",
            f"cannot {what}: {module} is not installed",
            why=str(error),
            fix=with_extra(extra),
        ) from error
