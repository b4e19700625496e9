"""What the documents say exists: commands parse, links resolve, files and tests are there."""

from __future__ import annotations

import json
import math
import re
import shlex
import statistics
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from places import ROOT

from bootstrap.manifest import load
from node.cli import COMMANDS, app
from node.trainer.early import FIRST_S, STILL_S

README = ROOT / "README.md"
OWN = ROOT / "docs" / "own.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
PLACEHOLDERS = {
    "HOST:PORT/ID": "192.0.2.7:4390",
    "HOST:PORT": "192.0.2.7:4390",
    "SECRET": "secret",
    "NAME": "systemd",
    "DIR": "folder",
}
FOLDERS = ("protocols", "diloco", "gossip", "bootstrap", "node", "tests", "docs", "benchmarks")
PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/(?:[A-Za-z0-9_./-]*[A-Za-z0-9_/])?")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
TITLE = re.compile(r"^\*\*((?:[^*\n]|\n(?!\n))+)\*\*", re.MULTILINE)  # of an experiment
ROLE = re.compile(r":(?:mod|class|func|meth|data|attr|exc|obj):`~?([\w.]+)`")

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(language: str = "", page: Path = README) -> list[str]:
    """The fenced blocks of a page that are marked with ``language``."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for marked, text in found if marked == language]


def spans(text: str) -> list[str]:
    """What stands in backquotes, outside of fenced blocks."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", prose)


def commands() -> list[str]:
    """Every line or span that begins with ``node``, in the README and the pages for operators."""
    said: list[str] = []
    pages = (README, OWN, ROOT / "docs" / "monitoring.md")
    for page in (*pages, *sorted((ROOT / "docs" / "operators").glob("*.md"))):
        said += [line.strip() for block in blocks(page=page) for line in block.splitlines()]
        said += spans(page.read_text())
    whole = {c.partition(" > ")[0] for c in said if c.startswith("node ") and "…" not in c}
    return sorted(whole)


def links(text: str) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_there_is_something_to_check() -> None:
    assert len(commands()) >= 8
    assert {page.name for page in PAGES} >= {"architecture.md", "protocol.md", "experiments.md"}


def parse(command: str) -> None:
    """Take a command line as typer does, without running anything. Raises click's UsageError."""
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(command)[1:]]
    found: Any = typer.main.get_command(app)
    context = None
    while hasattr(found, "commands"):
        context = found.make_context(found.name, words[:], parent=context, resilient_parsing=True)
        context.resilient_parsing = False  # was: no complaint that the sub-command is not run
        words = [*context._protected_args, *context.args]  # what is not of the group itself
        if not words and found.invoke_without_command:
            return
        _, found, words = found.resolve_command(context, words)
    found.make_context(found.name, words, parent=context)


@pytest.mark.parametrize("command", commands())
def test_every_command_of_the_readme_parses(command: str) -> None:
    parse(command)


@every_page
def test_a_key_that_is_made_is_given_to_a_node(page: Path) -> None:
    """Else who follows the page has a seed with another identity."""
    said = [line for block in blocks(page=page) for line in block.splitlines()]
    said += spans(page.read_text())
    made = [
        words[words.index("--out") + 1]
        for words in map(str.split, said)
        if "--out" in words and words[:2] == ["node", "keygen"]
    ]
    for path in made:
        used = f"--identity {path}"
        assert path == "FILE" or any(used in command for command in said), path


def test_every_command_stands_in_the_table_of_commands() -> None:
    """The README says that all are there, by purpose."""
    page = ROOT / "docs" / "operators" / "commands.md"
    said = [line for block in blocks(page=page) for line in block.splitlines()]
    named = {span.split()[1] for span in [*said, *spans(page.read_text())] if span[:5] == "node "}
    assert named >= set(COMMANDS)


@pytest.mark.parametrize("wrong", ["node begin", "node start --no-such", "node config shew"])
def test_wrong_commands_do_not(wrong: str) -> None:
    with pytest.raises(Exception, match=r"No such (command|option)"):
        parse(wrong)


@every_page
def test_every_relative_link_resolves(page: Path) -> None:
    for link in links(page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT), link
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@every_page
def test_every_file_named_exists(page: Path) -> None:
    """In prose, in commands and in links, whether as a path or as the module of ``python -m``."""
    text = page.read_text()
    for name in PATH.findall(text):
        assert (ROOT / name).exists() or (page.parent / name).exists(), name
    for name in re.findall(rf"-m ((?:{'|'.join(FOLDERS)})[.\w]*\w)", text):
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name


def in_source(name: str) -> bool:
    """Whether a dotted name of ours leads to a module, and what follows stands in that."""
    words = name.split(".")
    for count in range(len(words), 0, -1):
        path = ROOT.joinpath(*words[:count])
        for source in (path.with_suffix(".py"), path / "__init__.py"):
            if source.exists():
                return words_in(source) >= set(words[count:])
    return False


@cache
def words_in(path: Path) -> set[str]:
    """All words of a file but for those in references."""
    return set(re.findall(r"\w+", ROLE.sub("", path.read_text())))


def test_every_name_that_docstrings_refer_to_is_there() -> None:
    everything = set().union({path.stem for path in SOURCES}, *map(words_in, SOURCES))
    references = [(path, name) for path in SOURCES for name in ROLE.findall(path.read_text())]
    assert len(references) > 500
    for path, name in references:
        if name.partition(".")[0] in FOLDERS and "." in name:
            assert in_source(name), (path, name)
        else:
            assert set(re.findall(r"\w+", name)) <= everything, (path, name)


@every_page
def test_every_test_named_exists(page: Path) -> None:
    for span in spans(page.read_text()):
        path, double_colon, name = span.partition("::")
        if double_colon:
            assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.M), span


def test_symbols_named_beside_their_file_are_in_it() -> None:
    """``gossip/rounds/round.py``, ``Round._lead``: the second stands in the first."""
    text = (ROOT / "docs" / "experiments.md").read_text()
    pairs = re.findall(r"`([a-z_/]+\.py)`,\s`(?:(\w+)\.)?(\w+)`", text)
    assert pairs
    for path, owner, name in pairs:
        source = (ROOT / path).read_text()
        assert re.search(rf"\b{name}\b", source), (path, name)
        assert not owner or f"class {owner}" in source, (path, owner)


def test_experiments_are_found_by_topic() -> None:
    """The table names entries that are there, and all of days that are over."""
    text = (ROOT / "docs" / "experiments.md").read_text()
    _, table, *days = re.split(r"^## ", text, flags=re.MULTILINE)
    listed = re.findall(r"\*([^*|]+)\*", table)
    entries = [
        {" ".join(title.split()).rstrip(".") for title in TITLE.findall(day)} for day in days
    ]
    assert len(listed) == len(set(listed))
    assert set(listed) <= set().union(*entries)
    assert set().union(*entries[1:]) <= set(listed)


def test_the_run_file_that_is_shown_is_a_manifest(tmp_path: Path) -> None:
    (example,) = blocks("toml", OWN)
    path = tmp_path / "run.toml"
    path.write_text(example)
    manifest = load(path)
    assert manifest.name == tomllib.loads(example)["name"]
    assert manifest.data.recipe == "text"


def test_the_presets_that_are_named_exist() -> None:
    from node.presets import PRESETS

    text = README.read_text() + OWN.read_text()
    assert set(re.findall(r"--preset ([\w-]+)", text)) <= set(PRESETS)


def test_the_folders_of_the_readme_are_the_packages() -> None:
    diagram = next(block for block in blocks() if block.startswith("protocols/"))
    folders = re.findall(r"^(\w+)/", diagram, re.MULTILINE)
    assert sorted(folders) == sorted(
        path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests"
    )


def test_the_make_targets_named_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set()
    for page in PAGES:
        text = page.read_text()
        named |= {target for span in spans(text) for target in re.findall(r"^make ([a-z-]+)", span)}
    named |= set(re.findall(r"^make ([a-z-]+)", README.read_text(), re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def test_the_readme_has_its_parts_in_order() -> None:
    headings = re.findall(r"^## (.+)$", README.read_text(), re.MULTILINE)
    assert headings == [
        "One machine, two commands",
        "Two machines, two commands",
        "You should see",
        "Your own training script",
        "The code",
        "Compared with others",
        "Benchmarks",
        "Security, and its limits",
        "Error codes",
        "Licence",
    ]
    above = README.read_text().partition("\n## ")[0]
    assert above.index("![") < above.index("| what | how | proven by |")
    rows = re.findall(r"^\| (?!what|-)", above, re.MULTILINE)
    assert len(rows) == 5


def test_the_error_codes_of_the_readme_are_all_there_are() -> None:
    from node.errors import TABLE

    part = README.read_text().partition("## Error codes")[2]
    covered: set[str] = set()
    for row in re.findall(r"^\| (E\d.*?) \|", part, re.MULTILINE):
        first, last = re.findall(r"E\d{3}", row)
        covered |= {code for code in TABLE if first <= code <= last}
        assert {first, last} <= set(TABLE)
    assert covered == set(TABLE) - {"E999"}  # a defect, which nobody looks up


def test_every_benchmark_of_the_readme_is_there_with_its_figures() -> None:
    part = README.read_text().partition("## Benchmarks")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| [^|]+ \| `([^`]+)` \| \[[^]]+\]\(([^)]+)\) \|", part, re.MULTILINE)
    assert len(rows) >= 8
    for command, figures in rows:
        words = command.split()
        assert (ROOT / figures).is_file(), figures
        if words[0] == "python":
            assert (ROOT / (words[2].replace(".", "/") + ".py")).is_file(), command
            assert "--json FILE" in command, command  # most refuse to begin without, and none keeps


def test_where_gloo_is_compared_over_lossy_ways_its_congestion_control_is_named() -> None:
    pages = (README, ROOT / "benchmarks" / "README.md", ROOT / "benchmarks" / "far.py")
    for page in pages:
        text = page.read_text()
        assert {"cubic", "BBR", "tcp_allowed_congestion_control"} <= set(re.findall(r"\w+", text))


def test_where_averaging_on_loopback_is_compared_unix_sockets_are_named() -> None:
    """The others go by TCP there."""
    for page in (README, ROOT / "benchmarks" / "README.md", ROOT / "benchmarks" / "keys.py"):
        text = " ".join(page.read_text().split())
        assert "Unix sockets" in text, page
        assert "_tcp" in text, page


def test_the_figures_of_the_readme_are_those_of_the_results() -> None:
    from benchmarks.algorithms_figures import percent_over
    from benchmarks.algorithms_rows import BASE

    muon = "Muon inside, H {}, int2"
    results = ROOT / "benchmarks" / "results"
    names = ("allreduce", "island", "algorithms")
    averaging, island, study = (json.loads((results / f"{n}.json").read_text()) for n in names)

    def seconds(system: str, piece: str = "sixteen") -> float:
        turns = averaging["runs"][piece]["runs"][system]
        return float(statistics.median(turn["seconds"] for turn in turns))

    def over_gloo(piece: str) -> str:
        return f"{seconds('atoll fp32', piece) / seconds('gloo', piece):.2f}"

    ways = json.loads((results / "far.json").read_text())

    def far(way: str, system: str) -> str:
        turns = ways[way]["runs"][system]
        whole = [turn["seconds"] if turn["whole"] else math.inf for turn in turns]
        return f"{statistics.median(whole):.1f}"

    def over(name: str, islands: int, inner_steps: int = 20) -> str:
        found = percent_over(study["rows"], name.format(inner_steps), BASE, islands)
        return f"{found:.1f} %"

    text = " ".join(README.read_text().split())
    for said in (
        f"{island['island_overhead_ratio']:.3f} of the tokens a second of a bare torch loop",
        f"{island['island_overhead_ratio_tuned']:.3f} of those of a loop with the memory settings",
        f"{island['utilization_50mbit']:.3f} of its time in inner steps with int4",
        f"and {island['utilization_50mbit_int2']:.3f} with int2",
        f"torchft's DiLoCo {island['torchft_utilization_50mbit']:.3f}",
        f"the others wait {averaging['dark_link_stall_s']:.1f} s longer",
        f"they waited {averaging['torchft_dark_link_stall_s']:.1f} s",
        f"{averaging['vs_hivemind_fp32_tls']:.1f} times as fast as hivemind's on loopback",
        f"{averaging['vs_hivemind_wan_int4']:.1f} times at 100 Mbit",
        f"fp32 takes {seconds('atoll fp32'):.1f} s",
        f"gloo {seconds('gloo'):.1f} s",
        f"takes {over_gloo('two')} times as long as gloo among 2 members, "
        f"{over_gloo('fp32')} times among 4, {over_gloo('eight')} among 8 "
        f"and {over_gloo('sixteen')} among 16",
        f"{study['keys']['bytes_ratio_at_1pct']:.0f} times fewer bytes for {over(muon, 4, 40)}",
        f"{study['keys']['bytes_ratio_at_3pct']:,.0f} times fewer for {over(muon, 4, 150)}",
        f"int4 ends {over('DiLoCo, int4', 4)} above data parallelism with 4, and in shorter runs "
        f"{over('DiLoCo, int4', 8)} with 8 and {over('DiLoCo, int4', 16)} with 16",
        f"{far('continent', 'atoll int4 tls')} s over round trips of 80 ms where gloo takes "
        f"{far('continent', 'gloo')} s",
        f"{far('antipodes', 'atoll int4 tls')} s over 200 ms (gloo {far('antipodes', 'gloo')} s)",
        f"{far('ocean', 'atoll int4 tls')} s over 150 ms with one packet of a thousand lost, where "
        f"gloo takes {far('ocean', 'gloo')} s",
    ):
        assert said in text, said


def test_how_long_ranks_wait_for_their_data_is_what_they_do() -> None:
    (row,) = (
        line
        for line in (ROOT / "docs" / "parallelism.md").read_text().splitlines()
        if line.startswith("| training data take long")
    )
    assert "event `data_awaited` after ten seconds" in row
    assert "E406 after an hour in which nothing has moved" in row
    assert (FIRST_S, STILL_S) == (10.0, 3600.0)
