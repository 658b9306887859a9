"""Solvers of one group over the whole batch, whose losses arrive strip by strip, each pair once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nearfar._utils.process_group import ALONE, ProcessGroup
from nearfar._utils.shortcuts import exactly
from nearfar._utils.tensors import over
from nearfar.sets.base import UncertaintySet
from nearfar.sets.chi_square import ChiSquare
from nearfar.sets.online import Online, Variance, online
from nearfar.sets.selection import KEPT, Largest

__all__ = ["Few", "Named", "Solver", "solver"]


class Few:
    """Solver of `TopK` and `Worst`: keeps the largest losses, which carry all the weight.

    Args:
        of: the set.
        most: K; None for the one largest loss.
        like: a tensor of the losses' dtype and device.
        per: how many of the members added are one unordered pair, of which K are counted.
    """

    absent = -math.inf

    def __init__(self, of: UncertaintySet, most: float | None, like: Tensor, per: int) -> None:
        self.of = of
        self.per = per
        self.size = torch.zeros((), dtype=torch.float64, device=like.device)
        self.most = most
        self.kept = Largest(1, 1 if most is None else math.ceil(per * most), like, 0.0)
        self.ranks = ALONE

    def look(self, l: Tensor, members: Tensor | float, w: Tensor | None = None) -> None:
        """Add a strip of losses, -inf for absent pairs, with its number of members; each must count once."""
        self.size += torch.sign(l).clamp_min(0.0).sum() if self.of.zero == "drop" else members
        self.kept.look(l.reshape(1, -1))

    def merge(self, ranks: ProcessGroup) -> None:
        """Merge with all other processes."""
        self.ranks = ranks
        self.size = ranks.sum(self.size)
        self.kept.merge(ranks)

    def taken(self) -> Tensor:
        """Number of members [1] that carry weight."""
        size = self.size[None]
        return size.clamp_max(1.0) if self.most is None else self.of._limit(size, self.per, None)

    @property
    def seen(self) -> int:
        """Number of entries added so far."""
        return self.kept.seen

    def solved(self, cap: Tensor | None) -> Named | None:
        """Value [1], and indices and weights [k] of the selected members; None if ties above 0 were not all kept."""
        k = self.taken() if cap is None else torch.minimum(self.taken(), cap)
        threshold, above, ties = self.kept.threshold(k)
        values = self.kept.values
        whole = self.kept.complete(threshold) or (bool(threshold <= 0) and not bool(torch.isnan(values).any()))
        if not self.ranks.all_agree(whole, values):
            return None
        tied = values == threshold[:, None]
        # pairs without loss can be left out: their value and slope are 0
        share = over(k - above, ties)
        part = over((values > threshold[:, None]) + share[:, None] * tied, k[:, None]) * (values > 0)
        value = self.ranks.sum((values * part).sum(dim=1))
        chosen = (part[0] > 0).nonzero()[:, 0]
        return value, self.kept.place[0, chosen], part[0, chosen].to(values.dtype)


Solver = Online | Variance | Few
Named = tuple[Tensor, Tensor, Tensor]
"""Value [1], and indices (in order of arrival) and weights [k] of the few members that carry the weight."""


def solver(of: UncertaintySet, like: Tensor, orders: int, per: int = 1, *, weighted: bool = False) -> Solver | None:
    """The solver of a set, or None if it has none.

    Args:
        of: the set.
        like: a tensor of the losses' dtype and device.
        orders: how often each pair added counts in the group.
        per: how many of the pairs added are one unordered pair.
        weighted: whether pairs have weights.
    """
    fold = of.fold()
    if of.zero_member or (fold is not None and fold.held):
        return None
    if fold is not None and fold.kind == "max":
        return None if of.zero == "drop" or weighted else Few(of, None, like, per)
    if fold is not None and fold.kind == "top":
        small = fold.most is not None and per * fold.most <= KEPT and not weighted
        return Few(of, fold.most, like, per) if small else None
    return Variance(of, like, orders) if exactly(of, ChiSquare) else online(of, like, orders)
