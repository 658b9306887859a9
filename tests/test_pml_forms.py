"""nearfar.pml beside the values: signatures, native recipes, draws, copies, half precision, empty batches."""

from __future__ import annotations

import copy
import inspect
import math
import pickle

import pytest
import pytorch_metric_learning as theirs
import torch
from pytorch_metric_learning import losses
from test_pml import CLASSES, ROWS, SIZES, WIDTH, Row, batch, cosine, dot, raw, rows, squared, total, twins

import nearfar as nf
import nearfar.pml as ours


@pytest.mark.parametrize("name", ours.losses.__all__)
def test_signature(name):
    """The same arguments in the same order with the same defaults, by keyword or by position."""
    mine, other = (inspect.signature(getattr(library.losses, name)) for library in (ours, theirs))
    named = [p for p in mine.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    wanted = [p for p in other.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if not wanted:  # PML writes *args, and takes only these by name
        named, wanted = ([p for p in each.parameters.values() if p.kind is p.KEYWORD_ONLY] for each in (mine, other))
    assert [(p.name, p.default) for p in named] == [(p.name, p.default) for p in wanted]
    call, wanted_call = (list(inspect.signature(getattr(m.losses, name).forward).parameters) for m in (ours, theirs))
    assert call[:6] == wanted_call[:6]


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
    embeddings, labels = batch(22, SIZES[1])
    native = NATIVE[name]().double()
    mine = getattr(ours.losses, name)(*((CLASSES, WIDTH) if hasattr(native, "proxies") else ())).double()
    if hasattr(native, "proxies"):
        with torch.no_grad():
            mine.class_vectors().copy_(native.proxies.reshape(-1, WIDTH))
    assert mine(embeddings, labels).item() == pytest.approx(native(embeddings, labels).item(), abs=1e-12)


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
        embeddings, labels = batch(seed, SIZES[1])
        indices = listed(kind, labels, seed)
        native, other = NATIVE[name](), getattr(losses, name)()
        found, wanted = native(embeddings, labels, indices), other(embeddings, labels, indices)
        assert found.item() == pytest.approx(wanted.item(), rel=1e-9, abs=1e-12)
        assert native.explain(embeddings, labels, indices).value.item() == pytest.approx(found.item(), rel=1e-12)
        slopes = (
            [torch.autograd.grad(x, embeddings)[0] for x in (found, wanted)] if embeddings.requires_grad else [0, 0]
        )
        torch.testing.assert_close(*slopes, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", ["pairs", "triplets"])
@pytest.mark.parametrize("name", [*LISTED, *OWN_READING, "MarginLoss"])
def test_the_names_of_pml_with_a_tuple_that_repeats_itself(name, kind):
    for seed in range(3):
        embeddings, labels = batch(seed, SIZES[1])
        embeddings = torch.nn.functional.normalize(embeddings.detach(), dim=1)
        indices = listed(kind, labels, seed)
        if name == "MarginLoss" and kind == "pairs":
            continue  # drawn into triplets, in both
        mine, other = (getattr(library.losses, name)() for library in (ours, theirs))
        assert mine(embeddings, labels, indices).item() == pytest.approx(
            other(embeddings, labels, indices).item(), rel=1e-8
        )


@rows
def test_copies_and_pickles_after_a_call(row):
    embeddings, labels = batch(23)
    mine, _ = twins(row)
    value = mine(embeddings, labels)
    value.backward()
    for twin in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        assert twin(embeddings, labels).item() == value.item()


def test_the_only_distance_may_be_named():
    ours.losses.CircleLoss(distance=ours.distances.CosineSimilarity())
    ours.losses.ArcFaceLoss(2, 3, distance=ours.distances.CosineSimilarity())
    ours.losses.AngularLoss(distance=ours.distances.LpDistance())
    ours.miners.DistanceWeightedMiner(distance=ours.distances.LpDistance(p=2, power=1))


@pytest.mark.parametrize("name", ["ProxyNCALoss", "ProxyAnchorLoss", "ArcFaceLoss"])
def test_logits_and_initial_vectors(name):
    mine, other = twins(Row(name, args=(CLASSES, WIDTH)))
    embeddings, _ = batch(15)
    torch.testing.assert_close(mine.get_logits(embeddings), other.double().get_logits(embeddings))
    torch.manual_seed(4)
    first = getattr(ours.losses, name)(40, 30)
    torch.manual_seed(4)
    second = getattr(losses, name)(40, 30)
    torch.testing.assert_close(first.state_dict(), second.state_dict())
    constant = getattr(ours.losses, name)(4, 3, weight_init_func=lambda w: torch.nn.init.constant_(w, 2.0))
    assert all((vector == 2).all() for vector in constant.parameters())


@pytest.mark.parametrize("name", ["TripletMarginLoss", "MarginLoss"])
def test_random_triplets_have_the_mean_of_all(name):
    """So many triplets an anchor, drawn: unbiased for the mean over anchors of each anchor's mean."""
    embeddings, labels = batch(16, (3, 3, 3))  # equal sizes: the mean over anchors is the mean over triplets
    torch.manual_seed(0)
    settings = {"reducer": ours.reducers.MeanReducer()}
    with torch.no_grad():
        every = getattr(ours.losses, name)(**settings)(embeddings, labels)
        few = getattr(ours.losses, name)(triplets_per_anchor=20, **settings)
        draws = torch.stack([few(embeddings, labels) for _ in range(300)])
    error = draws.std() / len(draws) ** 0.5
    assert 0 < error < 0.01
    assert abs(draws.mean() - every) < 4 * error


def test_random_triplets_are_as_many_as_in_pml():
    embeddings, labels = batch(17)
    for library in (ours, theirs):
        # tiny rows and a margin of 1: every triplet costs 1, and the sum tells how many there are
        loss = library.losses.TripletMarginLoss(margin=1.0, triplets_per_anchor=7, **raw(library, **total(library)))
        assert loss(embeddings * 1e-9, labels).item() == pytest.approx(7 * 9)  # the singleton has no positive


@pytest.mark.parametrize("settings", [cosine, squared, raw, dot], ids=lambda f: f.__name__)
def test_distances(settings):
    x, y = batch(18)[0], batch(19, SIZES[1])[0]
    mine, other = (settings(library)["distance"] for library in (ours, theirs))
    torch.testing.assert_close(mine(x, y), other(x, y), atol=1e-12, rtol=1e-12)
    for name in ("is_inverted", "normalize_embeddings", "p", "power"):
        assert getattr(mine, name) == getattr(other, name)
    assert ours.distances.DotProductSimilarity().normalize_embeddings


@rows
def test_half_precision(row):
    mine, _ = twins(row)
    embeddings, labels = batch(20)
    short = embeddings.detach().to(torch.bfloat16).requires_grad_()
    value = mine(short, labels)
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(short.grad).all()


ONE_SIDED = ("ContrastiveLoss", "MultiSimilarityLoss", "GeneralizedLiftedStructureLoss")


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if not row.args and row.name not in ONE_SIDED and "regularized" not in row.label],
    ids=lambda row: row.id,
)
def test_nothing_to_learn_from(row):
    """A zero with its graph, as in PML; and, other than there, one warning."""
    embeddings, _ = batch(21, (1, 1, 1, 1, 1))
    mine, other = twins(row)
    with pytest.warns(nf.DegenerateBatchWarning, match=f"{row.name}: .*singleton"):
        value = mine(embeddings, torch.arange(5))
    value.backward()
    assert value.item() == other(embeddings, torch.arange(5)).item() == 0
    assert not embeddings.grad.any()


@pytest.mark.parametrize("name", ["TripletMarginLoss", "MarginLoss"])
def test_no_triplet_to_draw(name):
    loss = getattr(ours.losses, name)(triplets_per_anchor=3)
    with pytest.warns(nf.DegenerateBatchWarning, match=f"{name}: .*singleton"):
        assert loss(batch(24)[0], torch.arange(10)).item() == 0
