"""Bad input, for all losses of the table: an error that says what came, or a zero with a gradient and a warning."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from table import CLASSES, DIM, IDS, ROWS, random_batch, some, tensors

import nearfar as nf

rows = pytest.mark.parametrize("row", ROWS, ids=IDS)
L = nf.losses


# ---------------------------------------------------------------- values that are no numbers


@rows
def test_an_infinite_embedding_is_an_error_that_names_its_row(row):
    embeddings, labels = tensors(*random_batch(), grad=False)
    for bad in (torch.nan, torch.inf, -torch.inf):
        embeddings[3, 1] = embeddings[7, 0] = bad
        sentence = rf"{row.name}: embeddings must be finite, but 2 of 10 rows .*rows 3, 7\)"
        with pytest.raises(ValueError, match=sentence):
            row.loss()(embeddings, labels)
        with pytest.raises(ValueError, match=sentence):
            row.loss().explain(embeddings, labels)


@some(lambda row: row.reference)
def test_an_infinite_reference_is_an_error_that_names_its_row(row):
    embeddings, labels = tensors(*random_batch(), grad=False)
    reference = embeddings.clone()
    reference[4, 0] = torch.nan
    with pytest.raises(ValueError, match=rf"{row.name}: ref_emb must be finite, but 1 of 10 rows .*rows 4\)"):
        row.loss()(embeddings, labels, ref_emb=reference, ref_labels=labels)


@rows
def test_where_values_cannot_be_read_a_nan_shows(row, unread):
    """Whichever row is broken, the value is NaN (or infinite), never a number."""
    embeddings, labels = tensors(*random_batch(), grad=False)
    for i in range(len(embeddings)):
        for bad in (torch.nan, torch.inf):
            broken = embeddings.clone()
            broken[i, 2] = bad
            assert not torch.isfinite(row.loss()(broken, labels)), i


@rows
def test_labels_that_are_missing_are_an_error(row):
    with pytest.raises(ValueError, match=rf"^{row.name}: labels are missing; pass "):
        row.loss()(torch.randn(10, DIM, dtype=torch.float64), None)


# ---------------------------------------------------------------- nothing to learn from

ONE, TWO = np.zeros(10, dtype=np.int64), np.arange(10) % 2
DEGENERATE = {
    "empty": (np.zeros(0, dtype=np.int64), "it is empty"),
    "one row": (np.array([2]), "single row"),
    "one class": (ONE, "one class only"),
    "singletons": (np.arange(CLASSES), "singleton"),
}


def says_nothing(row, y):
    """Whether the oracle is 0 wherever the points lie (an L2 term aside: it asks for no pair)."""
    more = {"l2": 0} if row.name == "NPair" else {}
    points = [np.random.default_rng(seed).normal(size=(len(y), DIM)) for seed in range(6)]
    return all(row.oracle(E, y, **more) == 0 for E in points)


@rows
@pytest.mark.parametrize("kind", DEGENERATE)
def test_a_batch_with_nothing_to_learn_from_is_a_zero_that_keeps_the_graph_and_warns_once(row, kind):
    y, reason = DEGENERATE[kind]
    embeddings = torch.tensor(np.random.default_rng(3).normal(size=(len(y), DIM)), requires_grad=True)
    loss, labels = row.loss(), torch.tensor(y)
    if row.name == "NPair":
        loss.l2 = 0.0
    nothing = len(y) == 0 or says_nothing(row, y)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = loss(embeddings, labels)
        again = loss(embeddings, labels)
    value.backward()
    assert value.ndim == 0
    assert value.dtype == torch.float64
    assert value.grad_fn is not None
    assert torch.isfinite(embeddings.grad).all()
    if nothing:
        assert value.item() == again.item() == 0
        assert (embeddings.grad == 0).all()
        assert [w.category for w in caught] == [nf.DegenerateBatchWarning]
        assert str(caught[0].message).startswith(f"{row.name}: this batch has nothing to learn from, because")
        assert reason in str(caught[0].message)
        with pytest.warns(nf.DegenerateBatchWarning, match=reason):
            row.loss().explain(embeddings, labels)
    else:
        assert not caught
        wanted = row.oracle(embeddings.detach().numpy(), y, **({"l2": 0} if row.name == "NPair" else {}))
        assert value.item() == pytest.approx(float(wanted), abs=1e-9)


@some(lambda row: not row.composed)
@pytest.mark.parametrize("kind", ["no positives", "no negatives", "nothing valid", "no anchor has both"])
def test_a_relation_with_a_missing_side(row, kind):
    """Through a Relation: a warning exactly where the value is zero whatever the points."""
    same = torch.zeros(6, 6, dtype=torch.bool)
    valid = torch.ones(6, 6, dtype=torch.bool)
    if kind == "no negatives":
        same[:] = True
    if kind == "nothing valid":
        valid[:] = False
    if kind == "no anchor has both":
        same[:2, :2] = valid[2:, 2:] = True
        valid[:2, 2:] = valid[2:, :2] = False
    loss = row.loss()
    points = torch.randn(6, 6, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values = [loss(E, nf.Relation.from_matrix(same, valid)) for E in points]
    torch.stack(values).sum().backward()
    assert torch.isfinite(points.grad).all()
    nothing = all(value.item() == 0 for value in values)
    assert [w.category for w in caught] == [nf.DegenerateBatchWarning] * nothing
    if nothing:
        assert (points.grad == 0).all()


@some(lambda row: row.reference)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty_queries_or_references(row, shape):
    n, m = shape
    queries = torch.randn(n, DIM, requires_grad=True)
    references = torch.randn(m, DIM, requires_grad=True)
    loss = row.make()
    with pytest.warns(nf.DegenerateBatchWarning, match="it is empty"):
        value = loss(queries, torch.arange(n), ref_emb=references, ref_labels=torch.arange(m))
    value.backward()
    if row.name != "NPair" or not n:  # its L2 term speaks of the queries alone
        assert value.item() == 0
        assert (queries.grad == 0).all()
    assert value.dtype == torch.float32
    assert references.grad is None or (references.grad == 0).all()


@some(lambda row: not row.composed)
def test_an_empty_index_tuple_is_a_zero_that_keeps_the_graph(row):
    """A miner that found nothing."""
    embeddings, labels = tensors(*random_batch())
    none = torch.zeros(0, dtype=torch.int64)
    for listed in ((none,) * 3, (none,) * 4):
        value = row.loss()(embeddings, labels, listed)
        (slope,) = torch.autograd.grad(value, embeddings)
        assert value.item() == 0
        assert (slope == 0).all()
        assert row.loss().explain(embeddings, labels, listed).value.item() == 0


@pytest.mark.parametrize("name", ["DroKLGrouped", "NTXent", "Angular", "SupCon"])
def test_one_value_an_anchor_of_an_empty_batch_is_none(name):
    with pytest.warns(nf.DegenerateBatchWarning, match="it is empty"):
        value = getattr(L, name)(reduction="none")(torch.zeros(0, DIM), torch.zeros(0, dtype=torch.int64))
    assert value.shape == (0,)


def test_one_proxy_has_nothing_to_tell_apart():
    embeddings = torch.randn(4, DIM, requires_grad=True)
    for loss in (L.ProxyNCA(1, DIM), L.ArcFace(1, DIM)):
        with pytest.warns(nf.DegenerateBatchWarning, match=type(loss).__name__):
            value = loss(embeddings, torch.zeros(4, dtype=torch.int64))
        assert value.item() == 0


@rows
def test_explain_of_a_batch_with_nothing_to_learn_from(row):
    for y, _ in DEGENERATE.values():
        loss = row.loss()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", nf.DegenerateBatchWarning)
            embeddings = torch.randn(len(y), DIM, dtype=torch.float64)
            found = loss.explain(embeddings, torch.tensor(y))
            value = loss(embeddings, torch.tensor(y))
        torch.testing.assert_close(found.value, value.detach())
        assert torch.isfinite(found.weights).all()
        assert torch.isfinite(found.pull).all()
        assert repr(found).startswith("Explanation(value=")


# ---------------------------------------------------------------- extreme hyper-parameters


def test_k_above_the_number_of_pairs_is_the_mean():
    embeddings, labels = tensors(*random_batch())
    mean = nf.RobustLoss(pair=nf.pairs.Hinge(), over=nf.sets.Mean())(embeddings, labels)
    for k in (45, 46, 1000, 1e12):
        torch.testing.assert_close(L.DroTopK(k=k)(embeddings, labels), mean, atol=1e-12, rtol=0)
    balanced = [L.DroTopKPN(k=k)(embeddings, labels) for k in (18, 1000, 1e12)]
    assert balanced[0].item() == balanced[1].item() == balanced[2].item()


COLD = {
    "DroKL": (lambda: L.DroKL(gamma=1e-3), {"gamma": 1e-3}),
    "DroKLGrouped": (lambda: L.DroKLGrouped(gamma=1e-3), {"gamma": 1e-3}),
    "HAP2S": (lambda: L.HAP2S(gamma=1e-3), {"gamma": 1e-3}),
    "MultiSimilarity": (lambda: L.MultiSimilarity(alpha=1e3, beta=1e3, miner=None), {"alpha": 1e3, "beta": 1e3}),
    "NTXent": (lambda: L.NTXent(temperature=1e-3), {"temperature": 1e-3}),
    "SupCon": (lambda: L.SupCon(temperature=1e-3), {"temperature": 1e-3}),
    "Triplet": (lambda: L.Triplet(smooth=1e-3), {"smooth": 1e-3}),
    "Circle": (lambda: L.Circle(scale=1e3), {"scale": 1e3}),
}


@pytest.mark.parametrize("name", COLD)
def test_a_temperature_of_a_thousandth_overflows_nowhere(name):
    make, hyper = COLD[name]
    row = next(row for row in ROWS if row.name == name)
    E, y = random_batch(1)
    wanted = float(row.oracle(E, y, **hyper))
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        embeddings = torch.tensor(E, dtype=dtype, requires_grad=True)
        value = make()(embeddings, torch.tensor(y))
        value.backward()
        assert value.item() == pytest.approx(wanted, rel=tolerance, abs=tolerance)
        assert torch.isfinite(embeddings.grad).all()


# ---------------------------------------------------------------- shapes, types, devices


def call(row, embeddings=None, labels=None, **more):
    e, y = tensors(*random_batch(), grad=False)
    return row.loss()(e if embeddings is None else embeddings, y if labels is None else labels, **more)


@rows
def test_embeddings_of_a_wrong_shape(row):
    for shape in ((10,), (10, 2, 2), ()):
        with pytest.raises(ValueError, match=rf"{row.name}: embeddings must have shape \[n, d\], but came with shape"):
            call(row, torch.zeros(shape))


@rows
def test_embeddings_of_a_wrong_type(row):
    with pytest.raises(TypeError, match=rf"{row.name}: embeddings must be floating point, but came as torch.int64"):
        call(row, torch.zeros(10, DIM, dtype=torch.int64))
    for other in ([[1.0] * DIM] * 10, np.ones((10, DIM)), None):
        with pytest.raises(TypeError, match=rf"{row.name}: embeddings must be a torch.Tensor of shape \[n, d\]"):
            row.loss()(other, torch.zeros(10, dtype=torch.int64))


@rows
def test_labels_of_a_wrong_shape(row):
    for labels in (torch.zeros(9), torch.zeros(11)):
        with pytest.raises(
            ValueError, match=rf"{row.name}: labels must have one entry per row, but {len(labels)} came"
        ):
            call(row, labels=labels.long())
    for labels in (torch.zeros(10, 1), torch.zeros(())):
        with pytest.raises(ValueError, match=rf"{row.name}: labels must have shape \[10\], but came with shape"):
            call(row, labels=labels.long())


@rows
def test_labels_that_are_no_integers(row):
    for dtype in (torch.float32, torch.float64, torch.bool, torch.complex64):
        with pytest.raises(TypeError, match=rf"{row.name}: labels must be integers, but came as {dtype}"):
            call(row, labels=torch.zeros(10, dtype=dtype))


@rows
def test_labels_that_are_no_tensor_or_missing(row):
    with pytest.raises(TypeError, match=rf"{row.name}: labels must be a 1-D integer tensor.*, but came as list"):
        call(row, labels=[0] * 10)
    with pytest.raises((ValueError, TypeError), match=rf"{row.name}: labels (are missing|must be)"):
        row.loss()(torch.zeros(10, DIM))


@rows
def test_labels_on_another_device(row):
    with pytest.raises(ValueError, match=rf"{row.name}: labels is on meta but the embeddings are on cpu; move one"):
        call(row, labels=torch.zeros(10, dtype=torch.int64, device="meta"))


@some(lambda row: not row.composed)
def test_a_relation_on_another_device(row):
    relation = nf.Relation.from_labels(torch.zeros(10, dtype=torch.int64, device="meta"))
    with pytest.raises(ValueError, match=rf"{row.name}: the Relation is on meta but the embeddings are on cpu"):
        call(row, labels=relation)


@some(lambda row: row.reference)
def test_references_that_do_not_fit(row):
    e, y = tensors(*random_batch(), grad=False)
    with pytest.raises(ValueError, match=rf"{row.name}: ref_emb must be as wide as embeddings \(4\), but is 3 wide"):
        call(row, ref_emb=e[:, :3], ref_labels=y)
    with pytest.raises(ValueError, match=rf"{row.name}: ref_emb is on meta but the embeddings are on cpu"):
        call(row, ref_emb=e.to("meta"), ref_labels=y)
    with pytest.raises(ValueError, match=rf"{row.name}: ref_emb and ref_labels belong together"):
        call(row, ref_emb=e)
    with pytest.raises(ValueError, match=rf"{row.name}: ref_emb and ref_labels belong together"):
        call(row, ref_labels=y)
    with pytest.raises(ValueError, match="ids and ref_ids belong together"):
        call(row, ref_emb=e, ref_labels=y, ids=torch.arange(10))
    with pytest.raises(ValueError, match="ids and ref_ids must have 10 and 10 entries, but came with 10 and 9"):
        call(row, ref_emb=e, ref_labels=y, ids=torch.arange(10), ref_ids=torch.arange(9))
    with pytest.raises(ValueError, match="ref_ids came without a reference"):
        call(row, ids=torch.arange(10), ref_ids=torch.arange(10))


@some(lambda row: not row.composed)
def test_relations_that_do_not_fit(row):
    e, y = tensors(*random_batch(), grad=False)
    with pytest.raises(
        ValueError, match=rf"{row.name}: the Relation is 9 x 9 \(square\), but the embeddings are 10 x 10"
    ):
        call(row, labels=nf.Relation.from_labels(y[:9]))
    with pytest.raises(
        ValueError, match=rf"{row.name}: the Relation is 10 x 10, but the embeddings are 10 x 10 with its own"
    ):
        call(row, labels=nf.Relation.from_labels(y, y))
    with pytest.raises(ValueError, match=rf"{row.name}: a Relation already has ref_labels, ids and ref_ids"):
        call(row, labels=nf.Relation.from_labels(y, y), ref_emb=e, ref_labels=y)


@some(lambda row: not row.composed)
def test_index_tuples_that_do_not_fit(row):
    a, b = torch.arange(3), torch.arange(4)
    for bad in ((a, a), (a,) * 5, a):
        with pytest.raises(ValueError, match=rf"{row.name}: the third argument takes a miner's index tuple"):
            call(row, indices=bad)
    for bad in ((a, b, a), (a, a, b), (a, a.double(), a), (a[:, None], a[:, None], a)):
        with pytest.raises(
            ValueError, match=rf"{row.name}: index tensors \d and \d must be 1-D integers of one length"
        ):
            call(row, indices=bad)
    for bad in ((a, a + 9, a), (a, a, a - 1), (a, a, a + 8, a)):
        with pytest.raises(ValueError, match=rf"{row.name}: index tensors \d and \d must point inside 10 rows"):
            call(row, indices=bad)


@some(lambda row: row.composed)
def test_losses_that_choose_their_pairs_take_no_index_tuple(row):
    with pytest.raises(ValueError, match=rf"{row.name}: this loss chooses its own pairs and takes no index tuple"):
        call(row, indices=(torch.arange(3),) * 3)


@some(lambda row: bool(row.proxies))
def test_proxies_that_do_not_fit(row):
    e, y = tensors(*random_batch(), grad=False)
    with pytest.raises(ValueError, match=rf"{row.name}: its proxies are the reference, so it takes no other"):
        call(row, ref_emb=e, ref_labels=y)
    with pytest.raises(
        ValueError, match=rf"{row.name}: embeddings must be as wide as the proxies \(4\), but are 3 wide"
    ):
        call(row, e[:, :3])
    with pytest.raises(ValueError, match=rf"{row.name}: labels must lie in 0..4, one per proxy, but reach from 1 to 5"):
        call(row, labels=torch.arange(10) % 5 + 1)
    with pytest.raises(ValueError, match=rf"{row.name}: labels must lie in 0..4, one per proxy, but reach from -1 to"):
        call(row, labels=y - 1)
    for bad in (0, -1, 2.5, "3"):
        with pytest.raises(ValueError, match=rf"{row.name}: (classes|dim) must be a whole number above zero"):
            getattr(L, row.name)(bad, DIM)
        with pytest.raises(ValueError, match=rf"{row.name}: (classes|dim) must be a whole number above zero"):
            getattr(L, row.name)(CLASSES, bad)
