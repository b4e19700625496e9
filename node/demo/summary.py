"""What a demonstration came to, read from the event logs of its islands."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from node.demo.run import Demo


@dataclass
class Summary:
    """Printed as it is with ``--json``."""

    rounds_committed: int
    rounds_failed: int  # attempts at rounds: what dies in the middle of one costs it
    rounds_merged: int  # of more than one island
    val_loss_first: float | None
    val_loss_last: float | None
    state_digests_equal: bool
    wire_bytes_per_param_per_round: float
    compute_utilization: float
    consensus_distance: float | None
    wall_s: float
    islands: int
    joined: bool
    killed_and_resumed: bool
    left: bool
    problems: list[str] = field(default_factory=list)


def summary_of(demo: Demo, wall_s: float) -> Summary:
    """Of one that is over, after so many seconds."""
    from bootstrap.manifest import Manifest
    from node.trainer.layout import Layout

    size = Layout.of_config(Manifest().model).size
    per_island = [island.events("round") for island in demo.islands]
    states: dict[int, set[str]] = {}
    for rounds in per_island:
        for done in rounds:
            states.setdefault(done["round"], set()).add(done["state"])
    everything = [done for rounds in per_island for done in rounds]
    measured = [*demo.islands[0].events("validation"), *per_island[0]]
    losses = [r["validation_loss"] for r in measured if r["validation_loss"] is not None]
    synced = [r for r in everything if r["members"] > 1]
    consensus = [r["consensus"] for r in per_island[0] if r["consensus"] is not None]
    living = [island for island in demo.islands if not (island is demo.leaver() and demo.left)]
    ends = {island.last_round() for island in living}
    together = demo.cut or len(ends) == 1  # before the end they need not leave after one round
    return Summary(
        rounds_committed=len(states),
        rounds_failed=sum(len(island.events("round_failed")) for island in demo.islands),
        rounds_merged=len({r["round"] for r in synced}),
        val_loss_first=losses[0] if losses else None,
        val_loss_last=losses[-1] if losses else None,
        state_digests_equal=together and all(len(s) == 1 for s in states.values()),
        wire_bytes_per_param_per_round=round(
            fmean(r["sent_bytes"] for r in synced) / size if synced else 0.0, 4
        ),
        compute_utilization=round(
            fmean(u for r in everything if (u := r["utilisation"]) is not None), 4
        ),
        consensus_distance=consensus[-1] if consensus else None,
        wall_s=round(wall_s, 1),
        islands=len(demo.islands),
        joined=demo.joined and bool(per_island[-1]),
        killed_and_resumed=demo.killed and demo.islands[1].starts > 1,
        left=demo.left,
        problems=[
            f"{island.name}: {problem['code']} {problem['what']}"
            for island in demo.islands
            for problem in island.events("problem")
        ][:20],
    )


def went_well(s: Summary) -> bool:
    """Whether it came to what it is to show; with attempts that failed, as long as rounds came."""
    return s.state_digests_equal and s.val_loss_last is not None


def as_text(s: Summary) -> str:
    """For people."""
    equal = "equal on every island, bit for bit" if s.state_digests_equal else "NOT equal"
    if s.state_digests_equal and not s.rounds_merged:
        equal = "equal, but one island alone has made it"
    what = ["one joined half-way" if s.joined else ""]
    what += ["one was killed and resumed" if s.killed_and_resumed else ""]
    what += ["one left" if s.left else ""]
    wire = "nothing was sent: no round merged more than one island; --seconds gives them more time"
    if s.rounds_merged:
        wire = (
            f"{s.wire_bytes_per_param_per_round:.2f} bytes a parameter, "
            "round and island (fp32 would be 4 and more)"
        )
    lines = [
        f"{s.islands} islands, {s.rounds_committed} rounds in {s.wall_s:.0f} s; "
        + ", ".join(w for w in what if w),
        f"  validation loss      {s.val_loss_first:.3f} -> {s.val_loss_last:.3f}"
        if s.val_loss_first is not None and s.val_loss_last is not None
        else "  validation loss      not measured",
        f"  outer state          {equal}",
        f"  attempts that failed {s.rounds_failed}",
        f"  wire                 {wire}",
        f"  compute              {100 * s.compute_utilization:.0f} % of the time in inner steps",
    ]
    if s.consensus_distance is not None:
        lines.append(f"  consensus            {s.consensus_distance:.4f} from the mean, relative")
    return "\n".join([*lines, *(f"  problem: {p}" for p in s.problems)])
