"""Graded relations against plain loops: scores, trees and listed pairs, their rungs, references, ids and errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from relation_loops import check, looped

import nearfar as nf

R = nf.Relation
PARENTS = [5, 5, 6, 6, -1, 7, 7, -1]  # classes 0 to 3 in groups 5 and 6 of family 7, and class 4 on its own


def path(node):
    found = [node]
    while PARENTS[found[-1]] >= 0:
        found.append(PARENTS[found[-1]])
    return found[::-1]


def common(a, b, levels=3):
    """How many levels have the same ancestor, where a short path repeats its end."""
    a, b = (each + each[-1:] * (levels - len(each)) for each in (path(a), path(b)))
    return sum(x == y for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("rung", [-0.5, 0, 1, 1.5])
def test_scores_of_pairs(square, rung):
    rng = np.random.default_rng(0)
    n, m = (6, 6) if square else (5, 8)
    table = rng.integers(0, 4, size=(n, m)).astype(float)
    table[rng.random((n, m)) < 0.3] = np.nan
    relation = R.from_scores(torch.from_numpy(table), square=square).at(rung)
    rule = looped(lambda i, j: table[i, j] > rung, n, m, square=square, counts=lambda i, j: not np.isnan(table[i, j]))
    check(relation, *rule)


def test_scores_between_labels_with_a_reference_and_ids():
    rng = np.random.default_rng(1)
    table, y, z = rng.normal(size=(4, 4)), rng.integers(0, 4, 6), rng.integers(0, 4, 9)
    ids, ref_ids = np.arange(6), np.arange(4, 13)
    given = {"ids": torch.from_numpy(ids), "ref_ids": torch.from_numpy(ref_ids)}
    relation = R.from_scores(*(torch.from_numpy(x) for x in (table, y, z)), **given).at(0.2)
    check(relation, *looped(lambda i, j: table[y[i], z[j]] > 0.2, 6, 9, ids=ids, ref_ids=ref_ids))
    small = R.from_scores(torch.from_numpy(table), torch.from_numpy(y.astype(np.uint8)))
    check(small, *looped(lambda i, j: table[y[i], y[j]] > 0, 6, 6, square=True))


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("rung", [0, 0.5, 1, 2])
def test_a_tree(rung, reference):
    y, z = np.random.default_rng(2).integers(0, 8, (2, 12))
    y[:2], z = y[2:4], z[:7]
    nodes = [torch.tensor(PARENTS), torch.from_numpy(y), torch.from_numpy(z) if reference else None]
    ids = {"ids": torch.arange(12), "ref_ids": torch.arange(9, 16)} if reference else {}
    other = z if reference else y
    wanted = looped(
        lambda i, j: common(y[i], other[j]) > rung, 12, len(other), square=not reference,
        ids=np.arange(12), ref_ids=np.arange(9, 16),
    )  # fmt: skip
    graded = R.from_tree(*nodes, **ids)
    check(graded.at(rung), *wanted)
    assert graded.at(rung).layout() is not None  # labels, which all engines take
    whole = torch.tensor([[common(a, b) for b in other] for a in y])
    assert torch.equal(graded._grades.tile(slice(None), slice(None)), whole.float())
    if rung == 0:
        check(graded, *wanted)


@pytest.mark.parametrize("reference", [False, True])
def test_listed_pairs(reference):
    rng = np.random.default_rng(3)
    pairs = [(a, b) for a in range(30, 40) for b in range(a + 1, 40)]
    pairs = [pairs[i] for i in rng.permutation(len(pairs))]
    positives, negatives = np.array(pairs[:9])[:, ::-1].copy(), np.array(pairs[9:25])
    ids = rng.permutation(14) + 28  # also samples of no pair
    ref_ids = rng.permutation(12) + 30 if reference else ids
    kinds = [{frozenset(x) for x in side.tolist()} for side in (positives, negatives)]
    relation = R.from_pairs(*(torch.from_numpy(x) for x in (positives, negatives, ids)),
                            torch.from_numpy(ref_ids) if reference else None)  # fmt: skip
    wanted = looped(
        lambda i, j: {ids[i], ref_ids[j]} in kinds[0], 14, len(ref_ids), square=not reference, ids=ids, ref_ids=ref_ids,
        counts=lambda i, j: {ids[i], ref_ids[j]} in kinds[0] or {ids[i], ref_ids[j]} in kinds[1],
    )  # fmt: skip
    check(relation, *wanted)
    assert int(relation.dense().positive.sum()) > 0


def test_no_pairs_are_listed():
    none = torch.zeros(0, 2, dtype=torch.int64)
    assert not R.from_pairs(none, none, torch.arange(3)).dense().valid.any()


def test_several_classes_are_graded_by_how_many_are_shared():
    hot = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 1, 0]])
    relation = R.from_multilabel(hot)
    assert relation.dense().positive.sum() == 6
    assert relation.at(1).dense().positive.tolist() == [[False, True, False], [True, False, False], [False] * 3]


@pytest.mark.parametrize("engine", ["dense", "tiled", "auto"])
@pytest.mark.parametrize("kind", ["scores", "tree", "pairs"])
def test_engines_agree(engine, kind):
    rng = torch.Generator().manual_seed(0)
    n = 24
    rows = torch.randn(n, 5, generator=rng, dtype=torch.float64)
    y = torch.randint(0, 5, (n,), generator=rng)
    pairs = torch.combinations(torch.arange(n))
    made = {
        "scores": lambda: R.from_scores(torch.randn(5, 5, generator=rng).where(torch.eye(5) < 1, 2.0), y),
        "tree": lambda: R.from_tree(torch.tensor(PARENTS), y).at(1),
        "pairs": lambda: R.from_pairs(pairs[::5], pairs[1::3][~torch.isin(
            pairs[1::3] @ torch.tensor([n, 1]), pairs[::5] @ torch.tensor([n, 1]))], torch.arange(n)),
    }[kind]()  # fmt: skip
    tile = made.dense()
    same = R.from_matrix(tile.same, tile.valid)
    for make in (nf.losses.MultiSimilarity, nf.losses.Triplet, lambda **how: nf.losses.DroTopK(k=9, **how)):
        found, wanted = (
            values(make(engine=how), rows, relation) for how, relation in ((engine, made), ("dense", same))
        )
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


def values(loss, rows, relation):
    leaf = rows.clone().requires_grad_()
    value = loss(leaf, relation)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


Y = torch.arange(3)
ERRORS = {
    "rung of labels": (lambda: R.from_labels(Y).at(1), r"Relation.at: labels have relevance 0 or 1, .* came as 1\."),
    "rung of a tree": (lambda: R.from_tree(torch.tensor([-1, 0, 0]), Y).at(2), r"Relation.at: .* are 0 to 1, but"),
    "boolean scores": (lambda: R.from_scores(torch.eye(3).bool()), r"Relation.from_scores: scores must be a matrix"),
    "scores of a line": (lambda: R.from_scores(torch.ones(3)), r"Relation.from_scores: scores must be a matrix"),
    "oblong scores": (lambda: R.from_scores(torch.ones(3, 4)), r"Relation.from_scores: .* square=False"),
    "reference alone": (lambda: R.from_scores(torch.eye(3), None, Y), r"ref_labels go with labels"),
    "label outside": (lambda: R.from_scores(torch.eye(2), Y), r"Relation.from_scores: labels must lie between 0 and 1"),
    "node outside": (lambda: R.from_tree(torch.tensor([-1]), Y), r"Relation.from_tree: labels must lie between 0"),
    "parent outside": (lambda: R.from_tree(torch.tensor([-2, 0, 0]), Y), r"Relation.from_tree: parents must be -1"),
    "a cycle": (lambda: R.from_tree(torch.tensor([1, 2, 0]), Y), r"Relation.from_tree: parents has a cycle"),
    "pairs of three": (lambda: R.from_pairs(torch.ones(2, 3).long(), torch.ones(1, 2).long(), Y), r"two sample ids"),
    "fractions": (lambda: R.from_pairs(torch.ones(2, 2), torch.ones(1, 2).long(), Y), r"two sample ids"),
    "both": (
        lambda: R.from_pairs(torch.tensor([[0, 1]]), torch.tensor([[1, 0]]), Y),
        r"Relation.from_pairs: a pair is listed both as positive and as negative",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_sentence(name):
    make, said = ERRORS[name]
    with pytest.raises(ValueError, match=said):
        make()
