"""Options shared by all relations: sample ids, weights, representatives; and their validation."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar._utils.tensors import as_bytes, check_tensor, mask_of, readable
from nearfar.relations.representatives import Join, RepresentativeMask

__all__ = [
    "RelationOptions",
    "check_hot",
    "check_ids",
    "check_matrix",
    "check_memory",
    "check_weights",
    "count_orders",
    "count_width",
]


@dataclass(frozen=True, eq=False)
class RelationOptions:
    """The options common to the constructors of `Relation`; see `Relation.from_labels`."""

    ids: Tensor | None = None
    ref_ids: Tensor | None = None
    weights: Tensor | None = None
    ref_weights: Tensor | None = None
    width: int | None = None
    projection: RepresentativeMask | None = None
    reference_starts_with_batch: bool = False

    def gathered(self, rows: Join, cols: Join, square: bool) -> "RelationOptions":
        """The options for the rows and columns of all processes; drops `width`, which holds for one process only."""
        if self.weights is not None and self.weights.ndim == 2:
            raise ValueError(
                "Distributed: pair weights [n, m] say nothing of pairs across ranks; give sample weights [n] instead."
            )
        if self.reference_starts_with_batch:
            raise ValueError(
                "Distributed: a memory goes inside, not around: write Distributed(CrossBatchMemory(loss, ...))."
            )
        return RelationOptions(
            None if self.ids is None else rows(self.ids),
            None if self.ref_ids is None else cols(self.ref_ids),
            None if self.weights is None else rows(self.weights),
            None if self.ref_weights is None or square else cols(self.ref_weights),
            projection=None if self.projection is None else self.projection.gathered(rows, cols),
        )


def check_hot(hot: Tensor, ref_hot: Tensor | None) -> None:
    """Validate multi-hot labels: matrices of the same classes."""
    for name, x in (("hot", hot), ("ref_hot", ref_hot)):
        if x is not None:
            check_tensor("Relation.from_multilabel", name, x)
        if x is not None and x.ndim != 2:
            raise ValueError(
                f"Relation.from_multilabel: {name} must have shape [n, classes], but came with {list(x.shape)}."
            )
    if ref_hot is not None and ref_hot.shape[1] != hot.shape[1]:
        raise ValueError(
            f"Relation.from_multilabel: hot and ref_hot must have the same classes, but came with "
            f"{hot.shape[1]} and {ref_hot.shape[1]} columns."
        )


def check_matrix(same: Tensor, valid: Tensor | None, square: bool) -> None:
    """Validate the matrices of `Relation.from_matrix`: boolean, of one shape, square if there is no reference."""
    for name, x in (("same", same), ("valid", same if valid is None else valid)):
        check_tensor("Relation.from_matrix", name, x)
        if x.dtype != torch.bool or x.ndim != 2 or x.shape != same.shape:
            raise ValueError(
                f"Relation.from_matrix: {name} must be a boolean [n, m] matrix like same {list(same.shape)}, "
                f"but came as {x.dtype} {list(x.shape)}."
            )
    if square and same.shape[0] != same.shape[1]:
        raise ValueError(
            f"Relation.from_matrix: same must be square, but came with shape {list(same.shape)}; "
            "pass square=False when the columns are a reference."
        )


def check_ids(
    shape: tuple[int, int], square: bool, ids: Tensor | None, ref_ids: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Validate sample ids: one for each row and column, or none. Returns them, or None if they are not needed."""
    if square and ref_ids is not None:
        raise ValueError(
            "Relation: ref_ids came without a reference; pass ref_labels (or ref_emb) too, or leave it out."
        )
    if square:
        return None, None  # without a reference, positions identify the samples
    if (ids is None) != (ref_ids is None):
        raise ValueError("Relation: ids and ref_ids belong together, but only one of them came; pass both or neither.")
    if ids is not None and ref_ids is not None and (len(ids), len(ref_ids)) != shape:
        raise ValueError(
            f"Relation: ids and ref_ids must have {shape[0]} and {shape[1]} entries, "
            f"but came with {len(ids)} and {len(ref_ids)}."
        )
    return ids, ref_ids


def check_weights(
    shape: tuple[int, int], square: bool, weights: Tensor | None, ref_weights: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Validate sample or pair weights: finite and nonnegative. Returns the weights of rows and columns."""
    if weights is None:
        if ref_weights is not None:
            raise ValueError("Relation: ref_weights came without weights; pass both, or neither.")
        return None, None
    if ref_weights is not None and (square or weights.ndim == 2):
        raise ValueError("Relation: ref_weights go with sample weights [n] and a reference; leave them out here.")
    if weights.ndim == 1 and square:
        ref_weights = weights
    sizes = tuple(weights.shape) if weights.ndim == 2 or ref_weights is None else (len(weights), len(ref_weights))
    floating = weights.is_floating_point() and (ref_weights is None or ref_weights.is_floating_point())
    if sizes != shape or not floating:
        raise ValueError(
            f"Relation: weights must be floating, of shape {list(shape)} for pairs or [{shape[0]}] for samples "
            f"(with ref_weights [{shape[1]}]), but came as {weights.dtype} {list(weights.shape)}."
        )
    for given in (weights, ref_weights):
        if given is None or not given.numel() or not readable(given):
            continue
        least, most = given.aminmax()  # reduces NaN too; a mask of all pairs takes ten times as long
        if not bool((least >= 0) & (most < math.inf)):
            raise ValueError("Relation: weights must be finite and not negative; a pair without weight is absent.")
    return weights, ref_weights


def check_memory(labels: Tensor, ref_labels: Tensor | None) -> None:
    """Require that a reference that starts with the batch is long enough."""
    if ref_labels is None or len(ref_labels) < len(labels):
        raise ValueError(
            "Relation.from_labels: reference_starts_with_batch=True says that the first reference rows are the "
            "rows themselves, but there are fewer of them than rows; put the rows in front of the reference."
        )


def count_width(positive: Tensor, columns: int, width: int | None) -> int:
    """Maximum number of positives per row in a measure [n, m]: counted on a CPU, else `width`, else m."""
    limit = columns if width is None else min(width, columns)
    if not readable(positive) or not positive.numel():
        return limit
    widest = int(as_bytes(mask_of(positive)).sum(dim=1, dtype=torch.int32).amax())
    if limit < widest:
        raise ValueError(
            f"Relation: width is {limit}, but a row has {widest} positive columns; raise it, or leave it out on a CPU."
        )
    return widest if width is None else limit


def count_orders(ids: Tensor | None, ref_ids: Tensor | None) -> int | Tensor:
    """How often each unordered pair occurs: 2 if the reference contains exactly the query samples, else 1.

    Computed on the device, without synchronization.
    """
    if ids is None or ref_ids is None or len(ids) != len(ref_ids):
        return 1
    return 1 + (ids.sort().values == ref_ids.sort().values).all().to(torch.int64)
