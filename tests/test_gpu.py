"""On a GPU: the same numbers as on the CPU, and not one host synchronisation in forward or backward."""

from __future__ import annotations

import time
import warnings

import pytest
import torch
from table import IDS, ROWS, random_batch, tensors

import nearfar as nf

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here; run on a GPU machine")
rows = pytest.mark.parametrize("row", ROWS, ids=IDS)


@rows
def test_equals_cpu_without_a_stall(row):
    embeddings, labels = tensors(*random_batch())
    loss = row.loss()
    value = loss(embeddings, labels)
    value.backward()
    there, names = embeddings.detach().cuda().requires_grad_(), labels.cuda()
    loss = loss.cuda()
    loss(there, names).backward()  # once to warm up: libraries may synchronise when they load
    there.grad = None
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = loss(there, names)
        moved.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(moved.cpu(), value.detach(), atol=1e-10, rtol=1e-8)
    torch.testing.assert_close(there.grad.cpu(), embeddings.grad, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize(
    "miner",
    [
        nf.mining.Hard(),
        nf.mining.SemiHard(),
        nf.mining.MultiSimilarity(),
        nf.mining.BalancedHard(),
        nf.mining.DistanceWeighted(),
    ],
    ids=lambda miner: type(miner).__name__,
)
def test_miners_do_not_stall(miner):
    embeddings, labels = tensors(*random_batch())
    there, names = embeddings.detach().cuda().requires_grad_(), labels.cuda()
    loss = nf.losses.BinomialDeviance(filter=miner)
    loss(there, names).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss(there, names).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(there.grad).all()


def test_degenerate_batch_is_reported_a_call_later():
    loss = nf.losses.Triplet()
    x, y = torch.randn(6, 4, device="cuda"), torch.arange(6, device="cuda")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert loss(x, y).item() == 0
        time.sleep(0.05)
        loss(x, y)
    assert [type(w.message) for w in seen] == [nf.DegenerateBatchWarning]


@rows
def test_nan_shows(row):
    embeddings, labels = tensors(*random_batch(), grad=False)
    embeddings[0, 1] = torch.nan  # row 0 is no singleton, whatever the seed does to the labels
    labels[:2] = 0
    assert torch.isnan(row.loss().cuda()(embeddings.cuda(), labels.cuda()))
