"""Losses under representatives (PROFS): six of them against loops, and no pair without a representative."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles.gradient import gradient
from oracles.sets import log_one_plus_sum, log_sum
from oracles.similarity import dot, scores, unit

import nearfar as nf
from nearfar.batches import violations

L = nf.losses
ZERO = np.longdouble(0)


# ---------------------------------------------------------------- the six losses, by loops
# R are the representatives of a batch, O the other rows; d distances of unit rows.


def _parts(y, star):
    return [i for i in range(len(y)) if star[i]], [i for i in range(len(y)) if not star[i]]


def _balanced(D, y, star, among=False):
    """For each r: its positives j in O, and as many of its nearest negatives in O (and, `among`, in R)."""
    R, O = _parts(y, star)
    for r in R:
        positives = [j for j in O if y[j] == y[r]]
        negatives = [k for k in (O + R if among else O) if y[k] != y[r]]
        negatives.sort(key=lambda k, r=r: D[r, k])
        yield r, positives, negatives[: len(positives)]


def _average(values):
    return sum(values, ZERO) / len(values) if values else ZERO


def contrastive(E, y, star, pos_margin=0, neg_margin=1, among=False):
    D = -scores(E, E, "neg_euclidean")
    terms = []
    for r, positives, negatives in _balanced(D, y, star, among):
        terms += [np.maximum(D[r, j] - pos_margin, 0) ** 2 for j in positives]
        terms += [np.maximum(neg_margin - D[r, k], 0) ** 2 for k in negatives]
    return _average(terms)


def margin(E, y, star, width=0.2, threshold=1.2):
    D = -scores(E, E, "neg_euclidean")
    terms = []
    for r, positives, negatives in _balanced(D, y, star):
        terms += [np.maximum(width + D[r, j] - threshold, 0) for j in positives]
        terms += [np.maximum(width - D[r, k] + threshold, 0) for k in negatives]
    return _average(terms)


def triplet(E, y, star, width=0.3):
    """The i-th positive with the i-th hardest negative, squared distances."""
    D = -scores(E, E, "neg_squared_euclidean")
    terms = []
    for r, positives, negatives in _balanced(D, y, star):
        terms += [np.maximum(D[r, j] - D[r, k] + width, 0) for j, k in zip(positives, negatives, strict=False)]
    return _average(terms)


def lifted(E, y, star, width=1):
    D = -scores(E, E, "neg_euclidean")
    R, O = _parts(y, star)
    terms = []
    for r in R:
        for j in O:
            if y[j] != y[r]:
                continue
            exponents = [width - D[r, k] for k in O + R if y[k] != y[r]] + [width - D[j, q] for q in R if y[q] != y[j]]
            terms.append(np.maximum(D[r, j] + log_sum(exponents), 0) ** 2 / 2 if exponents else ZERO)
    return _average(terms)


def n_pair(E, y, star, l2=0.02):
    E = np.asarray(E, dtype=np.longdouble)
    R, O = _parts(y, star)
    terms = []
    for j in O:
        for r in R:
            if y[r] == y[j]:
                others = [dot(E[j], E[q]) - dot(E[j], E[r]) for q in R if y[q] != y[j]]
                terms.append(log_one_plus_sum(others))
    return _average(terms) + l2 * _average([dot(x, x) for x in E])


def angular(E, y, star, degrees=40):
    X = [unit(x) for x in np.asarray(E, dtype=np.longdouble)]
    t = np.tan(degrees * 4 * np.arctan(np.longdouble(1)) / 180) ** 2
    R, O = _parts(y, star)
    terms = []
    for j in O:
        for r in R:
            if y[r] == y[j]:
                others = [4 * t * dot(X[j] + X[r], X[q]) - 2 * (1 + t) * dot(X[j], X[r]) for q in R if y[q] != y[j]]
                terms.append(log_one_plus_sum(others))
    return _average(terms)


def balanced():
    return nf.miners.BalancedHard()


SIX = {
    "contrastive": (lambda: L.Contrastive(miner=balanced()), contrastive),
    "margin": (lambda: L.Margin(miner=balanced()), margin),
    "triplet": (
        lambda: L.Triplet(margin=0.3, mining="balanced", similarity=nf.similarity.NegSquaredEuclidean()),
        triplet,
    ),
    "lifted": (L.LiftedStructure, lifted),
    "n_pair": (L.NPair, n_pair),
    "angular": (L.Angular, angular),
}


def batch(seed: int, samples: int = 3, classes: int = 4):
    """Representatives first, as the sampler gives them, or shuffled among the others."""
    rng = np.random.default_rng(seed)
    y = np.concatenate([np.arange(classes), np.repeat(np.arange(classes), samples - 1)])
    star = np.arange(len(y)) < classes
    order = rng.permutation(len(y)) if seed % 2 else np.arange(len(y))
    return rng.normal(size=(len(y), 4)), y[order], star[order]


def related(y, star, **more):
    return nf.Relation.from_labels(torch.tensor(y), representatives=torch.tensor(star), **more)


def value_and_gradient(loss, E, relation):
    x = torch.tensor(E, requires_grad=True)
    value = loss(x, relation)
    value.backward()
    return value.item(), x.grad.numpy()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SIX)
def test_value_and_gradient(name, seed):
    make, oracle = SIX[name]
    E, y, star = batch(seed, samples=2 + seed % 3)
    value, slope = value_and_gradient(make().double(), E, related(y, star))
    assert abs(value - float(oracle(E, y, star))) < 1e-9
    np.testing.assert_allclose(slope, gradient(lambda x: oracle(x, y, star), E), atol=1e-9)


@pytest.mark.parametrize("name", SIX)
def test_unequal_classes(name):
    """A representative alone, a class without one, and one of each size."""
    make, oracle = SIX[name]
    rng = np.random.default_rng(9)
    y = np.array([0, 1, 2, 0, 0, 0, 1, 1, 3, 3])
    star = np.array([1, 1, 1, 0, 0, 0, 0, 0, 0, 0], dtype=bool)
    E = rng.normal(size=(10, 4))
    value, slope = value_and_gradient(make().double(), E, related(y, star))
    assert abs(value - float(oracle(E, y, star))) < 1e-9
    np.testing.assert_allclose(slope, gradient(lambda x: oracle(x, y, star), E), atol=1e-9)


def test_pairs_of_representatives_on_request():
    E, y, star = batch(2)
    # class 0 and 1 nearly meet in their representatives, so that these are the hardest
    E[1] = E[0] + 0.01
    value, slope = value_and_gradient(
        L.Contrastive(miner=balanced()).double(), E, related(y, star, among_representatives=True)
    )
    assert abs(value - float(contrastive(E, y, star, among=True))) < 1e-9
    assert abs(value - float(contrastive(E, y, star))) > 1e-3
    np.testing.assert_allclose(slope, gradient(lambda x: contrastive(x, y, star, among=True), E), atol=1e-9)


# ---------------------------------------------------------------- no pair without a representative


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SIX)
def test_no_pair_joins_two_non_representatives(name, seed):
    make, _ = SIX[name]
    E, y, star = batch(seed)
    E[len(E) // 2 :] *= 0.3
    found = make().double().explain(torch.tensor(E), related(y, star))
    weights, influence = found.weights, found.influence
    if weights.ndim == 3:  # triplets: anchor, positive, negative
        weight = (weights.abs() + influence.abs()) > 0
        at = torch.nonzero(weight)
        assert len(at)
        a, n = at[:, 0].numpy(), at[:, 2].numpy()
        p = found.positives[at[:, 0], at[:, 1]].numpy()
        couples = [(a, p), (a, n)] + ([(p, n)] if name == "angular" else [])
    else:
        at = torch.nonzero((weights.abs() + influence.abs()) > 0)
        assert len(at)
        couples = [(at[:, 0].numpy(), at[:, 1].numpy())]
    pulled = torch.nonzero(found.pull)
    couples.append((pulled[:, 0].numpy(), pulled[:, 1].numpy()))
    for i, j in couples:
        assert (star[i] | star[j]).all()
    # and the same losses on plain labels do join them, so that the test can fail
    plain = make().double().explain(torch.tensor(E), torch.tensor(y))
    if name != "n_pair":  # its plain rule takes two rows a class, which may be any
        i, j = torch.nonzero(plain.pull).numpy().T
        assert not (star[i] | star[j]).all()


@pytest.mark.parametrize("make", [L.DroKL, L.MultiSimilarity, L.SupCon, lambda: L.DroTopK(k=4), L.NTXent, L.HAP2S])
def test_any_loss_keeps_to_the_rule(make):
    E, y, star = batch(1)
    pull = make().double().explain(torch.tensor(E), related(y, star)).pull
    i, j = torch.nonzero(pull).numpy().T
    assert len(i)
    assert (star[i] & ~star[j]).all()


def test_each_pair_counts_once():
    """DroTopK(k) keeps k pairs, not 2k entries: a pair stands in the row of its representative alone."""
    E, y, star = batch(1)
    found = L.DroTopK(k=3).double().explain(torch.tensor(E), related(y, star))
    assert int((found.weights > 0).sum()) == 3
    assert related(y, star).orders == 1


def test_swap_is_refused():
    E, y, star = batch(0)
    with pytest.raises(ValueError, match="swap compares a positive with a negative"):
        L.Triplet(swap=True)(torch.tensor(E), related(y, star))


# ---------------------------------------------------------------- the relation itself


@pytest.mark.parametrize("seed", range(2))
def test_the_masks(seed):
    _, y, star = batch(seed)
    row, col, same = star[:, None], star[None, :], y[:, None] == y[None, :]
    plain = related(y, star)
    np.testing.assert_array_equal(plain.dense().valid.numpy(), row & ~col)
    np.testing.assert_array_equal(plain.projected("others").dense().valid.numpy(), ~row & col)
    among = related(y, star, among_representatives=True)
    np.testing.assert_array_equal(among.dense().valid.numpy(), row & (~col | ~same))
    np.testing.assert_array_equal(
        plain.projected("representatives", among=True).dense().valid.numpy(), among.dense().valid.numpy()
    )
    assert torch.equal(plain.tile(slice(2, 5), slice(1, 7)).positive, plain.dense().positive[2:5, 1:7])
    assert plain.anchors == "representatives"
    assert nf.Relation.from_labels(torch.tensor(y)).anchors is None


@pytest.mark.parametrize("name", ["contrastive", "triplet", "n_pair", "angular"])
def test_the_reference_form(name):
    """Rows of one part against the whole batch, twice: the parts' pairs are those of the plain form."""
    make, _ = SIX[name]
    E, y, star = batch(0)
    x, labels, mask, ids = torch.tensor(E), torch.tensor(y), torch.tensor(star), torch.arange(len(y))
    relation = nf.Relation.from_labels(
        labels, labels, ids=ids, ref_ids=ids, representatives=mask, ref_representatives=mask
    )
    loss = make().double()
    torch.testing.assert_close(loss(x, relation, ref_emb=x), loss(x, related(y, star)), atol=1e-12, rtol=0)


def test_bad_masks():
    y = torch.tensor([0, 0, 1, 1])
    for mask in (torch.tensor([1, 0, 1, 0]), torch.tensor([True, False])):
        with pytest.raises(ValueError, match=r"representatives must be a boolean mask of shape \[4\]"):
            nf.Relation.from_labels(y, representatives=mask)
    with pytest.raises(ValueError, match="pass one for each set of labels"):
        nf.Relation.from_labels(y, y, representatives=torch.ones(4, dtype=torch.bool))
    with pytest.raises(ValueError, match="pass one for each set of labels"):
        nf.Relation.from_labels(y, among_representatives=True)


# ---------------------------------------------------------------- balanced triplets on plain labels


def test_balanced_triplets_without_representatives():
    """Each anchor's i-th positive meets its i-th nearest negative, and as many triplets as positive pairs are
    formed.
    """
    rng = np.random.default_rng(3)
    E, y = rng.normal(size=(9, 4)), np.array([0, 0, 0, 1, 1, 1, 2, 2, 3])
    D = -scores(E, E, "neg_euclidean")
    terms = []
    for a in range(9):
        positives = [p for p in range(9) if p != a and y[p] == y[a]]
        negatives = sorted((n for n in range(9) if y[n] != y[a]), key=lambda n, a=a: D[a, n])
        terms += [max(D[a, p] - D[a, n] + 0.4, 0) for p, n in zip(positives, negatives, strict=False)]
    value = L.Triplet(margin=0.4, mining="balanced").double()(torch.tensor(E), torch.tensor(y))
    assert abs(value.item() - float(sum(terms) / len(terms))) < 1e-12


# ---------------------------------------------------------------- proposition 4.1


def feasible(inner: float, seed: int = 0):
    """Three tight classes on the unit circle, 120 degrees apart: positive within `inner`, negative farther than 1.2."""
    rng = np.random.default_rng(seed)
    y = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2])
    half = np.arcsin(inner / 2)
    angle = 2 * np.pi * y / 3 + rng.uniform(-half, half, size=9)
    x = torch.tensor(np.stack([np.cos(angle), np.sin(angle)], axis=1))
    return x, torch.tensor(y), torch.arange(9) < 3


def test_proposition_4_1():
    """On a feasible embedding triplet and margin losses are zero; contrastive is only when ε₊ = 0 (errata)."""
    near, far = 0.335, 1.2
    x, y, mask = feasible(near)
    relation = nf.Relation.from_labels(y, representatives=mask)
    assert violations(x, y, max_positive_distance=near, min_negative_distance=far).share == 0
    triplet_ = L.Triplet(margin=far**2 - near**2, similarity=nf.similarity.NegSquaredEuclidean())
    middle = (near + far) / 2
    margin_ = L.Margin(margin=(far - near) / 2, beta=middle, learn=False)
    for labels in (y, relation):
        assert triplet_(x, labels).item() == 0
        assert margin_(x, labels).item() == 0
        assert L.Contrastive(neg_margin=far)(x, labels).item() > 1e-3
        assert L.Contrastive(pos_margin=near, neg_margin=far)(x, labels).item() == 0
    point, y, mask = feasible(0.0)
    # the class meets in one point up to a rounding of the square root: 2e-8
    assert L.Contrastive(neg_margin=far)(point, y).item() < 1e-14
    # an infeasible embedding costs something
    x, y, _ = feasible(0.9)
    assert triplet_(x, y).item() > 0
