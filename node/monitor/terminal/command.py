"""``node monitor``: chooses a source and shows it, or prints one picture."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import aclosing
from pathlib import Path

import typer

from bootstrap.validation import bad_config
from node.config import NodeConfig
from node.monitor.terminal.source import AttachedSource, ReplaySource, Source, read_log
from node.status import find
from protocols.addresses import parse_peers


def main(config: NodeConfig, *, replay: Path | None, speed: float, once: bool) -> int:
    """Show until it is left; the exit status. Raises the OperatorError that ended it."""
    source = choose(config, replay, 0 if once and replay else speed)
    if replay is not None:
        next(read_log(replay))  # what cannot be read is told on the terminal as it is
    if once:
        typer.echo(asyncio.run(_first(source)))
        return 0
    if not sys.stdout.isatty():
        raise bad_config(
            "the monitor needs a terminal",
            "its output goes elsewhere",
            "use --once for one picture as JSON, or `node status`, with --watch again and again",
        )
    from node.monitor.terminal.app import Monitor

    app = Monitor(source)
    app.run()
    if app.failure is not None:
        raise app.failure
    return app.return_code or 0


def choose(config: NodeConfig, replay: Path | None, speed: float) -> Source:
    """A log if one is given, else the swarm with ``--peers``, else the node that runs here."""
    if replay is not None:
        return ReplaySource(replay, speed)
    if config.named_peers:
        from node.monitor.observer import Observer

        return Observer(parse_peers(config.named_peers), config.invitation)
    api = config.named_api
    return AttachedSource(*find(config.dir, api=api, key=config.api_key))


async def _first(source: Source) -> str:
    async with aclosing(source.pictures()) as pictures:
        async for picture in pictures:
            return json.dumps(picture, indent=2)
    return "{}"
