"""The run that a scenario describes, as a manifest of `node start`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from bootstrap.manifest import Manifest
from bootstrap.manifest_gossip import PAIRED
from bootstrap.validation import bad_config, explain
from node.simulate.learner import BETAS, DECAY
from node.simulate.scenario import GRADIENTS, Scenario

ONEBIT: dict[str, Any] = {
    "inner_steps": 1,
    "dynamic_steps": False,
    "codec": "auto",
    "codecs": ("bf16", "int1"),
    "feedback": 1.0,
}
# keys of a manifest, as a scenario calls them; most others have the name that they have there
KEYS = {
    "outer.optimizer": "outer",
    "outer.lr": "outer_lr",
    "outer.momentum": "outer_momentum",
    "inner.optimizer": "inner",
    "inner.lr": "inner_lr",
    "data.batch_size": "batch",
    "rounds.total_rounds": "rounds",
    "rounds.tau": "delay",
    "rounds.staleness": "bound",
    "rounds.clients": "sample",
    "merge.trust": "rule",
    "gossip.rule": "pairs",
    "gossip.bound": "disagreement",
}
# what no scenario sets by itself, as a manifest says it
SAID = {
    "or set rounds.quorum to 0.5": "or take mode diloco",
    "set rounds.quorum to 0.5, or use": "use",
    " with rounds.quorum 0.001": "",
    " and outer.momentum_start": "",
    "use delayed-nesterov": "use nesterov",  # as it is called here
    "outer.optimizer delayed-nesterov": "outer nesterov",
}
# before these in mode diloco, which has a quorum, and where nesterov is the ordinary one
SAID_IN_DILOCO = {
    "use delayed-nesterov, which takes each for its share (delayed Nesterov), or ": "",
    ", or use mode diloco among strangers": "",
    "or use delayed-nesterov with outer.momentum and outer.momentum_start 0": "or quorum to 0.5",
}


def codecs_of(one: Scenario) -> tuple[str, ...]:
    """Those of the run's rounds or letters."""
    return ONEBIT["codecs"] if one.mode == "onebit-adam" else one.allowed_codecs


def manifest_of(one: Scenario, rounds: int) -> Manifest:
    """The run that a scenario describes, of ``rounds`` rounds; of one where all merge but once.

    Raises OperatorError E204.
    """
    whole, by_gradients = one.rounds * one.inner_steps, one.mode in GRADIENTS
    of_mode: dict[str, dict[str, Any]] = {
        "diloco": {"quorum": one.quorum},
        "async": {"staleness": one.bound},
        "server": {"staleness": one.bound},
        "fedavg": {"clients": one.sample, "owners": "servers"},
        "streaming": {"tau": one.delay, "alpha": one.alpha},
        "sparta": {"inner_steps": 1, "share": one.share},
        "btm": {"inner_steps": whole, "total_rounds": 1},  # the one merge
        # of whole steps, and as exact as the wire's defaults
        "allreduce": {"inner_steps": 1, "dynamic_steps": False},
        "powersgd": {"inner_steps": 1, "dynamic_steps": False, "feedback": 1.0},
        "onebit-adam": ONEBIT,
    }
    table: dict[str, Any] = {
        "inner_steps": one.inner_steps,
        "total_rounds": rounds,
        "codec": one.codec,
        "feedback": one.feedback,
        "dynamic_steps": one.dynamic_steps,
        "eval_every": 0,
        "align": one.align,
        "fragments": one.pieces,
    }
    if one.codec == "auto" or one.mode in PAIRED:
        table["codecs"] = one.codecs
    table |= {"most_steps": one.most_steps, "exposed": one.exposed}
    if one.mode in PAIRED:
        return _checked(one, _in_pairs(one, table))
    merge = {"open": {"trust": "open"}, "clip": {}}.get(one.rule, {"rule": one.rule})
    tables = _common(one) | {
        "mode": "allreduce" if by_gradients else one.mode,
        "rounds": table | of_mode.get(one.mode, {}),
        "outer": _outer(one),
        "merge": merge,
        "inner": _inner(one) if by_gradients else {},
    }
    return _checked(one, tables)


def _checked(one: Scenario, tables: Mapping[str, Any]) -> Manifest:
    try:
        return Manifest.model_validate(tables)
    except ValidationError as error:
        why = "\n       ".join(_worded(one, mistake) for mistake in explain(error, Manifest))
        raise bad_config("the scenario is no run", why, "correct what is named above") from error


def _worded(one: Scenario, mistake: str) -> str:
    """A mistake of the manifest by the keys of the scenario."""
    said = SAID_IN_DILOCO | SAID if one.mode == "diloco" else SAID
    said = said | {"rounds.owners servers": f"mode {one.mode}"}
    if one.mode in GRADIENTS:
        said |= {"mode allreduce": f"mode {one.mode}"}
        said |= {f"outer.optimizer {GRADIENTS[one.mode]}": f"mode {one.mode}"}
    for there, here in said.items():
        mistake = mistake.replace(there, here)
    return re.sub(r"\b[a-z]+\.([a-z]\w+)", _key, mistake)


def _key(found: re.Match[str]) -> str:
    key, last = found.group(0, 1)
    return KEYS.get(key, last if last in Scenario.model_fields else key)


def _common(one: Scenario) -> dict[str, Any]:
    return {
        "name": "simulation",
        "seed": one.seed,
        "mode": one.mode,
        "model": {"n_layers": one.parts},
    }


def _in_pairs(one: Scenario, rounds: dict[str, Any]) -> dict[str, Any]:
    """Of islands that gossip."""
    gossip: dict[str, Any] = {
        "neighbours": one.neighbours,
        "extra": one.extra if one.control else 0,
        "bound": one.disagreement,
    }
    outer: dict[str, Any] = {}
    if one.mode == "gossip":
        gossip["rule"] = one.pairs
        if one.pairs == "noloco":
            outer["lr"], outer["momentum"] = one.noloco
    return _common(one) | {"rounds": rounds, "gossip": gossip, "outer": outer}


def _inner(one: Scenario) -> dict[str, Any]:
    """The AdamW that steps by merged gradients, with the numbers of the inner one elsewhere."""
    whole, constant = one.rounds * one.inner_steps, one.schedule == "constant"
    return {
        "optimizer": one.inner,
        "lr": one.inner_lr,
        "betas": BETAS[one.model],
        "weight_decay": DECAY[one.model],
        "schedule": one.schedule,
        "warmup_steps": 0 if constant else round(one.warmup * whole),
        "total_steps": whole,
        "min_lr_ratio": 0.0,
    }


def _outer(one: Scenario) -> dict[str, Any]:
    """What a scenario sets of the outer optimizer; the rest is the mode's."""
    if one.mode in GRADIENTS:
        rank = {"rank": one.rank} if one.mode == "powersgd" else {}
        return {"optimizer": GRADIENTS[one.mode]} | rank
    if one.mode in ("sparta", "btm"):  # they have none
        return {}
    nesterov, found = one.outer == "nesterov", dict[str, Any]()
    found["optimizer"] = one.outer_rule
    if nesterov:
        found["warmup_rounds"] = one.warmup_rounds
    if one.outer_lr is not None:
        found["lr"] = one.outer_lr
    if one.outer_momentum is not None:
        found["momentum"] = one.outer_momentum
        if nesterov:
            found["momentum_start"] = min(0.5, one.outer_momentum)
    return found
