"""Properties that every loss must have, for all losses of the table."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import sets as oracle
from table import BATCHES, CLASSES, IDS, ROWS, random_batch, some, tensors

import nearfar as nf

rows = pytest.mark.parametrize("row", ROWS, ids=IDS)
EXACT = {"atol": 1e-12, "rtol": 1e-10}


def measured(loss, embeddings, *args, **kwargs):
    """The value, and the gradient of the embeddings."""
    leaf = embeddings.detach().clone().requires_grad_()
    value = loss(leaf, *args, **kwargs)
    value.backward()
    return value.detach(), leaf.grad


def same(found, wanted, **tolerance):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, **(tolerance or EXACT))


def related(row, labels, **how):
    """The relation that `row` makes of labels, with more said about it."""
    if not row.proxies:
        return nf.Relation.from_labels(labels, **how)
    names = torch.arange(CLASSES)
    swapped = row.make().swapped
    return nf.Relation.from_labels(names, labels, **how) if swapped else nf.Relation.from_labels(labels, names, **how)


def steady(order: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The permutation `order` with the rows of each class put back into their first order."""
    order = order.copy()
    for c in np.unique(y):
        places = np.isin(order, np.flatnonzero(y == c))
        order[places] = np.sort(order[places])
    return order


# ---------------------------------------------------------------- who stands where, and what it is called


@rows
@settings(max_examples=4, deadline=None)
@given(order=st.permutations(range(10)), seed=st.integers(0, 50))
def test_the_order_of_samples_does_not_matter(row, order, seed):
    E, y = random_batch(seed)
    order = steady(np.array(order), y) if row.ordered else np.array(order)
    embeddings, labels = tensors(E, y)
    value, slope = measured(row.loss(), embeddings, labels)
    same(measured(row.loss(), embeddings[order], labels[order]), (value, slope[order]))


@rows
@settings(max_examples=4, deadline=None)
@given(names=st.permutations(range(CLASSES)), seed=st.integers(0, 50), far=st.integers(-(2**40), 2**40))
def test_the_names_of_labels_do_not_matter(row, names, seed, far):
    E, y = random_batch(seed)
    embeddings, labels = tensors(E, y)
    wanted = measured(row.loss(), embeddings, labels)
    loss, names = row.loss(), torch.tensor(names)
    if row.proxies:
        with torch.no_grad():
            loss.proxies[names] = torch.tensor(row.vectors)
        far = 0
    same(measured(loss, embeddings, names[labels] + far), wanted)


@rows
def test_the_type_and_identity_of_labels_do_not_matter(row):
    embeddings, labels = tensors(*random_batch())
    wanted = measured(row.loss(), embeddings, labels)
    same(measured(row.loss(), embeddings, labels.clone()), wanted, atol=0, rtol=0)
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32):
        same(measured(row.loss(), embeddings, labels.to(dtype)), wanted, atol=0, rtol=0)


@some(lambda row: not row.ordered)  # N-pair reads labels only
def test_labels_matrix_and_one_hot_say_the_same(row):
    embeddings, labels = tensors(*random_batch(3))
    wanted = measured(row.loss(), embeddings, labels)
    same(measured(row.loss(), embeddings, related(row, labels)), wanted)
    hot, names = torch.eye(CLASSES)[labels], torch.eye(CLASSES) if row.proxies else None
    sides = (names, hot) if row.proxies and row.make().swapped else (hot, names)
    same(measured(row.loss(), embeddings, nf.Relation.from_multilabel(*sides)), wanted)
    matrix = related(row, labels).dense().same
    same(measured(row.loss(), embeddings, nf.Relation.from_matrix(matrix, square=not row.proxies)), wanted)


# ---------------------------------------------------------------- references


@some(lambda row: row.reference)
@settings(max_examples=4, deadline=None)
@given(order=st.permutations(range(10)), seed=st.integers(0, 50), shift=st.integers(-(10**6), 10**6))
def test_a_reference_of_the_same_samples_is_the_plain_form(row, order, seed, shift):
    E, y = random_batch(seed)
    order = torch.tensor(steady(np.array(order), y) if row.ordered else np.array(order))
    embeddings, labels = tensors(E, y)
    wanted = measured(row.loss(), embeddings, labels)
    ids = torch.arange(10) * 3 + shift
    for place in (torch.arange(10), order):
        leaf = embeddings.detach().clone().requires_grad_()
        value = row.loss()(leaf, labels, ref_emb=leaf[place], ref_labels=labels[place], ids=ids, ref_ids=ids[place])
        value.backward()
        same((value.detach(), leaf.grad), wanted)


@some(lambda row: row.reference and not row.ordered)
def test_a_reference_is_a_block_of_the_plain_form(row):
    """Queries against references = the plain form of both together in which only that block counts."""
    E, y = random_batch(5)
    R, z = random_batch(6)
    queries, labels = tensors(E, y)
    references, names = tensors(R[:7], z[:7])
    loss, wanted = row.loss(), row.loss()
    for over in {id(o): o for o in (wanted.product.over_positive, wanted.product.over_negative)}.values():
        for name in {"k", "top"} & vars(over).keys():  # they count entries here, unordered pairs there
            if getattr(over, name) is not None:
                object.__setattr__(over, name, getattr(over.at(len(E)), name) / 2)
        if getattr(over, "effective", None) is not None:
            object.__setattr__(over, "effective", over.at(len(E)).effective)
    value = loss(queries, labels, ref_emb=references, ref_labels=names)
    value.backward()
    both, told = torch.cat([queries, references]).detach().requires_grad_(), torch.cat([labels, names])
    valid = torch.zeros(17, 17, dtype=torch.bool)
    valid[:10, 10:] = True
    block = wanted(both, nf.Relation.from_matrix(told[:, None] == told[None, :], valid))
    block.backward()
    same((value.detach(), torch.cat([queries.grad, references.grad])), (block.detach(), both.grad))


# ---------------------------------------------------------------- who takes part


@some(lambda row: not row.ordered and not row.label.endswith("rows"))  # N-pair reads labels only; B counts ignored rows
@pytest.mark.parametrize("kind", BATCHES)
def test_ignored_rows_change_neither_value_nor_gradient(row, kind):
    embeddings, labels = tensors(*BATCHES[kind]())
    value, slope = measured(row.loss(), embeddings, labels)
    place = torch.tensor([3, 0, 10, 5, 11, 1, 2, 9, 4, 12, 8, 6, 7])
    more = torch.cat([embeddings.detach(), 3 * torch.randn(3, embeddings.shape[1], dtype=torch.float64)])[place]
    told = torch.cat([labels, torch.full((3,), -1)])[place]
    found = measured(row.loss(), more, related(row, told, ignore=-1))
    wanted = torch.cat([slope, torch.zeros(3, slope.shape[1], dtype=torch.float64)])[place]
    same(found, (value, wanted))
    assert (found[1][told == -1] == 0).all()


@some(lambda row: not row.ordered)  # N-pair reads labels only
def test_a_sample_without_weight_is_an_ignored_sample(row):
    embeddings, labels = tensors(*random_batch(4))
    told = torch.where(torch.arange(10) % 4 == 1, -1, labels)
    weight, everyone = (told >= 0).double(), torch.ones(CLASSES, dtype=torch.float64)
    sides = {"weights": weight}
    if row.proxies:
        first, second = (everyone, weight) if row.make().swapped else (weight, everyone)
        sides = {"weights": first, "ref_weights": second}
    wanted = measured(row.loss(), embeddings, related(row, told, ignore=-1))
    same(measured(row.loss(), embeddings, related(row, labels, **sides)), wanted)


@some(lambda row: not row.composed)
def test_a_pair_without_weight_is_an_absent_pair(row):
    embeddings, labels = tensors(*random_batch(4))
    absent = torch.rand(10, 10, generator=torch.Generator().manual_seed(2)) < 0.3
    positive = labels[:, None] == labels[None, :]
    wanted = measured(row.loss(), embeddings, nf.Relation.from_matrix(positive, ~absent))
    weight = (~absent).double()
    same(measured(row.loss(), embeddings, nf.Relation.from_labels(labels, weights=weight)), wanted)


# not losses whose link reads the negative pairs of a column, whose weights hold the column's own
@some(lambda row: row.reference and not row.ordered and row.name not in ("LiftedStructure", "CLIP"))
def test_a_whole_weight_of_a_reference_is_a_repeated_reference(row):
    E, y = random_batch(7)
    embeddings, labels = tensors(E, y)
    times = torch.tensor([1, 2, 1, 3, 1, 1, 2, 1, 1, 2])
    ids = torch.arange(10)
    again = ids.repeat_interleave(times)
    one = torch.ones(10, dtype=torch.float64)
    weighted = nf.Relation.from_labels(labels, labels, ids=ids, ref_ids=ids, weights=one, ref_weights=times.double())
    if not isinstance(weighted.orders, int):
        weighted.orders = 1  # as for the repeated reference, which does not hold exactly the same samples
    found, wanted = embeddings.detach().clone().requires_grad_(), embeddings.detach().clone().requires_grad_()
    value = row.loss()(found, weighted, ref_emb=found)
    value.backward()
    repeated = row.loss()(wanted, labels, ref_emb=wanted[again], ref_labels=labels[again], ids=ids, ref_ids=again)
    repeated.backward()
    same((value.detach(), found.grad), (repeated.detach(), wanted.grad))


@some(lambda row: not row.composed)
@pytest.mark.parametrize("labeled", [True, False])
def test_an_index_tuple_of_all_pairs_is_no_index_tuple(row, labeled):
    embeddings, labels = tensors(*random_batch(8))
    wanted = measured(row.loss(), embeddings, labels)
    tile = nf.Relation.from_labels(labels).dense()
    pairs = (*torch.nonzero(tile.positive, as_tuple=True), *torch.nonzero(tile.negative, as_tuple=True))
    mixed = torch.randperm(len(pairs[2]), generator=torch.Generator().manual_seed(0))
    pairs = (pairs[0], pairs[1], pairs[2][mixed], pairs[3][mixed])
    same(measured(row.loss(), embeddings, labels if labeled else None, pairs), wanted)


# ---------------------------------------------------------------- values


@some(lambda row: row.name in ("DroWorst", "DroTopK", "DroKL", "DroChiSquare"))
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000))
def test_the_value_lies_between_the_mean_and_the_maximum_of_its_losses(row, seed):
    embeddings, labels = tensors(*random_batch(seed))
    loss = row.loss()
    found = loss.explain(embeddings, labels)
    members = ~torch.eye(10, dtype=torch.bool)
    if loss.product.over_positive.zero == "drop":
        members &= found.losses > 0
    entered = found.losses[members]
    assert entered.mean() - 1e-12 <= found.value <= entered.max() + 1e-12
    assert found.value.item() == pytest.approx(loss(embeddings, labels).item(), abs=1e-14)


SETS = {
    "mean": (nf.sets.Mean, oracle.mean),
    "top-fraction": (lambda **kw: nf.sets.TopK(fraction=0.5, **kw), lambda l, **kw: oracle.topk(l, fraction=0.5, **kw)),
    "top-30": (lambda **kw: nf.sets.TopK(30, **kw), lambda l, **kw: oracle.topk(l, k=60, **kw)),
    "top-all": (lambda **kw: nf.sets.TopK(99, **kw), lambda l, **kw: oracle.topk(l, k=198, **kw)),
    "kl": (lambda **kw: nf.sets.KL(0.2, **kw), lambda l, **kw: oracle.kl(l, 0.2, **kw)),
    "ball": (lambda **kw: nf.sets.KLBall(0.3, **kw), lambda l, **kw: oracle.kl_ball(l, 0.3, **kw)),
    "chi": (lambda **kw: nf.sets.ChiSquare(3.0, **kw), lambda l, **kw: oracle.chi_square(l, 3.0, **kw)),
}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("zero", ["keep", "drop"])
@pytest.mark.parametrize("zero_member", [False, True], ids=["", "zero_member"])
def test_options_of_a_set_mean_the_same_inside_a_loss(name, zero, zero_member):
    """Dropped pairs are gone before a share of the rest is taken, and the zero member is one of them (k: both
    orders).
    """
    make, wanted = SETS[name]
    embeddings, labels = tensors(*random_batch())
    loss = nf.RobustLoss(pair=nf.pairs.Hinge(), over=make(zero=zero, zero_member=zero_member))
    losses = nf.losses.DroWorst().explain(embeddings, labels).losses[~torch.eye(10, dtype=torch.bool)].numpy()
    found = loss(embeddings, labels).item()
    assert found == pytest.approx(float(wanted(losses, zero=zero, zero_member=zero_member)), abs=1e-9)


@some(lambda row: row.name != "NPair")
def test_the_length_of_embeddings_does_not_matter(row):
    """Each row may have its own length; the gradient is then across the row and inversely as long."""
    embeddings, labels = tensors(*random_batch(2))
    value, slope = measured(row.loss(), embeddings, labels)
    length = torch.logspace(-6, 6, 10, dtype=torch.float64)[:, None]
    same(measured(row.loss(), embeddings * length, labels), (value, slope / length), atol=1e-9, rtol=1e-6)
    assert ((slope * embeddings).sum(dim=1).abs() < 1e-9).all()


@rows
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("where", ["one point", "origin", "one row at the origin"])
def test_equal_and_zero_embeddings_give_finite_numbers(row, dtype, where):
    E, y = random_batch()
    E = {
        "one point": np.tile(E[:1], (10, 1)),
        "origin": 0 * E,
        "one row at the origin": E * (np.arange(10) != 4)[:, None],
    }[where]
    loss = row.loss().to(dtype)
    value, slope = measured(loss, torch.tensor(E, dtype=dtype), torch.tensor(y))
    assert value.ndim == 0
    assert torch.isfinite(value)
    assert torch.isfinite(slope).all()
    assert slope.abs().max() < 1e4
    assert all(torch.isfinite(p.grad).all() for p in loss.parameters() if p.grad is not None)


# ---------------------------------------------------------------- modules


@rows
def test_copies_and_saved_states_give_the_same_value(row):
    embeddings, labels = tensors(*random_batch(9))
    loss = row.loss()
    with torch.no_grad():
        for p in loss.parameters():
            p.add_(0.01)
    wanted = measured(loss, embeddings, labels)
    file = io.BytesIO()
    torch.save(loss.state_dict(), file)
    file.seek(0)
    loaded = row.make().double()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss)), loaded):
        assert other is not loss
        same(measured(other, embeddings, labels), wanted, atol=0, rtol=0)


@rows
def test_a_loss_is_a_module_that_says_what_it_is(row):
    loss = row.make()
    assert isinstance(loss, torch.nn.Module)
    assert type(loss).__name__ in repr(loss)
    assert "0x" not in repr(loss)
    assert type(loss.exact_gradient) is bool
    assert loss.exact_gradient != row.frozen
    assert loss.train().training


@rows
def test_calling_twice_gives_the_same_and_keeps_its_hands_off_the_input(row):
    embeddings, labels = tensors(*random_batch(1))
    before = embeddings.detach().clone(), labels.clone()
    loss = row.loss()
    wanted = measured(loss, embeddings, labels)
    same(measured(loss, embeddings, labels), wanted, atol=0, rtol=0)
    same((embeddings.detach(), labels), before, atol=0, rtol=0)
    assert embeddings.grad is None
