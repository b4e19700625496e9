"""What rounding takes from parameters that a script keeps in bf16 or fp16.

The outer state is fp32, and θ ← G loses what such a parameter has no bits for. The next snapshot
would send it as if it had been learnt, by all islands alike: G would be pulled back to values that
the type has, and steps shorter than half a bit of it would never add up. So the ranks keep it
beside θ, and whatever compares θ with G or moves it reckons with θ + remainder, in fp32. Where the
optimizer keeps such a parameter in fp32 itself, that is both together, and nothing else is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from diloco.pseudo_gradient import rebase
from node.trainer.copies import LOW, Copies
from node.trainer.weights import Weights, itself, local


class Remainders:
    """One remainder beside each parameter of a type in ``LOW``, in that type; none for others.

    Together they have twice the parameter's bits, in fp16 down to 2⁻²⁴. Each rank has those of its
    own parts.
    """

    def __init__(self, weights: Weights, copies: Copies) -> None:
        self.weights, self.copies = weights, copies
        self._beside: dict[Tensor, Tensor] = {}  # parameter: that of this rank's part

    def __len__(self) -> int:
        return len(self._beside)

    def exact(self, parameter: Tensor) -> Tensor:
        """θ + remainder, in fp32 and new; the parameter itself where its type has no remainder."""
        if parameter.dtype not in LOW:
            return itself(parameter)
        whole = itself(parameter).to(torch.float32)
        part, master = local(whole), self._master(parameter)
        if master is None:
            self._complete(parameter, part)
        else:
            part.copy_(master)
        return whole

    def keep(self, parameter: Tensor, exact: Tensor) -> None:
        """θ ← ``exact`` of this rank's part, rounded, and keep the rest; for types in LOW alone."""
        if parameter.dtype not in LOW:
            self._beside.pop(parameter, None)  # a script may have changed the type since
            return
        local(parameter).copy_(exact)
        master = self.copies.master(parameter)
        if master is None:
            self._keep_beside(parameter, exact)
        else:
            master.copy_(exact)
            self._beside.pop(parameter, None)

    @torch.no_grad()
    def complete(self) -> None:
        """Give masters that are new what they lack: they are read as they are from here on."""
        for parameter in self._parameters():
            self._master(parameter)

    def take_over(self) -> None:
        """Keep beside θ what masters hold, too: they are about to be replaced.

        :meth:`settle` or :meth:`believe` comes next.
        """
        for parameter in self._parameters():
            master = self._master(parameter)
            if master is not None:
                self._keep_beside(parameter, master)

    def believe(self) -> None:
        """Masters that were read with θ hold it all."""
        for parameter in self._parameters():
            if self.copies.master(parameter) is not None:
                self._beside.pop(parameter, None)

    def settle(self) -> None:
        """θ counts: what is there of another one, as where moments alone were read, begins here."""
        for parameter in self._parameters():
            if self.copies.master(parameter) is not None:
                exact = local(parameter).to(torch.float32)
                self._complete(parameter, exact)
                self.keep(parameter, exact)
            self.copies.set(parameter)

    def rebase(self, parameter: Tensor, new: Tensor, was: Tensor, *, voids: bool) -> None:
        """See :func:`~diloco.pseudo_gradient.rebase`; ``voids``: ``new`` where ``was`` is NaN."""
        with self.copies.follow(parameter):
            mine = local(self.exact(parameter))
            rebase(mine, new, torch.where(was.isnan(), mine, was) if voids else was)
            self.keep(parameter, mine)

    def shift(self, parameter: Tensor, by: Tensor) -> None:
        """Move this rank's part by so much."""
        with self.copies.follow(parameter):
            mine = local(self.exact(parameter))
            self.keep(parameter, mine.add_(by))

    def set(self, name: str, whole: Tensor | None, *, shifts: bool = False) -> None:
        """See :meth:`Weights.set`, of θ itself; every rank must call it.

        Copies are set as well, or move as far (``shifts``).
        """
        part = self.weights.scatter(name, whole)
        for parameter in self.weights.parts.get(name, ()):
            assert part is not None
            with self.copies.follow(parameter) if shifts else nullcontext():
                local(parameter).copy_(part)
                self.keep(parameter, part)
            if not shifts:
                self.copies.set(parameter)

    @contextmanager
    def through(self) -> Iterator[None]:
        """Around what gives the optimizer moments of another θ, or takes them: this one stays."""
        self.take_over()
        yield
        self.settle()

    def _parameters(self) -> list[Tensor]:
        return [parameter for parts in self.weights.parts.values() for parameter in parts]

    def _master(self, parameter: Tensor) -> Tensor | None:
        """With all that it is to hold: its optimizer has made it of θ alone."""
        master = self.copies.master(parameter)
        if master is not None:
            self._complete(parameter, master)
            self._beside.pop(parameter, None)
        return master

    def _complete(self, parameter: Tensor, part: Tensor) -> None:
        """Add to ``part``, this parameter in fp32, what is kept beside it."""
        beside = self._beside.get(parameter)
        if beside is not None:
            part.add_(beside.to(part.device))  # a script may have moved its model since

    def _keep_beside(self, parameter: Tensor, exact: Tensor) -> None:
        part, beside = local(parameter), self._beside.get(parameter)
        if beside is None or (beside.dtype, beside.device) != (part.dtype, part.device):
            beside = self._beside[parameter] = torch.empty_like(part)
        torch.sub(exact.to(part.device), part, out=beside)
        beside.nan_to_num_(0.0, 0.0, 0.0)  # θ says that it is not finite, until it is set anew
