"""Python, the packages Atoll needs, and who else has names like ours. Imports nothing heavy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import node
from node.doctor.finding import Finding, fail, ok, warn

INSTALL = (
    "pip install -e . -c constraints.txt, in the clone of Atoll and with this environment's pip"
)
OURS = ("node", "protocols", "diloco", "gossip", "bootstrap")
OLDEST_PYTHON = (3, 11)
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*([<>=!~][^;]*)?(;.*)?")
_BOUND = re.compile(r"(>=|<=|==|!=|<|>|~=)\s*([0-9][0-9.]*)")
_SCRIPT_BYTES = 4096


def python() -> Finding:
    """Which Python runs."""
    text = f"{sys.version.split()[0]} at {sys.executable}"
    if sys.version_info[:2] < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        return fail("python", text, f"Atoll needs {oldest} or newer", f"install Python {oldest}")
    return ok("python", text)


def packages() -> Finding:
    """What ``pip`` would have installed with Atoll, and whether it is in the range that fits."""
    try:
        wanted = importlib.metadata.requires("atoll") or []
    except importlib.metadata.PackageNotFoundError:
        return warn(
            "packages",
            "Atoll runs from a folder, not as an installed package",
            "so nothing has seen to what it needs",
            INSTALL,
        )
    return judge_packages(wanted)


def judge_packages(wanted: Iterable[str]) -> Finding:
    """As :func:`packages`, of lines such as ``torch<2.14,>=2.11``; extras are left out."""
    wrong: list[str] = []
    found = 0
    torch = "torch missing"
    for line in wanted:
        match = _REQUIREMENT.fullmatch(line.strip())
        if match is None or "extra" in (match[3] or ""):
            continue
        name, bounds = match[1], (match[2] or "").strip()
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        if name == "torch":
            torch = f"torch {version}"
        if not within(version, bounds):
            wrong.append(f"{name} {version} is not {bounds}")
        found += 1
    if wrong:
        return fail(
            "packages",
            "; ".join(wrong),
            "Atoll was made for and tested with other versions",
            INSTALL,
        )
    return ok("packages", f"{torch}, {found} packages as required")


def within(version: str, bounds: str) -> bool:
    """Whether a version is in bounds such as ``<2.14,>=2.11``; what comes after its numbers, or
    stands there that this cannot read, is let pass."""
    have = _numbers(version)
    for sign, text in _BOUND.findall(bounds):
        want = _numbers(text)
        width = max(len(have), len(want))
        left, right = (v + (0,) * (width - len(v)) for v in (have, want))
        holds = {
            ">=": left >= right,
            "<=": left <= right,
            "<": left < right,
            ">": left > right,
            "==": left == right,
            "!=": left != right,
            "~=": left >= right and have[: len(want) - 1] == want[:-1],
        }
        if not holds[sign]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def command() -> Finding:
    """Which programs the names ``node`` and ``atoll`` lead to."""
    whose = {name: whose_program(shutil.which(name)) for name in ("node", "atoll")}
    found = ", ".join(
        f"{name}: {shutil.which(name) or 'none'}" + (f" ({who})" if who else "")
        for name, who in whose.items()
    )
    if whose["node"] == "this Atoll":
        return ok("command", found)
    way = "atoll" if whose["atoll"] == "this Atoll" else f"{sys.executable} -m node"
    why = {
        "Node.js": "Node.js has the same name and comes first in PATH",
        "another Atoll": "another environment comes first in PATH",
        "": "the folder of this environment's programs is not in PATH",
    }.get(whose["node"], "another program has the same name and comes first in PATH")
    return warn("command", found, why, f"write `{way} start` where the documents say `node start`")


def whose_program(path: str | None) -> str:
    """``this Atoll``, ``another Atoll``, ``Node.js``, ``another program``; empty for no path."""
    if path is None:
        return ""
    try:
        with Path(path).open("rb") as file:
            head = file.read(_SCRIPT_BYTES)
    except OSError:
        return "another program"
    if b"node.__main__" in head and head.startswith(b"#!"):
        here = Path(sys.executable).parent.resolve()  # python itself may be a link out of there
        # pipx and uv link to the programs of an environment from a folder that is in PATH
        return "this Atoll" if Path(path).resolve().parent == here else "another Atoll"
    return "Node.js" if head.startswith(b"\x7fELF") else "another program"


def imports(paths: Sequence[str] | None = None, working: Path | None = None) -> Finding:
    """Whether our packages' names lead to our packages: PyPI has others called so."""
    root = Path(node.__file__).resolve().parent.parent
    names = [p for p in (sys.path if paths is None else paths) if p]
    wrong = [
        f"{name} is found in {places[0]} first"
        for name in OURS
        if (places := _places(name, names)) and places[0] != root
    ]
    for name in OURS:
        try:
            other = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        wrong.append(f"the package {name} {other.version} of others is installed as well")
    if wrong:
        return fail(
            "imports",
            "; ".join(wrong),
            "Atoll imports that, or a mixture of both, in place of its own",
            "use an environment of its own, as make .venv makes one in the clone",
        )
    here = (working or Path.cwd()).resolve()
    near = [name for name in OURS if here != root and _has(here, name)]
    if near:
        return warn(
            "imports",
            f"this folder has a {near[0]} of its own",
            "`python -m node` looks into the working folder first",
            "change to another folder, or use the command `atoll`",
        )
    return ok("imports", f"{len(OURS)} packages from {root}")


def _places(name: str, paths: Sequence[str]) -> list[Path]:
    return [place for path in paths if _has(place := Path(path).resolve(), name)]


def _has(folder: Path, name: str) -> bool:
    return (folder / name / "__init__.py").is_file() or (folder / f"{name}.py").is_file()


def torch_cuda() -> tuple[str, str] | None:
    """Version of torch and of the CUDA it was built for (empty: none), without importing it."""
    text = _torch_version()
    if text is None:
        return None
    version = re.search(r"__version__ = '([^']*)'", text)
    cuda = re.search(r"^cuda[^=]*= '([0-9.]+)'", text, re.MULTILINE)
    return (version[1] if version else "?"), (cuda[1] if cuda else "")


def torch_rocm() -> str:
    """Version of the HIP (of ROCm) that torch was built for; empty: none."""
    hip = re.search(r"^hip[^=]*= '([^']+)'", _torch_version() or "", re.MULTILINE)
    return hip[1] if hip else ""


def _torch_version() -> str | None:
    """What torch's file says of how it was built."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        return (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
