"""The tiled engine gives the dense engine's numbers, value and gradient, and never holds a matrix of all pairs."""

from __future__ import annotations

import warnings

import pytest
import torch
from engine_cases import CLOSE, MINERS, PRODUCTS, SETS, check, larger, largest, measured, on, relations
from table import BATCHES, CLASSES, DIM, IDS, ROWS, random_batch, some, tensors, tied_batch

import nearfar as nf
from nearfar.engines import auto, operator_call, strips
from nearfar.engines import tiles as tile_engine

L, M, P, S = nf.losses, nf.miners, nf.pairs, nf.sets
rows = pytest.mark.parametrize("row", ROWS, ids=IDS)


# ---------------------------------------------------------------- the one table


@rows
@pytest.mark.parametrize("kind", [*BATCHES, "tied"])
def test_every_loss_equals_dense(row, kind):
    embeddings, labels = tensors(*(tied_batch() if kind == "tied" else BATCHES[kind]()))
    check(row.loss, (1, 3, 10, 64), embeddings, labels)


@some(lambda row: not row.proxies)
def test_a_larger_batch_of_unequal_classes_equals_dense(row):
    check(row.loss, (7, 16), *larger())


SIZES = {"as they are": {}, "small": {"WIDE": 48, "FULL": 2**12, "KEPT": 0, "GATHER": 2**8, "BAND": 8}}


@some(lambda row: not row.proxies)
@pytest.mark.parametrize("sizes", SIZES)
def test_a_batch_of_hundreds_equals_dense(row, sizes, monkeypatch):
    """Large enough for the shortcuts that look at many pairs by the largest of them; and several tiles of columns."""
    for name, size in SIZES[sizes].items():
        monkeypatch.setattr(strips if hasattr(strips, name) else tile_engine, name, size)
    rng = torch.Generator().manual_seed(0)
    embeddings = torch.randn(301, 8, generator=rng, dtype=torch.float64)
    check(row.loss, (None, 100), embeddings, torch.randint(0, 60, (301,), generator=rng))


@some(lambda row: not row.composed)
def test_a_broken_row_shows_as_it_does_in_dense(row, monkeypatch):
    """Embeddings with NaN are refused where they can be read; what slips through on a GPU must not be swallowed."""
    monkeypatch.setattr("nearfar._utils.tensors.check_finite", lambda *given: None)
    embeddings, labels = larger()
    embeddings[3] = torch.nan
    for engine in ("dense", "tiled"):
        assert torch.isnan(on(row.loss(), engine, 7)(embeddings, labels))


@some(lambda row: row.reference)
def test_a_reference_equals_dense(row):
    embeddings, labels = tensors(*random_batch(5))
    others, names = larger(23)
    more = {"ref_emb": others, "ref_labels": names % 4}
    check(row.loss, (3, 32), embeddings, labels, **more)


@some(lambda row: row.reference)
def test_a_reference_of_the_same_samples_equals_dense(row):
    """A pair and its mirror image are tied, and a product rounds them negative: only what both get together is told."""
    embeddings, labels = tensors(*random_batch(5))
    ids = torch.arange(10)
    place = torch.tensor([3, 1, 4, 0, 5, 9, 2, 6, 8, 7])

    def same(loss):
        def call(leaf):
            return loss(leaf, labels, ref_emb=leaf[place], ref_labels=labels[place], ids=ids, ref_ids=ids[place])

        return measured(call, embeddings, parameters=loss.parameters())

    wanted = same(on(row.loss(), "dense"))
    for a, b in zip(same(on(row.loss(), "tiled", 4)), wanted, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@some(lambda row: not row.composed)
@pytest.mark.parametrize("kind", list(relations(torch.zeros(30, dtype=torch.int64))))
def test_every_relation_equals_dense(row, kind):
    embeddings, labels = larger(30)
    check(row.loss, (7,), embeddings, relations(labels)[kind])


# ---------------------------------------------------------------- products beyond the table


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("groups", ["batch", "sign", "anchor", "anchor_sign"])
@pytest.mark.parametrize("kind", ["random", "tied"])
def test_every_set_in_every_group_equals_dense(name, groups, kind):
    embeddings, labels = larger() if kind == "random" else tensors(*tied_batch())
    pair = P.Squared() if name == "power" else P.Hinge()
    similarity = nf.similarity.NegEuclidean() if name == "power" else None
    check(
        lambda: nf.RobustLoss(pair=pair, over=SETS[name], groups=groups, similarity=similarity),
        (4, 16),
        embeddings,
        labels,
    )


@pytest.mark.parametrize("name", PRODUCTS)
def test_other_products_equal_dense(name):
    check(lambda: PRODUCTS[name]().double(), (5, 64), *larger())


@pytest.mark.parametrize("miner", MINERS)
@pytest.mark.parametrize(
    "make", [L.Contrastive, L.SupCon, L.DroKL, L.Triplet, L.LiftedStructure], ids=lambda x: x.__name__
)
def test_every_miner_equals_dense(make, miner):
    check(lambda: make(miner=MINERS[miner]), (5,), *larger())


def test_a_miner_that_draws_draws_the_same_in_every_sweep():
    """The gradient belongs to the value: both sweeps of a batch-wide set see the same pairs."""
    embeddings, labels = larger(15)
    loss = on(L.Margin(miner=M.DistanceWeighted(), learn=False).double(), "tiled", 7)

    def value(x):
        torch.manual_seed(1)
        return loss(x, labels)

    assert torch.autograd.gradcheck(value, embeddings.requires_grad_(), eps=1e-7, atol=1e-5)


@pytest.mark.parametrize("k", [0.5, 1, 1.7, 20, 400])
def test_ties_across_strips_share_what_is_left(k):
    """Rows on the axes: nearly all losses are equal, and no strip holds all of a tie."""
    embeddings, labels = torch.eye(DIM, dtype=torch.float64).repeat(9, 1), torch.arange(9).repeat_interleave(4)
    for groups in ("batch", "sign"):
        check(
            lambda groups=groups: nf.RobustLoss(pair=P.Hinge(), over=S.TopK(k), groups=groups),
            (1, 5, 8),
            embeddings,
            labels,
        )


# ---------------------------------------------------------------- what is never made


@rows
def test_no_matrix_of_all_pairs_is_made(row, monkeypatch):
    """Of more pairs than those whose weights, or largest losses, are kept."""
    n, tile = 512, 64
    monkeypatch.setattr(strips, "KEPT", n * n - 1)
    monkeypatch.setattr(operator_call, "HELD", tile * n)
    torch.manual_seed(0)
    embeddings, labels = torch.randn(n, DIM), torch.arange(n) // 4
    loss = row.make()
    if row.proxies:
        labels = labels % CLASSES
    each = 12 if row.name == "FastAP" else 4  # it holds a strip once per bin
    assert largest(on(loss, "tiled", tile), embeddings, labels) <= each * tile * n
    if not row.proxies:
        assert largest(on(row.make(), "dense"), embeddings, labels) >= n * n


@pytest.mark.parametrize("miner", MINERS)
def test_no_miner_makes_a_matrix_of_all_pairs(miner, monkeypatch):
    monkeypatch.setattr(strips, "KEPT", 64 * 512)
    torch.manual_seed(0)
    loss = on(L.Contrastive(miner=MINERS[miner]), "tiled", 64)
    assert largest(loss, torch.randn(512, DIM), torch.arange(512) // 4) <= 4 * 64 * 512


# ---------------------------------------------------------------- which engine, and what is refused


def test_auto_is_dense_for_small_batches_and_tiled_for_large_ones():
    torch.manual_seed(0)
    for n, whole in ((64, True), (1500, False)):
        most = largest(L.DroTopK(k=10), torch.randn(n, 4), torch.arange(n) // 4)
        assert (most >= n * n) == whole


def test_auto_never_refuses(monkeypatch):
    monkeypatch.setitem(auto.LEAST, "cpu", auto.Least(0, 0))
    embeddings, labels = larger()
    embeddings.requires_grad_()
    sampled = L.DroKL(samples=7).double()
    assert torch.isfinite(sampled(embeddings, labels))
    loss = L.SupCon().double()
    (slope,) = torch.autograd.grad(loss(embeddings, labels), embeddings, create_graph=True)
    (found,) = torch.autograd.grad((slope**2).sum(), embeddings)
    (slope,) = torch.autograd.grad(on(loss, "dense")(embeddings, labels), embeddings, create_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad((slope**2).sum(), embeddings)[0], **CLOSE)


class Own(nf.links.Add):
    """A link of one's own, which does not say that it takes strips."""


def test_what_cannot_be_tiled_says_so():
    embeddings, labels = larger()
    embeddings.requires_grad_()
    with pytest.raises(ValueError, match=r'RobustLoss: engine="tiled" .* Own does not say .*; use engine="dense"\.'):
        nf.RobustLoss(pair=P.Hinge(), over=S.Mean(), groups="anchor_sign", link=Own(), engine="tiled")
    value = L.SupCon(engine="tiled")(embeddings, labels)
    with pytest.raises(RuntimeError, match=r'SupCon: engine="tiled" has no second derivative'):
        torch.autograd.grad(value, embeddings, create_graph=True)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_nothing_to_learn_from_is_said_and_costs_nothing(engine):
    embeddings = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    for labels, why in ((torch.arange(5), "singleton"), (torch.zeros(5, dtype=torch.int64), "one class only")):
        with pytest.warns(nf.DegenerateBatchWarning, match=why):
            value = L.Triplet(mining="hard", engine=engine)(embeddings, labels)
        value.backward()
        assert value == 0


@rows
def test_a_single_row_and_an_empty_batch_cost_nothing_and_are_named(row):
    for n in (0, 1):
        embeddings = torch.randn(n, DIM, dtype=torch.float64, requires_grad=True)
        labels = torch.zeros(n, dtype=torch.int64)
        found, told = [], []
        for engine in ("dense", "tiled"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", nf.DegenerateBatchWarning)
                found.append(on(row.loss(), engine)(embeddings, labels))
            told.append([str(warning.message) for warning in caught])
        assert told[0] == told[1]
        torch.testing.assert_close(found[0], found[1])
        found[1].backward()
        assert torch.isfinite(embeddings.grad).all()


@rows
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_value_without_a_gradient_is_the_same(row, mode):
    embeddings, labels = tensors(*random_batch())
    wanted = row.loss()(embeddings, labels)
    with mode():
        torch.testing.assert_close(on(row.loss(), "tiled", 3)(embeddings, labels), wanted.detach(), **CLOSE)


def test_a_frozen_reference_gets_no_gradient():
    embeddings, labels = larger()
    loss = on(L.MultiSimilarity(), "tiled", 7)
    value = loss(embeddings.requires_grad_(), labels, ref_emb=embeddings.detach().clone(), ref_labels=labels)
    value.backward()
    assert embeddings.grad.abs().max() > 0


def test_half_precision_comes_back_as_it_went_in():
    embeddings, labels = larger()
    leaf = embeddings.to(torch.bfloat16).requires_grad_()
    value = on(L.SupCon(), "tiled", 7)(leaf, labels)
    value.backward()
    assert value.dtype == torch.float32
    assert leaf.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("similarity", [nf.similarity.NegEuclidean(), nf.similarity.Cosine()], ids=str)
@pytest.mark.parametrize("learnt", [0.0, 0.037])
def test_a_learnt_threshold_in_float32_does_not_round_a_float64_loss(similarity, learnt):
    """`Margin()` keeps its parameter in float32; 1.2 - 0.2 must not be rounded to that."""
    rng = torch.Generator().manual_seed(0)
    rows, labels = torch.randn(60, 8, generator=rng, dtype=torch.float64), torch.arange(60) // 4
    found = {}
    for engine in ("dense", "tiled"):
        loss = nf.losses.Margin(similarity=similarity, engine=engine)
        with torch.no_grad():
            loss.pair_positive.offset.fill_(learnt)
        leaf = rows.clone().requires_grad_()
        value = loss(leaf, labels)
        value.backward()
        assert loss.pair_positive.offset.dtype == torch.float32
        found[engine] = value.detach(), leaf.grad
    for a, b in zip(*found.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
