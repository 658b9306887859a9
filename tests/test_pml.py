"""nearfar.pml against pytorch-metric-learning 2.9: the same names, arguments, values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import pytorch_metric_learning as theirs
import torch
from pytorch_metric_learning import distances, losses, miners, reducers, regularizers  # noqa: F401 - loads them
from torch.nn.functional import normalize

import nearfar.pml as ours

TOLERANCE = 1e-9
CLASSES, WIDTH = 5, 6
SIZES = ((4, 3, 2, 1), (2, 5, 1, 2, 3), (7, 6, 8, 1, 5))
"""Class sizes: unequal, with a singleton; the last is beyond 25 rows, where PML computes distances in another way."""


@dataclass(frozen=True)
class Row:
    """A loss and how to set it up, for either library together."""

    name: str
    settings: Callable[[ModuleType], dict[str, Any]] = lambda m: {}
    label: str = "default"
    args: tuple[Any, ...] = ()
    reference: bool = True
    unit: bool = False
    close: float = TOLERANCE

    @property
    def id(self) -> str:
        return f"{self.name}-{self.label}"

    def make(self, library: ModuleType) -> torch.nn.Module:
        return getattr(library.losses, self.name)(*self.args, **self.settings(library))


def cosine(m, **more):
    return {"distance": m.distances.CosineSimilarity(), **more}


def squared(m, **more):
    return {"distance": m.distances.LpDistance(power=2), **more}


def raw(m, **more):
    return {"distance": m.distances.LpDistance(normalize_embeddings=False), **more}


def dot(m, **more):
    return {"distance": m.distances.DotProductSimilarity(normalize_embeddings=False), **more}


def mean(m, **more):
    return {"reducer": m.reducers.MeanReducer(), **more}


def total(m, **more):
    return {"reducer": m.reducers.SumReducer(), **more}


def nonzero(m, **more):
    return {"reducer": m.reducers.AvgNonZeroReducer(), **more}


def length(m, **more):
    return {"embedding_regularizer": m.regularizers.LpRegularizer(power=2), "embedding_reg_weight": 0.02, **more}


PROXIES = {"args": (CLASSES, WIDTH), "reference": False}
# beyond 20 PML's softplus is the identity, ours from 40 on: 2e-9
SOFTPLUS = {"close": 1e-8}

ROWS = (
    Row("ContrastiveLoss"),
    Row("ContrastiveLoss", lambda m: {"pos_margin": 0.2, "neg_margin": 1.3}, "margins"),
    Row("ContrastiveLoss", lambda m: cosine(m, pos_margin=0.9, neg_margin=0.1), "cosine"),
    Row("ContrastiveLoss", lambda m: squared(m, **mean(m)), "squared-mean"),
    Row("ContrastiveLoss", lambda m: raw(m, neg_margin=3, **total(m)), "raw-sum"),
    Row("TripletMarginLoss"),
    Row("TripletMarginLoss", lambda m: {"margin": 0.3, "swap": True}, "swap", reference=False),
    Row("TripletMarginLoss", lambda m: cosine(m, margin=0.2, smooth_loss=True), "cosine-smooth"),
    Row("TripletMarginLoss", lambda m: cosine(m, margin=0.2, swap=True), "cosine-swap", reference=False),
    Row("TripletMarginLoss", lambda m: raw(m, **mean(m)), "raw-mean"),
    Row("TripletMarginLoss", total, "sum"),
    Row("MultiSimilarityLoss"),
    Row("MultiSimilarityLoss", lambda m: {"alpha": 3, "beta": 10, "base": 0.2}, "settings"),
    Row("MultiSimilarityLoss", lambda m: squared(m, base=1.1, **total(m)), "squared-sum"),
    Row("MultiSimilarityLoss", nonzero, "nonzero"),
    Row("LiftedStructureLoss"),
    Row("LiftedStructureLoss", lambda m: {"neg_margin": 0.3, "pos_margin": 0.6, **nonzero(m)}, "margins-nonzero"),
    Row("LiftedStructureLoss", lambda m: cosine(m, neg_margin=0.4, pos_margin=0.9, **total(m)), "cosine-sum"),
    Row("GeneralizedLiftedStructureLoss"),
    Row("GeneralizedLiftedStructureLoss", lambda m: {"neg_margin": -0.7, "pos_margin": 0.4, **nonzero(m)}, "nonzero"),
    Row("GeneralizedLiftedStructureLoss", lambda m: cosine(m, neg_margin=0.4, pos_margin=0.1), "cosine"),
    Row("NPairsLoss", reference=False),
    Row("NPairsLoss", lambda m: dot(m, **length(m)), "dot-regularized", reference=False),
    Row("NPairsLoss", lambda m: {"distance": m.distances.LpDistance(), **total(m)}, "distance-sum", reference=False),
    Row("AngularLoss", unit=True),
    Row("AngularLoss", lambda m: {"alpha": 30}, "angle", unit=True),
    Row("AngularLoss", lambda m: {"alpha": 45, **total(m)}, "sum", unit=True),
    Row("NTXentLoss"),
    Row("NTXentLoss", lambda m: {"temperature": 0.5, **total(m)}, "temperature-sum"),
    Row("NTXentLoss", lambda m: {"distance": m.distances.LpDistance(), "temperature": 0.2}, "distance"),
    Row("SupConLoss"),
    Row("SupConLoss", lambda m: {"temperature": 0.5, **mean(m)}, "temperature-mean"),
    Row("SupConLoss", lambda m: raw(m, **total(m)), "raw-sum"),
    Row("CircleLoss", **SOFTPLUS),
    Row("CircleLoss", lambda m: {"m": 0.25, "gamma": 20}, "settings", **SOFTPLUS),
    Row("CircleLoss", lambda m: {"gamma": 5, **mean(m)}, "mean", **SOFTPLUS),
    Row("MarginLoss"),
    Row("MarginLoss", lambda m: {"margin": 0.1, "beta": 0.9, "learn_beta": True, "nu": 0.3}, "learnt"),
    Row("MarginLoss", lambda m: {"learn_beta": True, "nu": 0.3, "num_classes": CLASSES}, "classes"),
    Row("MarginLoss", lambda m: {"learn_beta": True, "nu": 0.3, "num_classes": CLASSES, **mean(m)}, "classes-mean"),
    Row("MarginLoss", lambda m: {"num_classes": CLASSES, "learn_beta": True, "nu": 0.1, **total(m)}, "classes-sum"),
    Row("MarginLoss", lambda m: cosine(m, beta=0.4, **mean(m)), "cosine-mean"),
    Row("ProxyNCALoss", **PROXIES),
    Row("ProxyNCALoss", lambda m: cosine(m, softmax_scale=3, **total(m)), "cosine-sum", **PROXIES),
    Row(
        "ProxyNCALoss",
        lambda m: {"weight_regularizer": m.regularizers.LpRegularizer(), **nonzero(m)},
        "weights",
        **PROXIES,
    ),
    Row("ProxyAnchorLoss", **PROXIES),
    Row("ProxyAnchorLoss", lambda m: {"margin": 0.3, "alpha": 8, **mean(m)}, "mean", **PROXIES),
    Row("ProxyAnchorLoss", lambda m: squared(m, **total(m)), "squared-sum", **PROXIES),
    Row("ProxyAnchorLoss", nonzero, "nonzero", **PROXIES),
    Row("ArcFaceLoss", **PROXIES),
    Row("ArcFaceLoss", lambda m: {"margin": 50, "scale": 10, **length(m)}, "settings", **PROXIES),
    Row(
        "ArcFaceLoss",
        lambda m: {"weight_regularizer": m.regularizers.LpRegularizer(), **total(m)},
        "weights",
        **PROXIES,
    ),
)
rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)


def batch(seed, sizes=SIZES[0]):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.cat([torch.full((size,), name) for name, size in enumerate(sizes)])
    labels = labels[torch.randperm(len(labels), generator=generator)]
    pull = torch.randn(CLASSES, WIDTH, dtype=torch.float64, generator=generator)[labels]
    noise = torch.randn(len(labels), WIDTH, dtype=torch.float64, generator=generator)
    return (noise + pull).requires_grad_(), labels


def twins(row):
    """The loss of either library, with the same parameters."""
    torch.manual_seed(3)
    other = row.make(theirs)
    mine = row.make(ours)
    mine.load_state_dict(other.state_dict())  # checkpoints move over too
    return mine.double(), other.double()


def measured(row, loss, embeddings, labels, *rest, ref_emb=None, ref_labels=None):
    """The value, and the gradients of embeddings, reference and parameters."""
    leaves = [embeddings, *([] if ref_emb is None else [ref_emb])]
    shown = [normalize(leaf) if row.unit else leaf for leaf in leaves]
    reference = {} if ref_emb is None else {"ref_emb": shown[1], "ref_labels": ref_labels}
    value = loss(shown[0], labels, *rest, **reference)
    slopes = torch.autograd.grad(value, [*leaves, *loss.parameters()], allow_unused=True, materialize_grads=True)
    return value, slopes


def agree(row, embeddings, labels, *rest, **reference):
    mine, other = twins(row)
    got, slopes = measured(row, mine, embeddings, labels, *rest, **reference)
    want, wanted = measured(row, other, embeddings, labels, *rest, **reference)
    assert abs(got.item() - want.item()) < row.close * max(1.0, abs(want.item())), (got.item(), want.item())
    for slope, expected in zip(slopes, wanted, strict=True):
        torch.testing.assert_close(slope, expected, atol=row.close, rtol=row.close)
    return want


@rows
@pytest.mark.parametrize(("seed", "sizes"), [(0, SIZES[0]), (1, SIZES[1]), (2, SIZES[2])])
def test_value_and_gradient(row, seed, sizes):
    want = agree(row, *batch(seed, sizes))
    assert want.item() > 0


MINERS = {
    "similar": miners.MultiSimilarityMiner(),
    "hard": miners.BatchHardMiner(),
    "semihard": miners.TripletMarginMiner(margin=0.4, type_of_triplets="semihard"),
    "one-sided": miners.PairMarginMiner(pos_margin=0.9, neg_margin=1.0),
}


@rows
@pytest.mark.parametrize("kind", MINERS)
def test_index_tuples(row, kind):
    embeddings, labels = batch(5, SIZES[1])
    indices = MINERS[kind](embeddings, labels)
    assert all(len(part) > 2 for part in indices)
    agree(row, embeddings, labels, indices)


@rows
def test_pairs_listed_twice(row):
    """Lists count them twice, masks once: each loss as in PML."""
    embeddings, labels = batch(6)
    for indices in (miners.BatchHardMiner()(embeddings, labels), miners.MultiSimilarityMiner()(embeddings, labels)):
        agree(row, embeddings, labels, tuple(torch.cat([part, part[: len(part) // 2]]) for part in indices))


@rows
def test_index_tuples_with_a_side_missing(row):
    """Nothing listed; positive pairs only; negative pairs only; negative pairs of one class only."""
    embeddings, labels = batch(7)
    none = torch.zeros(0, dtype=torch.int64)
    same = labels[:, None] == labels[None, :]
    a, p = torch.nonzero(same & ~torch.eye(len(labels), dtype=torch.bool), as_tuple=True)
    b, n = torch.nonzero(~same, as_tuple=True)
    first = labels[b] == 0
    for indices in ((none, none, none), (a, p, none, none), (none, none, b, n), (a, p, b[first], n[first])):
        agree(row, embeddings, labels, indices)


# with a reference PML's lifted structure compares a reference row with a batch row: see test_pml_differences.py
with_reference = pytest.mark.parametrize(
    "row", [row for row in ROWS if row.reference and row.name != "LiftedStructureLoss"], ids=lambda row: row.id
)


@with_reference
@pytest.mark.parametrize("kind", [None, "similar", "semihard", "one-sided"])
def test_reference(row, kind):
    embeddings, labels = batch(8)
    ref_emb, ref_labels = batch(9, SIZES[1])
    rest = [] if kind is None else [MINERS[kind](embeddings, labels, ref_emb, ref_labels)]
    agree(row, embeddings, labels, *rest, ref_emb=ref_emb, ref_labels=ref_labels)


@with_reference
def test_reference_with_the_same_labels(row):
    """Two views of one batch: labels.clone() and labels mean the same, and the value is that of PML's clone."""
    embeddings, labels = batch(10)
    ref_emb = (embeddings + 0.3 * batch(11)[0]).detach().requires_grad_()
    agree(row, embeddings, labels, ref_emb=ref_emb, ref_labels=labels.clone())
    mine, _ = twins(row)
    copied = measured(row, mine, embeddings, labels, ref_emb=ref_emb, ref_labels=labels.clone())
    shared = measured(row, mine, embeddings, labels, ref_emb=ref_emb, ref_labels=labels)
    assert copied[0].item() == shared[0].item()
    torch.testing.assert_close(copied[1], shared[1], atol=0, rtol=0)


@with_reference
def test_reference_that_is_the_batch(row):
    """With ids, no row meets itself, and the value is that of the plain form."""
    embeddings, labels = batch(12)
    mine, _ = twins(row)
    ids = torch.arange(len(labels))
    x = normalize(embeddings) if row.unit else embeddings
    plain = mine(x, labels)
    given = mine(x, labels, ref_emb=x.clone(), ref_labels=labels.clone(), ids=ids, ref_ids=ids)
    assert given.item() == pytest.approx(plain.item(), abs=1e-9)


@pytest.mark.parametrize("name", ["ContrastiveLoss", "TripletMarginLoss", "NTXentLoss", "SupConLoss", "MarginLoss"])
def test_index_tuple_instead_of_labels(name):
    embeddings, labels = batch(13)
    ref_emb, ref_labels = batch(14, SIZES[1])
    row = Row(name)
    agree(row, embeddings, None, MINERS["semihard"](embeddings, labels))
    indices = MINERS["semihard"](embeddings, labels, ref_emb, ref_labels)
    agree(row, embeddings, None, indices, ref_emb=ref_emb, ref_labels=None)
    agree(row, embeddings, labels, indices, ref_emb=ref_emb, ref_labels=None)


FURTHER = {
    "BaseLossWrapper",
    "CosFaceLoss",
    "FastAPLoss",
    "GenericPairLoss",
    "IntraPairVarianceLoss",
    "LargeMarginSoftmaxLoss",
    "MultipleLosses",
    "NCALoss",
    "NormalizedSoftmaxLoss",
    "RankedListLoss",
    "SelfSupervisedLoss",
    "SmoothAPLoss",
    "SoftTripleLoss",
    "SphereFaceLoss",
    "SubCenterArcFaceLoss",
    "TupletMarginLoss",
    "VICRegLoss",
}
"""These are compared in test_pml_further.py."""


def test_every_loss_is_compared():
    names = set(ours.losses.__all__) - {"CrossBatchMemory"} - FURTHER  # a wrapper: tests/test_pml_memory.py
    assert {row.name for row in ROWS} == names
    for name in names:
        assert sum(row.name == name for row in ROWS) >= 3
