"""Random losses on random batches: what one seed says to the package, and the same to the oracle of the algebra.

Everything is drawn from one seed, factor by factor. A factor is drawn as two: the package's object, and its name and
keywords for the oracle (tests/oracles/algebra.py). `refused` says whether the package must refuse the combination.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from fuzz_batches import Batch, draw_batch
from oracles import algebra

import nearfar as nf
from nearfar.groups._triplets import (
    AngularScore,
    Positive,
    Rule,
    SemiHardBand,
    Triplets,
    difference,
    nearest_difference,
)

P, S, M, K = nf.pairs, nf.sets, nf.miners, nf.links
Drawn = tuple[Any, tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Case:
    """One seed's loss and batch.

    `exact`: scores are exact, so that ties are ties in every engine and precision. `refused`: what the package must say
    instead of a value. `shared`: one pair loss serves both signs, and so does its threshold. `rounded`: the type that
    rows come in, half precision included; they are computed in `dtype`.
    """

    seed: int
    make: Callable[[str], nf.RobustLoss]
    product: algebra.Product
    batch: Batch
    dtype: torch.dtype
    rounded: torch.dtype
    tile: int
    exact: bool
    refused: str = ""
    shared: bool = False
    note: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        n, m = self.batch.A.shape
        size = f"{n} x {m} rows of {self.batch.rows.shape[1]}, {self.rounded} in {self.dtype}"
        lines = [f"seed {self.seed}: {size}, tile={self.tile}"]
        lines += [f"  {key}: {value}" for key, value in self.note.items()]
        return "\n".join([*lines, f"  {self.product}", f"  must be refused: {self.refused}" if self.refused else ""])


# ---------------------------------------------------------------- factors


def _number(rng: np.random.Generator, low: float, high: float) -> float:
    return round(float(rng.uniform(low, high)), 3)


def draw_pair(rng: np.random.Generator, unit: bool, exact: bool) -> Drawn:
    """A pair loss; `unit`: the scores are cosines; `exact`: equal scores must cost the same to the last bit.

    A processor takes exponentials of the last few numbers of a matrix by another routine than those of the others. And
    circle's cost of a positive pair at s = 1 is that of a negative pair at s = 0 on paper, but not in rounding.
    """
    kinds = ["hinge", "learnt", "squared", "linear", "score"]
    kind = rng.choice(kinds if exact else [*kinds, "smooth", "logistic", "circle", "arc"])
    margin, threshold = _number(rng, 0.01, 0.6), _number(rng, -0.5, 0.8)
    scale = _number(rng, 0.5, 6)
    if kind in ("hinge", "smooth", "learnt"):
        smooth = _number(rng, 0.05, 0.5) if kind == "smooth" else 0.0
        loss: Any = P.Hinge(margin, threshold, smooth=smooth, learn=kind == "learnt")
        return loss, ("hinge", {"margin": margin, "threshold": threshold, "smooth": smooth})
    if kind == "logistic":
        more = {"slope_positive": scale, "slope_negative": _number(rng, 1, 12)}
        return P.Logistic(threshold, **more), ("logistic", {"threshold": threshold, **more})
    if kind == "squared":
        power = float(rng.choice([1, 2] if exact else [1, 1.5, 2]))
        options = {"pos_margin": margin, "neg_margin": _number(rng, 0.4, 1.5), "power": power}
        return P.Squared(**options), ("squared", options)
    if kind == "linear":
        options = {"threshold": threshold, "margin": margin, "scale": scale}
        return P.Linear(**options), ("linear", options)
    if kind == "circle":
        return P.CircleScore(margin, scale), ("circle", {"margin": margin, "scale": scale})
    if kind == "arc" and unit:
        return P.AngularMargin(margin, scale), ("arc", {"margin": margin, "scale": scale})
    return P.Identity(scale), ("score", {"scale": scale})


def draw_set(rng: np.random.Generator) -> Drawn:
    """An uncertainty set."""
    options: dict[str, Any] = {
        "zero": "drop" if rng.random() < 0.25 else "keep",
        "zero_member": bool(rng.random() < 0.2),
    }
    kind = rng.choice(["mean", "worst", "topk", "fraction", "kl", "kl", "kl_ball", "chi_square", "expected"])
    if kind == "mean":
        return S.Mean(**options), ("mean", options)
    if kind == "worst":
        return S.Worst(**options), ("worst", options)
    if kind == "topk":
        k = float(rng.choice([0.5, 1, 1.7, 3, 7.3, 20, 400]))
        return S.TopK(k, **options), ("topk", options | {"k": k})
    if kind == "fraction":
        share = float(rng.choice([0.03, 0.27, 0.61, 1.0]))
        return S.TopK(fraction=share, **options), ("topk", options | {"fraction": share})
    if kind == "kl":
        more = {"gamma": _number(rng, 0.05, 1.5), "normalized": bool(rng.random() < 0.6)}
        return S.KL(**more, **options), ("kl", options | more)
    if kind == "kl_ball":
        rho = float(rng.choice([0.0, 0.05, 0.4, 1.5, 30.0]))
        return S.KLBall(rho, **options), ("kl_ball", options | {"rho": rho})
    if kind == "chi_square":
        rho = float(rng.choice([0.0, 0.3, 2.0, 40.0, 1e6]))
        return S.ChiSquare(rho, **options), ("chi_square", options | {"rho": rho})
    gamma = _number(rng, 0.1, 1.5)
    return S.DetachedWeights(S.KL(gamma, **options)), ("expected", {"of": ("kl", options | {"gamma": gamma})})


def draw_miner(rng: np.random.Generator) -> Drawn | tuple[None, None]:
    """A miner, or none."""
    if rng.random() < 0.6:
        return None, None
    kind = str(rng.choice(["multi_similarity", "hard", "semi_hard", "balanced_hard", "distance_weighted"]))
    if kind == "multi_similarity":
        options = {"epsilon": _number(rng, 0.01, 0.4)}
        return M.MultiSimilarity(**options), (kind, options)
    if kind == "semi_hard":
        options = {"threshold": _number(rng, 0, 0.9), "margin": _number(rng, 0.1, 1.5)}
        return M.SemiHard(**options), (kind, options)
    if kind == "distance_weighted":
        options = {"cutoff": _number(rng, 0.2, 0.6), "upper": _number(rng, 1.2, 1.9)}
        return M.DistanceWeighted(**options, sample=False), (kind, options)
    return (M.Hard() if kind == "hard" else M.BalancedHard()), (kind, {})


def draw_link(rng: np.random.Generator) -> Drawn:
    """How the two sides of an anchor join."""
    margin, smooth = _number(rng, -0.2, 0.5), _number(rng, 0.1, 0.6)
    both = bool(rng.random() < 0.5)
    return (
        (K.Add(both=both), ("add", {"both": both})),
        (K.Add(apart=True), ("add", {"apart": True})),
        (K.HingeLink(margin, both=both), ("hinge", {"margin": margin, "both": both})),
        (K.HingeLink(margin, smooth), ("hinge", {"margin": margin, "smooth": smooth})),
        (K.SoftplusLink(), ("softplus", {})),
        (K.PerPositive(), ("per_positive", {})),
        (K.LiftedLink(), ("lifted", {})),
    )[int(rng.integers(7))]


def draw_rule(rng: np.random.Generator) -> tuple[Rule, dict[str, Any]]:
    """What makes a triplet count."""
    kind = rng.choice(["plain", "plain", "band", "balanced", "swap", "angular"])
    if kind == "band":
        margin = _number(rng, 0.2, 1.0)
        return Rule(keep=SemiHardBand(margin)), {"band": margin}
    if kind == "swap":
        return Rule(nearest_difference, wants_reference=True), {"compare": "swap"}
    if kind == "angular":
        tan2 = _number(rng, 0.1, 1.0)
        return Rule(AngularScore(tan2), wants_reference=True), {"compare": "angular", "tan2": tan2}
    return Rule(difference, balanced=kind == "balanced"), {"balanced": kind == "balanced"}


# ---------------------------------------------------------------- the whole

ANCHORED = ("anchor", "anchor_sign", "positive")


def _similarity(rng: np.random.Generator, rows: str) -> tuple[Any, str, bool]:
    if rows == "axes":
        kind = rng.choice(["cosine", "neg_euclidean", "neg_squared_euclidean", "dot"])
    elif rows == "lattice":
        kind = rng.choice(["dot", "neg_squared_euclidean"])
    else:
        kind = rng.choice(["cosine", "cosine", "neg_euclidean", "neg_euclidean", "neg_squared_euclidean", "dot"])
    unit = kind == "cosine" or (rows != "lattice" and bool(rng.random() < (0.2 if kind == "dot" else 0.75)))
    makers = {
        "dot": nf.similarity.Dot,
        "neg_euclidean": nf.similarity.NegEuclidean,
        "neg_squared_euclidean": nf.similarity.NegSquaredEuclidean,
    }
    return (nf.similarity.Cosine() if kind == "cosine" else makers[kind](normalize=unit)), str(kind), unit


def _sides(
    rng: np.random.Generator, groups: str, kind: str, unit: bool, exact: bool
) -> tuple[Drawn, Drawn, Drawn, Drawn]:
    """Pair losses and sets, of the positive and of the negative side."""
    if groups in ("sign", "anchor_sign") and kind == "neg_euclidean" and rng.random() < 0.15:
        a, b = _number(rng, 1, 6), _number(rng, -12, -1)
        line = (P.Linear(), ("linear", {}))
        return (
            line,
            line,
            *((S.PowerWeights(s, x), ("power", {"shift": s, "power": x})) for s, x in ((1.0, a), (-1.0, b))),
        )
    pair, over = draw_pair(rng, unit, exact), draw_set(rng)
    other, under = (draw_pair(rng, unit, exact), draw_set(rng)) if rng.random() < 0.4 else (pair, over)
    if groups == "balanced" and rng.random() < 0.85:
        k, share = _number(rng, 0.6, 30), _number(rng, 0.1, 1)
        over = (S.TopK(k), ("topk", {"k": k}))
        under = over if rng.random() < 0.6 else (S.TopK(fraction=share), ("topk", {"fraction": share}))
    return pair, other, over, under


def _refused(product: algebra.Product, relation: str) -> str:
    """What the package must say (one of these), or nothing."""
    reasons = {
        "needs one group per anchor": product.reduction != "mean" and product.groups not in ANCHORED,
        "both must be TopK": product.groups == "balanced"
        and {product.over_positive[0], product.over_negative[0]} != {"topk"},
        "raw rows have no distance": (product.similarity, product.normalize) == ("dot", False)
        and product.miner is not None
        and product.miner[0] == "distance_weighted",
        "two rows that are no representatives": product.rule.get("compare") in ("swap", "angular")
        and relation.startswith(("representatives", "among")),
    }
    return "|".join(reason for reason, holds in reasons.items() if holds)


def _sizes(rng: np.random.Generator, kind: str, large: bool, kernels: bool) -> tuple[int, int]:
    """The number of rows and their width; for kernels some are more than a block of 16 in both."""
    if large:
        return int(rng.integers(257, 331)), int(rng.integers(12, 17))
    most, wide = (37, int(rng.choice([7, 7, 21]))) if kernels else (21, 7)
    return int(rng.integers(1, most)), int(rng.integers(3 if kind == "neg_euclidean" else 2, wide))


def _precision(rng: np.random.Generator, large: bool, kernels: bool) -> tuple[torch.dtype, bool]:
    """What is computed in, and whether rows may come in half precision."""
    wide = rng.random() < 0.7 or large
    if kernels:  # they take float32; Triton's interpreter multiplies the bits of bfloat16, so that only float16 is left
        return torch.float32, False
    return (torch.float64, False) if wide else (torch.float32, True)


def drawn(seed: int, attempt: int = 0, *, large: bool = False, turn: int = 0) -> Case:
    """The case of a seed; another attempt has other rows, labels and weights, another turn other factors too.

    `large`: hundreds of rows, so many that the shortcuts of the tiled engine are taken; too many for the oracle. From
    `turn` 1 on, rows are such that the kernels of the fused engine take them.
    """
    rng, kernels = np.random.default_rng([seed, turn] if turn else seed), turn > 0
    dtype, halves = _precision(rng, large, kernels)
    rows = str(rng.choice(["random", "axes", "lattice"], p=[0.8, 0.1, 0.1]))
    similarity, kind, unit = _similarity(rng, rows)
    groups = str(
        rng.choice(["batch", "sign", "balanced", "anchor", "anchor_sign", "anchor_sign", "positive", "triplets"])
    )
    exact = rows != "random"
    pair, other, over, under = _sides(rng, groups, kind, unit, exact)
    link, filter_ = draw_link(rng), draw_miner(rng)
    rule, told = draw_rule(rng)
    everyone = bool(rng.random() < 0.2)
    anchored = groups in ANCHORED or rng.random() < 0.08
    # where sums cancel exactly on paper, "above zero" is up to rounding
    last = "none" if exact and {over[1][0], under[1][0]} != {"worst"} else "nonzero"
    reduction = str(rng.choice(["mean", "mean", "sum", "none", last])) if anchored else "mean"
    n, dim = _sizes(rng, kind, large, kernels)
    tile = int(rng.integers(1, n + 4))
    eps = torch.finfo(dtype).eps
    least = torch.finfo(dtype).smallest_normal * eps
    product = algebra.Product(
        kind, unit, pair[1], other[1], over[1], under[1], groups, link[1], filter_[1], reduction, everyone,
        told if groups in ("positive", "triplets") else {}, least, 30 * eps,
    )  # fmt: skip
    rounded = dtype
    if kernels and rng.random() < 0.1:
        rounded = torch.float16
    elif halves and rng.random() < 0.4:
        rounded = (torch.bfloat16, torch.float16)[int(rng.integers(2))]
    batch, relation = draw_batch(
        np.random.default_rng([seed, attempt, turn] if turn else [seed, attempt]), n, dim, rows, rounded
    )
    grouping: Any = {"positive": Positive(rule), "triplets": Triplets(rule)}.get(groups, groups)

    def make(engine: str) -> nf.RobustLoss:
        loss = nf.RobustLoss(
            pair=(pair[0], other[0]), over=(over[0], under[0]), groups=grouping, link=link[0], miner=filter_[0],
            reduction=reduction, similarity=similarity, members="all" if everyone else "negative", engine=engine,
        )  # fmt: skip
        loss.tile = tile
        return loss.to(dtype)

    note = {"rows": rows, "relation": relation, "attempt": attempt, "turn": turn}
    refused, shared = _refused(product, relation), pair is other
    return Case(seed, make, product, batch, dtype, rounded, tile, exact, refused, shared, note)


def perturbed(case: Case, by: float, time: int = 0) -> Case:
    """The same case, its rows moved by a relative `by`, another way each time."""
    rng = np.random.default_rng([case.seed, 99 + time])
    batch = case.batch

    def moved(x: np.ndarray) -> np.ndarray:
        return x * (1 + by * rng.choice([-1.0, 1.0], size=x.shape))

    rows = moved(batch.rows)
    references = None if batch.references is None else moved(batch.references)
    if batch.place is not None:
        references = rows[batch.place]
    return replace(case, batch=replace(batch, rows=rows, references=references))
