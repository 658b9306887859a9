"""Every loss, set and grouping x `zero` x `reduction` on the fused kernels.

tests/engines/test_fused.py runs this file in its own process.

The batches have anchors whose pairs all rest: their value is exactly 0, which `reduction="nonzero"` must see.
"""

from __future__ import annotations

from itertools import product
from typing import get_args, get_type_hints

import pytest
import torch
from interpreter import unfused

import nearfar as nf
from tests.interpreted.test_kernels import LOSSES, L, M, P, S, everything, robust, same, weighted
from tests.interpreted.test_kernels import Given as Batch

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
ZEROS, REDUCTIONS = ("keep", "drop"), ("mean", "sum", "nonzero")
MORE = {"DroTopK": {"k": 6}, "DroTopKPN": {"k": 6}, "DroTrimmed": {"top": 3, "k": 6}, "Triplet": {"mining": "hard"}}
"""What a loss needs besides."""


def resting(seed):
    """Ten rows of four classes; at most some anchors have a negative pair with a loss."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.arange(10) % 4
    return Batch(torch.eye(4)[y] + 0.3 * torch.randn(10, 4, generator=rng), None, nf.Relation.from_labels(y))


def options(name):
    """All combinations of `zero` and `reduction` that a loss takes; unreduced values are not for the kernels."""
    known = get_type_hints(getattr(L, name).__init__)
    chosen = {key: [x for x in get_args(known[key]) if x != "none"] for key in ("zero", "reduction") if key in known}
    return [dict(zip(chosen, each, strict=True)) for each in product(*chosen.values()) if chosen]


NAMED = [(name, each) for name in L.__all__ if name in LOSSES for each in options(name)]
SETS = {
    "mean": S.Mean,
    "kl": lambda **more: S.KL(0.2, **more),
    "flat": lambda **more: S.KL(50.0, **more),
    "sum": lambda **more: S.KL(0.2, normalized=False, **more),
    "worst": S.Worst,
    "held": lambda **more: S.DetachedWeights(S.KL(0.2, **more), **more),
    "top": lambda **more: S.TopK(3, **more),
}
GROUPS = {"anchor": REDUCTIONS, "anchor_sign": REDUCTIONS, "sign": ("mean",), "batch": ("mean",)}
PRODUCTS = [
    (name, groups, each)
    for name, (groups, reductions) in product(SETS, GROUPS.items())
    for each in product(ZEROS, (False, True), reductions)
]


def name_of(case):
    return "-".join(str(x) for x in (case.values() if isinstance(case, dict) else case)) if case else None


@pytest.mark.parametrize(("name", "more"), NAMED, ids=lambda x: x if isinstance(x, str) else name_of(x))
def test_a_loss(name, more):
    loss = getattr(L, name)(**more, **MORE.get(name, {}))
    if unfused(loss.product.at(10), resting(0).relation) is not None:
        assert unfused(LOSSES[name]().product, resting(0).relation) is not None, more  # whatever its options
        return
    for given in (resting(0), resting(1), resting(2)):
        same(loss, given)


@pytest.mark.parametrize(("name", "groups", "more"), PRODUCTS, ids=lambda x: x if isinstance(x, str) else name_of(x))
def test_a_product(name, groups, more):
    zero, zero_member, reduction = more
    over = SETS[name](zero=zero, zero_member=zero_member)
    loss = robust(pair=P.Hinge(0.1, 0.5), over=over, groups=groups, reduction=reduction)
    if unfused(loss.product, resting(0).relation) is not None:
        # the top K of a row, and held weights that have a zero member or are no row's
        assert name == "top" or (name == "held" and (zero_member or groups != "anchor_sign"))
        return
    for given in (resting(3), everything(weights=name != "top"), weighted()) if name != "top" else (resting(3),):
        same(loss, given)


@pytest.mark.parametrize("name", ["kl", "flat", "held", "mean"])
@pytest.mark.parametrize("folded", [False, True])
def test_an_anchor_that_rests_does_not_count(name, folded, monkeypatch):
    """Some anchors rest and others do not; also where positive pairs are folded, and where a miner chooses."""
    if folded:
        monkeypatch.setattr("nearfar.engines.rows.GATHERED", (0, 0))
    for miner in (None,) if folded else (None, M.SemiHard(2.0, None)):
        more = {"pair": P.Hinge(0.1, 0.5), "over": SETS[name](), "groups": "anchor_sign", "miner": miner}
        given = resting(4)
        values = robust(**more, reduction="none")(given.rows, given.relation)
        assert 0 < int((values == 0).sum()) < 10
        same(robust(**more, reduction="nonzero"), given)
