"""What a run trains on: its tokenizer, its shard and its tokens, at the creator and at joiners."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from data_kit import TEXTS, folder, serving, tokenizer_bytes

from bootstrap.manifest import Data, Manifest, Model
from node.data import intact
from node.data.supply import Given, make, tokens_for, usable
from node.data.tokenizer import ByteTokenizer, FileTokenizer, tokenizer_of
from node.entry.differing import differences
from node.hf.export import bytes_file, export_hf
from node.hf.import_hf import read_config
from node.trainer.data import IGNORED, TrainingData, open_tokens, targets
from node.trainer.evaluate import shard_tokens
from node.trainer.layout import Layout, initial_vector
from protocols.errors import OperatorError

QUIET = lambda done, total: None  # noqa: E731
LLAMA = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 64,
}  # fmt: skip


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(TEXTS), encoding="utf-8")
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizer_bytes())
    return path


def manifest(**model) -> Manifest:
    return Manifest(model=Model(**model), data=Data(seq_len=64))


def test_a_tokenizer_goes_into_the_manifest_and_a_joiner_gets_the_same_tokens(
    text, tokenizer, tmp_path
):
    made = make(manifest(), str(text), Given(tokenizer), tmp_path / "cache", QUIET)
    digest = FileTokenizer(made.tokenizer).digest
    assert made.manifest.data.tokenizer == digest
    assert made.manifest.data.path == ""
    assert (made.manifest.model.vocab_size, made.manifest.model.document_end) == (600, 0)
    windows = shard_tokens(made.shard, 64, 600)
    assert windows.shape == (64, 65)
    ids = open_tokens(made.tokens, 600)
    assert ids.dtype == np.dtype("<u2")
    decoded = tokenizer_of(digest, made.tokenizer).decode(ids[:200].tolist())
    assert decoded.partition("<|endoftext|>")[0] in text.read_text()
    theirs = tokens_for(made.manifest, made.shard, made.tokenizer, str(text), QUIET)
    assert Path(theirs).read_bytes() == Path(made.tokens).read_bytes()


@pytest.mark.parametrize("kind", ["text", "folder"])
@pytest.mark.parametrize(("islands", "repeats"), [(1, False), (100_000, True)])
def test_fewer_windows_than_a_round_is_to_have_are_told(text, tmp_path, kind, islands, repeats):
    data, rounds = Data(seq_len=64, islands=islands, batch_size=1), {"inner_steps": 5}
    own = Manifest.model_validate({"data": data, "rounds": rounds})
    place = str(text if kind == "text" else folder(tmp_path / "tokens"))
    told: list[str] = []
    made = make(own, place, Given(), tmp_path / "cache", QUIET, told.append)
    tokens_for(made.manifest, made.shard, made.tokenizer, place, QUIET, told.append)
    assert len(told) == 2 * repeats
    assert all("fewer than the 500,000 that a round has" in line for line in told)


@pytest.mark.parametrize(
    ("changes", "name"), [({}, "tiny-text"), ({"name": "tiny-docs"}, "tiny-docs")]
)
def test_a_run_of_its_creators_text_is_not_called_after_another_corpus(
    text, tmp_path, changes, name
):
    own = Manifest(data=Data(seq_len=64), **changes)
    made = make(own, str(text), Given(), tmp_path / "cache", QUIET)
    assert made.manifest.name == name
    # whoever brings the same settings, with other text or none, takes part
    assert not differences(own, made.manifest)
    assert not differences(Manifest(data=Data(seq_len=64)), made.manifest)
    named = Manifest(data=Data(seq_len=64), name="another")
    assert differences(named, made.manifest) == [f"name another != {name}"]


def test_with_a_tokenizer_nothing_evaluated_is_trained_on(text, tokenizer, tmp_path):
    made = make(manifest(), str(text), Given(tokenizer), tmp_path / "cache", QUIET)
    other = tmp_path / "other.txt"  # the same text, cut otherwise by what stands between
    other.write_text("\n\n".join("An own word. " + text for text in TEXTS), encoding="utf-8")
    tokens = tokens_for(made.manifest, made.shard, made.tokenizer, str(other), QUIET)
    trained = Path(tokens).read_bytes()
    for window in np.frombuffer(made.shard, "<u2").reshape(-1, 65):
        inner = window[8:-8]
        if (inner != 0).all():
            assert inner.tobytes() not in trained


def test_a_larger_vocabulary_than_the_tokenizer_has(text, tmp_path):
    """As a padded embedding has; ids are stored as wide as the model's vocabulary asks for."""
    made = make(manifest(vocab_size=70_000), str(text), Given(), tmp_path / "cache", QUIET)
    ids = open_tokens(made.tokens, 70_000)
    assert ids.dtype == np.dtype("<u4")
    assert ids.max() < 256
    assert shard_tokens(made.shard, 64, 70_000).max() < 256


def test_a_vocabulary_that_is_too_small_is_refused(text, tokenizer, tmp_path):
    with pytest.raises(OperatorError, match="too small") as caught:
        make(manifest(vocab_size=500), str(text), Given(tokenizer), tmp_path / "cache", QUIET)
    assert caught.value.code == "E604"


@pytest.mark.parametrize("bpe", [False, True])
@pytest.mark.parametrize("remote", [False, True])
def test_a_token_folder_here_or_at_a_url(tmp_path, bpe, remote, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    made = folder(tmp_path / "www" / "data", bpe=bpe)
    with serving(tmp_path / "www") as server:
        place = f"{server.url}/data" if remote else str(made)
        supply = make(manifest(), place, Given(), tmp_path / "cache", QUIET)
        assert supply.tokens == place
        assert usable(place)
        run = supply.manifest
        assert (run.data.tokenizer == "bytes") != bpe
        tokens = open_tokens(place, run.model.vocab_size, tmp_path / "cache", 10**9)
        data = TrainingData.of(run, tokens)
        inputs, _ = data.batch(0, 0, 1, 0)
        assert inputs.shape == (8, 64)
        assert (data.ahead is not None) == remote
        if data.ahead is not None:  # else it would go on asking when the server is gone
            assert data.ahead.wait(60.0)
        assert tokens_for(run, supply.shard, supply.tokenizer, place, QUIET) == place
        other = run.model_copy(update={"data": run.data.model_copy(update={"tokenizer": "0" * 64})})
        with pytest.raises(OperatorError, match="another tokenizer"):
            tokens_for(other, supply.shard, b"", place, QUIET)
        with pytest.raises(ValueError, match="vocabulary"):
            open_tokens(place, 100, tmp_path / "cache", 10**9)


@pytest.mark.parametrize("name", ["train-00001.bin", "train-00001.ends", "held-out.ends"])
def test_a_damaged_token_folder_is_not_trained_on(tmp_path, monkeypatch, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    made = folder(tmp_path / "data", shard_tokens=30_000)
    run = make(manifest(), str(made), Given(), tmp_path, QUIET)
    hashed = []
    plain = intact.file_sha256
    monkeypatch.setattr(intact, "file_sha256", lambda path: hashed.append(path.name) or plain(path))

    def again() -> None:
        tokens_for(run.manifest, run.shard, run.tokenizer, str(made), QUIET)

    again()
    assert not hashed  # it was found intact before
    whole = (made / name).read_bytes()
    (made / name).write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    for _ in range(2):
        with pytest.raises(OperatorError, match="sha256") as caught:
            again()
        assert (caught.value.code, set(hashed)) == ("E603", {name})
    (made / name).unlink()
    with pytest.raises(OperatorError, match="missing") as caught:
        make(manifest(), str(made), Given(), tmp_path, QUIET)
    assert caught.value.code == "E603"
    (made / name).write_bytes(whole)
    again()


def test_a_model_that_is_not_there_is_named_in_words(tmp_path):
    with pytest.raises(OperatorError) as caught:
        read_config(tmp_path / "nowhere")
    assert (caught.value.code, caught.value.why) == ("E606", "No such file or directory")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"vocab_size": -1}, "vocab_size = -1: must be 2 to 1000000"),
        ({"num_key_value_heads": 3}, "model.n_heads 2 is no multiple of n_kv_heads 3"),
        ({"intermediate_size": ...}, "it does not say what 'intermediate_size' is"),
    ],
)
def test_a_configuration_that_cannot_be_ours_is_told_in_our_words(tmp_path, change, why):
    llama = LLAMA | {"vocab_size": 256} | change
    (tmp_path / "config.json").write_text(
        json.dumps({key: value for key, value in llama.items() if value is not ...})
    )
    with pytest.raises(OperatorError) as caught:
        read_config(tmp_path)
    assert (caught.value.code, caught.value.why) == ("E606", why)


SMALL = {"d_model": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "d_ff": 64}


def weights_without_tokenizer(at: Path, vocab_size: int) -> Path:
    """A model folder as people have it, where they forgot a file."""
    model = Model(**SMALL, vocab_size=vocab_size)
    export_hf(model, initial_vector(model, 0, torch.empty(Layout.of_config(model).size)), at)
    (at / "tokenizer.json").unlink()
    return at


@pytest.mark.parametrize("kind", ["text", "folder"])
def test_bytes_are_not_taken_for_the_ids_of_weights(text, tokenizer, tmp_path, kind):
    place = str(text if kind == "text" else folder(tmp_path / "tokens"))
    weights = weights_without_tokenizer(tmp_path / "weights", 600)
    run = manifest(**SMALL, vocab_size=600)
    with pytest.raises(OperatorError, match="which tokenizer the weights") as caught:
        make(run, place, Given(init_from=weights), tmp_path / "cache", QUIET)
    assert caught.value.code == "E604"
    assert "600 ids" in caught.value.why
    if kind == "text":
        made = make(run, place, Given(tokenizer, init_from=weights), tmp_path / "cache", QUIET)
        assert made.manifest.data.tokenizer == FileTokenizer(tokenizer_bytes()).digest
    (weights / "tokenizer.json").write_bytes(bytes_file())  # and now they are known to be bytes
    made = make(run, place, Given(init_from=weights), tmp_path / "cache", QUIET)
    assert made.manifest.data.tokenizer == "bytes"
    assert made.manifest.model.initial
    assert not differences(run, made.manifest)  # who joins with the same settings has them
    bytes_alone = weights_without_tokenizer(tmp_path / "bytes", 256)
    run = manifest(**SMALL, vocab_size=256)
    made = make(run, place, Given(init_from=bytes_alone), tmp_path / "cache", QUIET)
    assert made.manifest.data.tokenizer == "bytes"


def test_tokens_of_another_tokenizer_than_that_of_the_weights_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    place = str(folder(tmp_path / "tokens", bpe=True))
    weights = weights_without_tokenizer(tmp_path / "weights", 600)
    run = manifest(**SMALL, vocab_size=600)
    make(run, place, Given(init_from=weights), tmp_path / "cache", QUIET)  # the folder says it
    (weights / "tokenizer.json").write_bytes(bytes_file())
    with pytest.raises(OperatorError, match="with another tokenizer than") as caught:
        make(run, place, Given(init_from=weights), tmp_path / "cache", QUIET)
    assert caught.value.code == "E604"


@pytest.mark.parametrize("vocabulary", [256, 600])
def test_a_new_model_with_more_ids_that_trains_on_bytes_is_told_of(text, tmp_path, vocabulary):
    told: list[str] = []
    run = manifest(vocab_size=vocabulary)
    make(run, str(text), Given(), tmp_path / "cache", QUIET, told.append)
    told = [line for line in told if line.startswith("trains on bytes")]
    assert len(told) == (vocabulary > 256)


def test_hostile_bytes_are_no_tokenizer():
    for data in (b"", b"{}", b"\xff" * 100, tokenizer_bytes()[:-100], b"[" * 100_000):
        with pytest.raises(OperatorError) as caught:
            FileTokenizer(data)
        assert caught.value.code == "E604"
    with pytest.raises(OperatorError, match="not the run's"):
        tokenizer_of("0" * 64, tokenizer_bytes())


def test_text_that_spells_a_special_token_is_text():
    tokenizer = FileTokenizer(tokenizer_bytes())
    (ids,) = tokenizer.encode([b"a<|endoftext|>b"])
    assert tokenizer.document_end not in ids
    assert tokenizer.decode(ids.tolist()) == "a<|endoftext|>b"


def test_the_first_token_of_a_document_is_no_target_where_documents_are_apart():
    tokens = np.array([5, 6, 0, 7, 8, 9, 0, 0, 4, 5, 6, 7], dtype=np.uint8)
    window = open_window(tokens)
    assert targets(window, None).tolist() == [[6, 0, 7, 8, 9, 0, 0, 4, 5, 6, 7]]
    apart = targets(window, ByteTokenizer.document_end).tolist()
    assert apart == [[6, 0, IGNORED, 8, 9, 0, IGNORED, IGNORED, 5, 6, 7]]


def open_window(tokens):
    return torch.from_numpy(tokens.astype(np.int64))[None]
