"""Does every layout compute what one process computes? ``python -m benchmarks.layouts``.

Each layout trains a tiny model for ten steps on the CPU with gloo, one process a rank, as an
island does in a swarm, and its θ is gathered for the round as it would be sent. Beside it stands
one process with the same data. ``--doc FILE`` writes the result into a table between two marks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bootstrap.manifest import Data, Inner, Manifest, Model, Rounds
from node.trainer.dims import ParallelDims

STEPS = 10
WAIT_S = 240.0  # for the ranks of one layout
BEGIN, END = "<!-- layouts: begin -->", "<!-- layouts: end -->"


# models of transformers: what their configurations have beside FOREIGN
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "gemma": {},
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
}
FOREIGN = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
}
FOREIGN_TP = tuple(name for name in FAMILIES if name != "gpt2")


@dataclass(frozen=True)
class Case:
    """One layout, what goes with it, and what it is called in the table."""

    name: str
    dims: ParallelDims = field(default_factory=ParallelDims)
    model: str = "dense"
    settings: dict[str, Any] = field(default_factory=dict)
    inner: dict[str, Any] = field(default_factory=dict)


def _dims(**sizes: Any) -> ParallelDims:
    return ParallelDims(**sizes)


CASES = (
    Case("DDP", _dims(dp_replicate=2)),
    Case("FSDP, ZeRO 3", _dims(dp_shard=2)),
    Case("FSDP, ZeRO 2", _dims(dp_shard=2, zero=2)),
    Case("FSDP, ZeRO 1, accumulated", _dims(dp_shard=2, zero=1), settings={"micro_batch": 1}),
    Case("FSDP, three uneven ranks", _dims(dp_shard=3)),
    Case("HSDP", _dims(dp_replicate=2, dp_shard=2)),
    Case("TP, sequence parallel", _dims(tp=2)),
    Case("FSDP x TP", _dims(dp_shard=2, tp=2)),
    Case("HSDP x TP", _dims(dp_replicate=2, dp_shard=2, tp=2)),
    Case("CP, Ulysses", _dims(cp=2)),
    Case("CP, ring", _dims(cp=2, attention="ring")),
    Case("CP, ring of four", _dims(cp=4, attention="ring")),
    Case("FSDP x CP", _dims(dp_shard=2, cp=2)),
    Case("CP (ring) x TP", _dims(cp=2, tp=2, attention="ring")),
    Case("FSDP x CP x TP", _dims(dp_shard=2, cp=2, tp=2, attention="ring")),
    Case("PP, GPipe", _dims(pp=2, schedule="gpipe")),
    Case("PP, 1F1B", _dims(pp=2)),
    Case("PP, interleaved 1F1B", _dims(pp=2, schedule="interleaved")),
    Case("PP, ZBV", _dims(pp=2, schedule="zbv")),
    Case("PP, four stages", _dims(pp=4)),
    Case("PP, head not tied", _dims(pp=2), model="untied"),
    Case("PP x FSDP", _dims(pp=2, dp_shard=2)),
    Case("PP (interleaved) x FSDP", _dims(pp=2, dp_shard=2, schedule="interleaved")),
    Case("PP (ZBV) x TP", _dims(pp=2, tp=2, schedule="zbv")),
    Case("PP x TP", _dims(pp=2, tp=2)),
    Case("PP x FSDP x TP", _dims(pp=2, dp_shard=2, tp=2)),
    Case("PP x CP", _dims(pp=2, cp=2)),
    Case("MoE, FSDP", _dims(dp_shard=2), model="moe"),
    Case("MoE, EP", _dims(dp_shard=2, ep=2), model="moe"),
    Case("MoE, FSDP x EP", _dims(dp_shard=4, ep=2), model="moe"),
    Case("MoE, HSDP x EP", _dims(dp_replicate=2, dp_shard=2, ep=2), model="moe"),
    Case("MoE, PP x EP", _dims(pp=2, dp_shard=2, ep=2), model="moe"),
    Case("MoE, TP", _dims(tp=2), model="moe"),
    Case("MoE, CP (ring)", _dims(cp=2, attention="ring"), model="moe"),
    Case("MoE, CP (Ulysses)", _dims(cp=2), model="moe"),
    Case("MoE, PP", _dims(pp=2), model="moe"),
    Case("MoE, PP (interleaved)", _dims(pp=2, schedule="interleaved"), model="moe"),
    Case("MoE, PP (ZBV)", _dims(pp=2, schedule="zbv"), model="moe"),
    Case("MoE, FSDP x TP", _dims(dp_shard=2, tp=2), model="moe"),
    Case("MoE, EP x TP", _dims(dp_shard=2, ep=2, tp=2), model="moe"),
    Case("MoE, EP x CP", _dims(dp_shard=2, ep=2, cp=2), model="moe"),
    Case("MoE, CP x TP", _dims(cp=2, tp=2), model="moe"),
    Case("MoE, PP x TP", _dims(pp=2, tp=2), model="moe"),
    Case("MoE, PP x CP", _dims(pp=2, cp=2), model="moe"),
    Case("MoE, FSDP x EP x TP", _dims(dp_shard=4, ep=2, tp=2), model="moe"),
    Case("MoE, EP x CP x TP", _dims(dp_shard=2, ep=2, cp=2, tp=2), model="moe"),
    Case("MoE, PP x EP x TP", _dims(pp=2, dp_shard=2, ep=2, tp=2), model="moe"),
    Case("FSDP, recompute full", _dims(dp_shard=2), settings={"recompute": "full"}),
    Case("FSDP, recompute selective", _dims(dp_shard=2), settings={"recompute": "selective"}),
    Case("TP, recompute full", _dims(tp=2), settings={"recompute": "full"}),
    Case("FSDP, offload", _dims(dp_shard=2), settings={"offload": True}),
    Case("FSDP, accumulation", _dims(dp_shard=2), settings={"micro_batch": 1}),
    Case("FSDP x TP, Muon", _dims(dp_shard=2, tp=2), inner={"optimizer": "muon"}),
    Case("MoE, FSDP x EP, Muon", _dims(dp_shard=4, ep=2), "moe", inner={"optimizer": "muon"}),
    Case("PP, Muon", _dims(pp=2), inner={"optimizer": "muon"}),
    *(Case(f"{name}, TP", _dims(tp=2), name) for name in FOREIGN_TP),
    Case("qwen3, FSDP x TP", _dims(dp_shard=2, tp=2), "qwen3"),
    Case("llama, HSDP", _dims(dp_replicate=2, dp_shard=2), "llama"),
    Case("gpt2, FSDP", _dims(dp_shard=2), "gpt2"),
    Case("FSDP, compile", _dims(dp_shard=2), settings={"compile": True}),
    Case("TP, compile", _dims(tp=2), settings={"compile": True}),
    Case("FSDP x TP, compile", _dims(dp_shard=2, tp=2), settings={"compile": True}),
    Case("PP, compile", _dims(pp=2), settings={"compile": True}),
    Case("CP (ring), compile", _dims(cp=2, attention="ring"), settings={"compile": True}),
    Case("MoE, EP, compile", _dims(dp_shard=2, ep=2), "moe", {"compile": True}),
    Case(
        "FSDP, compile, recompute selective",
        _dims(dp_shard=2),
        settings={"compile": True, "recompute": "selective"},
    ),
)


def _model(name: str) -> Model:
    if name in FAMILIES:
        from node.trainer.hf import model_of

        shared = FOREIGN if name != "gpt2" else {"vocab_size": 256}
        return model_of({"model_type": name, **shared, **FAMILIES[name]})
    model: dict[str, Any] = {
        "d_model": 32,
        "n_layers": 4,
        "n_heads": 4,
        "n_kv_heads": 2 if name != "moe" else 4,
        "d_ff": 64,
        "max_seq_len": 32,
        "tied_embeddings": name != "untied",
    }
    if name == "moe":
        model |= {"experts": 4, "top_k": 2, "d_ff": 32}
    return Model(**model)


def manifest_of(case: Case) -> Manifest:
    """The run of a case: four layers, four heads, 8 sequences of 32 tokens a step."""
    return Manifest(
        model=_model(case.model),
        data=Data(seq_len=32, batch_size=8),
        # eps: Adam divides by a gradient's size, so that of elements without any only noise is left
        inner=Inner(warmup_steps=2, total_steps=100, eps=1e-5, **case.inner),
        rounds=Rounds(inner_steps=STEPS, eval_every=1),
    )


@dataclass(frozen=True)
class Outcome:
    """What one island came to: losses by step, loss of the shard, and the seconds of its steps."""

    losses: list[float]
    validation: float
    seconds: float
    text: str = ""  # of what went wrong


def run(case: Case, directory: Path, *, resume: str = "", save: str = "") -> tuple[Outcome, Path]:
    """Train a case; its outcome, and the file of its pseudo-gradient (fp32).

    ``save``: an existing directory, into which it writes a checkpoint after half of the steps, and
    ends. ``resume``: one to go on from.
    """
    directory.mkdir(parents=True)
    text = bytes(random.Random(0).choices(b"abcdefgh ", k=20_000))
    (directory / "tokens").write_bytes(text[1000:])
    (directory / "shard").write_bytes(text[: 33 * 20])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["node.trainer.loop"])
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update(environment)
    ranks = [
        context.Process(target=_rank, args=(case, rank, directory, resume, save), daemon=True)
        for rank in range(case.dims.size)
    ]
    for process in ranks:
        process.start()
    end = time.monotonic() + WAIT_S
    failed = ""
    while any(process.is_alive() for process in ranks) and not failed:
        for rank, process in enumerate(ranks):
            process.join(0.05)
            if process.exitcode not in (None, 0):
                failed = f"rank {rank} ended with {process.exitcode}"
        if time.monotonic() > end:
            failed = f"no end within {WAIT_S:.0f} s"
    for process in ranks:
        process.kill()
        process.join()
    for file in sorted(directory.glob("error-*")):
        failed = failed or file.name
        failed += "\n" + "\n".join(file.read_text().splitlines()[-8:])
    if failed:
        return Outcome([], 0.0, 0.0, failed), directory / "delta"
    found = json.loads((directory / "outcome.json").read_text())
    return Outcome(**found), directory / "delta"


def _rank(case: Case, rank: int, directory: Path, resume: str, save: str) -> None:
    """One rank, driven as a daemon drives it."""
    import logging

    import torch

    from node.trainer.channel import (
        Begin,
        Checkpoint,
        Evaluated,
        Report,
        Saved,
        Snapshot,
        StepDone,
        Stop,
    )
    from node.trainer.layout import Layout, initial_vector
    from node.trainer.leader import Leader
    from node.trainer.loop import Trainer
    from node.trainer.parallel import Ranks
    from node.trainer.settings import TrainerSettings
    from node.trainer.shared import SharedVectors

    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    try:
        manifest = manifest_of(case)
        settings = TrainerSettings(
            manifest=manifest,
            tokens=directory / "tokens",
            evaluation=directory / "shard",
            ranks=case.dims.size,
            dims=case.dims,
            **case.settings,
        )
        ranks = Ranks.join(
            rank, case.dims, torch.device("cpu"), f"file://{directory / 'rendezvous'}"
        )
        leader, reports = None, []
        if rank == 0:
            vectors = SharedVectors.create(Layout.of_config(manifest.model).size)
            initial_vector(manifest.model, manifest.seed, vectors.tensors()[0])
            commands: list[Any] = [Begin(0, STEPS, 0, 1, 0, 0, resume, False, True)]

            class Daemon:
                """Begins, takes one snapshot or writes a checkpoint, and ends."""

                def send(self, report: Report) -> None:
                    reports.append(report)
                    if isinstance(report, Snapshot | Saved):
                        commands.append(Stop())
                    if save and isinstance(report, StepDone) and report.step == STEPS // 2:
                        commands.append(Checkpoint(save))

                def receive(self, timeout: float) -> Any:
                    return commands.pop(0) if commands else None

            leader = Leader(Daemon(), vectors, wait_s=0.0)  # type: ignore[arg-type]
        Trainer(settings, ranks, leader).run()
        if leader is not None:
            base, sent = leader.vectors.tensors()
            (directory / "delta").write_bytes((base - sent).numpy().tobytes())
            steps = [r for r in reports if isinstance(r, StepDone)]
            outcome = Outcome(
                [float("nan") if r.loss is None else r.loss for r in steps],
                next(r.validation_loss or 0.0 for r in reports if isinstance(r, Evaluated)),
                sum(r.seconds for r in steps[2:]),
            )
            (directory / "outcome.json").write_text(json.dumps(dataclasses.asdict(outcome)))
        ranks.leave()
    except BaseException:  # noqa: BLE001 - the process ends here, and leaves a word
        (directory / f"error-{rank}").write_text(traceback.format_exc())
        sys.stderr.flush()
        os._exit(1)


def compare(case: Case, directory: Path, alone: dict[str, tuple[Outcome, Path]]) -> dict[str, Any]:
    """Run a case and, once, what it is compared with; one row of the result."""
    import numpy as np

    key = f"{case.model} {case.inner}"
    if key not in alone:
        single = Case(f"one process, {key}", model=case.model, inner=case.inner)
        alone[key] = run(single, directory / f"single-{len(alone)}")
        if alone[key][0].text:
            raise RuntimeError(alone[key][0].text)
    wanted, wanted_delta = alone[key]
    number = sum(1 for _ in directory.iterdir())
    found, delta = run(case, directory / f"case-{number}")
    row: dict[str, Any] = {
        "name": case.name,
        "layout": str(case.dims),
        "ranks": case.dims.size,
        "model": case.model,
        **case.settings,
        **case.inner,
    }
    if found.text:
        return row | {"ok": False, "problem": found.text}
    a = np.frombuffer(wanted_delta.read_bytes(), np.float32)
    b = np.frombuffer(delta.read_bytes(), np.float32)
    loss = max(abs(x - y) for x, y in zip(wanted.losses, found.losses, strict=True))
    error = float(np.linalg.norm(a - b) / np.linalg.norm(a))
    largest = float(np.abs(a - b).max())
    validation = abs(wanted.validation - found.validation)
    ok = len(found.losses) == STEPS and loss < 5e-5 and validation < 5e-5 and largest < 1e-5
    return row | {
        "ok": ok,
        "loss_difference": loss,
        "validation_difference": validation,
        "delta_relative": error,
        "delta_largest": largest,
        "seconds": round(found.seconds, 2),
        "losses": found.losses,
    }


def table(rows: Iterable[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| what | `--layout` | ranks | loss differs by | an element of Δ by | Δ by, of its norm |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        shown = f"| {row['name']} | `{row['layout']}` | {row['ranks']} "
        if "problem" in row:
            lines.append(shown + "| failed | | |")
            continue
        lines.append(
            shown + f"| {row['loss_difference']:.1e} | {row['delta_largest']:.1e} "
            f"| {row['delta_relative']:.1e} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the cases, or those that ``--only`` names a part of; 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="result; with --only, other rows in it stay")
    parser.add_argument("--doc", type=Path, help="file whose table is replaced")
    parser.add_argument("--only", default="", help="part of a name, several with |, none with -")
    given = parser.parse_args(arguments)
    rows: dict[str, dict[str, Any]] = {}
    if given.json and given.only and given.json.exists():
        rows = {row["name"]: row for row in json.loads(given.json.read_text())["layouts"]}
    wanted = given.only.split("|")
    directory = Path(tempfile.mkdtemp(prefix="layouts-"))
    alone: dict[str, tuple[Outcome, Path]] = {}
    try:
        for case in CASES:
            if not any(part in case.name for part in wanted):
                continue
            row = compare(case, directory, alone)
            rows[case.name] = {key: value for key, value in row.items() if key != "losses"}
            sys.stdout.write(json.dumps(rows[case.name]).replace("\\n", "\n") + "\n")
            sys.stdout.flush()
            if given.json:  # what is done stays done
                found = [rows[case.name] for case in CASES if case.name in rows]
                text = json.dumps({"steps": STEPS, "layouts": found}, indent=1)
                given.json.write_text(text + "\n")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    found = [rows[case.name] for case in CASES if case.name in rows]
    if given.doc:
        before, _, rest = given.doc.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        given.doc.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{after}")
    return 0 if all(row["ok"] for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
