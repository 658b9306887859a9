"""Half precision and autocast: computed in float32, within a stated error of float64, for every loss.

A half-precision input is a rounded input. Against float64 on the same rounded numbers, the value is right to 1e-6 and
the gradient to one rounding of its own type. Against float64 on the numbers before they were rounded, the value is
right to 5e-3 (bfloat16) and 5e-4 (float16); semi-hard triplets, which enter by a strict comparison, to 0.1.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from table import IDS, ROWS, random_batch

import nearfar as nf

rows = pytest.mark.parametrize("row", ROWS, ids=IDS)
HALF = {torch.bfloat16: (2**-7, 5e-3), torch.float16: (2**-10, 5e-4)}
SEEDS = range(3)


def measured(row, embeddings, labels, around=contextlib.nullcontext):
    leaf = embeddings.detach().clone().requires_grad_()
    loss = row.loss().to(torch.promote_types(leaf.dtype, torch.float32))
    with around():
        value = loss(leaf, labels)
    value.backward()
    parameters = [p.grad for p in loss.parameters() if p.grad is not None]
    return value.detach(), leaf.grad, parameters


def off(found, wanted):
    """The largest error, relative to the largest entry."""
    return ((found.double() - wanted).abs().max() / wanted.abs().max()).item()


@rows
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision_is_computed_in_float32(row, dtype):
    for seed in SEEDS:
        E, y = random_batch(seed)
        rounded, labels = torch.tensor(E).to(dtype), torch.tensor(y)
        value, slope, parameters = measured(row, rounded, labels)
        wanted, exact, exact_parameters = measured(row, rounded.double(), labels)
        assert value.dtype == torch.float32
        assert slope.dtype == dtype
        assert off(value, wanted) < 1e-6
        assert off(slope, exact) < HALF[dtype][0]
        for a, b in zip(parameters, exact_parameters, strict=True):
            assert a.dtype == torch.float32
            assert off(a, b) < 1e-5


@rows
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision_is_near_the_unrounded_value(row, dtype):
    tolerance = 0.1 if row.id == "Triplet-semihard" else HALF[dtype][1]
    for seed in SEEDS:
        E, y = random_batch(seed)
        full, labels = torch.tensor(E), torch.tensor(y)
        assert off(measured(row, full.to(dtype), labels)[0], measured(row, full, labels)[0]) < tolerance


@rows
def test_float32_is_near_float64(row):
    for seed in SEEDS:
        E, y = random_batch(seed)
        rounded, labels = torch.tensor(E, dtype=torch.float32), torch.tensor(y)
        value, slope, _ = measured(row, rounded, labels)
        wanted, exact, _ = measured(row, rounded.double(), labels)
        assert value.dtype == slope.dtype == torch.float32
        assert off(value, wanted) < 1e-6
        assert off(slope, exact) < 1e-5


@rows
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_autocast_changes_nothing_inside_a_loss(row, dtype):
    E, y = random_batch()
    embeddings, labels = torch.tensor(E, dtype=torch.float32), torch.tensor(y)
    wanted = measured(row, embeddings, labels)
    found = measured(row, embeddings, labels, lambda: torch.autocast("cpu", dtype=dtype))
    with torch.autocast("cpu", dtype=dtype):
        explained = row.make().explain(embeddings, labels) if not row.proxies else None
    assert found[0].dtype == torch.float32
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    if explained is not None:
        assert explained.value.dtype == explained.weights.dtype == torch.float32
        assert torch.equal(explained.value, wanted[0])


@rows
def test_autocast_around_a_network_and_its_loss(row):
    """The common loop: a linear head under autocast gives bfloat16 rows; the loss is near that of a float64 head."""
    torch.manual_seed(0)
    _, y = random_batch()
    head, x, labels = torch.nn.Linear(8, 4), torch.randn(10, 8), torch.tensor(y)
    loss = row.loss().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows_of_half = head(x)
        value = loss(rows_of_half, labels)
    value.backward()
    assert rows_of_half.dtype == torch.bfloat16
    assert value.dtype == torch.float32
    assert head.weight.grad.dtype == torch.float32
    assert torch.isfinite(head.weight.grad).all()
    exact = row.loss()(head.double()(x.double()), labels)
    assert value.item() == pytest.approx(exact.item(), rel=0.1 if row.id == "Triplet-semihard" else 0.02)


@pytest.mark.parametrize("row", [row for row in ROWS if not row.composed], ids=lambda row: row.id)
def test_float32_holds_on_a_larger_batch(row):
    """256 rows of 64 numbers, 65,280 pairs: value to 1e-5, gradient to 1e-3 of its largest entry."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(256) // 4
    if row.name in ("Triplet", "Angular"):
        labels = labels[:96]
    centers = torch.randn(64, 64, generator=generator)[labels]
    embeddings = (centers + 1.2 * torch.randn(len(labels), 64, generator=generator)).float()
    value, slope, _ = measured(row, embeddings, labels)
    wanted, exact, _ = measured(row, embeddings.double(), labels)
    assert off(value, wanted) < 1e-5
    assert off(slope, exact) < 1e-3


def test_mixed_precision_of_queries_and_references():
    E, y = random_batch()
    half, full, labels = torch.tensor(E).bfloat16(), torch.tensor(E).float(), torch.tensor(y)
    for queries, references, wanted in (
        (half, full, torch.float32),
        (full, half, torch.float32),
        (half, half, torch.float32),
        (half, full.double(), torch.float64),
    ):
        value = nf.losses.Contrastive()(queries, labels, ref_emb=references, ref_labels=labels)
        assert value.dtype == wanted
