"""What many documents have in common with the evaluation shard costs no more than itself."""

from pathlib import Path

import numpy as np
import pytest
from data_kit import TEXTS, tokenizer_bytes

from bootstrap.manifest import Data
from node.data.tokenizer import FileTokenizer
from node.trainer.corpus import Corpus, collect, is_held_out
from node.trainer.passages import COPIES, EDGE_TOKENS
from protocols.errors import OperatorError

SEQ_LEN = 64
LICENCE = "# Licensed under one licence or another; whoever reads this may use it as it says: "
HEAD = LICENCE + "without a warranty of any kind, be it express or be it implied by the law.\n"


def corpus_of(tmp_path: Path, texts: list[str], name: str = "own") -> Corpus:
    (tmp_path / name).mkdir()
    for number, text in enumerate(texts):
        (tmp_path / name / f"{number:04}.txt").write_text(text, encoding="utf-8")
    return collect(Data(recipe="text", path=str(tmp_path / name)), tmp_path / "cache")


def body(number: int) -> str:
    return " ".join(f"{number}x{word}" for word in range(40)) + ".\n"


def own_size(corpus: Corpus) -> int:
    return sum(len(d) + 1 for d in corpus if not is_held_out(d))


def test_a_licence_that_all_documents_have_is_left_out_and_not_they(tmp_path: Path):
    corpus = corpus_of(tmp_path, [HEAD + body(number) for number in range(300)])
    shard = corpus.make_shard(16, SEQ_LEN)
    told: list[str] = []
    trained = corpus.training_file(shard, SEQ_LEN, tell=told.append).read_bytes()
    assert sum(body(number).strip().encode() in trained for number in range(300)) > 260
    windows = [shard[at : at + SEQ_LEN + 1] for at in range(0, len(shard), SEQ_LEN + 1)]
    assert any(window.strip(b"\0") in HEAD.encode() for window in windows)
    for window in windows:
        for piece in window.split(b"\0"):
            assert len(piece) < SEQ_LEN or piece not in trained
    left_out = own_size(corpus) - len(trained)
    assert 0 < left_out < own_size(corpus) * len(HEAD) / len(HEAD + body(99))
    assert told == [
        f"leaves out {left_out:,} of {own_size(corpus):,} bytes of {tmp_path / 'own'}: they have "
        "passages that the run evaluates with"
    ]
    corpus.training_file(shard, SEQ_LEN, tell=told.append)  # from the cache
    assert told[1:] == told[:1]


def test_a_document_with_evaluated_text_is_dropped_and_of_many_the_text(tmp_path: Path):
    shard = (LICENCE[: SEQ_LEN + 1]).encode()
    others = [body(number) for number in range(200)]
    few = corpus_of(tmp_path, others + [LICENCE + f"Copy {i}." for i in range(COPIES)], "few")
    told: list[str] = []
    trained = few.training_file(shard, SEQ_LEN, tell=told.append).read_bytes()
    assert b"Copy" not in trained
    assert len(trained) > 0.98 * own_size(few)
    assert not told  # of so little
    many = corpus_of(tmp_path, others + [LICENCE + f"Copy {i}." for i in range(40)], "many")
    # what is left of them is too short, but where much stands behind
    long = corpus_of(tmp_path, others + [LICENCE + body(i + 300) for i in range(40)], "long")
    assert shard not in many.training_file(shard, SEQ_LEN).read_bytes()
    trained = long.training_file(shard, SEQ_LEN).read_bytes()
    assert shard not in trained
    assert 30 < sum(body(i + 300).strip().encode() in trained for i in range(40)) <= 40 - COPIES


def test_tokens_around_what_many_have_go_as_well(tmp_path: Path):
    tokenizer = FileTokenizer(tokenizer_bytes())
    prose = " ".join(" ".join(TEXTS[:9]).split())
    shard = tokenizer.encode([prose.encode()])[0][: SEQ_LEN + 1]
    common = tokenizer.decode(shard.tolist())
    corpus = corpus_of(tmp_path, [body(i) + common + body(i + 500) for i in range(60)])
    coded = shard.astype("<u2").tobytes()
    told: list[str] = []
    path = corpus.training_file(coded, SEQ_LEN, tokenizer, 600, told.append)
    documents = tokenizer.decode(np.fromfile(path, "<u2").tolist()).split("<|endoftext|>")[:-1]
    assert len(documents) > 90  # two of nearly each
    inner = shard[EDGE_TOKENS:-EDGE_TOKENS]
    for at in range(len(inner) - 8):
        assert inner[at : at + 8].astype("<u2").tobytes() not in path.read_bytes()
    assert "tokens of" in told[0]


def test_where_too_little_is_left_it_is_said_what_went(tmp_path: Path):
    shard = LICENCE[: SEQ_LEN + 1].encode()
    corpus = corpus_of(tmp_path, [LICENCE + f"Copy {i}." for i in range(20)])
    size = own_size(corpus)
    for _ in range(2):  # and again from the cache
        with pytest.raises(OperatorError, match="too little training text") as caught:
            corpus.training_file(shard, SEQ_LEN)
        assert f"evaluation and {size:,} bytes with passages of these they" in caught.value.why
