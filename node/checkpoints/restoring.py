"""Checkpoints that are read back: the outer state, the place in the chain, what a trainer left.

How they are made is :mod:`node.checkpoints.saving`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bootstrap.manifest_gossip import PAIRED
from bootstrap.signed_manifest import SignedManifest
from gossip.catchup.lineage import Lineage
from gossip.place import Place
from gossip.plans.certificate import genesis, outcome_hash
from node.checkpoints.checkpoint import CheckpointError, CheckpointStore
from node.checkpoints.checkpoint_copy import CheckpointCopy
from node.checkpoints.earlier import has_trained
from node.checkpoints.index import Facts
from node.checkpoints.outer_files import read_outer
from node.checkpoints.trainer_files import Taken
from node.errors import operator_error, without_credentials
from node.headway import Headway, OnProgress, from_here_on
from node.monitor.event_log import EventLog
from node.monitor.events import Notice, Problem
from node.replicas.replica import ChainStanding
from node.trainer.trainer_state import FOLDER, MOMENTS, STATE, TrainerState
from protocols.errors import OperatorError, ProtocolError
from protocols.identity import PeerId
from protocols.messages import Certificate

CERTIFICATE, LINEAGE = "certificate", "lineage"


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was read back."""

    path: Path
    base: torch.Tensor
    vectors: dict[str, torch.Tensor]  # of the outer optimizer, those of all fragments in a row
    signed: SignedManifest
    states: tuple[ChainStanding | None, ...]  # by fragment; None: before its first round
    facts: Facts
    residual: torch.Tensor | None = None  # of this island's contributions
    weights: tuple[float, ...] = ()  # of push-sum, by fragment

    @property
    def trained(self) -> Path | None:
        """Where the trainer finds its files; None: it was not up when the checkpoint was made."""
        return self.path if has_trained(self.path) else None

    @property
    def moments(self) -> Taken | None:
        """The trainer's moments, of an earlier checkpoint, where nothing else of it was saved."""
        there = self.trained is None and has_trained(self.path, MOMENTS)
        return Taken(self.path, 0) if there else None

    @property
    def cold(self) -> bool:
        """Whether the trainer has been at work, and has no moments any more."""
        return self.facts.step > 0 and self.trained is None and self.moments is None


def restore(
    store: CheckpointStore, events: EventLog, copy: CheckpointCopy | None = None
) -> Restored | None:
    """The newest checkpoint that is whole; damaged ones are reported and passed over.

    Where none is whole it is fetched from ``copy``, and the best with it. Raises OperatorError
    E404 when there are checkpoints and none is usable, and E407 for a copy that cannot be read.
    """

    def tell(problem: OperatorError) -> None:
        events.emit(Problem.of(problem))

    found = store.latest()
    for damage in found.damaged:
        tell(damage)
    if copy is not None and found.checkpoint is None:
        begun = partial(_fetched, events, without_credentials(copy.url))
        if came := copy.get_newest(store, tell, begun):
            copy.get_best(store, came, tell, begun)  # to go back to, where the run gets worse
            found = store.latest()
    if found.checkpoint is None:
        if found.damaged:
            raise operator_error(
                "E404",
                f"no checkpoint in {store.directory} can be used",
                why=found.why,
                fix="join a peer of the run with --peers and without --resume, or begin anew with "
                "another --dir",
            )
        return None
    path, facts = found.checkpoint.path, found.checkpoint.facts
    outer = read_outer(path, facts)
    if outer.signed.manifest.mode in PAIRED:
        run, creator = outer.signed.run_id, outer.signed.creator
        own = tuple(own_standing(run, creator, at, n) for n, at in enumerate(outer.rounds))
        return Restored(
            path, outer.base, outer.vectors, outer.signed, own, facts, weights=outer.weights
        )
    try:
        states: tuple[ChainStanding | None, ...] = tuple(
            _read_standing(path, fragment, outer.signed, needed=fragment == 0 and facts.round > 0)
            for fragment in range(outer.signed.manifest.rounds.fragments)
        )
    except (OSError, ProtocolError) as error:
        raise CheckpointError(path, str(error), "use an older checkpoint") from error
    return Restored(path, outer.base, outer.vectors, outer.signed, states, facts, outer.residual)


def _fetched(events: EventLog, url: str, name: str) -> OnProgress:
    """Tells how far a copy is that is fetched from there: of a large model that takes hours."""
    said = f"fetches {name} from {url}"
    return from_here_on(Headway(lambda text: events.emit(Notice(text=f"{said}: {text}"))))


def steps_in(checkpoint: Path | None, *, at_will: bool) -> int:
    """Inner steps of the cycle that a trainer which resumes from it has taken already.

    ``at_will``: since its last contribution. 0 where it does not tell, which the trainer says.
    """
    if (state := trainer_state_in(checkpoint)) is None:
        return 0
    first = state.fragments[0]
    return (first.carried + first.unsent).steps if at_will else state.round_step


def trainer_state_in(checkpoint: Path | None) -> TrainerState | None:
    """What a trainer that resumes from it finds; None where it does not tell."""
    if checkpoint is None:
        return None
    try:
        return TrainerState.model_validate_json((checkpoint / FOLDER / STATE).read_bytes())
    except (OSError, ValueError):
        return None


def own_standing(run: bytes, creator: PeerId, round_: int, fragment: int = 0) -> ChainStanding:
    """Where an island stands that gossips: at its own count, with nothing to show for it."""
    lineage = Lineage(run, (creator,), fragment)
    return ChainStanding(Place(run, fragment, round_, genesis(run), b"", 0), (), None, lineage)


def _read_standing(
    path: Path, fragment: int, signed: SignedManifest, *, needed: bool
) -> ChainStanding | None:
    """Where a fragment stood, None: before its first round. Raises OSError, ProtocolError."""
    made, way = standing_files(path, fragment)
    if not needed and not made.exists():
        return None
    certificate: Certificate = Certificate.decode(made.read_bytes())
    lineage = Lineage.decode(signed.run_id, (signed.creator,), way.read_bytes(), fragment)
    lineage.check(certificate, own=True)
    return standing_after(certificate, lineage)


def standing_files(path: Path, fragment: int) -> tuple[Path, Path]:
    """Where the newest certificate of a fragment and its lineage are kept."""
    suffix = f"-{fragment}" if fragment else ""
    return path / f"{CERTIFICATE}{suffix}", path / f"{LINEAGE}{suffix}"


def standing_after(certificate: Certificate, lineage: Lineage) -> ChainStanding:
    """The place in the chain behind a certificate that ``lineage`` leads to.

    The state's digest is left empty: whoever has the state computes it.
    """
    outcome = certificate.outcome
    place = Place(
        certificate.run,
        outcome.fragment,
        outcome.round + 1,
        outcome_hash(outcome),
        b"",
        outcome.work,
    )
    return ChainStanding(place, outcome.next_roster, certificate, lineage)
