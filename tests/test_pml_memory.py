"""`nearfar.pml.losses.CrossBatchMemory` beside PML's, and what PML's does not keep."""

from __future__ import annotations

import io

import pytest
import pytorch_metric_learning as theirs
import torch
from pytorch_metric_learning import distances, losses, miners  # noqa: F401 - loads them

import nearfar.pml as ours

CLOSE = {"atol": 1e-9, "rtol": 1e-9}
LOSSES = ("ContrastiveLoss", "MultiSimilarityLoss", "SupConLoss", "NTXentLoss", "CircleLoss", "TripletMarginLoss",
          "GeneralizedLiftedStructureLoss")  # fmt: skip
MINERS = (None, "MultiSimilarityMiner", "BatchHardMiner", "TripletMarginMiner")


def batch(seed, n=12):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=generator, dtype=torch.float64), torch.randint(0, 4, (n,), generator=generator)


def memory(library, name, miner=None, size=30):
    chosen = None if miner is None else getattr(library.miners, miner)()
    return library.losses.CrossBatchMemory(getattr(library.losses, name)(), 6, memory_size=size, miner=chosen)


def step(loss, rows, labels, *more):
    leaf = rows.clone().requires_grad_()
    value = loss(leaf, labels, *more)
    value.backward()
    return value.detach(), leaf.grad


@pytest.mark.filterwarnings("ignore::nearfar.DegenerateBatchWarning")
@pytest.mark.parametrize("miner", MINERS)
@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_are_pmls(name, miner):
    """Five batches, so that the ring wraps around; PML's triplets without a miner list every one of them."""
    mine, reference = memory(ours, name, miner), memory(theirs, name, miner)
    for seed in range(5):
        for found, wanted in zip(step(mine, *batch(seed)), step(reference, *batch(seed)), strict=True):
            torch.testing.assert_close(found, wanted, **CLOSE)
    assert mine.queue_idx == reference.queue_idx
    assert torch.equal(mine.embedding_memory, reference.embedding_memory)
    assert torch.equal(mine.label_memory, reference.label_memory)


def test_rows_may_be_remembered_without_being_learnt_from():
    mine, reference = memory(ours, "ContrastiveLoss"), memory(theirs, "ContrastiveLoss")
    chosen = torch.arange(12) % 2 == 0
    for seed in range(4):
        for found, wanted in zip(
            step(mine, *batch(seed), None, chosen), step(reference, *batch(seed), None, chosen), strict=True
        ):
            torch.testing.assert_close(found, wanted, **CLOSE)


def test_given_pairs_are_added():
    mine, reference = memory(ours, "ContrastiveLoss"), memory(theirs, "ContrastiveLoss")
    given = (torch.tensor([0, 1]), torch.tensor([2, 3]), torch.tensor([0]), torch.tensor([5]))
    for found, wanted in zip(step(mine, *batch(0), given), step(reference, *batch(0), given), strict=True):
        torch.testing.assert_close(found, wanted, **CLOSE)


def test_a_checkpoint_keeps_the_position_which_pmls_loses():
    whole, begun = memory(ours, "ContrastiveLoss"), memory(ours, "ContrastiveLoss")
    for seed in range(4):
        step(whole, *batch(seed)), step(begun, *batch(seed))
    file = io.BytesIO()
    torch.save(begun.state_dict(), file)
    file.seek(0)
    resumed = memory(ours, "ContrastiveLoss").double()
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(step(resumed, *batch(9))[0], step(whole, *batch(9))[0])
    told = memory(theirs, "ContrastiveLoss").state_dict()
    old = memory(ours, "ContrastiveLoss")
    old.load_state_dict(told)  # a checkpoint of PML's: rows without a position
    assert (old.queue_idx, old.has_been_filled) == (0, False)


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (lambda: memory(ours, "NPairsLoss"), r"CrossBatchMemory: loss must be one of pairs or triplets"),
        (lambda: memory(ours, "ContrastiveLoss", size=0), r"memory_size must be a whole number above zero"),
        (lambda: memory(ours, "ContrastiveLoss", size=5)(*batch(0)), r"12 rows do not fit a memory of 5"),
        (lambda: memory(ours, "ContrastiveLoss")(batch(0)[0][:, :3], batch(0)[1]), r"must be embedding_size=6 wide"),
        (
            lambda: memory(ours, "ContrastiveLoss")(*batch(0), (), torch.ones(12, dtype=torch.bool)),
            r"indices_tuple and enqueue_mask exclude each other",
        ),
        (lambda: memory(ours, "ContrastiveLoss")(*batch(0), None, torch.ones(12)), r"enqueue_mask must be a boolean"),
        (
            lambda: memory(ours, "TripletMarginLoss", "TripletMarginMiner")(*batch(0), (torch.tensor([0]),) * 4),
            r"the miner gives triplets but indices_tuple holds pairs",
        ),
    ],
)
def test_bad_arguments_are_named(attempt, words):
    with pytest.raises((TypeError, ValueError), match=words):
        attempt()
