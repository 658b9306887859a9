"""No step keeps a tensor: after thirty steps as many are alive as after ten (bytes: benchmarks/speed/leaks.py)."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import nearfar as nf

WAYS = {
    "alone": lambda make: make(),
    "in strips": lambda make: make(engine="tiled"),
    "memory": lambda make: nf.CrossBatchMemory(make(), size=40),
}
LOSSES = {
    "Contrastive": nf.losses.Contrastive,
    "MultiSimilarity": nf.losses.MultiSimilarity,
    "LiftedStructure": nf.losses.LiftedStructure,
    "Margin": nf.losses.Margin,
    "DroKL": nf.losses.DroKL,
    "DroTopK": lambda **more: nf.losses.DroTopK(k=10, **more),
}


@pytest.fixture(autouse=True)
def _only_what_is_new():
    """Set aside what other tests and packages hold: a search through it takes a second."""
    gc.collect()
    gc.freeze()


def alive() -> int:
    """Tensors that Python knows of."""
    gc.collect()
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LOSSES)
def test_no_step_keeps_a_tensor(name, way):
    torch.manual_seed(0)
    encoder, loss = nn.Linear(6, 4), WAYS[way](LOSSES[name])
    optimizer = torch.optim.SGD([*encoder.parameters(), *loss.parameters()], lr=1e-3)
    found = []
    for step in range(31):
        n = 12 + 4 * (step % 2)
        loss(encoder(torch.randn(n, 6)), torch.arange(n) // 4).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (10, 20, 30):
            found.append(alive())
    assert found[0] == found[1] == found[2]
