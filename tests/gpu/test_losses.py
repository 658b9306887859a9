"""On a GPU: the same numbers as on the CPU, and not one host synchronization in forward or backward."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from engine_cases import on
from processes import together
from table import IDS, ROWS, random_batch, tensors

import nearfar as nf

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here; run on a GPU machine"),
]
rows = pytest.mark.parametrize("row", ROWS, ids=IDS)


@contextmanager
def no_stalls() -> Iterator[None]:
    """Whoever makes the host wait for the device is an error."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@rows
def test_equals_cpu_without_a_stall(row):
    embeddings, labels = tensors(*random_batch())
    loss = row.loss()
    value = loss(embeddings, labels)
    value.backward()
    there, names = embeddings.detach().cuda().requires_grad_(), labels.cuda()
    loss = loss.cuda()
    loss(there, names).backward()  # once to warm up: libraries may synchronize when they load
    there.grad = None
    with no_stalls():
        moved = loss(there, names)
        moved.backward()
    torch.testing.assert_close(moved.cpu(), value.detach(), atol=1e-10, rtol=1e-8)
    torch.testing.assert_close(there.grad.cpu(), embeddings.grad, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize(
    "miner",
    [
        nf.miners.Hard(),
        nf.miners.SemiHard(),
        nf.miners.MultiSimilarity(),
        nf.miners.BalancedHard(),
        nf.miners.DistanceWeighted(),
    ],
    ids=lambda miner: type(miner).__name__,
)
def test_miners_do_not_stall(miner):
    embeddings, labels = tensors(*random_batch())
    there, names = embeddings.detach().cuda().requires_grad_(), labels.cuda()
    loss = nf.losses.BinomialDeviance(miner=miner)
    loss(there, names).backward()
    with no_stalls():
        loss(there, names).backward()
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


@rows
@pytest.mark.parametrize("tile", [None, 3])
def test_tiled_equals_dense_there(row, tile):
    """Strips on the device, those of the large size included: the numbers of the dense engine."""
    torch.manual_seed(0)
    embeddings = torch.randn(300, 4, dtype=torch.float64, device="cuda")
    labels = torch.randint(0, 4 if row.proxies else 60, (300,), device="cuda")
    found = []
    for engine in ("dense", "tiled"):
        loss = on(row.loss().cuda(), engine, tile)
        leaf = embeddings.clone().requires_grad_()
        value = loss(leaf, labels)
        value.backward()
        found.append((value.detach(), leaf.grad))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-8)


def test_auto_tiles_large_batches_there():
    loss = nf.losses.SupCon()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rows = torch.randn(16384, 64, device="cuda", requires_grad=True)
    loss(rows, torch.arange(16384, device="cuda") // 4).backward()
    assert torch.cuda.max_memory_allocated() - before < 16384**2 * 4  # less than one dense matrix


def test_a_memory_lives_there():
    memory, here = (
        nf.CrossBatchMemory(nf.losses.SupCon(), size=30).double().cuda(),
        nf.CrossBatchMemory(nf.losses.SupCon(), size=30).double(),
    )
    for seed in range(4):
        embeddings, labels = tensors(*random_batch(seed), grad=False)
        value = memory(embeddings.cuda(), labels.cuda(), ids=torch.arange(10).cuda())
        torch.testing.assert_close(value.cpu(), here(embeddings, labels, ids=torch.arange(10)))
    again = nf.CrossBatchMemory(nf.losses.SupCon(), size=30).double().cuda()
    again.load_state_dict(memory.state_dict())
    assert torch.equal(again(embeddings.cuda(), labels.cuda(), ids=torch.arange(10).cuda()),
                       memory(embeddings.cuda(), labels.cuda(), ids=torch.arange(10).cuda()))  # fmt: skip


def test_chunks_replay_the_devices_own_dropout():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.4), torch.nn.Linear(16, 4)).double().cuda()
    embeddings, labels = (x.detach().cuda() for x in tensors(*random_batch()))
    slopes = []
    for cached in (True, False):
        net.zero_grad()
        torch.manual_seed(7)
        if cached:
            nf.cached_step(net, embeddings, labels, nf.losses.SupCon(), 3)
        else:
            nf.losses.SupCon()(torch.cat([net(part) for part in embeddings.split(3)]), labels).backward()
        slopes.append([p.grad.clone() for p in net.parameters()])
    for a, b in zip(*slopes, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def shared_device(rank: int, world: int) -> dict[str, list[torch.Tensor]]:
    """Two ranks with their rows on one device, talking through the host."""
    torch.manual_seed(0)
    embeddings = torch.randn(700, 8, dtype=torch.float64)
    labels = torch.randint(0, 90, (700,))
    mine = slice(0, 450) if rank == 0 else slice(450, 700)
    mine = mine if world > 1 else slice(None)
    found = {}
    for make in (nf.losses.MultiSimilarity, lambda: nf.losses.DroTopK(k=300), nf.losses.LiftedStructure):
        leaf = embeddings[mine].cuda().requires_grad_()
        loss = make().double().cuda()
        value = nf.Distributed(loss, averaged=False)(leaf, labels[mine].cuda())
        value.backward()
        found[type(loss).__name__] = [value.detach().cpu(), leaf.grad.cpu()]
    return found


def test_ranks_on_a_gpu_equal_one(tmp_path):
    alone, (first, second) = shared_device(0, 1), together(__name__, "shared_device", 2, tmp_path, gpu=True)
    for name, (value, slope) in alone.items():
        for found in (first[name], second[name]):
            torch.testing.assert_close(found[0], value, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(torch.cat([first[name][1], second[name][1]]), slope, atol=1e-10, rtol=1e-8)
