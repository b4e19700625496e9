"""Does every layout compute what one process computes? ``python -m benchmarks.layouts``.

Each layout trains a tiny model for ten steps on the CPU with gloo, one process a rank, as an
island does in a swarm, and its θ is gathered for the round as it would be sent. Beside it stands
one process with the same data. ``--doc FILE`` writes the result into a table between two marks.

``--device cuda``: on GPUs with NCCL, beside one process on a GPU, in the same precision. Ranks
share the devices where there are fewer, which NCCL allows from 2.30 on, with
``NCCL_MULTI_RANK_GPU_ENABLE=1``.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.layout_cases import BF16, CASES, REFUSED, STEPS, Case, manifest_of, reason
from benchmarks.output import kept, write
from node.interrupts import clean_up_at_any_end

MANY = 1000  # steps that the moments from elsewhere claim to have seen
WAIT_S = 240.0  # for the ranks of one layout
# the 8 sequences of a step at once, or added up
SUMMED: tuple[dict[str, int], ...] = ({}, {"micro_batch": 4}, {"micro_batch": 2})
BEGIN, END = "<!-- layouts: begin -->", "<!-- layouts: end -->"


@dataclass(frozen=True)
class Outcome:
    """What one island came to: losses by step, loss of the shard, and the seconds of its steps."""

    losses: list[float]
    validation: float
    seconds: float
    text: str = ""  # of what went wrong


def run(
    case: Case,
    directory: Path,
    *,
    resume: str = "",
    save: str = "",
    moments: tuple[str, str] = ("", ""),
) -> tuple[Outcome, Path]:
    """Train a case; its outcome, and the file of its pseudo-gradient (fp32).

    ``save``: an existing directory, into which it writes a checkpoint after half of the steps, and
    ends. ``resume``: one to go on from. ``moments``: a file of an optimizer's to begin with, and
    one to which these are written for others at once.
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
        context.Process(
            target=_rank, args=(case, rank, directory, resume, save, moments), daemon=True
        )
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


def _rank(
    case: Case, rank: int, directory: Path, resume: str, save: str, moments: tuple[str, str]
) -> None:
    """One rank, driven as a daemon drives it."""
    import logging

    import torch

    from node.trainer.channel import (
        Begin,
        Donate,
        Evaluated,
        Report,
        Save,
        Saved,
        Snapshot,
        StepDone,
        Stop,
    )
    from node.trainer.layout import Layout, initial_vector
    from node.trainer.leader import Leader
    from node.trainer.loop import Trainer
    from node.trainer.parallel import Ranks
    from node.trainer.rank import pick_device
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
        place = rank if settings.device == "cpu" else rank % torch.cuda.device_count()
        device = pick_device(settings.device, place)
        store, alone = f"file://{directory / 'rendezvous'}", not settings.offload
        ranks = Ranks.join(rank, case.dims, device, store, alone=alone)
        leader, reports = None, []
        if rank == 0:
            vectors = SharedVectors.create(Layout.of_config(manifest.model).size)
            initial_vector(manifest.model, manifest.seed, vectors.tensors()[0])
            taken, given = moments
            begin = Begin(
                0, STEPS, 0, 1, 0, 0, resume, False, True, moments=taken, moments_steps=MANY
            )
            commands: list[Any] = [begin, *([Donate(given)] if given else [])]

            class Daemon:
                """Begins, takes one snapshot or writes a checkpoint, and ends."""

                def send(self, report: Report) -> None:
                    reports.append(report)
                    if isinstance(report, Snapshot | Saved):
                        commands.append(Stop())
                    if save and isinstance(report, StepDone) and report.step == STEPS // 2:
                        commands.append(Save(save))

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


Alone = dict[str, tuple[Outcome, Path]]


def on_cuda(case: Case) -> Case:
    """The same on GPUs, in the precision that it has on a CPU."""
    settings = {"bf16": False, **case.settings, "device": "cuda"}
    return dataclasses.replace(case, settings=settings)


def nccl_version() -> str:
    """Of the library that is loaded, which may be another one than torch was built with."""
    version = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return f"{version.value // 10_000}.{version.value // 100 % 100}.{version.value % 100}"


def _machine(device: str) -> dict[str, Any]:
    """What a result tells of its devices; nothing of a CPU."""
    import torch

    if device == "cpu":
        return {}
    name = torch.cuda.get_device_name()
    return {
        "devices": f"{torch.cuda.device_count()} x {name}",
        "torch": torch.__version__,
        "nccl": nccl_version(),
    }


def compare(case: Case, directory: Path, alone: Alone) -> dict[str, Any]:
    """Run a case and, once, what it is compared with; one row of the result.

    In bf16 two ways to compute the same differ by what was rounded on either. There the limit is
    twice the most by which bf16 takes one process from fp32, in whatever order it adds up.
    """
    import numpy as np

    device = {key: value for key, value in case.settings.items() if key == "device"}
    half = bool(case.settings.get("bf16"))
    wanted, wanted_delta = _single(case, device | {"bf16": half}, directory, alone)
    number = sum(1 for _ in directory.iterdir())
    found, delta = run(case, directory / f"case-{number}")
    row: dict[str, Any] = {
        "name": case.name,
        "layout": str(case.dims),
        "ranks": case.dims.size,
        "model": case.model,
        "revision": _revision(),
        **case.settings,
        **case.inner,
    }
    problem = found.text
    if not problem and len(found.losses) != STEPS:
        problem = f"{len(found.losses)} losses of {STEPS} steps"
    if problem:
        return row | {"ok": False, "problem": problem}
    loss, relative, largest = _apart(wanted, wanted_delta, found, delta)
    validation = abs(wanted.validation - found.validation)
    limits: dict[str, float] = {"loss_limit": 5e-5, "delta_limit": 1e-5}
    ok = loss < 5e-5 and validation < 5e-5 and largest < 1e-5
    if half:
        limits = _rounding(case, device, directory, alone)
        ok = loss < limits["loss_limit"] and relative < limits["delta_relative_limit"]
    return row | {
        "ok": ok and np.isfinite(found.losses).all().item(),
        "loss_difference": loss,
        "validation_difference": validation,
        "delta_relative": relative,
        "delta_largest": largest,
        **limits,
        "seconds": round(found.seconds, 2),
        "losses": found.losses,
    }


def _rounding(
    case: Case, device: dict[str, Any], directory: Path, alone: Alone
) -> dict[str, float]:
    """Limits of a case in bf16: of the losses, and of Δ by its norm.

    One run is one draw of what rounding does to ten losses, and which one depends on the processor.
    """
    exact = _single(case, device | {"bf16": False}, directory, alone)
    rounded = [_single(case, device | BF16 | micro, directory, alone) for micro in SUMMED]
    losses, deltas, _ = zip(*(_apart(*exact, *one) for one in rounded), strict=True)
    return {"loss_limit": 2 * max(losses), "delta_relative_limit": 2 * max(deltas)}


def _single(
    case: Case, settings: dict[str, Any], directory: Path, alone: Alone
) -> tuple[Outcome, Path]:
    """One process with the model and optimizer of a case."""
    key = f"{case.model} {case.inner} {settings}"
    if key not in alone:
        single = Case(f"one process, {key}", model=case.model, settings=settings, inner=case.inner)
        alone[key] = run(single, directory / f"single-{len(alone)}")
        if alone[key][0].text:
            raise RuntimeError(alone[key][0].text)
    return alone[key]


def _apart(
    wanted: Outcome, wanted_delta: Path, found: Outcome, delta: Path
) -> tuple[float, float, float]:
    """Largest difference of a loss; of the pseudo-gradients by their norm, and by element."""
    import numpy as np

    a = np.frombuffer(wanted_delta.read_bytes(), np.float32)
    b = np.frombuffer(delta.read_bytes(), np.float32)
    loss = max(abs(x - y) for x, y in zip(wanted.losses, found.losses, strict=True))
    return loss, float(np.linalg.norm(a - b) / np.linalg.norm(a)), float(np.abs(a - b).max())


def _revision() -> str:
    """The commit of the code that runs; with a + where it has uncommitted changes."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def table(rows: Iterable[dict[str, Any]]) -> str:
    """The rows as Markdown, those that were refused last."""
    lines = [
        "| what | `--layout` | ranks | loss differs by | an element of Δ by | Δ by, of its norm |",
        "|---|---|---|---|---|---|",
    ]
    revisions = set()
    for row in rows:
        revisions.add(row.get("revision", "unknown"))
        shown = f"| {row['name']} | `{row['layout']}` | {row['ranks']} "
        if "problem" in row:
            lines.append(shown + "| failed | | |")
            continue
        differs = [f"{row['loss_difference']:.1e}", f"{row['delta_relative']:.1e}"]
        if row.get("bf16"):
            differs[0] += f" (limit {row['loss_limit']:.1e})"
            differs[1] += f" (limit {row['delta_relative_limit']:.1e})"
        if not row["ok"]:
            differs[0] = f"failed: {differs[0]}"
        shown += f"| {differs[0]} | {row['delta_largest']:.1e} | {differs[1]} |"
        lines.append(shown)
    lines += ["", f"Revision: {', '.join(sorted(revisions))}.", ""]
    lines += ["| refused | `--layout` | why |", "|---|---|---|"]
    lines += [f"| {case.name} | `{case.dims}` | {reason(case)} |" for case in REFUSED]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the cases, or those that ``--only`` names a part of; 1 if one differs."""
    clean_up_at_any_end()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="result; rows that are not run stay")
    parser.add_argument("--doc", type=Path, help="file whose table is replaced")
    parser.add_argument("--only", default="", help="part of a name, several with |, none with -")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--part", default="1/1", help="K/N: every N-th case from the K-th on")
    given = parser.parse_args(arguments)
    part, parts = (int(number) for number in given.part.split("/"))
    rows: dict[str, dict[str, Any]] = {}
    if given.json:
        earlier = kept(given.json)
        if earlier and ("devices" in earlier) != (given.device == "cuda"):
            sys.exit(f"{given.json} has results of another kind of device: give another file")
        rows = {row["name"]: row for row in earlier.get("layouts", ())}
    wanted = given.only.split("|")
    directory = Path(tempfile.mkdtemp(prefix="layouts-"))
    alone: Alone = {}
    try:
        for case in CASES[part - 1 :: parts]:
            if not any(part in case.name for part in wanted):
                continue
            row = compare(on_cuda(case) if given.device == "cuda" else case, directory, alone)
            rows[case.name] = {key: value for key, value in row.items() if key != "losses"}
            sys.stdout.write(json.dumps(rows[case.name]).replace("\\n", "\n") + "\n")
            sys.stdout.flush()
            if given.json:  # what is done stays done
                found = [rows[case.name] for case in CASES if case.name in rows]
                told = {"steps": STEPS, **_machine(given.device), "layouts": found}
                write(told, given.json)
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
