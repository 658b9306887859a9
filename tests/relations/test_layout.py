"""A layout tells every pair as the relation's masks do, and lets relations that are not plain take the operators."""

from __future__ import annotations

import pytest
import torch

import nearfar as nf
from nearfar.engines.runs import columns
from nearfar.engines.tiled import lean_way

R = nf.Relation
Y = torch.tensor([0, 2, 1, 0, 3, 1, 2, 0, 4, 1, 0, 2])
Z = torch.tensor([1, 0, 5, 2, 0, 1, 1])
MARKS = torch.tensor([1, 0, 1, 0, 1, 0, 0, 0, 1, 0, 0, 1], dtype=torch.bool)
IDS, REF_IDS = torch.arange(12), torch.tensor([20, 3, 21, 6, 7, 22, 22])
BEHIND = torch.cat([Y, Z])
SEED = torch.Generator().manual_seed(4)
HOT, SAME = torch.rand(12, 6, generator=SEED) < 0.2, torch.rand(12, 12, generator=SEED) < 0.2


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
        **{name: make() for name, make in LISTS.items()},
    }


LISTS = {
    "several labels": lambda: R.from_multilabel(HOT),
    "several labels, reference": lambda: R.from_multilabel(HOT, HOT[:7].flip(1)),
    "several labels, ids": lambda: R.from_multilabel(HOT, HOT[:7], ids=IDS, ref_ids=REF_IDS),
    "several labels, weights": lambda: R.from_multilabel(HOT, weights=1.0 + torch.arange(12)),
    "matrix": lambda: R.from_matrix(SAME),
    "matrix, marks": lambda: R.from_matrix(SAME | SAME.T, MARKS[:, None] | MARKS[None, :]),
    "matrix, reference": lambda: R.from_matrix(SAME[:, :5], square=False),
    "matrix without positives": lambda: R.from_matrix(torch.zeros(12, 7, dtype=torch.bool), square=False),
    "weights of pairs": lambda: R.from_labels(Y, weights=torch.where(SAME, torch.arange(12.0), 1.0), ignore=2),
    "weights of pairs, memory": lambda: R.from_labels(
        Y, BEHIND, ids=IDS, ref_ids=torch.cat([IDS, REF_IDS]), weights=torch.arange(12.0 * 19).view(12, 19) % 5,
        reference_starts_with_batch=True,
    ),
    "a sample of two labels": lambda: R.from_labels(Y, Z, ids=IDS, ref_ids=torch.tensor([20, 3, 21, 6, 7, 8, 22])),
}  # fmt: skip
"""Relations that no labels tell; 8 has label 4 among the rows and 1 among the columns."""


def rebuilt(relation):
    """The masks of positive and negative pairs [n, m] that a layout stands for."""
    layout = relation.layout()
    n, m = relation.shape
    rows = torch.arange(n) if layout.rows is None else layout.rows
    cols = torch.arange(m) if layout.cols is None else layout.cols
    runs = columns(layout, torch.float32)
    narrow = runs.narrow(slice(0, len(rows)))
    assert (narrow.place.sort(dim=1).values.diff(dim=1) > 0).all()  # all different within a row
    run, kept = torch.zeros(2, len(rows), len(cols)).bool()
    here = torch.arange(len(rows))[:, None]
    run[here, runs.order[narrow.place]], kept[here, runs.order[narrow.place]] = narrow.run, narrow.positive
    weight = torch.ones(len(rows), len(cols))
    if runs.weights is not None:
        weight[:, runs.order] = runs.weigh_(torch.empty_like(weight), slice(0, len(rows)))
        at = torch.where(narrow.positive, weight[here, runs.order[narrow.place]], 0.0)
        assert torch.equal(at, narrow.weight)
    positive, negative = torch.zeros(2, n, m)
    positive[rows[:, None], cols[None, :]] = kept * weight
    negative[rows[:, None], cols[None, :]] = ~run * weight
    return positive, negative


@pytest.mark.parametrize("name", cases())
def test_a_layout_tells_what_the_masks_tell(name):
    relation = cases()[name]
    whole = relation.dense()
    positive, negative = rebuilt(relation)
    assert torch.equal(positive, whole.positive.float())
    assert torch.equal(negative, whole.negative.float())


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize(
    "loss", ["MultiSimilarity", "SupCon", "Contrastive", "DroKL", "Triplet", "Angular", "LiftedStructure"]
)
def test_what_is_not_plain_takes_the_fast_path_too(name, loss):
    assert lean_way(getattr(nf.losses, loss)().product, cases()[name]) is not None


@pytest.mark.parametrize("name", cases())
def test_rows_with_a_positive_column_are_those_of_the_masks(name):
    relation = cases()[name]
    layout, whole = relation.layout(), relation.dense()
    runs = columns(layout, torch.float64)
    assert torch.equal(layout.back(runs.has_positive(), 0, 12), (whole.positive > 0).any(dim=1))
    assert torch.equal(layout.back(runs.has_negative(), 0, 12), (whole.negative > 0).any(dim=1))


def test_a_layout_says_how_many_columns_are_the_row_itself():
    assert [cases()[name].layout().own for name in ("plain", "reference", "memory", "ids")] == [1, 0, 1, None]


def test_relations_that_no_labels_tell_are_lists():
    lists = {name for name, relation in cases().items() if relation.layout().near is not None}
    assert lists == set(LISTS)


def test_a_list_is_symmetric_where_pairs_in_both_orders_are_alike():
    square = {name for name in LISTS if cases()[name].layout().square}
    assert square == {"several labels", "several labels, weights", "matrix, marks"}


@pytest.mark.parametrize("kind", ["matrix", "several labels", "absent", "weights"])
def test_long_lists_are_left_to_the_masks(kind):
    n = 600
    same = torch.rand(n, n, generator=torch.Generator().manual_seed(0)) < (
        0.01 if kind in ("absent", "weights") else 0.2
    )
    if kind == "several labels":
        relation = R.from_multilabel(same[:, :8])
    else:
        valid = torch.ones_like(same)
        valid[3, :400] = kind != "absent"  # one long row is enough
        relation = R.from_matrix(
            same, valid, weights=torch.where(torch.arange(n) == 5, 0.0, 1.0) if kind == "weights" else None
        )
    assert relation.layout() is None
