"""Streams: reduce groups chunk by chunk, so that their members are never in memory all at once.

    stream, again = over.stream(groups, like), True
    while again:                               one or more sweeps over all chunks, as the set needs
        for l, w in chunks:
            stream.add(l, w)
        again = stream.turn()
    p = stream.weights(l, w)                   elementwise: any chunk, in any order

A chunk is l [g, c] with a measure w [g, c]: c members of each of g groups. With several processes (`ranks`), each adds
its own chunks, and `turn` merges the results. Sums over chunks are float64: float32 loses five digits of 16 million.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nearfar._utils.process_group import ALONE, ProcessGroup
from nearfar._utils.tensors import hidden, over, total, weighted

__all__ = ["Cap", "Collected", "Dual", "Moments", "Orders", "Stream", "Sums"]

Orders = Tensor | int
Cap = Callable[[], Tensor]
"""Returns the upper limit [g] on the measure that carries weight; called at the end of a sweep."""
Dual = tuple[Tensor, ...]
"""Dual variables, tensors [g]; the first is the one that `explain` shows."""
Sums = tuple[Tensor, ...]
"""What a stream keeps of the chunks of a sweep; see `Stream._reduce`."""


class Stream(ABC):
    """Base class: reduces g groups whose members arrive chunk by chunk, in one or more sweeps over all chunks.

    A subclass implements `_reduce` and `_turn`, and `_join` if its sums are not simply added.

    `like` has the losses' dtype and device; `orders` is as in `UncertaintySet.value`; `cap` is a function, because the
    limit may depend on another stream.

    Attributes:
        sweep: number of sweeps that have ended.
        size: [g] measure of the members; grows with each chunk of the first sweep, and is merged at its end.
        dual: the set's dual variables, from which its `_weights` computes p*.
    """

    constant = False
    """Whether the value is Σ p*l with p* held constant; the caller then sums `held` in one more sweep."""
    ranks: ProcessGroup = ALONE
    """The processes that hold other members of the same groups."""
    dual: Dual = ()
    _value: Tensor | None = None
    """F [g], if it is not the first dual variable."""

    def __init__(self, over: Any, groups: int, like: Tensor, orders: Orders = 1, cap: Cap | None = None) -> None:
        self.over, self.like, self.sweep = over, like, 0
        self.size = torch.zeros(groups, dtype=torch.float64, device=like.device)
        self._orders, self._cap = orders, cap
        self._sums: Sums = ()

    def add(self, losses: Tensor, measure: Tensor) -> None:
        """Add a chunk [g, c] of members."""
        l, w = self.over._members(losses, measure)
        if self.over.zero_member and (self._sums or self.ranks.rank > 0):
            l, w = l[:, :-1], w[:, :-1]  # the zero member counts once
        found = self._reduce(l, w)
        self._sums = self._join(self._sums, found) if self._sums else found
        if not self.sweep:
            self.size += total(w, self.size)

    def turn(self) -> bool:
        """End a sweep, merge over processes, and return whether another sweep is needed."""
        if self.ranks.world > 1:
            self._sums = reduce(self._join, zip(*(self.ranks.gather(x) for x in self._sums), strict=True))
            self.size = self.size if self.sweep else self.ranks.sum(self.size)
        self.sweep += 1
        sums, self._sums = self._sums, ()
        return self._turn(*sums)

    def value(self) -> Tensor:
        """Worst-case value F [g], after the last sweep; not available if it is `constant`."""
        found = self.dual[0] if self._value is None else self._value
        return torch.where(self.size == 0, 0.0, found).to(self.like.dtype)

    def weights(self, losses: Tensor, measure: Tensor) -> Tensor:
        """Weights p* [g, c] of a chunk, after the last sweep."""
        l, w = (x[:, : losses.shape[1]] for x in self.over._members(losses, measure))  # without the zero member
        return self.over._weights(l, w, self.dual)  # type: ignore[no-any-return]

    def held(self, losses: Tensor, measure: Tensor) -> Tensor:
        """Weighted sum Σ p*l [g] of a chunk, after the last sweep, with p* held constant."""
        # absent members are 0; the NaN of a present one propagates even if its weight is 0
        return (self.weights(losses.detach(), measure) * hidden(losses, measure, 0.0)).sum(dim=1)

    def taken(self) -> Tensor:
        """Total measure [g] that may carry weight; known after the first sweep."""
        return self.over._carried(self._mass())  # type: ignore[no-any-return]

    def _mass(self) -> Tensor:
        """The limit that the set puts on the measure, like `UncertaintySet._mass`."""
        cap = None if self._cap is None else self._cap()
        return self.over._limit(self.size.to(self.like.dtype), self._orders, cap)  # type: ignore[no-any-return]

    @abstractmethod
    def _reduce(self, l: Tensor, w: Tensor) -> Sums:
        """What is kept of a chunk in this sweep, such as sums [g]; absent members have l = 0 and w = 0."""

    def _join(self, a: Sums, b: Sums) -> Sums:
        """Combine what is kept of two sets of members."""
        return tuple(x + y for x, y in zip(a, b, strict=True))

    @abstractmethod
    def _turn(self, *sums: Tensor) -> bool:
        """Solve with what is kept of all members: set `dual`, and return whether another sweep is needed."""


class Collected(Stream):
    """Stream of a set without its own: stores the losses of all members (n·m numbers) and differentiates the value.

    Chunks must come in the same order in every sweep, because weights are returned in the order of the members.
    """

    def __init__(self, over: Any, groups: int, like: Tensor, orders: Orders = 1, cap: Cap | None = None) -> None:
        super().__init__(over, groups, like, orders, cap)
        self._chunks: list[tuple[Tensor, Tensor]] = []
        self._starts: list[int] = []
        self._next = self._count = 0

    def add(self, losses: Tensor, measure: Tensor) -> None:  # noqa: D102
        l, w = losses.detach(), measure
        if len(l) == 1:  # one group needs no padding
            l, w = (x[:, measure[0] > 0] for x in (l, w))
        self._starts.append(self._count)
        self._count += l.shape[1]
        self._chunks.append((l, w))

    def turn(self) -> bool:  # noqa: D102
        l, w = (torch.cat(x, dim=1) for x in zip(*self._chunks, strict=True))
        if self.ranks.world > 1:
            most = int(self.ranks.largest(torch.tensor(l.shape[1], device=l.device)))
            wider = (0, most - l.shape[1])
            l, w = (torch.cat(list(self.ranks.gather(pad(x.to(l.dtype), wider))), dim=1) for x in (l, w))
            self._starts = [start + most * self.ranks.rank for start in self._starts]
        if l.shape[1] == 0:  # no members: add an absent one, so that every reduction is defined
            l, w = pad(l, (0, 1)), pad(w, (0, 1))
        limit: dict[str, Any] = {"orders": self._orders, "cap": None if self._cap is None else self._cap()}
        with torch.inference_mode(False), torch.enable_grad():
            if l.is_inference():  # autograd cannot save tensors of inference mode
                l, w = l.clone(), w.clone()
                limit = {name: x.clone() if isinstance(x, Tensor) else x for name, x in limit.items()}
            leaf = l.requires_grad_()
            value: Tensor = self.over.value(leaf, w, **limit)
            self._p = torch.autograd.grad(value.sum(), leaf)[0] if value.requires_grad else torch.zeros_like(leaf)
        self._value, self._taken, self._chunks = value.detach(), self.over.taken(l.detach(), w, **limit), []
        return False

    def value(self) -> Tensor:  # noqa: D102
        assert self._value is not None  # noqa: S101 - set by `turn`
        return self._value

    def taken(self) -> Tensor:  # noqa: D102
        found: Tensor = self._taken
        return found

    def weights(self, losses: Tensor, measure: Tensor) -> Tensor:  # noqa: D102
        start, self._next = self._starts[self._next], (self._next + 1) % len(self._starts)
        if len(losses) > 1:
            return self._p[:, start : start + losses.shape[1]]
        there, p = measure[0] > 0, torch.zeros_like(losses)
        p[:, there] = self._p[:, start : start + int(there.sum())]
        return p

    def _reduce(self, l: Tensor, w: Tensor) -> Sums:
        return ()

    def _turn(self, *sums: Tensor) -> bool:
        return False


class Moments(NamedTuple):
    """Moments of g groups, float64, about one of the members, so that the energy of equal members is exactly 0."""

    size: Tensor
    """[g] Σ w."""
    energy: Tensor
    """[g] Σ w(l - mean)²."""
    top: Tensor
    """[g] largest member."""
    ties: Tensor
    """[g] measure of the members equal to it."""
    least: Tensor
    """[g] smallest member."""
    start: Tensor
    """[g] the member about which the mean is taken."""
    about: Tensor
    """[g] mean minus `start`."""

    @classmethod
    def of(cls, l: Tensor, w: Tensor) -> "Moments":
        """The moments of members l [g, c]."""
        l = l.double()
        top = hidden(l, w).amax(dim=1)
        apart = hidden(l - top[:, None], w, 0.0)
        size, ties = total(w, l), total(w * (apart == 0), l)
        mean = over(weighted(apart, w).sum(dim=1), size)
        energy = weighted((apart - mean[:, None]) ** 2, w).sum(dim=1)
        return cls(size, energy, top, ties, hidden(l, w, math.inf).amin(dim=1), top, mean)

    def mean(self, level: Tensor) -> Tensor:
        """Mean minus `level` [g], without cancellation if the level is a member close to the others."""
        return self.start - level + self.about

    def join(self, other: "Moments") -> "Moments":
        """The moments of the members of both."""
        start, both = torch.where(self.size == 0, other.start, self.start), self.size + other.size
        about = torch.where(self.size == 0, 0.0, self.about)
        apart = torch.where(other.size == 0, 0.0, other.start - start + other.about - about)
        energy = self.energy + other.energy + apart * apart * over(self.size * other.size, both)
        top, least = torch.maximum(self.top, other.top), torch.minimum(self.least, other.least)
        ties = sum(torch.where(x.top == top, x.ties, 0.0) for x in (self, other))
        return Moments(both, energy, top, ties, least, start, about + apart * over(other.size, both))  # type: ignore[arg-type]
