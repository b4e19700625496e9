"""docs/data.md: every command of it, run as it stands there."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from data_kit import TEXTS, json_lines, tokenizer_bytes
from hf_kit import GPT2, OURS
from places import ROOT
from swarm_kit import islands

from node.hf.export import export_hf
from node.trainer.layout import Layout, initial_vector

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]

PAGE = ROOT / "docs" / "data.md"
BLOCKS = re.findall(r"^```\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]
ON_THE_HUB = "datasets:HuggingFaceFW/"  # data that only Hugging Face's Hub has: not asked here
SMALL = (
    "--set", "rounds.inner_steps=4", "--set", "rounds.total_rounds=2", "--set", "data.seq_len=32",
)  # fmt: skip


def test_every_command_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    there = [command for command in COMMANDS if ON_THE_HUB not in command]
    assert (len(there), len(COMMANDS)) == (9, 10)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("\n\n".join(TEXTS), encoding="utf-8")
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_bytes())
    (tmp_path / "config.json").write_text(json.dumps(GPT2 | {"vocab_size": 600}))
    json_lines(tmp_path / "corpus.jsonl")
    (tmp_path / "corpus").mkdir()
    json_lines(tmp_path / "corpus" / "a.jsonl", field="body")
    vector = initial_vector(OURS, 0, torch.empty(Layout.of_config(OURS).size))
    export_hf(OURS, vector, tmp_path / "weights")
    with islands(tmp_path / "islands") as made:
        for command in there:
            words = shlex.split(command)[1:]
            if words[0] == "start":
                island = made.new(*words[1:], *SMALL)
                assert island.await_end(120) == 0, f"{command}\n{island.tail()}"
                assert set(island.rounds()) == {0, 1}
                continue
            if words[0] == "export":
                words[1], words[3] = "back/", str(made.all[-1].dir)
            done = subprocess.run(
                [sys.executable, "-m", "node", *words],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
                env={**os.environ, "COLUMNS": "100"},
            )
            assert done.returncode == 0, f"{command}\n{done.stderr}"
    assert (tmp_path / "back" / "model.safetensors").is_file()
