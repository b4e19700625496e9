"""Which token ends a document: as the model's config.json says, or as tokenizers in use have it."""

import json
from pathlib import Path

import numpy as np
import pytest
from data_kit import TEXTS, json_lines

from bootstrap.manifest import Data, Manifest, Model, Rounds
from node.commands.manifest import manifest_for
from node.config import NodeConfig
from node.data.begun import Job
from node.data.live import StreamData
from node.data.prepare import prepare
from node.data.stream_recipe import Recipe, read_recipe
from node.data.supply import Given, _written, make, tokens_for
from node.data.tokenizer import BYTES, FileTokenizer, read_tokenizer, tell_of_gaps
from node.trainer.corpus import collect
from node.trainer.data import open_tokens
from protocols.errors import OperatorError

QUIET = lambda done, total: None  # noqa: E731
DEEPSEEKS = "<｜end▁of▁sentence｜>"  # noqa: RUF001
LLAMA = {
    "model_type": "llama", "vocab_size": 400, "hidden_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 400, "n_embd": 32, "n_layer": 1, "n_head": 2,
        "n_positions": 64}  # fmt: skip


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


def tokenizer(*special: str, ordinary: tuple[str, ...] = ()) -> bytes:
    """Bytes, and these: the special ones first, from id 256 on."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(list(special))
    made.add_tokens(list(ordinary))
    return made.to_str().encode()


GEMMAS = ("<pad>", "<eos>", "<bos>")


def end_of(data: bytes, **said: int | str) -> str | None:
    found = FileTokenizer(data, **said)
    return found.token(found.document_end)


def test_a_folder_that_was_begun_with_ends_left_in_its_texts_is_not_finished_without():
    coder = FileTokenizer(tokenizer("<|endoftext|>"))
    before = Job([], coder, "text", 1000).settings
    coder.spells_end = True
    assert Job([], coder, "text", 1000).settings != before


@pytest.mark.parametrize("kind", ["WordLevel", "BPE", "bytes"])
def test_what_has_no_token_but_the_end_is_told_of_and_does_not_vanish(kind):
    """Unknown words are taken out with the ends."""
    tokenizers = pytest.importorskip("tokenizers")
    end, words = "<|endoftext|>", ("fox", "dog", "the", "a", "b", "c", "d")
    if kind == "bytes":
        made = tokenizers.Tokenizer.from_str(tokenizer(end).decode())
        made.model.unk_token = end
    else:
        letters = [letter for word in words for letter in word]
        vocabulary = {end: 0} | {w: i for i, w in enumerate(dict.fromkeys((*words, *letters)), 1)}
        model = getattr(tokenizers.models, kind)
        parts = ([],) if kind == "BPE" else ()
        made = tokenizers.Tokenizer(model(vocabulary, *parts, unk_token=end))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        made.add_special_tokens([end])
    found, lines = FileTokenizer(made.to_str().encode()), []
    tell_of_gaps(found, lines.append)
    if kind == "bytes":  # each has a token
        assert (len(found.encode(["Füchse".encode()])[0]), lines) == (7, [])
        return
    assert "leaves out characters" in lines[0]
    assert len(found.encode([b"the ZZ dog"])[0]) == (2 if kind == "WordLevel" else 6)
    with pytest.raises(OperatorError) as caught:
        found.encode([b"the dog", b"ZZ XX 77"])
    assert caught.value.code == "E604"


def test_an_ordinary_token_that_looks_like_an_end_is_none():
    assert end_of(tokenizer(*GEMMAS, ordinary=("</s>",))) == "<eos>"
    assert end_of(tokenizer("</s>", "<eos>")) == "<eos>"
    assert end_of(tokenizer("<s>", "</s>")) == "</s>"
    assert end_of(tokenizer("<|begin|>", DEEPSEEKS)) == DEEPSEEKS
    with pytest.raises(OperatorError, match="no token that ends a document") as caught:
        FileTokenizer(tokenizer("<pad>", ordinary=("</s>",)))
    assert caught.value.code == "E604"


def test_what_a_configuration_says_counts_where_it_is_a_special_token():
    data = tokenizer("<|endoftext|>", "<|im_end|>", ordinary=("<tag>",))
    assert end_of(data, eos=257) == "<|im_end|>"
    assert end_of(tokenizer("<over>"), eos=256) == "<over>"  # though no list has it
    for other in (2, 258, 100_000):  # a config.json that only gives the shape
        assert end_of(data, eos=other) == "<|endoftext|>"


def test_an_end_that_is_settled_is_taken_as_it_is():
    data = tokenizer("<|endoftext|>", ordinary=("</s>",))
    assert end_of(data, document_end=257) == "</s>"
    assert end_of(data, document_end="</s>") == "</s>"
    for none in ("<none>", 258):
        with pytest.raises(OperatorError, match="has no token") as caught:
            FileTokenizer(data, document_end=none)
        assert caught.value.code == "E604"


def test_an_end_may_be_named_by_its_id():
    data = tokenizer("<|endoftext|>", ordinary=("</s>", "#257"))
    assert end_of(data, document_end="#257") == "</s>"
    assert end_of(data, document_end="#258") == "#257"
    assert [_written(FileTokenizer(data), number) for number in (257, 258, 300)] == [
        "'</s>'",
        "'#258'",
        "'#300'",
    ]
    for none in ("#259", "#-1", "#²"):
        with pytest.raises(OperatorError, match=f"has no token {none}"):
            FileTokenizer(data, document_end=none)


def of_pieces(model: str) -> bytes:
    """As those of T5 and XLM-R, to whose model a special token is a piece as any other."""
    tokenizers = pytest.importorskip("tokenizers")
    models, before = tokenizers.models, tokenizers.pre_tokenizers
    pieces = ["<unk>", "</s>", *map(chr, range(33, 127)), "\u2581"]
    if model == "Unigram":
        scores = [(piece, -8.0 if len(piece) == 1 else 0.0) for piece in pieces]
        made = tokenizers.Tokenizer(models.Unigram(scores, 0, False))
        made.pre_tokenizer = before.Metaspace()
    else:
        made = tokenizers.Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, "<unk>"))
        made.pre_tokenizer = before.WhitespaceSplit()
    made.add_special_tokens(["<unk>", "</s>"])
    return made.to_str().encode()


@pytest.mark.parametrize("model", ["Unigram", "WordLevel"])
def test_text_that_spells_the_end_out_does_not_end_a_document(tmp_path, monkeypatch, model):
    data = of_pieces(model)
    coder = FileTokenizer(data)
    assert (coder.document_end, coder.spells_end) == (1, True)
    (plain, spelled, other) = coder.encode([b"a b", b"a </s> b </s>", b"<unk>"])
    assert 1 not in spelled
    assert {*plain.tolist()} <= {*spelled.tolist()}
    assert other.tolist()  # what is no end stays
    source = json_lines(tmp_path / "a.jsonl", [f"price {n} </s> now{n}" for n in range(200)])
    index = prepare([str(source)], tmp_path / "out", coder)
    ids = np.fromfile(tmp_path / "out" / index.shards[0].name, dtype=index.dtype)
    assert (ids == 1).sum() == index.documents
    earlier = tmp_path / "text.txt"
    earlier.write_text("\n\n".join(TEXTS[:60]), encoding="utf-8")
    corpus = collect(Data(recipe="text", path=str(earlier)))
    names = {corpus.training_file(b"", 32, coder, coder.vocab_size).name}
    monkeypatch.setattr(coder, "spells_end", False)
    names.add(corpus.training_file(b"", 32, coder, coder.vocab_size).name)
    assert len(names) == 2  # a version that left the ends in has kept its own


def test_where_text_may_not_be_told_from_the_end_it_stays():
    """A token that is not special is one of text, as a line's end."""
    data = tokenizer("<|endoftext|>", ordinary=("</s>",))
    assert FileTokenizer(data, document_end="</s>").encode([b"a</s>b"])[0].tolist()[1] == 257
    special = FileTokenizer(data)
    assert not special.spells_end
    assert special.decode(special.encode([b"a<|endoftext|>b"])[0].tolist()) == "a<|endoftext|>b"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(TEXTS[:60]), encoding="utf-8")
    return path


def run_of(config: dict[str, object], at: Path) -> Manifest:
    at.write_text(json.dumps(config))
    manifest = manifest_for(NodeConfig(hf_config=at), changes=["data.seq_len=32"])
    assert manifest is not None
    return manifest


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["ours", "theirs"])
def test_a_run_of_a_given_model_ends_documents_as_its_configuration_says(text, tmp_path, config):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizer("<|endoftext|>", "<|im_end|>"))
    given = Given(tokenizer=path)
    for ends, expected in (([257, 256], 257), (256, 256), (None, 256), (3, 256)):
        run = run_of(config | {"eos_token_id": ends}, tmp_path / "config.json")
        made = make(run, str(text), given, tmp_path / "cache", QUIET)
        assert made.manifest.model.document_end == expected
        mine = np.asarray(open_tokens(made.tokens, 400))
        assert mine[-1] == expected
        theirs = tokens_for(made.manifest, made.shard, made.tokenizer, str(text), QUIET)
        assert np.array_equal(np.asarray(open_tokens(theirs, 400)), mine)


def test_over_bytes_a_document_ends_as_it_always_does(text, tmp_path):
    run = run_of(LLAMA | {"eos_token_id": 2, "vocab_size": 256}, tmp_path / "config.json")
    made = make(run, str(text), Given(), tmp_path / "cache", QUIET)
    assert (made.manifest.data.tokenizer, made.manifest.model.document_end) == (BYTES, 0)


def test_a_token_folder_says_itself_what_ends_its_documents(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizer("<|endoftext|>", ordinary=("</s>",)))
    source = json_lines(tmp_path / "a.jsonl", TEXTS[:60])
    folders = [tmp_path / "usual", tmp_path / "other"]
    for folder, end in zip(folders, (None, "</s>"), strict=True):
        prepare([str(source)], folder, read_tokenizer(path, document_end=end))
    run = Manifest(data=Data(seq_len=32))
    made = make(run, str(folders[1]), Given(), tmp_path / "cache", QUIET)
    assert made.manifest.model.document_end == 257
    arguments = (made.manifest, made.shard, made.tokenizer)
    assert tokens_for(*arguments, str(folders[1]), QUIET) == str(folders[1])
    with pytest.raises(OperatorError, match="another token between documents") as caught:
        tokens_for(*arguments, str(folders[0]), QUIET)
    assert caught.value.code == "E603"
    assert "end with '<|endoftext|>', the run's with '</s>'" in caught.value.why
    assert caught.value.fix == "make it again, with '</s>' as --document-end"


@pytest.mark.parametrize("end", [259, 257, None], ids=["as-before", "special", "none-special"])
def test_a_stream_that_was_begun_before_recipes_said_the_end_goes_on_with_the_runs(tmp_path, end):
    """And has one name on all hosts, also on those that make their recipe anew."""
    pytest.importorskip("datasets")
    special, earlier = (GEMMAS, 259) if end else (("<pad>",), 257)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizer(*special, ordinary=("</s>",)))
    data, end = path.read_bytes(), end or earlier
    place = f"datasets:json?files={json_lines(tmp_path / 'a.jsonl', TEXTS)}"
    digest = FileTokenizer(data, document_end=end).digest
    model = Model(vocab_size=400, max_seq_len=32, document_end=end)
    few = Rounds(inner_steps=2, overlap_steps=0)
    run = Manifest(model=model, data=Data(seq_len=32, batch_size=2, tokenizer=digest), rounds=few)
    made = read_recipe(tokens_for(run, b"", data, place, QUIET))
    before = Recipe.model_validate_json(made.model_dump_json(exclude={"document_end"}))
    assert (before.digest == made.digest) == (end == earlier)
    if end == earlier:
        ids = StreamData(before, run, tmp_path / "cache").parts.get(0, 0)
        assert ids[-1] == earlier
        assert np.array_equal(StreamData(made, run, tmp_path / "other").parts.get(0, 0), ids)
    else:
        assert StreamData(made, run, tmp_path / "cache").parts.get(0, 0)[-1] == end
