"""The table of thresholds: `auto` takes the engine that it names, and a table that is none is told in one sentence."""

from __future__ import annotations

import copy
import json
from importlib.resources import files

import pytest
import torch
from thresholds_cases import table_of

import nearfar as nf
from nearfar.engines import thresholds
from nearfar.engines.thresholds import GENERAL, NEVER, SCOPES, Thresholds, parse, scope_of
from nearfar.engines.tiled import worth_tiling

ROWS = 24
TEXT = (files("nearfar.engines") / thresholds.FILE).read_text(encoding="utf-8")


class Mine(nf.pairs.Hinge):
    """A part of one's own, which promises no fast path."""


LOSSES = {
    "row": nf.losses.SupCon,
    "batch": nf.losses.DroKL,
    "lifted": nf.losses.LiftedStructure,
    "triplets": nf.losses.Triplet,
    GENERAL: lambda: nf.RobustLoss(pair=Mine(), over=nf.sets.KL(0.1)),
}


def taken(loss, monkeypatch):
    """The engine that a call of `auto` goes through."""
    seen = []
    for module, name in ((nf.losses.choice, "tiled_value"), (nf.losses.robust, "dense_value")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, n=name, r=real, **k: seen.append(n) or r(*a, **k))
    loss(torch.randn(ROWS, 4, requires_grad=True), torch.arange(ROWS) // 4)
    (found,) = seen
    return found.removesuffix("_value")


@pytest.mark.parametrize("scope", SCOPES)
def test_another_table_changes_what_auto_takes(scope, monkeypatch):
    loss = LOSSES[scope]()
    scopes = {each: {"tiled": NEVER} for each in SCOPES}
    assert taken(loss, monkeypatch) == "dense"
    for pairs, engine in ((ROWS**2, "tiled"), (ROWS**2 + 1, "dense")):
        monkeypatch.setattr(thresholds, "TABLE", {"cpu": Thresholds({**scopes, scope: {"tiled": pairs}})})
        assert taken(loss, monkeypatch) == engine


@pytest.mark.parametrize("scope", SCOPES[:-1])
def test_the_scope_of_a_loss(scope):
    assert scope_of(LOSSES[scope]().product) == scope


def test_a_device_that_was_not_measured_is_dense(monkeypatch):
    loss = LOSSES["row"]()
    monkeypatch.setattr(thresholds, "TABLE", {"cuda": table_of(1, 1)["cuda"]})
    assert taken(loss, monkeypatch) == "dense"
    assert thresholds.from_pairs("cpu", "row", "tiled") == NEVER
    assert thresholds.from_pairs("cuda", "row", "tiled") == 1


def test_small_calls_look_at_one_number(monkeypatch):
    """Below the least threshold neither the scope nor the fast paths are looked for."""
    monkeypatch.setattr("nearfar.engines.tiled.lean_way", None)
    relation = nf.Relation.from_labels(torch.arange(8) // 2)
    assert not worth_tiling(LOSSES["row"]().product, relation)


def test_the_table_of_the_package():
    assert set(thresholds.TABLE) >= {"cpu", "cuda"}
    assert parse(TEXT) == thresholds.read()
    for known in thresholds.TABLE.values():
        assert all(known.pairs(scope, "tiled") < NEVER for scope in SCOPES)  # else a large batch is one dense matrix


def test_a_table_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setattr(thresholds, "TABLE", thresholds.TABLE)  # to be put back
    told = json.loads(TEXT)
    told["devices"]["cpu"]["scopes"]["row"]["tiled"] = 5
    (tmp_path / "mine.json").write_text(json.dumps(told), encoding="utf-8")
    thresholds.use(thresholds.read(tmp_path / "mine.json"))
    assert thresholds.from_pairs("cpu", "row", "tiled") == 5


def changed(*path, value):
    told = copy.deepcopy(json.loads(TEXT))
    inside = told
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return json.dumps(told)


SCOPE = ("devices", "cpu", "scopes", "row")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no table of thresholds"),
        ("[1, 2]", "is no table of thresholds"),
        ('{"devices": 3}', "is no table of thresholds"),
        (changed("devices", "cpu", value={}), "is no table of thresholds"),
        (changed(*SCOPE, value=5), "is no table of thresholds"),
        (changed("devices", "cpu", "scopes", "column", value={}), "must have the scopes row"),
        (changed(*SCOPE, "tiled", value=0), "gives 0 for tiled"),
        (changed(*SCOPE, "tiled", value=2.5), "gives 2.5 for tiled"),
        (changed(*SCOPE, "tiled", value=True), "gives True for tiled"),
        (changed(*SCOPE, "quick", value=3), "gives 3 for quick"),
    ],
)
def test_a_broken_table_is_one_sentence(text, said):
    with pytest.raises(ValueError) as caught:
        parse(text)
    sentence = str(caught.value)
    assert said in sentence
    assert sentence.startswith("thresholds.json")
    assert sentence.endswith("; make it again with nearfar bench --calibrate.")
    assert "\n" not in sentence
