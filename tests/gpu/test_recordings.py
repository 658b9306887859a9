"""On a GPU: recordings and captures of every loss, and the fused kernels with tiles of their true size."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
from interpreter import unfused
from table import IDS, ROWS

import nearfar as nf
from nearfar.engines.auto import has_triton
from nearfar.engines.recordings import Recording

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here; run on a GPU machine"),
]
rows = pytest.mark.parametrize("row", ROWS, ids=IDS)
L = nf.losses


def pair(make):
    """The same loss twice: by default, and dense."""
    torch.manual_seed(0)
    loss = make().float().cuda()
    dense = copy.deepcopy(loss)
    loss._core().engine, dense._core().engine = "auto", "dense"
    return loss, dense, getattr(loss, "dim", 16)


def batch(seed, n, d, classes=8):
    rng = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n, d, generator=rng), torch.randint(0, classes, (n,), generator=rng)
    return x.cuda(), (y % 4 if classes < 4 else y).cuda()


def step(loss, x, y, **more):
    leaf = x.clone().requires_grad_()
    loss.zero_grad()
    value = loss(leaf, y, **more)
    value.sum().backward()
    return [value.detach(), leaf.grad, *(p.grad.clone() for p in loss.parameters() if p.grad is not None)]


def recorded(loss):
    return sum(isinstance(each, Recording) for each in loss._replays._known.values())


@rows
def test_a_recording_is_the_dense_engine(row):
    loss, dense, width = pair(row.make)
    for seed in range(6):
        x, y = batch(seed, 24, width, 4)
        for a, b in zip(step(loss, x, y), step(dense, x, y), strict=True):
            assert torch.equal(a, b)
    drawn = loss._core().product.draws or loss._core().product.reduction == "none"
    assert recorded(loss) == (0 if drawn else 1)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")  # of a parameter, warmed up aside
@rows
def test_every_loss_can_be_captured_by_hand(row):
    loss, _, width = pair(row.make)
    if loss._core().product.draws:
        pytest.skip("draws, as a graph must be told beforehand")
    x, y = batch(0, 24, width, 4)
    leaf = x.clone().requires_grad_()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            leaf.grad = None
            loss(leaf, y).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = loss(leaf, y).sum()
        value.backward()
    other, labels = batch(1, 24, width, 4)
    with torch.no_grad():
        leaf.copy_(other)
        y.copy_(labels)
    graph.replay()
    found, slope = value.clone(), leaf.grad.clone()
    torch.testing.assert_close([found, slope], [step(loss, other, labels)[0].sum(), step(loss, other, labels)[1]])


def test_recordings_end_with_their_loss_and_others_begin():
    for _ in range(3):
        loss, dense, _ = pair(L.SupCon)
        for seed in range(6):
            x, y = batch(seed, 24, 16, 4)
            assert torch.equal(step(loss, x, y)[1], step(dense, x, y)[1])
        assert recorded(loss) == 1
        del loss
        gc.collect()
    torch.cuda.empty_cache()
    assert torch.isfinite(torch.randn(3, device="cuda")).all()  # the generator is in no capture


def test_a_batch_with_nothing_to_learn_is_told_from_a_recording():
    loss = L.SupCon()
    good = batch(0, 24, 16, 4)
    for _ in range(5):
        loss(*good)
    assert recorded(loss) == 1
    loss(good[0], torch.arange(24, device="cuda"))
    torch.cuda.synchronize()
    with pytest.warns(nf.DegenerateBatchWarning, match="an earlier batch"):
        loss(*good)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(*good)


PRECISIONS = {"float32": (torch.float32, 1e-5), "bf16": (torch.bfloat16, 2e-2), "fp16": (torch.float16, 1e-2)}
KINKED = ("Contrastive", "Margin", "Triplet", "DroWorst", "DroTopK", "Hinge")
"""A rounding moves a pair across the corner of a hinge, or makes another pair the hardest."""


@pytest.mark.parametrize("precision", PRECISIONS)
@rows
def test_the_fused_kernels_equal_dense_in_float64(row, precision):
    kind, close = PRECISIONS[precision]
    if not has_triton(torch.device("cuda")):
        pytest.skip("Triton is not installed")
    loss, dense, width = pair(row.make)
    loss._core().engine, dense = "fused", dense.double()
    relation = nf.Relation.from_labels(torch.arange(8).cuda() // 2)
    if row.composed or unfused(loss.product, relation) is not None:
        pytest.skip("has no kernels")
    if precision != "float32" and row.id.startswith(KINKED):
        close = 0.2
    for n in (129, 300):
        x, y = batch(n, n, width, n // 4)
        x = x.to(kind)
        found, wanted = step(loss, x, y), step(dense, x.double(), y)
        for a, b in zip(found, wanted, strict=True):
            assert float((a.double() - b).norm() / b.norm().clamp_min(1e-12)) < close


def test_large_calls_of_the_fused_engine_are_recorded():
    if not has_triton(torch.device("cuda")):
        pytest.skip("Triton is not installed")
    for make in (L.SupCon, L.MultiSimilarity, L.Triplet):
        loss = make(engine="fused")
        plain = make(engine="fused")
        plain.register_buffer("mine", torch.zeros(1, device="cuda"))
        plain._replays.value = lambda *given: None
        for seed in range(6):
            x, y = batch(seed, 700, 32, 180 + 5 * (seed == 5))
            a, b = step(loss, x, y), step(plain, x, y)
            torch.testing.assert_close(a[0], b[0])
            torch.testing.assert_close(a[1], b[1], atol=1e-7, rtol=1e-4)


def test_parameters_that_an_earlier_step_still_holds():
    """Autograd keeps them on the stream of that step: a training loop that keeps its last value broke the recording."""
    loss, dense, width = pair(lambda: L.ProxyAnchor(classes=4, dim=16))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (loss, dense)]
    kept = []
    for seed in range(8):
        x, y = batch(seed, 24, width, 4)
        for one, optimizer in zip((loss, dense), optimizers, strict=True):
            value = one(x.clone().requires_grad_(), y)
            value.backward(retain_graph=True)
            kept.append(value)
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(loss.proxies, dense.proxies)
    assert recorded(loss) == 1


def test_after_a_recording_that_failed():
    """Memory, random numbers, and recordings of before and after go on, those of a user among them."""
    before, dense_before, width = pair(L.SupCon)
    for seed in range(4):
        step(before, *batch(seed, 24, width, 4))
    drawn, own = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(own):
        drawn.copy_(torch.rand(4, device="cuda"))
    torch.cuda.manual_seed(3)
    wanted = [torch.rand(5, device="cuda"), torch.rand(4, device="cuda"), torch.rand(5, device="cuda")]
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()

    def run(loss, given):
        noise = torch.rand(7, device="cuda")  # in the call of before, and in the recording
        return given[0].sum() * noise.sum() + given[0].sum().item()

    x = torch.randn(8, 4, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    held = []
    for _ in range(3):
        with pytest.raises(RuntimeError):
            Recording(run, before, (x, None))
        assert torch.equal(torch.cuda.get_rng_state(), state)
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    assert held[2] == held[1]
    found = [torch.rand(5, device="cuda")]
    own.replay()
    found += [drawn.clone(), torch.rand(5, device="cuda")]
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
    loss, dense, width = pair(L.MultiSimilarity)
    for seed in range(6):
        x, y = batch(seed, 24, width, 4)
        for one, other in ((before, dense_before), (loss, dense)):
            for a, b in zip(step(one, x, y), step(other, x, y), strict=True):
                assert torch.equal(a, b)
    assert recorded(before) == recorded(loss) == 1
