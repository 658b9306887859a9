"""Scores as probabilities: known log-odds, monotone maps, and the choice between two kinds."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

import nearfar as nf
from nearfar.evaluation import _probability as probability


def listed(odds, classes=40, count=4000, seed=0):
    """Pairs with uniform scores, positive with the probability that `odds` says."""
    rng = np.random.default_rng(seed)
    scores = rng.uniform(-1, 1, count)
    same = rng.random(count) < 1 / (1 + np.exp(-odds(scores)))
    first = rng.integers(classes, size=count)
    second = np.where(same, first, (first + rng.integers(1, classes, count)) % classes)
    return scores, same, np.stack([first, second], axis=1)


def test_logistic_odds_are_found():
    found = nf.evaluate_pairs(*listed(lambda s: 3 * s), far=0.1)
    places = np.linspace(-0.9, 0.9, 7)
    assert found.probability(places) == pytest.approx(1 / (1 + np.exp(-3 * places)), abs=0.06)


def test_steps_are_isotonic():
    """Odds that are flat in between cannot be logistic."""
    found = nf.evaluate_pairs(*listed(lambda s: np.where(s < -0.5, -4.0, np.where(s < 0.6, 0.0, 4.0))), far=0.1)
    assert found.kind == "isotonic"
    assert found.probability([-0.7, 0.0, 0.9]) == pytest.approx([0.02, 0.5, 0.98], abs=0.06)


def test_prior_follows_bayes():
    found = nf.evaluate_pairs(*listed(lambda s: 3 * s), far=0.1)
    even = found.probability([0.3])[0]
    assert found.probability([0.3], prior=0.01)[0] == pytest.approx(0.01 * even / (0.01 * even + 0.99 * (1 - even)))
    with pytest.raises(ValueError, match="prior must lie between 0 and 1"):
        found.probability([0.3], prior=0)


def test_probability_never_falls():
    found = nf.evaluate_pairs(*listed(lambda s: 3 * s + 2 * np.sin(9 * s)), far=0.1)
    shown = found.probability(np.linspace(-5, 5, 1001))
    assert (np.diff(shown) >= 0).all()
    assert 0 < shown[0] < shown[-1] < 1


def test_fits_equal_sklearn():
    """Isotonic regression at the middle of its blocks, and logistic regression without a penalty."""
    scores, same, _ = listed(lambda s: 4 * s + 1)
    edges = np.linspace(-1, 1, 201)
    places = (edges[1:] + edges[:-1]) / 2
    counts = [np.histogram(scores[same == kind], edges)[0] for kind in (True, False)]
    weights = np.where(same, 0.5 / same.sum(), 0.5 / (~same).sum())
    middle = places[np.clip(np.searchsorted(edges, scores) - 1, 0, 199)]
    theirs = IsotonicRegression().fit(middle, same, sample_weight=weights)
    knots = probability.fit("isotonic", places, *counts)
    inner = knots[np.abs(knots[:, 1]) < np.log(2 * min(same.sum(), (~same).sum()))]
    assert 1 / (1 + np.exp(-inner[:, 1])) == pytest.approx(theirs.predict(inner[:, 0]), abs=1e-6)
    line = LogisticRegression(C=1e9, tol=1e-9).fit(middle[:, None], same, sample_weight=weights * len(same))
    ours = probability.log_odds(probability.fit("logistic", places, *counts), np.array([-0.5, 0.5]))
    assert ours == pytest.approx(line.decision_function([[-0.5], [0.5]]), abs=0.02)


def test_separable_scores_stay_finite():
    same = np.repeat([True, False], 50)
    found = nf.evaluate_pairs(np.where(same, 0.9, 0.1), same, far=0.1)
    low, high = found.probability([0.1, 0.9])
    assert 0 < low < 0.1
    assert 0.9 < high < 1


def test_one_score_for_all_says_nothing():
    found = nf.evaluate_pairs(np.zeros(40), np.arange(40) % 2, far=0.1)
    assert found.probability([0.0])[0] == pytest.approx(0.5, abs=0.01)


def test_the_choice_is_by_classes_that_were_held_out():
    """Isotonic fits each half better than logistic, and loses on the other half."""
    places = np.linspace(-1, 1, 64)
    rng = np.random.default_rng(0)
    share = 1 / (1 + np.exp(-3 * places))
    positive, negative = (np.stack([rng.binomial(3, side) for _ in range(3)]) for side in (share, 1 - share))
    kind, _ = probability.choose(places, positive, negative)
    own = [probability.log_loss(probability.fit(k, places, positive[1], negative[1]), places, positive[1], negative[1])
           for k in ("isotonic", "logistic")]  # fmt: skip
    assert own[0] < own[1]
    assert kind == "logistic"
