"""Native losses against PML's, in value and gradient: the table of docs/start/from-pml.md, and what docstrings say."""

from __future__ import annotations

import math

import pytest
import torch
from pytorch_metric_learning import distances, losses, miners, reducers

import nearfar as nf

L = nf.losses
CLASSES, WIDTH = 5, 6
SEEDS = pytest.mark.parametrize("seed", range(3))


def batch(seed, sizes=(2, 5, 1, 2, 3)):
    """Rows around the centers of classes of these sizes, in any order."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.cat([torch.full((size,), name) for name, size in enumerate(sizes)])
    labels = labels[torch.randperm(len(labels), generator=generator)]
    pull = torch.randn(CLASSES, WIDTH, dtype=torch.float64, generator=generator)[labels]
    noise = torch.randn(len(labels), WIDTH, dtype=torch.float64, generator=generator)
    return (noise + pull).requires_grad_(), labels


NATIVE = {
    "ContrastiveLoss": lambda: L.Contrastive(pos_margin=0, neg_margin=1, power=1, reduction="nonzero"),
    "TripletMarginLoss": lambda: L.Triplet(margin=0.05, swap=False, reduction="nonzero"),
    "MultiSimilarityLoss": lambda: L.MultiSimilarity(alpha=2, beta=50, threshold=0.5, miner=None),
    "LiftedStructureLoss": lambda: L.LiftedStructure(margin=1),
    "GeneralizedLiftedStructureLoss": lambda: L.GeneralizedLifted(margin=1),
    "NPairsLoss": lambda: L.NPair(l2=0, similarity=nf.similarity.Dot(normalize=True)),
    "AngularLoss": lambda: L.Angular(degrees=40),
    "NTXentLoss": lambda: L.NTXent(temperature=0.07),
    "SupConLoss": lambda: L.SupCon(temperature=0.1),
    "CircleLoss": lambda: L.Circle(margin=0.4, scale=80),
    "ProxyNCALoss": lambda: L.ProxyNCA(CLASSES, WIDTH, scale=1),
    "ProxyAnchorLoss": lambda: L.ProxyAnchor(CLASSES, WIDTH, margin=0.1, scale=32),
    "ArcFaceLoss": lambda: L.ArcFace(CLASSES, WIDTH, margin=math.radians(28.6), scale=64),
    "CosFaceLoss": lambda: L.CosFace(CLASSES, WIDTH, margin=0.35, scale=64),
    "NormalizedSoftmaxLoss": lambda: L.NormalizedSoftmax(CLASSES, WIDTH, temperature=0.05),
    "SubCenterArcFaceLoss": lambda: L.SubCenterArcFace(CLASSES, WIDTH, centers=3, margin=math.radians(28.6), scale=64),
    "SoftTripleLoss": lambda: L.SoftTriple(CLASSES, WIDTH, centers=10, scale=20, gamma=0.1, margin=0.01),
    "TupletMarginLoss": lambda: L.TupletMargin(margin=math.radians(5.73), scale=64),
    "NCALoss": lambda: L.NCA(scale=1),
    "FastAPLoss": lambda: L.FastAP(bins=10),
}
"""Rows of the page: PML's loss without arguments, and what it is natively."""
RAW_DOT = distances.DotProductSimilarity(normalize_embeddings=False)
DOCSTRINGS = {
    "contrastive": (lambda: L.Contrastive(power=1, reduction="nonzero"), losses.ContrastiveLoss, None),
    "lifted": (L.LiftedStructure, losses.LiftedStructureLoss, None),
    "generalized lifted": (L.GeneralizedLifted, losses.GeneralizedLiftedStructureLoss, None),
    "multi-similarity": (lambda: L.MultiSimilarity(miner=None), losses.MultiSimilarityLoss, None),
    "multi-similarity mined": (
        L.MultiSimilarity,
        losses.MultiSimilarityLoss,
        lambda: miners.MultiSimilarityMiner(0.1),
    ),
    "triplet": (lambda: L.Triplet(reduction="nonzero"), losses.TripletMarginLoss, None),
    "triplet hard": (
        lambda: L.Triplet(mining="hard", reduction="nonzero"),
        losses.TripletMarginLoss,
        miners.BatchHardMiner,
    ),
    "triplet semi-hard": (
        lambda: L.Triplet(mining="semihard", margin=0.3, reduction="nonzero"),
        lambda: losses.TripletMarginLoss(0.3),
        lambda: miners.TripletMarginMiner(0.3, "semihard"),
    ),
    "n-pair": (lambda: L.NPair(l2=0.0), lambda: losses.NPairsLoss(distance=RAW_DOT), None),
    "angular": (L.Angular, losses.AngularLoss, None),
    "nt-xent": (L.NTXent, losses.NTXentLoss, None),
    "sup-con": (L.SupCon, losses.SupConLoss, None),
    "circle": (L.Circle, losses.CircleLoss, None),
    "proxy-nca": (lambda: L.ProxyNCA(CLASSES, WIDTH), lambda: losses.ProxyNCALoss(CLASSES, WIDTH), None),
    "proxy-anchor": (lambda: L.ProxyAnchor(CLASSES, WIDTH), lambda: losses.ProxyAnchorLoss(CLASSES, WIDTH), None),
    "arc-face": (
        lambda: L.ArcFace(CLASSES, WIDTH, margin=math.radians(28.6)),
        lambda: losses.ArcFaceLoss(CLASSES, WIDTH, margin=28.6),
        None,
    ),
}
"""Losses with the defaults of nearfar, or with a miner, whose docstring says that they equal PML's."""


def check(ours, theirs, seed, miner=None):
    """Compare value and gradient; PML's vectors of classes become ours."""
    embeddings, labels = batch(seed)
    angular = isinstance(theirs, losses.AngularLoss)
    if angular:  # PML normalizes anchors and positives, but not negatives
        embeddings = torch.nn.functional.normalize(embeddings).detach().requires_grad_()
    if hasattr(ours, "proxies"):
        with torch.no_grad():
            (vectors,) = theirs.parameters()
            given = ours.proxies.reshape(-1, WIDTH)
            vectors.copy_(given if vectors.shape == given.shape else given.T)
    value, wanted = ours(embeddings, labels), theirs(embeddings, labels, miner and miner()(embeddings, labels))
    slope, expected = (torch.autograd.grad(x, embeddings)[0] for x in (value, wanted))
    if angular:  # ... so its gradient of a negative has a part along the row
        expected = expected - (expected * embeddings).sum(dim=1, keepdim=True) * embeddings
    assert value.item() == pytest.approx(wanted.item(), rel=1e-9, abs=1e-12)
    torch.testing.assert_close(slope, expected, rtol=1e-7, atol=1e-9)
    assert expected.abs().max() > 1e-4


@SEEDS
@pytest.mark.parametrize("name", NATIVE)
def test_native_recipe(name, seed):
    ours = NATIVE[name]().double()
    vectors = {"num_classes": CLASSES, "embedding_size": WIDTH} if hasattr(ours, "proxies") else {}
    check(ours, getattr(losses, name)(**vectors).double(), seed)


@SEEDS
@pytest.mark.parametrize("name", DOCSTRINGS)
def test_equals_pytorch_metric_learning(name, seed):
    ours, theirs, miner = DOCSTRINGS[name]
    check(ours().double(), theirs().double(), seed, miner)


@SEEDS
def test_margin_is_pytorch_metric_learnings_with_weights(seed):
    """PML counts a positive pair once per negative pair of its anchor and the reverse: pair weights say the same."""
    embeddings, labels = batch(seed, (3, 3, 4))
    positive = labels[:, None] == labels
    positives, negatives = positive.sum(dim=1, keepdim=True) - 1.0, (~positive).sum(dim=1, keepdim=True) * 1.0
    weights = torch.where(positive, negatives, positives).double()
    relation = nf.Relation.from_labels(labels, weights=weights)
    value = L.Margin(learn=False)(embeddings, relation)
    theirs = losses.MarginLoss(0.2, 1.2, reducer=reducers.MeanReducer())(embeddings, labels)
    assert value.item() == pytest.approx(theirs.item() / 2, rel=1e-6)


OWN_READING = ("LiftedStructureLoss", "AngularLoss")
"""Native forms that read a tuple otherwise than PML (docs/start/from-pml.md)."""
WEIGHING = {"NCALoss", "FastAPLoss", "ProxyNCALoss", "ProxyAnchorLoss", "ArcFaceLoss", "CosFaceLoss"}
WEIGHING |= {"NormalizedSoftmaxLoss", "SubCenterArcFaceLoss", "SoftTripleLoss"}
"""A tuple weights rows here."""
LISTED = [name for name in NATIVE if name not in {*OWN_READING, "NPairsLoss", *WEIGHING}]


def listed(kind, labels, seed):
    """A tuple of pairs or of triplets, some of them several times."""
    rng = torch.Generator().manual_seed(seed)
    same, other = labels[:, None] == labels, ~torch.eye(len(labels), dtype=torch.bool)
    positive, negative = same & other, ~same

    def some(found, count):
        chosen = torch.randint(len(found[0]), (count,), generator=rng)
        return tuple(part[torch.cat([chosen, chosen[: count // 2]])] for part in found)

    if kind == "triplets":
        return some(torch.where(positive[:, :, None] & negative[:, None, :]), 14)
    (a, p), (b, n) = some(torch.where(positive), 9), some(torch.where(negative), 17)
    # each anchor has a negative pair: native losses leave those without out, PML's SupCon does not
    every = torch.arange(len(labels))
    return a, p, torch.cat([b, every]), torch.cat([n, negative.int().argmax(dim=1)])


@pytest.mark.parametrize("kind", ["pairs", "triplets"])
@pytest.mark.parametrize("name", LISTED)
def test_native_recipe_with_a_tuple_that_repeats_itself(name, kind):
    """Losses that PML makes of masks count a pair once, those that it makes of lists as often as it is listed."""
    for seed in range(5):
        embeddings, labels = batch(seed)
        indices = listed(kind, labels, seed)
        native, other = NATIVE[name](), getattr(losses, name)()
        found, wanted = native(embeddings, labels, indices), other(embeddings, labels, indices)
        assert found.item() == pytest.approx(wanted.item(), rel=1e-9, abs=1e-12)
        assert native.explain(embeddings, labels, indices).value.item() == pytest.approx(found.item(), rel=1e-12)
        slopes = (
            [torch.autograd.grad(x, embeddings)[0] for x in (found, wanted)] if embeddings.requires_grad else [0, 0]
        )
        torch.testing.assert_close(*slopes, rtol=1e-7, atol=1e-9)
