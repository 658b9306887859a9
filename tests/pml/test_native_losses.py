"""Native losses against PML's: the table of docs/start/from-pml.md."""

from __future__ import annotations

import math

import pytest
import torch
from pytorch_metric_learning import losses

import nearfar as nf

CLASSES, WIDTH = 5, 6


def batch(seed, sizes=(2, 5, 1, 2, 3)):
    """Rows around the centers of classes of these sizes, in any order."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.cat([torch.full((size,), name) for name, size in enumerate(sizes)])
    labels = labels[torch.randperm(len(labels), generator=generator)]
    pull = torch.randn(CLASSES, WIDTH, dtype=torch.float64, generator=generator)[labels]
    noise = torch.randn(len(labels), WIDTH, dtype=torch.float64, generator=generator)
    return (noise + pull).requires_grad_(), labels


L = nf.losses
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


@pytest.mark.parametrize("name", NATIVE)
def test_native_recipe(name):
    """The table of docs/start/from-pml.md: what each name is without it."""
    embeddings, labels = batch(22)
    embeddings = torch.nn.functional.normalize(embeddings)  # PML does not normalize the negatives of its AngularLoss
    native = NATIVE[name]().double()
    vectors = {"num_classes": CLASSES, "embedding_size": WIDTH} if hasattr(native, "proxies") else {}
    other = getattr(losses, name)(**vectors).double()
    if hasattr(native, "proxies"):
        with torch.no_grad():
            (vectors,) = other.parameters()
            given = native.proxies.reshape(-1, WIDTH)
            vectors.copy_(given if vectors.shape == given.shape else given.T)
    assert other(embeddings, labels).item() == pytest.approx(native(embeddings, labels).item(), abs=1e-12)


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
