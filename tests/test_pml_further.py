"""nearfar.pml's other losses against pytorch-metric-learning 2.9: values, gradients, reducers, checkpoints."""

from __future__ import annotations

import copy

import pytest
import pytorch_metric_learning as theirs
import torch
from test_pml import (
    CLASSES,
    FURTHER,
    MINERS,
    SIZES,
    WIDTH,
    Row,
    agree,
    batch,
    cosine,
    dot,
    length,
    measured,
    nonzero,
    raw,
    squared,
    total,
    twins,
)

import nearfar as nf
import nearfar.pml as ours

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # of PML on a new NumPy
VECTORS = {"args": (CLASSES, WIDTH), "reference": False}
BATCH = {"reference": False}


def manhattan(m, **more):
    return {"distance": m.distances.LpDistance(p=1), **more}


def weights(m, **more):
    return {"weight_regularizer": m.regularizers.LpRegularizer(), "weight_reg_weight": 0.3, **more}


def sparse(m):
    return m.regularizers.SparseCentersRegularizer(CLASSES, 3)


def named(m, **more):
    return {"num_classes": CLASSES, "embedding_size": WIDTH, **more}


ROWS = (
    Row("CosFaceLoss", **VECTORS),
    Row("CosFaceLoss", lambda m: {"margin": 0.2, "scale": 9, **weights(m, **length(m))}, "settings", **VECTORS),
    Row("CosFaceLoss", total, "sum", **VECTORS),
    Row("NormalizedSoftmaxLoss", **VECTORS),
    Row("NormalizedSoftmaxLoss", lambda m: squared(m, temperature=0.5, **weights(m, **total(m))), "squared", **VECTORS),
    Row("NormalizedSoftmaxLoss", lambda m: dot(m, temperature=1, **nonzero(m)), "raw", **VECTORS),
    Row("NormalizedSoftmaxLoss", manhattan, "manhattan", **VECTORS),
    Row("LargeMarginSoftmaxLoss", **VECTORS),
    Row("LargeMarginSoftmaxLoss", lambda m: {"margin": 3, "scale": 2, **weights(m, **total(m))}, "three", **VECTORS),
    Row("LargeMarginSoftmaxLoss", lambda m: {"margin": 1, **length(m)}, "one", **VECTORS),
    Row("SphereFaceLoss", **VECTORS),
    Row("SphereFaceLoss", lambda m: {"margin": 2, "scale": 3, **weights(m)}, "two", **VECTORS),
    Row("SphereFaceLoss", nonzero, "nonzero", **VECTORS),
    Row("SubCenterArcFaceLoss", named, **BATCH),
    Row("SubCenterArcFaceLoss", lambda m: named(m, sub_centers=2, margin=40, scale=8, **weights(m)), "two", **BATCH),
    Row("SubCenterArcFaceLoss", lambda m: named(m, **total(m, **length(m))), "sum", **BATCH),
    Row("SoftTripleLoss", **VECTORS),
    Row("SoftTripleLoss", lambda m: {"centers_per_class": 3, "la": 5, "gamma": 0.4, "margin": 0.2, **total(m)}, "three",
        **VECTORS),
    Row("SoftTripleLoss", lambda m: dot(m, la=2, **weights(m)), "raw", **VECTORS),
    Row("SoftTripleLoss", lambda m: {"centers_per_class": 3, "weight_regularizer": sparse(m)}, "sparse", **VECTORS),
    Row("TupletMarginLoss"),
    Row("TupletMarginLoss", lambda m: {"margin": 20, "scale": 7, **total(m)}, "sum"),
    Row("TupletMarginLoss", lambda m: {"margin": -5, "scale": 7, **nonzero(m)}, "nonzero"),
    Row("IntraPairVarianceLoss"),
    Row("IntraPairVarianceLoss", lambda m: squared(m, pos_eps=0.1, neg_eps=0.2, **total(m)), "squared"),
    Row("IntraPairVarianceLoss", lambda m: raw(m, **nonzero(m)), "raw"),
    Row("NCALoss"),
    Row("NCALoss", lambda m: cosine(m, softmax_scale=5, **total(m)), "cosine"),
    Row("NCALoss", lambda m: manhattan(m, **nonzero(m, **length(m))), "manhattan"),
    Row("FastAPLoss", **BATCH),
    Row("FastAPLoss", lambda m: {"num_bins": 7, "distance": m.distances.LpDistance(), **total(m)}, "plain", **BATCH),
    Row("FastAPLoss", lambda m: {"distance": m.distances.LpDistance(power=3), **length(m, **nonzero(m))}, "third",
        **BATCH),
    Row("RankedListLoss", args=(0.4, 2), **BATCH),
    Row("RankedListLoss", lambda m: {"imbalance": 0.2, "alpha": 1.4, "Tp": 1, **total(m)}, "alpha", (0.6, 1), False),
    Row("RankedListLoss", lambda m: squared(m, Tp=0.5), "squared", (0.4, 2), False),
)  # fmt: skip
rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
TUPLES = [row for row in ROWS if row.name != "RankedListLoss"]
listed = pytest.mark.parametrize("row", TUPLES, ids=lambda row: row.id)


def test_every_loss_is_compared():
    elsewhere = {
        "SmoothAPLoss",
        "VICRegLoss",
        "GenericPairLoss",
        "SelfSupervisedLoss",
        "MultipleLosses",
        "BaseLossWrapper",
    }
    assert {row.name for row in ROWS} | elsewhere == FURTHER
    assert all(sum(row.name == name for row in ROWS) >= 3 for name in FURTHER - elsewhere)


@rows
def test_value_gradient_and_checkpoint(row):
    for seed, sizes in enumerate(SIZES):
        agree(row, *batch(seed, sizes))
    mine, other = twins(row)
    other.load_state_dict(mine.state_dict())
    assert list(mine.state_dict()) == list(other.state_dict())


@listed
def test_index_tuples(row):
    embeddings, labels = batch(5, SIZES[1])
    for miner in MINERS.values():
        indices = miner(embeddings, labels)
        agree(row, embeddings, labels, indices)
    agree(row, embeddings, labels, tuple(torch.cat([part, part[: len(part) // 2]]) for part in indices))
    none = torch.zeros(0, dtype=torch.int64)
    for sided in ((none, none, none), (*indices[:2], none, none), (none, none, *indices[2:])):
        agree(row, embeddings, labels, sided)


@pytest.mark.parametrize("row", [row for row in ROWS if row.reference], ids=lambda row: row.id)
def test_reference(row):
    embeddings, labels = batch(8)
    ref_emb, ref_labels = batch(9, SIZES[1])
    for rest in ([], [MINERS["similar"](embeddings, labels, ref_emb, ref_labels)]):
        agree(row, embeddings, labels, *rest, ref_emb=ref_emb, ref_labels=ref_labels)
    mine, ids = twins(row)[0], torch.arange(len(labels))
    given = mine(embeddings, labels, ref_emb=embeddings.clone(), ref_labels=labels.clone(), ids=ids, ref_ids=ids)
    assert given.item() == pytest.approx(mine(embeddings, labels).item(), abs=1e-9)


def reduced_by(row, make):
    settings = row.settings
    return Row(row.name, lambda m: {**settings(m), "reducer": make(m.reducers)}, row.label, row.args, row.reference)


REDUCERS = {
    "threshold": lambda r: r.ThresholdReducer(low=0.1, high=3.0),
    "classes": lambda r: r.ClassWeightedReducer(torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)),
    "anchors": lambda r: r.PerAnchorReducer(r.AvgNonZeroReducer()),
    "several": lambda r: r.MultipleReducers({"pos_loss": r.SumReducer()}, r.AvgNonZeroReducer()),
}


# with PML's scale of 64 its tuplet losses round to 0 where ours do not, and "above zero" then counts others
SOME = [row for row in ROWS if (row.label == "sum" if row.name == "TupletMarginLoss" else row.label == "default")]


@pytest.mark.parametrize("row", SOME, ids=lambda row: row.id)
def test_every_reducer(row):
    embeddings, labels = batch(4, SIZES[1])
    for name, make in REDUCERS.items():
        if name in ("anchors", "classes") and row.name == "TupletMarginLoss":
            continue  # PML's losses are a column [k, 1] there, which times weights [k] makes a matrix
        agree(reduced_by(row, make), embeddings, labels)
    parts = getattr(ours.losses, row.name)(
        *row.args, **{**row.settings(ours), "reducer": ours.reducers.DoNothingReducer()}
    )
    parts(embeddings, labels)


DEGENERATE = {"one class": [0, 0, 0, 0], "singletons": [0, 1, 2, 3], "one row": [1]}


@pytest.mark.filterwarnings("ignore::nearfar.DegenerateBatchWarning")
@pytest.mark.parametrize("row", [row for row in ROWS if row.label == "default"], ids=lambda row: row.id)
def test_degenerate_batches(row):
    for kind, names in DEGENERATE.items():
        embeddings, labels = batch(3)[0][: len(names)].detach().requires_grad_(), torch.tensor(names)
        if kind == "singletons" and row.name == "NCALoss":  # PML: the mean of nothing, NaN
            assert measured(row, row.make(ours), embeddings, labels)[0].item() == 0
        else:
            agree(row, embeddings, labels)


@pytest.mark.parametrize("row", [row for row in ROWS if row.label == "default"], ids=lambda row: row.id)
def test_half_and_single_precision(row):
    """Computed in float32, whatever the type; the value is that of float64 to its rounding."""
    torch.manual_seed(3)
    loss, (embeddings, labels) = row.make(ours), batch(2, SIZES[1])
    wanted = copy.deepcopy(loss).double()(embeddings, labels).item()
    for dtype, close in ((torch.float32, 1e-4), (torch.float16, 3e-2), (torch.bfloat16, 2e-1)):
        x = embeddings.detach().to(dtype).requires_grad_()
        value = loss(x, labels)
        value.backward()
        assert value.dtype == torch.float32
        assert x.grad.dtype == dtype
        assert torch.isfinite(x.grad).all()
        assert value.item() == pytest.approx(wanted, rel=close, abs=close)


@pytest.mark.parametrize("name", ["CosFaceLoss", "NormalizedSoftmaxLoss", "LargeMarginSoftmaxLoss", "SphereFaceLoss",
                                  "SubCenterArcFaceLoss", "SoftTripleLoss"])  # fmt: skip
def test_logits(name):
    row = Row(name, named)
    mine, other = twins(row)
    embeddings, _ = batch(1)
    torch.testing.assert_close(mine.get_logits(embeddings), other.get_logits(embeddings), atol=1e-9, rtol=1e-9)
    assert mine.float().get_logits(embeddings.float()).dtype == torch.float32
    assert mine.get_logits(embeddings.half()).shape == (len(embeddings), CLASSES)


def test_outliers_and_dominant_centers():
    mine, other = twins(Row("SubCenterArcFaceLoss", named))
    embeddings, labels = batch(1, SIZES[2])
    embeddings = embeddings.detach()
    for threshold in (60, 75, 110):
        got, want = (x.get_outliers(embeddings, labels, threshold) for x in (mine, other))
        assert got[0].tolist() == want[0].tolist()
        torch.testing.assert_close(got[1], want[1])
    assert len(mine.get_outliers(embeddings, labels)[0])


# ---------------------------------------------------------------- smooth AP


def test_smooth_ap_where_pml_reads_the_right_rows(monkeypatch):
    """PML cuts the batch into runs as long as there are classes: right for sorted rows, as many of each as classes."""
    monkeypatch.setattr(
        torch, "zeros", lambda *size, zeros=torch.zeros, **more: zeros(*size, **{"dtype": torch.float64} | more)
    )
    embeddings = batch(2, SIZES[2])[0][:9].detach().requires_grad_()
    labels = torch.arange(3).repeat_interleave(3)
    for settings in (lambda m: {"temperature": 0.1}, lambda m: {"temperature": 0.3, **length(m)}, total, nonzero):
        row = Row("SmoothAPLoss", settings)
        agree(row, embeddings, labels)
        agree(row, embeddings, labels, MINERS["similar"](embeddings, labels))


def test_smooth_ap_of_any_classes_in_any_order_is_the_native_one():
    embeddings, labels = batch(2, SIZES[1])
    loss = ours.losses.SmoothAPLoss(temperature=0.1)
    wanted = nf.losses.SmoothAP(temperature=0.1)(embeddings, labels, ref_emb=embeddings, ref_labels=labels)
    assert loss(embeddings, labels).item() == pytest.approx(wanted.item())
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    assert loss(embeddings[order], labels[order]).item() == pytest.approx(wanted.item())


# ---------------------------------------------------------------- two views, several losses, losses of one's own


def test_vicreg():
    first, _ = batch(1)
    second, _ = batch(2)
    for make in (
        lambda m: {},
        lambda m: {"invariance_lambda": 3, "variance_mu": 40, "covariance_v": 2, "eps": 0.1, **total(m)},
    ):
        found = []
        for library in (ours, theirs):
            x, z = (0.3 * first).detach().requires_grad_(), second.detach().requires_grad_()
            value = library.losses.VICRegLoss(**make(library))(x, ref_emb=z)
            found.append((value.detach(), *torch.autograd.grad(value, [x, z])))
        torch.testing.assert_close(*found, atol=1e-9, rtol=1e-9)
    loss = ours.losses.VICRegLoss()
    with pytest.raises(ValueError, match="VICRegLoss: it takes two views and neither labels nor index tuples"):
        loss(first, torch.arange(len(first)), ref_emb=second)
    with pytest.raises(ValueError, match="VICRegLoss: it has no use for distance; leave it out"):
        ours.losses.VICRegLoss(distance=ours.distances.LpDistance())
    with pytest.raises(
        ValueError, match="VICRegLoss: embeddings and ref_emb must have the same shape and at least two"
    ):
        loss(first[:1], ref_emb=second[:1])


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", ["TripletMarginLoss", "NCALoss", "TupletMarginLoss", "IntraPairVarianceLoss"])
def test_two_views(name, symmetric):
    first, second = batch(1)[0], batch(2)[0].detach().requires_grad_()
    found = []
    for library in (ours, theirs):
        loss = library.losses.SelfSupervisedLoss(getattr(library.losses, name)(), symmetric=symmetric)
        value = loss(first, second)
        found.append((value.detach(), *torch.autograd.grad(value, [first, second])))
    torch.testing.assert_close(*found, atol=1e-9, rtol=1e-9)


def test_a_loss_that_cannot_take_two_views_is_refused():
    assert ours.losses.SelfSupervisedLoss.supported_losses() == theirs.losses.SelfSupervisedLoss.supported_losses()
    with pytest.raises(ValueError, match="SelfSupervisedLoss: CosFaceLoss is not supported; take one of AngularLoss"):
        ours.losses.SelfSupervisedLoss(ours.losses.CosFaceLoss(3, 4))


def test_several_losses():
    embeddings, labels = batch(1)
    hard = MINERS["hard"](embeddings, labels)
    for named_losses in (False, True):
        found = []
        for m in (ours, theirs):
            parts = [m.losses.ContrastiveLoss(), m.losses.NCALoss()]
            miners, weights = [m.miners.MultiSimilarityMiner(), None], [0.5, 2]
            if named_losses:
                parts, miners, weights = dict(zip("ab", parts, strict=True)), {"a": miners[0]}, {"a": 0.5, "b": 2}
            values = [
                m.losses.MultipleLosses(parts)(embeddings, labels),
                m.losses.MultipleLosses(parts, weights=weights)(embeddings, labels, hard),
                m.losses.MultipleLosses(parts, miners, weights)(embeddings, labels),
            ]
            found.append([value.item() for value in values])
        assert found[0] == pytest.approx(found[1], abs=1e-9)
    with pytest.raises(ValueError, match="MultipleLosses: weights must be a list of 1, like the losses, but came as"):
        ours.losses.MultipleLosses([ours.losses.NCALoss()], weights=[1, 2])
    with pytest.raises(ValueError, match="MultipleLosses: it has miners of its own and takes no index tuple"):
        ours.losses.MultipleLosses([ours.losses.NCALoss()], [MINERS["hard"]])(embeddings, labels, (labels,) * 3)


def of_masks(m):
    """A loss of one's own on all distances."""

    class Masks(m.losses.GenericPairLoss):
        def __init__(self, **more):
            super().__init__(mat_based_loss=True, **more)

        def _compute_loss(self, mat, pos_mask, neg_mask):
            losses = (mat * pos_mask).sum(dim=1) - (mat * neg_mask).mean(dim=1)
            return {"loss": {"losses": losses, "indices": torch.arange(len(mat)), "reduction_type": "element"}}

    return Masks


def of_pairs(m):
    """A loss of one's own on the distances of pairs."""

    class Pairs(m.losses.GenericPairLoss):
        def __init__(self, **more):
            super().__init__(mat_based_loss=False, **more)

        def _compute_loss(self, pos_pairs, neg_pairs, indices_tuple):
            a, p, b, n = indices_tuple
            return {
                "near": {"losses": pos_pairs**2, "indices": (a, p), "reduction_type": "pos_pair"},
                "far": {"losses": torch.relu(1 - neg_pairs), "indices": (b, n), "reduction_type": "neg_pair"},
            }

        def _sub_loss_names(self):
            return ["near", "far"]

        def get_default_distance(self):
            return m.distances.LpDistance(power=2)

    return Pairs


@pytest.mark.parametrize("kind", [of_masks, of_pairs])
def test_a_loss_of_ones_own(kind):
    embeddings, labels = batch(1)
    for settings in (lambda m: {}, lambda m: cosine(m, **total(m, **length(m)))):
        for rest in ((), (MINERS["similar"](embeddings, labels),)):
            found = []
            for m in (ours, theirs):
                value = kind(m)(**settings(m))(embeddings, labels, *rest)
                found.append((value.detach(), *torch.autograd.grad(value, embeddings)))
            torch.testing.assert_close(*found, atol=1e-9, rtol=1e-9)


# ---------------------------------------------------------------- recipes, statistics, errors


def test_recipes_stand_behind_the_names():
    """The native loss with the same numbers; what has no factors says so."""
    embeddings, labels = batch(1)
    for row in ROWS:
        if row.name in ("LargeMarginSoftmaxLoss", "SphereFaceLoss", "IntraPairVarianceLoss", "RankedListLoss"):
            with pytest.raises(AttributeError, match=f"{row.name}: there is no recipe"):
                row.make(ours).robust  # noqa: B018
        else:
            assert isinstance(row.make(ours).robust, nf.RobustLoss)
    mine = ours.losses.NCALoss()
    assert mine.robust.explain(embeddings, labels).value.item() == pytest.approx(mine(embeddings, labels).item())


def test_statistics_are_those_of_pml():
    embeddings, labels = batch(1)
    for name, stats, args in (
        ("TupletMarginLoss", ("avg_pos_angle", "avg_neg_angle"), ()),
        ("CosFaceLoss", ("avg_angle",), (CLASSES, WIDTH)),
        ("LargeMarginSoftmaxLoss", ("avg_angle",), (CLASSES, WIDTH)),
    ):
        row = Row(name, lambda m: {"collect_stats": True}, args=args)
        mine, other = twins(row)
        measured(row, mine, embeddings, labels)
        measured(row, other, embeddings, labels)
        for stat in stats:
            assert getattr(mine, stat) == pytest.approx(getattr(other, stat))


def test_what_cannot_be_had_is_one_sentence():
    embeddings, labels = batch(1)
    L, D = ours.losses, ours.distances
    for loss in (L.FastAPLoss(), L.SmoothAPLoss(), L.RankedListLoss(0.4, 2)):
        with pytest.raises(
            ValueError, match=f"{type(loss).__name__}: it compares the batch with itself; leave ref_emb"
        ):
            loss(embeddings, labels, ref_emb=embeddings, ref_labels=labels)
    with pytest.raises(ValueError, match="RankedListLoss: it chooses its own pairs and takes no index tuple"):
        L.RankedListLoss(0.4, 2)(embeddings, labels, MINERS["hard"](embeddings, labels))
    with pytest.raises(ValueError, match="RankedListLoss: imbalance must lie in"):
        L.RankedListLoss(0.4, 2, imbalance=2)
    with pytest.warns(UserWarning, match="Tp or Tn is above 5"):
        L.RankedListLoss(0.4, 6)
    with pytest.raises(ValueError, match="FastAPLoss: distance must be LpDistance"):
        L.FastAPLoss(distance=D.LpDistance(normalize_embeddings=False))
    with pytest.raises(ValueError, match="SoftTripleLoss: distance must be one in which larger means more similar"):
        L.SoftTripleLoss(CLASSES, WIDTH, distance=D.LpDistance())
    with pytest.raises(ValueError, match=r"SoftTripleLoss: labels must lie in 0..2, but reach from 0 to 3"):
        L.SoftTripleLoss(3, WIDTH)(embeddings.float(), labels)
    with pytest.raises(TypeError, match="CosFaceLoss: there is no argument 'magin'; did you mean 'margin'"):
        L.CosFaceLoss(3, 4, magin=1)
