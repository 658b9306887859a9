"""The kernels follow a setting; run in Triton's interpreter by tests/properties/test_settings.py."""

from __future__ import annotations

import pytest
import torch
from interpreter import counted, quicken
from settings_cases import CASES, FIXED, given, make, measured, other, part, same

import nearfar as nf

quicken()
NUMBERS = [
    pytest.param(kind, name, id=f"{kind.__name__}-{name}")
    for kind, name in CASES
    if name not in FIXED | {"engine", "pair", "similarity", "miner", "learn"}
]


@pytest.fixture
def served(monkeypatch):
    return counted(monkeypatch)


@pytest.mark.parametrize(("kind", "name"), NUMBERS)
def test_the_kernels_follow(kind, name, served):
    value = other(kind, name)
    loss, wanted = make(kind, **given(kind, name)).float(), make(kind, **(given(kind, name) | {name: value})).float()
    loss.engine, wanted.engine = "fused", "dense"
    measured(loss, dtype=torch.float32)
    setattr(part(loss, kind), name, value)
    if loss.product.draws or wanted.product.draws:
        return
    same(measured(loss, dtype=torch.float32), measured(wanted, dtype=torch.float32), 2e-4)
    if kind in (nf.losses.NTXent, nf.losses.MultiSimilarity, nf.losses.DroKL) and loss.plan.refused is None:
        assert served
