"""Automatic recordings under hostile use: each sequence of calls gives what engine="dense" gives, unrecorded.

Every test runs on a CPU, on a GPU, and with tests/support/tape.py in place of a CUDA graph.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from tape import tape_calls
from torch.autograd.graph import save_on_cpu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import nearfar as nf
from nearfar._utils import tensors
from nearfar._utils.checks import RECENT
from nearfar.engines import recordings as replays

L, P, S = nf.losses, nf.pairs, nf.sets
N, D = 12, 6
CALLS = replays.WAIT + 2
"""Equal calls of which the last two are replays."""


@pytest.fixture(params=["cpu", "tape", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    if not RECENT:
        pytest.skip("calls are recorded from PyTorch 2.11 on")
    if request.param == "cpu":
        return torch.device("cpu")
    if request.param == "tape":
        tape_calls(monkeypatch)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here; run on a GPU machine")
    return torch.device("cuda")


class Both:
    """A loss and its dense copy, which get the same calls."""

    def __init__(self, make, device, dtype=torch.float32):
        torch.manual_seed(0)
        self.loss = make().to(device, dtype)
        self.dense = copy.deepcopy(self.loss)
        self.dense._core().engine = "dense"
        self.device = device

    def __call__(self, use, times=1, first=0):
        """Compare what `use(loss, seed)` gives for both."""
        for seed in range(first, first + times):
            found, wanted = use(self.loss, seed), use(self.dense, seed)
            for a, b in zip(found, wanted, strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    assert a.dtype == b.dtype
                    assert a.requires_grad == b.requires_grad
                    torch.testing.assert_close(a.detach(), b.detach())

    def batch(self, seed, n=N, dtype=torch.float32):
        rng = torch.Generator().manual_seed(seed)
        x, y = torch.randn(n, D, generator=rng), torch.randint(0, 4, (n,), generator=rng)
        return x.to(self.device, dtype), y.to(self.device)

    def step(self, loss, seed, backward=True, **more):
        """Value and gradients of one call."""
        x, y = self.batch(seed, **{key: more.pop(key) for key in ("n", "dtype") if key in more})
        leaf = x.requires_grad_()
        loss.zero_grad()
        value = loss(leaf, y, **more)
        value.backward()
        return [value, leaf.grad, *(p.grad for p in loss.parameters())]

    @property
    def recordings(self):
        return [x for x in self.loss._replays._known.values() if isinstance(x, replays.Recording)]


def proxies():
    return L.ProxyAnchor(classes=4, dim=D)


SETTINGS = {
    "a number of a set": lambda one: object.__setattr__(one.over_negative, "gamma", 0.7),
    "a number of a pair loss": lambda one: setattr(one.pair_negative, "margin", 0.3),
    "a set": lambda one: setattr(one, "over", S.Mean()),
    "a pair loss": lambda one: setattr(one, "pair", P.Logistic()),
    "the similarity": lambda one: setattr(one, "similarity", nf.similarity.Dot()),
    "the link": lambda one: setattr(one, "link", nf.links.HingeLink(0.4)),
    "the miner": lambda one: setattr(one, "miner", nf.miners.Hard()),
    "the reduction": lambda one: setattr(one, "reduction", "sum"),
    "the members": lambda one: setattr(one, "members", "all"),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_or_a_part_changes(device, name):
    both = Both(lambda: nf.RobustLoss(pair=P.Linear(), over=S.KL(0.2), groups="anchor_sign"), device)
    both(both.step, CALLS)
    before = both.step(both.dense, 0)
    for one in (both.loss, both.dense):
        SETTINGS[name](one)
    assert not torch.equal(both.step(both.dense, 0)[0], before[0])  # it matters
    both(both.step, CALLS)
    assert len(both.recordings) == 2


def test_the_engine_changes(device):
    both = Both(L.MultiSimilarity, device)
    for engine in ("auto", "dense", "tiled", "auto"):
        both.loss.engine = engine
        both(both.step, CALLS)
    assert len(both.recordings) == 1


def test_what_has_a_gradient_changes(device):
    both = Both(proxies, device)

    def use(loss, seed):
        x, y = both.batch(seed)
        loss.zero_grad()
        loss.proxies.requires_grad_(seed // CALLS % 2 == 0)
        leaf = x.requires_grad_(seed // CALLS < 2)
        value = loss(leaf, y)
        if value.requires_grad:
            value.backward()
        return [value, leaf.grad, loss.proxies.grad]

    both(use, 5 * CALLS)
    assert len(both.recordings) == 4


def test_a_reference_with_and_without_a_gradient(device):
    both = Both(L.SupCon, device)

    def use(loss, seed):
        (x, y), (z, t) = both.batch(seed), both.batch(seed + 90, 9)
        leaf, other = x.requires_grad_(seed % 3 > 0), z.requires_grad_(seed % 3 < 2)
        loss(leaf, y, ref_emb=other, ref_labels=t).backward()
        return [leaf.grad, other.grad]

    both(use, 3 * CALLS)
    assert len(both.recordings) == 3


def test_rows_are_their_own_reference(device):
    both = Both(L.SupCon, device)

    def use(loss, seed):
        x, y = both.batch(seed)
        leaf = x.requires_grad_()
        value = loss(leaf, y, ref_emb=leaf, ref_labels=y)
        value.backward()
        return [value, leaf.grad]

    both(use, CALLS)
    assert both.recordings


@pytest.mark.parametrize("make", [L.SupCon, proxies, L.Margin])
def test_the_type_of_rows_changes(device, make):
    both = Both(make, device)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float16):
        both(lambda loss, seed, dtype=dtype: both.step(loss, seed, dtype=dtype), CALLS)
    assert len(both.recordings) == 4


def test_the_type_of_a_loss_changes(device):
    both = Both(proxies, device)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
        for one in (both.loss, both.dense):
            one.to(dtype)
        both(both.step, CALLS)


@pytest.mark.parametrize("make", [L.SupCon, proxies])
def test_autocast_around_calls(device, make):
    both = Both(make, device)

    def use(loss, seed):
        x, y = both.batch(seed)
        leaf = x.requires_grad_()
        with torch.autocast(device.type, torch.bfloat16, enabled=seed % 2 == 0):
            value = loss(leaf, y)
        (slope,) = torch.autograd.grad(value, leaf, create_graph=seed % 3 == 0)
        return [value, slope.detach()]

    both(use, 3 * CALLS)
    assert len(both.recordings) == 1


@pytest.mark.parametrize("twice", [False, True])
def test_autocast_around_derivatives_of_a_recording(device, twice):
    """As exact as without: plain autograd rounds there."""
    both = Both(proxies, device)
    both(both.step, CALLS)
    x, y = both.batch(0)
    leaf = x.requires_grad_()
    with torch.autocast(device.type, torch.bfloat16):
        (found,) = torch.autograd.grad(both.loss(leaf, y), leaf, create_graph=twice)
    (wanted,) = torch.autograd.grad(both.dense(leaf, y), leaf)
    torch.testing.assert_close(found.detach(), wanted)


def test_gradients_accumulate(device):
    both = Both(proxies, device)

    def use(loss, seed):
        loss.zero_grad()
        leaf = both.batch(seed)[0].requires_grad_()
        for part in range(3):
            (loss(leaf, both.batch(seed + part)[1]) / 3).backward()
        return [leaf.grad, loss.proxies.grad]

    both(use, CALLS)
    assert both.recordings


def test_a_graph_is_kept_and_freed(device):
    both = Both(proxies, device)

    def use(loss, seed):
        x, y = both.batch(seed)
        loss.zero_grad()
        leaf = x.requires_grad_()
        value = loss(leaf, y)
        value.backward(retain_graph=True)
        value.backward(torch.tensor(-2.5, device=device))
        with pytest.raises(RuntimeError, match="second time"):
            value.backward()
        return [leaf.grad, loss.proxies.grad]

    both(use, CALLS)
    assert both.recordings


def test_several_values_of_the_same_rows(device):
    both, other = (Both(make, device, torch.float64) for make in (proxies, L.SupCon))

    def use(loss, seed):
        x, y = both.batch(seed, dtype=torch.float64)
        loss.zero_grad()
        net = torch.nn.Parameter(torch.eye(D, device=device, dtype=torch.float64))
        second = other.loss if loss is both.loss else other.dense
        rows = x @ net
        values = [loss(rows, y), second(rows, y), loss(rows, y.flip(0)), loss(rows.detach(), y)]
        (values[0] - 2 * values[1] + values[2] * values[3]).backward()
        return [*values, net.grad, loss.proxies.grad]

    both(use, CALLS)
    assert len(both.recordings) == 2
    assert other.recordings


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
def test_calls_without_a_gradient_in_between(device, quiet):
    both = Both(proxies, device)

    def use(loss, seed):
        x, y = both.batch(seed)
        loss.zero_grad()
        leaf = x.requires_grad_()
        with quiet():
            scores = [loss(leaf, y).clone() for _ in range(replays.WAIT)]
        value = loss(leaf, y)
        with quiet():
            scores += [loss(*both.batch(seed + each)).clone() for each in (1, 2)]
        value.backward()
        return [value, leaf.grad, loss.proxies.grad, *scores]

    both(use, CALLS)
    assert len(both.recordings) == 3


def test_labels_that_were_made_in_inference_mode(device):
    both = Both(L.SupCon, device)

    def use(loss, seed):
        x, y = both.batch(seed)
        with torch.inference_mode():
            labels = y.clone()
        leaf = x.requires_grad_()
        loss(leaf, labels).backward()
        return [leaf.grad]

    both(use, CALLS)
    assert both.recordings


@pytest.mark.parametrize("twice", [False, True])
def test_labels_are_overwritten_before_the_gradient_is_taken(device, twice):
    """Dense keeps what it made of them; only a second derivative of a recording reads them once more."""
    both = Both(L.SupCon, device)
    labels = both.batch(0)[1]

    def use(loss, seed):
        x, y = both.batch(seed)
        leaf = x.requires_grad_()
        labels.copy_(y)
        value = loss(leaf, labels)
        labels.zero_()
        if twice and loss is both.loss and both.recordings:
            with pytest.raises(RuntimeError, match="they were changed in place"):
                torch.autograd.grad(value, leaf, create_graph=True)
        return torch.autograd.grad(value, leaf)

    both(use, CALLS)
    assert both.recordings


def test_rows_of_other_strides(device):
    both = Both(L.SupCon, device)

    def use(loss, seed):
        x, y = both.batch(seed)
        leaf = x.clone().requires_grad_()
        shaped = (leaf, leaf.t().contiguous().t(), leaf[:1].expand(N, D) + 0 * leaf, leaf.repeat(1, 2)[:, ::2])[
            seed % 4
        ]
        loss(shaped, y).backward()
        return [leaf.grad]

    both(use, 4 * CALLS)
    assert both.recordings


def test_rows_that_are_a_parameter_and_move(device):
    both = Both(L.MultiSimilarity, device)

    def use(loss, seed):
        x, y = both.batch(0)
        rows = torch.nn.Parameter(x)
        moves = torch.optim.SGD([rows], lr=0.5)
        for _ in range(CALLS + 3):
            moves.zero_grad()
            loss(rows, y).backward()
            moves.step()
        return [rows.detach()]

    both(use, 2)
    assert both.recordings


def test_parameters_are_loaded_and_replaced(device):
    both = Both(proxies, device)

    def use(loss, seed):
        if seed % CALLS == 0:
            torch.manual_seed(seed)
            new = {"proxies": torch.randn_like(loss.proxies)}
            loss.load_state_dict(new, assign=seed % (2 * CALLS) == 0)
        return both.step(loss, seed)

    both(use, 4 * CALLS)
    assert both.recordings


class Shifted(P.Hinge):
    """A pair loss of this library, with a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("by", torch.zeros(()))

    def forward(self, s, sign):
        return super().forward(s, sign) + self.by * s


def test_buffers_change_and_are_replaced(device, monkeypatch):
    monkeypatch.setattr(Shifted, "__module__", "nearfar.pairs")
    both = Both(lambda: nf.RobustLoss(pair=Shifted(), over=S.Mean()), device)

    def use(loss, seed):
        if seed % CALLS == 0:
            loss.pair_positive.by = torch.full((), float(seed), device=device)
        loss.pair_positive.by += 1
        return both.step(loss, seed)

    both(use, 3 * CALLS)
    assert both.recordings


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda loss: pickle.loads(pickle.dumps(loss))])
def test_copies_go_their_own_way(device, copied):
    both = Both(proxies, device)
    both(both.step, CALLS)
    again = Both(proxies, device)
    again.loss, again.dense = copied(both.loss), copied(both.dense)
    for each in (again.loss, again.dense):
        with torch.no_grad():
            each.proxies = torch.nn.Parameter(each.proxies * 3)
        each.scale = 8.0
    for seed in range(2 * CALLS):
        again(again.step, 1, seed)
        both(both.step, 1, seed)
    assert again.recordings
    assert both.recordings


def test_a_recorded_loss_in_ddp(device):
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    shared = {}
    try:
        both = Both(proxies, device)
        shared |= {id(one): DistributedDataParallel(one) for one in (both.loss, both.dense)}
        moves = {id(one): torch.optim.SGD(one.parameters(), lr=0.1) for one in (both.loss, both.dense)}

        def use(loss, seed):
            x, y = both.batch(seed)
            leaf = x.requires_grad_()
            moves[id(loss)].zero_grad()
            shared[id(loss)](leaf, y).backward()
            moves[id(loss)].step()
            return [leaf.grad, loss.proxies.detach()]

        both(use, 2 * CALLS)
        assert both.recordings
    finally:
        shared.clear()  # the last reference to a group, if a reducer has it, joins threads that may wait for the GIL
        gc.collect()
        dist.destroy_process_group()


def test_memory_is_bounded_for_any_number_of_shapes(device):
    both, seen = Both(L.SupCon, device), []
    for n in range(8, 8 + 3 * replays.MOST):
        both(lambda loss, seed, n=n: both.step(loss, seed, n=n), CALLS)
        seen.append(weakref.ref(both.recordings[-1]))
    for n in range(8, 8 + 3 * replays.MOST):  # each once: none is worth a recording
        both(lambda loss, seed, n=n: both.step(loss, seed, n=n))
    gc.collect()
    assert len(both.loss._replays._known) <= replays.MOST
    assert sum(each() is not None for each in seen) <= replays.MOST
    if device.type == "cuda":
        torch.cuda.empty_cache()
        held = torch.cuda.memory_reserved()
    both.loss = both.dense = None
    gc.collect()
    assert [each() for each in seen] == [None] * len(seen)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= held


def test_calls_that_fail_in_between(device):
    both = Both(L.SupCon, device)

    def use(loss, seed):
        x, y = both.batch(seed)
        for wrong in (y[:-1], y.float()):
            with pytest.raises((ValueError, TypeError), match="labels"):
                loss(x, wrong)
        return both.step(loss, seed)

    both(use, 2 * CALLS)
    assert both.recordings


def test_a_nan_does_not_stay(device):
    both = Both(proxies, device)
    both(both.step, CALLS)
    x, y = both.batch(0)
    x[0] = torch.nan
    if tensors.readable(x):  # the tape replaces it
        with pytest.raises(ValueError, match="1 of 12 rows hold NaN"):
            both.loss(x, y)
    else:
        assert torch.isnan(both.loss(x, y))
    both(both.step, CALLS)


@pytest.mark.parametrize("looks", [save_on_cpu, torch.autograd.detect_anomaly], ids=["saved tensors", "anomaly"])
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_calls_at_which_somebody_looks(device, looks):
    both = Both(proxies, device)

    def use(loss, seed):
        with looks() if seed % 3 == 0 else nullcontext():
            return both.step(loss, seed)

    both(use, 3 * CALLS)
    assert both.recordings


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_loss(device, reentrant):
    """The loss is called again in the backward pass, by which time a recording may have begun."""
    both = Both(L.SupCon, device)

    def use(loss, seed):
        x, y = both.batch(seed)
        leaf = x.requires_grad_()
        checkpoint(lambda rows: loss(rows * 2, y), leaf, use_reentrant=reentrant).backward()
        return [leaf.grad]

    both(use, 2 * CALLS)


def test_hooks_of_tensors_are_heard(device):
    both = Both(L.SupCon, device)

    def use(loss, seed):
        x, y = both.batch(seed)
        leaf = x.requires_grad_()
        rows, heard = leaf * 2, []
        rows.register_hook(lambda slope: heard.append(slope) or 3 * slope)
        value = loss(rows, y)
        value.register_hook(lambda slope: slope * 5)
        value.backward()
        return [leaf.grad, *heard]

    both(use, CALLS)
    assert both.recordings


def test_threads_share_a_loss(device):
    both, found = Both(proxies, device), {}
    both(both.step, CALLS)
    wanted = [float(both.dense(*both.batch(seed)).detach()) for seed in range(20)]

    def work(name):
        with torch.no_grad():
            found[name] = [float(both.loss(*both.batch(seed))) for seed in range(20)]

    threads = [threading.Thread(target=work, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1, 2]
    for values in found.values():
        assert values == pytest.approx(wanted, rel=1e-5)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")  # proxies learn on three streams
def test_streams_change_between_calls(device):
    if device.type != "cuda":
        pytest.skip("streams are of a GPU; run on a GPU machine")
    both = Both(proxies, device)
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]

    def use(loss, seed):
        stream = streams[seed % 3]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = both.step(loss, seed)
        torch.cuda.current_stream().wait_stream(stream)
        return found

    both(use, 4 * CALLS)
    assert len(both.recordings) == 3


@pytest.mark.filterwarnings("ignore:.*(D|d)eterministic:UserWarning")  # torch's own, of some kernels on a GPU
def test_kernels_change_between_calls(device):
    both = Both(L.SupCon, device)

    def use(loss, seed):
        torch.use_deterministic_algorithms(seed % 2 == 0, warn_only=True)
        torch.set_default_dtype(torch.float64 if seed % 3 == 0 else torch.float32)
        return both.step(loss, seed)

    try:
        both(use, 6 * CALLS)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
    assert both.recordings
