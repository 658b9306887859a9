"""The way back of the fused engine: from dF/dt of each row to gradients of rows and columns.

A strip of G = dF/d⟨x, y⟩ is written in the dtype of the products, and two matrix products turn it into gradients; the
n x m matrix is never held.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nearfar.engines.launch import Strip, Work, stepped

__all__ = ["weigh", "weigh_triplets"]

STRIP = 2**25
"""Entries of a strip of gradients."""
TALL = 1024
"""Least rows of a strip of gradients: each adds to the gradients of all columns."""


def weigh(work: Work, level: Tensor, norm: Tensor, pull: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of rows, columns and offset from dF/dt [n], t with this level and norm of weights."""
    from nearfar.engines._kernels import weigh as kernel

    spec, unit = work.spec, _unit(work, pull)
    level = level.float().contiguous()
    coef = torch.where(norm == 0, 0.0, pull / unit / torch.where(norm == 0, 1.0, norm)).float().contiguous()
    learned = work.rows.new_zeros((), dtype=torch.float64)
    gradients = Gradients(work)
    for strip in work.strips(STRIP, half=bool(spec.half), least=TALL):
        g, rows, cols = gradients.empty(strip)
        learn = work.empty(strip.wide, strip.high if work.offset is not None else 0).zero_()
        work.start(
            kernel, strip, level, coef, g, rows, cols, learn, work.n, work.m, *strip.where, *work.numbers(), spec.high,
            spec.level, 1 / spec.gamma, SIDE=spec.side, MINED=int(work.floor is not None), HALF=spec.half,
            DROP=spec.drop, EXP=spec.exp, FAR=int(work.far),
        )  # fmt: skip
        gradients.add(strip, g, rows, cols)
        learned = learned + learn.sum(dtype=torch.float64) if work.offset is not None else learned
    by_row, by_col = gradients.found(unit)
    return by_row, by_col, (learned * unit * (spec.by_offset / spec.a)).to(work.rows.dtype)


def weigh_triplets(work: Work, scores: Tensor, real: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of rows and columns through the scores of the negatives."""
    from nearfar.engines._kernels_triplets import weigh_triplets as kernel

    spec, unit, gradients = work.spec, _unit(work, pull), Gradients(work)
    coef = (pull / unit).float().contiguous()
    scores, real, step = stepped(scores, real)
    for strip in work.strips(STRIP, half=False, least=TALL):
        g, rows, cols = gradients.empty(strip)
        work.start(
            kernel, strip, scores, real, coef, g, rows, cols, work.n, work.m, scores.shape[1], *strip.where,
            *work.numbers(), spec.low, spec.high, BAND=spec.band, DROP=spec.drop, FAR=int(work.far), STEP=step,
        )  # fmt: skip
        gradients.add(strip, g, rows, cols)
    return gradients.found(unit)


def _unit(work: Work, pull: Tensor) -> Tensor:
    """A power of two that these numbers are divided by, so that their products keep their digits in 16 bits."""
    if work.type == torch.float32:
        return pull.new_ones(())
    most = pull.abs().amax()
    return torch.where(most == 0, 1.0, torch.exp2(most.log2().ceil()))


class Gradients:
    """Gradients of rows and columns, summed over strips; one for both where the columns are the rows."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.rows = torch.zeros(work.x.shape, dtype=torch.float32, device=work.x.device)
        self.cols = self.rows if work.square else torch.zeros(work.y.shape, dtype=torch.float32, device=work.x.device)
        self.buffer = work.empty(0, dtype=work.type)
        self.far = work.far
        self.row_sums = work.empty(len(work.x) if self.far else 0).zero_()
        self.col_sums = self.row_sums if work.square else work.empty(len(work.y) if self.far else 0).zero_()

    def empty(self, strip: Strip) -> tuple[Tensor, Tensor, Tensor]:
        """Room for a strip of G, and for the sums of its rows and columns by tiles."""
        entries = strip.high * strip.width
        if self.buffer.numel() < entries:
            self.buffer = self.work.empty(entries, dtype=self.work.type)
        sums = (self.work.empty(strip.wide, strip.high * self.far), self.work.empty(strip.tall, strip.width * self.far))
        if self.work.spec.half:
            sums = (sums[0].zero_(), sums[1].zero_())
        return self.buffer[:entries].view(strip.high, strip.width), *sums

    def add(self, strip: Strip, g: Tensor, row_sums: Tensor, col_sums: Tensor) -> None:
        """Back-propagate a strip of dF/d⟨x, y⟩."""
        rows, cols = slice(strip.r0, strip.r0 + strip.high), slice(strip.c0, None)
        _add_product(self.rows[rows], g, self.work.y[cols])
        _add_product(self.cols[cols], g.T, self.work.x[rows])
        if self.far:
            self.row_sums[rows] += row_sums.sum(dim=0)
            self.col_sums[cols] += col_sums.sum(dim=0)

    def found(self, unit: Tensor) -> tuple[Tensor, Tensor]:
        """The sums times a factor, in the dtype of the rows; no columns where they are the rows."""
        rows = self._finished(self.rows, self.row_sums, self.work.x, unit)[: self.work.n]
        if self.work.square:
            return rows, rows.new_empty(0)
        return rows, self._finished(self.cols, self.col_sums, self.work.y, unit)[: self.work.m]

    def _finished(self, sums: Tensor, far: Tensor, x: Tensor, unit: Tensor) -> Tensor:
        if self.far:
            sums.addcmul_(far[:, None], x.float(), value=-1)
        return sums.mul_(unit.float())[:, : self.work.rows.shape[1]].to(self.work.rows.dtype)


def _add_product(sums: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to sums, in float32; half precision goes to the tensor cores as it is."""
    if a.dtype == torch.float32:
        torch.addmm(sums, a, b, out=sums)
    elif a.is_cuda:
        torch.addmm(sums, a, b, out_dtype=torch.float32, out=sums)
    else:
        sums += a.float() @ b.float()
