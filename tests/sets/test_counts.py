"""Counts that grow with the batch (k="8B"): allowed forms, the meaning of B, equality of engines."""

from __future__ import annotations

import copy
import pickle
import types

import pytest
import torch
from oracles import losses as oracle
from table import DIM

import nearfar as nf
from nearfar.runs import _parts as parts
from nearfar.runs._config import load
from nearfar.sets.counts import multiple, scaled

L, S = nf.losses, nf.sets
MAKES = {
    "top": lambda k, **more: L.DroTopK(k=k, **more),
    "top-pn": lambda k, **more: L.DroTopKPN(k=k, **more),
    "detached": lambda k, **more: nf.RobustLoss(
        pair=nf.pairs.Hinge(), over=S.DetachedWeights(S.TopK(k)), groups="sign", **more
    ),
    "chi-square": lambda rho, **more: L.DroChiSquare(rho=rho, **more),
    "anchor": lambda k, **more: nf.RobustLoss(pair=nf.pairs.Hinge(), over=S.TopK(k), groups="anchor", **more),
}
makes = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


def batch(n=12, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(n, DIM, generator=rng, dtype=torch.float64), torch.randint(0, 4, (n,), generator=rng)


def measured(loss, rows, *args, **more):
    leaf = rows.clone().requires_grad_()
    value = loss(leaf, *args, **more)
    return value.detach(), *torch.autograd.grad(value, leaf)


def same(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


@pytest.mark.parametrize("text", ["8B", " 8 B ", "0.5B", ".5B", "B/2", "B / 2", "3B/4", "B", "2.B", "1B/0.5"])
def test_multiples_of_the_batch_size(text):
    wanted = {"8B": 8, " 8 B ": 8, "3B/4": 0.75, "B": 1, "2.B": 2, "1B/0.5": 2}.get(text, 0.5)
    assert multiple(text) == wanted
    assert S.TopK(text).at(40).k == 40 * wanted
    assert multiple(str(scaled(text, 0.5))) == wanted / 2


@pytest.mark.parametrize("text", ["8b", "160", "", "B8", "B*2", "-2B", "0B", "B/0", "8BB", "1e3B", "nanB", "٨B", "K"])
@pytest.mark.parametrize("make", [L.DroTopK, L.DroTopKPN, S.TopK])
def test_anything_else_is_refused_in_a_sentence(make, text):
    with pytest.raises(ValueError, match=r'k must be a number above zero, or a multiple of B such as "8B"') as error:
        make(k=text)
    assert str(error.value).endswith(f"but came as {text!r}.")


@pytest.mark.parametrize(("text", "rows", "wanted"), [("0.07B", 100, 7), ("0.7B", 728_030, 509_621), ("0.3B", 5, 1.5)])
def test_a_multiple_is_what_its_decimals_say(text, rows, wanted):
    """In binary, 0.07 * 100 is a little more than 7: one member more, and no whole number any longer."""
    assert S.TopK(text).at(rows).k == wanted


def test_a_multiple_that_no_decimals_say_keeps_its_fraction():
    assert S.TopK("B/3").at(10).k == pytest.approx(10 / 3, rel=0, abs=1e-9)


@makes
@pytest.mark.parametrize("engine", ["dense", "tiled", "auto"])
def test_a_multiple_is_that_number_on_every_engine_at_every_size(make, engine):
    loss = make("0.75B", engine=engine)
    loss.tile = 5
    for n in (8, 12, 20):
        same(measured(loss, *batch(n)), measured(make(0.75 * n, engine="dense"), *batch(n)))
    assert not torch.equal(loss(*batch(20)), make(6, engine="dense")(*batch(20)))


def test_kernels_are_told_a_number():
    product = L.DroTopK(k="2B").product
    assert product.over_positive.fold() is None
    assert product.at(64).over_wide.fold().most == 128
    plain = L.DroTopK(k=9).product
    assert plain.at(64) is plain


@makes
def test_b_is_the_number_of_query_rows_where_there_is_a_reference(make):
    rows, labels = batch(10)
    others, theirs = batch(30, seed=1)
    for engine in ("dense", "tiled"):
        found = measured(make("0.5B", engine=engine), rows, labels, ref_emb=others, ref_labels=theirs)
        same(found, measured(make(5, engine="dense"), rows, labels, ref_emb=others, ref_labels=theirs))


def test_a_memory_keeps_b_at_the_batch():
    rows, labels = batch(10)
    values = []
    for k in ("2B", 20):
        memory = nf.CrossBatchMemory(L.DroTopK(k=k), size=40)
        values.append([memory(*batch(10, seed)).item() for seed in range(3)] + [memory(rows, labels).item()])
    assert values[0] == values[1]


def test_index_tuples_count_rows_too():
    rows, labels = batch(12)
    listed = _every_pair(labels)
    for engine in ("dense", "tiled"):
        found = measured(L.DroTopK(k="B/2", engine=engine), rows, labels, listed)
        same(found, measured(L.DroTopK(k=6, engine="dense"), rows, labels, listed))


def _every_pair(labels):
    alike = labels[:, None] == labels
    positive, negative = (alike & ~torch.eye(len(labels), dtype=torch.bool)).nonzero().T, (~alike).nonzero().T
    return positive[0], positive[1], negative[0], negative[1]


@makes
def test_explanations_copies_and_names(make):
    rows, labels = batch(12)
    loss = make("B/2")
    found, wanted = loss.explain(rows, labels), make(6).explain(rows, labels)
    torch.testing.assert_close(found.weights, wanted.weights, atol=0, rtol=0)
    torch.testing.assert_close(found.dual, wanted.dual, atol=0, rtol=0)
    for again in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert torch.equal(again(rows, labels), loss(rows, labels))
    assert "B" in repr(loss)
    assert repr(L.DroTopK(k="8B")).count("k='8B'") == 1
    assert "k='8B'" in repr(L.DroTopKPN(k="8B"))
    assert L.DroTopKPN(k="8B").product.over_positive.k == "4B"


def test_sampled_weights_take_a_multiple():
    rows, labels = batch(12)
    values = []
    for k in ("B/2", 6):
        torch.manual_seed(0)
        values.append(nf.RobustLoss(pair=nf.pairs.Hinge(), over=S.Sampled(S.TopK(k), 9))(rows, labels))
    assert torch.equal(*values)


def test_a_configuration_may_say_it(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("loss:\n  name: DroTopK\n  k: 8B\n", encoding="utf-8")
    for config in (load(path), load(None, [("loss", "{name: DroTopKPN}"), ("loss.k", "B/2")])):
        parts.check(config)
        loss = parts.make_loss(config, classes=4)
        assert loss.product.over_positive.at(32).k in (256, 8)
        rows, labels = batch(12)
        assert torch.isfinite(loss(rows, labels))


def test_a_set_alone_does_not_know_the_batch():
    losses = torch.rand(1, 6)
    for ask in (S.TopK("2B").value, S.TopK("2B").weights, S.TopK("2B").dual):
        with pytest.raises(ValueError, match=r"^TopK: k='2B' is a multiple of .*call at\(rows\) first\.$"):
            ask(losses)
    torch.testing.assert_close(S.TopK("2B").at(2).value(losses), S.TopK(4).value(losses))


def test_a_method_of_one_object_alone_comes_along():
    over = S.TopK("B/2")
    object.__setattr__(over, "value", lambda losses, *rest, **more: losses.sum(dim=1))
    loss = nf.RobustLoss(pair=nf.pairs.Hinge(), over=over, groups="anchor")
    same([loss(*batch())], [nf.RobustLoss(pair=nf.pairs.Hinge(), over=_Sum(), groups="anchor")(*batch())])


def wrap(part, name):
    """Replace a method of one object by one that calls it and doubles the result."""
    plain = getattr(part, name)
    object.__setattr__(part, name, lambda *args, **more: 2 * plain(*args, **more))
    return part


def wrap_bound(part, name):
    """As `wrap`, by a method that gets the object as its first argument, and needs its k as a number."""
    kind = type(part)
    method = lambda self, *args, **more: (self.k / self.k) * 2 * getattr(kind, name)(self, *args, **more)  # noqa: E731
    object.__setattr__(part, name, types.MethodType(method, part))
    return part


@pytest.mark.parametrize("change", [wrap, wrap_bound])
@pytest.mark.parametrize("name", ["value", "_value", "_weights"])
def test_a_method_that_is_wrapped_on_one_object_computes_the_same_as_with_a_number(change, name):
    found, wanted = (
        measured(nf.RobustLoss(pair=nf.pairs.Hinge(), over=change(S.TopK(k), name), groups="anchor"), *batch())
        for k in ("B/2", 6)
    )
    same(found, wanted)
    plain = measured(nf.RobustLoss(pair=nf.pairs.Hinge(), over=S.TopK(6), groups="anchor"), *batch())
    same(found, [2 * each for each in plain])
    with pytest.raises(ValueError, match=r"call at\(rows\) first"):  # nothing of the batch is left behind
        S.TopK("B/2").value(torch.rand(1, 6))


def test_a_set_around_another_one_may_be_wrapped_too():
    found, wanted = (
        measured(nf.RobustLoss(pair=nf.pairs.Hinge(), over=wrap(S.DetachedWeights(inner), "value")), *batch())
        for inner in (S.TopK("B/2"), S.TopK(6))
    )
    same(found, wanted)
    plain = measured(nf.RobustLoss(pair=nf.pairs.Hinge(), over=S.DetachedWeights(S.TopK(6))), *batch())
    same(found, [2 * each for each in plain])


class _Sum(S.Mean):
    def value(self, losses, *rest, **more):
        return losses.sum(dim=1)


def test_k_is_eight_batches_where_none_is_given():
    torch.manual_seed(0)
    x, y = torch.randn(40, 8), torch.arange(40) % 8
    for kind in (nf.losses.DroTopK, nf.losses.DroTopKPN):
        assert kind()(x, y) == kind(k="8B")(x, y) == kind(k=320)(x, y) != kind(k=80)(x, y)
    assert nf.losses.DroTopK(fraction=0.5)(x, y) != nf.losses.DroTopK()(x, y)


def test_the_radius_of_a_chi_square_ball_counts_batches():
    x, y = batch(16)
    wanted = L.DroChiSquare(rho=640.0)
    for loss in (L.DroChiSquare(), L.DroChiSquare(rho="40B"), L.DroChiSquare(rho="80B/2")):
        same(measured(loss, x, y), measured(wanted, x, y))
    assert L.DroChiSquare(rho="B")(x, y) < L.DroChiSquare(rho="4B")(x, y)
    with pytest.raises(ValueError, match=r"ChiSquare: rho='2B' is a multiple of the batch size, which a loss knows"):
        S.ChiSquare("2B").value(torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"ChiSquare: rho must be a number zero or more, or a multiple of B"):
        L.DroChiSquare(rho="2b")


SIZED = {
    "top": lambda e: L.DroTopK(effective=e),
    "top-drop": lambda e: L.DroTopK(effective=e, zero="drop"),
    "pn": lambda e: L.DroTopKPN(effective=e),
    "trimmed": lambda e: L.DroTrimmed(top=3, effective=e),
    "kl": lambda e: L.DroKL(effective=e, zero="keep"),
    "kl-drop": lambda e: L.DroKL(effective=e),
    "chi": lambda e: L.DroChiSquare(effective=e),
    "chi-drop": lambda e: L.DroChiSquare(effective=e, zero="drop"),
}


@pytest.mark.parametrize("make", SIZED.values(), ids=SIZED)
@pytest.mark.parametrize("n", [16, 24])
def test_a_loss_spreads_its_weight_over_the_pairs_a_row_that_it_is_given(make, n):
    x, y = batch(n)
    for wanted in (1, 2.5):  # whole numbers of entries
        assert make(wanted).explain(x, y).effective_pairs == pytest.approx(wanted * n, rel=1e-9)


def test_effective_pairs_of_a_reference_and_of_weighted_rows_count_entries():
    x, y = batch(16)
    other, labels = batch(30, seed=1)
    for loss in (L.DroTopK(effective=2), L.DroKL(effective=2), L.DroChiSquare(effective=2)):
        assert loss.explain(x, y, ref_emb=other, ref_labels=labels).effective_pairs == pytest.approx(32, rel=1e-9)
    # of one group an anchor and sign, so that each anchor counts by itself
    grouped = nf.RobustLoss(pair=nf.pairs.Hinge(), over=S.KL(effective=2), groups="anchor")
    assert grouped.explain(x, y).effective_pairs == pytest.approx(32, rel=1e-9)


@pytest.mark.parametrize("zero", ["keep", "drop"])
@pytest.mark.parametrize("engine", ["dense", "tiled", "auto"])
def test_a_temperature_that_is_solved_is_constant_in_the_gradient(zero, engine):
    """Value by the oracle; gradient of the loss with that temperature given, on every engine."""
    x, y = batch(24)
    loss = L.DroKL(effective=2, zero=zero, engine=engine)
    loss.tile = 5
    value, slope = measured(loss, x, y)
    assert float(value) == pytest.approx(float(oracle.dro_kl(x.numpy(), y.numpy(), effective=2, zero=zero)), abs=1e-10)
    low, high = 1e-3, 1e3
    for _ in range(100):  # effective pairs grow with gamma
        middle = (low * high) ** 0.5
        found = L.DroKL(gamma=middle, zero=zero).explain(x, y).effective_pairs
        low, high = (middle, high) if found < 48 else (low, middle)
    same((value, slope), measured(L.DroKL(gamma=middle, zero=zero), x, y))
    assert not loss.exact_gradient


def test_pairs_for_a_confidence_are_the_upper_limit_of_a_mean():
    """mean + 2z√(ζ/B), ζ the variance of the row means: by a loop, and as the value of the ball of that size."""
    x, y = batch(24)
    loss = L.DroChiSquare(rho=0.0, pair=nf.pairs.Logistic())
    found = loss.explain(x, y)
    rows = [[float(found.losses[i, j]) for j in range(24) if j != i] for i in range(24)]
    means = [sum(row) / 23 for row in rows]
    mean = sum(means) / 24
    zeta = sum((each - mean) ** 2 for each in means) / 24
    limit = mean + 2 * 1.6448536269514722 * (zeta / 24) ** 0.5
    sized = L.DroChiSquare(effective=found.confident_pairs(), pair=nf.pairs.Logistic())
    assert float(sized(x, y)) == pytest.approx(limit, rel=1e-12)
    assert found.confident_pairs(0.999) < found.confident_pairs(0.95) < 23
    assert L.DroKL().explain(torch.eye(4), torch.tensor([0, 1, 2, 3])).confident_pairs() == 3
    with pytest.raises(ValueError, match=r"confidence must lie between .5 and 1, but came as 95"):
        found.confident_pairs(95)
    with pytest.raises(ValueError, match="one loss for each pair"):
        L.Triplet().explain(x, y).confident_pairs()


def test_alternatives_of_a_setting_take_its_place():
    loss = L.DroKL(effective=3)
    assert loss.gamma is None
    loss.gamma = 0.2
    assert (loss.gamma, loss.effective) == (0.2, None)
    loss.effective = 4
    assert (loss.gamma, loss.effective) == (None, 4)
    with pytest.raises(ValueError, match="DroKL: give gamma or effective, exactly one of them"):
        loss.effective = None
    assert loss.effective == 4
    with pytest.raises(ValueError, match="DroTopK: effective must be a number above zero"):
        L.DroTopK(effective=0)
    assert L.DroTopKPN(effective=3).k is L.DroChiSquare(effective=3).rho is None
    assert (L.DroTopKPN().k, L.DroChiSquare().rho, L.DroKLGrouped().gamma) == ("8B", "40B", 0.1)
