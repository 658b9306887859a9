"""Coverage of confidence intervals where the truth is known, and the error rate of `compare`."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch

import nearfar as nf
from nearfar.evaluation._bootstrap import Interval, intervals, resampled_means
from nearfar.evaluation._evaluate import Evaluation
from nearfar.evaluation._retrieval import PerQuery

SIMULATIONS = 400
RESAMPLES = 500


def problems(classes, spread, kind, seed):
    """Per-query results of SIMULATIONS draws of new classes: class effects, and noise within. The truth is 0.6.

    Gives for each the values [n, 1] and the class [n] of each query; classes differ in size.
    """
    rng = np.random.default_rng(seed)
    for _ in range(SIMULATIONS):
        groups = np.repeat(np.arange(classes), rng.integers(4, 25, classes))
        if kind == "right or wrong":
            a, b = 0.6 / spread, 0.4 / spread
            level = rng.beta(a, b, classes)
            values = (rng.random(len(groups)) < level[groups]).astype(float)
        else:
            values = 0.6 + (rng.standard_normal(classes) * spread)[groups] + 0.2 * rng.standard_normal(len(groups))
        yield values[:, None], groups


def coverage(unit, simulations=SIMULATIONS, **given):
    hits = 0
    for i, (values, groups) in enumerate(islice(problems(**given), simulations)):
        (found,) = intervals(values, groups, unit=unit, resamples=RESAMPLES, seed=i)
        hits += found.low <= 0.6 <= found.high
    return hits / simulations


@pytest.mark.parametrize("classes", [40, 100])
@pytest.mark.parametrize(("kind", "spread"), [("right or wrong", 0.3), ("right or wrong", 0.05), ("shares", 0.15)])
def test_classes_cover_the_truth(classes, kind, spread):
    assert 0.92 <= coverage("class", classes=classes, kind=kind, spread=spread, seed=classes) <= 0.98


def test_queries_are_too_narrow_where_classes_differ():
    """What the interval over queries says of other classes is wrong: it holds the truth far too rarely."""
    assert coverage("query", 100, classes=40, kind="right or wrong", spread=0.3, seed=1) < 0.8


def test_queries_cover_where_classes_do_not_differ():
    rng = np.random.default_rng(0)
    hits = 0
    for i in range(SIMULATIONS):
        values = (rng.random((200, 1)) < 0.6).astype(float)
        (found,) = intervals(values, np.zeros(200), unit="query", resamples=RESAMPLES, seed=i)
        hits += found.low <= 0.6 <= found.high
    assert 0.92 <= hits / SIMULATIONS <= 0.98


def evaluation(rank, labels):
    """An evaluation that holds nothing but ranks."""
    rank, labels = torch.from_numpy(rank), torch.from_numpy(labels)
    ones = torch.ones(len(rank), dtype=torch.float64)
    found = PerQuery(rank, ones, ones, ones.long(), labels)
    return Evaluation(
        {}, 0.0, 0.0, 0.0, 0.0, None, None, None, {}, (), len(rank), 0, len(labels.unique()), "class", found
    )


def pairs(gap, seed, classes=50):
    """Two spaces on the same new classes, SIMULATIONS times: what they share, what they do not, and a gap."""
    rng = np.random.default_rng(seed)
    for _ in range(SIMULATIONS):
        labels = np.repeat(np.arange(classes), rng.integers(4, 25, classes))
        shared, own = rng.standard_normal(classes), 0.4 * rng.standard_normal((2, classes))
        level = 1 / (1 + np.exp(-(0.4 + shared + own)))
        level = np.clip(level + np.array([[-gap / 2], [gap / 2]]), 0, 1)
        rank = np.where(rng.random((2, len(labels))) < level[:, labels], 1, 2)
        yield evaluation(rank[0], labels), evaluation(rank[1], labels)


def verdicts(gap, seed):
    return [nf.compare(a, b, resamples=RESAMPLES, seed=i) for i, (a, b) in enumerate(pairs(gap, seed))]


def test_compare_cannot_tell_where_there_is_nothing_to_tell():
    found = verdicts(gap=0.0, seed=0)
    share = np.mean([v.verdict == "cannot tell" for v in found])
    assert 0.92 <= share <= 0.98
    wrong = [v.verdict for v in found if v.verdict != "cannot tell"]
    assert {"better", "worse"} == set(wrong)  # it errs to either side


def test_compare_finds_a_gap_of_two_standard_errors():
    error = np.std([v.difference.value for v in verdicts(gap=0.0, seed=1)], ddof=1)
    found = verdicts(gap=2 * error, seed=2)
    assert np.mean([v.difference.value for v in found]) == pytest.approx(2 * error, rel=0.1)
    assert np.mean([v.verdict == "better" for v in found]) >= 0.45
    assert np.mean([v.verdict == "worse" for v in found]) <= 0.01


def test_the_error_is_that_of_new_samples():
    values = [v.difference for v in verdicts(gap=0.0, seed=3)]
    assert np.mean([v.error for v in values]) == pytest.approx(np.std([v.value for v in values]), rel=0.12)


def test_means_are_those_of_the_classes_drawn():
    """Two classes of one query each, 0 and 1: a draw holds both, or one of them twice."""
    means = resampled_means(np.array([[0.0], [1.0]]), np.array([3, 8]), resamples=4000, seed=0)
    values, counts = np.unique(means, return_counts=True)
    assert values.tolist() == [0.0, 0.5, 1.0]
    np.testing.assert_allclose(counts / 4000, [0.25, 0.5, 0.25], atol=0.03)


def test_a_large_class_counts_by_its_queries():
    values = np.array([[1.0]] * 9 + [[0.0]])
    (found,) = intervals(values, np.array([0] * 9 + [1]))
    assert found.value == 0.9


def test_few_classes_reach_as_far_as_a_t_interval():
    """Five classes of one query each: the ends are those of Student's t, not the normal's."""
    values = np.array([[0.1], [0.4], [0.5], [0.7], [0.8]])
    (found,) = intervals(values, np.arange(5), resamples=200_000)
    error = values.std(ddof=1) / np.sqrt(5)
    assert found.error == pytest.approx(error, rel=0.02)
    assert (found.high - found.low) / 2 == pytest.approx(2.776 * error, rel=0.12)
    assert values.min() <= found.low < found.high <= values.max()


def test_seeded():
    rng = np.random.default_rng(0)
    values, groups = rng.random((50, 2)), np.arange(50) // 5
    assert intervals(values, groups, seed=4) == intervals(values, groups, seed=4)
    assert intervals(values, groups, seed=4) != intervals(values, groups, seed=5)


def test_a_wider_level_is_a_wider_interval():
    rng = np.random.default_rng(0)
    values, groups = rng.random((200, 1)), np.arange(200) // 5
    (narrow,), (wide,) = (intervals(values, groups, level=level) for level in (0.5, 0.99))
    assert wide.low < narrow.low < narrow.high < wide.high


def test_one_unit_says_nothing_of_the_spread():
    (found,) = intervals(np.array([[1.0], [0.0]]), np.array([5, 5]))
    assert found.value == 0.5
    assert np.isnan([found.low, found.high, found.error]).all()


def test_interval_reads_well():
    assert str(Interval(0.5, 0.41, 0.6, 0.05)) == "0.5000 [0.4100, 0.6000]"


@pytest.mark.parametrize("given", [{"level": 1.0}, {"level": 0}, {"unit": "sample"}])
def test_errors(given):
    with pytest.raises(ValueError, match="bootstrap"):
        intervals(np.ones((3, 1)), np.arange(3), **given)


def test_weights_count_as_copies():
    """A row of weight 3 is the same as three rows; few heavy units make the interval wider."""
    rng = np.random.default_rng(0)
    values, counts = rng.random((30, 2)), rng.integers(1, 6, 30)
    copies, groups = np.repeat(values, counts, axis=0), np.repeat(np.arange(30), counts)
    ours = resampled_means(values, np.arange(30), counts=counts.astype(float), resamples=50)
    assert ours == pytest.approx(resampled_means(copies, groups, resamples=50))
    even, heavy = (
        intervals(values, np.arange(30), counts=w)[0] for w in (np.ones(30), np.r_[np.full(3, 50.0), np.ones(27)])
    )
    assert even == pytest.approx(intervals(values, np.arange(30))[0])
    assert heavy.high - heavy.low > 1.5 * (even.high - even.low)
    assert heavy.value == pytest.approx(np.average(values[:, 0], weights=np.r_[np.full(3, 50.0), np.ones(27)]))
