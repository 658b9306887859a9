"""What the losses and the miners of `nearfar.pml` share: when our code may run in place of PML's.

A class here derives from PML's, so that settings, hooks, errors, `repr`, state dicts and `isinstance` are PML's. Its
`forward` asks whether all that would be computed is known: the class and its methods, the distance and the reducer, the
types of the arguments. If so our code runs, with the settings as they are at this call; otherwise PML's own `forward`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from inspect import getattr_static
from typing import Any, TypeVar

import torch
from pytorch_metric_learning import distances, reducers
from torch import Tensor, nn

from nearfar._utils.shortcuts import hooked, hooked_globally
from nearfar._utils.tensors import INTEGERS, weighted
from nearfar.groups.groupings import Reduction
from nearfar.sets import Dual, Mean, UncertaintySet
from nearfar.similarity import Cosine, Dot, NegEuclidean, NegSquaredEuclidean, Similarity

__all__ = ["Indices", "Setup", "find_similarity", "is_ours", "is_plain", "masks", "reducer_key", "setup", "suit"]

Indices = tuple[Tensor, ...]
"""(anchor, positive, negative), or (anchor, positive, anchor, negative)."""
Number = TypeVar("Number", float, Tensor)
ROWS = frozenset({Tensor, nn.Parameter})
SCALARS = (bool, int, float, str, type(None))
"""Types of settings with which our losses are made; with others, such as a tensor, PML computes."""


@dataclass(frozen=True, eq=False)
class Total(Mean):
    """The sum F = Σ wᵢlᵢ: the mean without its denominator; its weights sum to the measure, not to 1."""

    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor:
        return w.to(l.dtype)

    def _value(self, l: Tensor, w: Tensor, mass: Tensor) -> Tensor:
        return weighted(l, w).sum(dim=1)


@dataclass(frozen=True, eq=False)
class Setup:
    """The distance and the reducer of a loss in our terms.

    Args:
        similarity: the distance, larger = more similar.
        inverted: whether larger numbers of PML's distance mean more similar, too.
        reducer: the class of PML's reducer.
        reduction: the reducer where there is one term per anchor or positive pair.
        over: the reducer where pairs or triplets are the terms.
    """

    similarity: Similarity
    inverted: bool
    reducer: type[nn.Module]
    reduction: Reduction
    over: UncertaintySet

    def score(self, number: Number) -> Number:
        """Convert a number in the units of PML's distance, such as a margin, to a score."""
        return number if self.inverted else -number


REDUCERS: dict[type[nn.Module], tuple[Reduction, UncertaintySet]] = {
    reducers.MeanReducer: ("mean", Mean()),
    reducers.AvgNonZeroReducer: ("nonzero", Mean(zero="drop")),
    reducers.SumReducer: ("sum", Total()),
    reducers.DivisorReducer: ("mean", Mean(zero="drop")),
}


@cache
def _methods(kind: Any) -> frozenset[str]:
    return frozenset(name for name in dir(kind) if callable(getattr_static(kind, name, None)))


def is_plain(module: Any) -> bool:
    """Whether a module does what its class says: no hook, no method of the object alone, no statistics."""
    kind: Any = type(module)
    held = module.__dict__
    counts = held.get("collect_stats") or held.get("_record_these_stats")
    return not counts and _methods(kind).isdisjoint(held) and not hooked(module)


def is_ours(module: Any) -> bool:
    """Whether a loss or a miner is one of the classes of `nearfar.pml`, not a subclass of one, and is plain."""
    return type(module).__module__.startswith("nearfar.pml.") and is_plain(module)


def find_similarity(distance: Any) -> tuple[Similarity, bool, tuple[Any, ...]] | None:
    """Our similarity of a distance of PML's, whether larger numbers mean more similar, and a key of its settings.

    None for a distance that we do not know.
    """
    kind = type(distance)
    if kind not in (distances.LpDistance, distances.CosineSimilarity, distances.DotProductSimilarity):
        return None
    inverted, power = kind is not distances.LpDistance, distance.power
    if distance.p != 2 or distance.is_inverted != inverted or not is_plain(distance):
        return None
    normalize = bool(distance.normalize_embeddings)
    if inverted:
        if power != 1:
            return None
        found: Similarity = Cosine() if normalize else Dot(normalize=False)
    elif power in (1, 2):
        found = NegEuclidean(normalize=normalize) if power == 1 else NegSquaredEuclidean(normalize=normalize)
    else:
        return None
    return found, inverted, (kind, power, normalize)


def reducer_key(reducer: Any, parts: list[str]) -> type[nn.Module] | None:
    """The class of the reducer that all parts of a loss share; None where it is not one that we know."""
    if type(reducer) is reducers.MultipleReducers and is_plain(reducer):
        inner = [*reducer.reducers.values()] if set(parts) <= set(reducer.reducers) else []
    else:
        inner = [reducer] if len(parts) == 1 else []  # PML refuses one reducer for several parts
    kinds = {type(each) for each in inner}
    if len(kinds) != 1 or not all(type(each) in REDUCERS and is_plain(each) for each in inner):
        return None
    (kind,) = kinds
    if kind is reducers.AvgNonZeroReducer and any(each.low != 0 or each.high is not None for each in inner):
        return None
    found: type[nn.Module] = kind
    return found


def setup(distance: Any, reducer: Any, parts: list[str]) -> tuple[Setup, tuple[Any, ...]] | None:
    """Distance and reducer in our terms, and a key of their settings; None where one of them is not known."""
    known, kind = find_similarity(distance), reducer_key(reducer, parts)
    if known is None or kind is None:
        return None
    similarity, inverted, key = known
    return Setup(similarity, inverted, kind, *REDUCERS[kind]), (*key, kind)


def suit(embeddings: Any, labels: Any, ref_emb: Any, ref_labels: Any) -> bool:
    """Whether our code takes these arguments: rows with integer labels, on one device, and no tracing of operations."""
    rows = type(embeddings) in ROWS and embeddings.ndim == 2 and embeddings.is_floating_point()
    if not rows or not _labels(labels, embeddings) or not len(embeddings) or torch.compiler.is_compiling():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._len_torch_dispatch_stack() > 0:
        return False
    if hooked_globally():
        return False
    if ref_emb is None:
        return ref_labels is None
    # PML leaves the diagonal out where `ref_labels` is the same object as `labels`
    return (
        type(ref_emb) in ROWS
        and ref_emb.ndim == 2
        and ref_emb.shape[1] == embeddings.shape[1]
        and ref_emb.dtype == embeddings.dtype
        and ref_emb.device == embeddings.device
        and len(ref_emb) > 0
        and ref_labels is not labels
        and _labels(ref_labels, ref_emb)
    )


def _labels(labels: Any, rows: Tensor) -> bool:
    return (
        isinstance(labels, Tensor)
        and labels.dtype in INTEGERS
        and labels.shape == rows.shape[:1]
        and labels.device == rows.device
    )


def masks(labels: Tensor, ref_labels: Tensor | None) -> tuple[Tensor, Tensor]:
    """Masks [n, m] of the positive and the negative pairs; without a reference no row meets itself."""
    same = labels[:, None] == (labels if ref_labels is None else ref_labels)
    negative = ~same
    return (same.fill_diagonal_(False) if ref_labels is None else same), negative
