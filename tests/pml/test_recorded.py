"""Calls of `nearfar.pml` that are recorded give PML's values, gradients and tuples.

Every test runs on a CPU, on a GPU, and with tests/support/tape.py in place of a CUDA graph.
"""

import copy

import pytest
import pytorch_metric_learning as theirs
import torch
from pytorch_metric_learning import losses as their_losses
from pytorch_metric_learning import miners as their_miners
from tape import tape_calls

from nearfar._utils.checks import RECENT
from nearfar.engines import recordings
from nearfar.pml import losses, miners

CALLS = recordings.WAIT + 2
"""Equal calls of which the last two are replays."""
LISTED = ["MultiSimilarityLoss", "ContrastiveLoss", "TripletMarginLoss", "CircleLoss", "NTXentLoss",
          "GeneralizedLiftedStructureLoss", "TupletMarginLoss"]  # fmt: skip
"""Losses that take index tuples."""


@pytest.fixture(params=["cpu", "tape", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    if not RECENT:
        pytest.skip("calls are recorded from PyTorch 2.11 on")
    monkeypatch.setattr(miners.TripletMarginMiner, "least", 0)
    for name in losses.__all__:
        if hasattr(getattr(losses, name), "least"):
            monkeypatch.setattr(getattr(losses, name), "least", (0, 0))
    if request.param == "cpu":
        return torch.device("cpu")
    if request.param == "tape":
        tape_calls(monkeypatch)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here; run on a GPU machine")
    return torch.device("cuda")


class Both:
    """A loss and a miner of ours and of PML, which get the same calls."""

    def __init__(self, device, loss, miner=None, **settings):
        self.device = device
        self.losses = [getattr(x, loss)(**settings).double().to(device) for x in (losses, their_losses)]
        self.miners = [miner and getattr(x, miner)() for x in (miners, their_miners)]

    def __call__(self, times=CALLS, **more):
        """Compare values, gradients and tuples."""
        for seed in range(times):
            found, wanted = (self.step(which, seed, **more) for which in (0, 1))
            for a, b in zip(found, wanted, strict=True):
                assert torch.equal(a.isnan(), b.isnan())
                assert (a - b).nan_to_num().norm() <= 1e-10 * b.nan_to_num().norm()

    def step(self, which, seed, reference=False, change=None, edit=None):
        """Value, gradients and the sorted pairs of a tuple; `change` the rows, `edit` the tuple."""
        rng = torch.Generator().manual_seed(seed)
        x, z = (torch.randn(n, 6, generator=rng, dtype=torch.float64).to(self.device) for n in (16, 12))
        y, w = (torch.arange(n, device=self.device) // 3 for n in (16, 12))
        x = x if change is None else change(x)
        leaf, loss, miner = x.requires_grad_(), self.losses[which], self.miners[which]
        loss.zero_grad()
        more = (z, w) if reference else ()
        indices = miner and miner(leaf, y, *more)
        if edit is not None:
            edit(indices)
        value = loss(leaf, y, indices, *more)
        value.backward()
        listed = [] if indices is None else [_sorted(indices[:2]), _sorted(indices[-2:])]
        return [value.detach(), leaf.grad, *(p.grad for p in loss.parameters()), *listed]

    @property
    def recordings(self):
        """The numbers of recordings of the loss and of the miner."""
        owners = self.losses[0]._keep(), self.miners[0]
        kept = [x.__dict__["_replays"]._known.values() if x is not None else () for x in owners]
        return [sum(isinstance(x, recordings.Recording) for x in some) for some in kept]


def _sorted(pair):
    return torch.stack(tuple(pair))[:, torch.argsort(pair[0] * 1000 + pair[1])].double()


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("miner", miners.__all__)
@pytest.mark.parametrize("loss", LISTED)
def test_losses_with_miners(device, loss, miner, reference):
    both = Both(device, loss, miner)
    varies = miner == "TripletMarginMiner" and loss == "TripletMarginLoss"  # in the number of triplets
    both(3 * CALLS if varies else CALLS, reference=reference)
    lists = device.type in recordings.TRACED and miner == "TripletMarginMiner"  # has no answer of a fixed shape
    assert both.recordings[0] >= 1 - lists
    assert both.recordings[1] == 1


def _scaled(scale):
    return lambda x: x * torch.where(torch.arange(16, device=x.device) % 5 == 2, scale, 1.0)[:, None]


UNUSUAL = {
    "zero rows": _scaled(0.0),
    "tiny rows": _scaled(1e-14),
    "a row of NaN": _scaled(torch.nan),
    "equal rows": lambda x: x[torch.arange(16, device=x.device) // 2],
    "near rows": lambda x: x[torch.arange(16, device=x.device) // 2] + 1e-6 * x,
}


@pytest.mark.parametrize("rows", UNUSUAL)
@pytest.mark.parametrize("miner", [None, "MultiSimilarityMiner", "BatchHardMiner"])
@pytest.mark.parametrize("loss", ["MultiSimilarityLoss", "ContrastiveLoss", "TripletMarginLoss"])
def test_unusual_rows_after_a_recording(device, loss, miner, rows):
    if device.type not in recordings.TRACED:
        pytest.skip("a GPU does not read the rows")
    both = Both(device, loss, miner)
    both()
    both(1, change=UNUSUAL[rows])
    both(1)


@pytest.mark.parametrize("miner", ["MultiSimilarityMiner", "BatchHardMiner"])
@pytest.mark.parametrize("loss", ["MultiSimilarityLoss", "TripletMarginLoss"])
def test_a_tuple_that_was_changed_after_mining(device, loss, miner):
    both = Both(device, loss, miner)
    both()

    def edit(indices):
        indices[1].masked_fill_(indices[1] == 14, 12)

    both(2, edit=edit)


def test_a_setting_changes(device):
    both = Both(device, "ContrastiveLoss", "PairMarginMiner")
    both()
    for one in both.losses:
        one.neg_margin = 0.4
    for one in both.miners:
        one.neg_margin = 1.2
    both()
    for one in (*both.losses, *both.miners):
        one.distance = theirs.distances.CosineSimilarity()
        one.neg_margin, one.pos_margin = -0.2, 0.6
    both()


def test_a_learned_boundary(device):
    both = Both(device, "MarginLoss", learn_beta=True, beta=0.9)
    both()
    assert both.recordings[0] == 1
    for one in both.losses:
        with torch.no_grad():
            one.beta -= 0.3
    both(2)
    for one in both.losses:
        one.beta = torch.nn.Parameter(torch.tensor([1.1], dtype=torch.float64, device=device))
    both()


def test_a_fixed_boundary(device):
    both = Both(device, "MarginLoss", beta=0.9)
    both()
    assert both.recordings[0] == 1
    for one in both.losses:
        one.beta += 0.1
    both()
    for one in both.losses:
        one.beta = torch.tensor([1.1])
    both(2)
    for one in both.losses:
        one.beta = torch.tensor([1.2], device=device)
    both()


def test_second_derivatives(device):
    found = []
    for which in (0, 1):
        both = Both(device, "MultiSimilarityLoss", "MultiSimilarityMiner")
        for _ in range(CALLS):
            x = torch.linspace(-1, 1, 96, dtype=torch.float64, device=device).reshape(16, 6).sin().requires_grad_()
            y = torch.arange(16, device=device) // 4
            value = both.losses[which](x, y, both.miners[which](x, y))
            (first,) = torch.autograd.grad(value, x, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), x)
        found.append(second)
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-10)


def test_rows_that_are_not_finite_go_to_pml(device):
    miner, peer = miners.MultiSimilarityMiner(), their_miners.MultiSimilarityMiner()
    y = torch.arange(8, device=device) // 2
    for _ in range(CALLS):
        miner(torch.eye(8, device=device), y)
    x = torch.eye(8, device=device)
    x[3] = torch.nan
    for a, b in zip(miner(x, y), peer(x, y), strict=True):
        assert torch.equal(a, b)


def test_a_copy_and_a_state_dict_hold_no_recordings(device):
    both = Both(device, "ContrastiveLoss", "PairMarginMiner")
    both()
    assert not both.losses[0].state_dict()
    assert not both.miners[0].state_dict()
    assert not copy.deepcopy(both.miners[0]).__dict__["_replays"]._known
