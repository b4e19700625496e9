"""What the terminal shows, as text: pure functions of a picture. Peers' words are cleaned first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from node.monitor.wording import (
    clean,
    duration,
    join_line,
    megabytes,
    names_apart,
    number,
    of_own_text,
    of_scripts,
    short,
)
from node.status import gpus_line, healthy, joining, of_total

ROUNDS = 5  # the newest ones, as bars
# told apart by shade as well as by colour
PHASES = (
    ("ready", "▓", "yellow"),
    ("match", "▒", "magenta"),
    ("exchange", "░", "cyan"),
    ("certify", "▪", "blue"),
    ("apply", "·", "white"),
)
_LEFT = (0x40, 0x04, 0x02, 0x01)  # dots of a braille cell from the bottom up (Unicode, U+2800)
_RIGHT = (0x80, 0x20, 0x10, 0x08)
LINK_COLUMNS = ("from", "to", "speed", "round trip", "measured")
FRAGMENT_COLUMNS = ("fragment", "round", "how", "islands in it", "to merge", "same state", "state")
PEER_COLUMNS = ("island", "state", "round", "agrees", "loss", "tok/s", "merged", "apart", "link")


def header(picture: Mapping[str, Any], title: str) -> Text:
    """Run, round of how many, time left, who is there, whether states agree."""
    state = picture["state"]
    run, rounds, training = state["run"], state["rounds"], state["training"]
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(clean(run["label"]) if run and run["label"] else "no run yet", "bold")
    text.append(f"  round {of_total(rounds['committed'], run)}")
    if training["eta_s"] is not None:
        text.append(f"  ETA {duration(training['eta_s'])}")
    islands = [peer for peer in state["peers"] if peer["role"] == "island"]
    active = [peer for peer in islands if peer["status"] == "active"]
    text.append(f"  {len(active)}/{len(islands)} islands active")
    consensus = state["consensus"]
    if consensus is not None and consensus["agreeing"] is not None:
        text.append(f"  {consensus['agreeing']} agree bit for bit")
    if consensus is not None and consensus["before"] is not None:
        text.append(f"  {consensus['before']:.3f}")
        if consensus["after"] is not None:
            text.append(f" -> {consensus['after']:.3f}")
        text.append(" apart")
    text.append(f"  val {number(training['validation_loss'])}")
    text.append(f"\n{clean(title)}  {state['status']}", "dim")
    wrong = [f"{n} {how}" for how, n in rounds["outcomes"].items() if n and how != "committed"]
    if wrong:
        text.append(f"  rounds: {', '.join(wrong)}", "yellow")
    if joins := joining(state):
        text.append(f"  {joins}", "cyan")
    if problem := picture.get("problem"):
        text.append(f"  {clean(str(problem))}", "bold red")
    return text


def alarms(state: Mapping[str, Any]) -> Text:
    """Every alarm with what to do; empty where there is none."""
    text = Text()
    for alarm in state["alarms"]:
        style = "bold white on red" if alarm["level"] == "critical" else "bold yellow"
        text.append(f" {alarm['level'].upper()} {alarm['kind']}: {clean(alarm['what'])} ", style)
        text.append(f" {clean(alarm['fix'])}\n")
    text.rstrip()
    return text


def chart(values: Sequence[float | None], width: int, height: int) -> list[str]:
    """A line of braille dots, ``height`` rows of ``width`` cells; the newest at the right end."""
    known = [value for value in values if value is not None]
    if not known or width < 1 or height < 1:
        return [" " * width] * height
    low, high = min(known), max(known)
    span = (high - low) or 1.0
    points = _fitted(values, 2 * width)
    cells = [[0] * width for _ in range(height)]
    before: int | None = None
    for x, value in enumerate(points):
        if value is None:
            before = None
            continue
        level = round((value - low) / span * (4 * height - 1))
        dots = _RIGHT if x % 2 else _LEFT
        for step in _between(before, level):  # a line, not a cloud
            cells[height - 1 - step // 4][x // 2] |= dots[step % 4]
        before = level
    return ["".join(chr(0x2800 + cell) for cell in row) for row in cells]


def _between(before: int | None, level: int) -> range:
    """The levels from the last one, which is drawn already, to this one."""
    if before is None or before == level:
        return range(level, level + 1)
    return range(before + 1, level + 1) if before < level else range(level, before)


def _fitted(values: Sequence[float | None], count: int) -> list[float | None]:
    """As many values as there are columns: the nearest ones, with gaps left out."""
    if len(values) == 1:
        return [values[0]] * count
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def curve(title: str, values: Sequence[float | None], width: int, height: int) -> Text:
    """A chart with its newest, largest and smallest value; a dash where the newest is not known."""
    known = [value for value in values if value is not None]
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(title, "bold")
    if not known:
        return text.append("  nothing yet", "dim")
    text.append("  -" if values[-1] is None else f"  {values[-1]:.4g}", "bold cyan")
    text.append(f"   {min(known):.4g} to {max(known):.4g}\n", "dim")
    text.append("\n".join(chart(values, width, height)), "cyan")
    return text


def loss(
    columns: Mapping[str, Sequence[float | None]],
    width: int,
    height: int,
    last: float | None = None,
) -> Text:
    """The validation loss, which not every round has, or the training loss until it is known.

    ``last``: the newest one, where it is known; columns may have it mixed with older ones.
    """
    values, newest = list[float | None](), None
    for value in columns["validation_loss"]:
        newest = newest if value is None else value
        values.append(newest)
    if newest is None:
        return curve("training loss", columns["loss"], width, height)
    values[-1] = newest if last is None else last
    return curve("validation loss", values, width, height)


def rounds(rows: Sequence[Mapping[str, Any]], width: int, names: Mapping[str, str]) -> Text:
    """The newest rounds as bars by phase, the latest first, with who was dropped.

    Above them whom the newest waited for; ``names`` of peers, where they have one.
    """
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("rounds ", "bold")
    for name, mark, style in PHASES:
        text.append(f" {mark}", style)
        text.append(name, "dim")
    shown = list(rows)[-ROUNDS:][::-1]
    if shown and (waited := waited_for(shown[0], names)):
        text.append(f"\n{waited}", "cyan")
    longest = max(map(merging_s, shown), default=0.0) or 1.0
    for row in shown:
        place = f".{row['fragment'] + 1}" if row["fragments"] > 1 else ""
        text.append(f"\n{str(row['round']) + place:>6} ")
        if not row["phases"]:  # an observer sees none
            told = f"{_merged(row)} islands"
            if row["consensus"] is not None:
                told += f", {row['consensus']:.4f} apart before"
            text.append(told)
            continue
        room = max(8, width - 36)
        for name, mark, style in PHASES:
            text.append(mark * round(row["phases"].get(name, 0.0) / longest * room), style)
        use = "" if row["utilisation"] is None else f" util {row['utilisation']:.0%}"
        text.append(f" {merging_s(row):.1f} s {_merged(row)}{use}", "dim")
        if row["dropped"]:
            text.append(f" without {len(row['dropped'])}", "bold yellow")
    return text


def node(state: Mapping[str, Any]) -> Text:
    """This node's health, traffic, trust and machine."""
    lines = Text(no_wrap=True, overflow="ellipsis")
    if state["node"]["role"] == "observer":
        lines.append("observer  ", "bold")
        lines.append("takes part in nothing", "green")
        islands = (peer for peer in state["peers"] if peer["role"] == "island")
        speed = sum(peer["tokens_per_second"] for peer in islands if there(peer))
        return lines.append(f"\nall islands: {speed:,.0f} tokens/s")
    lines.append("this node  ", "bold")
    health = healthy(state)
    lines.append(health, "green" if health == "ok" else "yellow")
    network, machine, trust = state["network"]["rounds"], state["machine"], state["trust"]
    step = state["training"]["step"]
    if step is not None:
        lines.append(
            f"\nstep {step['step']}  loss {number(step['loss'])}  "
            f"{step['tokens_per_second']:,.0f} tokens/s"
        )
        if step["data_s"] and step["seconds"]:
            lines.append(f"  {step['data_s'] / step['seconds']:.0%} waiting for data")
    lines.append(f"\nsent {megabytes(network['sent_bytes'])}")
    lines.append(f"  received {megabytes(network['received_bytes'])}")
    if network["compression"]:
        lines.append(f"  {network['compression']:.1f}x smaller than fp32")
    if machine["gpus"]:
        lines.append("\ngpu " + gpus_line(machine["gpus"]))
    if machine["memory_available"] is not None:
        lines.append(f"\nmemory free {megabytes(machine['memory_available'])}")
        lines.append(f"  disk free {megabytes(machine['disk_free'] or 0)}")
        lines.append(f"  load {machine['load'] or 0:.1f}/{machine['cores']}")
    wrong = {**trust["rejected"], **trust["refused"]}
    told = ", ".join(f"{count} {clean(name, 20)}" for name, count in wrong.items())
    saved = "none" if state["checkpoint"] is None else f"of round {state['checkpoint']['round']}"
    lines.append(f"\ncheckpoint {saved}  turned away: {told or 'nothing'}")
    if address := state["node"]["join_address"]:
        invited, run = state["node"]["invitation_needed"], state["run"]
        line = join_line(
            address, invited=invited, scripts=of_scripts(run), own_text=of_own_text(run)
        )
        below = [f"      {told}" for told in state["node"]["join_hint"]]
        lines.append("\n" + "\n".join([f"join: {line}", *below]), "dim")
    return lines


def only_claimed(state: Mapping[str, Any]) -> bool:
    """Whether of each island's tokens no more is known than what it says it has trained.

    An observer's rounds have none by island, and where islands meet in pairs nobody certifies any.
    """
    consensus = state["consensus"]
    in_pairs = consensus is not None and consensus["agreeing"] is None
    return in_pairs or state["node"]["role"] == "observer"


def peer_columns(claimed: bool) -> tuple[str, ...]:
    """The heads of :func:`peer_row`."""
    return tuple("claimed" if claimed and n == "merged" else n for n in PEER_COLUMNS)


def there(peer: Mapping[str, Any]) -> bool:
    """Whether what a peer said last is a figure of now."""
    return peer["status"] in ("active", "joining")


def peer_row(peer: Mapping[str, Any], *, claimed: bool = False) -> tuple[str, ...]:
    """One row under :func:`peer_columns`."""
    name = clean(peer["name"], 16)
    who = f"{name} {short(peer['peer'])}" if name else short(peer["peer"])
    agrees = {True: "yes", False: "NO", None: "-"}[peer["agrees"]]
    rtt = "" if peer["rtt_s"] is None else f" {peer['rtt_s'] * 1000:.0f} ms"
    region = f" ({clean(peer['region'], 12)})" if peer["region"] else ""
    role = "" if peer["role"] == "island" else f" {clean(peer['role'], 9)}"
    return (
        who + region,
        clean(peer["status"], 9) + role,
        str(peer["round"]),
        agrees,
        number(peer["loss"]) if there(peer) else "-",
        f"{peer['tokens_per_second']:,.0f}" if there(peer) else "-",
        f"{peer['total_tokens' if claimed else 'merged_tokens']:,}",
        "-" if peer["distance"] is None else f"{peer['distance']:.3f}",
        peer["link"] + rtt,
    )


def merging_s(row: Mapping[str, Any]) -> float:
    """Seconds from the snapshot to the merge; the trainer's own are not of it."""
    return float(sum(row["phases"].get(name, 0.0) for name, _, _ in PHASES))


def waited_for(row: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Who was the last to be ready for a round, of those that were merged."""
    ready = {
        peer: item["ready_s"]
        for peer, item in row["islands"].items()
        if item.get("ready_s") is not None and item.get("tokens")
    }
    if len(ready) < 2:
        return ""
    last = max(ready, key=lambda peer: ready[peer])
    who = clean(names.get(last, ""), 32) or short(last)
    return f"round {row['round']}: all waited for {who}, {ready[last]:.1f} s after the first"


def names(state: Mapping[str, Any]) -> dict[str, str]:
    """What peers are called, by their ids, as far as they have names."""
    return names_apart({peer["peer"]: clean(peer["name"], 16) for peer in state["peers"]})


def link_rows(picture: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The links between islands, the slowest that were measured first, under LINK_COLUMNS."""
    called = names(picture["state"])
    found = picture.get("links") or {"peers": [], "links": []}
    who = [called.get(peer) or short(peer) for peer in found["peers"]]
    ordered = sorted(found["links"], key=lambda link: (link[2] is None, link[2] or link[3] or 0.0))
    return [
        (
            who[source],
            who[target],
            "-" if speed is None else f"{megabytes(speed)}/s",
            "-" if trip is None else f"{trip * 1000:.0f} ms",
            f"told {duration(age)} ago" if age else "here",
        )
        for source, target, speed, trip, age in ordered
    ]


def _merged(row: Mapping[str, Any]) -> str:
    """Of how many islands it merged work; an empty round, a roll call, lets in who is there."""
    if row["live"] and not (row["members"] or row["dropped"]):
        return f"lets in {row['live']}"
    return f"{row['members']}/{row['live']}"


def fragment_rows(state: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Where each fragment stands, under FRAGMENT_COLUMNS; one row for a model merged whole."""
    return [
        (
            f"{one['fragment'] + 1} of {one['fragments']}",
            str(one["round"]),
            one["outcome"],
            f"{one['members']} of {one['live']}",
            f"{one['sync_s']:.1f} s",
            "-" if one["agreeing"] is None else f"{one['agreeing']} of {one['live']}",
            one["state"][:12],
        )
        for one in state["fragments"]
    ]
