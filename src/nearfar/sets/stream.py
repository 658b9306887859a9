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

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from nearfar._utils.process_group import ALONE, ProcessGroup
from nearfar._utils.tensors import hidden, over, total, weighted

__all__ = ["Cap", "Collected", "Dual", "Moments", "Orders", "Stream"]

Orders = Tensor | int
Cap = Callable[[], Tensor]
"""Returns the upper limit [g] on the measure that carries weight; called at the end of a sweep."""
Dual = tuple[Tensor, ...]
"""Dual variables, tensors [g]; the first is the one that `explain` shows."""


class Stream(ABC):
    """Base class: reduces g groups whose members arrive chunk by chunk, in one or more sweeps over all chunks.

    A subclass implements `_start`, `_add`, `_merge` and `_turn`, and overrides `value` or `_weights` if needed.

    Args:
        over: the set, an `UncertaintySet`.
        groups: g.
        like: a tensor of the losses' dtype and device.
        orders: as in `UncertaintySet.value`.
        cap: likewise, but as a function, because the limit may depend on another stream.

    Attributes:
        sweep: number of sweeps that have ended.
        size: [g] measure of the members; grows with each chunk of the first sweep, and is merged after `_merge`.
        dual: the set's dual variables, from which its `_weights` computes p*.
    """

    constant = False
    """Whether the value is Σ p*l with p* held constant; the caller then sums `held` in one more sweep."""
    ranks: ProcessGroup = ALONE
    """The processes that hold other members of the same groups."""
    dual: Dual = ()

    def __init__(self, over: Any, groups: int, like: Tensor, orders: Orders = 1, cap: Cap | None = None) -> None:
        self.over, self.like, self.sweep = over, like, 0
        self.size = torch.zeros(groups, dtype=torch.float64, device=like.device)
        self._orders, self._cap, self._fresh = orders, cap, True

    def add(self, losses: Tensor, measure: Tensor) -> None:
        """Add a chunk [g, c] of members."""
        l, w = self.over._members(losses, measure)
        if self.over.zero_member and not (self._fresh and self.ranks.rank == 0):
            l, w = l[:, :-1], w[:, :-1]  # the zero member counts once
        if self._fresh:
            self._fresh = False
            self._start()
        self._add(l, w)
        if not self.sweep:
            self.size += total(w, self.size)

    def turn(self) -> bool:
        """End a sweep, merge over processes, and return whether another sweep is needed."""
        if self.ranks.world > 1:
            self._merge(self.ranks)
            self.size = self.size if self.sweep else self.ranks.sum(self.size)
        self._fresh = True
        self.sweep += 1
        return self._turn()

    def value(self) -> Tensor:
        """Worst-case value F [g], after the last sweep; not available if it is `constant`."""
        return self._narrow(self.dual[0])

    def weights(self, losses: Tensor, measure: Tensor) -> Tensor:
        """Weights p* [g, c] of a chunk, after the last sweep."""
        l, w = (x[:, : losses.shape[1]] for x in self.over._members(losses, measure))  # without the zero member
        return self._weights(l, w)

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

    def _narrow(self, x: Tensor) -> Tensor:
        """Cast a result [g] to the dtype of the losses, with 0 for empty groups."""
        return torch.where(self.size == 0, 0.0, x).to(self.like.dtype)

    @abstractmethod
    def _start(self) -> None:
        """Reset the accumulators at the beginning of a sweep."""

    @abstractmethod
    def _add(self, l: Tensor, w: Tensor) -> None:
        """Accumulate a chunk; absent members have l = 0 and w = 0."""

    @abstractmethod
    def _merge(self, ranks: ProcessGroup) -> None:
        """Merge the accumulators of all processes."""

    def _turn(self) -> bool:
        """Update the solution after a sweep; returns whether another sweep is needed."""
        return False

    def _weights(self, l: Tensor, w: Tensor) -> Tensor:
        """Weights p* [g, c] of a prepared chunk, elementwise."""
        return self.over._weights(l, w, self.dual)  # type: ignore[no-any-return]


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
        self._add(*self._present(losses.detach(), measure))

    def _present(self, losses: Tensor, measure: Tensor) -> tuple[Tensor, Tensor]:
        """The members that are present; only for a single group, which needs no padding."""
        if len(losses) > 1:
            return losses, measure
        there = measure[0] > 0
        return losses[:, there], measure[:, there]

    def _start(self) -> None: ...

    def _add(self, l: Tensor, w: Tensor) -> None:
        self._starts.append(self._count)
        self._count += l.shape[1]
        self._chunks.append((l, w))

    def _merge(self, ranks: ProcessGroup) -> None:
        l, w = (torch.cat(x, dim=1) for x in zip(*self._chunks, strict=True))
        most = int(ranks.largest(torch.tensor(l.shape[1], device=l.device)))
        wider = (0, most - l.shape[1])
        l, w = (ranks.gather(pad(x.to(l.dtype), wider)) for x in (l, w))
        self._chunks = list(zip(l, w, strict=True))
        self._starts = [start + most * ranks.rank for start in self._starts]

    def _turn(self) -> bool:
        l, w = (torch.cat(x, dim=1) for x in zip(*self._chunks, strict=True))
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


class Moments:
    """Running moments of g groups, relative to one of the members, so that the energy of equal members is exactly 0.

    Attributes:
        size: [g] Σ w; float64, like all moments.
        energy: [g] Σ w(l - mean)².
        top: [g] largest member.
        ties: [g] measure of the members equal to it.
        least: [g] smallest member.
    """

    def __init__(self, groups: int, like: Tensor) -> None:
        self.size = self.energy = self.ties = self._start = self._mean = like.new_zeros(groups, dtype=torch.float64)
        self.top, self.least = self.size - math.inf, self.size + math.inf

    def mean(self, level: Tensor) -> Tensor:
        """Mean minus `level` [g], without cancellation if the level is a member close to the others."""
        return self._start - level + self._mean

    def add(self, l: Tensor, w: Tensor) -> None:
        """Add a chunk [g, c]."""
        size, l = total(w, self.size), l.double()
        top = hidden(l, w).amax(dim=1)
        about = hidden(l - top[:, None], w, 0.0)
        mean = over(weighted(about, w).sum(dim=1), size)
        energy = weighted((about - mean[:, None]) ** 2, w).sum(dim=1)
        least, ties = hidden(l, w, math.inf).amin(dim=1), total(w * (about == 0), size)
        self._join(size, energy, ties, top, mean, top, least)

    def merge(self, ranks: ProcessGroup) -> Moments:
        """The moments of the members of all processes; the same on each."""
        mine = (self.size, self.energy, self.ties, self._start, self._mean, self.top, self.least)
        found = Moments(len(self.size), self.size)
        for each in ranks.gather(torch.stack(mine)):
            found._join(*each)
        return found

    def _join(
        self, size: Tensor, energy: Tensor, ties: Tensor, start: Tensor, mean: Tensor, top: Tensor, least: Tensor
    ) -> None:
        """Merge the moments of other members, whose mean is relative to `start`."""
        self._start = torch.where(self.size == 0, start, self._start)
        apart = torch.where(size == 0, 0.0, start - self._start + mean - self._mean)
        both = self.size + size
        self.energy = self.energy + energy + apart * apart * over(self.size * size, both)
        self._mean, self.size = self._mean + apart * over(size, both), both
        before, self.top, self.least = self.top, torch.maximum(self.top, top), torch.minimum(self.least, least)
        self.ties = torch.where(before == self.top, self.ties, 0.0) + torch.where(top == self.top, ties, 0.0)
