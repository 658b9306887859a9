"""The demo's recipe is the one that the search selected on held-out scripts, and the one that was tested."""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import unicodedata
from pathlib import Path

import pytest

from nearfar.data._glyphs import TEST_SCRIPTS
from nearfar.runs._config import flat, to_tree
from nearfar.train import load, parse

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def script():
    """benchmarks/quality/demo.py."""
    spec = importlib.util.spec_from_file_location("demo_search", ROOT / "benchmarks" / "quality" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def found():
    return json.loads((RESULTS / "demo.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def chosen():
    return load(ROOT / "configs" / "glyphs.yaml")


def test_no_trial_has_a_test_script_among_its_data(script):
    data = script.scored_data()
    names = {name.partition(" ")[2] for side in (data.train, data.test) for name in side.classes}
    assert not any(TEST_SCRIPTS & set(name.split()) for name in names)
    assert not set(data.train.classes) & set(data.test.classes)
    codes = {int(name.split()[0][2:], 16) for name in data.test.classes}
    assert all(0x1E00 <= code <= 0x1EFF or 0x250 <= code <= 0x2AF for code in codes)
    assert all(unicodedata.name(chr(code)).startswith("LATIN") for code in codes)


def test_every_trial_has_a_result_and_every_result_a_trial(script, found):
    assert [row["name"] for row in found["trials"]] == [trial.name for trial in script.TRIALS]
    for row, trial in zip(found["trials"], script.TRIALS, strict=True):
        assert row["keys"] == dict(trial.keys)
        trial.config()


def test_the_recipe_is_the_best_trial_with_more_steps(script, found, chosen):
    best = max(found["trials"], key=lambda row: row["recall"])
    trial = next(trial for trial in script.TRIALS if trial.name == best["name"])
    assert not trial.moved
    assert trial.layers is None
    searched, used = flat(to_tree(trial.config())), flat(to_tree(chosen))
    others = {key for key in used if used[key] != searched.get(key) and not key.startswith("training.")}
    assert not others
    assert chosen.training.steps > trial.config().training.steps


def test_what_was_tested_is_the_recipe_and_stands_on_the_pages(script, found, chosen):
    assert parse(found["test"]["config"]) == chosen
    recalls = [run["recall"]["1"] for run in found["test"]["runs"]]
    assert [run["seed"] for run in found["test"]["runs"]] == list(range(script.SEEDS))
    mean = f"{statistics.fmean(recalls):.1f}"
    page = (ROOT / "benchmarks" / "RESULTS-photographs.md").read_text(encoding="utf-8")
    assert all(f"{recall:.1f}" in page for recall in recalls)
    assert f"**{mean}**" in page
    for name in ("guides/glyphs.md", "start/first-model.md"):
        assert f"**{mean}**" in (ROOT / "docs" / name).read_text(encoding="utf-8"), name
    assert (RESULTS / "demo.md").read_text(encoding="utf-8") == script.table(found)
