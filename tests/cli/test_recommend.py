"""`recommend`: it fits the data, cites measurements, and says when none were made on similar data."""

from __future__ import annotations

import runpy
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from nearfar.cli.recommend import Facts, Row, load_rows, recommend
from nearfar.runs._parts import check
from nearfar.train import parse

ROWS = (
    Row("a", 100, 10, 128, {"name": "DroTopK", "k": 160}, {"name": "MPerClass"}, 0.7, 0.6, 0.8, 3, "here"),
    Row("a", 100, 10, 128, {"name": "SupCon", "temperature": 0.1}, {"name": "MPerClass"}, 0.6, 0.5, 0.7, 3, "here"),
    Row(
        "b",
        10_000,
        5,
        128,
        {"name": "Margin", "margin": 0.2},
        {"name": "Representatives", "samples": 2, "rho": 6, "hard_classes": True},
        0.75,
        0.7,
        0.8,
        3,
        "there",
        {"proximal": 1e-3},
    ),
)


ROOT = Path(__file__).parents[2]


def labels(classes: int, each: int) -> np.ndarray:
    return np.repeat(np.arange(classes), each)


def test_the_best_row_of_the_nearest_data_is_cited_and_scaled():
    found = recommend(labels(120, 8), batch_size=64, rows=ROWS)
    assert found.config["loss"] == {"name": "DroTopK", "k": 80 * 60 // 64}  # 12 classes x 5 samples
    assert found.config["batches"] == {"name": "MPerClass", "classes": 12, "samples": 5}
    assert any("R@1 70.0 [60.0, 80.0] over 3 seeds, here" in reason for reason in found.reasons)


def test_projections_are_proposed_where_they_were_measured_best():
    found = recommend(labels(9_000, 5), batch_size=128, rows=ROWS)
    assert found.config["batches"]["name"] == "Representatives"
    assert found.config["batches"]["batch_size"] == 128
    assert found.config["optimizer"] == {"proximal": 1e-3}


def test_it_says_when_no_row_is_near():
    found = recommend(labels(3, 500), rows=ROWS)
    assert any("No measured row is near: the nearest data set is a" in reason for reason in found.reasons)
    assert found.config["loss"] == {"name": "NTXent", "temperature": 0.07}
    assert recommend(labels(3, 500), photographs=True, rows=ROWS).config["loss"]["name"] == "ProxyAnchor"
    assert found.config["batches"] == {"name": "MPerClass", "classes": 3, "samples": 5}


def test_memory_bounds_the_batch():
    found = recommend(labels(5_000, 10), batch_size=4096, memory=0.04, rows=())
    size = found.config["batches"]["classes"] * found.config["batches"]["samples"]
    assert 1030 <= size <= 1036
    assert any("more than 0.04 GB" in reason for reason in found.reasons)


def test_lone_classes_are_told():
    facts = Facts.of([0, 0, 1, 2, 2, 2])
    assert (facts.lone, facts.smallest, facts.largest) == (1, 1, 3)
    assert any("1 classes have one sample" in reason for reason in recommend([0, 0, 1, 2, 2, 2], rows=ROWS).reasons)


def test_one_class_is_an_error():
    with pytest.raises(ValueError, match="two classes or more, but 1 came"):
        recommend([0, 0])


@pytest.mark.parametrize("shape", [(20, 5), (1_600, 14), (10_000, 5), (2, 2), (400, 1)])
def test_what_is_proposed_is_a_configuration(shape):
    for rows in (ROWS, (), None):
        check(parse(recommend(labels(*shape), rows=rows).config))


def test_the_rows_of_the_package_name_files_of_the_repository():
    for row in load_rows():
        assert (ROOT / row.source).is_file(), row.source
        check(parse({"loss": row.loss, "batches": row.batches, "model": row.model, "optimizer": row.optimizer}))


def test_the_rows_of_the_package_are_those_of_the_results():
    made = runpy.run_path(str(ROOT / "benchmarks" / "quality" / "rows.py"))["rows"]()
    assert [asdict(row) for row in load_rows()] == made
    assert {row.data for row in load_rows()} == {"glyphs", "omniglot", "cub", "flowers"}
    assert [row.model for row in load_rows() if row.loss["name"] == "NPair"] == [{"normalize": False}] * 8


def test_plain_batches_are_proposed_where_projections_lead_by_less_than_the_seeds_tell():
    plain = replace(ROWS[2], batches={"name": "MPerClass", "classes": 64, "samples": 2}, optimizer={}, recall=0.72)
    near, far = replace(plain, high=0.71), replace(plain, high=0.69)
    found = recommend(labels(9_000, 5), rows=(*ROWS, near))
    assert found.config["batches"] == {"name": "MPerClass", "classes": 64, "samples": 2}
    assert "optimizer" not in found.config
    assert any("R@1 75.0 [70.0, 80.0]; the intervals meet" in reason for reason in found.reasons)
    assert recommend(labels(9_000, 5), rows=(*ROWS, far)).config["batches"]["name"] == "Representatives"
    other = replace(near, source="elsewhere")  # other steps, other network: not to be compared
    assert recommend(labels(9_000, 5), rows=(*ROWS, other)).config["batches"]["name"] == "Representatives"


def test_what_the_measured_network_needed_is_proposed_too():
    long = replace(ROWS[1], loss={"name": "NPair"}, recall=0.9, model={"normalize": False})
    found = recommend(labels(100, 10), rows=(*ROWS, long))
    assert found.config["model"] == {"normalize": False}
    assert found.reasons[-2] == "NPair, as measured."


def test_projections_ask_for_no_more_classes_than_there_are():
    found = recommend(labels(30, 5), rows=(replace(ROWS[2], classes=40),))
    assert found.config["batches"]["batch_size"] == 54  # three of thirty are held out
    assert found.reasons[2].startswith("The best result on data of this shape: Margin (margin 0.2) with")
