"""Trackers: numbers of the journal reach TensorBoard for real, and wandb and MLflow through packages that stand in."""

from __future__ import annotations

import importlib
import sys

import pytest
from needs import need
from runs import config, journal, tiny

from nearfar.train import fit, parse
from nearfar.train._trackers import scalars

need("accelerate")

WANDB = """
said = []
class config:
    update = staticmethod(lambda values, allow_val_change: said.append(("config", dict(values))))
class Run:
    def log(self, values, step=None): said.append(("log", step, dict(values)))
    def finish(self): said.append(("finish",))
def init(**given):
    said.append(("init", given))
    return Run()
"""
MLFLOW = """
from types import SimpleNamespace
said = []
utils = SimpleNamespace(validation=SimpleNamespace(MAX_PARAM_VAL_LENGTH=500, MAX_PARAMS_TAGS_PER_BATCH=100))
def search_experiments(filter_string): return []
def create_experiment(name, **given): said.append(("experiment", name)); return "7"
def start_run(**given): said.append(("run", given["run_name"], given["experiment_id"]))
def log_params(values): said.append(("config", dict(values)))
def log_metrics(values, step=None): said.append(("log", step, dict(values)))
def end_run(): said.append(("finish",))
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Packages by these names that write down what they are told."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)

    def make(name: str, text: str) -> list[tuple]:
        monkeypatch.delitem(sys.modules, name, raising=False)
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
        said = __import__(name).said
        monkeypatch.setitem(sys.modules, name, sys.modules[name])
        return said

    return make


def wanted(folder):
    """(step, values) of every line of the journal that holds numbers."""
    lines = ((line["step"], dict(scalars(line))) for line in journal(folder))
    found = [(step, {name: value for name, value in values.items() if name != "step"}) for step, values in lines]
    return [(step, values) for step, values in found if values]


def test_tensorboard_gets_every_number_of_the_journal(tmp_path):
    need("tensorboard")
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    fit(config(training={"steps": 6, "trackers": ["tensorboard"]}), tmp_path / "a", data=tiny())
    events = accumulator.EventAccumulator(str(tmp_path / "a" / "tensorboard")).Reload()
    expected: dict[str, list[tuple[int, float]]] = {}
    for step, values in wanted(tmp_path / "a"):
        for name, value in values.items():
            expected.setdefault(name, []).append((step, pytest.approx(value, rel=1e-6)))
    found = {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert found == expected
    assert {"loss", "lr", "validation/recall_at_1", "baselines/untrained", "effective_pairs"} <= set(found)


def test_nothing_is_tracked_unless_asked_for(tmp_path):
    fit(config(training={"steps": 1}), tmp_path / "a", data=tiny())
    assert not (tmp_path / "a" / "tensorboard").exists()


def test_wandb_and_mlflow_get_the_configuration_and_every_number(tmp_path, stand_in):
    wandb, mlflow = stand_in("wandb", WANDB), stand_in("mlflow", MLFLOW)
    fit(config(training={"steps": 3, "trackers": ["wandb", "mlflow"]}), tmp_path / "a", data=tiny())
    assert wandb[0] == ("init", {"project": "nearfar", "name": "a"})
    assert mlflow[:2] == [("experiment", "nearfar"), ("run", "a", "7")]
    for said in (wandb, mlflow):
        (stored,) = (entry[1] for entry in said if entry[0] == "config")
        assert stored["training.steps"] == 3
        assert stored["loss.pair"] == "Logistic"
        assert [entry[1:] for entry in said if entry[0] == "log"] == wanted(tmp_path / "a")
        assert said[-1] == ("finish",)


def test_a_tracker_that_does_not_start_is_one_sentence_and_the_others_are_closed(tmp_path, stand_in):
    mlflow = stand_in("mlflow", MLFLOW)
    stand_in("wandb", "said = []\ndef init(**given): raise ValueError('api_key not configured\\nrun wandb login')")
    settings = config(training={"steps": 1, "trackers": ["mlflow", "wandb"]})
    with pytest.raises(RuntimeError, match=r"^train: the tracker wandb did not start \(api_key not configured\); mend"):
        fit(settings, tmp_path / "a", data=tiny())
    assert mlflow[-1] == ("finish",)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_named_before_a_folder_is_made(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ImportError, match=f"names {name}, which is not installed; run pip install {name}, or leave it out"
    ):
        fit(config(training={"trackers": [name]}), tmp_path / "a", data=tiny())
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("wrong", [["tensorbord"], "wandb", ["wandb", "wandb"], [3], {"wandb": 1}])
def test_a_list_of_known_names_and_none_twice(wrong):
    with pytest.raises(
        ValueError, match=r"training\.trackers must be a list, each one of tensorboard, wandb, mlflow and"
    ):
        parse({"training": {"trackers": wrong}})
    assert parse({"training": {"trackers": ["mlflow", "wandb"]}}).training.trackers == ("mlflow", "wandb")
