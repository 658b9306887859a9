"""Five hundred random losses on random batches, on both engines, against the slow oracle of the algebra.

A failure prints its seed and configuration; `pytest tests/test_fuzz.py -k seed137` runs that one again.
"""

from __future__ import annotations

import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from fuzz import Case, drawn, perturbed
from oracles import algebra
from oracles.gradient import gradient

import nearfar as nf

SEEDS, LARGE = range(500), range(500, 520)
CLOSE = {torch.float64: 1e-10, torch.float32: 3e-4}
"""How far value and gradient may lie from the oracle's, relative to the largest of them."""
REFUSED = 1 / 3
"""The largest share of configurations that the package may refuse."""


def told(case: Case) -> np.ndarray:
    """What each value counts: unequal shares where there is one an anchor."""
    return np.linspace(1.0, 2.0, len(case.batch.rows)) if case.product.reduction == "none" else np.ones(())


def wanted(case: Case) -> list:
    """Value, gradient of the rows, of the references and of the thresholds, by the oracle."""
    batch = case.batch
    found = algebra.answer(case.product, batch.rows, batch.references, batch.A, batch.U, batch.orders, told(case))
    rows, references = found.rows, [found.references]
    if batch.references is None:
        references = []
    elif batch.place is not None:  # each reference is a row
        rows, references = rows.copy(), []
        np.add.at(rows, batch.place, found.references)
    thresholds = found.threshold_alike, found.threshold_unlike
    if case.shared:
        thresholds = (sum(thresholds),) * 2
    return [found.value, rows, *references, *thresholds]


def found(case: Case, engine: str) -> list:
    """The same by the package."""
    batch, loss = case.batch, case.make(engine)
    rows = torch.tensor(batch.rows, dtype=case.dtype, requires_grad=True)
    references = None
    if batch.place is not None:
        references = rows[torch.tensor(batch.place)]
    elif batch.references is not None:
        references = torch.tensor(batch.references, dtype=case.dtype, requires_grad=True)
    loss.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nf.DegenerateBatchWarning)
        value = loss(rows, batch.relation(), ref_emb=references)
    (value * torch.tensor(told(case), dtype=case.dtype)).sum().backward()
    more = [references.grad] if references is not None and batch.place is None else []
    thresholds = [getattr(pair, "offset", None) for pair in (loss.pair_alike, loss.pair_unlike)]
    return [x.detach().numpy() for x in (value, rows.grad, *more)] + [
        None if x is None or x.grad is None else x.grad.numpy() for x in thresholds
    ]


def far(a: list, b: list) -> float:
    """The largest difference of value and gradients, each relative to its largest entry (but to 0.01 at least)."""
    apart = [0.0]
    for x, y in zip(a, b, strict=True):
        if x is None or y is None or not np.size(y):
            continue
        assert np.shape(x) == np.shape(y)
        gap = np.max(np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)))
        apart.append(float(gap) / max(0.01, float(np.max(np.abs(y)))) if np.isfinite(gap) else np.inf)
    return max(apart)


def settled(seed: int) -> tuple[Case, list]:
    """The case of a seed and its answer, on rows where rounding is felt no more than it must be.

    Not at a jump of the gradient, where it could fall either way, and no pair so near that its distance, made of
    products, has few digits left.
    """
    for attempt in range(20):
        case = drawn(seed, attempt)
        grain, close = float(torch.finfo(case.dtype).eps), CLOSE[case.dtype]
        try:
            answer = wanted(case)
        except algebra.UnclearError:
            continue
        near = case.product.similarity == "neg_euclidean" and case.batch.crowded(case.product.normalize) * grain
        if case.exact or not (near > close / 2 or far(wanted(perturbed(case, 30 * grain)), answer) > close / 2):
            return case, answer
    raise AssertionError(f"every draw lies at a jump\n{case}")


def check_refused(case: Case) -> None:
    for engine in ("dense", "tiled"):
        with pytest.raises(ValueError, match=case.refused) as error:
            found(case, engine)
        said = str(error.value)
        assert said.endswith("."), f"{said}\n{case}"
        assert "\n" not in said, f"{said}\n{case}"


def name(seed: int) -> str:
    return f"seed{seed:03d}"


@pytest.mark.parametrize("seed", SEEDS, ids=name)
def test_a_random_loss_equals_the_oracle(seed):
    if drawn(seed).refused:
        check_refused(drawn(seed))
        return
    case, answer = settled(seed)
    for engine in ("dense", "tiled"):
        apart = far(found(case, engine), answer)
        assert apart < CLOSE[case.dtype], f"{engine} differs from the oracle by {apart:.2g}\n{case}"


@pytest.mark.parametrize("seed", LARGE, ids=name)
def test_a_random_loss_of_hundreds_of_rows_is_the_same_on_both_engines(seed):
    case = drawn(seed, large=True)
    if case.refused:
        check_refused(case)
        return
    apart = far(found(case, "tiled"), found(case, "dense"))
    assert apart < CLOSE[case.dtype], f"tiled differs from dense by {apart:.2g}\n{case}"


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
        factors = (product.alike, product.unlike, product.over_alike, product.over_unlike, product.filter or ("",))
        if case.refused or case.exact or HELD & {name for name, *_ in factors} or checked[product.groups] == 6:
            continue
        by_differences, closed = slopes(settled(seed)[0])
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
        seen.update([f"pair {product.alike[0]}", f"other {product.unlike[0]}", f"over {product.over_alike[0]}"])
        seen.update([product.similarity, product.groups, f"link {product.link[0]}", product.reduction, case.dtype])
        seen.update([f"everyone {product.everyone}", f"compare {product.rule.get('compare')}", case.note["relation"]])
        seen.update([f"filter {product.filter and product.filter[0]}", f"band {product.rule.get('band') is not None}"])
        seen.update([f"exact {case.exact}", f"shared {case.shared}"])
    assert min(seen.values()) >= 3, seen
    assert len(seen) >= 75


# ---------------------------------------------------------------- what longer runs of seeds have found


@pytest.mark.parametrize("groups", ["batch", "sign"])
def test_half_a_matrix_counts_each_pair_twice(groups):
    """γ·log Σ e^{l/γ} of both orders of a pair is γ·log 2 above that of one."""
    rng = torch.Generator().manual_seed(0)
    rows, labels = torch.randn(8, 3, generator=rng, dtype=torch.float64), torch.arange(8) // 2
    over = nf.sets.KL(0.7, normalised=False)
    dense, tiled = (
        nf.RobustLoss(pair=nf.pairs.Hinge(), over=over, groups=groups, engine=engine)(rows, labels)
        for engine in ("dense", "tiled")
    )
    torch.testing.assert_close(tiled, dense)


@pytest.mark.parametrize("groups", ["batch", "sign", "balanced"])
def test_a_mass_that_rounding_lifts_above_the_whole(groups):
    """Weights that are no whole numbers, summed in float32: k may come out above what there is."""
    rng = torch.Generator().manual_seed(0)
    mine = nf.mining.DistanceWeighted(sample=False)
    for _ in range(10):
        rows, labels = torch.randn(9, 5, generator=rng), torch.arange(9) // 3
        dense, tiled = (
            nf.RobustLoss(pair=nf.pairs.Hinge(), over=nf.sets.TopK(20), groups=groups, filter=mine, engine=engine)
            for engine in ("dense", "tiled")
        )
        torch.testing.assert_close(tiled(rows, labels), dense(rows, labels))


@pytest.mark.parametrize("over", [nf.sets.Mean(), nf.sets.Worst(), nf.sets.KL(1.0), nf.sets.ChiSquare(1.0)], ids=str)
@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_what_only_top_k_can_balance_is_refused_on_every_engine(over, engine):
    with pytest.raises(ValueError, match=r"both sets must be TopK\.$"):
        nf.RobustLoss(pair=nf.pairs.Hinge(), over=over, groups="balanced", engine=engine)
