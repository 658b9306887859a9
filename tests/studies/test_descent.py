"""The study of gradient descent: its numbers are the published ones, its errata hold, its pictures are drawn."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from oracles import descent as oracle

from nearfar.studies import _descent_runs as runs
from nearfar.studies._descent_errata import Triplet, draws, errata
from nearfar.studies._descent_rivals import hyperplanes, interval, near_triplets
from nearfar.studies.descent import reproduce

PICTURES = ("surface", "appendix", "bounds", "extensions", "saddles", "rivals")


def test_reproduce_writes_pictures_and_numbers(tmp_path):
    found = reproduce(tmp_path / "new" / "folder", quick=True)
    for name in PICTURES:
        data = (tmp_path / "new" / "folder" / f"descent-{name}.png").read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) > 10_000
    kept = json.loads((tmp_path / "new" / "folder" / "descent.json").read_text(encoding="utf-8"))
    assert set(kept) == {*PICTURES, "hyperplanes", "errata"} == set(found)
    assert set(kept["extensions"]) == {"alpha", "mu", "n", "d", "reference", "ccp", "sgd"}
    assert kept["errata"] == json.loads(json.dumps(kept["errata"]))
    _check_extensions(found["extensions"])


def _check_extensions(found):
    for group in ("alpha", "mu", "d", "ccp"):
        for run in found[group].values():
            assert all(after <= before for before, after in itertools.pairwise(run["value"]))
    assert max(found["n"]["1/λmax(S), not safe"]["value"]) > found["n"]["safe"]["value"][0]
    for run in found["d"].values():
        assert run["value"][-1] >= found["reference"] * (1 - 1e-9)


def test_the_published_run():
    """The appendix: f₀, and f after 20 steps for each rule; η̂ after five."""
    found = runs.appendix()["runs"]
    assert found["1/M_g printed"]["value"][0] == pytest.approx(0.733932, abs=1e-6)
    ends = {name: run["value"][20] for name, run in found.items()}
    assert ends["1/M_g printed"] == pytest.approx(0.2341, abs=5e-5)
    assert ends["1/M_g true"] == pytest.approx(0.0796, abs=1e-4)
    assert ends["1/M_f printed"] == pytest.approx(0.0795, abs=1e-4)
    assert ends["1/M_f true"] == pytest.approx(ends["1/M_f printed"], rel=1e-9)
    assert found["1/(2qλmax), stable form"]["value"][5] == pytest.approx(3.5e-24, rel=0.01)
    broken = runs.appendix()["counterexample"]
    assert broken["1/M_g printed"]["value"][1] > 5 > 1 > broken["1/M_g true"]["value"][0]
    assert broken["1/M_g true"]["value"] == sorted(broken["1/M_g true"]["value"], reverse=True)


def test_the_fastest_run_falls_exponentially_in_log_space():
    """The caption of Figure 2 says quadratic: -log f grows by (1 + |λmin|/λmax)² a step."""
    values = runs.appendix()["runs"]["1/(2qλmax), stable form"]["value"][3:8]
    growth = [math.log(after) / math.log(before) for before, after in itertools.pairwise(values)]
    low, *_, top = np.linalg.eigvalsh(runs.appendix_triplet().b)
    assert growth == pytest.approx([(1 - low / top) ** 2] * len(growth), rel=1e-3)


def test_the_surface_is_a_saddle():
    """Figure 1: f falls along one direction about as much as it rises along the other."""
    low, high = runs.surfaces(3)["eigenvalues"]
    assert 0.8 < -low / high < 1.25


def test_the_corrected_bounds_hold_on_the_run():
    found = runs.bounds()
    for norm, frobenius, spectral in zip(
        *(found[k] for k in ("iterate", "iterate Frobenius", "iterate spectral")), strict=True
    ):
        assert norm <= spectral * (1 + 1e-9)
        assert norm <= frobenius * (1 + 1e-9)
    assert all(fall >= true - 1e-12 for fall, true in zip(found["fall"], found["fall true"], strict=True))
    assert any(fall < printed - 1e-3 for fall, printed in zip(found["fall"], found["fall printed"], strict=True))
    assert found["value"] == pytest.approx(found["value from the sum of b"], rel=1e-9)


def test_every_counterexample_counts():
    table = errata(300)
    assert table["(18)"]["ratio"] == pytest.approx(0.5)
    assert table["Hess g"]["relative_error"] > 0.99
    assert table["(23)"]["hessian_over_printed"] > 1000
    assert table["(29)"]["hessian_over_printed"] == pytest.approx(2980, abs=1)
    assert table["after (29)"]["growth_from_t_10_to_100"] == pytest.approx(100, rel=1e-3)
    assert table["step 1/M_g"]["rise"] > 4
    for where, shares in {"(23)": 0.3, "(29)": 0.1, "2.9": 0.2}.items():
        assert table[where]["violated"] > shares
        assert table[where]["true_violated"] == 0
    assert table["step 1/M_g"]["raised_for_small_w"] > 0.2
    assert table["step 1/M_g"]["true_raised_for_small_w"] == 0
    assert table["2.7"]["cubic"] < 0
    assert table["η̂"]["largest_eigenvalue"] <= 0
    assert table["b_η̂ ≤ 0"]["raised"] == 0
    assert table["2.5"]["above"] == 0


def test_the_table_computes_what_it_names():
    """Its Hessians against those of plain loops and of differences; its printed bounds against the oracle's."""
    for case in draws(20, seed=5):
        wanted = oracle.triplet_hessian(case.w[None], case.u[None], case.v[None], 0.0, 1.0).astype(float)
        assert np.allclose(case.hessian(), wanted, atol=1e-9 * np.abs(wanted).max() + 1e-12)
        assert case.printed_m_f() == pytest.approx(oracle.printed_m_f(case.w, case.u, case.v))
        assert case.printed_m_g() == pytest.approx(oracle.printed_m_g(case.w, case.u, case.v))
        # Hess g = Hess f + Hess h, Hess h = 2vv'
        assert np.allclose(case.hessian_g(), case.hessian() + 2 * np.outer(case.v, case.v), rtol=1e-9, atol=1e-9)
        moved = case.at(case.w - 0.1 * case.gradient)
        change = moved.w @ case.b @ moved.w - case.w @ case.b @ case.w
        assert case.change(0.1) == pytest.approx(change, rel=1e-6, abs=1e-9)
    assert Triplet(np.eye(2)[0], np.eye(2)[1], np.ones(2)).value() == pytest.approx(math.log(2))


def test_the_rate_of_steps_by_the_true_m_g():
    """Khamaru and Wainwright: with steps of 1/M_g, f falls by (η/2)|∇f|² or more; so min |∇f|² <= 2(f_0 - f)/(Σ η)."""
    case = runs.appendix_triplet()
    run = runs.appendix()["runs"]["1/M_g true"]
    total = 0.0
    for t, (before, after) in enumerate(itertools.pairwise(run["value"])):
        eta = 1 / case.true_m_g()
        total += eta
        assert before - after >= eta / 2 * run["gradient"][t] * (1 - 1e-9)
        assert min(run["gradient"][: t + 1]) <= 2 * (run["value"][0] - after) / total * (1 + 1e-9)
        case = case.at(case.w - eta * case.gradient)


def test_hyperplanes_are_compared():
    found = hyperplanes(2, 10)
    assert set(found) == {"triplet, hinge", "triplet, logistic", "hinge, logistic"}
    assert all(0 <= value <= 1 for each in found.values() for value in each["values"])
    assert found["hinge, logistic"]["mean"] > 0.8  # both machines separate the same classes


def test_saddles_are_strict_and_left():
    found = runs.saddles(60)
    assert found["eigenvalues at 0"][0] == pytest.approx(-1.44)
    assert found["eigenvalues on ker B"][0] == pytest.approx(-1.44)
    assert found["runs"]["0 + 0.01"][-1] < 0.1
    assert found["runs"]["ker B + 0.01"][-1] < 0.4


def test_triplets_of_the_comparison():
    x = np.array([[0.0], [0.1], [0.3], [1.0], [1.2], [1.5]])
    u, v = near_triplets(x, np.array([0, 0, 0, 1, 1, 1]), targets=2, impostors=1)
    assert u.shape == v.shape == (12, 1)
    assert u[:2, 0].tolist() == pytest.approx([-0.1, -0.3])
    assert v[:2, 0].tolist() == pytest.approx([-1.0, -1.0])
    wide = interval([0.8, 0.9, 1.0])
    assert wide["mean"] == pytest.approx(0.9)
    assert wide["half"] == pytest.approx(4.3027 * 0.1 / math.sqrt(3), rel=1e-4)
