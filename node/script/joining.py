"""``node.join``: a training script becomes an island.

The script's process is the island's trainer; the node itself is a process that is started here
(:mod:`node.script.daemon`) and shares two vectors with it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from bootstrap.manifest import Manifest
from bootstrap.manifest_modes import MODE_ROUNDS
from bootstrap.manifest_rounds import is_table
from bootstrap.validation import bad_config, check
from node.config import NodeConfig, resolve
from node.errors import operator_error
from node.island.rank_process import child_environment
from node.outermost import first_known
from node.script.at_exit import hold, islands, leave_dropped, waited_for_at_exit
from node.script.fingerprint import NOT_COMPARED, Fingerprint
from node.script.frozen import fingerprint_of
from node.script.optimizers import Watch, as_one, tell_of_others
from node.script.parameters import named_parameters
from node.script.progress import ScriptProgress
from node.script.session import HEARING_S, Joined, ended
from node.statedir import StateDir, unusable
from node.trainer.channel import Ended
from node.trainer.layout import Layout
from node.trainer.leader import Idle, Leader
from node.trainer.parallel import Ranks
from node.trainer.shared import SharedVectors
from node.trainer.unhurried import Unhurried
from protocols.bounds import ENDLESS_ROUNDS
from protocols.errors import OperatorError
from protocols.wire import decode_any

OUR_ROUNDS = {"inner_steps": 100, "total_rounds": ENDLESS_ROUNDS}  # where the mode has no such
THE_SCRIPTS = ("model", "data", "inner", "evaluation")  # tables of a run that say nothing here


@waited_for_at_exit()
def join(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    *,
    peers: str | Iterable[str] = (),
    run: Mapping[str, Any] | None = None,
    evaluate: Callable[[], float] | None = None,
    quiet: bool = False,
    compare_frozen: bool = True,
    **settings: Any,
) -> Joined:
    """Make this script an island of a swarm; returns once its model holds the swarm's parameters.

    ``model``: every parameter that requires a gradient takes part, under its own name; on one
    device, or on several ranks (DDP, FSDP2): then every rank of the process group calls this, and
    rank 0 has the node. ``optimizer`` is the script's own inner optimizer, or a list of all that
    train the model; moments that it has stay where the model is near the swarm's, and are dropped
    else, which the log says.
    ``peers``: as after ``--peers``; without any, this script creates the run, from its model as it
    is. ``run``: tables of the manifest for that, as in ``{"rounds": {"inner_steps": 50}}``, where a
    round has 100 inner steps and the run no end unless its mode has such of its own; given together
    with ``peers`` it must be the swarm's. ``evaluate`` returns the validation loss of the model as
    it is; it is called after a merge, on every rank, as often as ``rounds.eval_every`` says, under
    ``torch.no_grad()``, and once in here where this script creates the run.
    ``quiet`` writes the node's log lines to ``logs/node.log`` in its state
    directory instead of standard error. ``compare_frozen``: what is frozen in the model must be
    what the creator of the run has, element by element; False on an island skips that for it, and
    on the creator for all islands. ``settings`` are those of ``node start``: ``dir``, ``listen``,
    ``name``, ``resume`` and so on.

    Raises :class:`~protocols.errors.OperatorError` for what ``node start`` refuses, E201 where the
    swarm trains another model or has another base frozen, E204 where another island of this script
    trains this one.
    """
    given = {key: value for key, value in settings.items() if value is not None}
    if peers:
        given["peers"] = (peers,) if isinstance(peers, str) else tuple(peers)
    leave_dropped()  # as where a notebook's cell is run again
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:  # after a forward pass alone its parameters are gathered ones
        module.reshard()
    parameters = named_parameters(model)
    _refuse_twice(parameters.values())
    optimizer = as_one(optimizer, parameters.values())
    layout = Layout.of_shapes((name, p.shape) for name, p in parameters.items())
    first = next(iter(parameters.values()))
    ranks = Ranks.met(first.device)
    _same_on_all(layout, ranks)
    if ranks.leads:
        tell_of_others(optimizer, parameters.values())
    progress = ScriptProgress(evaluate, parameters, optimizer, layout, ranks, None, 0)
    progress.model, progress.sharded = model, sharded
    with _told_to_all(ranks):
        config = _settings(given) if ranks.leads else None
        vectors = SharedVectors.create(layout.size) if ranks.leads else None
        if vectors is not None:
            vectors.lock_pages(first.device)
    # as rank 0 says, like all else
    compares = ranks.broadcast(b"compare" if compare_frozen else b"") != b""
    there = fingerprint_of(model, ranks) if compares else NOT_COMPARED
    _fill_base(progress, vectors)
    daemon, checkpoints = _node(progress, given, config, run, there, vectors, quiet)
    joined = hold((progress, daemon, checkpoints), config.dir if config is not None else None)
    try:
        progress.watch = Watch(optimizer, parameters.values())
        joined.begin()
    except BaseException:  # also Ctrl-C: in a notebook the script's process goes on
        joined.abandon()
        raise
    return joined


def _refuse_twice(parameters: Collection[Tensor]) -> None:
    """Raise E204 where a merge of another island would move these parameters."""
    if any(one.trains(parameters) for one in islands):
        raise operator_error(
            "E204",
            "another island of this script trains this model",
            why="it has joined before and has not left; each would take what the other merges "
            "for its own work",
            fix="call leave() of the island that there is, then node.join, with resume=True to go "
            "on from where it was",
        )


def _same_on_all(layout: Layout, ranks: Ranks) -> None:
    """Raise E204 on every rank where they have different parameters."""
    if not ranks.all_true(ranks.broadcast(layout.digest.encode()) == layout.digest.encode()):
        raise operator_error(
            "E204",
            "the ranks of this script have different parameters",
            why="each of them has to have its part of every parameter, as with FSDP2 and DDP",
            fix="give node.join the same model on every rank",
        )


def _fill_base(progress: ScriptProgress, vectors: SharedVectors | None) -> None:
    """Put the model as it is into the outer parameters, which rank 0 has."""
    views = progress.layout.views(vectors.tensors()[0]) if vectors is not None else {}
    for name in progress.weights.names:
        whole = progress.weights.gather(name)
        if name in views and whole is not None:
            views[name].copy_(whole)


def _node(
    progress: ScriptProgress,
    given: Mapping[str, Any],
    config: NodeConfig | None,
    run: Mapping[str, Any] | None,
    there: Fingerprint,
    vectors: SharedVectors | None,
    quiet: bool,
) -> tuple[subprocess.Popen[bytes] | None, Path | None]:
    """Start the node on rank 0: its process, and where its checkpoints are. Other ranks wait.

    Raises OperatorError on every rank where that fails.
    """
    with _told_to_all(progress.ranks):
        if config is None or vectors is None:
            return None, None
        daemon, channel = _start_node(given, config, run, progress.layout, there, vectors, quiet)
        progress.leader = Leader(Unhurried(channel), vectors, wait_s=0.0, longest_s=HEARING_S)
        return daemon, StateDir(config.dir).checkpoints


@contextmanager
def _told_to_all(ranks: Ranks) -> Iterator[None]:
    """Around what rank 0 does alone: where it fails there, the others raise OperatorError too.

    They wait to hear from rank 0, so that any exception has to be told, or they wait for ever.
    """
    if not ranks.leads:
        yield
        word = decode_any(ranks.broadcast(b""), Idle, Ended)
        if isinstance(word, Ended):
            raise OperatorError(word.code, word.what, word.why, word.fix)
        return
    try:
        yield
    except Exception as error:  # raised again below
        ranks.broadcast(ended(first_known(error)).encode())
        raise
    ranks.broadcast(Idle().encode())


def _settings(given: Mapping[str, Any]) -> NodeConfig:
    """The node's settings; raises OperatorError, E204 where a node with them has no trainer."""
    config = resolve(given, os.environ)
    if config.role != "island":
        raise operator_error(
            "E204",
            f"a training script joins as {config.role}",
            why="only an island trains; a node with another role would never ask the script to",
            fix="leave role= and ATOLL_ROLE out, or start such a node with "
            f"node start --role {config.role}",
        )
    _refuse_shared(config.dir)
    return config


def _refuse_shared(directory: Path) -> None:
    """Raise E105 where another island of this process works in this state directory."""
    if any(there == directory and not one.over for one, there in islands.items()):
        raise operator_error(
            "E105",
            f"another island of this script runs in {directory}",
            why="it has joined before and has not left, as where a notebook's cell is run again",
            fix="call leave() of the island that there is, then node.join, with resume=True to go "
            "on from where it was; or give each island a dir= of its own",
        )


def _manifest(
    run: Mapping[str, Any], layout: Layout, there: Fingerprint = NOT_COMPARED
) -> Manifest:
    if unread := [name for name in THE_SCRIPTS if name in run]:
        raise bad_config(
            f"node.join(run=...) has {', '.join(unread)}",
            "model, data and inner optimizer are the script's own, so these would do nothing",
            "leave them out",
        )
    script = {"layout": layout.digest, "parameters": layout.size, "dense": layout.dense}
    script |= {"frozen": there.digest, "frozen_marks": there.marks}
    given = {"name": "script", **run, "script": script}
    mode, rounds = run.get("mode"), run.get("rounds", {})
    if is_table(rounds):  # else the check says what it is
        set_by_mode = MODE_ROUNDS.get(mode, {}) if isinstance(mode, str) else {}
        ours = {name: value for name, value in OUR_ROUNDS.items() if name not in set_by_mode}
        given["rounds"] = {**ours, **rounds}
    return check(Manifest, given, "node.join(run=...)")


def _log(directory: Path) -> IO[bytes]:
    """The log of a quiet node; raises E105."""
    home = StateDir(directory)
    home.make()
    try:
        return (home.logs / "node.log").open("ab")
    except OSError as error:
        raise unusable(directory, error) from error


def _encoded(order: Mapping[str, Any]) -> bytes:
    """What the node is told; raises E204."""
    try:
        return json.dumps(order).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise bad_config(
            "a setting of node.join cannot be told to the node",
            str(error),
            "give texts, paths, numbers, or lists of them",
        ) from error


def _start_node(
    given: Mapping[str, Any],
    config: NodeConfig,
    run: Mapping[str, Any] | None,
    layout: Layout,
    there: Fingerprint,
    vectors: SharedVectors,
    quiet: bool,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the node; its process, and this end of the channel to it. Raises OperatorError."""
    manifest = None
    if run is not None or not (config.peers or config.resume):
        manifest = _manifest(run or {}, layout, there)
    order = _encoded(
        {
            "config": {key: _plain(value) for key, value in given.items()},
            "manifest": manifest.canonical().decode() if manifest is not None else "",
            "layout": layout.digest,
            "frozen": asdict(there),
            "size": layout.size,
        }
    )
    log = _log(config.dir) if quiet else None
    ours, theirs = socket.socketpair()
    with theirs:
        daemon = _lasting(
            [
                sys.executable,
                "-P",  # a folder called "node" where the script stands must not be imported
                "-m",
                "node.script.daemon",
                str(theirs.fileno()),
                str(vectors.descriptor),
                str(os.getpid()),
                str(config.dir),  # for whoever looks at the list of processes
            ],
            stdin=subprocess.PIPE,
            stdout=log or _standard_error(),
            stderr=log or _standard_error(),
            pass_fds=(theirs.fileno(), vectors.descriptor),
            env=child_environment(),
            start_new_session=True,  # Ctrl-C is the script's; it then leaves in order
        )
    assert daemon.stdin is not None
    with suppress(BrokenPipeError), daemon.stdin as pipe:  # the channel tells whether it is gone
        pipe.write(order)
    return daemon, ours


def _lasting(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that asks Linux for a signal at its parent's end: Linux means the thread's.

    So a thread that may end before the script does must not be the one that starts it.
    """
    if threading.current_thread() is threading.main_thread():
        return subprocess.Popen(command, **options)
    started: Future[subprocess.Popen[bytes]] = Future()

    def stay() -> None:
        try:
            process = subprocess.Popen(command, **options)
        except BaseException as error:  # noqa: BLE001 - it is the other thread's
            started.set_exception(error)
        else:
            started.set_result(process)
            process.wait()

    threading.Thread(target=stay, name="atoll-node", daemon=True).start()
    return started.result()


def _standard_error() -> int:
    """The descriptor of standard error; the null device where it has none, as in notebooks."""
    try:
        return sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        return subprocess.DEVNULL


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
