"""Miners: each against a loop over rows, with ties, missing sides and weights; and together with several losses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles import mining as oracle
from table import random_batch, tensors, tied_batch

import nearfar as nf
from nearfar.engines import dense_pairs

M, L, R = nf.miners, nf.losses, nf.Relation

FILTERS = {
    "multi-similarity": (M.MultiSimilarity(), oracle.multi_similarity),
    "multi-similarity-0": (M.MultiSimilarity(0.0), lambda *x: oracle.multi_similarity(*x, epsilon=0)),
    "hard": (M.Hard(), oracle.hard),
    "semi-hard": (M.SemiHard(0.3, 0.4), lambda *x: oracle.semi_hard(*x, threshold=0.3, margin=0.4)),
    "semi-hard-open": (M.SemiHard(0.3, None), lambda *x: oracle.semi_hard(*x, threshold=0.3, margin=None)),
    "balanced": (M.BalancedHard(), oracle.balanced_hard),
}
miners = pytest.mark.parametrize("name", FILTERS)


def product(miner=None, similarity=None):
    return nf.RobustLoss(pair=nf.pairs.Hinge(), over=nf.sets.Mean(), miner=miner, similarity=similarity).product


def mined(miner, E, relation, similarity=None, cols=None):
    made = product(miner, similarity)
    rows = made.similarity.prepare(torch.as_tensor(E))
    return dense_pairs(
        made, rows, rows if cols is None else made.similarity.prepare(torch.as_tensor(cols)), relation, None
    )


def measures(pairs):
    return pairs.scores.numpy(), pairs.positive.double().numpy(), pairs.negative.double().numpy()


def lacking(y: np.ndarray) -> torch.Tensor:
    """A relation where row 0 has no positive pair, row 1 no negative pair, row 2 none at all."""
    same = y[:, None] == y[None, :]
    valid = np.ones_like(same)
    same[0], same[1], valid[2] = False, True, False
    return R.from_matrix(torch.tensor(same), torch.tensor(valid))


def relations(kind: str, y: np.ndarray) -> nf.Relation:
    rng = np.random.default_rng(1)
    return {
        "labels": lambda: R.from_labels(torch.tensor(y)),
        "lacking": lambda: lacking(y),
        "whole weights": lambda: R.from_labels(
            torch.tensor(y), weights=torch.tensor(rng.integers(0, 3, (10, 10)) * 1.0)
        ),
        "weights": lambda: R.from_labels(torch.tensor(y), weights=torch.tensor(rng.random((10, 10)))),
    }[kind]()


@miners
@pytest.mark.parametrize("kind", ["labels", "lacking", "whole weights", "weights"])
@pytest.mark.parametrize("batch", [random_batch, tied_batch])
def test_a_filter_keeps_what_the_loop_keeps(name, kind, batch):
    miner, wanted = FILTERS[name]
    E, y = batch()
    relation = relations(kind, y)
    S, A, U = measures(mined(None, E, relation))
    found = mined(miner, E, relation)
    positive, negative = wanted(S, A, U)
    np.testing.assert_array_equal(found.positive.double().numpy(), positive)
    np.testing.assert_array_equal(found.negative.double().numpy(), negative)
    assert 0 < negative.sum() < U.sum()
    if relation.dense().weight is None:
        assert found.positive.dtype == found.negative.dtype == torch.bool


@miners
def test_a_filter_against_a_reference(name):
    miner, wanted = FILTERS[name]
    E, y = random_batch(1)
    C, z = random_batch(2)
    relation = R.from_labels(torch.tensor(y), torch.tensor(z[:7]))
    S, A, U = measures(mined(None, E, relation, cols=C[:7]))
    found = mined(miner, E, relation, cols=C[:7])
    positive, negative = wanted(S, A, U)
    np.testing.assert_array_equal(found.positive.numpy(), positive)
    np.testing.assert_array_equal(found.negative.numpy(), negative)


@pytest.mark.parametrize("name", [*FILTERS, "distance"])
def test_a_whole_weight_is_a_repeated_reference(name):
    """What a miner keeps of a reference that counts twice is what it keeps of two copies of it."""
    miner = FILTERS[name][0] if name in FILTERS else M.DistanceWeighted(sample=False)
    E, y = random_batch(3)
    labels, ids, one = torch.tensor(y), torch.arange(10), torch.ones(10, dtype=torch.float64)
    times = torch.tensor([1, 2, 1, 3, 1, 1, 2, 1, 1, 2])
    again = ids.repeat_interleave(times)
    weighted = R.from_labels(labels, labels, ids=ids, ref_ids=ids, weights=one, ref_weights=times.double())
    repeated = R.from_labels(labels, labels[again], ids=ids, ref_ids=again)
    found, copies = mined(miner, E, weighted, cols=E), mined(miner, E, repeated, cols=E[again])
    for a, b in ((found.positive, copies.positive), (found.negative, copies.negative)):
        summed = torch.zeros(10, 10, dtype=torch.float64).index_add(1, again, b.double())
        torch.testing.assert_close(a.double(), summed, atol=1e-12, rtol=0)


def test_filters_on_a_worked_row():
    """Anchor 0 with positive scores .9, .2 and negative scores .8, .5, .1: the whole of one row by hand."""
    s = torch.tensor([1.0, 0.9, 0.2, 0.8, 0.5, 0.1])
    E = torch.stack([s, (1 - s * s).clamp_min(0).sqrt()], dim=1)
    relation = R.from_labels(torch.tensor([0, 0, 0, 1, 2, 3]))

    def row(miner):
        found = mined(miner, E, relation)
        return [j for j in range(6) if found.positive[0, j]], [j for j in range(6) if found.negative[0, j]]

    assert row(None) == ([1, 2], [3, 4, 5])
    assert row(M.MultiSimilarity(0.05)) == ([2], [3, 4])
    assert row(M.MultiSimilarity(0.11)) == ([1, 2], [3, 4, 5])
    assert row(M.Hard()) == ([2], [3])
    assert row(M.SemiHard(0.6, 0.3)) == ([1, 2], [4])
    assert row(M.SemiHard(0.6, None)) == ([1, 2], [4, 5])
    assert row(M.BalancedHard()) == ([1, 2], [3, 4])


# ---------------------------------------------------------------- distance-weighted sampling

SIMILARITIES = {
    "cosine": nf.similarity.Cosine(),
    "euclidean": nf.similarity.NegEuclidean(),
    "squared": nf.similarity.NegSquaredEuclidean(),
    "dot": nf.similarity.Dot(normalize=True),
}


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize(("dim", "cutoff", "upper"), [(4, 0.5, 1.4), (2, 0.1, 1.9), (3, 0.7, 1.2), (300, 0.5, 1.45)])
@pytest.mark.parametrize("kind", ["labels", "lacking", "weights"])
def test_probabilities_follow_the_formula(similarity, dim, cutoff, upper, kind):
    rng = np.random.default_rng(dim)
    _, y = random_batch(dim)
    E = rng.normal(size=(10, dim))
    E[5:] = E[:5] + 0.3 * rng.normal(size=(5, dim))
    relation = relations(kind, y)
    miner = M.DistanceWeighted(cutoff, upper)
    pairs = mined(None, E, relation, SIMILARITIES[similarity])
    distances = pairs.distances().numpy()
    wanted = oracle.distance_weighted(distances, measures(pairs)[2], dim, cutoff, upper)
    found = miner.probabilities(pairs).numpy()
    np.testing.assert_allclose(found, wanted.astype(np.float64), rtol=1e-8, atol=1e-12)
    assert (wanted > 0).any()
    assert ((wanted > 0) <= (distances < upper)).all()


def test_probabilities_do_not_underflow_in_high_dimensions():
    E = torch.randn(40, 1024, generator=torch.Generator().manual_seed(0)).float()
    pairs = mined(None, E, R.from_labels(torch.arange(40) % 8))
    chance = M.DistanceWeighted(upper=2.0).probabilities(pairs)
    torch.testing.assert_close(chance.sum(dim=1), torch.ones(40), atol=1e-5, rtol=0)
    assert (chance[~pairs.negative] == 0).all()


def test_draws_come_as_often_as_their_probabilities():
    """3,000 minings: counts are whole, sum to the positive pairs, and lie within five standard errors of theirs."""
    torch.manual_seed(5)
    E, y = random_batch(6)
    relation = R.from_labels(torch.tensor(y))
    miner, times = M.DistanceWeighted(0.4, 1.9), 3000
    plain = mined(None, E, relation)
    chance, wanted = miner.probabilities(plain), plain.positive.sum(dim=1).double()
    counts = torch.stack([mined(miner, E, relation).negative for _ in range(times)])
    assert torch.equal(counts, counts.round())
    assert (counts[:, chance == 0] == 0).all()
    drawn = counts.sum(dim=2)
    torch.testing.assert_close(drawn, (wanted * (chance.sum(dim=1) > 0)).expand(times, 10), atol=0, rtol=0)
    mean, spread = counts.mean(dim=0), (wanted[:, None] * chance * (1 - chance) / times).sqrt()
    assert ((mean - wanted[:, None] * chance).abs() <= 5 * spread + 1e-12).all()
    assert (drawn[:, y == 3] == 0).all()  # the singleton has no positive pair and draws none


def test_expected_counts_instead_of_draws():
    E, y = random_batch(6)
    relation = R.from_labels(torch.tensor(y))
    miner = M.DistanceWeighted(0.4, 1.9, sample=False)
    plain, found = mined(None, E, relation), mined(miner, E, relation)
    torch.testing.assert_close(found.negative, miner.probabilities(plain) * plain.positive.sum(dim=1, keepdim=True))
    assert torch.equal(found.positive, plain.positive)


# ---------------------------------------------------------------- with losses

LOSSES = {
    "contrastive": L.Contrastive,
    "margin": L.Margin,
    "top-k": lambda **kw: L.DroTopK(k=3, **kw),
    "pn": lambda **kw: L.DroTopKPN(k=5, **kw),
    "kl": L.DroKL,
    "grouped": L.DroKLGrouped,
    "chi": lambda **kw: L.DroChiSquare(rho=2.0, **kw),
    "lifted": L.LiftedStructure,
    "generalized": L.GeneralizedLifted,
    "hap2s": L.HAP2S,
    "triplet": lambda **kw: L.Triplet(margin=0.4, **kw),
    "triplet-hard": lambda **kw: L.Triplet(margin=0.4, mining="hard", **kw),
    "angular": L.Angular,
    "nt-xent": L.NTXent,
    "supcon": L.SupCon,
    "circle": L.Circle,
    "multi-similarity": lambda **kw: L.MultiSimilarity(miner=kw.get("miner")),
}


@pytest.mark.parametrize("loss", LOSSES)
@miners
def test_a_filtered_loss_is_the_loss_of_the_pairs_that_are_left(loss, name):
    """Mining inside = handing in the list of the pairs that the miner keeps."""
    miner, _ = FILTERS[name]
    embeddings, labels = tensors(*random_batch(2))
    inside = LOSSES[loss](miner=miner).double()
    kept = mined(miner, embeddings.detach(), R.from_labels(labels), inside.similarity)
    listed = (*torch.nonzero(kept.positive, as_tuple=True), *torch.nonzero(kept.negative, as_tuple=True))
    value = inside(embeddings, labels)
    outside = LOSSES[loss]().double()
    wanted = outside(embeddings, labels, listed)
    (slope,) = torch.autograd.grad(value, embeddings)
    (expected,) = torch.autograd.grad(wanted, embeddings)
    torch.testing.assert_close(value, wanted, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(slope, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("loss", LOSSES)
def test_distance_weighted_goes_with_any_loss_and_follows_the_seed(loss):
    embeddings, labels = tensors(*random_batch(2))
    made = LOSSES[loss](miner=M.DistanceWeighted()).double()
    values = []
    for seed in (0, 0, 1, 2, 3):
        torch.manual_seed(seed)
        values.append(made(embeddings, labels).item())
    assert values[0] == values[1]
    assert np.isfinite(values).all()


def test_a_new_filter_is_one_method():
    class Near(M.Miner):
        def forward(self, pairs):
            assert not torch.is_grad_enabled()
            return pairs.keep(negative=pairs.scores > 0)

    embeddings, labels = tensors(*random_batch(2))
    found = L.Contrastive(miner=Near()).explain(embeddings, labels)
    assert ((found.weights > 0) <= ((labels[:, None] == labels) | (found.scores > 0))).all()


def test_filters_say_what_they_are():
    assert repr(M.MultiSimilarity(0.2)) == "MultiSimilarity(epsilon=0.2)"
    assert repr(M.SemiHard()) == "SemiHard(threshold=0.5, margin=0.2)"
    assert repr(M.DistanceWeighted()) == "DistanceWeighted(cutoff=0.5, upper=1.4, sample=True)"
    assert "Hard()" in repr(L.Contrastive(miner=M.Hard()))
