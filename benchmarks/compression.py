"""What codecs cost in loss: ``python -m benchmarks.compression --json FILE``.

DiLoCo as in :mod:`diloco.loop`, with pseudo-gradients and merged results encoded on their way.
As in a real round parts have owners, which add their own values unencoded. Ways to treat what the
*owner* of a part loses when it encodes the merged result:

lost      nothing is done about it
kept      the owner adds it when it merges these elements again
own       the owner adds it to its own residual, divided by its share
a codec   results travel in that codec

With ``moves`` each part goes to another owner every round, the worst case for what owners keep.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from benchmarks.output import apart, kept, write
from diloco import feedback, merge, outer
from diloco.loop import Island, Settings, evaluate, load, new_model, texts
from protocols.codecs import RangeCodec, codec


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to send: a codec there, a codec back."""

    codec: str
    result: str  # codec of the merged result
    decay: float | None = None  # of the residual; None: no feedback
    owner: str = "lost"
    moves: bool = False
    momentum: bool = True
    outer_lr: float | None = None

    @property
    def label(self) -> str:
        """For the table."""
        parts = [f"{self.codec} > {self.result}"]
        parts += [f"feedback {self.decay}" if self.decay is not None else "no feedback"]
        parts += [] if self.owner == "lost" else [f"owner: {self.owner}"]
        parts += ["parts move"] if self.moves else []
        parts += [] if self.momentum else ["no momentum"]
        return ", ".join(parts)

    @property
    def bits(self) -> float:
        """Per element, there and back."""
        return codec(self.codec).bits + codec(self.result).bits


@dataclass
class Compressed:
    """The merge, with what travels encoded."""

    case: Case
    islands: int
    size: int
    residuals: list[Tensor] = field(init=False)
    owners: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.residuals = [torch.zeros(self.size) for _ in range(self.islands)]
        self.owners = [torch.zeros(self.size) for _ in range(self.islands)]

    def coded(self, name: str, values: Tensor, out: Tensor) -> Tensor:
        """``values`` as a receiver decodes them."""
        one = RangeCodec(name, len(values))
        data = torch.empty(one.encoded_size(0, len(values)), dtype=torch.uint8)
        one.encode(0, values, data)
        one.decode(0, data, out)
        return out

    def merged(self, deltas: list[Tensor], round_: int) -> Tensor:
        """D as all islands decode it."""
        case, count = self.case, len(deltas)
        decay = case.decay if case.decay is not None else 0.0
        exact = [
            feedback.compensate(delta.clone(), residual, decay)
            for delta, residual in zip(deltas, self.residuals, strict=True)
        ]
        sent = [self.coded(case.codec, x, torch.empty_like(x)) for x in exact]
        ranges = [
            (slice(int(part[0]), int(part[-1]) + 1), (index + case.moves * round_) % count)
            for index, part in enumerate(torch.arange(self.size).chunk(count))
        ]
        for here, who in ranges:
            sent[who][here] = exact[who][here]
        for x, received, residual in zip(exact, sent, self.residuals, strict=True):
            torch.sub(x, received, out=residual)
        mean = merge.weighted_mean(sent, [1.0] * count, torch.empty_like(deltas[0]))
        decoded = torch.empty_like(mean)
        for here, who in ranges:
            if case.owner == "kept":
                mean[here] += self.owners[who][here]
            self.coded(case.result, mean[here].clone(), decoded[here])
            lost = mean[here] - decoded[here]
            if case.owner == "kept":
                self.owners[who][here] = lost
            elif case.owner == "own":
                self.residuals[who][here] += lost * count
        return decoded


def train(settings: Settings, case: Case) -> Iterator[float]:
    """Yield the validation loss of each round."""
    *parts, held_out = texts(settings.islands + 1)
    islands = [Island(number, text, settings) for number, text in enumerate(parts)]
    common = new_model(settings.seed)
    base = parameters_to_vector(common.parameters()).detach().clone()
    state = outer.init(base)
    compressed = Compressed(case, settings.islands, len(base))
    for round_ in range(settings.rounds):
        deltas = [base - island.train(base, settings.inner_steps)[0] for island in islands]
        merged = compressed.merged(deltas, round_)
        lr, momentum = outer.outer_rates(
            round_,
            lr=case.outer_lr or settings.outer_lr,
            momentum=settings.outer_momentum,
            lr_start=1.0,
            momentum_start=0.5,
            warmup_rounds=settings.warmup_rounds,
        )
        outer.update(state, merged, base, lr=lr, momentum=momentum if case.momentum else 0.0)
        load(common, base)
        yield evaluate(common, held_out)


def cases() -> list[Case]:
    """What is compared."""
    found = [Case(codec=name, result=name) for name in ("fp32", "int8", "int4")]
    found += [Case(codec="int2", result="int2"), Case(codec="int2", result="int4")]
    for name in ("int2", "int1"):
        for owner in ("lost", "kept", "own"):
            found.append(Case(codec=name, result=name, decay=0.95, owner=owner))
        for owner in ("kept", "own"):
            found.append(Case(codec=name, result=name, decay=0.95, owner=owner, moves=True))
        found.append(Case(codec=name, result="int4", decay=0.95))
    for decay in (1.0, 0.9):
        found.append(Case(codec="int2", result="int2", decay=decay, owner="own"))
    found.append(Case(codec="top12", result="top12", decay=0.95, owner="own"))
    plain = {"decay": 0.95, "momentum": False, "outer_lr": 1.0}
    found.append(Case(codec="fp32", result="fp32", momentum=False, outer_lr=1.0))
    for name in ("top12", "top3"):
        found.append(Case(codec=name, result="int4", **plain))
        for owner in ("lost", "kept", "own"):
            found.append(Case(codec=name, result=name, owner=owner, **plain))
    return found


def main() -> None:
    """Train once per case and seed, print a table, write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="one seed, fewer rounds")
    parser.add_argument("--only", default="", help="cases whose label begins with this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds, rounds = (1, 10) if options.quick else (2, 30)
    rows: dict[str, dict[str, float]] = kept(options.json) if options.json else {}
    if options.json:
        apart(options.json, rows, quick=options.quick)
    for case in cases():
        if not case.label.startswith(options.only):
            continue
        losses = [
            list(train(Settings(rounds=rounds, seed=seed), case))[-1] for seed in range(seeds)
        ]
        rows[case.label] = row = {
            "bits": round(case.bits, 3),
            "loss": round(statistics.mean(losses), 4),
            "spread": round(max(losses) - min(losses), 4),
        }
        print(
            f"{case.label:50}", "  ".join(f"{key} {x:7.4f}" for key, x in row.items()), flush=True
        )
        if options.quick:
            row["quick"] = True
        if options.json:
            write(rows, options.json)


if __name__ == "__main__":
    main()
