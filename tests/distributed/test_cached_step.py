"""`cached_step`: the gradient of a plain step, a chunk of activations at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_cases import larger
from processes import together
from table import ROWS
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import nearfar as nf

L = nf.losses
CLOSE = {"atol": 1e-10, "rtol": 1e-10}


def network(dropout: float = 0.0, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 16), nn.GELU(), nn.GroupNorm(4, 16), nn.Dropout(dropout), nn.Linear(16, 4), nn.Dropout(dropout)
    ).double()


def slopes(*modules: nn.Module) -> list[torch.Tensor]:
    return [p.grad for module in modules for p in module.parameters() if p.grad is not None]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted) > 0
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("row", ROWS, ids=[row.id for row in ROWS])
def test_every_loss_has_the_gradient_of_a_plain_step(row):
    x, y = larger()
    y = y % 4 if row.proxies else y
    plain, cached = network(), network()
    loss, other = row.loss(), row.loss()
    wanted = loss(plain(x), y)
    wanted.backward()
    value = nf.cached_step(cached, x, y, other, 7)
    torch.testing.assert_close(value, wanted.detach(), **CLOSE)
    assert not value.requires_grad
    same(slopes(cached, other), slopes(plain, loss))


@pytest.mark.parametrize("chunk", [1, 7, 41, 100])
def test_dropout_masks_are_drawn_once(chunk):
    """Equal to a plain step whose encoder runs in the same chunks, and the generator goes on as after it."""
    x, y = larger()
    plain, cached = network(0.3), network(0.3)
    torch.manual_seed(9)
    L.SupCon()(torch.cat([plain(part) for part in x.split(chunk)]), y).backward()
    after = torch.rand(3)
    torch.manual_seed(9)
    nf.cached_step(cached, x, y, L.SupCon(), chunk)
    assert torch.equal(torch.rand(3), after)
    same(slopes(cached), slopes(plain))


def test_gradients_add_up_and_a_memory_sees_the_batch_once():
    x, y = larger()
    net, memory = network(), nf.CrossBatchMemory(L.SupCon().double(), size=100)
    for _ in range(2):
        nf.cached_step(net, x, y, memory, 8, ids=torch.arange(len(y)))
    assert memory.staleness().rows == 82
    twice = slopes(net)
    net.zero_grad()
    plain, again = network(), nf.CrossBatchMemory(L.SupCon().double(), size=100)
    for _ in range(2):
        again(plain(x), y, ids=torch.arange(len(y))).backward()
    same(twice, slopes(plain))


class Named(nn.Module):
    """Takes its inputs by name, one of which is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: torch.Tensor, shift: torch.Tensor, sign: int = 1) -> torch.Tensor:
        return self.net(x + sign * shift[:, None])


@pytest.mark.parametrize("kind", [dict, tuple, list])
def test_inputs_may_be_several(kind):
    x, y = larger()
    shift = torch.linspace(0, 1, len(x), dtype=torch.float64)
    given = {"x": x, "shift": shift, "sign": -1}
    cached, plain = Named(), Named()
    nf.cached_step(cached, given if kind is dict else kind(given.values()), y, L.SupCon(), 9)
    L.SupCon()(plain(x, shift, -1), y).backward()
    same(slopes(cached), slopes(plain))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.most = network(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.most = max(self.most, len(x))
        return self.net(x)


def test_the_encoder_sees_chunks_only():
    encoder = Counting()
    nf.cached_step(encoder, *larger(), L.SupCon(), 3)
    assert encoder.most == 3


def test_batch_statistics_are_refused_or_frozen():
    x, y = larger()
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)).double()
    with pytest.raises(ValueError, match=r'cached_step: 1 \(BatchNorm1d\) normalizes by its batch.* bn="frozen"'):
        nf.cached_step(net, x, y, L.SupCon(), 8)
    state = {k: v.clone() for k, v in net.state_dict().items()}
    nf.cached_step(net, x, y, L.SupCon(), 8, bn="frozen")
    assert net[1].training
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    found = slopes(net)
    net.eval().zero_grad()
    nf.cached_step(net, x, y, L.SupCon(), 8)  # in evaluation mode there is nothing to refuse
    same(slopes(net), found)


def test_a_scaler_scales_once():
    x, y = larger()
    plain, cached = network(), network()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    value = nf.cached_step(cached, x, y, L.SupCon(), 8, scaler=scaler)
    wanted = L.SupCon()(plain(x), y)
    wanted.backward()
    torch.testing.assert_close(value, wanted.detach(), **CLOSE)
    same([slope / 8 for slope in slopes(cached)], slopes(plain))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"chunk": 0}, r"cached_step: chunk must be a whole number above zero"),
        ({"bn": "on"}, r"cached_step: bn must be"),
        ({"inputs": torch.zeros(0, 4).double()}, r"of one number of samples, above zero"),
        ({"inputs": (torch.zeros(3, 4), torch.zeros(4, 4))}, r"of one number of samples"),
        ({"inputs": "rows"}, r"inputs must be a tensor, or a tuple, list or dict of them, but came as str"),
        ({"encoder": nn.Flatten(0)}, r"the encoder must give embeddings \[b, d\]"),
    ],
)
def test_bad_arguments_are_named(change, words):
    x, y = larger()
    given: dict[str, Any] = {"encoder": network(), "inputs": x, "labels": y, "loss": L.SupCon(), "chunk": 8} | change
    with pytest.raises((TypeError, ValueError), match=words):
        nf.cached_step(**given)


def test_a_loss_without_gradient_is_named():
    with pytest.raises(ValueError, match="has no gradient in the embeddings"):
        nf.cached_step(network(), *larger(), lambda e, y: torch.zeros((), requires_grad=True), 8)


# ---------------------------------------------------------------- several processes


def one_step(rank: int, world: int) -> dict[str, Any]:
    """Gradients of a network under DDP: plain and cached, on unequal shares of one batch."""
    x, y = larger()
    ends = [0, 25, 41] if world == 2 else [0, 15, 16, 41]
    mine = slice(ends[rank], ends[rank + 1]) if world > 1 else slice(None)
    found = {}
    for name in ("plain", "cached", "dropout"):
        net: nn.Module = network(0.2 if name == "dropout" else 0.0)
        net = DistributedDataParallel(net) if world > 1 else net
        loss = L.Margin(learn=True).double()
        gathered = nf.Distributed(loss) if world > 1 else loss
        torch.manual_seed(rank)
        if name == "plain":
            value = gathered(net(x[mine]), y[mine])
            value.backward()
        else:
            value = nf.cached_step(net, x[mine], y[mine], gathered, 4)
        found[name] = {"value": value.detach(), "slopes": slopes(net, loss)}
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_under_ddp_ranks_have_the_gradient_of_one_process(world, tmp_path):
    alone, ranks = one_step(0, 1), together(__name__, "one_step", world, tmp_path)
    for found in ranks:
        for name in ("plain", "cached"):
            torch.testing.assert_close(found[name]["value"], alone["plain"]["value"], **CLOSE)
            same(found[name]["slopes"], alone["plain"]["slopes"])
        same(found["dropout"]["slopes"], ranks[0]["dropout"]["slopes"])
    assert not torch.allclose(ranks[0]["dropout"]["slopes"][0], ranks[0]["cached"]["slopes"][0])
