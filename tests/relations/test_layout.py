"""A layout tells every pair as the relation's masks do, and lets relations that are not plain take the operators."""

from __future__ import annotations

import pytest
import torch
from ways import takes_operators

import nearfar as nf
from nearfar.relations.layout import list_own

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
    "a sample of two labels": lambda: R.from_labels(Y, Z, ids=IDS, ref_ids=torch.tensor([20, 3, 21, 6, 7, 8, 22])),
}  # fmt: skip
"""Relations that no labels tell; 8 has label 4 among the rows and 1 among the columns."""


WEIGHTS_OF_PAIRS = {
    "weights of pairs": lambda: R.from_labels(Y, weights=torch.where(SAME, torch.arange(12.0), 1.0), ignore=2),
    "weights of pairs, memory": lambda: R.from_labels(
        Y, BEHIND, ids=IDS, ref_ids=torch.cat([IDS, REF_IDS]), weights=torch.arange(12.0 * 19).view(12, 19) % 5,
        reference_starts_with_batch=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTS_OF_PAIRS)
def test_weights_of_pairs_have_no_layout_and_equal_dense(name):
    relation = WEIGHTS_OF_PAIRS[name]()
    assert relation.sorted_layout() is None
    n, m = relation.shape
    x = torch.randn(m, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    more = {} if relation.square else {"ref_emb": x}
    for make in (nf.losses.MultiSimilarity, nf.losses.Contrastive, nf.losses.Triplet, nf.losses.LiftedStructure):
        tiled, dense = (make(engine=engine)(x[:n], relation, **more) for engine in ("tiled", "dense"))
        torch.testing.assert_close(tiled, dense, atol=1e-10, rtol=1e-10)


def rebuilt(relation):
    """The masks of positive and negative pairs [n, m] that a sorted layout stands for."""
    found = relation.sorted_layout().sort()
    n, m = relation.shape
    rows = torch.arange(n) if found.rows is None else found.rows
    cols = torch.arange(m) if found.cols is None else found.cols
    row, col, real = list_own(found.start, found.end, found.listed, found.samples)
    own, kept = torch.zeros(2, len(rows), len(cols)).bool()
    own[row, col], kept[row, col] = True, real
    assert int(own.sum()) == len(row)  # all different within a row
    weight = torch.ones(len(rows), len(cols))
    if found.weights is not None:
        weight = found.weights[0][:, None] * found.weights[1].float()
    narrow = found.positives(n * m)
    if narrow is not None:
        gathered = torch.zeros(len(rows), len(cols))
        gathered.scatter_add_(1, narrow.place, narrow.measure.float())
        assert torch.equal(gathered, kept * weight)
    positive, negative = torch.zeros(2, n, m)
    positive[rows[:, None], cols[None, :]] = kept * weight
    negative[rows[:, None], cols[None, :]] = ~own * weight
    return positive, negative


@pytest.mark.parametrize("name", cases())
def test_a_layout_tells_what_the_masks_tell(name):
    relation = cases()[name]
    whole = relation.dense()
    positive, negative = rebuilt(relation)
    assert torch.equal(positive, whole.positive.float())
    assert torch.equal(negative, whole.negative.float())


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("coded", [False, True])
def test_a_layout_counts_and_gathers_what_the_masks_tell(name, coded):
    """What the kernels read, in their order: that of the batch."""
    relation, whole = cases()[name], cases()[name].dense()
    layout = relation.layout()
    if layout is None:  # kernels take labels alone
        assert name in LISTS
        return
    layout = layout.code() if coded else layout
    if "two labels" not in name:
        assert torch.equal(layout.has_negative(), (whole.negative > 0).any(dim=1))
    runs = layout.runs()
    narrow = layout.positives(runs, int((runs[2] - runs[1]).amax()))
    gathered = torch.zeros(relation.shape).scatter_add_(1, narrow.place, narrow.measure.float())
    assert torch.equal(gathered, whole.positive.float())


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize(
    "loss", ["MultiSimilarity", "SupCon", "Contrastive", "DroKL", "Triplet", "Angular", "LiftedStructure"]
)
def test_what_is_not_plain_takes_the_operators_too(name, loss):
    assert takes_operators(getattr(nf.losses, loss)().product, cases()[name])


def test_relations_that_no_labels_tell_are_lists():
    lists = {name for name, relation in cases().items() if relation.sorted_layout().listed is not None}
    assert lists == set(LISTS)


def test_a_list_is_symmetric_where_pairs_in_both_orders_are_alike():
    square = {name for name in LISTS if cases()[name].sorted_layout().sort().symmetric}
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
    assert relation.sorted_layout() is None
