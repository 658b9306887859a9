"""Operators that are recorded on a CPU: replayed on other tensors, reduced to those that are needed, or refused."""

import subprocess
import sys

import pytest
import torch

from nearfar._utils import tape
from nearfar._utils.tape import trace


def numbers(seed=0, n=5, m=4):
    return torch.randn(n, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def steps_of(body, given):
    recorder = tape._Recorder(given)
    with recorder:
        found = body()
    steps, _, same = tape._simplify(recorder)
    name = recorder.names[id(found)]
    return [step.name for step in tape._used(steps, {same.get(name, name)})]


def test_value_and_gradient_for_other_tensors():
    given = numbers()

    def loss(x):
        leaf = x.detach().requires_grad_()
        value = torch.logsumexp(leaf @ leaf.T, dim=1).mean() + leaf.relu().sum()
        return value.detach(), list(torch.autograd.grad(value, leaf))

    replay, first = trace(lambda: loss(given), (given, None))
    for seed in range(3):
        other = numbers(seed)
        found, wanted = replay((other, None)), loss(other)
        torch.testing.assert_close(found, wanted, atol=0, rtol=0)
        assert found[1][0].data_ptr() != first[1][0].data_ptr()


def test_a_parameter_is_read_anew():
    given, scale = numbers(), torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    replay, _ = trace(lambda: (given * scale.detach()).sum(), (given,))
    with torch.no_grad():
        scale.fill_(3.0)
    torch.testing.assert_close(replay((given,)), (given * 3).sum())


def test_another_answer_to_what_was_read_stops_it():
    given = numbers().abs()

    def body():
        return given.sum() if bool((given > 0).all()) else -given.sum()

    replay, _ = trace(body, (given,))
    torch.testing.assert_close(replay((2 * given,)), 2 * given.sum())
    assert replay((-given,)) is None


@pytest.mark.parametrize(
    "body",
    [
        lambda x: x[x > 0].sum(),
        lambda x: x.nonzero().sum(),
        lambda x: x * float(x.sum()),
        lambda x: x + torch.rand(5, 4),
        lambda x: x.mul_(2),
        lambda x: torch.ones(3),
        lambda x: x,
    ],
    ids=["mask", "places", "number", "random", "given", "constant", "itself"],
)
def test_what_cannot_be_repeated_is_refused(body):
    given = numbers()
    with pytest.raises(RuntimeError):
        trace(lambda: body(given), (given,))


MASK = torch.ones(5, 4).triu().bool()
SAVED = {
    "a result that is not used": (lambda x: (x.exp(), x.sin())[1], ["sin"]),
    "equal operators": (lambda x: x.exp() * x.exp(), ["exp", "mul"]),
    "other numbers": (lambda x: x.pow(2) * x.pow(2.0).cos(), ["pow", "pow", "cos", "mul"]),
    "views of the whole": (lambda x: x.detach()[:].view(5, 4).expand(5, 4).sin(), ["sin"]),
    "shapes alone": (lambda x: x.sin() + torch.eye(5, 4) + torch.ones_like(x).cumsum(0), ["sin", "add", "add"]),
    "zeros and ones": (lambda x: (x.sin() * 1 + 0 - 0.0) / torch.ones_like(x), ["sin"]),
    "numbers that change it": (lambda x: (x.sin() * 2 + 1) / 1, ["sin", "mul", "add"]),
    "signs": (lambda x: x.neg().neg().sin(), ["sin"]),
    "a wide sum": (lambda x: (x + 0).sum(1)[:, None].expand(5, 4) * x, ["sum", "unsqueeze", "mul"]),
    "what is written": (lambda x: x.clone().mul_(1).add_(0).sin(), ["clone", "mul_", "add_", "sin"]),
}


@pytest.mark.parametrize("name", SAVED)
def test_what_is_not_needed_is_left_out(name):
    body, wanted = SAVED[name]
    given = numbers()
    assert steps_of(lambda: body(given), (given,)) == wanted
    replay, _ = trace(lambda: body(given), (given,))
    other = numbers(1)
    torch.testing.assert_close(replay((other,)), body(other), atol=0, rtol=0)


def test_masks_under_the_same_mask():
    given = numbers()

    def body():
        return torch.where(MASK, torch.where(MASK, given, 0.0).sin() * 0 + torch.where(MASK, given, 1.0), 7.0)

    replay, _ = trace(body, (given,))
    torch.testing.assert_close(replay((given,)), body())
    assert steps_of(lambda: torch.where(MASK, torch.where(MASK, given, 0.0), 7.0), (given,)).count("where") == 1


def test_recording_a_loss_imports_nothing():
    """The compiler and SymPy take a second to import, in the fourth call of a loss."""
    code = (
        "import sys, torch, nearfar as nf\n"
        "x, y, loss = torch.randn(8, 4, requires_grad=True), torch.arange(8) // 2, nf.losses.SupCon()\n"
        "for _ in range(3): loss(x, y).backward()\n"
        "before = set(sys.modules)\n"
        "for _ in range(2): loss(x, y).backward()\n"
        "assert any(hasattr(each, 'replay') for each in loss._replays._known.values())\n"
        "print(*sorted(set(sys.modules) - before))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.split() == []
