"""What ``node doctor`` runs, in order, and how it is told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import typer

from bootstrap.manifest import Manifest
from node.config import NodeConfig
from node.doctor import machine, software
from node.doctor.finding import Finding
from node.monitor.wording import clean

SCHEMA = 1
EXIT_FAILED = 1


def main(config: NodeConfig, manifest: Manifest | None, *, network: bool, as_json: bool) -> int:
    """Run the checks and print them; exit status 1 where one failed.

    ``manifest`` None: that of the peers' run, if they can be asked.
    """
    asked: list[Finding] = []
    if network:
        from node.doctor.network import check  # brings aiohttp

        found, theirs = check(config)
        manifest = manifest or theirs
        asked = [machine.torch_works(config.device), *found]
    findings = local(config, manifest) + asked
    typer.echo(as_text(findings) if not as_json else as_document(findings))
    return EXIT_FAILED if any(one.status == "fail" for one in findings) else 0


def local(config: NodeConfig, manifest: Manifest | None) -> list[Finding]:
    """What needs neither peers nor torch: it takes a fraction of a second.

    But for a model of transformers, whose parameters a process of its own has to count.
    """
    return [
        software.python(),
        software.packages(),
        software.command(),
        software.imports(),
        machine.gpu(config.device),
        machine.memory(config, manifest),
        machine.disk(config, manifest),
        machine.clock(),
        machine.losses(),
        *machine.ports(config),
    ]


def as_text(findings: Sequence[Finding]) -> str:
    """A line a finding, why and what to do under it, and what it comes to."""
    lines = []
    width = max(len(one.name) for one in findings)
    for one in findings:
        lines.append(f"{one.status:<4}  {one.name:<{width}}  {clean(one.found, lines=True)}")
        if one.status != "ok":
            indent = " " * (8 + width)
            lines += [
                f"{indent}why: {clean(one.why, lines=True)}",
                f"{indent}fix: {clean(one.fix, lines=True)}",
            ]
    failed = sum(one.status == "fail" for one in findings)
    warned = sum(one.status == "warn" for one in findings)
    told = [f"{failed} failed"] if failed else []
    told += [f"{warned} to look at"] if warned else []
    lines.append(", ".join(told) or "all is well")
    return "\n".join(lines)


def as_document(findings: Sequence[Finding]) -> str:
    """JSON: ``ok`` and the findings in order."""
    good = not any(one.status == "fail" for one in findings)
    return json.dumps(
        {"schema": SCHEMA, "ok": good, "checks": [asdict(one) for one in findings]}, indent=2
    )
