"""The run that a command speaks of: from a file, a preset with changes, or the default one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bootstrap.manifest import Manifest, Model
from bootstrap.validation import bad_config, check, explain, read_toml
from node.config import NodeConfig


def manifest_for(
    config: NodeConfig, preset: str = "", changes: Sequence[str] = ()
) -> Manifest | None:
    """The manifest this node brings along; None where it takes one from peers or a checkpoint.

    With both a run of its own and ``peers`` that run is returned, to be compared with the swarm's
    (E201). A model of ``config`` is in it before anything is checked, since lengths and fragments
    follow from it. Raises OperatorError E204, and E605, E606 for such a model.
    """
    if config.init_from is not None and config.hf_config is not None:
        raise bad_config(
            "two models", "--init-from has a config.json of its own", "leave out --hf-config"
        )
    model = config.init_from or config.hf_config
    if preset or changes:
        if config.run is not None:
            raise bad_config(
                "two runs",
                "--run excludes --preset, --mode and --set",
                f"write what is to change into {config.run}, or leave out --run",
            )
        return _that_runs(_preset(preset or "tiny", changes, model))
    if config.run is not None:
        tables = _with_model(read_toml(config.run), model)
        return _that_runs(check(Manifest, tables, str(config.run)))
    if config.peers or config.resume:
        return None
    if config.role == "observer":
        raise bad_config(
            "nothing to observe",
            "role observer creates no run, and no peers are given",
            "give a peer of the run with --peers HOST:PORT",
        )
    if config.role not in ("island", "server"):
        return None
    return _that_runs(check(Manifest, _with_model({}, model), str(model))) if model else Manifest()


def _that_runs(manifest: Manifest) -> Manifest:
    from node.modes import check_runs

    check_runs(manifest)
    return manifest


def _with_model(tables: dict[str, Any], source: Path | None) -> dict[str, Any]:
    """A manifest's tables with the model that ``source`` describes, where there is one.

    Of the model's own table ``attention`` stays, which no config.json says, and what is unknown,
    so that it is refused.
    """
    if source is None:
        return tables
    from node.hf.import_hf import read_config

    model: dict[str, Any] = read_config(source).model_dump(exclude_unset=True)
    table = tables.get("model", {})
    if not isinstance(table, dict):
        return tables
    kept = {
        key: value
        for key, value in table.items()
        if key == "attention" or key not in Model.model_fields
    }
    return tables | {"model": model | kept}


def _preset(name: str, changes: Sequence[str], model: Path | None) -> Manifest:
    from node.presets import tables_of, with_schedule

    split = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not key or not equals:
            raise bad_config(
                "bad --set", f"{change!r} is no KEY=VALUE", "as in --set inner.lr=1e-3"
            )
        split[key] = value
    try:
        made = Manifest.model_validate(_with_model(tables_of(name, split), model))
        return with_schedule(made, name, split)
    except ValidationError as error:
        why = "\n       ".join(explain(error, Manifest))
        raise bad_config("bad setting of the run", why, "correct what is named above") from error
    except ValueError as error:
        raise bad_config("bad --preset or --set", str(error), "see node start --help") from error
