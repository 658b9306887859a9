"""Regularizers of nearfar.pml against pytorch-metric-learning 2.9: values, gradients, statistics, as arguments."""

from __future__ import annotations

import pytest
import pytorch_metric_learning as theirs
import torch
from pytorch_metric_learning import distances, losses, reducers, regularizers  # noqa: F401 - loads them

import nearfar.pml as ours

ROWS = (
    ("LpRegularizer", (), lambda m: {}),
    ("LpRegularizer", (1, 3), lambda m: {"reducer": m.reducers.SumReducer()}),
    ("LpRegularizer", (), lambda m: {"power": 2, "reducer": m.reducers.ThresholdReducer(low=4)}),
    ("CenterInvariantRegularizer", (), lambda m: {}),
    ("CenterInvariantRegularizer", (), lambda m: {"distance": m.distances.LpDistance(p=1, normalize_embeddings=False)}),
    ("RegularFaceRegularizer", (), lambda m: {}),
    (
        "RegularFaceRegularizer",
        (),
        lambda m: {"distance": m.distances.DotProductSimilarity(normalize_embeddings=False)},
    ),
    ("SparseCentersRegularizer", (4, 3), lambda m: {}),
    ("SparseCentersRegularizer", (2, 6), lambda m: {"reducer": m.reducers.MeanReducer()}),
    ("ZeroMeanRegularizer", (), lambda m: {}),
)
rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])


def vectors(seed=0):
    return torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@rows
def test_the_same_values_and_gradients(row):
    name, args, settings = row
    found = []
    for library in (ours, theirs):
        x = vectors().requires_grad_()
        value = getattr(library.regularizers, name)(*args, **settings(library))(x)
        value.backward()
        found.append((value.detach(), x.grad))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-9, rtol=1e-9)
    assert float(found[0][0]) != 0


@rows
def test_the_same_records(row):
    name, args, settings = row
    mine, other = (
        getattr(library.regularizers, name)(*args, collect_stats=True, **settings(library))
        for library in (ours, theirs)
    )
    mine(vectors())
    other(vectors())
    for kind in ("_record_these", "_record_these_stats"):
        names = getattr(other, kind, [])
        assert set(getattr(mine, kind)) == set(names)
        for stat in names:
            if hasattr(other, stat) and stat not in ("num_classes", "centers_per_class"):  # PML leaves these two at 0
                assert getattr(mine, stat) == pytest.approx(getattr(other, stat), abs=1e-9)
    assert type(mine.get_default_reducer()).__name__ == type(other.get_default_reducer()).__name__
    assert mine.get_default_distance().is_inverted == other.get_default_distance().is_inverted


@rows
def test_as_arguments_of_losses(row):
    """Ours in ours, PML's in ours, both like PML's in PML's."""
    name, args, settings = row
    x, y = vectors(3), torch.arange(12) // 4

    def loss(library, regularizer, **more):
        torch.manual_seed(0)
        kind = library.losses.ProxyNCALoss(
            12, 5, weight_regularizer=regularizer, weight_reg_weight=0.3, **more
        ).double()
        return float(kind(x, y).detach())

    mine, other = (getattr(library.regularizers, name)(*args, **settings(library)) for library in (ours, theirs))
    want = loss(theirs, other)
    assert loss(ours, mine) == pytest.approx(want, rel=1e-9)
    assert loss(ours, other) == pytest.approx(want, rel=1e-9)
    contrastive = float(theirs.losses.ContrastiveLoss(embedding_regularizer=other, embedding_reg_weight=2)(x, y))
    found = ours.losses.ContrastiveLoss(embedding_regularizer=mine, embedding_reg_weight=2)(x, y)
    assert float(found) == pytest.approx(contrastive, rel=1e-9)


def test_merged_centers_have_a_finite_gradient():
    x = vectors()
    x[1] = x[0]
    x.requires_grad_()
    value = ours.regularizers.SparseCentersRegularizer(6, 2)(x)
    value.backward()
    assert torch.isfinite(x.grad).all()
    assert float(x.grad.abs().max()) < 10


def test_a_regularizer_of_ones_own():
    for library in (ours, theirs):

        class Mine(library.regularizers.BaseRegularizer):
            def compute_loss(self, x):
                norms = self.distance.get_norm(x)
                return {
                    "loss": {"losses": norms, "indices": torch.arange(len(x)), "reduction_type": "element"},
                }

        assert float(Mine()(vectors())) == pytest.approx(float(vectors().norm(dim=1).mean()))
    with pytest.raises(TypeError, match="must have a method compute_loss"):
        ours.regularizers.BaseRegularizer()(vectors())


def test_what_cannot_be_is_told():
    r, d = ours.regularizers, ours.distances
    with pytest.raises(ValueError, match=r"distance must be LpDistance\(normalize_embeddings=False\)"):
        r.CenterInvariantRegularizer(distance=d.LpDistance())
    with pytest.raises(ValueError, match="must be CosineSimilarity or DotProductSimilarity"):
        r.RegularFaceRegularizer(distance=d.LpDistance())
    with pytest.raises(ValueError, match=r"distance must be CosineSimilarity\(\)"):
        r.SparseCentersRegularizer(2, 2, distance=d.LpDistance())
    with pytest.raises(ValueError, match="centers_per_class must be 2 or more"):
        r.SparseCentersRegularizer(2, 1)
    with pytest.raises(ValueError, match="6 classes x 3 centers are 18 vectors, but 12 came"):
        r.SparseCentersRegularizer(6, 3)(vectors())
    with pytest.raises(TypeError, match="no argument 'powers'; did you mean 'power'"):
        r.LpRegularizer(powers=2)
