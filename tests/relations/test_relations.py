"""Relations: which rows form positive pairs, against plain loops; tiles are slices; nothing but `dense` makes the whole
matrix.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from relation_loops import check, looped
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import nearfar as nf

R = nf.Relation


def draw(n: int, seed: int, classes: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, size=n)


# ---------------------------------------------------------------- the three constructors


@pytest.mark.parametrize("seed", range(3))
def test_labels(seed):
    y = draw(11, seed)
    same, valid = looped(lambda i, j: y[i] == y[j], 11, 11, square=True)
    relation = R.from_labels(torch.tensor(y))
    check(relation, same, valid)
    assert relation.square
    assert relation.orders == 2
    assert repr(relation) == "Relation(labels, 11 x 11, square)"


@pytest.mark.parametrize("seed", range(3))
def test_labels_against_a_reference_with_ids(seed):
    rng = np.random.default_rng(seed)
    y, z = draw(7, seed), draw(9, seed + 10)
    ids, ref_ids = rng.permutation(20)[:7], rng.permutation(20)[:9]
    plain = R.from_labels(torch.tensor(y), torch.tensor(z))
    check(plain, *looped(lambda i, j: y[i] == z[j], 7, 9))
    assert plain.orders == 1
    assert not plain.square
    known = R.from_labels(torch.tensor(y), torch.tensor(z), ids=torch.tensor(ids), ref_ids=torch.tensor(ref_ids))
    check(known, *looped(lambda i, j: y[i] == z[j], 7, 9, ids=ids, ref_ids=ref_ids))
    assert repr(known) == "Relation(labels, 7 x 9)"


@pytest.mark.parametrize("ignore", [-1, 0, 2**40])
def test_an_ignored_label_takes_part_in_no_pair(ignore):
    y, z = draw(8, 1) + 1, draw(6, 2) + 1
    y[[1, 4]] = z[3] = ignore
    counts = lambda a, b: lambda i, j: a[i] != ignore and b[j] != ignore  # noqa: E731
    check(
        R.from_labels(torch.tensor(y), ignore=ignore),
        *looped(lambda i, j: y[i] == y[j], 8, 8, square=True, counts=counts(y, y)),
    )
    check(
        R.from_labels(torch.tensor(y), torch.tensor(z), ignore=ignore),
        *looped(lambda i, j: y[i] == z[j], 8, 6, counts=counts(y, z)),
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.float16])
def test_samples_that_share_a_label(dtype):
    rng = np.random.default_rng(4)
    hot, ref = rng.random((9, 5)) < 0.3, rng.random((6, 5)) < 0.4
    hot[2] = False
    share = lambda a, b: lambda i, j: bool(set(np.flatnonzero(a[i])) & set(np.flatnonzero(b[j])))  # noqa: E731
    given = torch.tensor(hot).to(dtype), torch.tensor(ref).to(dtype)
    check(R.from_multilabel(given[0]), *looped(share(hot, hot), 9, 9, square=True))
    check(R.from_multilabel(*given), *looped(share(hot, ref), 9, 6))


def test_a_matrix_with_a_mask():
    rng = np.random.default_rng(5)
    same, mask = rng.random((8, 8)) < 0.4, rng.random((8, 8)) < 0.7
    rule, counts = (lambda i, j: same[i, j]), (lambda i, j: mask[i, j])
    check(R.from_matrix(torch.tensor(same)), *looped(rule, 8, 8, square=True))
    check(R.from_matrix(torch.tensor(same), torch.tensor(mask)), *looped(rule, 8, 8, square=True, counts=counts))
    wide, mask = rng.random((5, 8)) < 0.4, rng.random((5, 8)) < 0.7
    relation = R.from_matrix(torch.tensor(wide), torch.tensor(mask), square=False)
    check(relation, *looped(lambda i, j: wide[i, j], 5, 8, counts=lambda i, j: mask[i, j]))
    ids, ref_ids = np.arange(5), np.array([9, 3, 8, 0, 1, 7, 6, 5])
    relation = R.from_matrix(torch.tensor(wide), square=False, ids=torch.tensor(ids), ref_ids=torch.tensor(ref_ids))
    check(relation, *looped(lambda i, j: wide[i, j], 5, 8, ids=ids, ref_ids=ref_ids))


def test_weights_of_samples_and_of_pairs():
    rng = np.random.default_rng(6)
    y, z = draw(7, 6), draw(5, 7)
    w, v, pairs = rng.random(7), rng.random(5), rng.random((7, 5))
    w[2] = pairs[1, 1] = 0
    plain = looped(lambda i, j: y[i] == y[j], 7, 7, square=True)
    block = looped(lambda i, j: y[i] == z[j], 7, 5)
    labels, names = torch.tensor(y), torch.tensor(z)
    check(R.from_labels(labels, weights=torch.tensor(w)), *plain, np.outer(w, w))
    check(R.from_labels(labels, names, weights=torch.tensor(w), ref_weights=torch.tensor(v)), *block, np.outer(w, v))
    check(R.from_labels(labels, names, weights=torch.tensor(pairs)), *block, pairs)
    check(R.from_matrix(torch.tensor(block[0]), square=False, weights=torch.tensor(pairs)), *block, pairs)
    hot, ref = torch.eye(4)[labels], torch.eye(4)[names]
    check(R.from_multilabel(hot, ref, weights=torch.tensor(pairs)), *block, pairs)


@pytest.mark.parametrize("n", [0, 1])
def test_relations_of_nobody(n):
    for relation in (
        R.from_labels(torch.zeros(n, dtype=torch.int64)),
        R.from_multilabel(torch.zeros(n, 3)),
        R.from_matrix(torch.zeros(n, n, dtype=torch.bool)),
    ):
        check(relation, *looped(lambda i, j: False, n, n, square=True))


# ---------------------------------------------------------------- identity, orders


def test_a_clone_of_the_labels_changes_nothing():
    """Same object or equal object: a reference is a reference, and only position and ids tell who is who."""
    y = torch.tensor(draw(9, 8))
    for a, b in ((R.from_labels(y), R.from_labels(y.clone())), (R.from_labels(y, y), R.from_labels(y, y.clone()))):
        assert a.square == b.square
        assert torch.equal(a.dense().valid, b.dense().valid)
        assert torch.equal(a.dense().same, b.dense().same)
    assert R.from_labels(y, y).dense().valid.all()


def test_orders_count_how_often_a_pair_stands():
    y = torch.tensor(draw(6, 9))
    ids = torch.tensor([4, 7, 1, 9, 0, 3])
    order = torch.tensor([3, 1, 5, 0, 2, 4])

    def orders(ref_ids):
        return int(R.from_labels(y, torch.zeros(len(ref_ids)).long(), ids=ids, ref_ids=ref_ids).orders)

    assert R.from_labels(y).orders == 2
    assert R.from_labels(y, y).orders == 1
    assert orders(ids) == orders(ids.clone()) == orders(ids[order]) == 2
    assert orders(ids[:5]) == orders(torch.cat([ids, ids[:1]])) == orders(ids + 1) == 1
    assert orders(torch.tensor([4, 7, 1, 9, 0, 4])) == 1


def test_the_width_may_be_told():
    y = torch.tensor([0, 0, 0, 1, 1, 2])
    positive = R.from_labels(y).dense().positive
    assert R.from_labels(y).width(positive) == 2
    assert R.from_labels(y, width=4).width(positive) == 4
    assert R.from_labels(y, width=40).width(positive) == 6


@pytest.mark.parametrize("width", [0, -3, 1.5])
def test_a_width_must_be_a_whole_number_above_zero(width):
    with pytest.raises(ValueError, match="Relation: width must be a whole number above zero"):
        R.from_labels(torch.tensor([0, 0, 1]), width=width)


def test_a_width_that_is_too_small_is_an_error_where_it_can_be_read():
    """It would leave positive pairs out of every triplet, silently."""
    relation = R.from_labels(torch.tensor([0, 0, 0, 1, 1, 2]), width=1)
    with pytest.raises(ValueError, match="Relation: width is 1, but a row has 2 positive columns"):
        nf.losses.Triplet()(torch.eye(6), relation)


# ---------------------------------------------------------------- memory


class Bytes(TorchDispatchMode):
    """Adds up the bytes of every tensor that an operator makes (views of existing storage do not count)."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.largest = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self.made += x.untyped_storage().nbytes()
                self.largest = max(self.largest, x.numel())
        return out


BIG = 50_000


def big(kind: str) -> R:
    y = torch.arange(BIG) % 1000
    if kind == "labels":
        return R.from_labels(y)
    if kind == "ignored":
        return R.from_labels(y, ignore=3)
    if kind == "reference":
        return R.from_labels(y, y.flip(0), ids=torch.arange(BIG), ref_ids=torch.arange(BIG).flip(0))
    if kind == "weighted":
        return R.from_labels(y, weights=torch.rand(BIG))
    return R.from_multilabel(torch.rand(BIG, 8) < 0.1)


@pytest.mark.parametrize("kind", ["labels", "ignored", "reference", "weighted", "multilabel"])
def test_one_tile_of_fifty_thousand_rows_costs_less_than_ten_megabytes(kind):
    relation = big(kind)
    with Bytes() as bytes_made:
        tile = relation.tile(slice(512, 768), slice(4096, 8192))
    assert tile.same.shape == tile.valid.shape == (256, 4096)
    assert 0 < bytes_made.made < 10e6
    with Bytes() as measures:
        assert tile.positive.shape == tile.negative.shape == (256, 4096)
    assert measures.made < 20e6


def test_the_meter_sees_what_a_dense_answer_costs():
    relation = R.from_labels(torch.arange(2000) % 7)
    with Bytes() as bytes_made:
        relation.dense()
    assert bytes_made.made >= 2000 * 2000
    assert bytes_made.largest == 2000 * 2000


def test_counts_sweep_in_strips():
    relation = R.from_labels(torch.arange(3000) % 7)
    with Bytes() as bytes_made:
        relation.counts()
    assert bytes_made.largest <= 2**20


def test_no_other_method_returns_the_whole_matrix():
    """Whatever is public on a relation, called without a window, gives no tensor of n x m but `dense`."""
    relation = R.from_labels(
        torch.tensor(draw(9, 1)), torch.tensor(draw(7, 2)), weights=torch.rand(9), ref_weights=torch.rand(7)
    )
    public = {name for name in dir(relation) if not name.startswith("_")}
    wanted = """
        anchors at counts dense device from_labels from_matrix from_multilabel from_pairs from_scores from_tree gathered
        layout one_a_class orders plain_labels projected reference_starts_with_batch shape sorted_layout square tile
        weighted width
    """
    assert public == set(wanted.split())
    assert list(inspect.signature(R.tile).parameters) == ["self", "rows", "cols"]
    made = {name for name in public if name.startswith("from_")}
    for name in public - made - {"at", "dense", "gathered", "projected", "tile", "width"}:
        thing = getattr(relation, name)
        found = thing() if callable(thing) else thing
        assert all(x.numel() < 63 for x in tree_leaves(found) if isinstance(x, torch.Tensor)), name
    assert not any(isinstance(x, torch.Tensor) and x.numel() >= 63 for x in vars(relation).values())


# ---------------------------------------------------------------- errors

Y, Z, F = torch.zeros(4, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), torch.zeros(4, 4, dtype=torch.bool)
W = torch.ones(4)
lab, hot, mat = R.from_labels, R.from_multilabel, R.from_matrix
WRONG = [
    (lambda: lab(Y.float()), r"from_labels: labels must be a 1-D integer tensor, but came as torch.float32 \[4\]"),
    (lambda: lab(Y[:, None]), r"from_labels: labels must be a 1-D integer tensor, but .* \[4, 1\]; for multi-hot"),
    (lambda: lab(Y, Y.bool()), r"from_labels: ref_labels must be a 1-D integer tensor, but came as torch.bool"),
    (lambda: hot(Y), r"from_multilabel: hot must have shape \[n, classes\], but came with \[4\]"),
    (lambda: hot(F, Y), r"from_multilabel: ref_hot must have shape \[n, classes\], but came with \[4\]"),
    (lambda: hot(F, F[:, :3]), r"hot and ref_hot must have the same classes, but came with 4 and 3 columns"),
    (lambda: mat(F.int()), r"from_matrix: same must be a boolean \[n, m\] matrix .* but came as torch.int32 \[4, 4\]"),
    (lambda: mat(F[0]), r"from_matrix: same must be a boolean \[n, m\] matrix .* but came as torch.bool \[4\]"),
    (lambda: mat(F, F[:3]), r"from_matrix: valid must be a boolean \[n, m\] matrix like same \[4, 4\], but .*\[3, 4\]"),
    (lambda: mat(F, F.float()), r"from_matrix: valid must be a boolean"),
    (lambda: mat(F[:3]), r"from_matrix: same must be square, .*\[3, 4\]; pass square=False"),
    (lambda: lab(Y, ref_ids=Y), r"Relation: ref_ids came without a reference"),
    (lambda: lab(Y, Z, ids=Y), r"Relation: ids and ref_ids belong together, but only one of them came"),
    (lambda: lab(Y, Z, ref_ids=Z), r"Relation: ids and ref_ids belong together, but only one of them came"),
    (lambda: lab(Y, Z, ids=Y, ref_ids=Y), r"ids and ref_ids must have 4 and 3 entries, but came with 4 and 4"),
    (lambda: lab(Y, ref_weights=W), r"Relation: ref_weights came without weights; pass both, or neither"),
    (lambda: lab(Y, weights=W.int()), r"Relation: weights must be floating, .* but came as torch.int32 \[4\]"),
    (lambda: lab(Y, weights=W[:3]), r"Relation: weights must be floating, of shape \[4, 4\] for pairs or \[4\]"),
    (lambda: lab(Y, Z, weights=W), r"Relation: weights must be floating, .* \(with ref_weights \[3\]\)"),
    (lambda: lab(Y, Z, weights=W, ref_weights=W), r"Relation: weights must be floating"),
    (lambda: lab(Y, Z, weights=torch.ones(3, 4)), r"Relation: weights must be floating, of shape \[4, 3\]"),
    (lambda: lab(Y, weights=-W), r"Relation: weights must be finite and not negative"),
    (lambda: lab(Y, weights=W * torch.nan), r"Relation: weights must be finite and not negative"),
    (lambda: lab(Y, weights=W * torch.inf), r"Relation: weights must be finite and not negative"),
    (lambda: lab(Y, Z, weights=W, ref_weights=-W[:3]), r"Relation: (ref_)?weights must be finite and not negative"),
    (lambda: lab(Y, Z, weights=W, ref_weights=Z), r"Relation: (ref_)?weights must be floating"),
    (lambda: lab(Y, Z, weights=torch.ones(4, 3), ref_weights=W[:3]), r"Relation: ref_weights"),
    (lambda: lab(Y, weights=W, ref_weights=2 * W), r"Relation: ref_weights"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "sentence"), WRONG, ids=range(len(WRONG)))
def test_constructor_errors(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_labels_that_are_no_tensor():
    for make in (R.from_labels, R.from_multilabel, R.from_matrix):
        with pytest.raises(TypeError, match=rf"Relation.{make.__name__}: \w+ must be a torch.Tensor, but came as list"):
            make([0, 1, 1])


def first_of_each(labels, cols, itself):
    """The pairs of `one_a_class`, told by a loop."""
    anchors = [next(i for i, y in enumerate(labels) if y == c) for c in sorted(set(labels))]
    positives = set()
    for a in anchors:
        positive = [j for j, y in enumerate(cols) if y == labels[a] and not itself(a, j)]
        positives |= set(positive[:1])
    chosen = positives or set(range(len(cols)))
    return [[i in anchors and j in chosen and not itself(i, j) for j in range(len(cols))] for i in range(len(labels))]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "kind",
    ["square", "reference", "named", "reference_starts_with_batch", "reference_starts_with_batch named", "no positive"],
)
def test_one_a_class_keeps_first_rows_and_their_first_positives(kind, seed):
    y, other = draw(9, seed).tolist(), draw(7, seed + 10).tolist()
    n, ids, more = len(y), [3 * i % 5 for i in range(9)], [i % 5 for i in range(7)]
    if kind == "square":
        given, cols, itself = R.from_labels(torch.tensor(y)), y, lambda i, j: i == j
    elif kind == "no positive":
        other = [99] * 7
        given, cols, itself = R.from_labels(torch.tensor(y), torch.tensor(other)), other, lambda i, j: False
    elif kind == "reference":
        given, cols, itself = R.from_labels(torch.tensor(y), torch.tensor(other)), other, lambda i, j: False
    elif kind == "named":
        told = {"ids": torch.tensor(ids), "ref_ids": torch.tensor(more)}
        given, cols = R.from_labels(torch.tensor(y), torch.tensor(other), **told), other
        itself = lambda i, j: ids[i] == more[j]  # noqa: E731
    else:
        named, cols = "named" in kind, y + other
        told = {"ids": torch.tensor(ids), "ref_ids": torch.tensor(ids + more)} if named else {}
        given = R.from_labels(torch.tensor(y), torch.tensor(cols), reference_starts_with_batch=True, **told)
        itself = lambda i, j: i == j if j < n else named and ids[i] == (ids + more)[j]  # noqa: E731
    assert given.one_a_class().dense().valid.tolist() == first_of_each(y, cols, itself)


def test_the_first_reference_rows_are_the_rows_themselves():
    y = torch.tensor([0, 0, 1])
    relation = R.from_labels(y, torch.tensor([0, 0, 1, 0, 1]), reference_starts_with_batch=True)
    assert relation.dense().valid.int().tolist() == [[0, 1, 1, 1, 1], [1, 0, 1, 1, 1], [1, 1, 0, 1, 1]]
    assert relation.orders == 1
    with pytest.raises(ValueError, match=r"reference_starts_with_batch=True .* put the rows in front"):
        R.from_labels(y, y[:2], reference_starts_with_batch=True)
