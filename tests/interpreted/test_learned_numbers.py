"""Learned numbers on the kernels; run in Triton's interpreter by tests/properties/test_learned_numbers.py."""

from __future__ import annotations

import pytest
import torch
from interpreter import counted, quicken
from learned_cases import CASES
from settings_cases import batch

quicken()


def gradients(loss, number, engine):
    rows, labels = batch()
    rows = rows.float().requires_grad_()
    loss.engine = engine
    value = loss(rows, labels)
    return [value.detach(), *torch.autograd.grad(value, [rows, number], allow_unused=True, materialize_grads=True)]


NOT_SERVED = {
    # no kernel for the loss, or none where its own miner compares scores with a number
    "MultiSimilarity", "FastAP", "SmoothAP", "SoftTriple", "SubCenterArcFace",
    # the number is not a scale or a threshold: steepness of a smooth hinge or of a logistic loss, power, pace
    "Circle", "CircleScore", "Triplet-smooth", "BinomialDeviance-slope_negative", "Logistic-slope_negative",
    "Hinge-smooth", "Squared-power", "Contrastive-power",
    # a link is between the values and the loss; the kernels serve one temperature
    "KL-of-one-sign",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # of a factor that is then 0
@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_the_kernels_give_the_numbers_of_dense(case, monkeypatch):
    seen = counted(monkeypatch)
    loss, number = case.learned()
    loss = loss.float()
    found, wanted = gradients(loss, number, "fused"), gradients(loss, number, "dense")
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=3e-5, rtol=3e-4)
    expected = not any(case.id.startswith(name) for name in NOT_SERVED) and not case.id.endswith("-hard")
    assert expected == bool(seen and seen[0] is not None)
