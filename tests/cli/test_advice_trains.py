"""Advice works to the letter: configurations of `recommend` train, and so do those that errors propose."""

from __future__ import annotations

import json
import re
import warnings

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from rich.console import Console
from runs import config, tiny
from typer.testing import CliRunner

from nearfar.cli.main import app
from nearfar.cli.recommend import load_rows, recommend
from nearfar.data import DataSet, Tensors
from nearfar.data._splits import Shares
from nearfar.doctor import diagnose_journal, diagnose_run
from nearfar.runs._config import apply_flags, to_tree
from nearfar.train import Config, fit, load, parse
from nearfar.train._recipe import FILE

QUIET = Console(quiet=True)
SHORT = {"steps": 2, "explain_every": 1, "diagnose_every": 0, "evaluate_every": 2}


def labels(classes: int, each: int) -> np.ndarray:
    return np.repeat(np.arange(classes), each)


def drawn(kind: str, classes: int, each: int) -> DataSet:
    """Random samples; the test classes are few, for only training is tried."""
    draw = torch.Generator().manual_seed(0)

    def samples(count: int) -> Tensors:
        y = labels(count, each)
        if kind == "vectors":
            return Tensors(torch.randn(len(y), 3, generator=draw), y)
        return Tensors(torch.randint(0, 256, (len(y), 8, 8), generator=draw, dtype=torch.uint8), y)

    return DataSet(kind, samples(classes), samples(2))


def trained(tree: dict, folder, data=None) -> None:
    """Two steps of a configuration, small embeddings apart all as it stands."""
    config = parse({**tree, "model": {**tree.get("model", {}), "embedding_dim": 4}, "training": SHORT})
    assert fit(config, folder, data=data, console=QUIET).finished


SHAPES = [(2, 2), (2, 100), (3, 2), (4, 3), (5, 10), (7, 2), (15, 10), (15, 2), (50, 5), (100, 59), (300, 2), (964, 4)]
"""Training classes and samples of each: half of what a folder of 4 ... 2,000 classes holds."""


@pytest.mark.parametrize("kind", ["vectors", "pictures"])
@pytest.mark.parametrize(("classes", "each"), SHAPES)
def test_what_is_recommended_trains(kind, classes, each, tmp_path):
    for batch in (4, 128):
        found = recommend(labels(classes, each), batch_size=batch)
        trained(found.config, tmp_path / str(batch), drawn(kind, classes, each))


@pytest.mark.parametrize(("classes", "each"), [(10_000, 2), (2_500, 4), (1_621, 14)])
def test_what_is_recommended_trains_on_many_classes(classes, each, tmp_path):
    trained(recommend(labels(classes, each)).config, tmp_path / "run", drawn("vectors", classes, each))


def test_every_measured_row_can_be_recommended_and_trains(tmp_path):
    """With as few classes as it was measured with over four, the farthest that a row may be."""
    different = {str((row.loss, row.batches)): row for row in load_rows()}
    for number, row in enumerate(different.values()):
        shape = (row.classes // 4 + 1, 4)
        found = recommend(labels(*shape), rows=(row.__class__(**{**vars(row), "per_class": 4}),), batch_size=32)
        assert found.config["loss"]["name"] == row.loss["name"]
        trained(found.config, tmp_path / str(number), drawn("vectors", *shape))


def folders(path, classes: int, each: int, side: int = 12):
    draw = np.random.default_rng(0)
    for label in range(classes):
        place = path / f"class {label}"
        place.mkdir(parents=True)
        for number in range(each):
            picture = Image.fromarray(draw.integers(0, 256, (side, side, 3), dtype=np.uint8))
            picture.save(place / f"{number}.png")
    return path


def command(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize(("classes", "test"), [(4, 2), (7, 4), (30, 15)])
def test_the_command_writes_what_train_takes(classes, test, tmp_path):
    there = folders(tmp_path / "pictures", classes, 3)
    written = command("recommend", "folder", "--path", there)
    assert written.exit_code == 0, written.output
    assert f"# {classes} classes: {test} for the test, " in written.output
    (tmp_path / "c.yaml").write_text(written.output, encoding="utf-8")
    config = load(tmp_path / "c.yaml", [("training.steps", "2")])
    assert fit(config, tmp_path / "run", console=QUIET).finished


def test_thirty_folders_train_with_the_defaults_and_say_where_classes_went(tmp_path, capsys):
    there = folders(tmp_path / "pictures", 30, 3)
    config = parse({"data": {"name": "folder", "path": str(there)}, "training": SHORT})
    fit(config, tmp_path / "run", console=Console(width=200))
    shown = capsys.readouterr().out
    assert "30 classes: 15 for the test, 2 held out, 13 to learn from; 13 x 4 samples a batch" in shown
    assert re.search(r"network small on 3 x 12 x 12: [\d,]+ parameters, [\d,]+ of them in the head", shown)


def test_too_many_classes_are_refused_with_a_number_that_works(tmp_path):
    there = folders(tmp_path / "pictures", 30, 3)
    tree = {"data": {"name": "folder", "path": str(there)}, "batches": {"classes": 15}, "training": SHORT}
    words = r"batches\.classes is 15, more than there are .*30 classes: 15 for the test, 2 held out, 13 to learn from"
    with pytest.raises(ValueError, match=words) as caught:
        fit(parse(tree), tmp_path / "run", console=QUIET)
    assert not (tmp_path / "run").exists()
    flag, value = re.search(r"--(batches\.classes) (\d+)", str(caught.value)).groups()
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert fit(load(tmp_path / "c.yaml", [(flag, value)]), tmp_path / "run", console=QUIET).finished


def test_too_few_classes_say_so(tmp_path):
    there = folders(tmp_path / "pictures", 2, 3)
    with pytest.raises(ValueError, match="2 classes: 1 for the test, 1 to learn from, where two are needed"):
        fit(parse({"data": {"name": "folder", "path": str(there)}}), tmp_path / "run", console=QUIET)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.99])
@pytest.mark.parametrize("training", [1, 2, 3, 4, 5, 15, 1000])
def test_shares_leave_two_to_learn_from_and_never_hold_one_out_alone(training, share):
    found = Shares.of(training, share)
    assert found.learn + found.held_out == training
    assert found.learn >= min(2, training)
    assert found.held_out != 1
    assert (found.held_out > 0) == (share > 0 and training >= 4)


def test_the_size_that_a_dry_run_proposes_on_a_cpu_trains(tmp_path):
    """With the recipe, whose crops in training have more pixels than that."""
    there, path = folders(tmp_path / "pictures", 4, 5, side=140), str(FILE)
    told = ["--data.path", there, "--data.cache", "none", "--model.pretrained", "false"]
    told += ["--training.baselines", "false", "--batches", "{classes: 2, samples: 2}", "--run", tmp_path / "run"]
    shown = command("train", path, *told, "--dry-run")
    assert shown.exit_code == 0, shown.output
    flag = re.search(r"on a CPU a step takes seconds at this size; (--data\.size) (\d+) makes it faster", shown.output)
    done = command("train", path, *told, *flag.groups(), "--training.steps", 1)
    assert done.exit_code == 0, done.output
    written = load(tmp_path / "run" / "config.yaml").data
    assert (written.size, written.train_size) == (128, 90)


def test_what_is_said_of_an_early_best_can_be_followed(tmp_path):
    """The run of 3,200 steps whose best weights were those of step 200."""
    settings = config(training={"steps": 3200, "evaluate_every": 200, "explain_every": 0, "diagnose_every": 0})
    entries = [{"step": step, "loss": 500 / step} for step in range(1, 3201)]
    entries += [{"step": step, "validation recall@1": 0.6 - step / 1e5} for step in range(200, 3201, 200)]
    (found,) = diagnose_journal(entries, config=settings).findings
    assert "train longer" not in found.remedy
    ways = re.findall(r"--([a-z_.]+) ([^\s)]+)", found.remedy)
    assert [name for name, _ in ways] == ["training.steps", "optimizer.lr", "optimizer.weight_decay"]
    for name, value in ways:
        quick = [] if name == "training.steps" else [("training.steps", "2")]
        cured = apply_flags(settings, [(name, value), *quick])
        result = fit(cured, tmp_path / name, data=tiny(), console=QUIET)
        assert (result.finished, result.step) == (True, cured.training.steps)
    assert (tmp_path / "training.steps" / "checkpoints" / "best.pt").is_file()


def twins() -> DataSet:
    """Test classes in pairs that share all places, so that no nearest sample is of its own class."""
    data, draw = tiny(), torch.Generator().manual_seed(0)
    labels = np.arange(24) % 8
    places = 3 * torch.randn(12, 8, generator=draw)
    x = torch.zeros(24, 8)
    for pair in range(4):
        for number, label in enumerate((2 * pair, 2 * pair + 1)):
            x[labels == label] = places[3 * pair : 3 * pair + 3] + 1e-3 * number
    return DataSet("twins", data.train, Tensors(x, labels), ks=(1,))


def test_a_run_that_finds_nothing_is_not_called_healthy(tmp_path):
    result = fit(config(training={"steps": 10}), tmp_path / "run", data=twins(), console=QUIET)
    assert result.test.recall[1] == 0.0
    assert json.loads((tmp_path / "run/scores.json").read_text(encoding="utf-8"))["chance"] == round(2 / 23, 6)
    found = diagnose_run(tmp_path / "run")
    assert not found.healthy
    assert "by luck it would be 8.7" in next(e.evidence for e in found.findings if e.name == "no better than chance")


def test_a_named_sampler_needs_no_arguments(tmp_path):
    data = drawn("vectors", 12, 5)
    for number, name in enumerate(("MPerClass", "Representatives")):
        trained({"batches": {"name": name}}, tmp_path / str(number), data)


def test_the_printed_default_has_no_number_of_classes():
    assert to_tree(Config())["batches"] == {"name": "MPerClass", "classes": None, "samples": 4}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse({"batches": {"samples": 2}}).batches.options == {"classes": None, "samples": 2}
