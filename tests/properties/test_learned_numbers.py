"""Learned numbers: their gradients against finite differences on every engine, and which numbers cannot be learned."""

from __future__ import annotations

import pytest
import settings_cases
import torch
from learned_cases import CASES, IDS, RECIPES, learnable
from processes import interpreted
from settings_cases import batch, same
from ways import lower_thresholds, untiled

import nearfar as nf
from nearfar.engines.auto import INSTALLED
from nearfar.engines.learned import lift

L, P, S = nf.losses, nf.pairs, nf.sets
STEP = 1e-6
NEVER = 2**60


def gradients(loss, number, engine):
    rows, labels = batch()
    rows.requires_grad_()
    loss.engine, loss.tile = engine, 5
    value = loss(rows, labels)
    return [value.detach(), *torch.autograd.grad(value, [rows, number], allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_learned_number_has_the_gradient_of_finite_differences(case, monkeypatch):
    loss, number = case.learned()
    rows, labels = batch()
    up, down = (case.plain(case.start + sign * STEP)(rows, labels) for sign in (1, -1))
    slope = (up - down) / (2 * STEP)
    wanted = gradients(loss, number, "dense")
    torch.testing.assert_close(wanted[2], slope, atol=1e-7, rtol=1e-5)
    torch.testing.assert_close(wanted[0], case.plain()(rows, labels), atol=1e-10, rtol=1e-10)
    found = lift(loss.product)
    if untiled(loss.product if found is None else found.product) is None:
        same(gradients(loss, number, "tiled"), wanted, 1e-8)
    else:
        with pytest.raises(ValueError, match='engine="tiled" cannot serve this loss, because'):
            loss.engine = "tiled"
    lower_thresholds(monkeypatch, 1, NEVER)
    same(gradients(loss, number, "auto"), wanted, 1e-8)


@pytest.mark.skipif(not INSTALLED, reason="Triton is not installed (it is built for Linux on x86)")
def test_learned_numbers_on_the_kernels():
    assert " passed" in interpreted("tests/interpreted/test_learned_numbers.py")


@pytest.mark.parametrize("kind", [getattr(L, name) for name in L.__all__])
def test_a_learned_setting_is_a_parameter_of_the_loss(kind):
    for case in (case for case in RECIPES if case.id.startswith(f"{kind.__name__}-")):
        loss, _ = case.learned()
        name = case.id.split("-")[1]
        assert name in dict(loss.named_parameters())
        assert name in loss.state_dict()
        assert f"{name}=Parameter({case.start:g})" in repr(loss) or (kind, name) == (L.Margin, "beta")


def test_the_number_moves_with_an_optimizer():
    loss = L.NTXent(temperature=torch.nn.Parameter(torch.tensor(0.5)))
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.05)
    rows, labels = batch()
    values = []
    for _ in range(5):
        optimizer.zero_grad()
        value = loss(rows, labels)
        value.backward()
        optimizer.step()
        values.append(float(value.detach()))
    assert values == sorted(values, reverse=True)
    assert float(loss.temperature.detach()) != 0.5


def test_a_learned_number_of_a_graph_counts_once():
    log = torch.nn.Parameter(torch.tensor(-1.0, dtype=torch.float64))
    loss = L.SupCon()
    rows, labels = batch()
    for _ in range(2):
        loss.temperature = log.exp()
        (slope,) = torch.autograd.grad(loss(rows, labels), log)
        assert slope != 0


REFUSED = [
    (L.DroTopK, "k"), (L.DroTopKPN, "k"), (L.DroChiSquare, "rho"), (L.DroTrimmed, "top"), (L.DroTrimmedPN, "wrong"),
    (L.Angular, "degrees"), (L.HAP2S, "gamma"), (L.FastAP, "bins"), (S.KLBall, "rho"), (S.TopK, "k"),
    (S.CalibratedKL, "gamma"), (nf.miners.SemiHard, "threshold"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), REFUSED)
def test_what_cannot_be_learned_says_so(kind, name):
    known = settings_cases.given(kind, name) if kind.__name__ in L.__all__ else {}
    with pytest.raises(ValueError, match=f"{name} must be .*but came as a tensor"):
        kind(**(known | {name: torch.nn.Parameter(torch.tensor(2.0))}))


@pytest.mark.parametrize(
    "bad", [torch.nn.Parameter(torch.ones(1)), torch.tensor(1), torch.nn.Parameter(torch.tensor(-1.0))]
)
def test_a_learned_number_is_one_number(bad):
    with pytest.raises(ValueError, match="NTXent: temperature must be a number above zero"):
        L.NTXent(temperature=bad)


def test_the_guide_names_every_number_that_can_be_learned():
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs" / "guides" / "own-loss.md").read_text(encoding="utf-8")
    table = page[page.index("## Numbers that are learned") :]
    for name in L.__all__:
        for number in learnable(getattr(L, name)):
            assert f"`{name}`" in table, name
            assert f"`{number}`" in table, number
