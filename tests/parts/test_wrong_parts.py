"""Constructors refuse a part of the wrong kind in one sentence that says what is allowed and what came."""

from __future__ import annotations

import inspect

import pytest
from table import PRODUCTS

import nearfar as nf
from nearfar.groups._triplets import Triplets

L, S, P, M = nf.losses, nf.sets, nf.pairs, nf.miners
NEEDED = {"k": 5, "top": 2, "wrong": 0.2, "rho": 1.0, "classes": 4, "dim": 3}
WRONG = {
    "pair": ("logistic", P.Hinge, M.Hard(), S.Mean(), 0, "", lambda s, sign: s, (P.Hinge(), "hinge")),
    "over": ("kl", S.KL, P.Hinge(), 0.1, None, (S.KL(), S.KL)),
    "groups": (nf.groups.Batch, 3, None, S.Mean()),
    "similarity": ("cosine", nf.similarity.Cosine, P.Hinge(), False),
    "miner": ("hard", M.Hard, P.Hinge()),
    "link": ("add", nf.links.Add, P.Hinge()),
}
RECIPES = [getattr(L, name) for name in PRODUCTS]


def given(make):
    known = inspect.signature(make).parameters
    return {key: value for key, value in NEEDED.items() if key in known and (key != "k" or make is not L.DroKL)}


@pytest.mark.parametrize("make", [nf.RobustLoss, *RECIPES], ids=lambda make: make.__name__)
def test_a_part_of_the_wrong_kind_is_refused(make):
    more = given(make) if make is not nf.RobustLoss else {"pair": P.Hinge(), "over": S.Mean()}
    names = [name for name in WRONG if name in inspect.signature(make).parameters]
    assert names
    for name in names:
        for value in WRONG[name]:
            with pytest.raises(TypeError) as error:
                make(**(more | {name: value}))
            said = str(error.value)
            assert f": {name}" in said
            assert " must be a " in said
            assert "but came as " in said
            assert said.endswith(".")
            assert "\n" not in said


def test_what_came_is_named():
    def said(**more):
        with pytest.raises(TypeError) as error:
            L.DroKL(**more)
        return str(error.value)

    assert said(pair="logistic") == "DroKL: pair must be a PairLoss, such as nf.pairs.Hinge(), but came as 'logistic'."
    with pytest.raises(TypeError, match=r"^MultiSimilarity: miner .* nf\.miners\.Hard\(\) or a number, but"):
        L.MultiSimilarity(miner="hard")
    assert said(pair=P.Hinge) == (
        "DroKL: pair must be a PairLoss, such as nf.pairs.Hinge(), but came as the class Hinge, which must be called "
        "first."
    )
    assert said(pair=M.Hard()) == "DroKL: pair must be a PairLoss, such as nf.pairs.Hinge(), but came as a Hard."


def test_two_parts_are_two():
    with pytest.raises(ValueError, match=r"pair may be two, for positive and negative pairs, but 3 came\."):
        nf.RobustLoss(pair=(P.Hinge(),) * 3, over=S.Mean())
    assert nf.RobustLoss(pair=[P.Hinge(), P.Linear()], over=S.Mean()).pair_negative.scale == 1


def test_parts_inside_parts_are_checked_too():
    for make in (lambda: S.DetachedWeights("kl"), lambda: S.Sampled(S.KL, 5), lambda: Triplets("all")):
        with pytest.raises(TypeError, match=r"must be a .*, but came as "):
            make()
