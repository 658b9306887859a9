"""Class representatives: restricts the pairs to those that contain a representative (Can et al. 2019, section 4)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from nearfar._utils.tensors import check_tensor

__all__ = ["Anchors", "Join", "RepresentativeMask", "check_projection"]

Anchors = Literal["representatives", "others"]
Join = Callable[[Tensor], Tensor]
"""Concatenates the tensors [n, ...] of several processes."""


@dataclass(frozen=True, eq=False)
class RepresentativeMask:
    """Restricts pairs to those of a representative and another sample, each counted once, in the row of its anchor."""

    rows: Tensor  # [n] boolean, which rows are representatives
    cols: Tensor  # [m] boolean, which columns are representatives
    # whether the rows of the representatives or those of the others are the anchors
    anchors: Anchors = "representatives"
    among: bool = False  # also allow negative pairs of two representatives, if these are the anchors

    def allowed(self, rows: slice, cols: slice, same: Tensor) -> Tensor:
        """Which pairs [t, u] of a tile are allowed; `same` [t, u] marks the positive ones."""
        row, col = self.rows[rows, None], self.cols[None, cols]
        if self.anchors == "others":
            return ~row & col
        return row & (~col | ~same) if self.among else row & ~col

    def kept(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Masks of rows [n] and columns [m] that form pairs, and of never positive columns; None if trivial."""
        if self.anchors == "others":
            return ~self.rows, self.cols, None
        return (self.rows, None, self.cols) if self.among else (self.rows, ~self.cols, None)

    def gathered(self, rows: Join, cols: Join) -> "RepresentativeMask":
        """The mask for the rows and columns of all processes."""
        return replace(self, rows=rows(self.rows), cols=cols(self.cols))


def check_projection(
    labels: Tensor, ref_labels: Tensor | None, rows: Tensor | None, cols: Tensor | None, among: bool
) -> RepresentativeMask | None:
    """Validate the masks of `Relation.from_labels`; returns None if there are no representatives."""
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
