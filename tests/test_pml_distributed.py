"""Wrappers of nearfar.pml for several processes: what one process sees of them (tests/gathered_pml.py has the rest)."""

from __future__ import annotations

import pytest
import torch
from pytorch_metric_learning import losses as their_losses
from pytorch_metric_learning import miners as their_miners
from test_pml_miners import batch, listed

import nearfar as nf
from nearfar.pml import losses, miners
from nearfar.pml.utils import distributed
from nearfar.pml.utils.distributed import DistributedLossWrapper, DistributedMinerWrapper


@pytest.mark.parametrize("sizes", [(3, 4), (1, 5, 2), (2, 0, 3)])
def test_own_rows_first_and_the_order_of_ranks_are_two_orders_of_the_same_rows(sizes):
    whole = torch.arange(sum(sizes))
    for rank, size in enumerate(sizes):
        start = sum(sizes[:rank])
        mine = slice(start, start + size)
        own_first = torch.cat([whole[mine], whole[:start], whole[mine.stop :]])
        assert distributed._to_joint(whole, mine).tolist() == own_first.tolist()
        assert distributed._from_joint(own_first, mine).tolist() == whole.tolist()


def test_tuples_are_told_apart_whatever_their_order():
    a, p, n = torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5]), torch.tensor([6, 7, 8])
    turned = tuple(x.flip(0) for x in (a, p, n))
    same = distributed._sum((a, p, n))
    assert torch.equal(same, distributed._sum(turned))
    for other in ((a, n, p), (a, p.flip(0), n), (a, p, a, n), (a[:2], p[:2], n[:2])):
        assert not torch.equal(same, distributed._sum(other))


@pytest.mark.parametrize("efficient", [False, True])
@pytest.mark.parametrize("loss", [losses.ContrastiveLoss(), their_losses.ContrastiveLoss(), nf.losses.Contrastive()])
def test_one_process_has_the_loss_inside(loss, efficient):
    embeddings, labels = batch(1)
    wrapped = DistributedLossWrapper(loss, efficient=efficient)
    found = DistributedMinerWrapper(their_miners.BatchHardMiner(), efficient)(embeddings, labels)
    assert listed(found) == listed(miners.BatchHardMiner()(embeddings, labels))
    for indices in (None, found):
        assert torch.equal(wrapped(embeddings, labels, indices), loss(embeddings, labels, indices))
    assert list(wrapped.state_dict()) == [f"loss.{name}" for name in loss.state_dict()]


def test_a_memory_inside():
    embeddings, labels = batch(1)
    memory, plain = (losses.CrossBatchMemory(losses.ContrastiveLoss(), 5, memory_size=20) for _ in range(2))
    mask = torch.arange(len(labels)) > 4
    wrapped = DistributedLossWrapper(memory)
    for given in ({}, {"enqueue_mask": mask}):
        assert torch.equal(wrapped(embeddings, labels, **given), plain(embeddings, labels, **given))
    with pytest.raises(ValueError, match="takes no reference"):
        wrapped(embeddings, labels, ref_emb=embeddings, ref_labels=labels)


def test_what_is_no_loss_and_no_miner():
    with pytest.raises(TypeError, match="loss must be a loss, but came as function"):
        DistributedLossWrapper(batch)
    with pytest.raises(TypeError, match="loss must be a loss, but came as DistributedLossWrapper"):
        DistributedLossWrapper(DistributedLossWrapper(losses.ContrastiveLoss()))
    with pytest.raises(TypeError, match="miner must be a miner, but came as int"):
        DistributedMinerWrapper(3)
