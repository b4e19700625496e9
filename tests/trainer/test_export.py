"""The export: transformers loads it and computes what we compute."""

import json
import re
from pathlib import Path

import pytest
import torch
from data_kit import tokenizer_bytes
from hf_kit import GPT2, MIXTRAL
from places import ROOT
from safetensors import SafetensorError
from safetensors.torch import load_file

from bootstrap.manifest import Model
from node.data.tokenizer import FileTokenizer
from node.hf.export import byte_names, export_hf, shard_names, split
from node.hf.import_hf import import_hf
from node.trainer.hf import model_of
from node.trainer.layout import Layout
from node.trainer.model import build
from protocols.errors import OperatorError

BASE = Model(d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=48, max_seq_len=32)
VARIANTS = {
    "tied, grouped": {},
    "untied": {"tied_embeddings": False},
    "full heads": {"n_kv_heads": 4},
    "one key head, other constants": {"n_kv_heads": 1, "rope_theta": 500.0, "norm_eps": 1e-2},
    "larger vocabulary": {"vocab_size": 300, "tied_embeddings": False},
}
TEXT = "def f(x):\n\treturn  'café' # ≥ 3 😀\n\n  done "


def vector_of(config: Model) -> torch.Tensor:
    """Parameters that a wrong order, constant or norm could not hide in."""
    layout = Layout.of_config(config)
    vector = layout.flatten_into(build(config, 1), torch.empty(layout.size))
    noise = torch.randn(layout.size, generator=torch.Generator().manual_seed(2))
    return vector + 0.05 * noise


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_transformers_gives_our_logits(tmp_path: Path, changes: dict[str, object]):
    from transformers import AutoModelForCausalLM

    config = Model.model_validate({**BASE.model_dump(), **changes})
    vector = vector_of(config)
    ours = build(config, 0)
    Layout.of_config(config).load_from(vector, ours)
    folder = export_hf(config, vector, tmp_path / "model")
    theirs, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(theirs).__name__ == "LlamaForCausalLM"
    assert theirs.dtype == torch.float32
    x = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(x).logits, ours(x), atol=1e-5, rtol=1e-5)
    size = sum(p.numel() for p in theirs.parameters())
    assert size == vector.numel()


def test_transformers_tokenizes_to_bytes(tmp_path: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(export_hf(BASE, vector_of(BASE), tmp_path / "model"))
    assert tokenizer(TEXT)["input_ids"] == list(TEXT.encode())
    assert tokenizer.decode(list(TEXT.encode())) == TEXT
    assert tokenizer.eos_token_id == 0


def pieces_tokenizer() -> bytes:
    """Of another kind, which puts a token before every text, and cuts and pads."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=special, unk_token="<unk>")
    tokenizer.train_from_iterator([TEXT] * 20, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(pad_token="</s>", pad_id=2, length=200)
    return str(tokenizer.to_str()).encode()


@pytest.mark.parametrize("kind", ["ours", "gpt2", "mixtral"])
@pytest.mark.parametrize("data", [tokenizer_bytes(), pieces_tokenizer()], ids=["bpe", "unigram"])
def test_transformers_tokenizes_as_the_run_did(tmp_path: Path, kind: str, data: bytes):
    from transformers import AutoTokenizer

    ours = FileTokenizer(data)
    config = {"ours": BASE, "gpt2": model_of(GPT2), "mixtral": model_of(MIXTRAL)}[kind]
    config = config.model_copy(update={"document_end": ours.document_end})
    vector = torch.zeros(Layout.of_config(config).size)
    folder = export_hf(config, vector, tmp_path / "model", tokenizer=data)
    assert (folder / "tokenizer.json").read_bytes() == data
    theirs = AutoTokenizer.from_pretrained(folder)
    ids = ours.encode([TEXT.encode()])[0].tolist()
    assert theirs(TEXT, add_special_tokens=False)["input_ids"] == ids
    assert theirs.decode(ids) == ours.decode(ids)
    assert theirs.eos_token_id == ours.document_end
    assert theirs.model_max_length == config.max_seq_len


def test_it_generates(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    folder = export_hf(BASE, vector_of(BASE), tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.tensor([[72, 105]])
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_length=8,
        pad_token_id=0,
    )
    assert out[0, :2].tolist() == [72, 105]
    assert 3 <= out.shape[1] <= 8


def test_the_docs_example_writes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    page = (ROOT / "docs" / "data.md").read_text()
    (code,) = (
        block
        for block in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
        if "generate" in block
    )
    export_hf(BASE, vector_of(BASE), tmp_path / "weights")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/data.md", "exec"), {})
    said = capsys.readouterr().out
    assert said.startswith("Once upon a time")
    assert len(said) > len("Once upon a time\n")


SHARDED = {
    "ours": BASE.model_copy(update={"tied_embeddings": False}),
    "ours, experts": BASE.model_copy(update={"experts": 3, "top_k": 2}),
    "gpt2": model_of(GPT2),
    "mixtral": model_of(MIXTRAL),
}


@pytest.mark.parametrize("config", SHARDED.values(), ids=SHARDED.keys())
def test_several_files_are_one_model(tmp_path: Path, config: Model):
    from transformers import AutoModelForCausalLM

    vector, most = vector_of(config), 20_000
    folder = export_hf(config, vector, tmp_path / "model", max_shard=most)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files == [
        f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, 1 + len(files))
    ]
    assert len(files) > 3
    assert set(index["weight_map"].values()) == set(files)
    held = {file: load_file(folder / file) for file in files}
    for file, weights in held.items():
        assert len(weights) == 1 or sum(w.nbytes for w in weights.values()) <= most
        assert all(index["weight_map"][name] == file for name in weights)
    assert index["metadata"]["total_size"] == 4 * vector.numel()
    assert torch.equal(import_hf(config, folder, torch.zeros_like(vector)), vector)
    ours = build(config, 0).eval()
    Layout.of_config(config).load_from(vector, ours)
    theirs, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    x = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(x).logits, ours(x), atol=1e-5, rtol=1e-5)


def test_files_are_filled_in_order():
    sizes = {"a": 3, "b": 2, "c": 9, "d": 1, "e": 4, "f": 1}
    assert split(sizes, 5) == [["a", "b"], ["c"], ["d", "e"], ["f"]]
    assert split(sizes, 20) == [list(sizes)]
    assert shard_names(1) == ["model.safetensors"]


def test_byte_names_are_the_known_ones():
    names = byte_names()
    assert len(set(names)) == 256
    assert (names[0], names[ord(" ")], names[ord("\n")], names[ord("A")]) == ("Ā", "Ġ", "Ċ", "A")


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("pathlib.Path.write_text", OSError(28, "No space left on device")),
        (
            "safetensors.torch.save_file",
            SafetensorError("I/O error: No space left on device (os error 28)"),
        ),
    ],
)
def test_a_failed_export_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, error: Exception
):
    def full(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(target, full)
    with pytest.raises(OperatorError, match="No space left") as caught:
        export_hf(BASE, vector_of(BASE), tmp_path / "model")
    assert caught.value.code == "E602"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("most", [1e9, 20_000])
def test_all_files_are_for_the_same_readers(tmp_path: Path, most: float):
    folder = export_hf(BASE, vector_of(BASE), tmp_path / "model", max_shard=most)
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1


def test_nothing_is_overwritten(tmp_path: Path):
    folder, vector = tmp_path / "model", vector_of(BASE)
    folder.mkdir()
    export_hf(BASE, vector, folder)  # an empty folder may be filled
    before = (folder / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(OperatorError, match="not an empty folder"):
        export_hf(BASE, vector, folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="layout of"):
        export_hf(BASE, vector[:-1], tmp_path / "other")
    assert not (tmp_path / "other").exists()
