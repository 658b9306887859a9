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
    ],
)
def test_bad_arguments_are_named(attempt, words):
    with pytest.raises((TypeError, ValueError), match=words):
        attempt()


@pytest.mark.parametrize("kind", ["pairs", "triplets"])
@pytest.mark.parametrize("name", [*LOSSES, "MarginLoss"])
def test_a_tuple_of_the_batch_points_at_its_rows_in_the_memory(name, kind):
    """From the second batch on PML's points at the memory's first rows; a loss with the whole list decides."""
    mine, alone = memory(ours, name), getattr(ours.losses, name)()
    miner = ours.miners.MultiSimilarityMiner() if kind == "pairs" else ours.miners.BatchHardMiner()
    for seed in range(4):
        rows, labels = batch(seed)
        given = miner(rows, labels)
        found = mine(rows, labels, given)
        places = (torch.arange(12) + 12 * seed) % 30
        past, past_labels = mine.embedding_memory, mine.label_memory
        count = 30 if mine.has_been_filled else 12 * (seed + 1)
        same = labels[:, None] == past_labels[None, :count]
        positive = same & (places[:, None] != torch.arange(count))
        a, p, b, n = *positive.nonzero(as_tuple=True), *(~same).nonzero(as_tuple=True)
        g = given if kind == "pairs" else (given[0], given[1], given[0], given[2])
        listed = (
            torch.cat([a, g[0]]),
            torch.cat([p, places[g[1]]]),
            torch.cat([b, g[2]]),
            torch.cat([n, places[g[3]]]),
        )
        assert torch.equal(past_labels[listed[1]], labels[listed[0]])
        wanted = alone(rows, labels, listed, past[:count], past_labels[:count])
        assert found.item() == pytest.approx(wanted.item(), rel=1e-9)


@pytest.mark.filterwarnings("ignore::nearfar.DegenerateBatchWarning")
@pytest.mark.parametrize("name", ["ContrastiveLoss", "TripletMarginLoss", "SupConLoss"])
def test_miners_and_losses_of_pml_and_of_ones_own(name):
    class Own(ours.miners.BaseMiner):
        def mine(self, embeddings, labels, ref_emb, ref_labels):
            return theirs.miners.BatchHardMiner().mine(embeddings, labels, ref_emb, ref_labels)

    wanted = memory(theirs, name, "BatchHardMiner")
    for kind in ("BatchHardMiner", "MultiSimilarityMiner"):
        wanted = memory(theirs, name, kind)
        made = [getattr(theirs.miners, kind)(), getattr(ours.miners, kind)(), *([Own()] if kind[0] == "B" else [])]
        mine = [ours.losses.CrossBatchMemory(getattr(ours.losses, name)(), 6, 30, miner=each) for each in made]
        other = ours.losses.CrossBatchMemory(getattr(theirs.losses, name)(), 6, 30, miner=made[0])
        for seed in range(4):
            value = wanted(*batch(seed)).item()
            assert [each(*batch(seed)).item() for each in (*mine, other)] == pytest.approx([value] * (len(mine) + 1))


def test_a_loss_of_pml_without_a_miner_has_the_pairs_listed():
    mine = ours.losses.CrossBatchMemory(theirs.losses.NCALoss(), 6, 30)
    other = theirs.losses.CrossBatchMemory(theirs.losses.NCALoss(), 6, 30)
    for seed in range(4):
        assert mine(*batch(seed)).item() == pytest.approx(other(*batch(seed)).item())


def test_a_state_dict_loads_in_pml_and_the_reverse():
    mine, other = memory(ours, "ContrastiveLoss"), memory(theirs, "ContrastiveLoss")
    for seed in range(2):
        step(mine, *batch(seed)), step(other, *batch(seed))
    assert list(mine.state_dict()) == list(other.state_dict())
    loaded = memory(theirs, "ContrastiveLoss").double()
    loaded.load_state_dict(mine.state_dict())
    assert torch.equal(loaded.embedding_memory, mine.embedding_memory)
    resumed = memory(ours, "ContrastiveLoss").double()
    resumed.load_state_dict(other.state_dict())  # PML says no position; the rows that are not zero do
    assert (resumed.queue_idx, resumed.has_been_filled) == (24, False)
    assert torch.equal(step(resumed, *batch(9))[0], step(mine, *batch(9))[0])
    full = memory(ours, "ContrastiveLoss").double()
    plain = {name: value.clone() for name, value in mine.state_dict().items()}  # without metadata, as in safetensors
    full.load_state_dict(plain)
    assert full.has_been_filled
    full.reset_queue()
    assert (full.queue_idx, full.has_been_filled, full.embedding_memory.any().item()) == (0, False, False)


def test_which_losses_may_be_inside():
    names = ours.losses.CrossBatchMemory.supported_losses()
    assert sorted(names) == sorted(theirs.losses.CrossBatchMemory.supported_losses())
    ours.losses.CrossBatchMemory.check_loss_support("SupConLoss")
    with pytest.raises(TypeError, match="ArcFaceLoss takes no reference"):
        ours.losses.CrossBatchMemory.check_loss_support("ArcFaceLoss")
    with pytest.raises(TypeError, match="loss must be one of pairs or triplets"):
        ours.losses.CrossBatchMemory(ours.losses.ArcFaceLoss(3, 6), 6)
