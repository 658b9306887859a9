"""Where a docstring says "equals pytorch-metric-learning's": that, in value and gradient, on nearfar's own classes."""

from __future__ import annotations

import math

import pytest
import torch
from pytorch_metric_learning import distances, losses, miners, reducers
from table import CLASSES, DIM, PROXIES, random_batch, tensors

import nearfar as nf

L = nf.losses
proxies = torch.tensor(PROXIES)


def proxied(loss, name):
    """A loss with the table's proxies in `name`."""
    loss = loss.double()
    with torch.no_grad():
        held = getattr(loss, name)
        held.copy_(proxies if held.shape == proxies.shape else proxies.T)
    return loss


PAIRS = {
    "contrastive": (lambda: L.Contrastive(power=1, reduction="nonzero"), losses.ContrastiveLoss, None),
    "lifted": (L.LiftedStructure, losses.LiftedStructureLoss, None),
    "generalized lifted": (L.GeneralizedLifted, losses.GeneralizedLiftedStructureLoss, None),
    "multi-similarity": (lambda: L.MultiSimilarity(miner=None), lambda: losses.MultiSimilarityLoss(2, 50, 0.5), None),
    "multi-similarity mined": (
        L.MultiSimilarity,
        lambda: losses.MultiSimilarityLoss(2, 50, 0.5),
        lambda: miners.MultiSimilarityMiner(0.1),
    ),
    "triplet": (
        lambda: L.Triplet(reduction="nonzero"),
        lambda: losses.TripletMarginLoss(0.05),
        None,
    ),
    "triplet hard": (
        lambda: L.Triplet(mining="hard", reduction="nonzero"),
        lambda: losses.TripletMarginLoss(0.05),
        miners.BatchHardMiner,
    ),
    "triplet semi-hard": (
        lambda: L.Triplet(mining="semihard", margin=0.3, reduction="nonzero"),
        lambda: losses.TripletMarginLoss(0.3),
        lambda: miners.TripletMarginMiner(0.3, "semihard"),
    ),
    "n-pair": (
        lambda: L.NPair(l2=0.0),
        lambda: losses.NPairsLoss(distance=distances.DotProductSimilarity(normalize_embeddings=False)),
        None,
    ),
    "angular": (L.Angular, losses.AngularLoss, None),
    "nt-xent": (L.NTXent, losses.NTXentLoss, None),
    "sup-con": (L.SupCon, losses.SupConLoss, None),
    "circle": (L.Circle, losses.CircleLoss, None),
    "proxy-nca": (
        lambda: proxied(L.ProxyNCA(CLASSES, DIM), "proxies"),
        lambda: proxied(losses.ProxyNCALoss(CLASSES, DIM), "proxies"),
        None,
    ),
    "proxy-anchor": (
        lambda: proxied(L.ProxyAnchor(CLASSES, DIM), "proxies"),
        lambda: proxied(losses.ProxyAnchorLoss(CLASSES, DIM), "proxies"),
        None,
    ),
    "arc-face": (
        lambda: proxied(L.ArcFace(CLASSES, DIM, margin=math.radians(28.6)), "proxies"),
        lambda: proxied(losses.ArcFaceLoss(CLASSES, DIM, margin=28.6), "W"),
        None,
    ),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("seed", range(3))
def test_equals_pytorch_metric_learning(name, seed):
    ours, theirs, miner = PAIRS[name]
    embeddings, labels = tensors(*random_batch(seed))
    if name == "angular":  # PML normalizes anchors and positives, but not negatives
        embeddings = torch.nn.functional.normalize(embeddings).detach().requires_grad_()
    value = ours().double()(embeddings, labels)
    (slope,) = torch.autograd.grad(value, embeddings)
    mined = miner()(embeddings, labels) if miner else None
    wanted = theirs()(embeddings, labels, mined)
    (expected,) = torch.autograd.grad(wanted, embeddings)
    assert value.item() == pytest.approx(wanted.item(), rel=1e-6, abs=1e-9)
    if name == "angular":  # ... so its gradient of a negative has a part along the row
        expected = expected - (expected * embeddings).sum(dim=1, keepdim=True) * embeddings
    torch.testing.assert_close(slope, expected, atol=1e-6, rtol=1e-6)
    assert expected.abs().max() > 1e-4


@pytest.mark.parametrize("seed", range(3))
def test_margin_is_pytorch_metric_learnings_with_weights(seed):
    """PML counts a positive pair once per negative pair of its anchor and the reverse: pair weights say the same."""
    embeddings, _ = tensors(*random_batch(seed))
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 2])[
        torch.randperm(10, generator=torch.Generator().manual_seed(seed))
    ]
    positive = labels[:, None] == labels
    positives, negatives = positive.sum(dim=1, keepdim=True) - 1.0, (~positive).sum(dim=1, keepdim=True) * 1.0
    weights = torch.where(positive, negatives, positives).double()
    relation = nf.Relation.from_labels(labels, weights=weights)
    value = L.Margin(learn=False)(embeddings, relation)
    theirs = losses.MarginLoss(0.2, 1.2, reducer=reducers.MeanReducer())(embeddings, labels)
    assert value.item() == pytest.approx(theirs.item() / 2, rel=1e-6)
