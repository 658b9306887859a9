"""Collapsed classes and near rows on the fused kernels.

tests/properties/test_collapsed_classes.py runs this file in its own process.
"""

from __future__ import annotations

import os

import pytest
import torch
from collapsed import APART, EUCLIDEAN, LOSSES, collapsed, crowd, holds, off, slope, stated
from interpreter import quicken

import nearfar as nf
from nearfar._utils.process_group import ALONE
from nearfar.engines.finish import finish
from nearfar.engines.operator_call import OperatorCall

assert os.environ["TRITON_INTERPRET"] == "1"  # before triton is imported, which reads it once
quicken()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FOLDED = ["Contrastive", "Margin", "SupCon-NegEuclidean", "DroKL-NegSquaredEuclidean", "LiftedStructure"]


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_stays_that_of_float64(name):
    """What has no kernels is tiled."""
    holds(LOSSES[name], "fused")


@pytest.mark.parametrize("name", ["Triplet", "Triplet-hard", "Triplet-semihard", "HAP2S", *FOLDED])
def test_near_rows_have_kernels(name):
    loss, (rows, labels) = LOSSES[name](), collapsed(1e-4, 0.6)
    relation, wide = nf.Relation.from_labels(labels), loss.similarity.prepared(rows.double())
    assert OperatorCall(loss.product, relation.layout(), *wide, torch.float32, None, ALONE).rest
    assert finish(loss.product, relation.layout(), *wide, low=torch.float32) is not None


@pytest.mark.parametrize("name", [name for name in FOLDED if name != "LiftedStructure"])
def test_positive_pairs_may_be_folded(name, monkeypatch):
    """Around a row of their class; also if the first row of a class lies far from the others."""
    monkeypatch.setattr("nearfar.engines.rows.GATHERED", (0, 0))
    # at right angles the pull of SupCon's positives is that of its softmax: float32 weights cancel
    apart = APART[1:] if "SupCon" in name else APART
    holds(LOSSES[name], "fused", apart=apart)

    def stray(rows, labels):
        aside = rows[:1] * torch.tensor([1.0, -1.0]).repeat(8)
        return torch.cat([aside, rows[1:]]), labels, {}

    holds(LOSSES[name], "fused", stray, apart[-3:])


@pytest.mark.parametrize("name", FOLDED)
def test_references(name):
    holds(LOSSES[name], "fused", lambda x, y: (x[:16], y[:16], {"ref_emb": x[16:], "ref_labels": y[16:]}))


@pytest.mark.parametrize("row", EUCLIDEAN, ids=lambda row: row.id)
def test_rows_that_lie_close_together(row):
    """The origin among them changes no gradient: there, rows of length 1 have another length."""
    for spread, bound in stated().items():
        rows, labels = crowd(spread)
        loss, exact = row.make(), row.make()
        loss.engine, exact.engine = "fused", "dense"
        found, wanted = slope(loss, rows, labels, torch.float32), slope(exact, rows, labels, torch.float64)
        assert off(found, wanted) < bound, spread


@pytest.mark.parametrize("width", [None, 4])
@pytest.mark.parametrize("name", ["Contrastive", "SupCon-NegEuclidean"])
def test_compiled_it_is_one_graph(name, width):
    """Positive pairs are gathered where their number is told, and folded where it is not."""
    torch._dynamo.reset()
    rows, labels = collapsed(1e-4, 0.6)
    loss, exact = LOSSES[name](), LOSSES[name]()
    loss.engine, exact.engine = "fused", "dense"
    step = torch.compile(
        lambda x: loss(x, nf.Relation.from_labels(labels, width=width)), fullgraph=True, backend="aot_eager"
    )
    leaf = rows.clone().requires_grad_()
    (found,) = torch.autograd.grad(step(leaf), leaf)
    assert off(found.double(), slope(exact, rows, labels, torch.float64)) < 1e-5
    torch._dynamo.reset()
