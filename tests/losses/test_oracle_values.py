"""Every loss against its oracle: value and gradient to 1e-9, first and second derivatives by finite differences."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import FOUND, plain
from oracles.gradient import gradient
from table import BATCHES, IDS, PRODUCTS, ROWS, tensors, tied_batch

import nearfar as nf

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import losses_page

rows = pytest.mark.parametrize("row", ROWS, ids=IDS)
TOLERANCE = 1e-9


def test_every_loss_has_a_row_and_an_oracle():
    classes = {name for name, thing in vars(nf.losses).items() if inspect.isclass(thing)}
    assert classes == set(nf.losses.__all__)
    assert set(PRODUCTS) == {row.name for row in ROWS}
    assert {plain(name) for name in classes} == set(FOUND)


def test_the_public_losses_are_those_of_the_page():
    """The table of docs/guides/losses.md is the list of names that stay."""
    text = (Path(__file__).parents[2] / "docs" / "guides" / "losses.md").read_text(encoding="utf-8")
    table = text[text.index("## The table") : text.index("### As in the paper")]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)) == sorted(nf.losses.__all__)


def test_the_table_and_the_pictures_are_generated_from_the_classes():
    text = losses_page.PAGE.read_text(encoding="utf-8")
    assert losses_page.filled(text) == text, "run: python scripts/losses_page.py"
    assert losses_page.filled(text.replace("margin=0.2", "margin=0.3")) == text
    assert losses_page.SHEET.read_text(encoding="utf-8") == losses_page.sheet(), "run: python scripts/losses_page.py"
    assert all(map(losses_page.picture, losses_page.names()))


@rows
@pytest.mark.parametrize("kind", BATCHES)
def test_value_and_gradient_equal_the_oracle(row, kind):
    E, y = BATCHES[kind]()
    embeddings, labels = tensors(E, y)
    value = row.loss()(embeddings, labels)
    value.backward()
    exact = np.asarray(E, dtype=np.longdouble)
    assert abs(value.item() - float(row.oracle(exact, y))) < TOLERANCE
    if kind == "random":
        slope = gradient(lambda x: row.oracle(x, y, at=exact), exact)
        np.testing.assert_allclose(embeddings.grad.numpy(), slope, rtol=0, atol=TOLERANCE)
        return
    # along a few directions, each of which moves every entry: all entries take as many times as long
    for way in np.random.default_rng(7).choice([-1, 1], size=(6, *E.shape)):
        slope = gradient(lambda by, way=way: row.oracle(exact + by[0] * way, y, at=exact), np.zeros(1), step=1e-7)
        assert abs(np.sum(embeddings.grad.numpy() * way) - slope[0]) < TOLERANCE


@rows
def test_value_on_ties_equals_the_oracle(row):
    E, y = tied_batch()
    embeddings, labels = tensors(E, y)
    value = row.loss()(embeddings, labels)
    value.backward()
    assert abs(value.item() - float(row.oracle(np.asarray(E, dtype=np.longdouble), y))) < 1e-7
    assert torch.isfinite(embeddings.grad).all()


@pytest.mark.parametrize("row", [row for row in ROWS if row.proxies], ids=lambda row: row.id)
def test_gradient_of_the_proxies_equals_the_oracle(row):
    E, y = BATCHES["random"]()
    embeddings, labels = tensors(E, y)
    loss = row.loss()
    loss(embeddings, labels).backward()
    exact = np.asarray(E, dtype=np.longdouble)
    centers = np.asarray(loss.proxies.detach().numpy(), dtype=np.longdouble)
    slope = gradient(lambda c: row.oracle(exact, y, **{row.proxies: c}), centers)
    np.testing.assert_allclose(loss.proxies.grad.numpy(), slope, rtol=0, atol=TOLERANCE)


def test_gradient_of_the_learnt_threshold_equals_the_oracle():
    row = next(row for row in ROWS if row.id == "Margin")
    E, y = BATCHES["random"]()
    embeddings, labels = tensors(E, y)
    loss = row.loss()
    loss(embeddings, labels).backward()
    start = np.array(["1.2"], dtype=np.longdouble)
    exact = np.asarray(E, dtype=np.longdouble)
    slope = gradient(lambda t: row.oracle(exact, y, beta=t[0]), start)
    # the parameter is the score -β, so its slope has the other sign
    np.testing.assert_allclose(-loss.pair_positive.offset.grad.numpy(), slope[0], atol=TOLERANCE)
    assert loss.beta.item() == pytest.approx(1.2, abs=1e-7)


@rows
def test_gradcheck(row):
    loss = row.loss()
    embeddings, labels = tensors(*BATCHES["random"](3))
    if not loss.exact_gradient:
        return check_weighted_form(loss, embeddings, labels)
    assert torch.autograd.gradcheck(lambda e: loss(e, labels), embeddings, atol=1e-6, rtol=1e-5)
    return None


def check_weighted_form(loss, embeddings, labels):
    """Where weights are held constant, the gradient is that of Σ q·l with q fixed, not of the value."""
    found = loss.explain(embeddings, labels)
    loss(embeddings, labels).backward()
    scores = loss.similarity(embeddings, embeddings)
    positive = labels[:, None] == labels[None, :]
    weighted = torch.where(positive, loss.pair_positive(scores, 1), loss.pair_negative(scores, -1)) * found.influence
    (slope,) = torch.autograd.grad(weighted.sum(), embeddings)
    torch.testing.assert_close(embeddings.grad, slope, atol=1e-10, rtol=1e-8)
    assert found.influence.abs().sum() > 0


@rows
def test_double_backward(row):
    loss = row.loss()
    if not loss.exact_gradient:
        pytest.skip("weights held constant by definition: the gradient is not a derivative")
    embeddings, labels = tensors(*BATCHES["random"](4))
    # a random projection, as torch's own tests do: all second derivatives take far longer
    assert torch.autograd.gradgradcheck(lambda e: loss(e, labels), embeddings, atol=1e-5, rtol=1e-4, fast_mode=True)
