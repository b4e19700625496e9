"""A run of a model that is given with --hf-config or --init-from: checked as the run it is."""

import json
from pathlib import Path
from typing import Any

import pytest

from bootstrap.manifest import Manifest
from node.commands.manifest import manifest_for
from node.config import resolve
from protocols.errors import OperatorError

LLAMA = {
    "model_type": "llama", "vocab_size": 32_000, "hidden_size": 32, "num_hidden_layers": 24,
    "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 2048,
}  # fmt: skip
# calls its layers by names of its own
XLM = {"model_type": "xlm", "vocab_size": 300, "emb_dim": 32, "n_heads": 2, "n_layers": 3}


def run_of(
    folder: Path, plain: dict[str, Any], *changes: str, preset: str = "", **settings: Any
) -> Manifest:
    """The run that a node creates of this config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(plain))
    config = resolve({"dir": str(folder), "hf_config": str(path), **settings}, {})
    found = manifest_for(config, preset, changes)
    assert found is not None
    return found


def refused(*given: Any, **settings: Any) -> str:
    with pytest.raises(OperatorError) as caught:
        run_of(*given, **settings)
    assert caught.value.code == "E204"
    return caught.value.why


def test_its_lengths_and_layers_are_those_that_count(tmp_path: Path) -> None:
    run = run_of(tmp_path, LLAMA, "data.seq_len=1024")
    assert (run.data.seq_len, run.model.max_seq_len, run.model.n_layers) == (1024, 2048, 24)
    assert Manifest.parse(run.canonical()) == run  # peers take it
    assert run_of(tmp_path, LLAMA, "mode=streaming").rounds.fragments == 4
    assert run_of(tmp_path, LLAMA, "rounds.fragments=12")
    assert run_of(tmp_path, LLAMA).model == run.model


def test_what_it_cannot_do_is_refused(tmp_path: Path) -> None:
    assert "exceeds model.max_seq_len 2048" in refused(tmp_path, LLAMA, "data.seq_len=4096")
    short = LLAMA | {"max_position_embeddings": 64}
    assert "data.seq_len 128 exceeds model.max_seq_len 64" in refused(tmp_path, short)
    few = LLAMA | {"num_hidden_layers": 1}
    assert "exceeds model.n_layers 1" in refused(tmp_path, few, "rounds.fragments=2")


def test_layers_that_are_not_known_by_name_make_no_fragments(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert run_of(tmp_path, XLM).model.kind == "hf"
    assert "2 fragments of 0 layers" in refused(tmp_path, XLM, "rounds.fragments=2")


def test_of_a_preset_the_rest_stays(tmp_path: Path) -> None:
    changes = ("model.attention=document", "data.seq_len=1024")
    run = run_of(tmp_path, LLAMA, *changes, preset="moe-1b")
    assert (run.model.attention, run.model.experts, run.model.d_model) == ("document", 0, 32)
    assert (run.data.seq_len, run.data.batch_size) == (1024, 128)
    assert "model.n_layer" in refused(tmp_path, LLAMA, "model.n_layer=3")


def test_of_a_run_file_the_rest_stays(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[model]\nattention = "document"\nn_layers = 1\n[data]\nseq_len = 512\n')
    run = run_of(tmp_path, LLAMA, run=str(file))
    assert (run.model.attention, run.model.n_layers, run.data.seq_len) == ("document", 24, 512)
    file.write_text("[data]\nseq_len = 4096\n")
    assert "exceeds model.max_seq_len 2048" in refused(tmp_path, LLAMA, run=str(file))


def test_who_joins_or_goes_on_without_a_run_of_its_own_needs_none(tmp_path: Path) -> None:
    gone = {"dir": str(tmp_path), "hf_config": str(tmp_path / "gone")}
    assert manifest_for(resolve({**gone, "peers": ["a:1"]}, {})) is None
    assert manifest_for(resolve({**gone, "resume": True}, {})) is None
    with pytest.raises(OperatorError) as caught:
        manifest_for(resolve(gone, {}))
    assert caught.value.code == "E606"
    assert caught.value.what == f"cannot start from {tmp_path / 'gone'}"


@pytest.mark.parametrize("text", ['{"model_type": "llama"', "[1]", "[" * 100_000])
def test_a_config_that_is_not_json_is_told_as_that(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(OperatorError) as caught:
        manifest_for(resolve({"dir": str(tmp_path), "hf_config": str(file)}, {}))
    assert (caught.value.code, caught.value.what) == ("E606", f"cannot start from {file}")
    assert caught.value.why.startswith("it is not JSON")
    assert "a whole config.json" in caught.value.fix


def test_a_model_is_described_once(tmp_path: Path) -> None:
    both = {"dir": str(tmp_path), "hf_config": str(tmp_path / "a"), "init_from": str(tmp_path)}
    with pytest.raises(OperatorError) as caught:
        manifest_for(resolve(both, {}))
    assert (caught.value.code, caught.value.what) == ("E204", "two models")


@pytest.mark.usefixtures("own_directory")
@pytest.mark.parametrize("flag", ["init_from", "hf_config"])
def test_a_name_of_the_hub_is_told_from_a_folder_that_is_not_there(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def refused(given: str) -> OperatorError:
        config = resolve({flag: given}, {})
        with pytest.raises(OperatorError) as caught:
            manifest_for(config, "", ())
        assert caught.value.code == "E606"
        return caught.value

    told = refused("Qwen/Qwen2.5-0.5B")
    assert told.what == "cannot start from Qwen/Qwen2.5-0.5B"
    assert told.fix.startswith(
        "hf download Qwen/Qwen2.5-0.5B --local-dir weights, then --init-from weights"
    )
    Path("models").mkdir()
    for place in ("models/qwen", "weights", "/Qwen/Qwen2.5-0.5B", "../Qwen/Qwen2.5-0.5B"):
        assert "hf download" not in refused(place).fix
