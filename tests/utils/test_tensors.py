"""Functions of tensors with few operators give what torch's own give."""

from __future__ import annotations

import pytest
import torch

from nearfar._utils.tensors import log_sum_exp, quick_unit, unit

LOWEST = torch.finfo(torch.float64).min


@pytest.mark.parametrize("high", [1.0, 800.0, torch.inf])
def test_log_sum_exp(high):
    x = torch.tensor(
        [[0.3, -2.0, high], [LOWEST, 0.5, LOWEST], [LOWEST] * 3, [-700.0, -90.0, 0.0]], dtype=torch.float64
    )
    torch.testing.assert_close(log_sum_exp(x.requires_grad_()), torch.logsumexp(x, dim=1))


def test_derivatives_of_log_sum_exp():
    x = torch.tensor([[0.3, -2.0, 1.0], [LOWEST, 0.5, 0.5]], dtype=torch.float64).requires_grad_()
    found, wanted = (torch.autograd.grad(f(x).square().sum(), x)[0] for f in (log_sum_exp, lambda x: x.logsumexp(1)))
    torch.testing.assert_close(found, wanted)
    small = torch.tensor([[0.3, -2.0, 1.0]], dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(log_sum_exp, small)
    assert torch.autograd.gradgradcheck(log_sum_exp, small)


@pytest.mark.parametrize("scale", [1.0, 1e-14, 1e-200, 1e200, 0.0])
def test_quick_unit(scale):
    x = torch.tensor([[3.0, 4.0], [-1.0, 2.0]], dtype=torch.float64)
    x = (x * torch.tensor([[scale], [1.0]], dtype=torch.float64)).requires_grad_()
    torch.testing.assert_close(quick_unit(x), unit(x))
    found, wanted = (torch.autograd.grad(f(x)[:, 0].sum(), x)[0] for f in (quick_unit, unit))
    torch.testing.assert_close(found, wanted)
