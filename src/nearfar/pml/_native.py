"""Shared by the losses and miners of `nearfar.pml`: decides when our code may run instead of PML's.

A class here derives from PML's class, so that settings, hooks, errors, `repr`, state dicts and `isinstance` are PML's.
Its `forward` checks that everything involved is known: the class and its methods, the distance, the reducer, the types
of the arguments. If so, our code runs with the present settings; otherwise PML's own `forward` does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cache
from inspect import getattr_static
from itertools import chain
from operator import is_
from types import FunctionType
from typing import Any, TypeVar

import torch
from pytorch_metric_learning import distances, reducers
from torch import Tensor, nn

from nearfar._utils.shortcuts import HOOKS, hooked, hooked_globally
from nearfar._utils.tensors import INTEGERS, quick_unit, safe_norms, weighted
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
NEAR = 4e-3  # distance of unit rows above which products give it to 1e-10 in float64


class Mined(tuple[Tensor, ...]):
    """An index tuple like those of PML's miners, with the miner's own answer for the loss that uses it.

    The indices are (anchor, positive, anchor, negative), or (anchor, positive, negative). The answer has a fixed shape:
    masks [n, m] of the positive and negative pairs, or which anchors [n] have both signs, and their hardest positive
    and negative column. With an answer, no pair is listed twice.
    """

    def __new__(cls, indices: Iterable[Tensor], marks: Indices = (), shape: tuple[int, int] = (0, 0)) -> Mined:
        """Make a tuple of the indices; the marks are for a batch of this shape."""
        made = super().__new__(cls, indices)
        made.carried, made._shape = marks, shape
        made._versions = [each._version for each in made]
        return made

    carried: Indices
    _shape: tuple[int, int]
    _versions: list[int]

    @property
    def unchanged(self) -> bool:
        """Whether no index was modified since the miner made it."""
        return [each._version for each in self] == self._versions

    def marks(self, shape: tuple[int, int]) -> Indices:
        """The answer for a batch of this shape; empty if there is none, or if an index was modified since."""
        return self.carried if self._shape == shape and self.unchanged else ()


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


THEIRS = "pytorch_metric_learning"
INNER = ("_modules", "_parameters", "_buffers", *HOOKS)
CLASSES: dict[type[Any], tuple[list[Any], bool]] = {}
"""By class: the attributes of its bases in PML, and whether all of their functions are PML's."""


def _bases(kind: type[Any]) -> list[Any]:
    return [vars(base) for base in kind.__mro__ if base.__module__.startswith(THEIRS)]


def _patched(kind: type[Any]) -> bool:
    """Whether a method of one of PML's classes that this class derives from was replaced."""
    bases = _bases(kind)
    if kind not in CLASSES or CLASSES[kind][0] != bases:
        theirs = all(_is_theirs(value) for base in bases for value in base.values())
        CLASSES[kind] = [*map(dict, bases)], not theirs
    return CLASSES[kind][1]


def _is_theirs(value: Any) -> bool:
    """Whether an attribute of one of PML's classes is no function, or a function of PML."""
    inner = getattr(value, "__func__", value)
    if isinstance(inner, FunctionType):
        return str(inner.__globals__.get("__name__")).startswith(THEIRS)
    return not callable(inner) or isinstance(inner, type)


class Kept:
    """What was decided for a module, valid while its attributes, parts, hooks and methods stay the same objects."""

    def __init__(self) -> None:
        self.value: Any = None
        self.told: Any = None  # what recordings depend on besides the tensors of a call
        self._read: list[Any] = []
        self._values: list[Any] = []
        self._others: list[Any] = []
        self._copies: list[dict[str, Any]] = []
        self._reads: tuple[str, ...] = ()
        self._found: list[Any] = []

    def watch(self, module: Any) -> None:
        """Hold from now on, until something changes; never with a tensor that is not among the module's `reads`."""
        every = [*module.modules()]
        read = self._read = [*map(vars, every)]
        self.refresh()
        self._others = [vars(inner)[name] for inner in every for name in INNER]
        self._others += [base for kind in {*map(type, every)} for base in _bases(kind)]
        self._copies = [*map(dict, self._others)]
        self._reads = module.reads
        self._found = [getattr(module, name) for name in self._reads]
        tensors = not self._reads and any(isinstance(value, Tensor) for value in self._values)
        learned = any(held["_parameters"] or held["_buffers"] for held in read)
        self._read = [] if tensors or learned else read

    def refresh(self) -> None:
        """Take the present attributes for those at which the decision was made."""
        self._values = [*chain.from_iterable(map(dict.values, self._read))]

    def holds(self, module: Any) -> bool:
        """Whether nothing has changed; a copy of a module decides for itself."""
        read = self._read
        if not read or read[0] is not vars(module) or self._others != self._copies:
            return False
        values = [*chain.from_iterable(map(dict.values, read))]
        same = len(values) == len(self._values) and all(map(is_, values, self._values))
        return same and (not self._reads or self._found == [getattr(module, name) for name in self._reads])

    def __reduce__(self) -> tuple[type[Kept], tuple[()]]:
        return Kept, ()


def keep(module: Any, look: Callable[[], Any]) -> Kept:
    """What `look` found at the last call of a module, or now if something has changed since."""
    kept: Kept | None = vars(module).get("_kept")
    if kept is None or not kept.holds(module):
        kept = vars(module)["_kept"] = Kept()
        kept.value = look()
        kept.watch(module)
    return kept


def is_plain(module: Any) -> bool:
    """Whether a module behaves as PML's class defines: no hooks, no replaced methods, no statistics."""
    kind: Any = type(module)
    held = module.__dict__
    counts = held.get("collect_stats") or held.get("_record_these_stats")
    return not counts and _methods(kind).isdisjoint(held) and not hooked(module) and not _patched(kind)


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


def quick_scores(similarity: Similarity, x: Tensor, y: Tensor | None) -> Tensor | None:
    """Scores [n, m] of normalized rows in fewer steps than PML's; None where they may differ by more than rounding.

    That is so for tiny rows, which PML does not scale to length 1, and for the distances of rows that are almost equal.
    """
    every = (x,) if y is None else (x, y)
    if not similarity.normalize or any(safe_norms(each.detach()) is None for each in every):
        return None
    rows = quick_unit(x)
    scores = similarity.scores(rows, rows if y is None else quick_unit(y))
    if similarity.form == "dot":
        return scores
    near = scores.detach() > (-NEAR if similarity.form == "distance" else -(NEAR**2))
    if y is None:
        return scores if torch.equal(near, torch.eye(*near.shape, dtype=torch.bool)) else None
    return None if bool(near.any()) else scores


def record(kept: Replays, key: Hashable, run: Run, module: Any, given: Given) -> Any:
    """The result of `run(module, given)` by a recording; None if the call must be computed as usual."""
    (x,) = given[:1]
    device = x.device.type if x is not None else "cpu"
    if device not in recordings.DEVICES or torch.is_autocast_enabled(device) or recordings.watched():
        return None
    return kept.value((key, *recordings.call_key(given)), run, module, given)
