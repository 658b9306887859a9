"""The studies of DRO and of wrong labels: plans as in Qi et al. 2020, numbers of the runs, pictures, pages."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from nearfar.runs import _parts as parts
from nearfar.studies import dro, noise
from nearfar.studies._training import open_study


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
    """40 classes of 5 vectors; half of them are for the test."""
    path = tmp_path_factory.mktemp("data") / "vectors.npz"
    random = np.random.default_rng(0)
    y = np.repeat(np.arange(40), 5)
    np.savez(path, x=random.normal(size=(40, 8))[y] + 0.8 * random.normal(size=(len(y), 8)), y=y)
    return str(path)


def test_dro(vectors, tables, tmp_path):
    found = dro.reproduce(tmp_path, data="vectors", path=vectors, seeds=1, steps=2, quick=True)
    # K = 2B at the largest batch is a run of the first figure, and so is DRO-TopK of the first table
    assert len(found["runs"]) == 2 * 4 + 2 + 4 + 3
    assert not [line["error"] for line in found["runs"] if line["error"]]
    for name in ("imbalance", "k"):
        assert (tmp_path / f"dro-vectors-{name}.png").read_bytes().startswith(b"\x89PNG")
    kept = json.loads((tmp_path / "dro-vectors.json").read_text(encoding="utf-8"))
    assert found["by_k"]["320"]["keys"] == found["imbalance"]["DRO-TopK"]["160"]["keys"]
    # 20 classes: 16 x 5 rows, and all 20 x 5 where 160 are asked for
    assert kept["ratios"]["80"] == pytest.approx(4 / 75, rel=1e-6)
    assert kept["ratios"]["160"] == pytest.approx(4 / 95, rel=1e-6)
    page = tables.tables(kept)
    assert page == tables.tables(found)
    assert "| method | B = 80 (1 : 19) | B = 160 (1 : 24) |" in page
    assert "| DRO-KL-G, γ = 0.1 beats LS |" in page
    assert "| HAP2S |" in page
    # one seed never has a verdict
    assert {each["difference"]["verdict"] for each in found["claims"]} == {"cannot tell"}
    run = {line["key"]: line["config"] for line in kept["runs"]}
    assert {run[each["keys"][0]]["model"]["embedding_dim"] for each in kept["grouped"].values()} == {64}


def test_the_whole_plan_of_dro_is_valid(vectors, tmp_path):
    how = {"data": "vectors", "path": vectors, "seeds": 1, "jobs": 1, "quick": False, "seconds": None}
    with open_study("dro", tmp_path, **how) as study:
        for size in dro.SIZES:
            methods = (*dro.imbalance_methods(size).values(), *dro.variants(size).values())
            for method in (*methods, *dro.grouped_methods().values()):
                config = study.config(method, study.per_class(size, 5), steps=1, rate=1e-3)
                parts.check(config)
                parts.make_loss(config, classes=8)
            assert method.loss["gamma"] == 0.001
            assert dro.imbalance_methods(size)["DRO-TopK"].loss["k"] == 2 * size
            assert dro.imbalance_methods(size)["DRO-KL, sampled"].loss["samples"] == 4 * size
    assert list(dro.grouped_methods()) == ["MS", "LS", *(f"DRO-KL-G, γ = {g}" for g in ("1", "0.1", "0.01", "0.001"))]


def test_the_losses_are_the_papers(vectors, tmp_path):
    """LS is eq. (3), and semi-hard mining is the band of pairs below λ with the margin loss (section 4.2.2)."""
    x, y = nn.functional.normalize(torch.randn(12, 4, dtype=torch.float64), dim=1), torch.arange(12) % 3
    how = {"data": "vectors", "path": vectors, "seeds": 1, "jobs": 1, "quick": False, "seconds": None}
    with open_study("dro", tmp_path, **how) as study:

        def value(method):
            config = study.config(method, study.per_class(80, 5), steps=1, rate=1e-3)
            return float(parts.make_loss(config, classes=3)(x, y))

        s, positive = x @ x.T, (y[:, None] == y) & ~torch.eye(12, dtype=torch.bool)
        negative = y[:, None] != y
        pull, push = (torch.where(mask, sign * s, -torch.inf).logsumexp(1) for mask, sign in
                      ((positive, -1), (negative, 1)))  # fmt: skip
        assert value(dro.LIFTED) == pytest.approx(float(torch.relu(pull + push).mean()))
        band = positive | (negative & (s > 0.3) & (s < 0.5))
        hinge = torch.relu(0.2 + torch.where(positive, 1, -1) * (0.5 - s))
        assert value(dro.imbalance_methods(80)["semi-hard"]) == pytest.approx(float(hinge[band].mean()))


def test_the_parts_of_dro(vectors, tables, tmp_path):
    """Another width has files of its own, the best checkpoint stands beside the last, and Figure 3 is drawn."""
    how = {"data": "vectors", "path": vectors, "seeds": 1, "steps": 4, "quick": True}
    found = dro.reproduce(tmp_path, **how, parts=("imbalance", "time"), width=5, checkpoints=2)
    assert {line["config"]["model"]["embedding_dim"] for line in found["runs"]} == {5}
    assert sorted(file.name for file in tmp_path.glob("*.png")) == [
        "dro-vectors-5-imbalance.png",
        "dro-vectors-5-time.png",
    ]
    for line in found["runs"]:
        scores = line["scores"]
        assert scores["best_step"] in (2, 4)
        assert scores["best_recall@1"] >= scores["recall@1"]
        assert scores["best_step"] != 4 or scores["best_recall@1"] == scores["recall@1"]
    assert list(found["time"][0]["ms"]) == [
        "DRO-TopK",
        "DRO-TopK-PN",
        "DRO-KL",
        "semi-hard",
        "distance-weighted",
        "MS",
        "LS",
    ]
    page = tables.tables(json.loads((tmp_path / "dro-vectors-5.json").read_text(encoding="utf-8")))
    assert "The same of the best checkpoint:" in page
    assert "| ms, forward + backward | B = 80 | B = 160 |" in page
    with pytest.raises(ValueError, match="dro: parts must be one of"):
        dro.reproduce(tmp_path, **how, parts=("table",))


def test_noise(vectors, tables, tmp_path):
    found = noise.reproduce(tmp_path, data="vectors", path=vectors, seeds=2, steps=2, quick=True)
    assert len(found["runs"]) == 3 * 2 * 2
    assert not [line["error"] for line in found["runs"] if line["error"]]
    assert found["wrong"]["0"] == 0
    assert 0.3 < found["wrong"]["0.4"] <= 0.4
    assert (tmp_path / "noise-vectors.png").read_bytes().startswith(b"\x89PNG")
    score = {line["key"]: 100 * line["scores"]["recall@1"] for line in found["runs"]}
    row = found["table"]["Contrastive"]
    clean, dirty = ([score[key] for key in row[share]["keys"]] for share in ("0", "0.4"))
    assert found["loss_of_recall"]["Contrastive"]["values"] == pytest.approx(np.subtract(dirty, clean))
    kept = json.loads((tmp_path / "noise-vectors.json").read_text(encoding="utf-8"))
    assert "| loss | R@1, 0% wrong | R@1, 40% wrong | 40% less 0% | failed |" in tables.tables(kept)


def test_the_whole_plan_of_noise_is_valid(vectors, tmp_path):
    assert len(noise.LOSSES) == 10
    how = {"data": "vectors", "path": vectors, "seeds": 1, "jobs": 1, "quick": False, "seconds": None}
    with open_study("noise", tmp_path, **how) as study:
        for method in noise.LOSSES.values():
            config = study.config(method, study.per_class(128, 4), steps=1, rate=1e-3)
            parts.check(config)
            parts.make_loss(config, classes=8)
