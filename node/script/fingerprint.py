"""The fingerprint of what is frozen in a script's model: islands of one run have the same.

It is not merged, so two islands that have loaded other revisions of a base would train adapters
that fit neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from bootstrap.manifest import MARK, Script

NOTHING = blake3(b"").hexdigest()  # of a model that has nothing frozen


@dataclass(frozen=True)
class Fingerprint:
    """Of all that is frozen in one model; empty where it is not to be compared."""

    digest: str = ""  # BLAKE3 (hex) of names, shapes and values in order
    marks: str = ""  # a few hex digits of each tensor, where there are not too many
    labels: Sequence[str] = ()  # what people are told of each tensor that has a mark

    def difference(self, script: Script) -> str:
        """How what is frozen here differs from what the run's creator has; empty: not at all.

        Empty as well where one of the two is not to be compared.
        """
        if not (self.digest and script.frozen) or self.digest == script.frozen:
            return ""
        if NOTHING in (self.digest, script.frozen):
            return f"nothing is frozen {'here' if self.digest == NOTHING else 'in the swarm'}"
        ours, theirs = _each(self.marks), _each(script.frozen_marks)
        for label, mark, other in zip(self.labels, ours, theirs, strict=False):
            if mark != other:
                return f"the first that differs is {label}"
        if ours and theirs and len(ours) != len(theirs):
            return f"{len(theirs)} tensors are frozen in the swarm, {len(ours)} here"
        return "names, shapes or values differ"


NOT_COMPARED = Fingerprint()


def _each(marks: str) -> list[str]:
    return [marks[at : at + MARK] for at in range(0, len(marks), MARK)]
