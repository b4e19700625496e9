"""PowerSGD: gradients as products of two thin matrices (Vogels et al., 1905.13727).

A matrix M [n, m] travels as P [n, r] and Q [m, r], and both are merged by plain means: the islands'
approximations add up to that of the mean. One step of power iteration each time, from the last
step's Q, is enough since gradients change slowly. What is lost is kept and added to the next
(algorithm 1 and 2 of the paper)::

    M ← gradient + e
    P ← mean(M Q);  P̂ ← orthogonal(P)
    Q ← mean(Mᵀ P̂)
    M̂ = P̂ Qᵀ;      e ← M − M̂

Two means a step, of which the second waits for the first. Over the internet a mean costs round
trips before it costs bytes, so rounds of ``node start`` have one: the factors take turns (ACP-SGD,
Zhang et al., 2306.08881). Each round is projected on the space that the round before has found::

    even:  P_i ← M_i Q̂;   M̂ = mean(P_i) Q̂ᵀ;   e_i ← M_i − P_i Q̂ᵀ;   P̂ ← orthogonal(mean P_i)
    odd:   Q_i ← M_iᵀ P̂;  M̂ = P̂ mean(Q_i)ᵀ;   e_i ← M_i − P̂ Q_iᵀ;   Q̂ ← orthogonal(mean Q_i)

Half the bytes and half the waiting; two rounds make one whole power iteration. Whoever takes part
in a round needs nothing but the common P̂ or Q̂, so it does not matter who was in the one before.

Matrices whose left factor is the longer one and those whose right one is take turns the other way
round, so that all rounds are of about one length (:class:`Plan`). Vectors (norms, biases) and
matrices too small to gain travel as they are.

What all islands must come to alike, bases and products, is computed in an order of its own, to the
same bits on any machine; what one island sends is its own affair.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from diloco.exact import total
from diloco.feedback import compensate

RANK = 4
DEPENDENT = 1e-6  # of a column's length: what is left of one that lies in the span of others
BLOCK = 65_536  # elements of a product made at a time, to stay in cache


def signs(count: int, name: str) -> Tensor:
    """Random signs, float32 [count] of ±1, that follow from a name and are equal everywhere."""
    drawn = hashlib.shake_128(name.encode()).digest(-(-count // 8))
    octets = torch.frombuffer(bytearray(drawn), dtype=torch.uint8)
    bits = octets[:, None].bitwise_right_shift(torch.arange(8, dtype=torch.uint8)).bitwise_and_(1)
    return bits.flatten()[:count].float().mul_(2).sub_(1)


def first_factor(columns: int, rank: int, seed: object) -> Tensor:
    """Q [m, r] to start from, equal everywhere."""
    return signs(columns * rank, f"{seed}").view(columns, rank)


@torch.no_grad()
def left(matrix: Tensor, right_factor: Tensor) -> Tensor:
    """P = M Q, float32 [n, r]."""
    return matrix @ right_factor


@torch.no_grad()
def right(matrix: Tensor, basis: Tensor) -> Tensor:
    """Q = Mᵀ P̂, float32 [m, r]."""
    return matrix.T @ basis


@torch.no_grad()
def orthogonal(factor: Tensor, seed: object) -> Tensor:
    """The columns of P [n, r], r ≤ n, made orthonormal by Gram and Schmidt's method, to equal bits.

    In place of a column that depends on those before it comes a random one that follows from
    ``seed``: a direction once lost would never come back, as everything is projected on these.
    """
    count, rank = factor.shape
    if rank > count:
        raise ValueError(f"{rank} columns of {count} elements cannot be orthogonal")
    basis = torch.zeros(count, rank, dtype=torch.float64)
    for index in range(rank):
        column, tries = _apart(factor[:, index].double(), basis[:, :index]), 0
        while column is None:
            drawn = signs(count, f"{seed} {index} {tries}").double()
            column, tries = _apart(drawn, basis[:, :index]), tries + 1
        basis[:, index] = column
    return basis.to(factor.dtype)


def _apart(column: Tensor, basis: Tensor) -> Tensor | None:
    """The part of ``column`` [n] orthogonal to ``basis`` [n, k], at unit length; None: nothing."""
    size = _length(column)
    for _ in range(2 if basis.shape[1] else 0):  # the second time takes away what rounding left
        for before, along in zip(basis.T, total(basis * column[:, None]).tolist(), strict=True):
            column = column - before * along
    rest = _length(column)
    return column * (1 / rest) if rest > DEPENDENT * size else None


def _length(column: Tensor) -> float:
    return math.sqrt(total(column * column).item())


@torch.no_grad()
def product(basis: Tensor, right_factor: Tensor) -> Tensor:
    """M̂ = P̂ Qᵀ, float32 [n, m], to equal bits: products are rounded, then added in order."""
    found = basis[:, :1] * right_factor[:, 0]
    for index in range(1, basis.shape[1]):
        found += basis[:, index : index + 1] * right_factor[:, index]
    return found


# --- one factor a round ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Matrix:
    """A parameter whose gradient travels as factors: ``rows * columns`` elements from ``start``."""

    start: int
    rows: int
    columns: int
    turn: int = 0  # its left factor travels in even rounds; 1: in odd ones

    def goes_left(self, round_: int) -> bool:
        """Whether P is what travels of it in a round, and not Q."""
        return (round_ + self.turn) % 2 == 0

    def height(self, round_: int) -> int:
        """Rows of the factor that travels."""
        return self.rows if self.goes_left(round_) else self.columns

    def of(self, vector: Tensor) -> Tensor:
        """Its view [rows, columns] of a vector of the model's length."""
        return vector[self.start : self.start + self.rows * self.columns].view(
            self.rows, self.columns
        )


@dataclass(frozen=True)
class Plan:
    """What of a model travels as factors, and where in a round's vector: factors, then the rest."""

    rank: int
    matrices: tuple[Matrix, ...]
    rest: tuple[slice, ...]  # of the model's vector: what travels as it is

    @classmethod
    def of(cls, entries: Iterable[tuple[int, Sequence[int]]], rank: int = RANK) -> Plan:
        """For parameters (first element, shape) that follow each other in the model's vector.

        Raises ValueError where no matrix has more than 2 r rows and columns: nothing to gain.
        """
        wide: list[Matrix] = []
        rest: list[slice] = []
        for start, shape in entries:
            rows, columns = as_matrix(shape)
            if min(rows, columns) > 2 * rank:
                wide.append(Matrix(start, rows, columns))
            else:
                rest.append(slice(start, start + rows * columns))
        if not wide:
            raise ValueError(f"no matrix has more than {2 * rank} rows and columns")
        return cls(rank, _balanced(wide), tuple(rest))

    @cached_property
    def kept(self) -> int:
        """Elements of all factors of a round: the common state, in which bases are kept."""
        return self.rank * max(
            sum(matrix.height(round_) for matrix in self.matrices) for round_ in (0, 1)
        )

    @cached_property
    def size(self) -> int:
        """Elements of a round's vector."""
        whole: int = sum(here.stop - here.start for here in self.rest)
        return self.kept + whole

    def factors(self, vector: Tensor, round_: int) -> list[Tensor]:
        """Views [height, r] of a round's vector, or of bases that came of it, one a matrix."""
        heights = [matrix.height(round_) for matrix in self.matrices]
        used = vector[: self.rank * sum(heights)]
        parts = torch.split(used, [self.rank * height for height in heights])
        return [part.view(-1, self.rank) for part in parts]

    def as_is(self, vector: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """What travels as it is: where in the model's vector [n], and the view of a round's [k]."""
        at = self.kept
        for here in self.rest:
            yield here, vector[at : at + here.stop - here.start]
            at += here.stop - here.start


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """A tensor's shape cut into rows and columns where their sum is least."""
    cuts = [(math.prod(shape[:at]), math.prod(shape[at:])) for at in range(len(shape) + 1)]
    return min(cuts, key=sum)


def _balanced(matrices: Sequence[Matrix]) -> tuple[Matrix, ...]:
    """Turns such that even and odd rounds carry about as much, the most uneven matrix first."""
    turns: dict[int, int] = {}
    more = 0  # rows of factors in even rounds over those in odd ones
    for one in sorted(matrices, key=lambda m: (-abs(m.rows - m.columns), m.start)):
        turns[one.start] = int((one.rows > one.columns) == (more > 0))
        difference = one.rows - one.columns
        more += -difference if turns[one.start] else difference
    return tuple(Matrix(m.start, m.rows, m.columns, turns[m.start]) for m in matrices)


@torch.no_grad()
def first_bases(plan: Plan, seed: object) -> Tensor:
    """The common state before round 0, float32 [kept]: random bases, equal everywhere."""
    bases = torch.zeros(plan.kept)
    for index, basis in enumerate(plan.factors(bases, -1)):
        drawn = first_factor(len(basis), plan.rank, f"{seed} {index}")
        basis.copy_(orthogonal(drawn, f"{seed} {index}"))
    return bases


@torch.no_grad()
def contribution(
    plan: Plan, round_: int, bases: Tensor, gradient: Tensor, errors: Tensor, decay: float
) -> Tensor:
    """What an island sends, float32 [size]: of each M its factor, of everything else the gradient.

    ``gradient`` and ``errors`` (e) are of the model's length, and left alone.
    """
    out = torch.zeros(plan.size)
    ways = zip(
        plan.matrices, plan.factors(bases, round_ - 1), plan.factors(out, round_), strict=True
    )
    for matrix, basis, factor in ways:
        meant = compensate(matrix.of(gradient).clone(), matrix.of(errors), decay)
        factor.copy_((left if matrix.goes_left(round_) else right)(meant, basis))
    for here, values in plan.as_is(out):
        values.copy_(gradient[here])
    return out


@torch.no_grad()
def keep_lost(
    plan: Plan,
    round_: int,
    bases: Tensor,
    gradient: Tensor,
    counted: Tensor,
    errors: Tensor,
    decay: float,
) -> None:
    """e ← M − its approximation, in place, of what was sent of it and ``counted`` [size]."""
    ways = zip(
        plan.matrices, plan.factors(bases, round_ - 1), plan.factors(counted, round_), strict=True
    )
    for matrix, basis, factor in ways:
        error = matrix.of(errors)
        meant = compensate(matrix.of(gradient).clone(), error, decay)
        pair = (factor, basis) if matrix.goes_left(round_) else (basis, factor)
        torch.addmm(meant, pair[0], pair[1].T, alpha=-1, out=error)


@torch.no_grad()
def expanded(
    plan: Plan, round_: int, bases: Tensor, mean: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """The common gradient from a round's ``mean`` [size], piece by piece, to equal bits.

    Every element of the model comes once: which ones, and their values.
    """
    ways = zip(
        plan.matrices, plan.factors(bases, round_ - 1), plan.factors(mean, round_), strict=True
    )
    for matrix, basis, factor in ways:
        tall, wide = (factor, basis) if matrix.goes_left(round_) else (basis, factor)
        rows = max(1, BLOCK // matrix.columns)
        for first in range(0, matrix.rows, rows):
            piece = product(tall[first : first + rows], wide).flatten()
            start = matrix.start + first * matrix.columns
            yield slice(start, start + len(piece)), piece
    yield from plan.as_is(mean)


@torch.no_grad()
def turn(plan: Plan, round_: int, bases: Tensor, mean: Tensor, seed: object) -> None:
    """``bases`` ← those of the factors in a round's ``mean``, in place, to equal bits."""
    found = torch.zeros_like(bases)
    ways = zip(plan.factors(mean, round_), plan.factors(found, round_), strict=True)
    for index, (factor, basis) in enumerate(ways):
        basis.copy_(orthogonal(factor, f"{seed} {round_} {index}"))
    bases.copy_(found)
