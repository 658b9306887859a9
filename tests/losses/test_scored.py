"""`CoSENT` of scored pairs: against a loop over pairs of pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles.similarity import scores as all_scores

import nearfar as nf

CoSENT = nf.losses.CoSENT


def batch(n=9):
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, 4)), rng.normal(size=(n, 4)), rng.integers(0, 4, n) / 3


def loop(X, Y, labels, temperature):
    own = np.diag(all_scores(X.astype(np.longdouble), Y.astype(np.longdouble), "cosine"))
    terms = [(own[k] - own[i]) / temperature for i, a in enumerate(labels) for k, b in enumerate(labels) if a > b]
    return float(np.log1p(sum(np.exp(term) for term in terms)))


@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_scores_equal_the_loop(temperature):
    X, Y, labels = batch()
    x, y = (torch.tensor(z, requires_grad=True) for z in (X, Y))
    loss = CoSENT(temperature=temperature)
    for _ in range(5):  # the last ones by a recording
        value = loss(x, torch.tensor(labels), ref_emb=y)
    assert value.item() == pytest.approx(loop(X, Y, labels, temperature), abs=1e-10)
    assert torch.autograd.gradcheck(lambda x, y: loss(x, torch.tensor(labels), ref_emb=y), (x, y))


def test_scores_of_two_values_are_positive_and_negative_pairs():
    X, Y, labels = batch()
    x, y = torch.tensor(X), torch.tensor(Y)
    valid, same = torch.eye(9, dtype=torch.bool), torch.tensor(labels > 0.5)
    relation = nf.Relation.from_matrix(same[:, None] & valid, valid, square=False)
    wanted = CoSENT()(x, torch.tensor(labels > 0.5).double(), ref_emb=y)
    torch.testing.assert_close(CoSENT()(x, relation, ref_emb=y), wanted)


@pytest.mark.parametrize("labels", [torch.zeros(6), torch.arange(6) * 0, torch.arange(6)])
@pytest.mark.filterwarnings("ignore::nearfar.DegenerateBatchWarning")
def test_without_pairs_to_compare_it_is_zero(labels):
    rows = torch.randn(6, 3, requires_grad=True)
    others = rows.detach().flip(0) if labels.is_floating_point() else None
    value = CoSENT()(rows, labels, ref_emb=others)
    value.backward()
    assert value == 0
    assert not rows.grad.any()


def test_what_is_no_list_of_pairs_is_one_sentence():
    rows, scores = torch.randn(4, 3), torch.rand(4)
    for call in ({"ref_emb": rows[:3]}, {"ref_emb": rows, "ids": torch.arange(4)}):
        with pytest.raises(ValueError, match="CoSENT: scores are those of pairs of a row and a reference row"):
            CoSENT()(rows, scores, **call)
    with pytest.raises(ValueError, match="CoSENT: scored pairs have no explanation"):
        CoSENT().explain(rows, scores, ref_emb=rows)
