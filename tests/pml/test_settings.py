"""`nearfar.pml` heeds what is changed after construction: settings, parts, methods and hooks, as PML does."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
from pml_cases import CLASSES, LOSSES, MINERS, batch, check_same, make, mined, outcome, pairs, slopes
from pytorch_metric_learning import distances, reducers, regularizers
from pytorch_metric_learning import losses as their_losses
from pytorch_metric_learning import miners as their_miners
from torch import nn

from nearfar.pml import losses, miners

BOTH = ((losses, miners), (their_losses, their_miners))
KINDS = pytest.mark.parametrize("name", [*LOSSES, *CLASSES, *MINERS])
GIVEN = batch(n=14, m=16, classes=4)
OTHERS = {
    "triplets_per_anchor": (3,),
    "type_of_triplets": ("hard", "semihard", "easy"),
    "pos_strategy": ("easy", "semihard"),
    "neg_strategy": ("easy", "semihard"),
    "allowed_pos_range": ((0.2, 1.2),),
    "allowed_neg_range": ((0.9, 1.2),),
    "pos_margin": (1.0,),
    "beta": (torch.tensor([0.7]), torch.linspace(0.5, 1, 6), 0.7),
    "soft_plus": (nn.Softplus(beta=2),),
    "distance": (
        distances.CosineSimilarity(),
        distances.LpDistance(power=2),
        distances.LpDistance(p=1),
        distances.DotProductSimilarity(),
    ),
    "reducer": (
        reducers.SumReducer(),
        reducers.MeanReducer(),
        reducers.ThresholdReducer(low=0.3),
        reducers.AvgNonZeroReducer(collect_stats=True),
        reducers.MultipleReducers({"loss": reducers.SumReducer(), "margin_loss": reducers.MeanReducer()}),
    ),
    "embedding_regularizer": (regularizers.LpRegularizer(),),
    "collect_stats": (True,),
    "training": (False,),
}
"""Values to set where a larger number is none."""


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch):
    monkeypatch.setattr(miners.TripletMarginMiner, "least", 0)
    for name in LOSSES:
        monkeypatch.setattr(getattr(losses, name), "least", (0, 0))


def made(name, **settings):
    """Ours and PML's."""
    return [make(getattr(each, name), **settings) for library in BOTH for each in library if hasattr(each, name)]


def seen(part):
    """What a loss or a miner gives for a batch, with and without an index tuple."""
    torch.manual_seed(0)
    if isinstance(part, their_miners.BaseMiner):
        return outcome(lambda: pairs(part(GIVEN["rows"], GIVEN["labels"])))
    listed = mined("TripletMarginMiner", GIVEN)
    return slopes(part.double(), GIVEN), slopes(part, GIVEN, listed)


def check(found, wanted, about):
    """Index tuples or errors are equal; values and gradients within rounding."""
    if isinstance(wanted, tuple):
        for one, other in zip(found, wanted, strict=True):
            check_same(one, other, about)
    else:
        assert found == wanted, about


def attributes(part):
    """The attributes of a loss or a miner that can be set: numbers, words, switches and parts."""
    arguments = [p for kind in type(part).__mro__ for p in inspect.signature(kind.__init__).parameters]
    documented = {name for name in arguments if hasattr(part, name)}
    return sorted({*documented, *(name for name in vars(part) if name[0] != "_"), "distance", "reducer"} & {*dir(part)})


def values(name, held):
    """Other values of an attribute."""
    if name in OTHERS:
        return OTHERS[name]
    if isinstance(held, bool):
        return (not held,)
    return (1.5 * held + 0.1,) if isinstance(held, int | float) else ()


@KINDS
def test_every_attribute_can_be_set_after_construction(name):
    effective = set()
    for attribute in attributes(made(name)[0]):
        for value in values(attribute, getattr(made(name)[0], attribute)):
            mine, other = made(name)
            first = seen(mine), seen(other)
            check(*first, name)
            setattr(mine, attribute, value), setattr(other, attribute, value)
            found, wanted = seen(mine), seen(other)
            check(found, wanted, (name, attribute, value))
            if str(wanted) != str(first[1]):
                effective.add(attribute)
    told = {*getattr(type(mine), "settings", ("margin", "scale"))} - {
        "nu",
        "learn_beta",
        "boundaries",
        "boundary",
        "curve",
        "triplets_per_anchor",
    }
    assert told <= effective, f"{name}: setting {told - effective} changes nothing"


@KINDS
def test_every_attribute_of_a_part_can_be_set_after_construction(name):
    for kind in ("distance", "reducer"):
        part = getattr(made(name)[0], kind, None)
        for attribute in [] if part is None else attributes(part):
            for value in values(attribute, getattr(part, attribute)):
                mine, other = made(name)
                check(seen(mine), seen(other), name)
                for each in (mine, other):
                    setattr(getattr(each, kind), attribute, value)
                check(seen(mine), seen(other), (name, kind, attribute, value))


def methods(kind):
    """The methods that a class has from PML, and `forward`."""
    for name in dir(kind):
        homes = [base for base in kind.__mro__ if name in vars(base)]
        method = inspect.getattr_static(kind, name)
        if homes[0].__module__.startswith("pytorch_metric_learning") and inspect.isfunction(method):
            yield name


def counted(method, calls):
    """A method that does the same and is counted."""

    def run(*args, **kwargs):
        calls.append(1)
        return method(*args, **kwargs)

    return run


@KINDS
def test_every_method_can_be_overridden(name):
    """In a subclass, and on the object: PML's calls, in number and in result."""
    ran = 0
    for method in {*methods(getattr(their_losses, name, None) or getattr(their_miners, name)), "forward"}:
        for on_object in (False, True):
            told = []
            for original in (type(part) for part in made(name)):
                calls: list[int] = []
                if on_object:
                    part = make(original)
                    seen(part)
                    setattr(part, method, counted(getattr(part, method), calls))
                else:
                    part = make(type("Mine", (original,), {method: counted(getattr(original, method), calls)}))
                calls.clear()
                told.append((seen(part), len(calls)))
            (found, here), (wanted, there) = told
            assert here == there, (name, method, on_object)
            check(found, wanted, (name, method))
            ran += there
    assert ran > 4


@KINDS
def test_a_method_of_pml_s_own_class_can_be_replaced(name, monkeypatch):
    """By any function, before and after the first call: PML's calls, in number and in result."""
    home = next(
        kind for kind in type(made(name)[1]).__mro__ if {"_compute_loss", "compute_loss", "mine"} & {*vars(kind)}
    )
    method = next(each for each in ("_compute_loss", "compute_loss", "mine") if each in vars(home))
    parts, calls = made(name), []
    first_seen = [seen(part) for part in parts]
    check(*first_seen, name)
    monkeypatch.setattr(home, method, functools.wraps(vars(home)[method])(counted(vars(home)[method], calls)))
    for one in (*parts, *made(name)):
        calls.clear(), one.zero_grad()
        check(seen(one), first_seen[1], name)
        assert calls, (name, type(one))
    monkeypatch.undo()
    assert not hasattr(parts[0], "recipe") or parts[0].robust, "PML goes on after its method was restored"


def first(part):
    """A distance or a reducer, or the first of several."""
    return next(iter(part.reducers.values())) if hasattr(part, "reducers") else part


@KINDS
def test_every_method_of_a_part_can_be_overridden(name):
    for kind in ("distance", "reducer"):
        part = getattr(made(name)[0], kind, None)
        if part is None:
            continue
        part = first(part)
        for method in {*methods(type(part)), "forward"}:
            for on_object in (False, True):
                calls, told = [], []
                sub = type("Mine", (type(part),), {method: counted(getattr(type(part), method), calls)})
                for each in made(name, **({} if on_object else {kind: sub()})):
                    if on_object:
                        seen(each)
                        inner = first(getattr(each, kind))
                        setattr(inner, method, counted(getattr(inner, method), calls))
                    calls.clear()
                    told.append((seen(each), len(calls)))
                (found, here), (wanted, there) = told
                if name not in MINERS or there == 0:
                    assert here == there, (name, kind, method, on_object)
                else:
                    assert here > 0, (name, kind, method, on_object)
                check(found, wanted, (name, kind, method))


@KINDS
def test_hooks_run(name):
    ways = ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook")
    for way in ways[: 2 if name in MINERS else 3]:
        for place in ("loss", "distance", "reducer"):
            told = []
            for each in made(name):
                part = each if place == "loss" else getattr(each, place, None)
                if part is None:
                    continue
                seen(each)
                calls: list[int] = []
                handle = getattr(part, way)(lambda *_, calls=calls: calls.append(1))
                found = seen(each)
                handle.remove()
                told.append((found, len(calls)))
            if told:
                (found, here), (wanted, there) = told
                assert here == there, (name, way, place)
                assert there > 0 or (way == ways[2] and place == "reducer")  # it gets no tensor, but a dictionary
                check(found, wanted, (name, way, place))


@pytest.mark.parametrize("name", [*LOSSES, *CLASSES])
def test_statistics_are_collected(name):
    for settings in ({"collect_stats": True}, {"distance": distances.CosineSimilarity(collect_stats=True)}):
        mine, other = made(name, **settings)
        check(seen(mine), seen(other), name)
        told = [{k: v for k, v in vars(part.distance).items() if "norm" in k} for part in (mine, other)]
        assert told[0] == told[1]
