"""The study of PROFS: its plan is the paper's, its numbers are those of the runs, its pictures are drawn."""

from __future__ import annotations

import json
import math
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from nearfar.runs import _parts as parts
from nearfar.studies import _training, profs
from nearfar.studies import _training_figures as figures
from nearfar.studies._training import open_study, spread, verdict


@pytest.fixture(scope="module")
def tables():
    """The tables of the reports, which are made in benchmarks/."""
    root = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").is_file())
    quality = root / "benchmarks" / "quality"
    if not quality.exists():
        pytest.skip("benchmarks are not in a release")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(quality))
        return import_module("study_tables")


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    """16 classes of 5 vectors; half of them are for the test."""
    path = tmp_path_factory.mktemp("data") / "vectors.npz"
    random = np.random.default_rng(0)
    y = np.repeat(np.arange(16), 5)
    np.savez(path, x=random.normal(size=(16, 8))[y] + 0.8 * random.normal(size=(len(y), 8)), y=y)
    return str(path)


@pytest.fixture(scope="module")
def study(vectors, tmp_path_factory):
    folder = tmp_path_factory.mktemp("profs") / "new"
    with pytest.MonkeyPatch.context() as patch:
        # a random head, in which a few steps change something: a head that begins as the identity has it all
        model = {"name": "linear", "embedding_dim": 64}
        settings = _training.Settings({"data": {"transform": "none"}, "model": model}, (3e-4, 1e-3, 3e-3))
        patch.setitem(_training.SETTINGS, "vectors", settings)
        return folder, profs.reproduce(folder, data="vectors", path=vectors, seeds=2, steps=3, quick=True)


def test_the_rule_is_the_papers():
    """MATHS 3.1: M for Stanford Online Products, Cars, CUB, In-Shop; a cycle is M times the largest class."""
    for classes, rule in ((11318, 1062), (98, 10), (100, 10), (3997, 375)):
        labels = np.repeat(np.arange(classes), 2)
        assert profs.rule_of(labels) == (rule, 2 * rule)
    assert profs.rule_of(np.append(np.repeat(np.arange(100), 2), [0, 0]))[1] == 40


def test_files(study):
    folder, found = study
    for name in ("table", "projection"):
        assert (folder / f"profs-vectors-{name}.png").read_bytes().startswith(b"\x89PNG")
    kept = json.loads((folder / "profs-vectors.json").read_text(encoding="utf-8"))
    assert set(kept) == set(found)
    assert len(kept["runs"]) == len(found["runs"]) == 2 * (2 * 3 + 2 * 2)  # the rule's own M is the table's run
    assert [line["error"] for line in kept["runs"]] == [None] * len(kept["runs"])
    assert kept["rule"]["M"] == 6
    assert kept["rule"]["cycle"] == 30
    assert kept["lengths"] == [1, 2, 3]  # a longer projection than the run is the run


def test_numbers_are_those_of_the_runs(study):
    _, found = study
    score = {line["key"]: 100 * line["scores"]["map_at_r"] for line in found["runs"]}
    row = found["table"]["Triplet-hard"]
    values = {variant: [score[key] for key in row[variant]["keys"]] for variant in profs.VARIANTS}
    for variant in profs.VARIANTS:
        assert row[variant]["map_at_r"]["values"] == values[variant]
        assert row[variant]["map_at_r"]["mean"] == pytest.approx(np.mean(values[variant]))
    paired = found["differences"]["Triplet-hard"]["PROFS less plain"]["map_at_r"]
    assert paired["values"] == pytest.approx(np.subtract(values["PROFS"], values["plain"]))
    assert np.ptp(paired["values"]) > 0
    half = 12.706 * np.std(paired["values"], ddof=1) / math.sqrt(2)
    assert paired["half"] == pytest.approx(half, rel=1e-4)
    means = [each["PROFS less plain"]["map_at_r"]["mean"] for each in found["differences"].values()]
    assert found["overall"]["PROFS less plain"]["map_at_r"]["mean"] == pytest.approx(np.mean(means))
    assert found["by_length"]["Triplet-hard"]["3"]["keys"] == row["PROFS"]["keys"]


def test_variants_are_what_they_say(study):
    _, found = study
    run = {line["key"]: line["config"] for line in found["runs"]}
    row = found["table"]["Contrastive-hard"]
    plain, projected, hard = (run[row[variant]["keys"][1]] for variant in profs.VARIANTS)
    assert plain["batches"] == {"name": "MPerClass", "classes": 8, "samples": 2}
    assert plain["optimizer"]["proximal"] == 0
    assert projected["batches"] == {"name": "Representatives", "batch_size": 128, "samples": 2}
    assert projected["optimizer"]["proximal"] == hard["optimizer"]["proximal"] == 1e-3
    assert hard["batches"] == {**projected["batches"], "hard_classes": True}
    assert {each["training"]["seed"] for each in (plain, projected, hard)} == {1}
    assert plain["data"]["validation"] == 0
    one = run[found["by_length"]["Contrastive-hard"]["1"]["keys"][0]]
    assert one["batches"]["steps"] == 1


def test_page_and_redrawing(study, tables, tmp_path):
    folder, found = study
    kept = json.loads((folder / "profs-vectors.json").read_text(encoding="utf-8"))
    page = tables.tables(kept)
    assert page == tables.tables(found)
    assert "| Contrastive-hard | PROFS + HNCM |" in page
    assert "| mean over losses |" in page
    assert "| loss | M = 1 | M = 2 | M = 3 |" in page
    profs.draw(kept, tmp_path)
    for name in ("table", "projection"):
        file = f"profs-vectors-{name}.png"
        assert (tmp_path / file).read_bytes() == (folder / file).read_bytes()


def test_a_stopped_study_shows_what_is_there(vectors, tables, tmp_path):
    how = {"data": "vectors", "path": vectors, "seeds": 1, "steps": 2, "quick": True}
    found = profs.reproduce(tmp_path, **how, seconds=-1.0)
    assert found["runs"] == []
    assert found["table"]["Triplet-hard"]["plain"]["recall@1"] is None
    assert "| Triplet-hard | plain | - |" in tables.tables(found)
    found = profs.reproduce(tmp_path, **how, parts=("table",))
    assert len(found["runs"]) == 6
    assert found["by_length"] == {}
    assert "R@1 against M" not in tables.tables(found)
    with pytest.raises(ValueError, match="profs: parts must be one of"):
        profs.reproduce(tmp_path, **how, parts=("tables",))


def test_the_whole_plan_is_valid(vectors, tmp_path):
    """Every configuration of the table passes the checks that a run makes first, and its loss can be made."""
    how = {"data": "vectors", "path": vectors, "seeds": 3, "jobs": 1, "quick": False, "seconds": None}
    with open_study("profs", tmp_path, **how) as study:
        cells = profs._table_cells(study, profs.LOSSES, 10, 1e-3)
        assert len(cells) == 6 * 3 + 3
        keys = {trial.key for trials in cells.values() for trial in trials}
        assert len(keys) == 3 * len(cells)
        for trials in cells.values():
            parts.check(trials[0].config)
            parts.make_loss(trials[0].config, classes=8)


def test_no_run_repeats_another(study):
    """Runs that differ in settings differ in their scores and losses, also in a smoke test."""
    _, found = study
    courses = [json.dumps([line["scores"], line["journal"]["loss"], line["classes"]]) for line in found["runs"]]
    assert len(set(courses)) == len(courses)


def test_each_part_of_the_method_runs_alone(vectors, tables, tmp_path):
    """The ablation: its runs continue over several calls, and begin with three losses; the best checkpoint is kept."""
    how = {"data": "vectors", "path": vectors, "seeds": 2, "steps": 4, "quick": True, "checkpoints": 2}
    assert list(profs.FIRST | profs.LOSSES)[:3] == ["Contrastive-hard", "Triplet-hard", "Multi-similarity"]
    found = profs.reproduce(tmp_path, **how, parts=("ablation",), seconds=-1.0)
    assert found["runs"] == []
    found = profs.reproduce(tmp_path, **how, parts=("ablation",))
    assert len(found["runs"]) == 2 * 2 * 5
    run = {line["key"]: line for line in found["runs"]}
    cells = {name: run[each["keys"][0]] for name, each in found["table"]["Triplet-hard"].items()}
    options = {name: line["config"]["batches"] for name, line in cells.items()}
    base = {"name": "Representatives", "batch_size": 128, "samples": 2}
    assert options["HNCM"] == {**base, "hard_classes": True, "steps": 1, "all_pairs": True}
    assert options["projections"] == options["PROFS"] == base
    assert options["PROFS + HNCM"] == {**base, "hard_classes": True}
    proximal = {name: line["config"]["optimizer"]["proximal"] for name, line in cells.items()}
    assert proximal == {"plain": 0, "HNCM": 0, "projections": 0, "PROFS": 1e-3, "PROFS + HNCM": 1e-3}
    for line in found["runs"]:
        assert line["scores"]["best_recall@1"] >= line["scores"]["recall@1"]
    page = tables.tables(json.loads((tmp_path / "profs-vectors.json").read_text(encoding="utf-8")))
    assert "R@1, PROFS less projections" in page
    text = tables.summary([found])
    assert "| R@1 | plain | HNCM | projections | PROFS | PROFS + HNCM | PROFS + HNCM less PROFS |" in text
    assert "R@1 of the best of 2 checkpoints" in text


def test_the_rate_is_chosen_on_held_out_classes(vectors, tmp_path, monkeypatch):
    """The best mean over the baselines, and no run of the choice reads the test classes."""
    asked = []

    def run(trials, file, **how):
        asked.extend(trials)
        best = {1e-4: 0.2, 3e-4: 0.3, 1e-3: 0.6}
        return {each.key: _line(best[each.config.optimizer.lr]) for each in asked}

    monkeypatch.setattr(_training.grid, "run", run)
    how = {"data": "vectors", "path": vectors, "seeds": 3, "jobs": 1, "quick": False, "seconds": None}
    with open_study("profs", tmp_path, **how) as study:
        found = study.choose_rate(list(profs.LOSSES.values())[:2], study.per_class(128, 2), steps=5)
    assert found["rate"] == 1e-3
    assert found["held_out"] == {"0.0001": 20, "0.0003": 30, "0.001": 60}
    assert len(asked) == 6
    assert {each.held_out for each in asked} == {0.1}
    assert {each.config.batches.options["classes"] for each in asked} == {7}


def _line(recall):
    return {"scores": {"recall@1": recall}, "error": None, "seconds": 1.0}


def test_spread_and_verdict():
    assert spread([]) is None
    assert spread([2.0]) == {"values": [2.0], "mean": 2.0, "half": None}
    three = spread([1.0, 2.0, 3.0])
    assert three["half"] == pytest.approx(4.302653 / math.sqrt(3))
    assert verdict(three) == "cannot tell"
    assert verdict({"mean": 3.0, "half": 2.5}) == "better"
    assert verdict({"mean": -3.0, "half": 2.5}) == "worse"
    assert verdict({"mean": 3.0, "half": None}) == "cannot tell"
    with pytest.raises(ValueError, match="profs: seeds must be at least 1"):
        profs.reproduce("unused", seeds=0)


def test_an_axis_is_broken_where_a_fifth_of_it_is_empty():
    def parts_of(*means):
        return np.array(figures._parts([{"mean": mean, "half": 1.0} for mean in means]))

    assert parts_of(20, 70, 75) == pytest.approx(np.array([(17.575, 22.425), (67.575, 77.425)]))
    assert parts_of(70, 75, 72.5) == pytest.approx(np.array([(68.825, 76.175)]))
    assert figures._parts([{"mean": 50, "half": None}]) == [(49.975, 50.025)]


def test_an_interval_that_the_seeds_do_not_show_is_cut():
    usual = {"mean": 60.0, "half": 2.0, "values": [59.0, 61.0]}
    wild = {"mean": 41.0, "half": 33.0, "values": [33.0, 57.0, 33.0]}
    assert figures._height([usual]) == pytest.approx((58.5 - 1 / 16, 61.5 + 1 / 16))
    assert figures._height([usual, wild]) == pytest.approx((26 - 7 / 8, 68 + 7 / 8))


def test_cells_are_compared_seed_by_seed(tables):
    def cell(*values, runs=3):
        return {"recall@1": spread(values), "keys": list(range(runs))}

    cells = {"1": cell(60.0, 70.0, 80.0), "9": cell(61.0, 71.1, 80.9), "27": cell(59.0, 70.0), "91": cell()}
    expected = {"1": "-", "9": "+1.0 ± 0.2 (better)", "27": "-", "91": "-"}
    assert tables.differences_from("1", cells, "recall@1") == expected
    assert set(tables.differences_from("91", cells, "recall@1").values()) == {"-"}
