"""Tensors are made on the device of the rows: what is made without one would land on the CPU, beside rows on a GPU.

Both tests need no GPU. The first makes every tensor that is made without a device a meta tensor, which cannot be
mixed with the others; the second puts what a loss has learned onto another device than the one that is the default.
"""

from __future__ import annotations

import pytest
import torch
from engine_cases import MINERS
from table import IDS, ROWS

import nearfar as nf
from tests.relations.test_layout import cases

L, P = nf.losses, nf.pairs
Y = torch.tensor([0, 2, 1, 0, 3, 1, 2, 0, 4, 1, 0, 2])


def rows(count, seed=0):
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def measured(loss, x, labels, **more):
    x = x.clone().requires_grad_()
    torch.manual_seed(3)
    value = loss(x, labels, **more)
    value.sum().backward()
    return value.detach(), x.grad, *(p.grad.clone() for p in loss.parameters() if p.grad is not None)


def check_made_on_the_device(loss, x, labels, **more):
    wanted = measured(loss, x, labels, **more)
    loss.zero_grad(set_to_none=True)
    with torch.device("meta"):
        found = measured(loss, x, labels, **more)
    for have, want in zip(found, wanted, strict=True):
        assert torch.equal(have, want)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_no_tensor_of_a_loss_is_made_without_a_device(row, engine):
    loss = row.loss()
    loss.engine = engine
    check_made_on_the_device(loss, rows(12), torch.where(Y > 3, 3, Y))


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("miner", MINERS)
@pytest.mark.parametrize("kind", [L.Contrastive, L.MultiSimilarity, L.Margin])
def test_no_tensor_of_a_miner_is_made_without_a_device(kind, miner, engine):
    check_made_on_the_device(kind(miner=MINERS[miner], engine=engine).double(), rows(12), Y)


@pytest.mark.filterwarnings("ignore::nearfar.DegenerateBatchWarning")
@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("name", cases())
def test_no_tensor_of_a_relation_is_made_without_a_device(name, engine):
    relation = cases()[name]
    for loss in (L.Margin(engine=engine), L.MultiSimilarity(engine=engine), L.Triplet(engine=engine)):
        reference = {} if relation.square else {"ref_emb": rows(relation.shape[1], seed=1)}
        check_made_on_the_device(loss.double(), rows(relation.shape[0]), relation, **reference)


@pytest.mark.parametrize("learn", [True, False])
@pytest.mark.parametrize("groups", ["batch", "anchor_sign"])
def test_a_learned_number_may_lie_on_any_device(groups, learn):
    loss = nf.RobustLoss(pair=P.Hinge(learn=True), over=nf.sets.KL(0.3), groups=groups).requires_grad_(learn)
    wanted = str(loss.plan)
    assert str(loss.to("meta").plan) == wanted


class Shifted(P.Hinge):
    """A pair loss with a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(3))


MISPLACED = {
    "pair_positive.offset": L.Margin,
    "pair_positive.shift": lambda: nf.RobustLoss(pair=Shifted(), over=nf.sets.Mean()),
    "proxies": lambda: L.ProxyAnchor(classes=5, dim=4),
    "loss.pair_positive.offset": lambda: nf.CrossBatchMemory(L.Margin(), size=20),
}


@pytest.mark.parametrize("engine", ["auto", "dense", "tiled"])
@pytest.mark.parametrize("name", MISPLACED)
def test_a_loss_on_another_device_is_refused(name, engine):
    for loss in (MISPLACED[name]().double(), nf.Distributed(MISPLACED[name]().double())):
        inner = getattr(loss, "loss", loss)
        getattr(inner, "loss", getattr(inner, "robust", inner)).engine = engine
        loss(rows(12), Y)  # in place
        loss.to("meta")
        for ask in (loss, loss.explain):
            with pytest.raises(ValueError, match=rf"its \S*{name} is on meta but the embeddings are on cpu; move the"):
                ask(rows(12), Y)


def test_a_memory_moves_its_rows_itself():
    memory = nf.CrossBatchMemory(L.SupCon(), size=20)
    memory(rows(12), Y)
    memory.embeddings = memory.embeddings.to("meta")
    with pytest.raises(NotImplementedError, match="meta"):  # it tried
        memory(rows(12), Y)
