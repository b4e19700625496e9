"""The run that a command speaks of: from a file, a preset with changes, or the default one."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from bootstrap.manifest import Manifest, load
from bootstrap.validation import bad_config, explain
from node.config import NodeConfig


def manifest_for(
    config: NodeConfig, preset: str = "", changes: Sequence[str] = ()
) -> Manifest | None:
    """The manifest this node brings along; None where it takes one from peers or a checkpoint.

    With both a run of its own and ``peers`` that run is returned, to be compared with the swarm's
    (E201).
    """
    if preset or changes:
        if config.run is not None:
            raise bad_config(
                "two runs", "--run excludes --preset, --mode and --set", "give one of them"
            )
        return _that_runs(_preset(preset or "tiny", changes))
    if config.run is not None:
        return _that_runs(load(config.run))
    if config.peers or config.resume:
        return None
    if config.role == "observer":
        raise bad_config(
            "nothing to observe",
            "role observer creates no run, and no peers are given",
            "give a peer of the run with --peers HOST:PORT",
        )
    return Manifest() if config.role in ("island", "server") else None


def _that_runs(manifest: Manifest) -> Manifest:
    from node.modes import check_runs

    check_runs(manifest)
    return manifest


def _preset(name: str, changes: Sequence[str]) -> Manifest:
    from node.presets import preset

    split = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not key or not equals:
            raise bad_config(
                "bad --set", f"{change!r} is no KEY=VALUE", "as in --set inner.lr=1e-3"
            )
        split[key] = value
    try:
        return preset(name, split)
    except ValidationError as error:
        why = "\n       ".join(explain(error, Manifest))
        raise bad_config("bad setting of the run", why, "correct what is named above") from error
    except ValueError as error:
        raise bad_config("bad --preset or --set", str(error), "see node start --help") from error
