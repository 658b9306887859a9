"""User-defined parts on engine="fused", under Triton's interpreter.

tests/parts/test_own_parts.py runs this file in its own process.

A part that changes what it stands for is never computed by kernels, and a loss that has it gives dense's numbers.
"""

from __future__ import annotations

import os
from itertools import islice

import pytest
import torch
from fuzz_calls import engine
from fuzz_kernels import counted
from own_parts import CASES, EXAMPLES, Case, M, S, family, other, robust

import nearfar as nf
from tests.parts.test_own_parts import AT_SIZE, MODULES, REPLACED, numbers, on, put

assert os.environ["TRITON_INTERPRET"] == "1"  # before triton is imported, which reads it once
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of exponentials that are masked afterwards

L = nf.losses
CLOSE = 2e-5
"""How far value and gradients may be off in float32, relative to the largest of them."""


def batch(n=16):
    rng = torch.Generator().manual_seed(0)
    return torch.randn(n, 3, generator=rng), torch.randint(0, 4, (n,), generator=rng)


def measured(loss, more=()):
    x, labels = batch()
    leaf = x.requires_grad_()
    value = loss(leaf, labels)
    slopes = torch.autograd.grad(
        value.sum(), [leaf, *loss.parameters(), *more], allow_unused=True, materialize_grads=True
    )
    return [value.detach(), *slopes]


def products(loss, more=()):
    """Hold "fused" to dense; how many products kernels were started for."""
    wanted = measured(on(loss, "dense"), more)
    with counted() as found, engine("fused"):
        got = measured(on(loss, "fused"), more)
    most = max(float(slope.abs().max()) for slope in wanted[1:])
    for place, (a, b) in enumerate(zip(got, wanted, strict=True)):
        # what a number learns may be little, of large ones that cancel
        size = max(float(b.abs().max()), 0.01 * most if place else 0.0) or 1.0
        torch.testing.assert_close(a / size, b / size, atol=CLOSE, rtol=CLOSE, equal_nan=True)
    return len(found)


def test_built_in_parts_equal_dense_and_kernels_are_at_work_for_every_family():
    """The other tests would hold if kernels never were."""
    served = {
        kind for kind in EXAMPLES for way in islice(Case(kind, "forward").losses(), 3)
        if products(way(EXAMPLES[kind](kind)))
    }  # fmt: skip
    assert {family(kind) for kind in served} == {family(kind) for kind in EXAMPLES}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_part_with_one_method_of_its_own_equals_dense(case):
    """In one loss; tests/engines/test_fused.py asks of all whether they would be fused."""
    way = next(case.losses())
    assert products(way(case.made())) == 0
    assert products(way(case.patched())) == 0


@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_a_hook_and_a_learned_number_are_heard(kind):
    for way in islice(Case(kind, "forward").losses(), 1, 3):
        part = EXAMPLES[kind](kind)
        part.register_forward_hook(lambda module, given, found: other(lambda: found)())
        assert products(way(part)) == 0
        # through a miner nothing is learned; of a linear threshold both signs cancel, and roundings are left
        for name in set(numbers(kind)) - {"threshold"} if family(kind) is not M.Miner else ():
            part = EXAMPLES[kind](kind)
            setattr(part, name, torch.nn.Parameter(torch.tensor(getattr(part, name))))
            products(way(part))  # on the kernels where tests/interpreted/test_learned_numbers.py says so


@pytest.mark.parametrize("kind", [k for k in EXAMPLES if k is not S.CalibratedKL], ids=lambda kind: kind.__name__)
def test_a_number_may_be_a_tensor_with_a_gradient(kind):
    for name in numbers(kind):
        part = EXAMPLES[kind](kind)
        number = torch.tensor(getattr(part, name), requires_grad=True)
        put(part, name, number)
        products(next(Case(kind, "").losses())(part), (number,))


@pytest.mark.parametrize("name", REPLACED)
def test_what_is_replaced_after_construction_counts(name):
    for part in REPLACED[name]:
        loss = robust(groups="anchor_sign")
        setattr(loss, name, part)
        if not loss.product.draws:
            products(loss)


@pytest.mark.parametrize("name", [name for name in AT_SIZE if name != "learnt"])
def test_parts_of_each_family_are_not_fused(name):
    assert products(AT_SIZE[name]()) == 0
