"""Shared by the losses and miners of `nearfar.pml`: decides when our code may run instead of PML's.

A class here derives from PML's class, so that settings, hooks, errors, `repr`, state dicts and `isinstance` are PML's.
Its `forward` checks that everything involved is known: the class and its methods, the distance, the reducer, the types
of the arguments. If so, our code runs with the present settings; otherwise PML's own `forward` does.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cache
from inspect import getattr_static
from typing import Any, TypeVar

import torch
from pytorch_metric_learning import distances, reducers
from torch import Tensor, nn

from nearfar._utils.shortcuts import hooked, hooked_globally
from nearfar._utils.tensors import INTEGERS, weighted
from nearfar.engines import recordings
from nearfar.engines.recordings import Given, Replays, Run
from nearfar.groups._groupings import Reduction
from nearfar.sets import Dual, Mean, UncertaintySet
from nearfar.similarity import Cosine, Dot, NegEuclidean, NegSquaredEuclidean, Similarity

Indices = tuple[Tensor, ...]  # (anchor, positive, negative), or (anchor, positive, anchor, negative)
Number = TypeVar("Number", float, Tensor)
ROWS = frozenset({Tensor, nn.Parameter})
SCALARS = (bool, int, float, str, type(None))
"""Types of settings that nearfar's losses accept; with others, such as a tensor, PML computes."""


class Mined(tuple[Tensor, ...]):
    """An index tuple like those of PML's miners, with masks [n, m] of the chosen pairs for the loss that uses it.

    The indices are (anchor, positive, anchor, negative), or (anchor, positive, negative). With masks, no pair is listed
    twice.
    """

    def __new__(
        cls, indices: Iterable[Tensor], positive: Tensor | None = None, negative: Tensor | None = None
    ) -> Mined:
        """Make a tuple of the indices."""
        made = super().__new__(cls, indices)
        made._masks = None if positive is None or negative is None else (positive, negative)
        made._versions = [each._version for each in made]
        return made

    _masks: tuple[Tensor, Tensor] | None
    _versions: list[int]

    @property
    def unchanged(self) -> bool:
        """Whether no index was modified since the miner made it."""
        return [each._version for each in self] == self._versions

    def masks(self, shape: tuple[int, int]) -> tuple[Tensor, Tensor] | None:
        """The masks for a batch of this shape; None if there are none, or if an index was modified since."""
        if self._masks is None or self._masks[0].shape != shape:
            return None
        return self._masks if self.unchanged else None


@dataclass(frozen=True, eq=False)
class Total(Mean):
    """The sum F = Σ wᵢlᵢ: the mean without its denominator. Its weights sum to the measure, not to 1."""

    def _weights(self, l: Tensor, w: Tensor, dual: Dual) -> Tensor:
        return w.to(l.dtype)

    def _value(self, l: Tensor, w: Tensor, mass: Tensor) -> Tensor:
        return weighted(l, w).sum(dim=1)


@dataclass(frozen=True, eq=False)
class Setup:
    """The distance and reducer of a PML loss, converted to nearfar's."""

    similarity: Similarity  # the distance as a similarity (larger = more similar)
    inverted: bool  # PML's distance is itself a similarity: larger numbers mean more similar
    reducer: type[nn.Module]  # the class of PML's reducer
    reduction: Reduction  # the reducer, if terms are anchors or positive pairs
    over: UncertaintySet  # the reducer, if terms are pairs or triplets

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
    """Whether a module behaves as its class defines: no hooks, no methods replaced on the instance, no statistics."""
    kind: Any = type(module)
    held = module.__dict__
    counts = held.get("collect_stats") or held.get("_record_these_stats")
    return not counts and _methods(kind).isdisjoint(held) and not hooked(module)


def is_ours(module: Any) -> bool:
    """Whether a loss or miner is exactly one of the classes of `nearfar.pml` and is plain."""
    return type(module).__module__.startswith("nearfar.pml.") and is_plain(module)


def find_similarity(distance: Any) -> tuple[Similarity, bool, tuple[Any, ...]] | None:
    """The similarity for one of PML's distances, whether larger distances mean more similar, and a key of its settings.

    None for an unknown distance.
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
    """The class of the reducer that all parts of a loss share; None if it is not a known one."""
    if type(reducer) is reducers.MultipleReducers and is_plain(reducer):
        inner = [*reducer.reducers.values()] if set(parts) <= set(reducer.reducers) else []
    else:
        inner = [reducer] if len(parts) == 1 else []  # PML rejects one reducer for several parts
    kinds = {type(each) for each in inner}
    if len(kinds) != 1 or not all(type(each) in REDUCERS and is_plain(each) for each in inner):
        return None
    (kind,) = kinds
    if kind is reducers.AvgNonZeroReducer and any(each.low != 0 or each.high is not None for each in inner):
        return None
    found: type[nn.Module] = kind
    return found


def setup(distance: Any, reducer: Any, parts: list[str]) -> tuple[Setup, tuple[Any, ...]] | None:
    """Convert a distance and a reducer, and give a key of their settings; None if one of them is unknown."""
    known, kind = find_similarity(distance), reducer_key(reducer, parts)
    if known is None or kind is None:
        return None
    similarity, inverted, key = known
    return Setup(similarity, inverted, kind, *REDUCERS[kind]), (*key, kind)


def suit(embeddings: Any, labels: Any, ref_emb: Any, ref_labels: Any) -> bool:
    """Whether our code supports these arguments: rows with integer labels, on one device, outside of tracing."""
    rows = type(embeddings) in ROWS and embeddings.ndim == 2 and embeddings.is_floating_point()
    if not rows or not _labels(labels, embeddings) or not len(embeddings) or torch.compiler.is_compiling():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._len_torch_dispatch_stack() > 0:
        return False
    if hooked_globally():
        return False
    if ref_emb is None:
        return ref_labels is None
    # PML leaves the diagonal out if `ref_labels` is the same object as `labels`
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
    """Masks [n, m] of the positive and negative pairs; without a reference, no row is paired with itself."""
    same = labels[:, None] == (labels if ref_labels is None else ref_labels)
    negative = ~same
    return (same.fill_diagonal_(False) if ref_labels is None else same), negative


def record(kept: Replays, key: Hashable, run: Run, module: Any, given: Given) -> Any:
    """The result of `run(module, given)` by a recording on a GPU; None if the call must be computed as usual."""
    (x,) = given[:1]
    device = x.device.type if x is not None else "cpu"
    if (
        device not in recordings.DEVICES - recordings.TRACED
        or torch.is_autocast_enabled(device)
        or recordings.watched()
    ):
        return None
    return kept.value((key, *recordings.call_key(given)), run, module, given)
