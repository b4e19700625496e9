"""Merge rules whose weights depend on what was sent: a plan in two steps.

Rules such as the geometric median weigh whole vectors by their inner products, while each owner
has only a part of each. So the leader's first plan is a *draft*: contributors send their slices,
and each owner keeps them encoded, computes the inner products of its part and sends them, signed,
to the leader (:class:`~protocols.messages.Gram`). The leader adds them up, applies the rule and
sends the plan proper under the same ballot: with the scales that came out, and with all that they
were made from. Everybody applies the rule to the same numbers and refuses other scales. A round's
first plan must show what its parts' owners have stated. A later one may go on with products of
somebody else in office, since owners change, or repeat a vote that its leader has only been told
of, without any products. Nobody votes for a draft; all else about it is as with other plans.

A contributor whose slice is missing in one part is left out of all (scale 0): its vector as a
whole is not there to be judged. Once the scales are known they stay: whoever takes over a part
merges it by the same ones, and needs no products.

What a lying owner can do: say that a slice did not come, which leaves its contributor out. If it
says so of several that have come to others, or of most, an honest leader gives its part to somebody
else (:mod:`gossip.rounds.drafting`). Products must be such as a part of the announced norms could
have (each square is checked against the announced norm, each product against the squares); that
they are those of the slices, and that the slices are merged by them, is looked at in samples, after
the round (:mod:`gossip.exchange.auditing`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from gossip.plans.certificate import basis_of
from gossip.plans.commitments import TreeNode, packed, root_of, signature_of, unpacked
from gossip.plans.mix import MAX_SCALE, Mix
from protocols.errors import Malformed
from protocols.identity import Identity, PeerId, verify
from protocols.messages import Contributor, Gram, Part, Plan, TransferHeader

_GRAM = b"atoll gram\x00"
_PIECE = 8192  # elements of each slice that are multiplied at a time
_SLACK = 1 + 1e-6  # products are sums of rounded numbers


def sign_gram(identity: Identity, run: bytes, unsigned: Gram) -> Gram:
    """The owner's signature under its part's inner products."""
    return dataclasses.replace(unsigned, signature=identity.sign(_signed_bytes(run, unsigned)))


def gram_of(
    identity: Identity,
    header: TransferHeader,
    plan: Plan,
    seals: Mapping[PeerId, bytes],
    products: TreeNode,
) -> Gram:
    """An owner's signed statement on the slices of those whose ``seals`` it has, in order.

    ``products`` are those of all chunks together. Its own seal is a root without signature.
    """
    index = {c.peer: number for number, c in enumerate(plan.contributors)}
    unsigned = Gram(
        header.fragment,
        header.round,
        header.start,
        header.stop,
        identity.peer_id,
        header.basis,
        tuple(index[peer] for peer in seals),
        packed(products.total),
        b"",
        tuple(root_of(one) for one in seals.values()),
        tuple(signature_of(one) for one in seals.values()),
        products.hash,
    )
    return sign_gram(identity, header.run, unsigned)


def inner_products(values: torch.Tensor) -> torch.Tensor:
    """Those of the rows of fp32 [K, n]: float64 [K, K]."""
    products = torch.zeros(len(values), len(values), dtype=torch.float64)
    for piece in torch.split(values, _PIECE, dim=1):
        wide = piece.double()  # fp32 would overflow where a liar sends huge values
        products += wide @ wide.T
    return products


def triangle(products: torch.Tensor) -> torch.Tensor:
    """The lower triangle of float64 [K, K], row by row: float64 [K (K + 1) / 2]."""
    rows, columns = torch.tril_indices(len(products), len(products))
    return products[rows, columns]


def unpack(data: bytes, count: int) -> torch.Tensor:
    """The symmetric float64 [K, K] of a packed :func:`triangle`; Malformed if it is not K of K."""
    if len(data) != 8 * (count * (count + 1) // 2):
        raise Malformed("inner products of another number of slices")
    result = torch.zeros(count, count, dtype=torch.float64)
    if count:
        rows, columns = torch.tril_indices(count, count)
        flat = unpacked(data)
        result[rows, columns] = flat
        result[columns, rows] = flat
    return result


def check_gram(
    gram: Gram, run: bytes, plan: Plan, part: Part, mix: Mix, office: Sequence[PeerId]
) -> None:
    """Raise RemoteProtocolError unless this is its owner's statement on a part of ``plan``.

    Any of those in ``office`` may have been its owner: by a later plan it may be gone.
    """
    if (gram.fragment, gram.round) != (plan.fragment, plan.round):
        raise Malformed("inner products of another round")
    if (gram.start, gram.stop) != (part.start, part.stop) or gram.owner not in office:
        raise Malformed("inner products of another part")
    if gram.basis != draft_basis(plan.codec, plan.contributors):
        raise Malformed("inner products for another plan")
    present = gram.present
    if list(present) != sorted(set(present)) or (present and present[-1] >= len(plan.contributors)):
        raise Malformed("inner products of unknown contributors")
    if not len(gram.roots) == len(gram.signatures) == len(present):
        raise Malformed("inner products of slices that are not named")
    products = unpack(gram.products, len(present))
    squares = products.diagonal()
    bounds = [mix.limit(plan.contributors[index], plan.codec) or 0.0 for index in present]
    most = torch.tensor(bounds, dtype=torch.float64).square_() * _SLACK
    if not bool(((squares >= 0) & (squares <= most)).all()):
        raise Malformed("inner products beyond the announced norms")
    longest = (squares[:, None] * squares[None, :]).sqrt_() * _SLACK
    if not bool((products.abs() <= longest).all()):
        raise Malformed("inner products that no vectors have")
    verify(gram.owner, gram.signature, _signed_bytes(run, gram))


def draft_basis(codec: str, contributors: Iterable[Contributor]) -> bytes:
    """What a draft's slices and products belong to: the contributors before they were weighed."""
    return basis_of(codec, (dataclasses.replace(c, scale=1.0) for c in contributors))


def weighed(
    contributors: Sequence[Contributor], grams: Sequence[Gram], mix: Mix
) -> tuple[Contributor, ...]:
    """The contributors with the scales that the parts' inner products give them.

    Sums run in the order of the parts, so that all who hold the same products get the same bits.
    """
    assert mix.weigh is not None
    counted = [index for index, c in enumerate(contributors) if c.weight > 0]
    for gram in grams:
        counted = [index for index in counted if index in gram.present]
    total = torch.zeros(len(counted), len(counted), dtype=torch.float64)
    for gram in grams:
        rows = [gram.present.index(index) for index in counted]
        total += unpack(gram.products, len(gram.present))[rows][:, rows]
    weights = [contributors[index].weight for index in counted]
    whole = math.fsum(weights)  # what sum comes to depends on the version of Python
    scales = dict.fromkeys(range(len(contributors)), 0.0)
    for index, coefficient in zip(counted, mix.weigh(total, weights), strict=True):
        scales[index] = min(coefficient * whole / contributors[index].weight, MAX_SCALE)
    return tuple(dataclasses.replace(c, scale=scales[i]) for i, c in enumerate(contributors))


def final_plan(draft: Plan, grams: Sequence[Gram], mix: Mix) -> Plan:
    """The plan that a draft becomes: ``grams`` are those of its parts, in order."""
    contributors = weighed(draft.contributors, grams, mix)
    return dataclasses.replace(draft, contributors=contributors, draft=False, grams=tuple(grams))


def check_scales(plan: Plan, run: bytes, mix: Mix, office: Sequence[PeerId]) -> None:
    """Raise RemoteProtocolError unless the plan's scales follow from what it shows.

    ``office``: who decides on the round, also those that are gone by the plan's epoch.
    A plan whose parts all are merged may repeat what somebody has voted for, which a leader may not
    have seen weighed. The round's first plan repeats nothing: nothing is merged before it, and
    whoever has stated a part's products owns the part.
    """
    if mix.weigh is None:
        if plan.draft or plan.grams:
            raise Malformed("nothing is weighed by this run's rule")
        return
    fixed = [part.result is not None for part in plan.parts]
    if plan.draft:
        if plan.grams or any(fixed) or any(c.scale != 1.0 for c in plan.contributors):
            raise Malformed("a draft that knows its outcome")
        return
    first = (plan.epoch, plan.ballot) == (0, 0)
    if first and any(part.result is not None and part.result.digest for part in plan.parts):
        raise Malformed("a first plan whose parts are merged already")
    if all(fixed) and not plan.grams:
        return
    if len(plan.grams) != len(plan.parts):
        raise Malformed("scales without the inner products that they follow from")
    for gram, part in zip(plan.grams, plan.parts, strict=True):
        check_gram(gram, run, plan, part, mix, [part.owner] if first else office)
    if plan.contributors != weighed(plan.contributors, plan.grams, mix):
        raise Malformed("scales that do not follow from the inner products")


@dataclasses.dataclass
class Products:
    """The inner products of one draft's parts as they come in at its leader."""

    draft: Plan
    run: bytes
    mix: Mix
    _grams: dict[tuple[int, int], Gram] = dataclasses.field(default_factory=dict)

    def add(self, sender: PeerId, gram: Gram) -> Plan | None:
        """Take an owner's products; returns the plan proper once all are there.

        Products of a part's owner by an earlier draft are ignored. Raises RemoteProtocolError for
        products of no part, or not the sender's.
        """
        parts = {(part.start, part.stop): part for part in self.draft.parts}
        part = parts.get((gram.start, gram.stop))
        if part is None or sender != gram.owner:
            raise Malformed("inner products that were not asked for")
        if sender != part.owner:
            return None
        check_gram(gram, self.run, self.draft, part, self.mix, self.draft.roster)
        self._grams[gram.start, gram.stop] = gram
        if len(self._grams) < len(parts):
            return None
        return final_plan(self.draft, [self._grams[key] for key in parts], self.mix)

    def absences(self) -> list[tuple[PeerId, PeerId]]:
        """(owner, contributor) of slices said not to have come, where the owner may be at fault.

        A slice that came to no other owner either was hardly sent, but an owner that lacks most
        slices is suspect all the same.
        """
        active = {
            index: c.peer
            for index, c in enumerate(self.draft.contributors)
            if c.active and c.weight > 0
        }
        have: dict[int, set[PeerId]] = {index: set() for index in active}
        for gram in self._grams.values():
            for index in have.keys() & set(gram.present):
                have[index].add(gram.owner)
        found = []
        for gram in self._grams.values():
            absent = active.keys() - set(gram.present)
            most = 2 * len(absent) > len(active)
            found += [
                (gram.owner, active[index])
                for index in sorted(absent)
                if active[index] != gram.owner and (most or have[index] - {gram.owner})
            ]
        return found

    def silent(self) -> set[PeerId]:
        """Owners whose products are missing."""
        return {p.owner for p in self.draft.parts if (p.start, p.stop) not in self._grams}


def _signed_bytes(run: bytes, gram: Gram) -> bytes:
    return _GRAM + run + dataclasses.replace(gram, signature=b"").encode()
