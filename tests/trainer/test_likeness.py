"""``node export --like``: the small files that make tokenizer and generation complete."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from data_kit import tokenizer_bytes

from bootstrap.manifest import Data, Manifest, Model
from bootstrap.signed_manifest import SignedManifest
from node.checkpoints.checkpoint import CheckpointStore
from node.checkpoints.index import Facts, said_by
from node.checkpoints.outer_files import OuterFiles, write_beside, write_outer
from node.data.tokenizer import BYTES, FileTokenizer
from node.hf.export import export_hf
from node.hf.likeness import TAKEN, files_like
from node.statedir import MANIFEST
from node.trainer.layout import Layout
from protocols.errors import OperatorError
from protocols.identity import Identity

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
SMALL = {
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "model_max_length": 77,
    },
    "special_tokens_map.json": {"eos_token": "<|endoftext|>"},
    "generation_config.json": {"eos_token_id": 0, "do_sample": False, "top_k": 3},
}


def original(folder: Path, tokenizer: bytes) -> Path:
    """As a chat model lies in Hugging Face's cache, with files that do not go along."""
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(tokenizer)
    for name, content in SMALL.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    for name in ("config.json", "model.safetensors", "modeling_evil.py", "README.md"):
        (folder / name).write_text("another's")
    return folder


def state(home: Path, tokenizer: bytes) -> Path:
    """A state directory with a checkpoint of a run with this tokenizer (empty: bytes)."""
    digest = FileTokenizer(tokenizer).digest if tokenizer else BYTES
    model = Model(vocab_size=600, d_model=32, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=48)
    manifest = Manifest(model=model, data=Data(tokenizer=digest))
    size = Layout.of_config(model).size
    signed = SignedManifest.create(manifest, Identity.from_seed(bytes(32)))
    store = CheckpointStore(home / "checkpoints")
    with store.draft() as draft:
        write_outer(draft, OuterFiles(torch.zeros(size), {"v": torch.zeros(size)}, signed))
        store.commit(draft, Facts(run=manifest.run_id.hex(), round=0, step=0, tokens=0))
    if tokenizer:
        (home / "tokenizer.json").write_bytes(tokenizer)
    return home


def test_an_export_like_a_folder_chats(command, tmp_path):
    transformers = pytest.importorskip("transformers")
    data = tokenizer_bytes()
    folder, out = original(tmp_path / "original", data), tmp_path / "out"
    home = state(tmp_path / "state", data)
    assert command("export", out, "--from", home, "--like", folder)[0] == 0
    assert {path.name for path in out.iterdir()} == {
        *SMALL, "chat_template.jinja", "tokenizer.json", "config.json", "model.safetensors",
    }  # fmt: skip
    for name in (*SMALL, "chat_template.jinja", "tokenizer.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes(), name
    assert json.loads((out / "config.json").read_text())["hidden_size"] == 32
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    said = [{"role": "user", "content": "hi"}]
    chat = tokenizer.apply_chat_template(said, tokenize=False)
    assert chat == "<user>hi<|endoftext|>"
    ids = tokenizer.apply_chat_template(said, tokenize=True)["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id == FileTokenizer(data).document_end
    assert tokenizer.model_max_length == 77
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert (model.generation_config.top_k, model.generation_config.do_sample) == (3, False)


def test_what_the_folder_lacks_is_written_as_without_it(command, tmp_path):
    data = tokenizer_bytes()
    folder = original(tmp_path / "original", data)
    (folder / "tokenizer_config.json").unlink()
    home = state(tmp_path / "state", data)
    assert command("export", tmp_path / "plain", "--from", home)[0] == 0
    assert command("export", tmp_path / "out", "--from", home, "--like", folder)[0] == 0
    plain, out = (
        (tmp_path / name / "tokenizer_config.json").read_text() for name in ("plain", "out")
    )
    assert plain == out
    again = command("export", tmp_path / "plain", "--from", home, "--like", folder)[2]
    assert again.startswith("error E602")
    assert not (tmp_path / "plain" / "chat_template.jinja").exists()


def test_the_tokenizer_is_the_run_s_wherever_the_checkpoint_lies(command, tmp_path):
    data = tokenizer_bytes()
    home = state(tmp_path / "state", data)
    (made,) = (home / "checkpoints").iterdir()
    copy = tmp_path / "place" / "copy"
    shutil.copytree(made, copy / made.name)  # as of a version that did not put it in
    told = command("export", tmp_path / "none", "--from", copy)[2]
    assert told.startswith("error E604")
    store = CheckpointStore(home / "checkpoints")

    def again(number):
        with store.draft() as draft:
            for name in ("outer.safetensors", MANIFEST):
                shutil.copy(made / name, draft)
            write_beside(draft, home)
            facts = Facts(run=said_by(made).run, round=number, step=0, tokens=0)
            return store.commit(draft, facts).path

    newer = again(1)
    shutil.copytree(newer, copy / newer.name)
    (home / "tokenizer.json").write_text("{}")  # damaged, so the next one has no better
    again(2)
    assert command("export", tmp_path / "none", "--from", home)[2].startswith("error E604")
    (home / "tokenizer.json").write_bytes(data)
    for number, source in enumerate((copy, copy / newer.name, home)):
        out = tmp_path / f"out{number}"
        assert command("export", out, "--from", source)[0] == 0
        assert (out / "tokenizer.json").read_bytes() == data


def test_a_run_over_bytes_takes_them_from_an_export_of_one(tmp_path):
    model = Model(d_model=32, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=48)
    vector = torch.zeros(Layout.of_config(model).size)
    folder = export_hf(model, vector, tmp_path / "first")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    taken = files_like(folder, b"")
    assert set(taken) == {"chat_template.jinja", "tokenizer_config.json", "generation_config.json"}
    out = export_hf(model, vector, tmp_path / "second", beside=taken)
    assert (out / "chat_template.jinja").read_text() == TEMPLATE
    with pytest.raises(OperatorError, match="is not that of the run, bytes"):
        files_like(original(tmp_path / "other", tokenizer_bytes()), b"")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (None, "it does not exist"),
        (lambda folder: folder.write_text("a file"), "it is no folder"),
        (lambda folder: folder.mkdir(), "it has no tokenizer.json"),
        (lambda folder: original(folder, tokenizer_bytes(700)), "is not the run's: its hash is"),
        (
            lambda folder: (original(folder, tokenizer_bytes()) / TAKEN[0]).write_text('{"eos'),
            f"{TAKEN[0]}: ",
        ),
        (
            lambda folder: (original(folder, tokenizer_bytes()) / TAKEN[1]).write_text("[]"),
            f"{TAKEN[1]}: it is no JSON object",
        ),
        (
            lambda folder: os.truncate(
                original(folder, tokenizer_bytes()) / "chat_template.jinja", 20_000_000
            ),
            "chat_template.jinja: it has more than 16,777,216 bytes",
        ),
    ],
    ids=["nothing", "file", "empty", "other tokenizer", "cut off", "no object", "too large"],
)
def test_a_folder_that_does_not_fit_is_refused(refused, tmp_path, spoil, why):
    home, folder = state(tmp_path / "state", tokenizer_bytes()), tmp_path / "like"
    if spoil:
        spoil(folder)
    told, _ = refused("E604", "export", tmp_path / "out", "--from", home, "--like", folder)
    assert f"cannot export like {folder}" in told
    assert why in told
    assert "fix: give --like the folder that the run's tokenizer is from" in told
    assert not (tmp_path / "out").exists()
