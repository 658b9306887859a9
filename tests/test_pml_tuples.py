"""Index tuples in nearfar.pml: the order of a miner, pairs listed in odd ways, and no matrix of all pairs."""

from __future__ import annotations

import pytest
import pytorch_metric_learning as theirs
import torch
from pytorch_metric_learning import losses, miners  # noqa: F401 - loads them
from test_pml import SIZES, batch
from torch.utils._python_dispatch import TorchDispatchMode

import nearfar.pml as ours

PAIRS = (
    "ContrastiveLoss", "TripletMarginLoss", "MultiSimilarityLoss", "LiftedStructureLoss",
    "GeneralizedLiftedStructureLoss", "NPairsLoss", "NTXentLoss", "SupConLoss", "CircleLoss", "MarginLoss",
)  # fmt: skip


@pytest.mark.parametrize("distance", ["CosineSimilarity", "LpDistance"])
def test_the_first_pair_of_a_class_is_that_of_pml(distance):
    """`NPairsLoss` takes the first pair of each class that a tuple lists, so the order of a miner decides."""
    for seed in range(4):
        embeddings, labels = batch(seed, SIZES[2])
        mined = [m.miners.MultiSimilarityMiner(distance=getattr(m.distances, distance)()) for m in (ours, theirs)]
        found, wanted = (miner(embeddings, labels) for miner in mined)
        assert torch.equal(torch.stack(found[:2]), torch.stack(wanted[:2]))
        mine, other = ours.losses.NPairsLoss(), theirs.losses.NPairsLoss()
        assert mine(embeddings, labels, found).item() == pytest.approx(other(embeddings, labels, wanted).item())


@pytest.mark.parametrize("reducer", ["DivisorReducer", "MeanReducer", "SumReducer", "AvgNonZeroReducer"])
@pytest.mark.parametrize("settings", [{}, {"learn_beta": True, "nu": 0.2, "num_classes": 5}], ids=["one", "classes"])
def test_the_margin_loss_of_pairs_listed_in_odd_ways(settings, reducer):
    """Twice, in both orders, and both as positive and as negative: as in PML, by the triplets that they form."""
    embeddings, labels = batch(2, SIZES[1])
    a, p, b, n = theirs.miners.MultiSimilarityMiner()(embeddings, labels)
    odd = {
        "twice": (torch.cat([a, a[:4]]), torch.cat([p, p[:4]]), torch.cat([b, b[:7]]), torch.cat([n, n[:7]])),
        "orders": (torch.cat([a, p]), torch.cat([p, a]), torch.cat([b, n]), torch.cat([n, b])),
        "signs": (torch.cat([a, b[:5]]), torch.cat([p, n[:5]]), b, n),
        "triplets": theirs.miners.TripletMarginMiner(0.3)(embeddings, labels),
        "none": tuple(torch.zeros(4, 0, dtype=torch.int64)),
    }
    for indices in odd.values():
        made = [
            m.losses.MarginLoss(**settings, reducer=getattr(m.reducers, reducer)()).double() for m in (ours, theirs)
        ]
        found, wanted = (loss(embeddings, labels, indices) for loss in made)
        assert found.item() == pytest.approx(wanted.item(), rel=1e-9, abs=1e-12)
        slopes = [torch.autograd.grad(value, embeddings)[0] for value in (found, wanted)]
        torch.testing.assert_close(*slopes, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("distance", ["CosineSimilarity", "DotProductSimilarity"])
def test_a_learned_boundary_of_similarities(distance):
    embeddings, labels = batch(3, SIZES[1])
    mine, other = (
        m.losses.MarginLoss(learn_beta=True, nu=0.1, beta=0.4, distance=getattr(m.distances, distance)()).double()
        for m in (ours, theirs)
    )
    found, wanted = mine(embeddings, labels), other(embeddings, labels)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-9)
    found.backward(), wanted.backward()
    torch.testing.assert_close(mine.beta.grad, other.beta.grad)
    assert list(mine.state_dict()) == list(other.state_dict()) == ["beta"]


@pytest.mark.parametrize("name", ["ArcFaceLoss", "ProxyNCALoss", "ProxyAnchorLoss"])
def test_logits_of_rows_in_another_precision(name):
    loss = getattr(ours.losses, name)(4, 6)
    rows, labels = torch.randn(5, 6), torch.arange(5) % 4
    for kind in (torch.float64, torch.float16, torch.bfloat16, torch.float32):
        assert loss(rows.to(kind), labels).isfinite()
        logits = loss.get_logits(rows.to(kind))
        assert logits.dtype == (torch.float64 if kind == torch.float64 else torch.float32)
        torch.testing.assert_close(logits.float(), loss.get_logits(rows), rtol=0.02, atol=0.5)


class Largest(TorchDispatchMode):
    """The largest tensor that is made."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else (found,):
            if isinstance(each, torch.Tensor):
                self.size = max(self.size, each.numel())
        return found


@pytest.mark.parametrize("kind", ["pairs", "triplets"])
@pytest.mark.parametrize("name", PAIRS)
def test_a_short_tuple_of_many_rows_makes_no_matrix(name, kind):
    n, d = 1200, 4
    rows = torch.randn(n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    labels = torch.arange(n) % 300
    a = torch.arange(n)
    p, q = (a + 300) % n, (a + 1) % n
    indices = (a, p, a, q) if kind == "pairs" else (a, p, q)
    loss = getattr(ours.losses, name)()
    with Largest() as watched:
        loss(rows, labels, indices).backward()
    assert watched.size < n * n / 4
    wanted = getattr(theirs.losses, name)()(rows, labels, indices)
    assert loss(rows, labels, indices).item() == pytest.approx(wanted.item(), rel=1e-7)
