"""Random losses on the kernels of the fused engine.

tests/properties/test_fuzz.py runs this file in its own process.

`make fuzz` runs two thousand. `TRITON_INTERPRET=1 pytest tests/interpreted/test_fuzz.py -k seed07` runs one again.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch
from fuzz import drawn
from fuzz_calls import ASKS, KERNELS, CallOptions, call_options, engine
from fuzz_kernels import counted, draws, served
from fuzz_run import check_kernels
from interpreter import unfused

import nearfar as nf
from nearfar.groups._triplets import AngularScore, Rule, Triplets

assert os.environ["TRITON_INTERPRET"] == "1"  # before triton is imported, which reads it once
# NumPy's, of exponentials that are masked afterwards
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::nearfar.DegenerateBatchWarning"),
]

SEEDS = range(30)
L, S, P, K = nf.losses, nf.sets, nf.pairs, nf.links
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"seed{seed:02d}")
def test_a_random_loss_equals_the_oracle_on_the_kernels(seed):
    """Four seeds in five at least are computed by kernels: the others draw what comes."""
    through = check_kernels(seed)
    assert through or seed % 5 == 0


def test_the_seeds_reach_all_that_has_kernels():
    seen = Counter()
    for seed in range(150):
        case = next(draws(seed))
        if not served(case):
            continue
        product = case.product
        seen.update([product.groups, product.similarity, f"pair {product.negative[0]}", case.note["rows"]])
        wide = product.over_positive if product.groups in ("batch", "anchor") else product.over_negative
        seen.update([f"over {wide[0]}", f"filter {product.miner and product.miner[0]}", case.note["relation"]])
        seen.update([case.rounded, f"everyone {product.everyone}", f"link {product.link[0]}"])
    assert seen.total() > 120 * 10
    assert {"batch", "sign", "balanced", "anchor", "anchor_sign", "triplets", torch.float16} <= set(seen)
    assert {f"over {name}" for name in ("mean", "worst", "topk", "kl", "expected")} <= set(seen)
    assert {f"pair {name}" for name in ("hinge", "squared", "linear", "score", "logistic", "circle")} <= set(seen)
    assert {f"filter {name}" for name in (None, "multi_similarity", "semi_hard")} <= set(seen)
    assert {"plain", "ignore", "samples", "representatives", "among", "ids against references"} <= set(seen)


def test_the_seeds_reach_all_options():
    seen = Counter(
        (options.engine, options.asks) for seed in range(200) for options in call_options(seed, kernels=True)
    )
    assert set(seen) == {(engine, asks) for engine in KERNELS for asks in ASKS}


def test_a_case_that_goes_past_the_kernels_is_not_counted():
    with counted() as products, engine("fused") as name:
        drawn(0, turn=1).make(name)
        L.SupCon(engine=name)(torch.randn(6, 3).double(), torch.arange(6) // 2)
        assert not products
        L.SupCon(engine=name)(torch.randn(6, 3), torch.arange(6) // 2)
        assert set(products) == {6}
    assert CallOptions("fused").grad


# ---------------------------------------------------------------- what longer runs of seeds have found


def same(make, rows, labels, **more):
    for a, b in zip(*(_measured(make(name), rows, labels, more) for name in ("fused", "dense")), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def _measured(loss, rows, labels, more):
    with engine("fused"):
        leaf = rows.clone().requires_grad_()
        value = loss(leaf, labels, **more)
        value.backward()
    return value.detach(), leaf.grad


def batch(n=20, d=4, times=1.0):
    rng = torch.Generator().manual_seed(0)
    return times * torch.randn(n, d, generator=rng), torch.randint(0, 5, (n,), generator=rng)


def test_a_link_that_groups_do_not_read_makes_no_loss_fused():
    """Triplets with a rule of their own were summed as plain ones where the loss had a link that wants columns."""
    angular = Triplets(Rule(AngularScore(0.3), wants_reference=True))
    for groups, over in ((angular, S.Mean()), (Triplets(), S.KL(0.3))):
        loss = nf.RobustLoss(pair=P.Hinge(), over=over, groups=groups, link=K.LiftedLink())
        assert unfused(loss.product, nf.Relation.from_labels(batch()[1]))


def test_the_least_loss_of_a_softplus_is_not_dropped():
    """1 + e^-17 is 1 in float32; how many members a mean has is decided by losses that are tiny, but not 0."""
    for over in (S.KL(1.0, zero="drop"), S.Mean(zero="drop")):
        same(
            lambda engine, over=over: nf.RobustLoss(
                pair=P.Logistic(0.0, slope_negative=2.0), over=over, groups="anchor", engine=engine,
                similarity=nf.similarity.Dot(),
            ),
            *batch(times=3.0),
        )  # fmt: skip


def test_a_pair_has_the_weight_that_its_own_score_had():
    """The two orders of a pair may differ in the last digit, which is e^.2 of losses of millions."""
    more = {"pair": P.CircleScore(0.4, 4.0), "over": S.KL(1.0), "groups": "anchor", "similarity": nf.similarity.Dot()}
    rows = batch(n=32, d=20, times=10.0)
    fused, dense = (_measured(nf.RobustLoss(engine=name, **more), *rows, {})[1] for name in ("fused", "dense"))
    assert (fused - dense).abs().max() < 1e-5 * dense.abs().max()


def lifted(engine):
    link = K.LiftedLink()
    more = {"groups": "anchor_sign", "members": "all", "link": link, "engine": engine}
    return nf.RobustLoss(pair=P.Hinge(0.3, 0.1), over=S.KL(0.5), **more)


def test_columns_of_lifted_structure_hold_all_pairs_where_rows_do():
    x, y = batch(20)
    z, t = (side[:11].flip(0) for side in (x, y))
    same(lifted, x, y)
    same(lifted, x, y, ref_emb=z, ref_labels=t)
    same(lifted, x[:6], torch.zeros(6, dtype=torch.int64))  # columns without a negative pair
