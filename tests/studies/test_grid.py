"""Grids of runs: one line a run, resumed when stopped, not stopped by failures, reproducible."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from nearfar.data import Labeled, Tensors, genuine
from nearfar.studies import grid
from nearfar.studies.grid import Trial, Workers, permute_labels
from nearfar.train import parse

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    """16 classes of 6 vectors; half of them are for the test."""
    path = tmp_path_factory.mktemp("data") / "vectors.npz"
    random = np.random.default_rng(0)
    y = np.repeat(np.arange(16), 6)
    np.savez(path, x=random.normal(size=(16, 8))[y] + random.normal(size=(len(y), 8)), y=y)
    return str(path)


def trial(path, seed=0, loss="Contrastive", **how):
    config = {
        "data": {"name": "vectors", "path": path, "transform": "none", "validation": 0.0},
        "model": {"name": "linear", "embedding_dim": 4},
        "loss": loss,
        "batches": {"name": "MPerClass", "classes": 4, "samples": 2},
        "training": {"steps": 3, "seed": seed, "evaluate_every": 3, "checkpoint_every": 3},
    }
    return Trial(parse(config), ks=(1, 4), **how)


def test_a_line_tells_the_run(vectors, tmp_path):
    one = trial(vectors, clustering=30)
    known = grid.run([one, one], tmp_path / "runs.jsonl", console=QUIET)
    assert list(known) == [one.key]
    line = json.loads((tmp_path / "runs.jsonl").read_text(encoding="utf-8"))
    assert line == known[one.key]
    assert line["error"] is None
    assert line["steps"] == 3
    assert line["queries"] == 48
    assert set(line["scores"]) >= {"recall@1", "recall@4", "map_at_r", "nmi", "f1"}
    assert 0 < line["scores"]["recall@1"] <= line["scores"]["recall@4"] <= 1
    assert line["config"]["training"]["seed"] == 0
    assert len(line["classes"]["recall@1"]) == 8
    mean = np.average(line["classes"]["recall@1"], weights=line["classes"]["queries"])
    assert mean == pytest.approx(line["scores"]["recall@1"], abs=1e-4)
    assert [step for step, _ in line["journal"]["loss"]] == [1, 2, 3]
    assert line["journal"]["verdict"].keys() >= line["journal"]["findings"].keys()
    assert "path" not in line["config"]["data"]


def test_the_best_checkpoint_is_the_one_of_the_papers_protocol(vectors, tmp_path):
    """It has the scores with which a run under that protocol ends; the last step's are those of a plain run."""
    base = trial(vectors, loss="Margin")
    longer = replace(base.config.training, steps=12, evaluate_every=12, checkpoint_every=12)
    rate = replace(base.config.optimizer, lr=0.3)
    plain = replace(base, config=replace(base.config, training=longer, optimizer=rate))
    often = replace(longer, evaluate_every=3, protocol="paper")
    paper = replace(plain, config=replace(plain.config, training=often))
    last, found, wanted = map(grid.attempt, (plain, replace(plain, checkpoints=4), paper))
    own = {name: value for name, value in found["scores"].items() if not name.startswith("best_")}
    assert own == last["scores"]
    best = {name.removeprefix("best_"): value for name, value in found["scores"].items() if name.startswith("best_")}
    assert best.pop("step") in (3, 6, 9, 12)
    assert best == wanted["scores"]
    assert best["recall@1"] >= own["recall@1"]


def test_what_is_done_is_not_done_again(vectors, tmp_path, monkeypatch):
    file = tmp_path / "runs.jsonl"
    trials = [trial(vectors, seed) for seed in range(3)]
    grid.run(trials[:2], file, console=QUIET)
    whole = file.read_text(encoding="utf-8")
    lines = whole.splitlines(keepends=True)
    file.write_text(lines[0] + lines[1][:50], encoding="utf-8")  # a crash tore the last line
    tried = []
    real = grid.attempt
    monkeypatch.setattr(grid, "attempt", lambda each: (tried.append(each.key), real(each))[1])
    known = grid.run(trials, file, console=QUIET)
    assert tried == [trials[1].key, trials[2].key]
    assert set(known) == {each.key for each in trials}
    again = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(again) == 3
    assert again[1]["scores"] == json.loads(lines[1])["scores"]  # the same run gives the same numbers
    assert again[1]["scores"] != again[2]["scores"]
    grid.run(trials, file, console=QUIET)
    assert len(tried) == 2


def test_a_failing_run_is_a_line_and_is_tried_again(vectors, tmp_path):
    bad, good = trial(vectors, loss={"name": "DroTopK", "k": -1}), trial(vectors)
    for lines in (2, 3):
        known = grid.run([bad, good], tmp_path / "runs.jsonl", console=QUIET)
        assert known[bad.key]["error"].startswith("ValueError: TopK")
        assert known[bad.key]["scores"] == {}
        assert known[good.key]["error"] is None
        written = (tmp_path / "runs.jsonl").read_text(encoding="utf-8").splitlines()
        assert len(written) == lines


def test_no_run_begins_when_time_is_up(vectors, tmp_path):
    assert grid.run([trial(vectors)], tmp_path / "runs.jsonl", seconds=-1.0, console=QUIET) == {}


def test_processes_give_what_one_gives(vectors, tmp_path):
    trials = [trial(vectors, seed) for seed in range(2)]
    here = grid.run(trials, tmp_path / "one.jsonl", console=QUIET)
    with Workers(2) as workers:
        there = grid.run(trials, tmp_path / "two.jsonl", workers=workers, console=QUIET)
        assert list(workers.results(trials, end=-1.0)) == []
    assert {key: line["scores"] for key, line in there.items()} == {key: line["scores"] for key, line in here.items()}


def test_the_key_is_what_the_result_depends_on(vectors):
    one = trial(vectors)
    assert one.key == trial("elsewhere.npz").key
    config = replace(one.config, data=replace(one.config.data, workers=3))
    config = replace(config, training=replace(config.training, threads=2))
    assert one.key == replace(one, config=config).key  # a grid may go on with other processes
    weights = [replace(one.config.model, weights=f"{place}/lite0.pth") for place in ("here", "there")]
    here, there = (replace(one, config=replace(one.config, model=model)) for model in weights)
    assert here.key == there.key != one.key
    assert here.tree()["config"]["model"]["weights"] == "lite0.pth"
    others = [trial(vectors, 1), trial(vectors, loss="Margin"), replace(one, wrong=0.1), replace(one, held_out=0.1)]
    assert len({one.key, *(each.key for each in others)}) == 5


def test_held_out_classes_stand_in_for_the_test(vectors, tmp_path):
    half = trial(vectors, held_out=0.5)
    known = grid.run([half], tmp_path / "runs.jsonl", console=QUIET)
    assert known[half.key]["queries"] == 24  # half of the eight classes for training, six samples each
    data, _ = grid._data_of(half)
    whole, _ = grid._data_of(trial(vectors))
    assert set(data.test.classes) | set(data.train.classes) == set(whole.train.classes)
    assert not set(data.test.classes) & set(whole.test.classes)


def test_classes_are_held_out_by_name(vectors, tmp_path):
    whole, _ = grid._data_of(trial(vectors))
    first, second, third, *others = whole.train.classes
    some = trial(vectors, held_classes=(first, f"[{second}{third}]"))
    data, _ = grid._data_of(some)
    assert data.test.classes == (first, second, third)
    assert data.train.classes == tuple(others)
    line = grid.run([some], tmp_path / "runs.jsonl", console=QUIET)[some.key]
    assert line["queries"] == 18
    assert line["held_classes"] == list(some.held_classes)
    assert len({some.key, trial(vectors).key, replace(some, held_classes=(first,)).key}) == 3


def test_one_data_set_is_open_at_a_time(vectors):
    """What a process holds on the device goes with the data set."""
    first = grid._open("vectors", vectors, (None, None, "none"))
    assert grid._open("vectors", vectors, (None, None, "none")) is first
    assert grid._open("vectors", vectors, (None, 288, "none")) is not first
    assert grid._open.cache_info().currsize == 1


def test_wrong_labels_keep_the_sizes_of_classes(vectors):
    labels = np.repeat(np.arange(50), 4)
    for samples in (Tensors(np.zeros((200, 2)), labels), Labeled([np.zeros(2)] * 200, labels)):
        wrong = permute_labels(samples, 0.4, seed=3)
        changed = np.mean(wrong.labels != labels)
        assert 0.35 < changed <= 0.4
        assert np.array_equal(np.bincount(wrong.labels), np.bincount(labels))
        assert np.array_equal(wrong.labels, permute_labels(samples, 0.4, seed=3).labels)
        assert not np.array_equal(wrong.labels, permute_labels(samples, 0.4, seed=4).labels)
        assert len(wrong) == 200
        assert wrong[5].shape == (2,)
        assert genuine(wrong, 5).shape == (2,)
    seen = []
    other = wrong.over(lambda base: seen.append(base) or Labeled([np.ones(2)] * 200, labels))
    assert seen == [samples]
    assert other[0][0] == 1
    assert np.array_equal(other.labels, wrong.labels)
    assert wrong.hold("cpu") is None
    data, share = grid._data_of(trial(vectors, wrong=0.25))
    clean, none = grid._data_of(trial(vectors))
    assert none == 0
    assert share == np.mean(data.train.labels != clean.train.labels) > 0.1
    assert np.array_equal(data.test.labels, clean.test.labels)


def test_jobs_must_be_a_number():
    with pytest.raises(ValueError, match="Workers: jobs must be"):
        Workers(0)


def test_a_run_that_nobody_waits_for_ends_after_its_step(vectors, monkeypatch):
    monkeypatch.setattr(grid.pool, "stopping", lambda: True)
    assert grid.attempt(trial(vectors)) is None
