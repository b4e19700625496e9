"""Evaluated text is found where it is cut or worded otherwise; forms and phrases stay."""

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from data_kit import tokenizer_bytes

from bootstrap.manifest import Data
from node.data import batches
from node.data.tokenizer import BYTES, FileTokenizer
from node.trainer import passages
from node.trainer.corpus import collect, is_held_out
from node.trainer.passages import ANOTHER_CUT, COMMON, COPIES, MIN_PASSAGE, Passages

SEQ_LEN = 512
LONG = MIN_PASSAGE * COMMON
BYTE_TOKENS = SimpleNamespace(document_end=0, digest=BYTES)


def prose(seed: int, words: int) -> str:
    """Text that no other seed has."""
    draw = random.Random(seed)
    return " ".join(f"{draw.getrandbits(draw.choice([16, 24])):x}" for _ in range(words))


def text(seed: int, size: int) -> bytes:
    return prose(seed, size).encode()[:size]


def trained(shard: bytes, documents: list[bytes], seq_len: int = SEQ_LEN) -> list[bytes]:
    window = shard.ljust(seq_len + 1, b"\0")
    found = Passages(window, seq_len, BYTE_TOKENS, np.dtype(np.uint8))
    return [d.removesuffix(b"\0") for d in found.trainable(d + b"\0" for d in documents)]


def stretches(ids: np.ndarray, length: int) -> set[bytes]:
    return {ids[at : at + length].tobytes() for at in range(len(ids) - length + 1)}


# -- other islands' copies of the same text


@pytest.fixture(scope="module")
def paragraphs() -> list[str]:
    return [prose(seed, 40) + "." for seed in range(1200)]


@pytest.fixture
def edited(paragraphs: list[str]) -> list[str]:
    """One word in three paragraphs of four is another; the last 100 are of this island alone."""
    draw = random.Random(7)
    found = []
    for number, paragraph in enumerate(paragraphs):
        words = paragraph.split(" ")
        if number % 4:
            words[draw.randrange(len(words))] = "EDITED"
        found.append(" ".join(words))
    return found + [prose(seed, 40) + "." for seed in range(2000, 2100)]


def collected(at: Path, paragraphs: list[str]):
    at.write_text("\n\n".join(paragraphs), encoding="utf-8")
    return collect(Data(recipe="text", path=str(at)), at.parent / "cache")


def test_copies_with_a_word_changed_here_and_there_are_not_trained_on(
    tmp_path: Path, paragraphs: list[str], edited: list[str]
):
    shard = collected(tmp_path / "creator.txt", paragraphs).make_shard(32, SEQ_LEN)
    joiner = collected(tmp_path / "joiner.txt", edited)
    file = joiner.training_file(shard, SEQ_LEN).read_bytes()
    have = stretches(np.frombuffer(file, np.uint8), MIN_PASSAGE)
    windows = [shard[at : at + SEQ_LEN + 1] for at in range(0, len(shard), SEQ_LEN + 1)]
    evaluated = [piece for window in windows for piece in window.split(b"\0")]
    assert sum(map(len, evaluated)) > 10_000
    for piece in evaluated:
        assert have.isdisjoint(stretches(np.frombuffer(piece, np.uint8), MIN_PASSAGE))
    own = [p for p in edited[-100:] if p.encode() in file]
    assert len(own) > 85  # but for what is held out
    assert len(file) > joiner.size - 5 * len(shard)


def test_copies_of_tokens_are_found_where_other_words_stand_around_them(
    tmp_path: Path, paragraphs: list[str], edited: list[str]
):
    coder = FileTokenizer(tokenizer_bytes())
    shard = collected(tmp_path / "creator.txt", paragraphs).make_shard(32, 128, coder, 600)
    joiner = collected(tmp_path / "joiner.txt", edited)
    path = joiner.training_file(shard, 128, coder, 600)
    have = stretches(np.fromfile(path, "<u2"), 16)
    for window in np.frombuffer(shard, "<u2").reshape(-1, 129):
        for piece in np.split(window, np.flatnonzero(window == coder.document_end)):
            inner = piece[piece != coder.document_end]
            assert have.isdisjoint(stretches(inner, 16))


def test_a_document_within_a_window_is_not_trained_on():
    shard = text(1, SEQ_LEN + 1)
    short, other = shard[100:180], text(2, 300)
    assert trained(shard, [short, other]) == [other]


# -- how much goes


def test_what_little_is_evaluated_goes_alone_and_with_much_the_document():
    shard = text(1, SEQ_LEN + 1)
    before, after = text(2, 700), text(3, 900)
    assert trained(shard, [before + shard[:100] + after]) == [before, after]
    much = text(4, 100 * (ANOTHER_CUT - 1) - 20) + shard[:100]
    assert trained(shard, [much, text(5, 200)]) == [text(5, 200)]


def test_phrases_that_many_have_stay_and_long_passages_go():
    phrase, licence = text(1, LONG - 30), text(2, LONG)
    bodies = [text(seed, 2000) for seed in range(10, 50)]
    left = trained(phrase, [body + phrase for body in bodies])
    assert left[:COPIES] == bodies[:COPIES]
    assert left[COPIES:] == [body + phrase for body in bodies[COPIES:]]
    assert trained(licence, [licence + body for body in bodies]) == bodies


def test_of_text_made_of_one_form_most_is_trained_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(passages, "EVERYWHERE", 20)
    form = text(1, LONG + 100)
    documents = [form + text(seed, 60) for seed in range(10, 110)]
    assert trained(form, documents) == documents[20:]


def test_what_is_left_of_a_document_may_be_held_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(passages, "COPIES", 80)
    shard, rests = text(1, SEQ_LEN + 1), [text(seed, 600) + b"#" for seed in range(10, 90)]
    found = Passages(shard, SEQ_LEN, BYTE_TOKENS, np.dtype(np.uint8))
    coded = [rest + shard[seed : seed + 70] + b"\0" for seed, rest in enumerate(rests)]
    left = list(found.trainable(coded, lambda document: is_held_out(document[:-1])))
    assert left == [rest + b"\0" for rest in rests if not is_held_out(rest)]
    assert found.left_out == sum(map(len, coded)) - sum(map(len, left))


# -- how it is found


@pytest.mark.parametrize(
    ("seq_len", "kind", "least"),
    [(12, "u1", 12), (200, "u1", 64), (12, "<u2", 6), (17, "<u4", 9), (64, "<u2", 16)],
)
def test_every_stretch_is_found_wherever_it_stands(
    seq_len: int, kind: str, least: int, monkeypatch: pytest.MonkeyPatch
):
    """And none that is a token shorter."""
    monkeypatch.setattr(passages, "COPIES", passages.EVERYWHERE + 1)  # whoever has it too
    draw = np.random.default_rng(seq_len)
    coder = SimpleNamespace(document_end=0, digest=BYTES if kind == "u1" else "other")
    shard = draw.integers(1, 100, 3 * (seq_len + 1)).astype(kind)
    shard[[5, 2 * seq_len]] = 0
    pieces = [
        piece[piece != 0]
        for window in shard.reshape(3, -1)
        for piece in np.split(window, np.flatnonzero(window == 0))
    ]
    pieces = [piece for piece in pieces if len(piece) >= least]
    whole, less = [], []
    for number in range(300):
        piece = pieces[number % len(pieces)]
        for length, into in ((least, whole), (least - 1, less)):
            at = draw.integers(len(piece) - length + 1)
            before, after = (draw.integers(100, 200, size) for size in draw.integers(0, 900, 2))
            document = np.concatenate([before, piece[at : at + length], after, [0]])
            into.append(document.astype(kind).tobytes())
    documents = [document for pair in zip(whole, less, strict=True) for document in pair]
    found = Passages(shard.tobytes(), seq_len, coder, np.dtype(kind))
    left = list(found.trainable(documents))
    assert [document for document in left if document in less] == less
    known = set().union(*(stretches(piece, least) for piece in pieces))
    assert len(left) > 500
    for document in left:
        assert known.isdisjoint(stretches(np.frombuffer(document, kind), least))


def test_it_is_the_same_however_documents_come(monkeypatch: pytest.MonkeyPatch):
    shard = text(1, SEQ_LEN + 1)
    draw = random.Random(1)
    documents = []
    for seed in range(10, 210):
        at, size = draw.randrange(SEQ_LEN - 200), draw.randrange(200)
        documents.append(text(seed, draw.randrange(1500)) + shard[at : at + size])
    several = trained(shard, documents)
    monkeypatch.setattr(batches, "BATCH_DOCUMENTS", 1)
    assert trained(shard, documents) == several
    assert 100 < len(several) < 200


def test_a_shard_without_text_takes_nothing():
    documents = [text(1, 300), b"short"]
    assert trained(b"", documents) == documents
    assert trained(b"few bytes", documents) == documents
