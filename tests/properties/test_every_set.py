"""Every set of `nf.sets`, found by itself, against dense: in strips, on the fused engine, on two ranks.

A set that can be made without arguments is found automatically; any other has a line in `EXAMPLES` of
tests/support/own_parts.py. Under TRITON_INTERPRET=1 the kernels compute what they can.
"""

from __future__ import annotations

import inspect
import os
from itertools import product
from typing import Any

import pytest
import torch
from engine_cases import larger
from gathered_cases import Share, measured, same
from own_parts import DRAWN, EXAMPLES
from processes import together
from ways import untiled

import nearfar as nf
from tests.parts.test_own_parts import check, on
from tests.parts.test_own_parts import measured as of_engine

S = nf.sets
KINDS = {name: getattr(S, name) for name in S.__all__ if inspect.isclass(getattr(S, name))}
SETS = {
    name: EXAMPLES.get(kind, lambda of: of())(kind)
    for name, kind in KINDS.items()
    if issubclass(kind, S.UncertaintySet) and not inspect.isabstract(kind) and not (kind in DRAWN or kind.remembers)
}
RANKED = [name for name in SETS if os.environ.get("ONLY_SETS", "") in name]
"""What two ranks are tried with: all, or those that tests/project/test_contributing.py asks for, which it has added."""
GROUPS = ("batch", "sign", "anchor", "anchor_sign")
SHARED = ("batch", "anchor_sign")
"""What ranks are tried with: groups that lie on all of them, and on one."""
BATCHES = {
    "many": larger(30),
    "two": (torch.eye(2, dtype=torch.float64), torch.tensor([0, 1])),
    "equal": (torch.eye(3, dtype=torch.float64)[torch.arange(12) % 3], torch.arange(12) % 4),
}
"""Also one in which the last rank has no pair of its own (of half a matrix), and one of many ties."""
sets = pytest.mark.parametrize("name", SETS)
groups = pytest.mark.parametrize("groups", GROUPS)


def loss_of(name: str, groups: str) -> nf.RobustLoss:
    return nf.RobustLoss(pair=nf.pairs.Hinge(0.3, 0.4), over=SETS[name], groups=groups)


def test_sets_are_found():
    assert {"Mean", "Worst", "TopK", "KL", "KLBall", "ChiSquare", "PowerWeights"} <= set(SETS)


@sets
@groups
def test_strips_equal_dense_or_are_refused_in_a_sentence(name, groups, monkeypatch):
    loss = loss_of(name, groups)
    _, served = check(loss, monkeypatch)
    assert served is (untiled(loss.product) is None)


@sets
@groups
@pytest.mark.filterwarnings("ignore:.*engine=.fused. needs:UserWarning", "ignore::RuntimeWarning")
def test_the_fused_engine_equals_dense(name, groups):
    x, y = larger(18)
    dense, fused = (of_engine(on(loss_of(name, groups), engine), x.float(), y) for engine in ("dense", "fused"))
    for a, b in zip(fused, dense, strict=True):
        size = float(b.abs().max()) or 1.0
        torch.testing.assert_close(a / size, b / size, atol=2e-5, rtol=2e-5)


def of_rank(share: Share) -> dict[str, Any]:
    """Value and gradients of each set in each grouping; in strips that the ranks share, where the set has them."""
    found = {}
    for name, groups, (size, (rows, labels)) in product(RANKED, SHARED, BATCHES.items()):
        loss = loss_of(name, groups).double()
        on(loss, "tiled" if untiled(loss.product) is None else "dense", 5)
        found[f"{name}/{groups}/{size}"] = measured(share, loss, rows, share(labels))
    return found


def on_ranks(rank: int, world: int) -> dict[str, Any]:
    return of_rank(Share(rank, world))


def test_two_ranks_equal_one_process(tmp_path):
    found = together(__name__, "on_ranks", 2, tmp_path)
    for name, wanted in of_rank(Share()).items():
        same([rank[name] for rank in found], wanted, name)
    assert set(found[0]) == {"/".join(case) for case in product(RANKED, SHARED, BATCHES)}
