"""A layout tells every pair as the relation's masks do, and lets relations that are not plain take the fast paths."""

from __future__ import annotations

import pytest
import torch

import nearfar as nf
from nearfar.engines.runs import Runs
from nearfar.engines.tiled import lean_way

R = nf.Relation
Y = torch.tensor([0, 2, 1, 0, 3, 1, 2, 0, 4, 1, 0, 2])
Z = torch.tensor([1, 0, 5, 2, 0, 1, 1])
MARKS = torch.tensor([1, 0, 1, 0, 1, 0, 0, 0, 1, 0, 0, 1], dtype=torch.bool)
IDS, REF_IDS = torch.arange(12), torch.tensor([20, 3, 21, 6, 7, 22, 22])
BEHIND = torch.cat([Y, Z])


def cases():
    n = torch.arange(12)
    return {
        "plain": R.from_labels(Y),
        "reference": R.from_labels(Y, Z),
        "ignored": R.from_labels(Y, ignore=0),
        "ignored, reference": R.from_labels(Y, Z, ignore=1),
        "ids": R.from_labels(Y, Z, ids=IDS, ref_ids=REF_IDS),
        "ids of the batch": R.from_labels(Y, Y.flip(0), ids=n, ref_ids=n.flip(0)),
        "memory": R.from_labels(Y, BEHIND, reference_starts_with_batch=True),
        "memory, ids, ignored": R.from_labels(
            Y, BEHIND, ids=IDS, ref_ids=torch.cat([IDS, REF_IDS]), reference_starts_with_batch=True, ignore=2
        ),
        "representatives": R.from_labels(Y, representatives=MARKS),
        "others": R.from_labels(Y, representatives=MARKS).projected("others"),
        "among": R.from_labels(Y, representatives=MARKS, among_representatives=True, ignore=1),
        "weights": R.from_labels(Y, weights=torch.where(MARKS, 0.0, 1.0 + n), ignore=2),
        "weights, reference": R.from_labels(Y, Z, weights=1.0 + n, ref_weights=torch.arange(7.0)),
        "one a class": R.from_labels(Y).one_a_class(),
        "memory, one a class": R.from_labels(Y, BEHIND, reference_starts_with_batch=True).one_a_class(),
        "one a class, reference": R.from_labels(Y, Z, ignore=0).one_a_class(),
    }


def rebuilt(relation):
    """The masks of positive and negative pairs [n, m] that a layout stands for."""
    layout = relation.layout()
    n, m = relation.shape
    rows = torch.arange(n) if layout.rows is None else layout.rows
    cols = torch.arange(m) if layout.cols is None else layout.cols
    same = layout.row_labels[:, None] == layout.col_labels[None, :]
    counts = layout.counts(torch.arange(len(rows))[:, None], torch.arange(len(cols))[None, :])
    positive, negative = torch.zeros(2, n, m, dtype=torch.bool if layout.weights is None else None)
    weight = True if layout.weights is None else torch.outer(*layout.weights)
    positive[rows[:, None], cols[None, :]] = (same if counts is None else same & counts) * weight
    negative[rows[:, None], cols[None, :]] = ~same * weight
    return positive, negative


@pytest.mark.parametrize("name", cases())
def test_a_layout_tells_what_the_masks_tell(name):
    relation = cases()[name]
    whole = relation.dense()
    positive, negative = rebuilt(relation)
    assert torch.equal(positive, whole.positive)
    assert torch.equal(negative, whole.negative)


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("loss", ["MultiSimilarity", "SupCon", "Contrastive", "DroKL", "Triplet", "Angular"])
def test_what_is_not_plain_takes_the_fast_path_too(name, loss):
    relation = cases()[name]
    weighed = "weights" in name and loss in ("Triplet", "Angular")
    assert (lean_way(getattr(nf.losses, loss)().product, relation) is None) == weighed


@pytest.mark.parametrize("name", cases())
def test_rows_with_a_positive_column_are_those_of_the_masks(name):
    relation = cases()[name]
    layout, whole = relation.layout(), relation.dense()
    runs = Runs(layout)
    assert torch.equal(layout.back(runs.has_positive(), 0, 12), (whole.positive > 0).any(dim=1))
    assert torch.equal(layout.back(runs.has_negative(), 0, 12), (whole.negative > 0).any(dim=1))


def test_a_layout_says_how_many_columns_are_the_row_itself():
    assert [cases()[name].layout().own for name in ("plain", "reference", "memory", "ids")] == [1, 0, 1, None]


def test_one_sample_of_two_labels_is_left_to_the_masks():
    ids = torch.tensor([20, 3, 21, 6, 7, 8, 22])  # 8 has label 4 among the rows and 1 here
    relation = R.from_labels(Y, Z, ids=IDS, ref_ids=ids)
    assert relation.layout() is None
    assert lean_way(nf.losses.MultiSimilarity().product, relation) is None


def test_weights_of_pairs_and_matrices_are_left_to_the_masks():
    assert R.from_labels(Y, weights=torch.rand(12, 12)).layout() is None
    assert R.from_matrix(Y[:, None] == Y[None, :]).layout() is None
    assert R.from_multilabel(torch.eye(3)).layout() is None
