"""Tokenizers that have no token for some of the text: who is told of it, and what is refused."""

import json
import string
from typing import Any

import pytest
from data_kit import TEXTS, json_lines, tokenizer_bytes

from bootstrap.manifest import Data, Manifest, Model
from node.data.prepare import prepare
from node.data.supply import Given, make, tokens_for
from node.data.tokenizer import NEVER, FileTokenizer, tell_of_gaps
from protocols.errors import OperatorError

JAPANESE = "\u65e5\u672c\u8a9e"


def tokenizer_of_parts(**changes: Any) -> bytes:
    """BPE over the letters of English, in the form of a file with these changes."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = {character: i for i, character in enumerate(f"\u2581{string.ascii_letters}")}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    made.add_special_tokens(["</s>"])
    form = json.loads(made.to_str())
    form["model"] |= changes.pop("model", {})
    form["model"]["vocab"] |= {token: 100 + i for i, token in enumerate(changes.pop("more", []))}
    return json.dumps(form | changes).encode()


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
IN_TURN = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": False},
        {**BYTE_LEVEL, "use_regex": False},
    ],
}


def test_text_that_a_tokenizer_leaves_out_whole_is_refused_and_the_danger_told(tmp_path):
    tokenizer, told = FileTokenizer(tokenizer_of_parts()), []
    source = json_lines(tmp_path / "a.jsonl", [*TEXTS, "\U0001f600", "  "])
    prepare([str(source)], tmp_path / "out", tokenizer, tell=told.append)
    assert [line for line in told if "no unknown token" in line]
    source = json_lines(tmp_path / "b.jsonl", [*TEXTS, JAPANESE])
    with pytest.raises(OperatorError, match="cannot encode") as caught:
        prepare([str(source)], tmp_path / "other", tokenizer)
    assert caught.value.code == "E604"
    assert JAPANESE in caught.value.why


def test_who_creates_a_run_or_joins_it_is_told_before_text_is_encoded(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    text, given, told = tmp_path / "text.txt", tmp_path / "tokenizer.json", []
    text.write_text("\n\n".join(TEXTS))
    given.write_bytes(tokenizer_of_parts())
    run = Manifest(model=Model(max_seq_len=32), data=Data(seq_len=32))
    made = make(run, str(text), Given(given), tmp_path, lambda *far: None, told.append)
    assert [line for line in told if "leaves out characters" in line]
    told.clear()
    tokens_for(made.manifest, made.shard, made.tokenizer, str(text), lambda *far: None, told.append)
    assert [line for line in told if "leaves out characters" in line]


def test_tokenizers_as_they_are_usual_have_no_gaps():
    """As in GPT-2; in Llama 3 and files of tiktoken's; in Llama 2; as newer ones normalize."""
    tokenizers = pytest.importorskip("tokenizers")
    every = sorted({*tokenizers.pre_tokenizers.ByteLevel.alphabet()} - {*string.ascii_letters})
    seen = [token for token in every if token not in NEVER]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    for data in (
        tokenizer_bytes(),
        tokenizer_of_parts(pre_tokenizer=BYTE_LEVEL, more=every),
        tokenizer_of_parts(pre_tokenizer=IN_TURN, more=seen),
        tokenizer_of_parts(normalizer={"type": "ByteLevel"}, more=seen),
        tokenizer_of_parts(model={"byte_fallback": True}, more=fallback),
        tokenizer_of_parts(model={"unk_token": "<unk>"}, more=["<unk>"]),
    ):
        told, tokenizer = [], FileTokenizer(data)
        tell_of_gaps(tokenizer, told.append)
        assert not told
        assert len(tokenizer.encode([JAPANESE.encode()])[0])
    gaps = FileTokenizer(tokenizer_of_parts(pre_tokenizer=BYTE_LEVEL))  # made of English alone
    tell_of_gaps(gaps, told.append)
    assert told
