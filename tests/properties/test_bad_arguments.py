"""Constructors: a wrong hyper-parameter is one sentence that names it, and a misspelt word names the nearest."""

from __future__ import annotations

import inspect

import pytest
import torch
from table import PRODUCTS

import nearfar as nf

L, S, P, M = nf.losses, nf.sets, nf.pairs, nf.miners


@pytest.mark.parametrize("name", PRODUCTS)
def test_an_unknown_keyword_and_a_nameless_hyper_parameter_are_refused(name):
    kind = getattr(L, name)
    proxies = "classes" in inspect.signature(kind).parameters
    first = (3, 4) if proxies else ()
    with pytest.raises(TypeError, match=f"{name}: there is no marginn=; "):
        kind(*first, marginn=0.3)
    with pytest.raises(TypeError, match="positional argument"):
        kind(*first, 0.3)
    named = [p for p in inspect.signature(kind).parameters.values() if p.name not in ("classes", "dim")]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in named)
    assert {"pair", "engine"} <= {p.name for p in named}


def product(**more):
    return nf.RobustLoss(**({"pair": P.Hinge(), "over": S.Mean()} | more))


MISSPELT = [
    (lambda: product(groups="ancor_sign"), "RobustLoss: groups", "anchor_sign"),
    (lambda: product(groups="anchor", reduction="meen"), "RobustLoss: reduction", "mean"),
    (lambda: product(members="negativ"), "RobustLoss: members", "negative"),
    (lambda: product(engine="dens"), "RobustLoss: engine", "dense"),
    (lambda: L.DroKL(engine="atuo"), "DroKL: engine", "auto"),
    (lambda: L.DroKLGrouped(reduction="summ"), "DroKLGrouped: reduction", "sum"),
    (lambda: L.Contrastive(reduction="non-zero"), "Contrastive: reduction", "nonzero"),
    (lambda: L.Margin(reduction="non_zero"), "Margin: reduction", "nonzero"),
    (lambda: L.Triplet(mining="semi-hard"), "Triplet: mining", "semihard"),
    (lambda: L.Triplet(reduction="nonzeros"), "Triplet: reduction", "nonzero"),
    (lambda: L.HAP2S(weights="polinomial"), "HAP2S: weights", "polynomial"),
    (lambda: S.KL(zero="dropp"), "KL: zero", "drop"),
    (lambda: S.TopK(3, zero="keeep"), "TopK: zero", "keep"),
    (lambda: S.Trimmed(1, 3, zero="keeep"), "Trimmed: zero", "keep"),
]


@pytest.mark.parametrize(("make", "what", "meant"), MISSPELT, ids=[what for _, what, _ in MISSPELT])
def test_a_misspelt_word_names_the_nearest(make, what, meant):
    with pytest.raises(ValueError, match=rf"{what} must be one of .*; did you mean '{meant}'\?"):
        make()


def test_a_word_far_from_all_others_is_answered_with_the_list():
    with pytest.raises(
        ValueError, match=r"mining must be one of 'all', 'semihard', 'balanced', 'hard', 'hardest', but came as 7\."
    ):
        L.Triplet(mining=7)


@pytest.mark.parametrize("name", PRODUCTS)
def test_every_loss_takes_every_engine(name):
    first = (3, 4) if "classes" in inspect.signature(getattr(L, name)).parameters else ()
    more = {
        "DroTopK": {"k": 3},
        "DroTopKPN": {"k": 3},
        "DroTrimmed": {"top": 2, "k": 3},
        "DroTrimmedPN": {"wrong": 0.2, "k": 3},
        "DroChiSquare": {"rho": 1.0},
    }.get(name, {})
    for engine in ("dense", "tiled", "auto", "fused"):
        getattr(L, name)(*first, engine=engine, **more)


NUMBERS = [
    (S.KL, "gamma", False),
    (S.KLBall, "rho", True),
    (S.ChiSquare, "rho", True),
    (S.TopK, "k", False),
    (S.CalibratedKL, "gamma", False),
    (P.Hinge, "smooth", True),
    (P.Logistic, "slope_positive", False),
    (P.Logistic, "slope_negative", False),
    (P.Squared, "power", False),
    (P.Linear, "scale", False),
    (P.Identity, "scale", False),
    (P.CircleScore, "scale", False),
    (P.AngularMargin, "scale", False),
    (M.DistanceWeighted, "cutoff", False),
    (M.DistanceWeighted, "upper", False),
    (L.NTXent, "temperature", False),
    (L.SupCon, "temperature", False),
    (L.NPair, "l2", True),
    (L.Triplet, "smooth", True),
]


@pytest.mark.parametrize(
    ("kind", "name", "zero"), NUMBERS, ids=[f"{kind.__name__}-{name}" for kind, name, _ in NUMBERS]
)
def test_a_number_out_of_range_is_named(kind, name, zero):
    bad = [
        -1,
        float("nan"),
        float("inf"),
        -float("inf"),
        "1",
        True,
        False if "effective" in inspect.signature(kind).parameters else None,
    ]
    for value in [*bad, *([] if zero else [0, 0.0])]:
        with pytest.raises(ValueError, match=rf"{kind.__name__}: {name} must be a number (above zero|zero or more),"):
            kind(**{name: value})
    kind(**{name: 0.7})
    if zero:
        kind(**{name: 0})


ELSEWHERE = [
    (lambda: S.TopK(), r"TopK: give k, fraction or effective, exactly one of them"),
    (lambda: S.TopK(3, 0.5), r"TopK: give k, fraction or effective, exactly one of them"),
    (lambda: L.DroTopK(k=4, fraction=0.1), r"TopK: give k, fraction or effective, exactly one of them"),
    (lambda: S.TopK(fraction=0.0), r"TopK: fraction must lie in \(0, 1\]"),
    (lambda: S.TopK(fraction=1.01), r"TopK: fraction must lie in \(0, 1\]"),
    (lambda: S.TopK(fraction=float("nan")), r"TopK: fraction must lie in \(0, 1\]"),
    (lambda: L.Angular(degrees=90), r"Angular: degrees must lie between 0 and 90"),
    (lambda: L.Angular(degrees=0), r"Angular: degrees must lie between 0 and 90"),
    (lambda: L.Triplet(mining="hard", swap=True), r"Triplet: swap compares triplets"),
    (lambda: product(reduction="sum"), r"RobustLoss: reduction='sum' needs one group per anchor, but groups are Batch"),
    (lambda: L.ProxyNCA(3, 4, scale=0), r"scale must be a number above zero"),
    (lambda: L.ProxyAnchor(3, 4, scale=-1), r"scale must be a number above zero"),
    (lambda: L.ArcFace(3, 4, scale=0), r"scale must be a number above zero"),
    (lambda: L.MultiSimilarity(alpha=-2), r"must be a number above zero"),
    (lambda: L.MultiSimilarity(alpha=0), r"must be a number above zero"),
    (lambda: L.MultiSimilarity(beta=0), r"must be a number above zero"),
    (lambda: L.DroTopKPN(k=-3), r"k must be a number above zero, but came as -3"),
    (lambda: S.Sampled(S.KL(), 2.5), r"Sampled: samples must be a whole number"),
    (lambda: S.Sampled(S.KL(), 0), r"Sampled: samples must be a"),
    (lambda: S.CalibratedKL(0.1, 2.5), r"CalibratedKL: keep must be a whole number"),
    (lambda: S.CalibratedKL(0.1, 0), r"CalibratedKL: keep must be a"),
    (lambda: L.DroKL(samples=0), r"samples must be a"),
]


@pytest.mark.parametrize(("make", "sentence"), ELSEWHERE)
def test_other_wrong_arguments_are_named(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_balanced_groups_need_top_k():
    with pytest.raises(ValueError, match='groups="balanced" compares how much each side takes, so both must be TopK'):
        product(groups="balanced")(torch.eye(3), torch.tensor([0, 0, 1]))


def test_a_raw_dot_product_has_no_distance():
    loss = product(similarity=nf.similarity.Dot(), miner=M.DistanceWeighted())
    with pytest.raises(ValueError, match="Dot: raw rows have no distance"):
        loss(torch.eye(3), torch.tensor([0, 0, 1]))


def test_margin_without_a_hinge_has_no_threshold():
    assert L.Margin(pair=P.Squared()).beta is None
    assert L.Margin(learn=False, beta=0.9).beta == 0.9
