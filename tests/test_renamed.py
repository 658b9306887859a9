"""Old names: each is refused in one sentence that holds the new one, and none works."""

from __future__ import annotations

import inspect

import pytest
import torch

import nearfar as nf
from nearfar._utils import renamed
from nearfar.runs import parse
from nearfar.runs.config import flat, to_tree
from nearfar.runs.parts import check


@pytest.mark.parametrize("old", renamed.KEYS)
def test_a_key_names_its_new_one(old):
    *section, key = old.split(".")
    tree = {section[0]: {key: 1}} if section else {key: {}}
    with pytest.raises(ValueError, match=rf"^config: {old} is now {renamed.KEYS[old]}\.$"):
        parse(tree)


def test_new_keys_exist():
    known = flat(to_tree(parse({})))
    for new in renamed.KEYS.values():
        assert any(name == new or name.startswith(f"{new}.") for name in known), new


@pytest.mark.parametrize("old", renamed.VALUES)
def test_a_value_names_its_new_one(old):
    (section, key), new = old[0].split("."), renamed.VALUES[old]
    with pytest.raises(ValueError, match=f"^config: {old[0]} '{old[1]}' is now '{new}'"):
        parse({section: {key: old[1]}})
    assert parse({section: {key: new}})


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: nf.losses.Triplet(filter=None), "Triplet: filter= is now miner=."),
        (lambda: nf.losses.Margin(threshold=1.0), "Margin: threshold= is now beta=."),
        (lambda: nf.sets.KL(1.0, atom=True), "KL: atom= is now zero_member=."),
        (lambda: nf.sets.KL(1.0, normalised=True), "KL: normalised= is now normalized=."),
        (lambda: nf.pairs.Logistic(slope_alike=1.0), "Logistic: slope_alike= is now slope_positive=."),
        (lambda: nf.pairs.Logistic(slope_unlike=1.0), "Logistic: slope_unlike= is now slope_negative=."),
        (lambda: nf.models.build("small", width=8), "build: width= is now embedding_dim=."),
        (
            lambda: nf.batches.violations(torch.eye(2), torch.arange(2), near=0.5, min_negative_distance=1.0),
            "violations: near= is now max_positive_distance=.",
        ),
        (lambda: nf.models.build("small", neck=True), "build: neck= is now bn_neck=."),
        (lambda: nf.models.build("small", normalise=True), "build: normalise= is now normalize=."),
        (
            lambda: nf.Relation.from_labels(torch.arange(2), leading=True),
            "Relation.from_labels: leading= is now reference_starts_with_batch=.",
        ),
        (
            lambda: nf.Relation.from_labels(torch.arange(2), leadng=True),
            "Relation.from_labels: there is no keyword leadng; see help(Relation.from_labels).",
        ),
    ],
)
def test_a_keyword_names_its_new_one(make, says):
    with pytest.raises(TypeError) as error:
        make()
    assert str(error.value) == says


def test_a_keyword_that_never_was_is_left_to_python():
    with pytest.raises(TypeError, match="unexpected keyword argument 'fliter'"):
        nf.losses.Triplet(fliter=None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'filter'"):
        nf.pairs.Hinge(filter=None)


def test_constructors_keep_their_signatures():
    assert "miner" in inspect.signature(nf.losses.Triplet).parameters
    assert "embedding_dim" in inspect.signature(nf.models.build).parameters
    assert nf.losses.MultiSimilarity()(torch.eye(4), torch.tensor([0, 0, 1, 1])) >= 0


@pytest.mark.parametrize("old", renamed.NAMES)
def test_a_name_names_its_new_one(old):
    module, _, name = old.rpartition(".")
    here = nf if module == "nearfar" else getattr(nf, module.removeprefix("nearfar."))
    with pytest.raises(AttributeError, match=rf"^{old} is now {renamed.NAMES[old]}\.$"):
        getattr(here, name)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = here.nonsense
    new = renamed.NAMES[old].removeprefix("nearfar.").split(".")
    found = nf
    for step in new:
        found = getattr(found, step)


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"batches": {"name": "PerClass"}}, "config: batches.name PerClass is now MPerClass."),
        ({"loss": {"name": "Triplet", "filter": "Hard"}}, "config: loss.filter is now loss.miner."),
        ({"loss": {"name": "Margin", "threshold": 1.0}}, "config: loss.threshold is now loss.beta."),
        ({"loss": {"name": "DroKL", "pair": {"name": "Score"}}}, "config: loss.pair.name Score is now Identity."),
        (
            {"loss": {"name": "DroKL", "pair": {"name": "Logistic", "slope_alike": 1}}},
            "config: loss.pair.slope_alike is now loss.pair.slope_positive.",
        ),
    ],
)
def test_parts_in_a_configuration_name_their_new_names(tree, says):
    with pytest.raises(ValueError) as error:
        check(parse(tree))
    assert str(error.value) == says
