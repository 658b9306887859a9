"""Distances of nearfar.pml, ours, PML's and a user's own: called, and in every loss and miner."""

from __future__ import annotations

import copy

import pytest
import pytorch_metric_learning as theirs
import torch
from pytorch_metric_learning import distances, losses, miners, reducers, regularizers  # noqa: F401 - loads them
from test_pml import CLASSES, SIZES, WIDTH, batch

import nearfar as nf
import nearfar.pml as ours

DISTANCES = {
    "cosine": lambda m: m.distances.CosineSimilarity(),
    "dot": lambda m: m.distances.DotProductSimilarity(),
    "raw dot": lambda m: m.distances.DotProductSimilarity(normalize_embeddings=False),
    "squared dot": lambda m: m.distances.DotProductSimilarity(power=2),
    "euclidean": lambda m: m.distances.LpDistance(),
    "squared": lambda m: m.distances.LpDistance(power=2),
    "raw": lambda m: m.distances.LpDistance(normalize_embeddings=False),
    "cubed": lambda m: m.distances.LpDistance(power=3),
    "city block": lambda m: m.distances.LpDistance(p=1),
    "fourth": lambda m: m.distances.LpDistance(p=4, power=2, normalize_embeddings=False),
    "noise": lambda m: m.distances.SNRDistance(),
    "raw noise": lambda m: m.distances.SNRDistance(normalize_embeddings=False, power=2),
}
KNOWN = ("cosine", "dot", "raw dot", "euclidean", "squared", "raw")
OTHERS = [name for name in DISTANCES if name not in KNOWN]
LOSSES = (
    "ContrastiveLoss", "TripletMarginLoss", "MultiSimilarityLoss", "LiftedStructureLoss",
    "GeneralizedLiftedStructureLoss", "NPairsLoss", "NTXentLoss", "SupConLoss", "MarginLoss",
)  # fmt: skip
CLOSE = {"rtol": 1e-7, "atol": 1e-9}


def made(library, name, distance, **more):
    args = (CLASSES, WIDTH) if "Proxy" in name else ()
    torch.manual_seed(1)
    return getattr(library.losses, name)(*args, distance=distance, **more).double()


@pytest.mark.parametrize("name", DISTANCES)
def test_called(name):
    x, _ = batch(1, SIZES[1])
    y, _ = batch(2, SIZES[0])
    mine, other = (DISTANCES[name](m) for m in (ours, theirs))
    assert (mine.p, mine.power, mine.normalize_embeddings, mine.is_inverted) == (
        other.p, other.power, other.normalize_embeddings, other.is_inverted,
    )  # fmt: skip
    away = ~torch.eye(len(x), dtype=torch.bool)  # products leave a rounding on the diagonal
    torch.testing.assert_close(mine(x)[away], other(x)[away], **CLOSE)
    torch.testing.assert_close(mine(x, y), other(x, y), **CLOSE)
    slopes = [torch.autograd.grad((each(x, y) ** 2).sum(), x)[0] for each in (mine, other)]
    torch.testing.assert_close(*slopes, **CLOSE)
    for part in ("normalize", "maybe_normalize", "get_norm"):
        torch.testing.assert_close(getattr(mine, part)(x), getattr(other, part)(x))
    torch.testing.assert_close(
        mine.pairwise_distance(x[: len(y)], y[: len(x)]), other.pairwise_distance(x[: len(y)], y[: len(x)])
    )
    a, b = x[:, 0], x[:, 1]
    for part in ("margin", "smallest_dist", "largest_dist"):
        assert torch.equal(getattr(mine, part)(a, b), getattr(other, part)(a, b))
    assert mine.smallest_dist(x, dim=1)[1].tolist() == other.smallest_dist(x, dim=1)[1].tolist()


@pytest.mark.parametrize("name", ["cosine", "city block", "noise"])
def test_numbers_of_a_call(name):
    x, _ = batch(1, SIZES[1])
    mine, other = (DISTANCES[name](m) for m in (ours, theirs))
    for each in (mine, other):
        each.__init__(p=each.p, collect_stats=True)
        each(x)
    assert mine._record_these_stats == other._record_these_stats
    for stat in mine._record_these_stats:
        assert getattr(mine, stat) == pytest.approx(getattr(other, stat))
    mine.reset_stats()
    assert mine.final_avg_ref_norm == 0


def test_only_known_ones_are_similarities_of_every_engine():
    for name, make in DISTANCES.items():
        similarity = make(ours).similarity
        assert (type(similarity).__module__ == "nearfar.similarity") == (name in KNOWN)

    class Half(ours.distances.LpDistance):
        def compute_mat(self, query_emb, ref_emb):
            return super().compute_mat(query_emb, ref_emb) / 2

    x, _ = batch(1, SIZES[1])
    assert type(Half().similarity).__name__ == "Matrix"
    torch.testing.assert_close(Half()(x), theirs.distances.LpDistance()(x) / 2, **CLOSE)


@pytest.mark.parametrize("distance", OTHERS)
@pytest.mark.parametrize("name", [*LOSSES, "ProxyNCALoss", "ProxyAnchorLoss"])
def test_in_a_loss(name, distance):
    embeddings, labels = batch(4, SIZES[1])
    mine, other = (made(m, name, DISTANCES[distance](m)) for m in (ours, theirs))
    miner = theirs.miners.BatchHardMiner()
    for more in ((), (miner(embeddings, labels),)):
        found, wanted = mine(embeddings, labels, *more), other(embeddings, labels, *more)
        # an underflow of PML's -log(softmax + tiny), and of a column that is all rounding
        assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
        slopes = [torch.autograd.grad(x, embeddings)[0] for x in (found, wanted)]
        torch.testing.assert_close(*slopes, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", LOSSES)
def test_one_of_pml_is_taken_for_the_same_of_ours(name):
    embeddings, labels = batch(4, SIZES[1])
    for make in DISTANCES.values():
        loss = made(ours, name, make(theirs))
        assert type(loss.distance).__module__ == "nearfar.pml.distances"
        wanted = made(ours, name, make(ours))(embeddings, labels).item()
        assert loss(embeddings, labels).item() == pytest.approx(wanted, rel=1e-12)


class OwnOfTheirs(distances.BaseDistance):
    """|A(x - y)|² with a learned A."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.A = torch.nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))

    def compute_mat(self, query_emb, ref_emb):
        return torch.cdist(query_emb * self.A, ref_emb * self.A) ** 2

    def pairwise_distance(self, query_emb, ref_emb):
        return ((query_emb - ref_emb) * self.A).square().sum(dim=1)


class Own(ours.distances.BaseDistance):
    def __init__(self):
        super().__init__()
        self.A = torch.nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))

    compute_mat, pairwise_distance = OwnOfTheirs.compute_mat, OwnOfTheirs.pairwise_distance


@pytest.mark.parametrize("own", [Own, OwnOfTheirs])
@pytest.mark.parametrize("name", [*LOSSES, "ProxyNCALoss"])
def test_a_distance_of_ones_own(name, own):
    embeddings, labels = batch(5, SIZES[1])
    mine, other = made(ours, name, own()), made(theirs, name, OwnOfTheirs())
    assert list(mine.state_dict()) == list(other.state_dict())
    found, wanted = mine(embeddings, labels), other(embeddings, labels)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-8)
    slopes = [torch.autograd.grad(x, (embeddings, d.A)) for x, d in ((found, mine.distance), (wanted, other.distance))]
    torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-8)
    assert copy.deepcopy(mine)(embeddings, labels).item() == found.item()


@pytest.mark.parametrize("own", [Own, OwnOfTheirs, lambda: ours.distances.LpDistance(p=1)])
@pytest.mark.parametrize("miner", ["MultiSimilarityMiner", "BatchHardMiner", "TripletMarginMiner", "PairMarginMiner"])
def test_in_a_miner(miner, own):
    embeddings, labels = batch(6, SIZES[1])
    kinds = own() if own is not Own else OwnOfTheirs()
    other = getattr(theirs.miners, miner)(distance=theirs.distances.LpDistance(p=1) if kinds.p == 1 else kinds)
    mine = getattr(ours.miners, miner)(distance=own())
    found, wanted = (
        sorted(zip(*(part.tolist() for part in tuples), strict=True)) for each in (mine, other)
        for tuples in [each(embeddings, labels)[:2]]
    )  # fmt: skip
    assert found == wanted


def test_ours_in_losses_and_miners_of_pml():
    embeddings, labels = batch(7, SIZES[1])
    for make in (DISTANCES["euclidean"], DISTANCES["noise"], DISTANCES["cosine"]):
        mine, other = (theirs.losses.NCALoss(distance=make(m))(embeddings, labels) for m in (ours, theirs))
        assert mine.item() == pytest.approx(other.item())
        mine, other = (theirs.miners.BatchHardMiner(distance=make(m))(embeddings, labels) for m in (ours, theirs))
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


def test_a_loss_of_ones_own_takes_ours():
    class Far(ours.losses.BaseMetricLossFunction):
        def compute_loss(self, embeddings, labels, indices_tuple, ref_emb, ref_labels):
            a, p, _, _ = ours.utils.loss_and_miner_utils.convert_to_pairs(indices_tuple, labels, ref_labels)
            found = self.distance(embeddings, ref_emb)[a, p]
            return {"loss": {"losses": found, "indices": (a, p), "reduction_type": "pos_pair"}}

    embeddings, labels = batch(8, SIZES[1])
    mine, other = (
        Far(
            distance=m.distances.LpDistance(power=2),
            reducer=m.reducers.ThresholdReducer(low=0.3),
            embedding_regularizer=m.regularizers.LpRegularizer(),
        )
        for m in (ours, theirs)
    )
    assert mine(embeddings, labels).item() == pytest.approx(other(embeddings, labels).item())
    tuples = ours.miners.BatchHardMiner()(embeddings, labels)
    assert mine(embeddings, labels, tuples).item() == pytest.approx(other(embeddings, labels, tuples).item())


def test_a_subclass_of_ours_may_write_compute_loss():
    class Doubled(ours.losses.ContrastiveLoss):
        def compute_loss(self, embeddings, labels, indices_tuple, ref_emb, ref_labels):
            parts = super().compute_loss(embeddings, labels, indices_tuple, None, None)
            return {name: {**part, "losses": 2 * part["losses"]} for name, part in parts.items()}

        def get_default_distance(self):
            return ours.distances.LpDistance(power=2)

    embeddings, labels = batch(8, SIZES[1])
    once = ours.losses.ContrastiveLoss(distance=ours.distances.LpDistance(power=2))
    assert Doubled()(embeddings, labels).item() == pytest.approx(2 * once(embeddings, labels).item())


def test_blocks():
    x, _ = batch(1, SIZES[1])
    found = torch.zeros(len(x), len(x), dtype=torch.float64)

    def keep(matrix, start, end):
        found[start:end] = matrix

    blocks = ours.distances.BatchedDistance(ours.distances.LpDistance(), keep, batch_size=5)
    assert blocks(x) is None
    torch.testing.assert_close(found, ours.distances.LpDistance()(x).detach(), atol=1e-7, rtol=1e-7)
    assert (blocks.p, blocks.is_inverted) == (2, False)
    with pytest.raises(ValueError, match="BatchedDistance: iter_fn is missing"):
        ours.distances.BatchedDistance(ours.distances.LpDistance())(x)


def test_regularizers_of_pml_in_ours():
    embeddings, labels = batch(9, SIZES[1])
    zero = theirs.regularizers.ZeroMeanRegularizer()
    mine, other = (
        made(m, "ContrastiveLoss", m.distances.LpDistance(), embedding_regularizer=zero, embedding_reg_weight=0.3)
        for m in (ours, theirs)
    )
    assert mine(embeddings, labels).item() == pytest.approx(other(embeddings, labels).item())


def test_a_native_loss_knows_nothing_of_it():
    """A distance that is no similarity of every engine takes the dense engine, whatever is asked for."""
    loss = ours.losses.ContrastiveLoss(distance=ours.distances.LpDistance(p=1))
    assert isinstance(loss.robust, nf.RobustLoss)
    assert loss.robust.similarity.forward.__qualname__ == "Matrix.forward"


def test_a_loss_goes_into_distributed():
    """Among processes: tests/gathered_pml.py; alone it is the loss inside, with its explanation."""
    embeddings, labels = batch(9, SIZES[1])
    for loss in (ours.losses.ContrastiveLoss(), ours.losses.ArcFaceLoss(CLASSES, WIDTH).double()):
        around = nf.Distributed(loss)
        assert around(embeddings, labels).item() == loss(embeddings, labels).item()
        assert list(around.state_dict()) == [f"loss.{name}" for name in loss.state_dict()]
    inner = ours.losses.ContrastiveLoss()
    found, wanted = (each.explain(embeddings, labels) for each in (nf.Distributed(inner), inner.robust))
    assert torch.equal(found.weights, wanted.weights)
    with pytest.raises(TypeError, match="Distributed: loss must be a nearfar loss"):
        nf.Distributed(theirs.losses.NCALoss())
