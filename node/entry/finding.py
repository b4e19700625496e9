"""Which run a node takes part in: its checkpoint's, its peers', or one that it makes.

A run that was just made is offered to the seeds before it begins. Several islands may bring one
at the same moment: the first of the seeds takes one of them and tells all of it, so its creator
goes on and the others join it. A seed that nobody has told of a run waits for the first that a
caller brings, and hands over (:mod:`node.entry.brought`).
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from bootstrap.handshake import LEAST_INVITATION
from bootstrap.manifest import Manifest
from bootstrap.manifest_gossip import PAIRED
from bootstrap.signed_manifest import SignedManifest
from node.checkpoints.checkpoint import CheckpointStore
from node.checkpoints.index import said_by
from node.checkpoints.outer_files import BESIDE, SHARD, read_beside
from node.checkpoints.restoring import Restored
from node.checkpoints.spared import PREFIX
from node.data.tokenizer import BYTES, check_tokenizer
from node.data.tokenizer import FILE as TOKENIZER
from node.entry.differing import differences, listed
from node.entry.entrance import PASSING, Entrance, Run
from node.errors import operator_error
from node.monitor.events import Notice, Problem
from node.reading import Reading
from protocols.errors import OperatorError
from protocols.tasks import beside

if TYPE_CHECKING:
    from bootstrap.handshake import Greeting
    from node.runtime import Node

ASK_AGAIN_S = 5.0  # between two times that a seed without a run asks its own peers


@dataclass
class Finder:
    """Finds the run of one node.

    ``reading`` makes a run where none is found. ``offer`` is to let peers fetch it before it has
    begun; ``ready`` raises OperatorError where this machine cannot take part in a run.
    """

    node: Node
    entrance: Entrance
    reading: Reading
    offer: Callable[[Run], None]
    ready: Callable[[Manifest], Awaitable[None]]
    _made: Run | None = None
    _admitted: Run | None = None

    async def find(self, signed: SignedManifest | None) -> Run:
        """The run, with the peers met on the way; ``signed``: the one of the checkpoint.

        Raises OperatorError E101 to E103, E105, E2xx, E301, E302, E402, E404, E501, E502 and E601.
        """
        config, node = self.node.config, self.node
        if signed is not None:
            self._check_same(signed.manifest)
            run = await self._go_on(signed)
            await self._check_given(run)
            self.offer(run)
            await self._admit(run)
            return run
        # a node that joined before, without a checkpoint, finds back by the peers it met
        has_peers = bool(config.peers) or (config.resume and bool(node.cache.load()))
        found = await self.entrance.patiently(self._join) if has_peers else None
        if found is None and config.role == "seed":
            found = await self._wait_for_a_run()
        elif found is None:
            if node.daemon.manifest is None:
                raise operator_error(
                    "E404",
                    "there is no checkpoint to resume from",
                    why=f"none is in {node.home.checkpoints}, and no peers are given",
                    fix="leave out --resume to create a run, or join one with --peers",
                )
            found = await self._create(node.daemon.manifest)
        self._check_free(found.signed.run_id.hex() if not found.created else "")
        await self._check_given(found)
        self.offer(found)
        self._keep(found)
        await self._admit(found)
        return found

    async def _create(self, manifest: Manifest) -> Run:
        self._check_free("")  # before the text is cut, which may take long
        if short := self._short_invitation():
            raise short
        return await self.reading.make_run(manifest)

    async def _check_given(self, run: Run) -> None:
        """Raise E204, E604 for what only a run that is made is made of, where it is another's.

        Who goes on, or brings a run that others may have begun first, gives the same as its
        creator: then the weights are not read again, which is told.
        """
        config, own = self.node.config, self.node.daemon.manifest
        if run.created or config.role == "seed":
            return
        if config.tokenizer is not None:
            await self.node.offload(partial(check_tokenizer, config.tokenizer, run.manifest))
        for flag, path in (("--init-from", config.init_from), ("--hf-config", config.hf_config)):
            if path is None:
                continue
            if own is None and not config.resume:
                raise operator_error(
                    "E204",
                    f"{flag} with --peers",
                    why=f"it is for who creates a run, and {run.manifest.label} is under way: its "
                    "model and weights come from the peers",
                    fix="leave it out; to begin a run with that model leave out --peers",
                )
            text = f"{flag} is not read: {run.manifest.label} has begun, and its state is taken"
            self.node.events.emit(Notice(text=text))

    def _short_invitation(self) -> OperatorError | None:
        """E204 where this node's invitation is one that can be guessed."""
        count = len(self.node.config.invitation)
        if not 0 < count < LEAST_INVITATION:
            return None
        return operator_error(
            "E204",
            "the invitation is too short",
            why=f"it has {count} characters, at least {LEAST_INVITATION} are needed: whoever a "
            "node greets at a wrong address can try guesses at it",
            fix="take a random one, as `openssl rand -hex 16` prints, the same on every node",
        )

    def _check_free(self, joined: str) -> None:
        """Raise E105 where this island's checkpoints would mix with those that are there.

        ``joined``: the run id, in hex, of a run that is under way, empty for one that begins. An
        island that joins its own run again takes its peers' state and nothing of its checkpoint,
        which is told: it may have been meant to go on (:mod:`node.checkpoints.spared`).
        """
        config, home = self.node.config, self.node.home
        if config.resume or config.role != "island":
            return
        found = CheckpointStore(home.checkpoints, owns=False).paths()
        runs = {path: said.run for path in found if (said := said_by(path)) is not None}
        # what names no run cannot be gone on from either
        others = [path for path, run in runs.items() if run not in ("", joined)]
        own = [path for path, run in runs.items() if run and run == joined]
        if others:
            raise operator_error(
                "E105",
                f"{home.root} has checkpoints, and --resume is not given",
                why=f"{others[0].name} is of {'another' if joined else 'an earlier'} run: "
                "the new ones would take its place, and a later --resume would mix them up",
                fix="go on with --resume (resume=True in a script), or give another --dir; to "
                f"begin anew in this one, move {home.checkpoints} away",
            )
        if own:
            self.node.events.emit(Problem.of(_begins_anew(own[0])))

    async def _admit(self, run: Run) -> None:
        """Before anybody counts on this node: can it take part, and be called?"""
        if run is not self._admitted:
            await self.ready(run.manifest)
            await self.entrance.pass_checks()
            if not run.created and (short := self._short_invitation()):
                self.node.events.emit(Problem.of(short))
            self._admitted = run

    def _keep(self, run: Run) -> None:
        (self.node.home.root / SHARD).write_bytes(run.shard)
        if run.tokenizer:
            (self.node.home.root / TOKENIZER).write_bytes(run.tokenizer)

    def release(self, error: OperatorError) -> bool:
        """Whether this seed can go back to waiting: the run it was brought is not to be had."""
        if self.node.config.role != "seed" or self.node.config.peers:
            return False
        self._let_go(error)
        return True

    def _let_go(self, error: OperatorError) -> None:
        """Be open for another run: nobody is told of this one any more."""
        self.node.daemon.run_id = b""
        self.node.events.emit(Problem.of(error, fix="waiting for another run"))

    def _check_same(self, kept: Manifest) -> None:
        """Raise E201 where this node was given settings of a run that are not its checkpoint's."""
        config, own = self.node.config, self.node.daemon.manifest
        found = [] if own is None else differences(own, kept)
        if config.hf_config or config.init_from:  # they filled the model in
            found = [line for line in found if not line.startswith("model.")]
        if found:
            fix = "leave out --run, --preset, --mode and --set to go on with it, or begin "
            fix += "another run with --dir in a directory of its own"
            if not kept.script.layout:
                place = shlex.quote(str(config.dir))
                fix += f"; node export FOLDER --from {place}, and --init-from FOLDER there, "
                fix += "have that begin with this run's model"
            raise operator_error(
                "E201",
                f"the checkpoint is of another run ({kept.label})",
                why=listed(found, own),
                fix=fix,
            )

    async def _go_on(self, signed: SignedManifest) -> Run:
        """With a checkpoint: peers are welcome, and needed only for what the directory has lost."""
        greetings = []
        if self.node.config.peers or self.node.cache.load():
            try:
                greetings = await self.entrance.greet_seeds(signed.run_id)
            except OperatorError as error:
                self._alone(error)
        home = self.node.home.root
        run = _read(home, signed, greetings)
        if not (lost := _lost(run)):
            return run
        for checkpoint in sorted(self.node.home.checkpoints.glob("ckpt-*"), reverse=True):
            if not _lost(there := _read(checkpoint, signed, greetings)):
                self._keep(there)
                return there
        if not run.peers:
            raise operator_error(
                "E404",
                f"{' and '.join(lost)} of {home} cannot be used",
                why="it is missing or not what the run's manifest names, and no peer that would "
                "have it answers",
                fix="give a peer of the run with --peers, or put the file back from a copy",
            )
        run = await self.entrance.take(greetings, None)
        self._keep(run)
        return run

    def _alone(self, error: OperatorError) -> None:
        """Tell why there are no peers for now; raise what is wrong with those that were given.

        Those of the cache are only who was where once: an address may be another's by now, and who
        is the only one that has the run could never go on.
        """
        trains = self.node.config.role == "island"
        then = "going on alone" if trains else "waiting for one"
        if error.code in PASSING:
            why = "; ".join(line.strip() for line in error.why.splitlines())
            text = f"no peer can be joined ({why}); {then}"
            self.node.events.emit(Notice(text=text))
        elif self.node.config.peers:
            raise error
        else:
            self.node.events.emit(Problem.of(error, fix=f"{then}; {error.fix}"))

    async def _join(self) -> Run | None:
        """The run of the peers, or one of this node's own; None where a seed finds none."""
        greetings = await self.entrance.greet_seeds(b"")
        own = self.node.daemon.manifest
        if any(greeting.welcome.run for greeting in greetings):
            return await self.entrance.take(greetings, own)
        if own is None:
            if self.node.config.role == "seed":
                await self.entrance.pass_checks()  # whoever brings a run has to get through
                return None
            return await self.entrance.take(greetings, own)  # says why there is nothing to take
        run = self._made = self._made or await self._create(own)
        self.offer(run)
        await self._admit(run)
        self.node.daemon.run_id = run.signed.run_id  # a seed that takes it greets back
        try:
            run.greetings = await self.entrance.claim(run.signed.run_id, greetings)
        except OperatorError:
            self.node.daemon.run_id = b""
            raise
        return run

    async def _wait_for_a_run(self) -> Run:
        """A seed's: the run of peers it knows, or of the first caller that brings one."""
        self.node.say_started("", "")
        self.node.events.emit(Notice(text="no run yet: waiting for the first island to bring one"))
        bringing = self.node.brought.first(self.entrance.take_from, self._let_go)
        async with beside(bringing) as brought:
            while not brought.done():
                if self.node.config.peers or self.node.cache.load():
                    with contextlib.suppress(OperatorError):  # they are asked again
                        found = await self._join()
                        if found is not None:
                            return found
                await asyncio.wait([brought], timeout=ASK_AGAIN_S)
        peer, run = await brought
        self.node.daemon.run_id = run.signed.run_id  # whoever comes from now on is told of it
        self.node.events.emit(Notice(text=f"run {run.manifest.label}, brought by {peer}"))
        return run


def _read(folder: Path, signed: SignedManifest, greetings: list[Greeting]) -> Run:
    """The run with its files as they lie in a folder; empty where they are not there."""
    shard, tokenizer = (read_beside(folder, name) for name in BESIDE)
    return Run(signed, shard, created=False, greetings=greetings, tokenizer=tokenizer)


def _lost(run: Run) -> list[str]:
    """The files beside the checkpoint that are not, or no longer, what its manifest names."""
    manifest = run.manifest
    named = (
        (SHARD, manifest.evaluation.digest, run.shard),
        (TOKENIZER, manifest.data.tokenizer, run.tokenizer),
    )
    return [
        name
        for name, digest, data in named
        if digest not in ("", BYTES) and blake3(data).hexdigest() != digest
    ]


def _begins_anew(checkpoint: Path) -> OperatorError:
    """What is told of a node that joins its own run without what it had of it."""
    return operator_error(
        "E105",
        f"joins anew, though {checkpoint.name} of this run is here: --resume is not given",
        why="its steps, tokens and moments, and work of it that was not merged, are not taken",
        fix="if that is meant, nothing; else end this node at once (Ctrl-C twice) and start it "
        "with --resume (resume=True in a script). The checkpoint is kept for a day, as "
        f"{PREFIX}{checkpoint.name} once there is a newer one, where the disk has room",
    )


def check_known(node: Node, restored: Restored) -> None:
    """Raise E104 where nothing this island learns could ever be merged.

    Rounds are made by those in office, and who is not there has to be let in by somebody.
    """
    signed = restored.signed
    office = {peer for state in restored.states if state for peer in state.roster}
    if (
        node.config.role == "island"
        and signed.manifest.mode not in PAIRED
        and node.identity.peer_id not in (office or {signed.creator})
        and not node.config.peers
        and not node.cache.load()
    ):
        raise operator_error(
            "E104",
            f"{restored.path.name} was made with another key than this node's",
            why=f"{node.config.identity_path} is {'new' if node.new_key else 'another one'}: "
            "the run does not know it, and no peer is known that would let it in",
            fix="put the identity.pem back that the checkpoint was made with, or join a peer "
            "of the run with --peers",
        )
