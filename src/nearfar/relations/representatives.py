"""`RepresentativeMask`: which pairs there are when some rows stand for their classes (Can et al. 2019, section 4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from nearfar._utils.tensors import check_tensor

__all__ = ["Anchors", "Join", "RepresentativeMask", "check_projection"]

Anchors = Literal["representatives", "others"]
Join = Callable[[Tensor], Tensor]
"""Puts the tensors [n, ...] of several processes one behind the other."""


@dataclass(frozen=True, eq=False)
class RepresentativeMask:
    """Each pair joins a representative to a row that is none, and stands once, in the row of its anchor.

    Args:
        rows: [n] boolean, the representatives among the rows.
        cols: [m] boolean, the representatives among the columns.
        anchors: whose rows are anchors.
        among: negative pairs of two representatives are there too, where these are the anchors.
    """

    rows: Tensor
    cols: Tensor
    anchors: Anchors = "representatives"
    among: bool = False

    def allowed(self, rows: slice, cols: slice, same: Tensor) -> Tensor:
        """Which pairs [t, u] of a tile there are; `same` says which are positives."""
        row, col = self.rows[rows, None], self.cols[None, cols]
        if self.anchors == "others":
            return ~row & col
        return row & (~col | ~same) if self.among else row & ~col

    def gathered(self, rows: Join, cols: Join) -> RepresentativeMask:
        """That of all ranks' rows and columns."""
        return replace(self, rows=rows(self.rows), cols=cols(self.cols))


def check_projection(
    labels: Tensor, ref_labels: Tensor | None, rows: Tensor | None, cols: Tensor | None, among: bool
) -> RepresentativeMask | None:
    """The projection of `Relation.from_labels`, its masks checked; None where no representatives came."""
    owner = "Relation.from_labels"
    if rows is None and cols is None and not among:
        return None
    if rows is None or (cols is None) != (ref_labels is None):
        raise ValueError(
            f"{owner}: representatives is a mask of the rows, and ref_representatives one of the reference rows, "
            "but not both came where both are needed; pass one for each set of labels."
        )
    ref_labels = labels if ref_labels is None else ref_labels
    cols = rows if cols is None else cols
    for name, mask, like in (("representatives", rows, labels), ("ref_representatives", cols, ref_labels)):
        check_tensor(owner, name, mask)
        if mask.dtype != torch.bool or mask.shape != like.shape:
            raise ValueError(
                f"{owner}: {name} must be a boolean mask of shape {list(like.shape)}, "
                f"but came as {mask.dtype} {list(mask.shape)}."
            )
    return RepresentativeMask(rows.to(labels.device), cols.to(labels.device), among=among)
