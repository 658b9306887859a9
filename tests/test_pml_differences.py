"""Where nearfar.pml does not follow pytorch-metric-learning 2.9: ours is right by a slow oracle, PML's differs.

docs/start/from-pml.md lists these one by one.
"""

from __future__ import annotations

import inspect
import math
import warnings

import numpy as np
import pytest
import pytorch_metric_learning as theirs
import torch
from pytorch_metric_learning import distances, losses, miners, reducers, samplers  # noqa: F401 - loads them
from torch.nn.functional import normalize

import nearfar as nf
import nearfar.pml as ours


def batch(seed, n=8, classes=3, width=4):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    return torch.randn(n, width, dtype=torch.float64, generator=generator).requires_grad_(), labels


def euclid(x, y):
    x, y = (z.detach().numpy() / np.linalg.norm(z.detach().numpy(), axis=1, keepdims=True) for z in (x, y))
    return np.linalg.norm(x[:, None] - y[None], axis=2)


@pytest.mark.parametrize("size", [8, 12])
def test_swap_with_a_reference(size):
    """PML looks the positive-negative distance up among batch x reference: wrong, or out of range."""
    embeddings, labels = batch(0)
    ref_emb, ref_labels = batch(1, size)
    d, among = euclid(embeddings, ref_emb), euclid(ref_emb, ref_emb)
    terms = [
        max(0.0, d[a, p] - min(d[a, n], among[p, n]) + 0.2)
        for a in range(8)
        for p in range(size)
        for n in range(size)
        if labels[a] == ref_labels[p] != ref_labels[n]
    ]
    right = sum(terms) / sum(term > 0 for term in terms)
    given = {"ref_emb": ref_emb, "ref_labels": ref_labels}
    got = ours.losses.TripletMarginLoss(margin=0.2, swap=True)(embeddings, labels, **given).item()
    assert got == pytest.approx(right, abs=1e-12)
    other = losses.TripletMarginLoss(margin=0.2, swap=True)
    if size == 8:
        assert abs(other(embeddings, labels, **given).item() - right) > 1e-3
    else:
        with pytest.raises(IndexError):
            other(embeddings, labels, **given)


@pytest.mark.parametrize("name", ["ContrastiveLoss", "TripletMarginLoss", "MultiSimilarityLoss", "SupConLoss"])
def test_identity_of_the_labels_says_nothing(name):
    """PML leaves the diagonal out if ref_labels is the very object labels; a clone is another loss."""
    embeddings, labels = batch(2)
    view = batch(3)[0]
    mine, other = getattr(ours.losses, name)(), getattr(losses, name)()

    def both(loss):
        shared = loss(embeddings, labels, ref_emb=view, ref_labels=labels).item()
        return shared, loss(embeddings, labels, ref_emb=view, ref_labels=labels.clone()).item()

    shared, copied = both(mine)
    assert shared == copied
    shared, copied = both(other)
    assert abs(shared - copied) > 1e-3


def test_a_single_pair_counts():
    """PML returns 0 where no list is longer than one."""
    embeddings, labels = batch(4)
    d = euclid(embeddings, embeddings)
    one = tuple(torch.tensor([i]) for i in (0, 3, 0, 1))
    right = d[0, 3] + max(0.0, 1 - d[0, 1])
    assert ours.losses.ContrastiveLoss()(embeddings, labels, one).item() == pytest.approx(right, abs=1e-12)
    assert losses.ContrastiveLoss()(embeddings, labels, one).item() == 0
    for name in ("NTXentLoss", "SupConLoss", "CircleLoss", "MultiSimilarityLoss"):
        assert getattr(ours.losses, name)()(embeddings, labels, one).item() > 0
        assert getattr(losses, name)()(embeddings, labels, one).item() == 0


def test_a_reference_of_one_counts():
    """The same rule without a tuple: one row against one reference row is one pair."""
    embeddings, labels = batch(5, n=2, classes=2)
    d = euclid(embeddings, embeddings)[0, 1]
    given = {"ref_emb": embeddings[1:], "ref_labels": labels[1:]}
    loss = {"neg_margin": 3.0}
    assert ours.losses.ContrastiveLoss(**loss)(embeddings[:1], labels[:1], **given).item() == pytest.approx(3 - d)
    assert losses.ContrastiveLoss(**loss)(embeddings[:1], labels[:1], **given).item() == 0


def test_degenerate_batches_speak():
    embeddings, _ = batch(6)
    one_class = torch.zeros(8, dtype=torch.int64)
    loss = ours.losses.TripletMarginLoss()
    with pytest.warns(nf.DegenerateBatchWarning, match="TripletMarginLoss: .*one class only"):
        assert loss(embeddings, one_class).item() == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loss(embeddings, one_class).item() == 0  # once is enough
        assert losses.TripletMarginLoss()(embeddings, one_class).item() == 0  # PML: never


def test_lifted_structure_with_a_reference():
    """PML takes the negative pairs of j, a reference row, from the batch row of the same number."""
    embeddings, labels = batch(7)
    ref_emb, ref_labels = batch(8, 7)
    d = euclid(embeddings, ref_emb)
    terms = []
    for i in range(8):
        for j in range(7):
            if labels[i] == ref_labels[j]:
                mine = [math.exp(1 - d[i, k]) for k in range(7) if labels[i] != ref_labels[k]]
                its = [math.exp(1 - d[k, j]) for k in range(8) if labels[k] != ref_labels[j]]
                terms.append(max(0.0, d[i, j] + math.log(sum(mine) + sum(its))) ** 2 / 2)
    right = sum(terms) / len(terms)
    given = {"ref_emb": ref_emb, "ref_labels": ref_labels}
    assert ours.losses.LiftedStructureLoss()(embeddings, labels, **given).item() == pytest.approx(right, abs=1e-12)
    assert abs(losses.LiftedStructureLoss()(embeddings, labels, **given).item() - right) > 1e-3


def test_angular_divides_negatives_too():
    """PML multiplies unit anchors and positives with raw negatives; on unit rows the two agree."""
    embeddings, labels = batch(9)
    mine, other = ours.losses.AngularLoss(), losses.AngularLoss()
    assert mine(embeddings, labels).item() == pytest.approx(mine(3 * embeddings, labels).item())
    assert mine(embeddings, labels).item() == pytest.approx(other(normalize(embeddings), labels).item())
    assert abs(other(embeddings, labels).item() - other(3 * embeddings, labels).item()) > 1


def test_nt_xent_does_not_saturate():
    """PML takes the logarithm of a quotient: where that underflows, the value stops and the gradient is gone."""
    embeddings = torch.tensor([[1.0, 0.0], [-1.0, 0.1], [1.0, 0.01]], requires_grad=True)
    indices = tuple(torch.tensor([i, i]) for i in (0, 1, 2))  # two of each: a single one counts 0 in PML
    unit = normalize(embeddings.detach().double())
    right = math.log1p(2 * math.exp((unit[0] @ unit[2] - unit[0] @ unit[1]).item() / 0.01))
    mine = ours.losses.NTXentLoss(temperature=0.01)(embeddings, None, indices)
    (slope,) = torch.autograd.grad(mine, embeddings)
    other = losses.NTXentLoss(temperature=0.01)(embeddings, None, indices)
    (other_slope,) = torch.autograd.grad(other, embeddings)
    assert mine.item() == pytest.approx(right, rel=1e-5)
    assert slope.abs().max() > 1
    assert other.item() < 0.5 * right
    assert not other_slope.any()


def test_proxy_nca_keeps_rows_that_underflow():
    """PML drops rows whose softmax is 0 in floating point: the worst ones."""
    embeddings, labels = torch.tensor([[1.0, 0.1], [1.0, -0.1]]), torch.tensor([0, 1])
    values = []
    for library in (ours, theirs):
        loss = library.losses.ProxyNCALoss(2, 2, softmax_scale=100)
        with torch.no_grad():
            loss.proxies.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        values.append(loss(embeddings, labels).item())
    x = normalize(embeddings.double())
    right = 100 * ((x[1] + x.new_tensor([1, 0])).square().sum() - (x[1] - x.new_tensor([1, 0])).square().sum()) / 2
    assert values[0] == pytest.approx(right.item(), rel=1e-5)
    assert values[1] == 0


def test_arcface_at_zero_angle():
    """PML differentiates arccos at 1."""
    for library, finite in ((ours, True), (theirs, False)):
        loss = library.losses.ArcFaceLoss(3, 4).double()
        with torch.no_grad():
            loss.W.copy_(torch.eye(4, 3, dtype=torch.float64))
        embeddings = torch.eye(4, dtype=torch.float64)[:3].clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss(embeddings, torch.arange(3)), embeddings)
        assert bool(torch.isfinite(slope).all()) is finite


def test_distance_weighted_keeps_every_anchor():
    """PML divides by one maximum of the batch: in high dimensions whole rows underflow and give no triplet."""
    generator = torch.Generator().manual_seed(0)
    near = torch.randn(1, 256, generator=generator) + 0.3 * torch.randn(4, 256, generator=generator)
    embeddings = torch.cat([near, torch.randn(4, 256, generator=generator)])
    labels = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    anchors = [
        set(library.miners.DistanceWeightedMiner(nonzero_loss_cutoff=1.7)(embeddings, labels)[0].tolist())
        for library in (ours, theirs)
    ]
    assert anchors[0] == set(range(8))
    assert anchors[1] == {0, 1, 2, 3}


def test_equal_rows_are_equal_up_to_rounding():
    """Up to 25 rows PML computes distances directly; beyond, and here always, by products, where rounding remains."""
    x = torch.randn(8, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    apart = ours.distances.LpDistance()(x, x.clone()).diagonal()
    assert apart.max() < 1e-7
    assert not theirs.distances.LpDistance()(x, x.clone()).diagonal().any()


def test_sampler_has_the_length_it_says():
    """PML's gives a whole pass where the length is shorter than that."""
    for library, length in ((ours, 30), (theirs, 40)):
        sampler = library.samplers.MPerClassSampler(torch.arange(50) % 10, 4, length_before_new_iter=30)
        assert len(sampler) == 30
        assert len(list(sampler)) == length


def test_misspelt_words_are_refused():
    for word in ("semi-hard", "al"):
        theirs.miners.TripletMarginMiner(type_of_triplets=word)  # taken for "all"
        with pytest.raises(ValueError, match=r"TripletMarginMiner: type_of_triplets must be one of .* did you mean"):
            ours.miners.TripletMarginMiner(type_of_triplets=word)


WANTED = {
    "num_classes": 3,
    "embedding_size": 4,
    "centers_per_class": 2,
    "loss": ours.losses.ContrastiveLoss(),
    "labels": [0, 0],
    "m": 2,
    "mat_based_loss": True,
    "weights": torch.ones(2),
    "reducers": {},
    "margin": 0.4,
    "Tn": 2,
}
"""An argument for each that a class cannot do without."""


def needed(kind):
    parameters = inspect.signature(kind).parameters.values()
    found = [WANTED[each.name] for each in parameters if each.default is each.empty and each.kind < each.VAR_POSITIONAL]
    return (0.1,) if kind is ours.reducers.ThresholdReducer else tuple(found)


def takes_more(kind):
    """All but wrappers, which have no statistics."""
    return not issubclass(kind, ours.losses.BaseLossWrapper) and any(
        each.kind is each.VAR_KEYWORD for each in inspect.signature(kind).parameters.values()
    )


CLASSES = [
    getattr(module, name)
    for module in (ours.losses, ours.miners, ours.distances, ours.reducers, ours.regularizers)
    for name in module.__all__
    if takes_more(getattr(module, name))
]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_unknown_keywords_are_refused(kind):
    args = needed(kind)
    with pytest.raises(
        TypeError, match=f"{kind.__name__}: there is no argument 'colect_stats'; did you mean 'collect_"
    ):
        kind(*args, colect_stats=False)
    with pytest.raises(TypeError, match=f"{kind.__name__}: there is no argument 'zzz'; there are .*collect_stats"):
        kind(*args, zzz=1)
    for given in (True, False):
        kind(*args, collect_stats=given)


@pytest.mark.parametrize(
    ("make", "nearest"),
    [
        (lambda: ours.losses.ContrastiveLoss(pos_magin=1), "pos_margin"),
        (lambda: ours.losses.TripletMarginLoss(smooth=True), "smooth_loss"),
        (lambda: ours.losses.MarginLoss(learn_betas=True), "learn_beta"),
        (lambda: ours.losses.ArcFaceLoss(3, 4, scal=4), "scale"),
        (lambda: ours.losses.ProxyNCALoss(3, 4, weights_regularizer=None), "weight_regularizer"),
        (lambda: ours.miners.MultiSimilarityMiner(epsilom=1), "epsilon"),
        (lambda: ours.distances.LpDistance(normalize_embedding=False), "normalize_embeddings"),
        (lambda: ours.samplers.MPerClassSampler([0], 1, batchsize=1), "batch_size"),
    ],
)
def test_the_nearest_name_is_named(make, nearest):
    with pytest.raises(TypeError, match=f"did you mean '{nearest}'"):
        make()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: ours.losses.ContrastiveLoss(distance=torch.cdist),
            "ContrastiveLoss: distance must be",
        ),
        (
            lambda: ours.losses.ContrastiveLoss(reducer=ours.reducers.DivisorReducer()),
            "ContrastiveLoss: reducer must be",
        ),
        (lambda: ours.losses.MarginLoss(reducer=ours.reducers.MeanReducer), "MarginLoss: reducer must be a red"),
        (lambda: ours.reducers.ThresholdReducer(), "ThresholdReducer: low or high"),
        (lambda: ours.losses.CircleLoss(distance=ours.distances.LpDistance()), "CircleLoss: distance must be Cosine"),
        (
            lambda: ours.losses.AngularLoss(distance=ours.distances.LpDistance(power=2)),
            "AngularLoss: distance must be Lp",
        ),
        (lambda: ours.losses.ArcFaceLoss(2, 2, distance=ours.distances.LpDistance()), "ArcFaceLoss: distance must be"),
        (
            lambda: ours.miners.DistanceWeightedMiner(distance=ours.distances.CosineSimilarity()),
            "DistanceWeightedMiner: d",
        ),
        (lambda: ours.losses.NTXentLoss(temperature=0), "temperature must be a number above zero"),
        (lambda: ours.losses.MarginLoss(triplets_per_anchor="some"), "MarginLoss: triplets_per_anchor"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(make, says):
    with pytest.raises((TypeError, ValueError), match=says) as caught:
        make()
    assert str(caught.value).count(". ") == 0


def test_calls_that_cannot_be_done_are_one_sentence():
    embeddings, labels = batch(10)
    pair = tuple(torch.tensor([i]) for i in (0, 3, 0, 3))
    reference = {"ref_emb": embeddings, "ref_labels": labels}
    drawn = {"triplets_per_anchor": 3}
    for call, says in (
        (lambda: ours.losses.NPairsLoss()(embeddings, labels, **reference), "NPairsLoss: it takes no reference"),
        (lambda: ours.losses.ProxyNCALoss(3, 4)(embeddings, labels, **reference), "ProxyNCALoss: its class vectors"),
        (lambda: ours.losses.ArcFaceLoss(2, 4)(embeddings, labels), "ArcFaceLoss: labels must lie in 0..1"),
        (lambda: ours.losses.ArcFaceLoss(3, 4)(embeddings), "ArcFaceLoss: labels are missing"),
        (lambda: ours.losses.ArcFaceLoss(3, 5)(embeddings, labels), "ArcFaceLoss: embeddings must be as wide as"),
        (lambda: ours.miners.BatchHardMiner()(embeddings, [0] * 8), "BatchHardMiner: labels must be a 1-D integer"),
        (lambda: ours.losses.MarginLoss(num_classes=2)(embeddings, labels), "MarginLoss: labels must lie in 0..1"),
        (lambda: ours.losses.MarginLoss(num_classes=3)(embeddings, None, pair), "MarginLoss: labels must come"),
        (lambda: ours.losses.AngularLoss()(embeddings, None, pair), "AngularLoss: labels must come"),
        (
            lambda: ours.losses.AngularLoss()(embeddings, labels, pair, embeddings),
            "AngularLoss: ref_emb and ref_labels",
        ),
        (
            lambda: ours.losses.NPairsLoss()(embeddings, labels[:3], pair),
            "NPairsLoss: labels must have one entry per row",
        ),
        (lambda: ours.losses.SupConLoss()(embeddings, labels, pair), "SupConLoss: the index tuple lists a pair both"),
        (lambda: ours.losses.SupConLoss()(embeddings), "SupConLoss: labels are missing"),
        (lambda: ours.losses.TripletMarginLoss(**drawn)(embeddings), "TripletMarginLoss: labels are missing"),
        (lambda: ours.losses.NTXentLoss()(embeddings, labels, pair[:2]), "NTXentLoss: the third argument"),
        (
            lambda: ours.losses.NTXentLoss()(embeddings, labels, ref_emb=embeddings),
            "NTXentLoss: ref_emb and ref_labels",
        ),
        (
            lambda: ours.miners.BatchHardMiner()(embeddings, labels, embeddings),
            "BatchHardMiner: ref_emb and ref_labels",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=says):
            call()


def test_pml_is_not_imported():
    import subprocess
    import sys

    script = "import sys, nearfar.pml; print('pytorch_metric_learning' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, encoding="utf-8", check=True).stdout
        == "False\n"
    )
