"""Weight on too few pairs is named in real runs that a small set spoils, nowhere else, and cured by its remedy."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from runs import config, journal, tiny, weights

from nearfar.data import DataSet, Tensors
from nearfar.doctor import Thresholds, diagnose_run, prescribe
from nearfar.doctor import _callback as callback
from nearfar.doctor._looks import Look, judge
from nearfar.doctor._remedies import Patient
from nearfar.runs import _parts as parts
from nearfar.train import fit

QUIET = Console(quiet=True)
NAME = "weight on too few pairs"
PAIRS = "effective pairs per row"
ROWS = 80


@functools.cache
def noisy(wrong):
    """Classes that differ in eight of 32 dimensions, and a share of wrong labels to learn from."""
    random = np.random.default_rng(0)

    def samples(count, wrong):
        labels = np.repeat(np.arange(count), 10)
        x = random.normal(size=(len(labels), 32))
        x[:, :8] = 0.3 * x[:, :8] + random.normal(size=(count, 8))[labels]
        x += 1.5  # features of a network lie on one side of zero, too
        bad = random.random(len(labels)) < wrong
        labels[bad] = random.integers(0, count, bad.sum())
        return Tensors(torch.from_numpy(x).float(), labels)

    return DataSet("noisy", samples(30, wrong), samples(30, 0.0), ks=(1,))


def trained(loss, wrong, folder):
    settings = config(
        loss=loss,
        data={"validation": 0.0},
        model={"name": "mlp", "embedding_dim": 32, "hidden": 64},
        batches={"name": "MPerClass", "classes": 16, "samples": 5},
        optimizer={"lr": 0.003, "warmup": 5},
        training={"steps": 120, "diagnose_every": 10, "evaluate_every": 120, "explain_every": 0, "baselines": False},
    )
    return fit(settings, folder, data=noisy(wrong), console=QUIET)


SPOILED = {
    "a small K": {"name": "DroTopK", "k": "B/8"},
    "a small gamma": {"name": "DroKL", "gamma": 0.03},
    "a large rho": {"name": "DroChiSquare", "rho": 4000.0 * ROWS},
    "the worst": {"name": "DroWorst"},
    "the hardest": {"name": "Triplet", "mining": "hardest", "margin": 0.2},
}
HEALTHY = {
    "K = 8B": {"name": "DroTopK", "k": "8B"},
    "K = 2B": {"name": "DroTopK", "k": "2B"},
    "each sign": {"name": "DroTopKPN", "k": "8B"},
    "gamma": {"name": "DroKL", "gamma": 0.3},
    "rho": {"name": "DroChiSquare", "rho": 40.0 * ROWS},
    **{
        name: {"name": name} for name in ("MultiSimilarity", "SupCon", "Contrastive", "ArcFace", "ProxyAnchor", "NPair")
    },
    "semi-hard": {"name": "Triplet", "mining": "semihard", "margin": 0.2},
    "hard": {"name": "Triplet", "mining": "hard", "margin": 0.2},
}


@pytest.mark.parametrize("loss", SPOILED.values(), ids=SPOILED)
def test_a_set_far_too_small_is_named_and_its_remedy_helps(loss, tmp_path):
    ill = trained(loss, 0.3, tmp_path / "ill")
    found = diagnose_run(tmp_path / "ill")
    assert NAME in found, found
    remedy = prescribe(tmp_path / "ill")
    assert remedy.finding.name == NAME
    cured = fit(remedy.config, tmp_path / "cured", data=noisy(0.3), console=QUIET)
    assert NAME not in diagnose_run(tmp_path / "cured")
    assert cured.test.recall[1] > ill.test.recall[1] + 0.05


@pytest.mark.parametrize("wrong", [0.0, 0.3])
@pytest.mark.parametrize("loss", HEALTHY.values(), ids=HEALTHY)
def test_health_is_left_in_peace(loss, wrong, tmp_path):
    trained(loss, wrong, tmp_path / "well")
    assert any(PAIRS in line for line in journal(tmp_path / "well"))
    assert NAME not in diagnose_run(tmp_path / "well")
    assert not any(NAME in line.get("doctor", {}) for line in journal(tmp_path / "well"))


def test_k_is_seen_in_the_looks(tmp_path):
    """K counts unordered pairs: half a batch of them are as many ordered pairs as rows."""
    fit(
        config(loss={"name": "DroTopK", "k": "B/2", "pair": "Logistic"}, training={"diagnose_every": 5}),
        tmp_path / "a",
        data=tiny(),
    )
    assert [line[PAIRS] for line in journal(tmp_path / "a") if PAIRS in line] == pytest.approx([1.0] * 4)


def test_a_space_that_has_not_moved_by_the_last_look_is_left_in_peace():
    run = Patient(config(loss={"name": "DroWorst"}, training={"steps": 90}), 9)
    for spreads, wanted in (([0.8] * 10, []), ([0.8] * 9 + [0.5], [NAME]), ([0.5] + [0.8] * 8 + [0.5], [])):
        looks = [Look(10 * i, spread, 9.0, 0.2, 0.2, pairs=0.01) for i, spread in enumerate(spreads)]
        assert [found.name for found in judge(looks, Thresholds(), run)] == wanted


@pytest.mark.parametrize("loss", [{"name": "Margin", "miner": "DistanceWeighted"}, {"name": "DroTopK", "k": 8}])
@pytest.mark.parametrize("memory", [0, 24])
def test_the_count_changes_no_draw(loss, memory, tmp_path):
    for folder, every in (("with", 3), ("without", 0)):
        plan = {"diagnose_every": every, "explain_every": 0, "cross_batch_memory": memory}
        fit(config(loss=loss, training=plan), tmp_path / folder, data=tiny(), console=QUIET)
    assert any(PAIRS in line for line in journal(tmp_path / "with"))
    first, second = weights(tmp_path / "with"), weights(tmp_path / "without")
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", parts.LOSSES)
def test_every_loss_has_a_count(name, tmp_path):
    needed = {
        "DroTopK": {"k": 8},
        "DroTopKPN": {"k": 8},
        "DroTrimmed": {"top": 2, "k": 8},
        "DroChiSquare": {"rho": 1.0},
        "SpreadFloor": {"loss": "SupCon"},
        "Nested": {"loss": "SupCon", "dims": [2, 3]},
        "Ladder": {"loss": "SupCon"},
    }
    needed["DroTrimmedPN"] = {"wrong": 0.2, "k": 8}
    settings = config(loss={"name": name, **needed.get(name, {})}, training={"steps": 1, "diagnose_every": 1})
    fit(settings, tmp_path / "run", data=tiny(), console=QUIET)
    (found,) = [line[PAIRS] for line in journal(tmp_path / "run") if PAIRS in line]
    assert found >= 0


@pytest.mark.parametrize(("rows", "counted"), [(1024, 2.0), (1025, None)])
def test_a_batch_is_large_beyond_a_million_triplets(rows, counted):
    loss = SimpleNamespace(explain=lambda *_, **__: SimpleNamespace(effective_pairs=torch.tensor(2.0 * rows)))
    training = SimpleNamespace(cross_batch_memory=0)
    state = SimpleNamespace(loss=loss, ids=lambda rows: rows, config=SimpleNamespace(training=training))
    labels = torch.arange(rows) // 2  # one positive each
    moment = SimpleNamespace(labels=labels, state=state, embeddings=torch.zeros(rows, 1), target=labels, indices=labels)
    assert callback._pairs_per_row(moment) == counted


def test_a_large_batch_is_not_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(callback, "MAX_TRIPLETS", 12 * 12 * 2 - 1)  # twelve rows, two positives each
    fit(config(training={"diagnose_every": 5}), tmp_path / "a", data=tiny(), console=QUIET)
    assert not any(PAIRS in line for line in journal(tmp_path / "a"))
