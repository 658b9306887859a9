"""`Ladder`: the sum over rungs against its oracle, with references and ids, and what it explains."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles import oracle_of
from oracles.gradient import gradient
from table import random_batch, tensors

import nearfar as nf
from nearfar import geometry

L, R = nf.losses, nf.Relation
GROUPS = torch.tensor([5, 5, 6, 6, 6, -1, -1])  # classes 0 and 1 are in one group, 2 to 4 in another


def measured(loss, rows, relation, **more):
    leaf = rows.detach().clone().requires_grad_()
    value = loss(leaf, relation, **more)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


@pytest.mark.parametrize("engine", ["dense", "tiled", "auto"])
@pytest.mark.parametrize("kind", ["tree", "scores", "unknown"])
def test_value_and_gradient_equal_the_oracle(kind, engine):
    E, y = random_batch()
    n, rng = len(y), np.random.default_rng(0)
    table = rng.integers(0, 3, size=(n, n)).astype(float)
    nodes = torch.from_numpy(y)
    relevance = geometry.ladder(GROUPS[nodes], nodes).double().numpy() if kind == "tree" else table.copy()
    unknown = rng.random((n, n)) < 0.3 if kind == "unknown" else np.zeros((n, n), dtype=bool)
    table[unknown] = np.nan
    relation = R.from_tree(GROUPS, nodes) if kind == "tree" else R.from_scores(torch.from_numpy(table))
    hyper = {"relevance": relevance, "rungs": (0, 1), "weights": (0.4, 1.5), "margin": 0.2, "unknown": unknown}
    loss = L.Ladder(L.Triplet(margin=0.2, engine=engine), rungs=(0, 1), weights=(0.4, 1.5))
    value, slope = measured(loss, tensors(E, y)[0], relation)
    exact = E.astype(np.longdouble)
    assert value.item() == pytest.approx(float(oracle_of("Ladder")(exact, y, **hyper)), abs=1e-9)
    if engine == "dense":
        np.testing.assert_allclose(slope, gradient(lambda x: oracle_of("Ladder")(x, y, **hyper), exact), atol=1e-9)
        torch.testing.assert_close(loss.explain(tensors(E, y)[0], relation).value, value)


def test_a_perturbed_gradient():
    E, y = random_batch()
    relation = R.from_tree(GROUPS, torch.from_numpy(y))
    loss = L.Ladder((L.MultiSimilarity(miner=None), L.DroKLGrouped(zero="keep")), rungs=(0, 1))
    assert torch.autograd.gradcheck(lambda x: loss(x, relation), tensors(E, y)[0].requires_grad_())


@pytest.mark.parametrize("make", [L.Triplet, L.MultiSimilarity, L.DroKL, L.SupCon, L.Contrastive])
def test_one_rung_is_the_loss_itself(make):
    rows, y = tensors(*random_batch())
    for a, b in zip(measured(L.Ladder(make()), rows, y), measured(make(), rows, y), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
    found, known = L.Ladder(make()).explain(rows, y), make().explain(rows, y)
    for name in ("value", "losses", "weights", "pull", "influence", "signs"):
        torch.testing.assert_close(getattr(found, name), getattr(known, name))
    assert found.effective_pairs == pytest.approx(known.effective_pairs)


def test_two_rungs_are_two_losses_with_a_reference_and_ids():
    E, y = random_batch()
    rows, nodes = tensors(E, y)
    ids, ref_ids = torch.arange(len(y)), torch.arange(len(y)) + 3
    more = {"ids": ids, "ref_ids": ref_ids}
    relation = R.from_tree(GROUPS, nodes, nodes.flip(0), **more)
    one, other = L.Contrastive(pos_margin=0.3), L.Contrastive(pos_margin=0.1)
    reference = rows.flip(0) + 0.1
    group = GROUPS[nodes]
    wanted = one(rows, R.from_labels(group, group.flip(0), **more), ref_emb=reference)
    wanted = wanted + 2 * other(rows, R.from_labels(nodes, nodes.flip(0), **more), ref_emb=reference)
    loss = L.Ladder([one, other], rungs=[0, 1], weights=[1, 2])
    torch.testing.assert_close(loss(rows, relation, ref_emb=reference), wanted)
    found = loss.explain(rows, relation, ref_emb=reference)
    assert found.pull.shape == (len(y), 2 * len(y))
    torch.testing.assert_close(found.value, wanted)
    many = L.Ladder(L.Triplet(), rungs=(0, 1)).explain(rows, R.from_tree(GROUPS, nodes))
    assert many.positives.shape == many.losses.shape[:2]
    assert len(list(loss.parameters())) == 0
    assert len(list(L.Ladder([L.Margin(), L.Margin()], rungs=(0, 1)).parameters())) == 2


def test_one_rung_over_the_batch_is_cosent():
    """log(1 + Σ over positive and negative pairs of e^{(s_n - s_p) / γ}), of graded pairs and nothing else."""
    rng = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 9, 4, generator=rng, dtype=torch.float64)
    grade, known = torch.tensor([5.0, 1, 2, 4, 0, 3, 3, 5, 1]), torch.full((9, 9), torch.nan)
    known[range(9), range(9)] = grade
    soft = nf.RobustLoss(pair=nf.pairs.Linear(), over=nf.sets.KL(0.05, normalized=False), groups="sign")
    found = L.Ladder(soft, rungs=(2.5,))(a, R.from_scores(known, square=False), ref_emb=b)
    cosines = torch.cosine_similarity(a, b)
    gaps = (cosines[None, :] - cosines[:, None])[(grade[:, None] > 2.5) & (grade[None, :] <= 2.5)] / 0.05
    torch.testing.assert_close(torch.nn.functional.softplus(found / 0.05), torch.log(1 + gaps.exp().sum()))


def test_a_separated_map_has_no_loss_at_margin_zero():
    """Its minima are the ladder of `geometry`: H ≤ 0 on both."""
    centers = torch.tensor([[0.0, 0.0], [1.0, 0.0], [10.0, 0.0], [11.0, 0.0]], dtype=torch.float64)
    nodes = torch.arange(8) // 2
    tree, rows = torch.tensor([4, 4, 5, 5, -1, -1]), centers[nodes] + 0.01
    loss = L.Ladder(L.Triplet(margin=0.0, similarity=nf.similarity.NegEuclidean(normalize=False)), rungs=(0, 1))
    known = geometry.ladder(tree[nodes], nodes)
    assert geometry.hardness(rows, known) == 0
    assert loss(rows, R.from_tree(tree, nodes)) == 0
    rows[0] = 12.0
    assert geometry.hardness(rows, known) > 0
    assert loss(rows, R.from_tree(tree, nodes)) > 0


def test_annealing_advances_and_the_rest_of_the_family_takes_it():
    loss = L.Ladder([L.Triplet(mining="hard", anneal=3), L.Triplet()], rungs=(0, 1))
    loss.step()
    assert loss.loss[0].annealing.done == 1
    rows, y = tensors(*random_batch())
    relation = R.from_tree(GROUPS, y)
    around = L.SpreadFloor(L.Ladder(L.Triplet(), rungs=(0, 1)), floor=0.99)
    assert around(rows, relation) > around.loss(rows, relation)
    assert nf.Distributed(loss)(rows, relation) == loss(rows, relation)
    memory = nf.CrossBatchMemory(L.Ladder(L.Contrastive()), size=20)
    assert torch.isfinite(memory(rows, y) + memory(rows, y))
    assert loss.exact_gradient
    assert not L.Ladder(L.Circle()).exact_gradient


ROWS, Y = tensors(*random_batch())
ERRORS = {
    "no rungs": lambda: L.Ladder(L.Triplet(), rungs=()),
    "too few losses": lambda: L.Ladder([L.Triplet(), L.Triplet()], rungs=(0, 1, 2)),
    "too many weights": lambda: L.Ladder(L.Triplet(), rungs=(0,), weights=(1, 2)),
    "a weight below zero": lambda: L.Ladder(L.Triplet(), weights=(-1,)),
    "a value for each anchor": lambda: L.Ladder(L.SupCon(reduction="none")),
    "a rung of plain labels": lambda: L.Ladder(L.Triplet(), rungs=(0, 1))(ROWS, Y),
    "an index tuple": lambda: L.Ladder(L.Triplet())(ROWS, Y, (Y[:1], Y[1:2], Y[:1], Y[2:3])),
    "mixed explanations": lambda: L.Ladder([L.Triplet(), L.SupCon()], rungs=(0, 1)).explain(
        ROWS, R.from_tree(GROUPS, Y)
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_sentence(name):
    with pytest.raises(ValueError, match=r"^(Ladder|Relation\.at|explain): .*\.$"):
        ERRORS[name]()
    with pytest.raises(TypeError, match=r"^Ladder: loss must be a Loss"):
        L.Ladder(nf.pairs.Hinge())
