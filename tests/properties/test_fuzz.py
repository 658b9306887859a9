"""Five hundred random losses on random batches, called with random options, against the slow oracle of the algebra.

A failure prints its seed and configuration; `pytest tests/properties/test_fuzz.py -k seed137` runs that one again.
`make fuzz` runs ten thousand (tests/support/fuzz_run.py), and two thousand on the kernels of the fused engine.
"""

from __future__ import annotations

from collections import Counter

import fuzz_run
import numpy as np
import pytest
import torch
from fuzz import Case, drawn
from fuzz_calls import ASKS, ENGINES, LAYOUTS, CallOptions, call_options, lay_out
from fuzz_run import CLOSE, attempts, check, check_refused, far, found, main, settled, told
from oracles import algebra
from oracles.gradient import gradient
from processes import interpreted

import nearfar as nf
from nearfar.engines.auto import INSTALLED

SEEDS, LARGE = range(500), range(500, 520)
REFUSED = 1 / 3
"""The largest share of configurations that the package may refuse."""


def name(seed: int) -> str:
    return f"seed{seed:03d}"


@pytest.mark.parametrize("seed", SEEDS, ids=name)
def test_a_random_loss_equals_the_oracle(seed):
    check(seed)


@pytest.mark.parametrize("seed", LARGE, ids=name)
def test_a_random_loss_of_hundreds_of_rows_is_the_same_on_both_engines(seed):
    case = drawn(seed, large=True)
    if case.refused:
        check_refused(case)
        return
    apart = far(found(case, CallOptions("tiled")), found(case, CallOptions("dense")))
    assert apart < CLOSE[case.dtype], f"tiled differs from dense by {apart:.2g}\n{case}"


@pytest.mark.skipif(not INSTALLED, reason="the kernels need Triton, which is built for Linux on x86, and PyTorch 2.11")
def test_random_losses_on_the_kernels_of_the_fused_engine():
    assert " passed" in interpreted("tests/interpreted/test_fuzz.py")


HELD = {"expected", "power", "circle", "distance_weighted"}
"""Factors that hold something constant, so that their gradient is not that of the value."""


def slopes(case: Case) -> tuple[float, float]:
    """The slope along a random direction of rows and references: by differences, and by the closed gradient."""
    batch, share, rng = case.batch, told(case), np.random.default_rng(case.seed)
    sides = (batch.rows, np.zeros((0, 1)) if batch.references is None else batch.references)
    ways = [rng.normal(size=x.shape) for x in sides]

    def at(by):
        rows, references = (x + by * way for x, way in zip(sides, ways, strict=True))
        references = None if batch.references is None else references
        return algebra.answer(case.product, rows, references, batch.A, batch.U, batch.orders, share)

    found = at(np.longdouble(0))
    closed = np.sum(found.rows * ways[0]) + (0 if batch.references is None else np.sum(found.references * ways[1]))
    return gradient(lambda by: np.sum(share * at(by[0]).value), np.zeros(1), step=1e-9)[0], float(closed)


def test_the_gradient_of_the_oracle_is_that_of_its_value():
    checked = Counter()
    for seed in SEEDS:
        case = drawn(seed)
        product = case.product
        factors = (
            product.positive,
            product.negative,
            product.over_positive,
            product.over_negative,
            product.miner or ("",),
        )
        if case.refused or case.exact or HELD & {name for name, *_ in factors} or checked[product.groups] == 6:
            continue
        by_differences, closed = slopes(settled(attempts(seed))[0])
        assert abs(by_differences - closed) <= 1e-6 * max(1, abs(closed)), case
        checked[product.groups] += 1
    assert sum(checked.values()) == 7 * 6


def test_the_seeds_reach_every_factor_and_few_are_refused():
    cases = [drawn(seed) for seed in SEEDS]
    kept = [case for case in cases if not case.refused]
    assert len(kept) > (1 - REFUSED) * len(cases)
    seen = Counter()
    for case in kept:
        product = case.product
        seen.update([f"pair {product.positive[0]}", f"other {product.negative[0]}", f"over {product.over_positive[0]}"])
        seen.update([product.similarity, product.groups, f"link {product.link[0]}", product.reduction, case.dtype])
        seen.update([f"everyone {product.everyone}", f"compare {product.rule.get('compare')}", case.note["relation"]])
        seen.update([f"filter {product.miner and product.miner[0]}", f"band {product.rule.get('band') is not None}"])
        seen.update([f"exact {case.exact}", f"shared {case.shared}"])
    assert min(seen.values()) >= 3, seen
    assert len(seen) >= 75


def test_the_seeds_reach_all_options():
    seen = Counter()
    for seed in SEEDS:
        for options in call_options(seed):
            seen.update([f"engine {options.engine}", f"asks {options.asks}", f"{options.engine} {options.asks}"])
            seen.update([f"rows {options.rows}", f"references {options.references}", f"relation {options.relation}"])
    assert len(seen) == len(ENGINES) + len(set(ASKS)) * (1 + len(ENGINES)) + 3 * len(LAYOUTS)
    assert min(seen.values()) >= 5, seen
    assert {drawn(seed).rounded for seed in SEEDS} == {torch.float64, torch.float32, torch.bfloat16, torch.float16}


def test_every_layout_holds_the_same_numbers_in_another_way():
    x = torch.tensor([[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]])
    for how in LAYOUTS:
        assert torch.equal(lay_out(x, how), x)
    assert lay_out(x, "transposed").stride() == (1, 2)
    assert lay_out(x, "strided").stride() == (12, 2)
    assert lay_out(x, "offset").storage_offset() > 0
    assert lay_out(x, "negated").is_neg()
    assert lay_out(torch.ones(3, 2), "expanded").stride() == (0, 1)
    assert lay_out(torch.tensor([7, 7, 7]), "expanded").stride() == (0,)


def test_a_seed_that_fails_is_named_with_the_line_that_runs_it_again(monkeypatch, capsys):
    true = fuzz_run.found
    monkeypatch.setattr(
        fuzz_run, "found", lambda case, options: [x if x is None else x + 1e-2 for x in true(case, options)]
    )
    seed = next(seed for seed in range(20) if not drawn(seed).refused)
    assert main(["--first", str(seed), "--count", "1"]) == 1
    said = capsys.readouterr().out
    assert f"FAILED: python tests/support/fuzz_run.py --first {seed} --count 1" in said
    assert f"seed {seed}:" in said


# ---------------------------------------------------------------- what longer runs of seeds have found


@pytest.mark.parametrize("groups", ["batch", "sign"])
def test_half_a_matrix_counts_each_pair_twice(groups):
    """γ·log Σ e^{l/γ} of both orders of a pair is γ·log 2 above that of one."""
    rng = torch.Generator().manual_seed(0)
    rows, labels = torch.randn(8, 3, generator=rng, dtype=torch.float64), torch.arange(8) // 2
    over = nf.sets.KL(0.7, normalized=False)
    dense, tiled = (
        nf.RobustLoss(pair=nf.pairs.Hinge(), over=over, groups=groups, engine=engine)(rows, labels)
        for engine in ("dense", "tiled")
    )
    torch.testing.assert_close(tiled, dense)


@pytest.mark.parametrize("groups", ["batch", "sign", "balanced"])
def test_a_mass_that_rounding_lifts_above_the_whole(groups):
    """Weights that are no whole numbers, summed in float32: k may come out above what there is."""
    rng = torch.Generator().manual_seed(0)
    mine = nf.miners.DistanceWeighted(sample=False)
    for _ in range(10):
        rows, labels = torch.randn(9, 5, generator=rng), torch.arange(9) // 3
        dense, tiled = (
            nf.RobustLoss(pair=nf.pairs.Hinge(), over=nf.sets.TopK(20), groups=groups, miner=mine, engine=engine)
            for engine in ("dense", "tiled")
        )
        torch.testing.assert_close(tiled(rows, labels), dense(rows, labels))


@pytest.mark.parametrize("over", [nf.sets.Mean(), nf.sets.Worst(), nf.sets.KL(1.0), nf.sets.ChiSquare(1.0)], ids=str)
@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_what_only_top_k_can_balance_is_refused_on_every_engine(over, engine):
    with pytest.raises(ValueError, match=r"both must be TopK\.$"):
        nf.RobustLoss(pair=nf.pairs.Hinge(), over=over, groups="balanced", engine=engine)
