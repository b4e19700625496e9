"""What an island costs a GPU: ``python -m benchmarks.gpu --json FILE``. Needs a CUDA device.

- ``training``: two islands of 283 M parameters that share the device, started as a user starts
  them, beside two bare loops of the same model and optimizer that share it too, in turn. Tokens a
  second of both; for islands with the time in which they had nothing to do, and without.
  ``compiled``: the same with ``--compile``, and with compiled layers in the bare loops.
- ``copies``: θ off the device into the vectors that the daemon reads, and back, page-locked and
  not, in turn.
- ``outer``: each outer optimizer's step on CPU and device: elements of parameters and state whose
  bits differ after five rounds, which is none where all islands are to agree; and its seconds.
- ``frozen``: seconds a GB of comparing what is frozen under adapters, on CPU and device.
- ``attention``: memory and time of the model's attention, forward and backward, beside torch's with
  ``enable_gqa``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.island import Fact, Islands, piped, results, rounded, speed
from benchmarks.layouts import nccl_version
from benchmarks.output import machine, write
from benchmarks.processes import ended
from bootstrap.manifest import Manifest
from diloco.optimizers import RULES, Rates
from node.interrupts import clean_up_at_any_end
from node.script.frozen import read
from node.trainer.corpus import collect
from node.trainer.layout import Layout
from node.trainer.model import causal_attention, documents_apart
from node.trainer.shared import SharedVectors
from node.trainer.speed import flops_a_token, peak_flops

STEPS = 24  # inner steps a round
MANIFEST = Manifest.model_validate(
    {
        "name": "gpu-bench",
        "model": {
            "d_model": 1024,
            "n_layers": 24,
            "n_heads": 16,
            "n_kv_heads": 8,
            "d_ff": 2816,
            "max_seq_len": 1024,
        },
        "data": {"seq_len": 1024, "batch_size": 16},
        "inner": {"lr": 3e-4},
        "rounds": {
            "inner_steps": STEPS,
            "overlap_steps": 6,
            "total_rounds": 10_000,
            "eval_every": 0,
        },
    }
)
CODEC = "int4"
ELEMENTS = 10_000_003
ROUNDS = 5
SHAPE = {"batch": 4, "heads": 32, "key heads": 8, "tokens": 4096, "head size": 128}


def training(root: Path, seconds: float, turns: int, *, compiled: bool) -> Iterator[Fact]:
    """Two of each, in turn; medians and every process's figures, after each turn."""
    text, run = root / "text", root / "run.json"
    text.write_bytes(collect(MANIFEST.data).path.read_bytes())
    run.write_bytes(MANIFEST.canonical())
    more = ["--compile"] if compiled else []
    found: dict[str, list[list[Fact]]] = {"bare": [], "island": []}
    for turn in range(turns):
        words = [sys.executable, "-m", "benchmarks.systems.bare_gpu", str(seconds), str(text)]
        words += [str(run), *(["compile"] if compiled else [])]
        loops: list[subprocess.Popen[str]] = []
        with ended(loops):
            loops += [piped(words), piped(words)]
            found["bare"].append(results(loops))
        place = root / f"{turn} {compiled}"
        place.mkdir()
        two = Islands(
            place,
            None,
            seconds,
            codec=CODEC,
            manifest=MANIFEST,
            # on a shared device, the speed measured while the other island waits would mean nothing
            options=("--device", "cuda", "--threads", "2", "--inner-steps", str(STEPS), *more),
            start_s=300.0,
        )
        found["island"].append(two.measure())
        yield _told(found)


def _told(found: dict[str, list[list[Fact]]]) -> Fact:
    def median(name: str, of: Callable[[Fact], float]) -> float:
        return statistics.median(of(fact) for turn in found[name] for fact in turn)

    def overall(fact: Fact) -> float:
        return float(fact["tokens"] / fact["elapsed"])

    layout = Layout.of_manifest(MANIFEST)
    flops = flops_a_token(MANIFEST.model, layout.dense, MANIFEST.data.seq_len)
    peak = peak_flops(torch.device("cuda", 0))
    told: Fact = {
        "parameters": layout.size,
        "island_overhead_ratio": median("island", speed) / median("bare", speed),
        "island_over_bare_with_waiting": median("island", overall) / median("bare", overall),
        "tokens_a_second": {name: median(name, overall) for name in found},
        "sync_s": median("island", lambda fact: fact["sync_s"]),
        "waited_share": median("island", lambda fact: fact["waited"] / fact["elapsed"]),
        "daemon_core_share": median("island", lambda fact: fact["daemon_core_share"]),
        "round_s": median("island", lambda fact: fact["elapsed"] / fact["rounds"]),
    }
    if flops and peak:  # two processes share the device
        told["mfu"] = {name: 2 * median(name, overall) * flops / peak for name in found}
    return told | {"runs": rounded(found)}


def copies(size: int, turns: int = 5) -> Fact:
    """GB/s of copying ``size`` elements, in pieces as large as a model's matrices."""
    here = torch.randn(size, device="cuda")
    rates: dict[str, dict[str, list[float]]] = {}
    for _ in range(turns):
        for kind in ("pageable", "page-locked"):
            vectors = SharedVectors.create(size)
            if kind == "page-locked":
                vectors.lock_pages(here.device)
            vectors.base.fill(0)
            sent = torch.from_numpy(vectors.sent)
            sent.zero_()
            for way, (to, source) in {"off": (sent, here), "on": (here, sent)}.items():
                _copy(to, source)  # the first copy only looks pages up
                took = _copy(to, source)
                rates.setdefault(kind, {}).setdefault(way, []).append(4 * size / took / 1e9)
            del sent
            vectors.close()
    return {
        kind: {way: statistics.median(each) for way, each in ways.items()}
        for kind, ways in rates.items()
    }


def _copy(to: Tensor, source: Tensor) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for mine, theirs in zip(to.split(4_000_000), source.split(4_000_000), strict=True):
        mine.copy_(theirs)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def outer() -> dict[str, Fact]:
    """Every outer optimizer on both devices."""
    found = {}
    for name, rule in RULES.items():
        ends, seconds = [], {}
        for device in ("cpu", "cuda"):
            params = _noise(0).to(device)
            vectors = rule.init(params).vectors
            spent = []
            for count in range(1, ROUNDS + 1):
                merged = _noise(count).to(device)
                rates = Rates(rule.lr, rule.momentum, count, share=0.5, weight=8.0 + count)
                torch.cuda.synchronize()
                began = time.perf_counter()
                rule.take(vectors, merged, params, rates)
                torch.cuda.synchronize()
                spent.append(time.perf_counter() - began)
            ends.append([params.cpu(), *(vector.cpu() for vector in vectors.values())])
            seconds[device] = statistics.median(spent)
        differ = sum(
            int((a.view(torch.int32) != b.view(torch.int32)).sum())
            for a, b in zip(*ends, strict=True)
        )
        found[name] = {"bits_differ_in": differ, "seconds": seconds}
    return found


def _noise(seed: int) -> Tensor:
    """With zeros and subnormals among it."""
    found = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed)) * 1e-2
    found[::97] = 0
    found[::89] = 1e-40
    return found


def frozen(gb: float = 0.2, turns: int = 3) -> dict[str, dict[str, float]]:
    """Of matrices, and of codes in one column, by type; medians. One thread on the CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    for dtype, columns in ((torch.float32, 8192), (torch.bfloat16, 8192), (torch.uint8, 1)):
        for device in ("cpu", "cuda"):
            rows = int(gb * 1e9 / dtype.itemsize / columns)
            tensor = torch.ones(rows, columns, dtype=dtype, device=device)
            spent = []
            for _ in range(turns):
                torch.cuda.synchronize()
                began = time.perf_counter()
                read(tensor, 0)  # a number on the CPU, so all is done
                spent.append(time.perf_counter() - began)
            name = str(dtype).removeprefix("torch.")
            found.setdefault(name, {})[device] = statistics.median(spent) / gb
    torch.set_num_threads(threads)
    return found


def attention() -> list[Fact]:
    """Forward and backward of ours and of torch's, by type and mask."""
    batch, heads, keys, tokens, size = SHAPE.values()
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        q = torch.randn(batch, heads, tokens, size, device="cuda", dtype=dtype)
        k, v = torch.randn(2, batch, keys, tokens, size, device="cuda", dtype=dtype)
        for tensor in (q, k, v):
            tensor.requires_grad_()
        numbers = torch.arange(tokens, device="cuda").expand(batch, -1) // 512
        for mask in (None, documents_apart(numbers)):
            ways: dict[str, Callable[[], Tensor]] = {
                "ours": lambda q=q, k=k, v=v, mask=mask: causal_attention(q, k, v, mask),
                "enable_gqa": lambda q=q, k=k, v=v, mask=mask: F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
                ),
            }
            row: Fact = {"dtype": str(dtype).removeprefix("torch."), "mask": mask is not None}
            for name, way in ways.items():
                row[name] = _cost(way)
            found.append(row)
    return found


def _cost(forward: Callable[[], Tensor]) -> Fact:
    def both() -> None:
        forward().sum().backward()

    both()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    spent = []
    for _ in range(5):
        began = time.perf_counter()
        both()
        torch.cuda.synchronize()
        spent.append(time.perf_counter() - began)
    mib = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {"milliseconds": 1000 * statistics.median(spent), "mib": round(mib)}


PIECES = ("copies", "outer", "frozen", "attention", "training", "compiled")


def main() -> None:
    """Run the pieces and write what was found; pieces that are left out keep their figures."""
    clean_up_at_any_end()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the results go")
    parser.add_argument("--only", default=",".join(PIECES), help="pieces, with commas between")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each system in a turn")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device")
    result: Fact = json.loads(given.json.read_text()) if given.json.exists() else {}
    properties = torch.cuda.get_device_properties(0)
    result["machine"] = machine() | {
        "gpu": properties.name,
        "cuda": torch.version.cuda,
        "nccl": nccl_version(),
    }
    with tempfile.TemporaryDirectory() as folder:
        for piece in given.only.split(","):
            for found in _measured(piece, given, Path(folder)):
                result[piece] = found
                write(result, given.json)  # done stays done
            shown: Any = result[piece]
            if isinstance(shown, dict):
                shown = {key: value for key, value in shown.items() if key != "runs"}
            print(piece, json.dumps(shown), flush=True)


def _measured(piece: str, given: argparse.Namespace, folder: Path) -> Iterator[Any]:
    """What one piece has come to, more than once where there are turns."""
    match piece:
        case "copies":
            yield copies(Layout.of_manifest(MANIFEST).size)
        case "outer":
            yield outer()
        case "frozen":
            yield frozen()
        case "attention":
            yield attention()
        case "training" | "compiled":
            compiled = piece == "compiled"
            yield from training(folder, given.seconds, given.turns, compiled=compiled)
        case _:
            sys.exit(f"{piece!r} is none of {', '.join(PIECES)}")


if __name__ == "__main__":
    main()
