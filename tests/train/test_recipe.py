"""The recipe for photographs: which data it fits, and that it is the one the search selected and the test read once."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from shell import run

from nearfar.data import open_data
from nearfar.runs._config import flat, to_tree
from nearfar.studies import grid
from nearfar.train import Config, load
from nearfar.train._length import steps_of_passes, usual_steps
from nearfar.train._recipe import FILE, are_photographs, default_config, recipe

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def folder_of(path, side, classes=8, each=3):
    random = np.random.default_rng(0)
    for number in range(classes):
        (path / f"{number}").mkdir(parents=True)
        for place in range(each):
            pixels = random.integers(0, 255, size=(side, side + 9, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(path / f"{number}" / f"{place}.png")
    return path


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("large") / "photographs", 80)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("small") / "drawings", 24)


def flags(path, **more):
    told = {"data.name": "folder", "data.path": str(path), **more}
    return list(told.items())


def test_photographs_get_the_recipe_and_flags_change_it(large):
    config, words = default_config(flags(large))
    assert words.startswith("these are photographs")
    assert (config.loss.name, config.optimizer.lr, config.data.size) == ("ProxyAnchor", 2.5e-5, 320)
    assert (config.data.path, config.data.validation) == (str(large), 0)
    assert config.batches.options["classes"] == 4  # of eight classes half are for the test
    assert config.training.steps == "auto"
    assert usual_steps(config, open_data("folder", large)) == 200  # so few photographs would be seen in a step
    config, _ = default_config(flags(large, **{"loss.name": "Triplet", "loss.margin": "0.3", "training.steps": "7"}))
    assert (config.loss.name, dict(config.loss.options), config.training.steps) == ("Triplet", {"margin": 0.3}, 7)
    assert config.optimizer.lr == 2.5e-5
    config, _ = default_config(
        flags(large, **{"data.size": "100", "data.validation": "0.5", "model.name": "timm:resnet18"})
    )
    assert (config.data.size, config.data.train_size, config.model.name) == (100, None, "timm:resnet18")
    assert default_config(flags(large, **{"data.size": "100"}))[0].data.train_size == 70
    assert config.batches.options["classes"] == 2  # two of four are held out
    assert config.training.evaluate_every == 200 // 6


@pytest.mark.parametrize(
    "told",
    [{"model.name": "small"}, {"data.size": "48"}, {"data.transform": "none"}],
    ids=lambda told: next(iter(told)),
)
def test_what_is_told_to_be_something_else_gets_the_defaults(large, told):
    config, words = default_config(flags(large, **told))
    assert words == ""
    assert config.loss == Config().loss
    assert config.optimizer == Config().optimizer


def test_vectors_begin_with_themselves_and_are_not_even_opened():
    told = [("data.name", "vectors"), ("data.path", "not/here.npz")]
    config, words = default_config(told)
    assert words.startswith("these are vectors: the head begins as the identity")
    assert (config.model.embedding_dim, config.optimizer.lr, config.loss) == (None, 1e-4, Config().loss)
    assert config.training.steps == "auto"
    config, _ = default_config([*told, ("model.embedding_dim", "64"), ("optimizer.lr", "0.01")])
    assert (config.model.embedding_dim, config.optimizer.lr) == (64, 0.01)
    for key, value in (("model.name", "mlp"), ("model.hidden", "32")):
        assert default_config([*told, (key, value)]) == (load(None, [*told, (key, value)]), "")


def test_vectors_are_trained_no_worse_than_they_came(tmp_path):
    """Of classes that lie apart a random head would lose some; the command itself, with nothing told."""
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(40), 6)
    np.savez(tmp_path / "v.npz", x=random.normal(size=(40, 24))[labels] + 0.9 * random.normal(size=(240, 24)), y=labels)
    told = ("--data.name", "vectors", "--data.path", "v.npz", "--training.steps", 20, "--run", "first")
    shown = run(tmp_path, "train", *told)
    assert "the head begins as the identity" in shown
    before, after = re.search(
        r"input vectors ([\d.]+), untrained network [\d.]+, trained network ([\d.]+)", shown
    ).groups()
    assert float(after) >= float(before) - 1


def test_small_pictures_and_glyphs_get_the_defaults(small):
    assert not are_photographs(open_data("folder", small))
    assert default_config(flags(small)) == (load(None, flags(small)), "")
    assert default_config([]) == (Config(), "")


class _Many:
    """The labels of a large data set."""

    def __init__(self, samples, classes):
        self.labels = np.arange(samples) % classes
        self.classes = tuple(map(str, range(classes)))

    def __len__(self):
        return len(self.labels)


def test_the_usual_steps_go_eight_times_through_the_photographs():
    assert [steps_of_passes(samples, 80) for samples in (5864, 60_000, 10**6)] == [600, 6150, 20_000]
    few = recipe(_Many(100, 5))
    assert (few["training"]["steps"], few["training"]["evaluate_every"]) == ("auto", 200)
    assert (few["batches"]["classes"], few["optimizer"]["warmup"]) == (5, 50)


def test_the_commands_take_it(large, tmp_path):
    told = ("--data.name", "folder", "--data.path", large)
    assert yaml.safe_load(run(tmp_path, "config", *told))["loss"] == {"name": "ProxyAnchor", "scale": 16.0}
    elsewhere = yaml.safe_load(run(tmp_path, "config", "--data.name", "folder", "--data.path", "not/here"))
    assert elsewhere["loss"]["name"] == Config().loss.name
    found = run(tmp_path, "recommend", "folder", "--path", large)
    assert "of the recipe for photographs (configs/photographs.yaml)" in found
    tree = yaml.safe_load(found)
    assert (tree["optimizer"]["lr"], tree["loss"]["name"], tree["data"]["path"]) == (2.5e-5, "ProxyAnchor", str(large))
    assert tree["training"]["steps"] == "auto"
    quick = ("--data.size", 72, "--training.steps", 1, "--model.pretrained", "false")
    shown = run(tmp_path, "train", *told, *quick, "--data.cache_folder", tmp_path / "cache", "--run", "first")
    assert "these are photographs: the recipe for them is taken" in shown
    assert load(tmp_path / "first" / "config.yaml").loss.name == "ProxyAnchor"


@pytest.fixture(scope="module")
def script():
    """benchmarks/quality/recipe.py."""
    sys.path.insert(0, str(ROOT / "benchmarks" / "quality"))
    spec = importlib.util.spec_from_file_location("recipe_search", ROOT / "benchmarks" / "quality" / "recipe.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(ROOT / "benchmarks" / "quality"))
    del sys.modules[spec.name]


def test_the_file_in_configs_is_the_package_s():
    assert (ROOT / "configs" / "photographs.yaml").read_text(encoding="utf-8") == FILE.read_text(encoding="utf-8")
    general, cub = (flat(to_tree(load(ROOT / "configs" / f"{name}.yaml"))) for name in ("photographs", "cub_lite0"))
    assert {key for key in general if general[key] != cub[key]} == {"data.name", "training.steps"}


def test_every_trial_has_a_result_and_the_best_one_was_tested(script):
    where = {"data.path": None, "model.weights": script.weights(RESULTS)}
    known = grid.lines(RESULTS / "recipe.jsonl")
    rows = script.every(known, where)
    assert {script.trial(keys, where).key for keys in rows.values()} == set(known)
    assert all(line["error"] is None and line["held_classes"] == list(script.HELD_OUT) for line in known.values())
    best = script.trial(rows[script.winner(known, rows, where)], where).config
    assert best == script.trial(script.WINNER, where).config
    was_tested("recipe-test-before.jsonl", best, script.SEEDS)


def was_tested(file, config, seeds):
    """Each seed of a configuration was tested; how fast a step is computed may differ."""
    chosen, lines = json.loads(json.dumps(flat(to_tree(config)))), list(grid.lines(RESULTS / file).values())
    assert [line["config"]["training"]["seed"] for line in lines] == list(range(seeds))
    for line in lines:
        was = flat(line["config"])
        assert {key for key in was if was[key] != chosen[key]} <= {"training.seed", "training.compile"}


def test_the_recipe_is_the_last_rung_and_was_tested(script):
    where = {"data.path": None, "model.weights": script.weights(RESULTS)}
    known, trials = grid.lines(RESULTS / "recipe-ladder.jsonl"), script.ladder(where, None)
    assert {trial.key for trial in trials.values()} == set(known)
    assert all(line["error"] is None and line["held_classes"] for line in known.values())
    *_, last = script.LADDER
    chosen = load(script.RECIPE, script.flags_of_test(where))
    assert trials["cub", last].config == chosen
    was_tested("recipe-test.jsonl", chosen, script.SEEDS)
    for data in ("cub", "flowers"):
        first, best = (script.score_of(known[trials[data, name].key]) for name in (next(iter(script.LADDER)), last))
        assert best > first + 2


def test_the_page_and_the_recipe_tell_the_score(script):
    lines = grid.lines(RESULTS / "recipe-test.jsonl").values()
    mean = f"{100 * np.mean([line['scores']['recall@1'] for line in lines]):.1f}"
    where = {"data.path": None, "model.weights": script.weights(RESULTS)}
    assert (RESULTS / "recipe.md").read_text(encoding="utf-8") == script.table(RESULTS, where)
    page = (ROOT / "benchmarks" / "RESULTS-photographs.md").read_text(encoding="utf-8")
    assert mean in page
    assert mean in FILE.read_text(encoding="utf-8")
    _, *rungs, _ = script._ladder_table(RESULTS, where)[3:]
    assert all(row in page for row in rungs)


def test_rounds_follow_from_the_numbers_before(script):
    """The winner of the first round goes on with what gained beside it; a failed run is no result."""
    where = {"data.path": None}

    def line(recall, error=None):
        return {"error": error, "scores": {"recall@1": recall, "map_at_r": recall}}

    names = list(script.CHANGES)
    known = {script.trial(script.START, where).key: line(0.5)}
    for name, score in ((names[0], 0.6), (names[1], 0.7), ("batch norm neck", 0.55), ("Contrastive", 0.4)):
        known[script.trial({**script.START, **script.CHANGES[name]}, where).key] = line(score)
    failed = script.trial({**script.START, **script.CHANGES["color .2"]}, where)
    known[failed.key] = line(0.9, "RuntimeError: no memory")
    assert [name for _, name in script.gains(known, where)] == [names[1], "batch norm neck"]  # the first two: one key
    second = script.second(known, where)
    assert list(second) == [f"{names[1]} + batch norm neck"]
    rows = script.first() | second
    assert script.winner(known, rows, where) == names[1]
    assert all(name.startswith(f"{names[1]}; ") for name in script.third(known, rows, where))
    assert script.third({}, rows, where) == {}
