"""ROC AUC and TAR at FAR by counting pairs; drawn pairs against all pairs."""

from __future__ import annotations

import pytest
import torch
from oracles import retrieval as oracle
from sklearn.metrics import roc_auc_score

from nearfar.evaluation import verification

torch.set_num_threads(1)


def problem(kind, n=40):
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 5, (n,), generator=generator)
    if kind == "tied":
        return (torch.randint(0, 2, (n, 3), generator=generator) * 2 - 1).double(), y
    return torch.nn.functional.one_hot(y, 5).double() + torch.randn(n, 5, generator=generator, dtype=torch.float64), y


@pytest.mark.parametrize("kind", ["random", "tied"])
@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean"])
def test_equals_counting(kind, similarity):
    x, y = problem(kind)
    rates = (0.5, 0.29, 0.1, 0.01, 0.0)
    found = verification(x, y, far=rates, similarity=similarity)
    positive, negative = oracle.positive_and_negative(oracle.scores(x.tolist(), x.tolist(), similarity), y.tolist())
    assert (found.positive, found.negative, found.sampled) == (len(positive), len(negative), False)
    assert found.auc == pytest.approx(oracle.auc(positive, negative), abs=1e-6)
    for rate in rates:
        assert found.tar[rate] == pytest.approx(oracle.tar_at_far(positive, negative, rate))
        assert sum(s > found.threshold[rate] + 1e-6 for s in negative) <= rate * len(negative) + 1e-9


def test_auc_equals_sklearn():
    x, y = problem("random")
    S = oracle.scores(x.tolist(), x.tolist(), "cosine")
    pairs = [(S[i, j], y[i] == y[j]) for i in range(len(y)) for j in range(i)]
    assert verification(x, y).auc == pytest.approx(roc_auc_score([s for _, s in pairs], [s for s, _ in pairs]))


def test_by_hand():
    """Positive pairs 1 and 0.6; negative ones 0.8, 0, 0, 0: the threshold for FAR 0.25 stands above the zeros."""
    x = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.6, 0.8], [0.0, 1.0, 0.0]])
    found = verification(x, torch.tensor([0, 0, 1, 1]), far=(0.25, 0.1))
    assert (found.positive, found.negative) == (2, 4)
    assert found.auc == 1.0
    assert found.tar == {0.25: 1.0, 0.1: 1.0}


def test_a_share_of_the_pairs_that_rounds_badly():
    """Two classes of ten have 100 negative pairs; 0.29 of them is 29, though 0.29 * 100 is 28.999999999999996."""
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.arange(20) // 10
    positive, negative = oracle.positive_and_negative(oracle.scores(x.tolist(), x.tolist(), "dot"), y.tolist())
    assert oracle.tar_at_far(positive, negative, 0.28) < oracle.tar_at_far(positive, negative, 0.29)
    assert verification(x, y, far=(0.29,), similarity="dot").tar[0.29] == oracle.tar_at_far(positive, negative, 0.29)


def test_drawn_pairs_come_near_all_pairs():
    x, y = problem("random", n=150)
    every, drawn = verification(x, y), verification(x, y, pairs=40_000)
    assert (drawn.positive, drawn.negative, drawn.sampled) == (40_000, 40_000, True)
    assert drawn.auc == pytest.approx(every.auc, abs=0.01)
    assert drawn.tar[0.1] == pytest.approx(every.tar[0.1], abs=0.02)
    assert verification(x, y, pairs=500, seed=1) == verification(x, y, pairs=500, seed=1)
    assert verification(x, y, pairs=500, seed=1) != verification(x, y, pairs=500, seed=2)


def test_drawn_pairs_are_positive_and_negative():
    """Rows that name their class: every positive pair scores 1, every negative one 0, whatever the sizes."""
    y = torch.tensor([0] * 2 + [1] * 30 + [2] + [3] * 5)
    found = verification(torch.eye(4)[y], y, pairs=3000)
    assert found.auc == 1.0
    assert found.threshold[0.1] == 0.0


@pytest.mark.parametrize("pairs", [None, 100])
@pytest.mark.parametrize(("labels", "kind"), [([0, 1, 2], "positive"), ([0, 0, 0], "negative")])
def test_a_missing_kind_is_named(pairs, labels, kind):
    with pytest.raises(ValueError, match=f"no {kind} pairs"):
        verification(torch.eye(3), torch.tensor(labels), pairs=pairs)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"far": (1.5,)}, "shares in 0..1"),
        ({"pairs": 0}, "1 or more"),
        ({"similarity": "cos"}, "one of"),
        ({"embeddings": torch.tensor([[1.0], [torch.inf], [0.0]])}, "rows 1"),
    ],
)
def test_errors(given, words):
    with pytest.raises(ValueError) as error:
        verification(**{"embeddings": torch.ones(3, 1), "labels": torch.tensor([0, 0, 1]), **given})
    assert words in str(error.value)


def test_too_many_rows_for_all_pairs():
    with pytest.raises(ValueError, match="pairs=1_000_000"):
        verification(torch.zeros(20_001, 1), torch.zeros(20_001, dtype=torch.long))
