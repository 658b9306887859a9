"""Every public name of pytorch-metric-learning 2.9 is in nearfar.pml: ours, or PML's own object."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from pathlib import Path

import pytest
import pytorch_metric_learning

import nearfar.pml as ours
from nearfar.pml._theirs import MODULES, NAMES, WHOLE, is_ours

sys.path.append(str(Path(__file__).parent.parent / "scripts"))
import pml_names

PACKAGES = ("losses", "miners", "distances", "reducers", "regularizers", "samplers", "testers", "trainers", "datasets")


def public(module):
    """The names that PML's module offers: of a package what it imports from below, of a file what it defines."""
    for name, thing in vars(module).items():
        home = getattr(thing, "__module__", None) or ""
        inside = home.startswith("pytorch_metric_learning") if hasattr(module, "__path__") else home == module.__name__
        if inside and not name.startswith("_") and not inspect.ismodule(thing):
            yield name


def found_in_pml():
    utils = importlib.import_module("pytorch_metric_learning.utils")
    return *PACKAGES, *(f"utils.{each.name}" for each in pkgutil.iter_modules(utils.__path__))


def test_every_module_is_known():
    assert set(MODULES) == set(found_in_pml())
    below = {each.name for each in pkgutil.iter_modules(pytorch_metric_learning.__path__)}
    assert below == {*PACKAGES, "utils"} <= set(ours.__all__)


@pytest.mark.parametrize("part", MODULES)
def test_every_public_name_is_here(part):
    here, there = (importlib.import_module(f"{home}.{part}") for home in ("nearfar.pml", "pytorch_metric_learning"))
    names = sorted(public(there))
    assert part in WHOLE or sorted(NAMES[part].split()) == names
    assert set(names) <= set(dir(here))
    for name in names:
        assert is_ours(part, name) == (getattr(here, name) is not getattr(there, name))
        assert not is_ours(part, name) or getattr(here, name).__module__.startswith("nearfar.pml")


@pytest.mark.parametrize("name", [part.removeprefix("utils.") for part in MODULES if "." in part])
def test_modules_of_utils_in_both_ways_of_importing(name):
    namespace = {}
    exec(f"import nearfar.pml.utils.{name} as a\nfrom nearfar.pml.utils import {name} as b", namespace)
    assert namespace["a"] is namespace["b"]
    assert name in dir(ours.utils)


def test_what_is_set_on_a_module_of_theirs_counts_there():
    assert ours.utils.common_functions is importlib.import_module("pytorch_metric_learning.utils.common_functions")


def test_wrappers_in_one_place():
    names = [name for name in dir(ours.wrappers) if name[0].isupper()]
    assert "SelfSupervisedLoss" in names
    assert "DistributedLossWrapper" in names
    for name in names:
        assert getattr(ours.wrappers, name).__name__ == name


@pytest.mark.parametrize("module", ["losses", "utils", "wrappers", "utils.inference"])
def test_a_wrong_name_is_an_attribute_error(module):
    here = importlib.import_module(f"nearfar.pml.{module}")
    assert not hasattr(here, "NoSuchThing")
    with pytest.raises(AttributeError, match="no attribute 'NoSuchThing'"):
        _ = here.NoSuchThing
    with pytest.raises(AttributeError, match="did you mean 'ContrastiveLoss'"):
        _ = ours.losses.ContrastveLoss


def test_the_page_says_which_are_ours():
    page = pml_names.PAGE.read_text(encoding="utf-8")
    assert pml_names.shown(page) == pml_names.table(), "run python scripts/pml_names.py"
