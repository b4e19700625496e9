"""What gets installed: our five packages and nobody else's, whole, with pinned dependencies."""

from __future__ import annotations

import ast
import fnmatch
import importlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from places import ROOT

PACKAGES = ("node", "protocols", "diloco", "gossip", "bootstrap")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([0-9][A-Za-z0-9.!-]*)")

every_package = pytest.mark.parametrize("package", PACKAGES)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements() -> list[str]:
    """Every requirement of the project, extras included."""
    project = PROJECT["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    return [*project["dependencies"], *extras]


def name_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return canonical(match[0])


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = {}
    for line in lines:
        if line and not line.startswith("#"):
            match = PIN.fullmatch(line)
            assert match is not None, f"{line!r} is not NAME==VERSION"
            found[canonical(match[1])] = match[2]
    return found


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@every_package
def test_our_packages_are_ours(package: str) -> None:
    """PyPI has a `node` and a `gossip` too; installed, they would be imported instead of ours."""
    module = importlib.import_module(package)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve() == ROOT / package / "__init__.py"


def test_both_commands_are_installed() -> None:
    scripts = importlib.metadata.entry_points(group="console_scripts")
    for name in ("node", "atoll"):
        targets = {entry.value for entry in scripts.select(name=name)}
        assert targets == {PROJECT["project"]["scripts"][name]}, name
        assert (Path(sys.executable).parent / name).exists()


@every_package
def test_the_wheel_has_every_module(package: str) -> None:
    """Folders without __init__.py are left out of a wheel without a word."""
    include = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    for source in sources(package):
        folder = source.parent
        assert (folder / "__init__.py").exists(), f"{folder} would not be packaged"
        dotted = ".".join(folder.relative_to(ROOT).parts)
        assert any(fnmatch.fnmatchcase(dotted, pattern) for pattern in include)
    assert (ROOT / package / "py.typed").exists()


def test_nothing_else_becomes_a_package() -> None:
    """A new top-level folder must not slip into the wheel through a pattern."""
    include = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    matching = {f for f in folders if any(fnmatch.fnmatchcase(f, p) for p in include)}
    assert matching == set(PACKAGES)


@every_package
def test_the_wheel_has_every_data_file(package: str) -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["*"]
    for path in (ROOT / package).rglob("*"):
        if path.is_dir() or path.suffix in (".py", ".pyc"):
            continue
        names = [str(path.relative_to(parent)) for parent in path.parents if parent != ROOT]
        assert any(fnmatch.fnmatchcase(n, p) for n in names for p in patterns), path


def test_every_import_is_declared() -> None:
    """Else it works only as long as another package happens to bring it."""
    providers = importlib.metadata.packages_distributions()
    declared = {name_of(requirement) for requirement in PROJECT["project"]["dependencies"]}
    extras = PROJECT["project"]["optional-dependencies"].values()
    optional = {name_of(requirement) for extra in extras for requirement in extra}
    known = {*sys.stdlib_module_names, "compression", *PACKAGES}  # that is Python 3.14's
    missing = set()
    for source in [s for package in PACKAGES for s in sources(package)]:
        for statement in ast.walk(ast.parse(source.read_text())):
            names = []
            if isinstance(statement, ast.Import):
                names = [alias.name for alias in statement.names]
            elif isinstance(statement, ast.ImportFrom) and statement.level == 0:
                names = [statement.module or ""]
            for name in names:
                top = name.partition(".")[0]
                if top in known:
                    continue
                distributions = {canonical(d) for d in providers.get(top, [top])}
                if not distributions & (declared | optional):
                    missing.add(f"{source.relative_to(ROOT)}: {top}")
    assert not missing


def test_constraints_pin_every_requirement() -> None:
    pinned = pins()
    assert {name_of(r) for r in requirements()} <= pinned.keys()
    assert pinned["torch"] == "2.13.0"


def test_pins_lie_within_the_declared_ranges() -> None:
    pinned = pins()
    for line in requirements():
        requirement = Requirement(line)
        assert requirement.specifier.contains(pinned[canonical(requirement.name)]), line


def test_constraints_cover_what_the_requirements_require() -> None:
    """Everything that is really installed on this platform, down the tree."""
    pinned = pins()
    waiting, seen = [name_of(r) for r in requirements()], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        assert name in pinned, name
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # an environment without the lint extra
        for line in lines:
            requirement = Requirement(line)
            accelerator = requirement.name.startswith(("nvidia-", "cuda-", "triton"))
            if not accelerator and (
                requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            ):
                waiting.append(canonical(requirement.name))
    assert len(seen) > 30


def test_the_makefile_makes_what_it_says() -> None:
    """Dry runs: the targets exist and run what they should."""
    for target, command in {
        "demo": "-m node demo",
        "test": "-m pytest",
        "test-swarm": "-m pytest -m swarm",
        "test-browser": "-m pytest -m browser",
        "lint": "lint-imports",
    }.items():
        result = subprocess.run(
            ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert command in result.stdout, target


def test_an_old_python_is_told_so(tmp_path: Path) -> None:
    """The environment's own check, run in an empty copy with a Python that says it is 3.9."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    old = tmp_path / "python3.9"
    old.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c"
        """ 'import sys; sys.version_info = (3, 9, 1); sys.version = "3.9.1 (old)"; """
        """exec(sys.argv[2])' "$@"\n"""
    )
    old.chmod(0o755)
    for python, words in [(old, "needs Python 3.11 or newer"), ("no-such-one", "is not there")]:
        result = subprocess.run(
            ["make", ".venv", f"PYTHON={python}"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode != 0
        assert words in result.stderr
        assert not (tmp_path / ".venv").exists()


def test_licence_and_changelog_are_there() -> None:
    assert PROJECT["project"]["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()
