"""Recordings of small batches: what is replayed, what is not, and that the numbers are those of a plain call.

tests/support/tape.py replaces the GPU's recorder here. tests/gpu/test_recordings.py runs the same checks on a GPU.
"""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from table import ROWS
from tape import tape_calls

import nearfar as nf
from nearfar._utils.checks import RECENT
from nearfar._utils.tensors import uses_tf32
from nearfar.engines import recordings as replays
from nearfar.losses.annealing import advance

L = nf.losses


@pytest.fixture
def recorded(monkeypatch):
    """Record on the CPU; returns the list of replays."""
    if not RECENT:
        pytest.skip("calls are recorded from PyTorch 2.11 on")
    return tape_calls(monkeypatch)


def batch(seed, n=12, d=6, dtype=torch.float32):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=rng, dtype=dtype), torch.randint(0, 4, (n,), generator=rng)


def step(loss, x, y, factor=1.0, **more):
    leaf = x.clone().requires_grad_()
    loss.zero_grad()
    value = loss(leaf, y, **more)
    (factor * value).backward()
    return [value.detach(), leaf.grad, *(p.grad.clone() for p in loss.parameters() if p.grad is not None)]


def same(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
        assert a.dtype == b.dtype


def pair(make):
    """The same loss twice: by default, and dense."""
    torch.manual_seed(0)
    loss = make()
    dense = copy.deepcopy(loss)
    loss._core().engine, dense._core().engine = "auto", "dense"
    return loss, dense


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_every_loss_is_replayed_with_the_numbers_of_dense(row, recorded):
    loss, dense = pair(row.make)
    width = getattr(loss, "dim", 6)
    for seed in range(6):
        x, y = batch(seed, d=width)
        same(step(loss, x, y, 3.0), step(dense, x, y, 3.0))
    drawn = loss._core().product.draws or loss._core().product.reduction == "none"
    assert len(recorded) == (0 if drawn else 6 - replays.WAIT)


def test_a_reference_and_ids_are_copied_in(recorded):
    loss, dense = pair(L.SupCon)
    for seed in range(6):
        (x, y), (z, t) = batch(seed), batch(seed + 90, 20)
        more = {"ref_emb": z, "ref_labels": t, "ids": torch.arange(12) + seed, "ref_ids": torch.arange(20)}
        same(step(loss, x, y, **more), step(dense, x, y, **more))
    assert recorded


def test_a_setting_that_changes_is_another_recording(recorded):
    loss, dense = pair(lambda: L.MultiSimilarity(beta=30.0))
    x, y = batch(0)
    for beta in (50.0, 2.0, 50.0):
        for one in (loss, dense):
            one.beta = beta
        for _ in range(5):
            same(step(loss, x, y), step(dense, x, y))
    assert len(recorded) == 2 + 2 + 5


def test_a_learned_setting_is_read_anew(recorded):
    number = lambda: torch.nn.Parameter(torch.tensor(0.4))  # noqa: E731
    for make in (lambda: L.NTXent(temperature=number()), lambda: L.DroKL(gamma=number(), zero="keep")):
        recorded.clear()
        loss, dense = pair(make)
        for seed in range(7):
            x, y = batch(seed)
            same(step(loss, x, y), step(dense, x, y))
            with torch.no_grad():
                for one in (loss, dense):
                    next(one.parameters()).add_(0.05)
        assert recorded


def test_a_setting_of_another_graph_is_not_recorded(recorded):
    loss, log = L.NTXent(), torch.nn.Parameter(torch.tensor(-1.0))
    for seed in range(6):
        loss.temperature = log.exp()
        loss(*batch(seed)).backward()
    assert not recorded
    assert log.grad is not None


def test_annealed_sets_are_seen(recorded):
    loss, dense = pair(lambda: L.Triplet(mining="hard", anneal=4))
    for seed in range(10):
        x, y = batch(seed)
        same(step(loss, x, y), step(dense, x, y))
        for one in (loss, dense) if seed < 5 else ():
            advance(one)
    assert recorded  # once the steps are counted no longer


def test_parameters_are_read_anew_and_replaced_ones_are_noticed(recorded):
    loss, dense = pair(lambda: L.ProxyAnchor(classes=4, dim=6))
    for seed in range(9):
        x, y = batch(seed)
        same(step(loss, x, y), step(dense, x, y))
        with torch.no_grad():
            for one in (loss, dense):
                one.proxies += 0.1 * one.proxies.grad
                if seed == 4:
                    one.proxies = torch.nn.Parameter(one.proxies * 2)
    assert recorded


class Mine(L.SupCon):
    def _value(self, call):
        return super()._value(call) * 2


def test_what_cannot_be_repeated_is_not_recorded(recorded):
    hooked = L.SupCon()
    hooked.pair_negative.register_forward_hook(lambda *given: None)
    own = nf.RobustLoss(pair=type("Own", (nf.pairs.Hinge,), {})(), over=nf.sets.Mean())
    index = (torch.tensor([0, 1]), torch.tensor([1, 2]), torch.tensor([5, 7]))
    x, y = batch(0)
    for loss, more in (
        (Mine(), {}),
        (hooked, {}),
        (own, {}),
        (L.SupCon(engine="dense"), {}),
        (L.SupCon(engine="tiled"), {}),
        (L.SupCon(reduction="none"), {}),
        (L.Triplet(), {"indices": index}),
        (L.Contrastive(miner=nf.miners.DistanceWeighted()), {}),
    ):
        for _ in range(6):
            loss(x, y, **more).sum()
        assert not recorded, loss
    loss = L.SupCon()
    for _ in range(6):
        loss(x, nf.Relation.from_labels(y))
    assert not recorded


def test_a_parameter_of_another_kind_is_not_recorded(recorded):
    class Sharded(torch.nn.Parameter):
        pass

    loss = L.ProxyAnchor(classes=4, dim=6)
    loss.proxies = Sharded(loss.proxies.detach())
    for _ in range(6):
        loss(*batch(0))
    assert not recorded


def test_a_loss_on_another_device_is_refused_each_time(recorded):
    loss = L.Margin()
    loss.to("meta")
    for _ in range(6):
        with pytest.raises(ValueError, match="offset is on meta but the embeddings are on cpu"):
            loss(*batch(0))


def test_the_recording_that_was_used_least_lately_goes_first(recorded):
    loss = L.SupCon()
    for n in range(8, 8 + replays.MOST):
        for _ in range(4):
            loss(*batch(0, n))
    recorded.clear()
    loss(*batch(0, 8))
    loss(*batch(0, 40))
    for n in (8, 9):
        loss(*batch(0, n))
    assert len(recorded) == 2


def test_large_batches_are_not_recorded(recorded, monkeypatch):
    monkeypatch.setattr(replays, "PAIRS", 100)
    loss = L.SupCon()
    for _ in range(6):
        loss(*batch(0))
    assert not recorded


def test_no_gradient_is_asked_for(recorded):
    loss, dense = pair(L.SupCon)
    for seed in range(6):
        with torch.no_grad():
            torch.testing.assert_close(loss(*batch(seed)), dense(*batch(seed)))
    value = loss(*batch(0))
    assert recorded
    assert not value.requires_grad


def test_inference_mode_is_another_recording(recorded):
    loss, dense = pair(L.SupCon)
    for seed in range(5):
        with torch.inference_mode():
            loss(*batch(seed))
    for seed in range(5):
        with torch.no_grad():
            torch.testing.assert_close(loss(*batch(seed)), dense(*batch(seed)))
    assert len(recorded) == 4


def test_a_recording_keeps_nothing_of_the_network(recorded):
    net, loss = torch.nn.Linear(6, 6), L.SupCon()
    seen = []
    for seed in range(5):
        x, y = batch(seed)
        e = net(x)
        seen.append(weakref.ref(e))
        loss(e, y).backward()
        del e
    gc.collect()
    assert recorded
    assert [each() for each in seen] == [None] * 5


def test_global_hooks_are_heard(recorded):
    loss, heard = L.SupCon(), []
    with torch.nn.modules.module.register_module_forward_hook(lambda *given: heard.append(1)):
        for _ in range(6):
            loss(*batch(0))
    assert heard
    assert not recorded


def test_second_derivatives_are_computed_again(recorded):
    loss, dense = pair(L.MultiSimilarity)
    found = []
    for one in (loss, dense):
        for seed in range(5):
            x = batch(seed)[0].requires_grad_()
            (slope,) = torch.autograd.grad(one(x, batch(seed)[1]), x, create_graph=True)
            (curve,) = torch.autograd.grad(slope.square().sum(), x)
        found.append((slope.detach(), curve))
    assert recorded
    same(*found)


def test_two_values_do_not_share_memory(recorded):
    loss, dense = pair(L.SupCon)
    for _ in range(4):
        step(loss, *batch(0))
    leaves = [batch(seed)[0].requires_grad_() for seed in (1, 2)]
    values = [loss(leaf, batch(seed)[1]) for seed, leaf in zip((1, 2), leaves, strict=True)]
    sum(values).backward()
    for seed, leaf, value in zip((1, 2), leaves, values, strict=True):
        same([value.detach(), leaf.grad], step(dense, *batch(seed)))


def test_gradients_of_half_precision_are_scaled_before_they_are_rounded(recorded):
    loss, dense = pair(L.SupCon)
    for seed in range(6):
        x, y = batch(seed)
        same(step(loss, 1e3 * x.half(), y, 2.0**14), step(dense, 1e3 * x.half(), y, 2.0**14))
        assert step(loss, 1e3 * x.half(), y, 2.0**14)[1].abs().max() > 0
    assert recorded


def test_recordings_are_few_and_stay_where_they_are(recorded):
    loss = L.SupCon()
    for n in range(8, 8 + 2 * replays.MOST):
        for _ in range(5):
            loss(*batch(0, n))
    assert len(loss._replays._known) == replays.MOST
    for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert not other._replays._known
        torch.testing.assert_close(other(*batch(1)), loss(*batch(1)))


def test_a_warning_still_comes(recorded, monkeypatch):
    loss = L.SupCon()
    told = iter([0, 1, 0])
    monkeypatch.setattr(loss._deferred, "take", lambda: next(told))
    for _ in range(4):
        loss(*batch(0))
    assert len(recorded) == 1
    with pytest.warns(nf.DegenerateBatchWarning, match="an earlier batch had no pair"):
        loss(*batch(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(*batch(0))


def test_another_thread_computes_by_itself(recorded):
    loss, dense = pair(L.SupCon)
    for _ in range(5):
        loss(*batch(0))
    before = len(recorded)
    with loss._replays._lock:
        torch.testing.assert_close(loss(*batch(1)), dense(*batch(1)))
    assert len(recorded) == before


def test_a_twin_shares_the_memory_of_parameters_alone():
    loss = L.Margin()
    twin = replays._twin(loss)
    (mine,), (its,) = loss.parameters(), twin.parameters()
    assert mine is not its
    assert mine.data_ptr() == its.data_ptr()
    assert twin.pair_positive is twin.pair_negative is not loss.pair_positive
    assert twin.beta == loss.beta


@pytest.mark.parametrize("fails", [True, False])
def test_a_recording_leaves_random_numbers_alone(recorded, monkeypatch, fails):
    """The body may draw where it is recorded; only a replay counts."""
    computes = replays.record

    def draw(body, like):
        torch.rand(3)
        found = computes(body, like)
        torch.rand(5)
        if fails:
            raise RuntimeError("capture invalidated")
        return found

    monkeypatch.setattr(replays, "record", draw)
    loss = L.SupCon()
    for _ in range(replays.WAIT):
        loss(*batch(0))
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss(*batch(0))
    assert len(recorded) == (0 if fails else 1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("new", [True, False])
def test_tf32_is_read_by_either_setting(recorded, monkeypatch, new):
    """Once torch's new setting was used, reading the old one is an error."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    loss, dense = pair(L.SupCon)
    try:
        for fast in (False, True, False):
            if new:
                matmul.fp32_precision = "tf32" if fast else "ieee"
            else:
                matmul.allow_tf32 = fast
            assert uses_tf32() is fast
            for _ in range(4):
                same(step(loss, *batch(0)), step(dense, *batch(0)))
    finally:
        matmul.fp32_precision = before
    assert len(recorded) == 1 + 1 + 4


def test_a_recording_that_fails_is_left(recorded, monkeypatch):
    """The call is computed, a warning says why, and it is not tried again."""

    def fail(body, like):
        raise RuntimeError("capture invalidated\nand more")

    monkeypatch.setattr(replays, "record", fail)
    loss, dense = pair(lambda: L.ProxyAnchor(classes=4, dim=6))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for seed in range(8):
            x, y = batch(seed)
            same(step(loss, x, y), step(dense, x, y))
    (said,) = (str(one.message) for one in heard)
    assert said.startswith("ProxyAnchor: this call could not be recorded on the GPU (capture invalidated); ")
