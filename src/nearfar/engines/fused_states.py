"""What the fused kernels keep of each row, joined over tiles and strips, and the numbers that follow from it."""

from __future__ import annotations

import torch
from torch import Tensor

from nearfar._utils.tensors import over
from nearfar.engines.launch import Strip, Work
from nearfar.engines.pair_vectors import NEGATIVE, POSITION, POSITIVE, number

__all__ = ["States", "members", "totals"]

Totals = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class States:
    """States [states, n] of all rows, float64, to which tiles are added; the kernel `fold` says which there are."""

    def __init__(self, work: Work) -> None:
        spec = work.spec
        self.work, self.tops = work, spec.exp == 2
        self.kept = {
            "FLAT": int(spec.exp > 0 and spec.flat),
            "HOLD": int(spec.exp > 0 and spec.held),
            "SIZED": int(spec.drop or work.counted),
            "COUNTED": int(work.counted),
        }
        self.number = 1 + self.tops + sum(self.kept.values())
        self.found = self._nothing(work.empty(self.number, len(work.x), dtype=torch.float64))

    def _nothing(self, state: Tensor) -> Tensor:
        state.zero_()
        if self.tops:
            state[1].fill_(-torch.inf)
        return state

    def empty(self, strip: Strip) -> tuple[Tensor, Tensor]:
        """Room for the states of a strip: of its rows [states, tiles, rows], and of its columns where pairs turn."""
        rows = self.work.empty(self.number, strip.wide, strip.high)
        if not self.work.spec.half:
            return rows, rows
        # tiles below the diagonal are not written
        return self._nothing(rows), self._nothing(self.work.empty(self.number, strip.tall, strip.width))

    def add(self, state: Tensor, first: int) -> None:
        """Join the states [states, tiles, rows] of the rows from `first` on with those that are there."""
        here = self.found[:, first : first + state.shape[2]]
        if not self.tops:
            here += state.sum(dim=1, dtype=torch.float64)
            return
        every = torch.cat([here[:, None], state.double()], dim=1)
        top = every[1].amax(dim=0)
        gap = torch.where(every[1] == -torch.inf, 0.0, (every[1] - top) / self.work.spec.gamma)
        shrink = torch.exp(gap)
        total, place = every[0], 2
        here[0], here[1] = (shrink * total).sum(dim=0), top
        if self.kept["FLAT"]:  # Σ w(e^{z + gap} - 1), with Σ w = Σ w·e^z - Σ w(e^z - 1)
            here[place] = (shrink * every[place] + (total - every[place]) * torch.expm1(gap)).sum(dim=0)
            place += 1
        if self.kept["HOLD"]:
            here[place] = (shrink * (every[place] + gap * total)).sum(dim=0)
            place += 1
        here[place:] = every[place:].sum(dim=1)


def totals(work: Work) -> Totals:
    """Fold the rows: t, Σ w, number of members, level, Σ w·e^z and Σ p·l of each, all float64."""
    spec, states = work.spec, States(work)
    work.fold(states)
    found = [x[: work.n].clone() for x in states.found]  # an operator's results share no memory
    size, seen = (found[-2], found[-1]) if work.counted else members(work)
    size = found[-1] if spec.drop and not work.counted else size
    if not spec.exp:
        sums = found[0]
        return sums, size, seen, torch.zeros_like(sums), torch.ones_like(sums), torch.zeros_like(sums)
    empty = size == 0
    norm, place = found[0], 1 + (spec.exp == 2)
    level = torch.where(empty, 0.0, found[1]) if spec.exp == 2 else torch.full_like(norm, spec.level)
    if spec.flat:
        norm = torch.where(found[place] > -0.5 * size, size + found[place], norm)
        place += 1
    mean = torch.where(empty, 1.0, over(norm, size))
    t = torch.where(empty, 0.0, level + spec.gamma * mean.log())
    value = torch.zeros_like(t)
    if spec.held:
        value = torch.where(empty, 0.0, level + spec.gamma * found[place] / torch.where(empty, 1.0, norm))
    return t, size, seen, level, norm, value


def members(work: Work) -> tuple[Tensor, Tensor]:
    """Σ w of each row's members, and their number (of all pairs: that of the negative ones), told by labels alone."""
    side, own = work.spec.side, work.spec.itself == POSITION
    labels, flags, _, weights = (_both(work.pairs[at : at + 2]) for at in (0, 2, 4, 6))
    assert labels is not None  # noqa: S101 - they always came
    bits = {0: (NEGATIVE,), 1: (POSITIVE,), 2: (NEGATIVE, POSITIVE)}[side]
    sizes = [number(labels, flags, weights, bit, own=own, weighed=True) for bit in bits]
    size = sizes[0] if len(sizes) == 1 else sizes[0] + sizes[1]
    if weights is None and len(bits) == 1:
        return size, size.clone()
    return size, number(labels, flags, weights, bits[0], own=own)


def _both(pair: list[Tensor | None]) -> tuple[Tensor, Tensor] | None:
    row, col = pair
    return None if row is None or col is None else (row, col)
