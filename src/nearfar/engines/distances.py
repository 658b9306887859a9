"""Distances of near rows: rows are prepared in float64 where float32 products would lose the distance of a pair.

Computed from products, a squared distance |x|² + |y|² - 2⟨x, y⟩ has an error of about 2e-7 (|x|² + |y|²), and unit rows
in float32 have one of 1e-7 per entry: a class that has collapsed to a spread of 1e-4 is lost in it. A pair is near if

    |x - y|² < 2 max |x|² / NEAR

If a batch has a near pair of two distinct samples, positive or negative, all scores are computed from float64 rows;
else float32 products are accurate to about 1e-4. The check reads values, which is free on a CPU. Elsewhere (dense calls
on a GPU, compiled calls), distances always use float64. Apple's GPUs have no float64 and keep float32 products.
"""

import torch
from torch import Tensor

from nearfar._utils.process_group import ProcessGroup
from nearfar._utils.tensors import squares
from nearfar.relations.relation import EVERYTHING, Relation
from nearfar.similarity import Similarity

__all__ = ["Raw", "distance_rows", "widen_near"]

NEAR = 256  # see the module docstring; unit rows are near at a distance below .09
FEW, EACH = 16, 8  # rows are first compared in every 8th entry, but at least 16 entries: most pairs are ruled out
ENTRIES = 2**17  # number of pairs that are checked at a time
ENTRIES_ON_GPU = 2**25  # the same on a GPU, where each check synchronizes
SMALL = 2**15  # up to this many pairs, all entries are compared at once

Raw = tuple[Tensor, Tensor | None]
"""Rows [n, d], and references [m, d] or None for the rows themselves."""
Rows = tuple[Tensor, Tensor]  # prepared rows and references


def widen_near(similarity: Similarity, x: Tensor, y: Tensor | None) -> Raw:
    """Convert raw rows to float64 if their distances would be computed from float32 products."""
    if not similarity.shifts or x.dtype != torch.float32 or x.device.type == "mps":
        return x, y
    return x.double(), None if y is None else y.double()


def distance_rows(
    similarity: Similarity, relation: Relation, raw: Raw, rows: Rows, *, look: bool, ranks: ProcessGroup | None = None
) -> Rows:
    """Prepared rows [n, d] and [m, d] as they are, or in float64 if a near pair needs it.

    Args:
        similarity: makes the scores.
        relation: which pairs count.
        raw: rows and references before `Similarity.prepare`.
        rows: the same, prepared.
        look: read the values to decide; otherwise distances always use float64 rows.
        ranks: processes that must reach the same decision.
    """
    x, y = widen_near(similarity, *raw)
    if x.dtype == raw[0].dtype:
        return rows
    if look:
        near = any_near(relation, *(z.detach() for z in rows))
        if not (near if ranks is None else bool(ranks.any(torch.tensor(near, device=x.device)))):
            return rows
    return similarity.prepared(x, y)


def any_near(relation: Relation, rows: Tensor, cols: Tensor) -> bool:
    """Whether any pair of two distinct samples is near; reads the values."""
    most = (rows * rows).sum(dim=1).amax()
    most = most if relation.square else torch.maximum(most, (cols * cols).sum(dim=1).amax())
    bound, step = most * (2 / NEAR), max(1, min(EACH, rows.shape[1] // FEW))
    entries = ENTRIES if rows.device.type == "cpu" else ENTRIES_ON_GPU
    tall = max(16, entries // max(1, len(cols)))
    if len(rows) * len(cols) <= SMALL:
        return _near(relation, EVERYTHING, rows, cols, bound)
    some = rows[:, ::step].contiguous()
    others = some if relation.square else cols[:, ::step].contiguous()
    for first in range(0, len(rows), tall):
        here = slice(first, first + tall)
        if _near(relation, here, some, others, bound) and (step == 1 or _near(relation, here, rows, cols, bound)):
            return True
    return False


def _near(relation: Relation, here: slice, rows: Tensor, cols: Tensor, bound: Tensor) -> bool:
    """Whether any squared distance between the rows `here` and their columns is below a bound."""
    # of a symmetric matrix, only the part right of the diagonal
    there = slice(here.start, None) if relation.square else EVERYTHING
    if here == EVERYTHING:
        near = squares(rows, cols) < bound
    else:
        x, y = rows[here], cols[there]
        by_col = (y * y).sum(dim=1)
        by_row = by_col[: len(x)] if relation.square else (x * x).sum(dim=1)
        near = torch.addmm(by_col, x, y.T, alpha=-2) < (bound - by_row)[:, None]
    if relation.square:
        # at the rows themselves alone, in the part right of the diagonal
        return not torch.equal(near, torch.eye(*near.shape, dtype=torch.bool, device=near.device))
    if not bool(near.any()):
        return False
    tile = relation.tile(here, there)  # a row may be its own reference
    return bool((near & ((tile.positive > 0) | (tile.negative > 0))).any())
